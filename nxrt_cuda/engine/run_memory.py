"""What the outputs of one run lie in, for as long as nothing has overwritten them."""

from __future__ import annotations

from typing import Any

from nxrt_cuda.tensor import MemoryOwner

__all__ = ["Run", "RunMemory"]


class Run:
    """One run of a bucket.

    Attributes:
        is_over: whether a later one has begun.
    """

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


class RunMemory:
    """Memory of an engine that is as good as freed once a later run overwrites it.

    Args:
        memory: what the outputs lie in.
        run: the run that wrote them.
        name: of the bucket, for messages.
    """

    __slots__ = ("__weakref__", "_memory", "_name", "_run", "nbytes", "pins", "ptr", "runtime")

    def __init__(self, memory: MemoryOwner, run: Run, name: str) -> None:
        self._memory = memory
        self._run = run
        self._name = name
        self.runtime = memory.runtime
        self.ptr = memory.ptr
        self.nbytes = memory.nbytes
        self.pins = memory.pins

    @property
    def is_freed(self) -> bool:
        return self._run.is_over or self._memory.is_freed

    @property
    def usable_in(self) -> Any:
        return None if self._run.is_over else self._memory.usable_in

    @property
    def fate(self) -> str:
        return f"overwritten by a later run of {self._name}" if self._run.is_over else self._memory.fate

    def free(self) -> None:
        self._memory.free()
