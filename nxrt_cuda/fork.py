"""Work side by side: branches of the compute stream, which fork from it by one event and join it by others.

A branch is a stream that waits for the work queued before the fork, and that the work queued after the fork's
end waits for. Within the fork, the branches and the compute stream itself are in no order. In a capture the
same events give the graph that shape.

The fork holds the runtime's lock, as a capture does, so that no other thread's work ends up in a branch. Memory
given back meanwhile is handed out again only after the join: until then no stream comes after all its users.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nxrt_cuda.context import Session
from nxrt_cuda.errors import DeviceFaultError, DriverError, NxrtError, RuntimeStateError
from nxrt_cuda.memory import DeviceMemory
from nxrt_cuda.stats import RuntimeCounters
from nxrt_cuda.streams import Streams

__all__ = ["Branch", "Fork", "open_fork"]

logger = logging.getLogger("nxrt_cuda")


class Branch:
    """One stream beside the others of its fork; a context manager within which the runtime works on it.

    It may be entered again: the work follows in order.

    Attributes:
        stream: its handle, to enqueue other libraries' work on it while the fork is open.
    """

    def __init__(self, fork: Fork, streams: Streams, stream: int) -> None:
        self.stream = stream
        self._fork = fork
        self._streams = streams
        self._left: list[int] = []

    def __enter__(self) -> Branch:
        self._fork.check_open()
        self._left.append(self._streams.current)
        self._streams.current = self.stream
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._streams.current = self._left.pop()

    def __cuda_stream__(self) -> tuple[int, int]:
        """The CUDA stream protocol of cuda.core: (version, handle)."""
        return (0, self.stream)


class Fork:
    """A stretch of work with branches. Made by ``CudaRuntime.fork()``; its end joins them all."""

    def __init__(self, session: Session, streams: Streams, event: int) -> None:
        self._session = session
        self._streams = streams
        self._event = event
        self._branches: list[int] = []
        self._is_open = True

    def branch(self) -> Branch:
        """A new branch, which begins after the work queued before the fork, whenever it is asked for.

        Raises:
            RuntimeStateError: the fork has ended.
        """
        # Another thread waits here for the lock, and finds the fork ended.
        with self._session.driving("a branch", in_capture=True):
            self.check_open()
            stream = self._streams.begin_branch(self._event)
            self._branches.append(stream)
        return Branch(self, self._streams, stream)

    def check_open(self) -> None:
        with self._session.lock:
            if not self._is_open:
                raise RuntimeStateError("the fork that the branch belongs to has ended; open another with fork()")

    def __repr__(self) -> str:
        return f"Fork({len(self._branches)} branch(es), {'open' if self._is_open else 'ended'})"

    def end(self, origin: int, failed: Callable[[str, DriverError], None]) -> None:
        """Let ``origin`` go on after all branches.

        Raises:
            DriverError: a branch could not be joined; the others were.
        """
        session, streams = self._session, self._streams
        self._is_open = False
        streams.current = origin
        streams.forks -= 1
        streams.recycle(self._event)
        if session.refusal is not None:
            return
        first: DriverError | None = None
        # The outermost fork also joins what an earlier one could not.
        branches = self._branches if streams.forks else list(streams.branches)
        for branch in (*branches, *branches):  # twice, for those that the first failure has kept apart
            try:
                with session.current():
                    streams.join_branch(branch, origin)
            except DeviceFaultError:
                raise
            except DriverError as error:
                failed("the join of a branch", error)
                first = first or error
        if first is not None:
            raise first


@contextmanager
def open_fork(
    session: Session,
    streams: Streams,
    memory: DeviceMemory,
    counters: RuntimeCounters,
    failed: Callable[[str, DriverError], None],
) -> Iterator[Fork]:
    """What ``CudaRuntime.fork`` does; ``failed`` is told of what will spoil the capture that is open."""
    with session.lock:
        origin = streams.current
        with session.driving("fork", in_capture=True):
            fork = Fork(session, streams, streams.record(origin))
        streams.forks += 1
        counters.forks += 1
        try:
            yield fork
        except BaseException:
            try:
                fork.end(origin, failed)
            except NxrtError:
                logger.exception("could not join the branches of a fork after an error in its body")
            raise
        else:
            fork.end(origin, failed)
        finally:
            memory.release_held()
