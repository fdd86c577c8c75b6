"""The host driver's streams and events, and the executor that runs their work.

A stream is a queue, and it is lazy: work runs when the host waits for it, and not before. Waiting for
one stream runs that stream alone, and of the others only what its event waits ask for. A GPU may
run everything earlier; a program must not count on it, and here one that does reads stale data,
the same data on every run.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from nxrt_cuda.driver.host_failure import Failure
from nxrt_cuda.driver.status import is_fault

if TYPE_CHECKING:
    from nxrt_cuda.driver.host_graph import Capture, CapturedMark
    from nxrt_cuda.driver.host_work import Work

__all__ = ["QUEUE_BOUND", "Event", "Executor", "Mark", "Stream", "Wait"]

QUEUE_BOUND = 1024
"""A stream that holds more than this runs its oldest work, as a driver's full queue makes the host wait."""


class Mark:
    """A position in a stream: what ``event_record`` puts there. It is done once it has a time."""

    __slots__ = ("position", "stream", "time")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.position = stream.issued + 1
        self.time: float | None = None

    def run(self) -> None:
        self.time = perf_counter()

    def __str__(self) -> str:
        return "event record"


@dataclass(frozen=True, slots=True)
class Wait:
    """Holds a stream until the mark is done."""

    mark: Mark
    executor: Executor

    def run(self) -> None:
        self.executor.run_until(self.mark.stream, self.mark.position)

    def __str__(self) -> str:
        return "event wait"


class Event:
    """The latest record made through a handle: a position in a stream, or one in a capture."""

    __slots__ = ("mark", "timing")

    def __init__(self, timing: bool) -> None:
        self.timing = timing
        self.mark: Mark | CapturedMark | None = None


class Stream:
    """Work in order.

    Attributes:
        handle: its number; the default streams have theirs from CUDA.
        issued: how many items were ever queued; the position of the latest one.
        done: how many of them have run.
        capture: the capture that records this stream's work now.
    """

    __slots__ = ("capture", "done", "handle", "issued", "queue")

    def __init__(self, handle: int = 0) -> None:
        self.handle = handle
        self.queue: deque[Work] = deque()
        self.issued = 0
        self.done = 0
        self.capture: Capture | None = None

    def __str__(self) -> str:
        return f"stream 0x{self.handle:x}"


class Executor:
    """The device: runs work, one item at a time, on whichever thread waits for it.

    Two locks. ``lock`` guards the driver's tables and queues and is never held while work runs, so other
    threads go on queueing. The executor's own admits one running thread, which re-enters it when a wait
    for an event runs another stream. It is always taken first, so the two cannot deadlock.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.fault: Failure | None = None
        self._lock = lock
        self._running = threading.RLock()
        self._crowded: set[Stream] = set()

    def push(self, stream: Stream, work: Work) -> None:
        stream.queue.append(work)
        stream.issued += 1
        if len(stream.queue) > QUEUE_BOUND:
            self._crowded.add(stream)

    def relieve(self) -> None:
        """Bring every stream back to its bound."""
        while self._crowded:
            with self._lock:
                stream = self._crowded.pop() if self._crowded else None
            if stream is not None:
                self.run_until(stream, stream.issued - QUEUE_BOUND)

    def run_until(self, stream: Stream, position: int) -> None:
        """Run the oldest work of ``stream`` until ``position`` is reached."""
        with self._running:
            while True:
                with self._lock:
                    self.check()
                    if stream.done >= position:
                        return
                    work = stream.queue.popleft()
                try:
                    work.run()
                except BaseException as error:
                    self.lose(error, f"{work} on {stream}")
                    if not isinstance(error, Exception):
                        raise
                stream.done += 1

    def check(self) -> None:
        """Raise the fault that has ended the context, if one has."""
        if self.fault is not None:
            raise Failure(self.fault.name, self.fault.context) from self.fault.__cause__

    def lose(self, error: BaseException, where: str) -> None:
        """End the context because of ``error``; the first one stays."""
        if self.fault is not None:
            return
        if isinstance(error, Failure) and is_fault(error.name):
            self.fault = Failure(error.name, f"{where}: {error.context}")
        else:
            self.fault = Failure("CUDA_ERROR_LAUNCH_FAILED", f"{where}: {type(error).__name__}: {error}")
            self.fault.__cause__ = error
