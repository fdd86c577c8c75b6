"""Objects that stand for something of this process: a device's memory, a driver's handle."""

from __future__ import annotations

from typing import ClassVar, NoReturn, SupportsIndex

__all__ = ["ProcessBound"]


class ProcessBound:
    """Can be neither pickled nor copied; says so in place of what cannot be pickled of its parts.

    A copy would be a second owner, which gives back what the first still uses.

    Attributes:
        INSTEAD: what to do about it.
    """

    __slots__ = ()

    INSTEAD: ClassVar[str] = "make another where you need it"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled or copied, for it belongs to this process; {self.INSTEAD}")
