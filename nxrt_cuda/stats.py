"""Counters: plain mutable ones inside, frozen snapshots outside."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

__all__ = ["RuntimeCounters", "RuntimeStats", "StatsTable", "WorkspaceLedger", "WorkspaceStats", "format_table"]


def format_table(title: str, rows: Mapping[str, object]) -> str:
    """``rows`` as aligned text under ``title``."""
    width = max((len(name) for name in rows), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())])


class StatsTable:
    """Base of a dataclass of counters that prints as a table."""

    TITLE: ClassVar[str]

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return format_table(self.TITLE, {name: _value_text(name, value) for name, value in values.items()})


def _value_text(name: str, value: Any) -> str:
    if name.endswith("_ptr"):
        return f"0x{value:x}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class RuntimeStats(StatsTable):
    """What a runtime has done since it was opened.

    Attributes:
        launches: kernels handed to the driver, recorded ones included.
        empty_launches: launches with a zero grid, which reach no driver.
        driver_allocations, driver_frees: calls that took or returned device memory.
        live_bytes: device memory held from the driver, in use or pooled.
        pool_hits: allocations served without the driver.
        pool_retained_bytes: free memory kept for reuse.
        deferred_bytes: memory given up that goes back once queued work is done; kept if the context is lost.
        htod_copies, dtoh_copies, dtod_copies: copies by direction; ``*_bytes`` their bytes.
        async_copies: those of them that ran on the transfer stream.
        memsets: device memory fills.
        modules_compiled: specialisations compiled by NVRTC (or prepared for the host driver).
        program_cache_hits: specialisations found in the disk cache.
        compile_seconds: time spent compiling.
        graphs_captured: segments recorded to an executable graph.
        graph_replays: segments launched.
        graph_rebinds: times that a graph was given other tensors or numbers.
        forks: stretches of work with branches.
        aborted_captures: captures that ended without a graph.
        synchronizations: ``synchronize()``, and what ``eager_sync`` waited for; reads wait too and are not counted.
    """

    TITLE = "runtime"

    launches: int = 0
    empty_launches: int = 0
    driver_allocations: int = 0
    driver_frees: int = 0
    live_bytes: int = 0
    pool_hits: int = 0
    pool_retained_bytes: int = 0
    deferred_bytes: int = 0
    htod_copies: int = 0
    htod_bytes: int = 0
    dtoh_copies: int = 0
    dtoh_bytes: int = 0
    dtod_copies: int = 0
    dtod_bytes: int = 0
    async_copies: int = 0
    memsets: int = 0
    modules_compiled: int = 0
    program_cache_hits: int = 0
    compile_seconds: float = 0.0
    graphs_captured: int = 0
    graph_replays: int = 0
    graph_rebinds: int = 0
    forks: int = 0
    aborted_captures: int = 0
    synchronizations: int = 0

    def since(self, earlier: RuntimeStats) -> RuntimeStats:
        """The difference to an earlier snapshot, field by field."""
        return RuntimeStats(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})


class RuntimeCounters:
    """The mutable side of :class:`RuntimeStats`; written under the runtime's lock."""

    __slots__ = tuple(f.name for f in fields(RuntimeStats))

    if TYPE_CHECKING:  # one counter for every field, which a type checker cannot see

        def __getattr__(self, name: str) -> int: ...
        def __setattr__(self, name: str, value: int) -> None: ...

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    def reset(self) -> None:
        """Zero everything but the levels, which describe the present and not the past."""
        for name in self.__slots__:
            if name not in ("live_bytes", "pool_retained_bytes", "deferred_bytes"):
                setattr(self, name, 0)


@dataclass(frozen=True)
class WorkspaceStats(StatsTable):
    """Scratch memory of one kernel, or of all kernels of one operator.

    Attributes:
        allocations: times that a workspace was taken from the driver.
        releases: times that one was given up.
        live_bytes: bytes held now.
        last_ptr: the address handed out last; 0 where there was none.
    """

    TITLE = "workspace"

    allocations: int = 0
    releases: int = 0
    live_bytes: int = 0
    last_ptr: int = 0


class WorkspaceLedger:
    """Counts workspaces; what a child counts, its parent counts too.

    A workspace may be released by the garbage collector in the middle of any of these methods, so the
    lock is reentrant and every update is a single in-place addition.
    """

    def __init__(self, parent: WorkspaceLedger | None = None) -> None:
        self._parent = parent
        self._lock = threading.RLock()
        self._allocations = self._releases = self._live_bytes = self._last_ptr = 0

    def stats(self) -> WorkspaceStats:
        with self._lock:
            return WorkspaceStats(self._allocations, self._releases, self._live_bytes, self._last_ptr)

    def allocated(self, ptr: int, nbytes: int) -> None:
        with self._lock:
            self._allocations += 1
            self._live_bytes += nbytes
            self._last_ptr = ptr
        if self._parent is not None:
            self._parent.allocated(ptr, nbytes)

    def released(self, nbytes: int) -> None:
        with self._lock:
            self._releases += 1
            self._live_bytes -= nbytes
        if self._parent is not None:
            self._parent.released(nbytes)

    def handed_out(self, ptr: int) -> None:
        self._last_ptr = ptr
        if self._parent is not None:
            self._parent.handed_out(ptr)

    def reset(self) -> bool:
        """Zero the counters; refused, returning False, while bytes are live."""
        with self._lock:
            if self._live_bytes != 0:
                return False
            self._allocations = self._releases = self._last_ptr = 0
            return True
