"""The streams of a runtime, and the events that order them and tell when work is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nxrt_cuda.context import Session
from nxrt_cuda.errors import DriverError, RuntimeStateError

__all__ = ["Streams"]

_PER_THREAD = 2
"""``CU_STREAM_PER_THREAD``."""


class Streams:
    """A compute stream, on which kernels run in order, a transfer stream beside it, and the branches of forks.

    Attributes:
        compute: the handle of the compute stream; the caller's own where one was given.
        transfer: the handle of the transfer stream.
        forks: how many forks are open, one within the other.
        branches: streams that have forked and not been joined.
    """

    def __init__(self, session: Session, foreign: int | None) -> None:
        self._session = session
        self._driver = session.driver
        # All events, idle or not: whoever has one may keep it for good.
        self._events: list[int] = []
        # Those that know their time, and those that do not.
        self._idle_events: dict[bool, list[int]] = {True: [], False: []}
        self._owned: list[int] = []
        self.forks = 0
        self.branches: list[int] = []
        self._idle_branches: list[int] = []
        if foreign == _PER_THREAD:
            raise RuntimeStateError(
                "stream handle 2 is CUDA's per-thread default stream, another one for each thread, so that the work of "
                "several threads would have no order; give a stream of your own"
            )
        try:
            self.compute = self._current = self._create() if foreign is None else foreign
            self.transfer = self._create()
        except BaseException:
            self.close()
            raise

    @property
    def current(self) -> int:
        """Where work goes now: the compute stream, or a branch of an open fork."""
        return self._current

    @current.setter
    def current(self, stream: int) -> None:
        self._current = stream
        self._session.lock.close_short_way("branch", stream != self.compute)

    def _create(self) -> int:
        stream = self._driver.stream_create()
        self._owned.append(stream)
        return stream

    def record(self, stream: int, *, timing: bool = False) -> int:
        """An event that completes once the work queued on ``stream`` so far is done; with ``timing`` it knows when."""
        event = self._take(timing)
        try:
            self._driver.event_record(event, stream)
        except DriverError:
            self.recycle(event, timing=timing)
            raise
        return event

    def recycle(self, event: int, *, timing: bool = False) -> None:
        """Take back an event that nobody waits for any more, recorded with this ``timing``.

        Makes no driver call, so that a finaliser may call it.
        """
        self._idle_events[timing].append(event)

    def _take(self, timing: bool) -> int:
        try:
            return self._idle_events[timing].pop()
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
    def beside(self) -> Iterator[int]:
        """The transfer stream, for work between the current stream's queued before the body and after it.

        A closing fence that fails is made up for by waiting, for without one that work would run at any time.
        """
        current = self.current
        self.fence(current, self.transfer)
        try:
            yield self.transfer
        finally:
            try:
                self.fence(self.transfer, current)
            except DriverError:
                self._driver.stream_synchronize(self.transfer)
                raise

    def begin_branch(self, event: int) -> int:
        """A stream of its own that starts after ``event``."""
        branch = self._idle_branches.pop() if self._idle_branches else self._create()
        try:
            self._driver.stream_wait_event(branch, event)
        except BaseException:
            self._idle_branches.append(branch)
            raise
        self.branches.append(branch)
        return branch

    def join_branch(self, branch: int, origin: int) -> None:
        """Work queued on ``origin`` from now on waits for what is queued on ``branch``; does nothing the second time.

        Outside a capture, a fence that fails is made up for by waiting; the capture that lacks one has failed.
        """
        if branch not in self.branches:
            return
        try:
            self.fence(branch, origin)
        except DriverError:
            if not self._session.capturing:
                self._driver.stream_synchronize(branch)
            self._end_branch(branch)
            raise
        self._end_branch(branch)

    def _end_branch(self, branch: int) -> None:
        self.branches.remove(branch)
        self._idle_branches.append(branch)

    @property
    def names(self) -> dict[int, str]:
        """All streams, as traces call them."""
        branches = [stream for stream in self._owned if stream not in (self.compute, self.transfer)]
        return {
            self.compute: "compute stream",
            self.transfer: "transfer stream",
            **{stream: f"branch {number}" for number, stream in enumerate(branches, 1)},
        }

    def wait(self, stream: int, operation: str) -> None:
        """Block until the work queued on ``stream`` so far is done.

        Raises:
            CaptureError: this thread is capturing.
        """
        session = self._session
        with session.driving(operation):
            event = self.record(stream)
            # Of several streams at work, the end of one says little of what was enqueued.
            mark = session.mark() if stream == self.compute and not self.branches else None
        try:
            with session.traced("synchronize", f"wait: {operation}", {}):
                self.wait_event(event)
        finally:
            self.recycle(event)
        if mark is not None:
            with session.lock:
                session.settle(mark)

    def wait_event(self, event: int) -> None:
        """Block until ``event`` has completed.

        Outside the runtime's lock: other threads keep launching, and a capture that one of them opens
        meanwhile is not touched.

        Raises:
            RuntimeStateError: the runtime is being closed.
        """
        with self._session.outside(), self._session.current():
            self._driver.event_synchronize(event)

    def close(self) -> None:
        """Destroy what this runtime created; all work must be done. After a failure, goes on where it stopped."""
        while self._events:
            self._driver.event_destroy(self._events[-1])
            self._events.pop()
        while self._owned:
            self._driver.stream_destroy(self._owned[-1])
            self._owned.pop()
