"""Copies between host and device: pinned staging, blocking copies, and the transfer stream.

An upload is staged: its bytes are copied out of the caller's array before the call returns, so no
queued work ever reads memory that Python may recycle. Asynchronous copies run on the transfer stream
between two fences: they start after the work queued before them on the compute stream, or in a branch on
that one, and work queued there after them waits. No copy to or from the host is legal in a capture, where
it would record a host address.
"""

from __future__ import annotations

import ctypes
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from nxrt_cuda.context import Session
from nxrt_cuda.stats import RuntimeCounters
from nxrt_cuda.streams import Streams
from nxrt_cuda.tensor import TensorMetadata

__all__ = ["PendingRead", "Transfers"]

_SMALLEST = 4 << 10
_CHUNK = 8 << 20
_IN_FLIGHT_LIMIT = 64 << 20


@dataclass(frozen=True, eq=False)
class _Pinned:
    """One page-locked host buffer."""

    address: int
    bytes: np.ndarray


class _Staging:
    """Page-locked buffers, recycled when the copies that use them are done.

    Sizes are powers of two up to that of a chunk, and whole chunks above, where a power would lock up to twice of
    what a large asynchronous read needs.
    """

    def __init__(self, session: Session, streams: Streams) -> None:
        self._driver = session.driver
        self._streams = streams
        self._idle: dict[int, list[_Pinned]] = {}
        self._buffers: list[_Pinned] = []
        # What is dropped joins late, so entries are not in order of completion.
        self.in_flight: deque[tuple[int, _Pinned]] = deque()
        # Finalisers append here, on any thread and at any instruction; everything else needs the runtime's lock.
        self.dropped: deque[tuple[int, _Pinned]] = deque()

    def take(self, nbytes: int) -> _Pinned:
        """A buffer of at least ``nbytes``; waits for the oldest copy once too much is in flight."""
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length()) if nbytes <= _CHUNK else -(-nbytes // _CHUNK) * _CHUNK
        self._note_dropped()
        self._collect(waiting=sum(p.bytes.size for _, p in self.in_flight) + size > _IN_FLIGHT_LIMIT)
        idle = self._idle.get(size)
        if idle:
            return idle.pop()
        address = self._driver.mem_host_alloc(size)
        buffer = _Pinned(address, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))
        self._buffers.append(buffer)
        return buffer

    def _note_dropped(self) -> None:
        while self.dropped:
            self.in_flight.append(self.dropped.popleft())

    def _collect(self, waiting: bool) -> None:
        for _ in range(len(self.in_flight)):
            event, buffer = self.in_flight[0]
            if waiting:
                self._driver.event_synchronize(event)
                waiting = False
            elif not self._driver.event_query(event):
                self.in_flight.rotate(-1)
                continue
            self.in_flight.popleft()
            self._streams.recycle(event)
            self.put(buffer)

    def put(self, buffer: _Pinned) -> None:
        """Take back a buffer that no copy uses."""
        self._idle.setdefault(buffer.bytes.size, []).append(buffer)

    def trim(self) -> None:
        """Free the buffers that no copy uses."""
        self._note_dropped()
        self._collect(waiting=False)
        for idle in self._idle.values():
            while idle:
                self._driver.mem_host_free(idle[-1].address)
                self._buffers.remove(idle.pop())

    def close(self) -> None:
        """Free every buffer; all copies must be done. After a failure, goes on where it stopped."""
        self.in_flight.clear()
        self.dropped.clear()
        self._idle.clear()
        while self._buffers:
            self._driver.mem_host_free(self._buffers[-1].address)
            self._buffers.pop()


class PendingRead:
    """A device-to-host copy under way on the transfer stream; :meth:`numpy` waits for it."""

    __slots__ = ("_buffer", "_event", "_metadata", "_result", "_transfers")

    def __init__(self, transfers: Transfers, metadata: TensorMetadata, buffer: _Pinned, event: int) -> None:
        self._transfers = transfers
        self._metadata = metadata
        self._buffer: _Pinned | None = buffer
        self._event = event
        self._result: np.ndarray | None = None

    def numpy(self) -> np.ndarray:
        """The copied array; blocks until the copy is done, the first time."""
        if self._result is None:
            self._transfers.finish(self)
        assert self._result is not None
        return self._result

    def _take(self) -> tuple[int, _Pinned] | None:
        """Keep the copied bytes and give up the event and the buffer; None where another thread was faster."""
        buffer = self._buffer
        if buffer is None:
            return None
        raw = buffer.bytes[: self._metadata.nbytes]
        self._result = raw.view(self._metadata.dtype.numpy).reshape(self._metadata.shape).copy()
        self._buffer = None
        return self._event, buffer

    def __repr__(self) -> str:
        state = "not taken yet" if self._result is None else "taken"
        return f"PendingRead({self._metadata.dtype}, shape={self._metadata.shape}, {state})"

    def __del__(self) -> None:
        buffer = getattr(self, "_buffer", None)
        if buffer is not None:
            self._transfers.staging.dropped.append((self._event, buffer))


