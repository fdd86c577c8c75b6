"""Marks in the compute stream, and the time between two of them by the device's own clock."""

from __future__ import annotations

from nxrt_cuda.context import Session
from nxrt_cuda.streams import Streams

__all__ = ["TimingEvent"]


class TimingEvent:
    """A mark in the compute stream. Made by ``CudaRuntime.record_event()``, outside captures.

    On the host driver, the times are those of this machine's clock when the work ran.
    """

    def __init__(self, session: Session, streams: Streams) -> None:
        self._session = session
        self._streams = streams
        with session.driving("record_event"):
            self._handle = streams.record(streams.current, timing=True)

    def elapsed_time(self, end: TimingEvent) -> float:
        """Milliseconds from this mark to ``end``, to about half a microsecond; blocks until ``end`` is reached.

        Raises:
            DriverError: the two belong to different contexts.
        """
        with self._session.driving("elapsed_time"):
            pass  # Refused here where the runtime is closed or capturing; the wait itself holds no lock.
        self._streams.wait_event(end._handle)
        with self._session.driving("elapsed_time") as driver:
            return driver.event_elapsed_time(self._handle, end._handle)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._streams.recycle(self._handle, timing=True)
