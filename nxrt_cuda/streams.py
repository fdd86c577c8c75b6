"""The two streams of a runtime, and the events that order them and tell when work is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
        # All events, idle or not: whoever has one may keep it for good.
        self._events: list[int] = []
        self._idle_events: list[int] = []
        self._idle_timing_events: list[int] = []
        self._owned: list[int] = []
        try:
            self.compute = self._create() if foreign is None else foreign
            self.transfer = self._create()
        except BaseException:
            self.close()
            raise

    def _create(self) -> int:
        stream = self._driver.stream_create()
        self._owned.append(stream)
        return stream

    def record(self, stream: int) -> int:
        """An event that completes once the work queued on ``stream`` so far is done."""
        event = self._take(self._idle_events, timing=False)
        try:
            self._driver.event_record(event, stream)
        except DriverError:
            self._idle_events.append(event)
            raise
        return event

    def recycle(self, event: int) -> None:
        """Take back an event that nobody waits for any more; makes no driver call, so that a finaliser may call it."""
        self._idle_events.append(event)

    def record_timing(self, stream: int) -> int:
        """As :meth:`record`, an event that knows its time."""
        event = self._take(self._idle_timing_events, timing=True)
        try:
            self._driver.event_record(event, stream)
        except DriverError:
            self._idle_timing_events.append(event)
            raise
        return event

    def recycle_timing(self, event: int) -> None:
        """As :meth:`recycle`, for an event of :meth:`record_timing`."""
        self._idle_timing_events.append(event)

    def _take(self, idle: list[int], *, timing: bool) -> int:
        try:
            return idle.pop()
        except IndexError:
            event = self._driver.event_create(timing)
            self._events.append(event)
            return event

    def fence(self, before: int, after: int) -> None:
        """Work queued on ``after`` from now on waits for what is queued on ``before``."""
        event = self.record(before)
        try:
            self._driver.stream_wait_event(after, event)
        finally:
            # The wait has taken the event's present state; recording it again does not change that.
            self.recycle(event)

    @contextmanager
    def beside_compute(self) -> Iterator[int]:
        """The transfer stream, for work between the compute work queued before the body and after it.

        A closing fence that fails is made up for by waiting, for without one that work would run at any time.
        """
        self.fence(self.compute, self.transfer)
        try:
            yield self.transfer
        finally:
            try:
                self.fence(self.transfer, self.compute)
            except DriverError:
                self._driver.stream_synchronize(self.transfer)
                raise

    def wait(self, stream: int, operation: str) -> None:
        """Block until the work queued on ``stream`` so far is done.

        Raises:
            CaptureError: this thread is capturing.
        """
        session = self._session
        with session.driving(operation):
            event = self.record(stream)
            mark = session.mark()
        try:
            with session.traced("synchronize", f"wait: {operation}", {}):
                self.wait_event(event)
        finally:
            self.recycle(event)
        if stream == self.compute:
            with session.lock:
                session.settle(mark)

    def wait_event(self, event: int) -> None:
        """Block until ``event`` has completed.

        Outside the runtime's lock: other threads keep launching, and a capture that one of them opens
        meanwhile is not touched.
        """
        with self._session.current():
            self._driver.event_synchronize(event)

    def close(self) -> None:
        """Destroy what this runtime created; all work must be done. After a failure, goes on where it stopped."""
        while self._events:
            self._driver.event_destroy(self._events[-1])
            self._events.pop()
        while self._owned:
            self._driver.stream_destroy(self._owned[-1])
            self._owned.pop()
