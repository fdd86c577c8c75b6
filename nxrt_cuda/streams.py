"""The two streams of a runtime, and the events that order them and tell when work is done."""

from __future__ import annotations

from nxrt_cuda.context import Session
from nxrt_cuda.errors import DriverError

__all__ = ["Streams"]


class Streams:
    """A compute stream, on which every kernel runs in order, and a transfer stream beside it.

    Attributes:
        compute: the handle of the compute stream; the caller's own where one was given.
        transfer: the handle of the transfer stream.
    """

    def __init__(self, session: Session, foreign: int | None) -> None:
        self._session = session
        self._driver = session.driver
        self._idle_events: list[int] = []
        self._timing_events: list[int] = []
        self._idle_timing_events: list[int] = []
        self._owns_compute = foreign is None
        self.compute = self._driver.stream_create() if foreign is None else foreign
        try:
            self.transfer = self._driver.stream_create()
        except BaseException:
            if self._owns_compute:
                self._driver.stream_destroy(self.compute)
            raise

    def record(self, stream: int) -> int:
        """An event that completes once the work queued on ``stream`` so far is done."""
        event = self._idle_events.pop() if self._idle_events else self._driver.event_create(timing=False)
        try:
            self._driver.event_record(event, stream)
        except DriverError:
            self._idle_events.append(event)
            raise
        return event

    def recycle(self, event: int) -> None:
        """Take back an event that nobody waits for any more."""
        self._idle_events.append(event)

    def record_timing(self, stream: int) -> int:
        """As :meth:`record`, an event that knows its time."""
        try:
            event = self._idle_timing_events.pop()
        except IndexError:
            event = self._driver.event_create(timing=True)
            self._timing_events.append(event)
        try:
            self._driver.event_record(event, stream)
        except DriverError:
            self._idle_timing_events.append(event)
            raise
        return event

    def recycle_timing(self, event: int) -> None:
        """Take back a timing event; makes no driver call, so that a finaliser may call it."""
        self._idle_timing_events.append(event)

    def fence(self, before: int, after: int) -> None:
        """Work queued on ``after`` from now on waits for what is queued on ``before``."""
        event = self.record(before)
        try:
            self._driver.stream_wait_event(after, event)
        finally:
            # The wait has taken the event's present state; recording it again does not change that.
            self.recycle(event)

    def wait(self, stream: int, operation: str) -> None:
        """Block until the work queued on ``stream`` so far is done.

        Raises:
            CaptureError: this thread is capturing.
        """
        with self._session.driving(operation):
            event = self.record(stream)
        try:
            self.wait_event(event)
        finally:
            with self._session.lock:
                self.recycle(event)

    def wait_event(self, event: int) -> None:
        """Block until ``event`` has completed.

        Outside the runtime's lock: other threads keep launching, and a capture that one of them opens
        meanwhile is not touched.
        """
        with self._session.current():
            self._driver.event_synchronize(event)

    def close(self) -> None:
        """Destroy what this runtime created; all work must be done."""
        for event in (*self._idle_events, *self._timing_events):
            self._driver.event_destroy(event)
        self._idle_events.clear()
        self._timing_events.clear()
        self._idle_timing_events.clear()
        self._driver.stream_destroy(self.transfer)
        if self._owns_compute:
            self._driver.stream_destroy(self.compute)
