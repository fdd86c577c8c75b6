"""Device memory: allocations and their owners, the size-class pool, and deferred release.

Memory is given back in the order of the compute stream. A pooled block may be handed out again at
once, because whoever gets it works on that stream too, and copies on the transfer stream are fenced
on both sides. While a fork is open there is no such order, and what is given back is held until all its
branches have joined.

A block that goes back to the driver waits until an event recorded after its last use has completed, on
the compute stream and, through the fences, on all others. It is then freed in stream order: a plain
``cuMemFree`` returns only when the whole device is idle, and nothing here waits for that but :meth:`trim
<DeviceMemory.trim>` and the end of the runtime. Once the context is lost nothing can be freed; what is held
stays counted in ``live_bytes`` and is never handed out again.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import index as as_index
from typing import Any, ClassVar, NamedTuple

from nxrt_cuda.context import Session
from nxrt_cuda.errors import CaptureError, DeviceMemoryError, OutOfMemoryError, RuntimeStateError
from nxrt_cuda.stats import RuntimeCounters
from nxrt_cuda.streams import Streams

__all__ = [
    "POOL_VARIABLE",
    "Allocation",
    "DeviceMemory",
    "ForeignMemory",
    "pool_limit_from_environment",
    "size_class",
]

POOL_VARIABLE = "NXRT_CUDA_POOL_BYTES"
_POOL_DEFAULT = 256 << 20
_SMALLEST = 512
_LARGE = 1 << 20


def pool_limit_from_environment() -> int:
    """The pool's bound in bytes: ``NXRT_CUDA_POOL_BYTES``, 256 MiB by default, 0 for no pool.

    Raises:
        RuntimeStateError: the variable is not a whole number >= 0.
    """
    text = os.environ.get(POOL_VARIABLE, str(_POOL_DEFAULT))
    if not text.isascii() or not text.isdigit():
        raise RuntimeStateError(f"{POOL_VARIABLE} must be a whole number of bytes >= 0, got {text!r}")
    return int(text)


def size_class(nbytes: int) -> int:
    """The block size that serves ``nbytes``: powers of two up to 1 MiB, multiples of 1 MiB above."""
    if nbytes <= _LARGE:
        return max(_SMALLEST, 1 << (nbytes - 1).bit_length())
    return -(-nbytes // _LARGE) * _LARGE


class _Block(NamedTuple):
    """Memory taken from the driver: its address, its full size, and whether it may return to the pool."""

    ptr: int
    size: int
    pooled: bool


class _Call(NamedTuple):
    """Something to do once the work queued until now is done."""

    make: Callable[[], None]


class _Memory(ABC):
    """Device memory that views lie in: freed on request, or when the last reference is dropped.

    Attributes:
        runtime: the runtime whose driver knows the memory.
        usable_in: the same until the memory is freed by hand, then None: one question for who launches.
        fate: what becomes of it.
        ptr: the device address.
        nbytes: how many bytes may be addressed from there.
        pins: names of the live graphs, engines and exports that refer to the memory.
    """

    __slots__ = ("__weakref__", "_held", "_memory", "nbytes", "pins", "ptr", "runtime", "usable_in")
    _kind: ClassVar[str]
    fate: ClassVar[str] = "freed"

    def __init__(self, memory: DeviceMemory, ptr: int, nbytes: int, held: Any) -> None:
        self._memory = memory
        self._held = held
        self.runtime = self.usable_in = memory.runtime
        self.ptr = ptr
        self.nbytes = nbytes
        self.pins: list[str] = []

    @property
    def is_freed(self) -> bool:
        return self._held is None or self._memory.is_closed

    def free(self) -> None:
        """Give the memory back now, in stream order; a second call does nothing.

        Raises:
            DeviceMemoryError: a live graph or an export refers to it.
            CaptureError: the runtime is capturing.
        """
        if self.is_freed:
            return
        with self._memory.session.driving("free"):
            self._memory.collect()
            if self.pins:
                raise DeviceMemoryError(
                    f"the {self._kind} at 0x{self.ptr:x} is referred to by {', '.join(dict.fromkeys(self.pins))}; "
                    "let go of that before freeing it"
                )
            # Asked again: another thread may have freed it while this one waited.
            if not self.is_freed:
                self._give_back(self._held)
                self._held = self.usable_in = None
                self._memory.session.frees += 1

    @property
    @abstractmethod
    def _give_back(self) -> Callable[[Any], None]:
        """What takes back the thing held; not bound to this object, which may be dying."""

    def __del__(self) -> None:
        # Half-built instances end up here too. Once the runtime is closed there is nothing left to give back.
        held = getattr(self, "_held", None)
        if held is not None and not self._memory.is_closed:
            self._memory.session.dropped.append(partial(self._give_back, held))


class Allocation(_Memory):
    """A block taken from the driver or the pool."""

    __slots__ = ()
    _kind = "memory"

    @property
    def _give_back(self) -> Callable[[_Block], None]:
        return self._memory.release


class ForeignMemory(_Memory):
    """Device memory of another library (DLPack, ``__cuda_array_interface__``), held by its object.

    The object is let go only after the work queued on the compute stream until then is done.
    """

    __slots__ = ()
    _kind = "imported memory"

    @property
    def _give_back(self) -> Callable[[Any], None]:
        return self._memory.retire


class DeviceMemory:
    """All device memory of one runtime.

    Attributes:
        runtime: the runtime it belongs to.
        session: its way to the driver.
        is_closed: whether everything was given back.
    """

    def __init__(
        self, runtime: Any, session: Session, streams: Streams, counters: RuntimeCounters, pool_limit: int
    ) -> None:
        self.runtime = runtime
        self.session = session
        self.is_closed = False
        self._driver = session.driver
        self._streams = streams
        self._counters = counters
        self._pool_limit = pool_limit
        self._pool: dict[int, list[int]] = {}
        self._blocks: dict[int, int] = {}
        # Waiting for an event, and for the end of a fork.
        self._retired: deque[tuple[int, _Block | Any]] = deque()
        self._held: deque[_Block | Any] = deque()

    def alloc(self, nbytes: int, *, pooled: bool = True, operation: str = "alloc_raw") -> Allocation:
        """``nbytes`` (at least one) of uninitialised device memory, aligned to 256 bytes.

        Raises:
            DeviceMemoryError: ``nbytes`` is no whole number, negative, or beyond any address space.
            OutOfMemoryError: the driver has no room, even after the pool was emptied.
            CaptureError: the runtime is capturing.
        """
        try:
            nbytes = as_index(nbytes)
        except TypeError:
            raise DeviceMemoryError(f"{operation} of {nbytes!r} bytes: a size is a whole number") from None
        if not 0 <= nbytes < 2**63:
            raise DeviceMemoryError(f"{operation} of {nbytes} bytes: a size is at least 0 and below 2**63")
        try:
            with self.session.driving(operation):
                self.collect()
                size = size_class(max(nbytes, 1))
                free = self._pool.get(size) if pooled else None
                if free:
                    ptr = free.pop()
                    self._counters.pool_hits += 1
                    self._counters.pool_retained_bytes -= size
                else:
                    ptr = self._take(size)
                return Allocation(self, ptr, nbytes, _Block(ptr, size, pooled))
        except CaptureError as refusal:
            raise CaptureError(
                f"{operation} of {nbytes} bytes is illegal while this thread captures a CUDA graph; "
                "allocate before the capture",
                operation=operation,
                state=refusal.state,
            ) from None

    def release(self, block: _Block) -> None:
        """Give a block back to the pool, or to the driver once queued work is done."""
        if self._streams.forks:
            self._hold(block)
        elif block.pooled and self._counters.pool_retained_bytes + block.size <= self._pool_limit:
            self._pool.setdefault(block.size, []).append(block.ptr)
            self._counters.pool_retained_bytes += block.size
        else:
            self._defer(block)

    def retire(self, item: Any) -> None:
        """Let go of an imported object once the work queued until now is done."""
        if self._streams.forks:
            self._hold(item)
        else:
            self._defer(item)

    def when_done(self, call: Callable[[], None]) -> None:
        """Make ``call`` once the work queued until now is done; not at all if the runtime is closed before."""
        self.retire(_Call(call))

    def collect(self) -> None:
        """Release what finalisers dropped, and free retired memory that no queued work uses."""
        self.session.collect()
        self.release_held()
        done = False
        while self._retired and self._driver.event_query(self._retired[0][0]):
            event, item = self._retired.popleft()
            self.session.dropped.append(partial(self._let_go, item, self._free_in_order))
            self._streams.recycle(event)
            done = True
        if done:
            self.session.collect()

    def release_held(self) -> None:
        """Release what was given back within a fork, unless one is open or has a branch that was not joined."""
        if not self._held or self._streams.forks or self._streams.branches or self.session.refusal is not None:
            return
        with self.session.current():
            while self._held:
                item = self._held[0]
                if isinstance(item, _Block):
                    self.release(item)
                    self._counters.deferred_bytes -= item.size
                else:
                    self._defer(item)
                self._held.popleft()

    def trim(self) -> None:
        """Return all free memory to the driver; waits for queued work."""
        self.collect()
        for size, free in self._pool.items():
            while free:
                self._defer(_Block(free[-1], size, False))
                free.pop()
                self._counters.pool_retained_bytes -= size
        while self._retired:
            event, item = self._retired[0]
            self._driver.event_synchronize(event)
            self._let_go(item, self._driver.mem_free)
            self._retired.popleft()
            self._streams.recycle(event)
        # What was freed in stream order before is the driver's again only now.
        self._driver.stream_synchronize(self._streams.compute)

    def close(self) -> None:
        """Return every block, in use or not; all work must be done. Tensors of it are dead afterwards.

        After a failure, goes on where it stopped.
        """
        self.is_closed = True
        self.session.frees += 1
        self._retired.clear()
        self._held.clear()
        self._pool.clear()
        self._counters.pool_retained_bytes = self._counters.deferred_bytes = 0
        for ptr in list(self._blocks):
            self._return(ptr, self._driver.mem_free)

    def _hold(self, item: _Block | Any) -> None:
        self._held.append(item)
        if isinstance(item, _Block):
            self._counters.deferred_bytes += item.size

    def _defer(self, item: _Block | Any) -> None:
        self._retired.append((self._streams.record(self._streams.compute), item))
        if isinstance(item, _Block):
            self._counters.deferred_bytes += item.size

    def _free_in_order(self, ptr: int) -> None:
        if self.runtime.capabilities.memory_pools:
            self._driver.mem_free_async(ptr, self._streams.compute)
        else:
            self._driver.mem_free(ptr)

    def _let_go(self, item: _Block | Any, free: Callable[[int], None]) -> None:
        if isinstance(item, _Block):
            self._return(item.ptr, free)
            self._counters.deferred_bytes -= item.size
        elif isinstance(item, _Call):
            item.make()

    def _take(self, size: int) -> int:
        try:
            ptr = self._driver.mem_alloc(size)
        except OutOfMemoryError as error:
            self.trim()
            try:
                ptr = self._driver.mem_alloc(size)
            except OutOfMemoryError:
                free, total = self._driver.mem_get_info()
                raise OutOfMemoryError(
                    error.call,
                    error.code,
                    error.name,
                    error.text,
                    f"{size} bytes asked for; {free} of {total} are free, this runtime holds "
                    f"{self._counters.live_bytes}",
                ) from None
        self._blocks[ptr] = size
        self._counters.driver_allocations += 1
        self._counters.live_bytes += size
        return ptr

    def _return(self, ptr: int, free: Callable[[int], None]) -> None:
        free(ptr)
        self._counters.driver_frees += 1
        self._counters.live_bytes -= self._blocks.pop(ptr)