class Transfers:
    """Every copy of one runtime."""

    def __init__(self, session: Session, streams: Streams, counters: RuntimeCounters) -> None:
        self._session = session
        self._streams = streams
        self._counters = counters
        self.staging = _Staging(session, streams)

    def upload(self, dst: int, source: np.ndarray, *, asynchronous: bool = False, operation: str) -> None:
        """Copy a contiguous array to ``dst``, in order of the compute stream or on the transfer stream."""
        raw = source.reshape(-1).view(np.uint8)
        session, streams = self._session, self._streams
        with session.driving(operation) as driver:
            with (
                streams.beside() if asynchronous else nullcontext(streams.current) as stream,
                self._traced("HtoD", raw.size, stream, operation),
            ):
                for start in range(0, raw.size, _CHUNK):
                    chunk = raw[start : start + _CHUNK]
                    buffer = self.staging.take(chunk.size)
                    buffer.bytes[: chunk.size] = chunk
                    try:
                        driver.memcpy_htod_async(dst + start, buffer.address, chunk.size, stream)
                    except BaseException:
                        self.staging.put(buffer)
                        raise
                    self.staging.in_flight.append((streams.record(stream), buffer))
            self._counters.htod_copies += 1
            self._counters.htod_bytes += raw.size
            self._counters.async_copies += asynchronous

    def download(self, target: np.ndarray, src: int, *, operation: str) -> None:
        """Fill a contiguous array from ``src`` once queued work is done; blocks.

        The bytes go through page-locked buffers: a copy to other memory would be made, and waited for, within the
        driver call, with the runtime's lock held. Up to 64 MiB are of one moment in the order of the stream; a
        larger array is read in stretches of that size.
        """
        raw = target.reshape(-1).view(np.uint8)
        for start in range(0, max(raw.size, 1), _IN_FLIGHT_LIMIT):
            self._download_stretch(raw[start : start + _IN_FLIGHT_LIMIT], src + start, operation)
        with self._session.lock:
            self._counters.dtoh_copies += 1
            self._counters.dtoh_bytes += raw.size

    def _download_stretch(self, raw: np.ndarray, src: int, operation: str) -> None:
        chunks = [raw[start : start + _CHUNK] for start in range(0, raw.size, _CHUNK)]
        buffers: list[_Pinned] = []
        with self._session.driving(operation) as driver:
            stream = self._streams.current
            with self._traced("DtoH", raw.size, stream, operation) if chunks else nullcontext():
                for index, chunk in enumerate(chunks):
                    buffer = self.staging.take(chunk.size)
                    try:
                        driver.memcpy_dtoh_async(buffer.address, src + index * _CHUNK, chunk.size, stream)
                    except BaseException:
                        self.staging.put(buffer)
                        raise
                    buffers.append(buffer)
        # After a failure a copy may still be under way: its buffer is not used again, and freed with the runtime.
        self._streams.wait(stream, operation)
        with self._session.outside():
            for chunk, buffer in zip(chunks, buffers, strict=True):
                chunk[:] = buffer.bytes[: chunk.size]
        with self._session.lock:
            for buffer in buffers:
                self.staging.put(buffer)

    def download_async(self, src: int, metadata: TensorMetadata, *, operation: str) -> PendingRead:
        """Start copying a contiguous tensor to the host on the transfer stream."""
        with self._session.driving(operation) as driver:
            with self._streams.beside() as transfer:
                buffer = self.staging.take(max(metadata.nbytes, 1))
                try:
                    if metadata.nbytes:
                        with self._traced("DtoH", metadata.nbytes, transfer, operation):
                            driver.memcpy_dtoh_async(buffer.address, src, metadata.nbytes, transfer)
                except BaseException:
                    self.staging.put(buffer)
                    raise
                pending = PendingRead(self, metadata, buffer, self._streams.record(transfer))
            self._counters.dtoh_copies += 1
            self._counters.dtoh_bytes += metadata.nbytes
            self._counters.async_copies += 1
            return pending

    def finish(self, pending: PendingRead) -> None:
        """Wait for a pending read and take its bytes out of the staging buffer."""
        with self._session.driving("waiting for a read"):
            pass  # Refused here where the runtime is closed or capturing; the wait itself holds no lock.
        with self._session.traced("synchronize", "wait: pending read", {}):
            self._streams.wait_event(pending._event)
        with self._session.lock, self._session.outside():  # if it was closed meanwhile, the buffer went with it
            taken = pending._take()
            if taken is not None:
                event, buffer = taken
                self._streams.recycle(event)
                self.staging.put(buffer)

    def copy(self, dst: int, src: int, nbytes: int, *, asynchronous: bool = False) -> None:
        """Device to device, on the current stream, which is legal in a capture, or on the transfer stream."""
        session, streams = self._session, self._streams
        operation = "dtod_async" if asynchronous else "dtod"
        with session.driving(operation, in_capture=not asynchronous) as driver:
            if nbytes:
                with (
                    streams.beside() if asynchronous else nullcontext(streams.current) as stream,
                    self._traced("DtoD", nbytes, stream, operation),
                ):
                    driver.memcpy_dtod_async(dst, src, nbytes, stream)
            self._counters.dtod_copies += 1
            self._counters.dtod_bytes += nbytes
            self._counters.async_copies += asynchronous

    def fill(self, dst: int, value: int, nbytes: int) -> None:
        """Set bytes on the current stream; legal in a capture."""
        with self._session.driving("memset", in_capture=True) as driver:
            if nbytes:
                with self._session.traced("memset", "memset", {"bytes": nbytes, "value": value}, self._streams.current):
                    driver.memset_d8_async(dst, value, nbytes, self._streams.current)
            self._counters.memsets += 1

    def _traced(self, direction: str, nbytes: int, stream: int, operation: str) -> AbstractContextManager[object]:
        details = {"bytes": nbytes, "operation": operation}
        return self._session.traced("memcpy", f"memcpy {direction}", details, stream)

    def close(self) -> None:
        """Free the staging buffers; all copies must be done. After a failure, goes on where it stopped."""
        self.staging.close()
