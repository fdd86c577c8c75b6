"""Where buffers lie in one block of memory, when each is needed for a part of a sequence only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nxrt_cuda.launch import div_up

__all__ = ["Lifetime", "place"]

_ALIGNMENT = 256


@dataclass(frozen=True)
class Lifetime:
    """A buffer, and the steps from its first write to its last read, both included.

    Two buffers of one step never share memory, so that no kernel reads what it overwrites.
    """

    name: str
    nbytes: int
    first: int
    last: int

    @property
    def footprint(self) -> int:
        """Bytes taken: a multiple of 256, and never none, so that an empty tensor lies inside no other."""
        return div_up(max(self.nbytes, 1), _ALIGNMENT) * _ALIGNMENT

    def meets(self, other: Lifetime) -> bool:
        """Whether both are needed at once."""
        return self.first <= other.last and other.first <= self.last


def place(lifetimes: Iterable[Lifetime]) -> tuple[dict[str, int], int]:
    """An offset for each buffer, such that no two that are needed at once overlap, and the bytes of the whole.

    The largest first, each at the lowest offset that is free while it is needed ("greedy by size", Pisarchyk
    and Lee 2020, arXiv:2001.03288).
    """
    offsets: dict[str, int] = {}
    placed: list[Lifetime] = []
    end = 0
    for buffer in sorted(lifetimes, key=lambda buffer: (-buffer.footprint, buffer.first)):
        offset = 0
        for other in sorted(filter(buffer.meets, placed), key=lambda other: offsets[other.name]):
            if offset + buffer.footprint <= offsets[other.name]:
                break
            offset = max(offset, offsets[other.name] + other.footprint)
        offsets[buffer.name] = offset
        placed.append(buffer)
        end = max(end, offset + buffer.footprint)
    return offsets, end
