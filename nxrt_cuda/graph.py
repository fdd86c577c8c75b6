"""Recording launches into CUDA graphs and replaying them.

A :class:`CapturedGraph` is a list of *segments*, each one executable graph, replayed in the order of
their capture. Most graphs have one; a sequence with kernels that decline capture has one for every run
between them, and its owner executes the others in between.

A capture is thread-local and belongs to the thread that began it: it holds the runtime's lock until
the capture has ended, so that no other thread's work can end up in the graph. Whatever would spoil the
capture is refused before it reaches the driver, and leaves the capture open and usable. If a driver call
fails all the same, that first failure is what ending the capture reports.

A graph owns what it touches: the kernels' resources, and the memory of every tensor launched while it
was recorded. Closing it, or dropping it, lets go of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nxrt_cuda.activity import Activity
from nxrt_cuda.context import Session
from nxrt_cuda.dot import SegmentPicture, to_dot
from nxrt_cuda.driver.base import CaptureMode, CaptureStatus, ReadyCall
from nxrt_cuda.errors import CaptureError, DeviceFaultError, DriverError, GraphError
from nxrt_cuda.process_bound import ProcessBound
from nxrt_cuda.rebind import HalfRebound, rebind
from nxrt_cuda.segment import Node, Segment, Work
from nxrt_cuda.stats import RuntimeCounters
from nxrt_cuda.streams import Streams

if TYPE_CHECKING:
    from nxrt_cuda.capture import DeviceGraphResource
    from nxrt_cuda.kernel import Kernel
    from nxrt_cuda.tensor import MemoryOwner, TensorView

__all__ = ["CapturedGraph", "GraphRecorder", "GraphSlot"]

_LEGACY_STREAMS = (0, 1)
"""NULL and ``CU_STREAM_LEGACY``: not streams of anybody's own."""


class GraphSlot(Enum):
    """The graphs that a runtime itself holds, for the begin / end / replay calls."""

    PRIMARY = "primary"
    VERIFY = "verify"

    @classmethod
    def _missing_(cls, value: object) -> GraphSlot:
        raise GraphError(f"there is no graph slot {value!r}; there are {', '.join(repr(slot.value) for slot in cls)}")


class CapturedGraph(ProcessBound):
    """Recorded work that replays with one driver call a segment.

    Attributes:
        name: as error messages call it.
        replays: how many calls of :meth:`replay` and :meth:`replay_segment` have enqueued it.
    """

    INSTEAD = "capture another"

    def __init__(self, name: str, session: Session, streams: Streams, counters: RuntimeCounters) -> None:
        self.name = name
        self.replays = 0
        self._label = f"replay of {name}"
        self._session = session
        self._streams = streams
        self._counters = counters
        self._segments: tuple[Segment, ...] = ()
        # Replays the one segment of a graph that has one, and is neither closed nor broken.
        self._start: ReadyCall | None = None
        # Of the session, at hand: a replay costs the host so little that it shows where they are looked up.
        self._gate, self._suspect = session.lock, session.suspects.append
        self._closed = False
        # Why no replay is possible any more; empty while it is.
        self._broken = ""

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def segment_count(self) -> int:
        return len(self._segments)

    @property
    def node_types(self) -> tuple[str, ...]:
        """The driver's node types of all segments, e.g. ``("KERNEL", "KERNEL")``."""
        return tuple(kind for segment in self._segments for kind in segment.node_types)

    @property
    def node_count(self) -> int:
        return len(self.node_types)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the graph keeps alive: its tensors', not its kernels' workspaces."""
        owners = {id(owner): owner for segment in self._segments for owner in segment.owners}
        return sum(owner.nbytes for owner in owners.values())

    @property
    def kernels(self) -> tuple[str, ...]:
        """Labels of the launches that were recorded, in order."""
        return tuple(label for segment in self._segments for label in segment.kernels)

    def to_dot(self) -> str:
        """The graph as a picture in Graphviz's language (``dot -Tsvg``).

        One frame a segment; one box a kernel, copy or fill, with its operator, specialisation, grid, block and
        shared memory. Arrows say what waits for what.
        """
        return to_dot(self.name, [_picture(segment) for segment in self._segments])

    def rebind(
        self,
        tensors: Mapping[TensorView, TensorView] = MappingProxyType({}),
        *,
        scalars: Mapping[tuple[int | str, str], float] = MappingProxyType({}),
    ) -> None:
        """Replace what the graph works on, without recording it again; replays from the next one on use it.

        ``graph.rebind({x: y})`` puts ``y`` in the place of ``x`` in every kernel, copy and fill, and what was
        recorded with a part of ``x`` gets the same part of ``y``. All pairs are replaced at once, so that
        ``{a: b, b: a}`` swaps. Replays under way are not disturbed, and nothing waits for them: their memory is
        given back, if nobody else has it, after they are done.

        ``scalars={(0, "factor"): 2.0}`` changes a number that a kernel was launched with. A launch is named
        by its index in :attr:`kernels`, or by its entry, which means every launch of that kernel.

        It is all or nothing: after an error, replays do what they did before. Grids are not changed, nor is
        what lies in device memory, such as pointers that a kernel reads from there.

        Args:
            tensors: the tensor to use for each one replaced. Dtype, shape and strides are the same, and the
                address is as aligned as before (up to 32 bytes, the widest access of a kernel).
            scalars: the value for each (launch, parameter).

        Raises:
            GraphError: a tensor or launch is not in the graph, the new tensor does not fit, or overlaps what
                the same kernel works on; or the driver refused, with the node and its reason. Capture again.
            TensorError: what is to be replaced, or to replace it, is no tensor of this package.
            DeviceMemoryError: a new tensor was freed, or belongs to another runtime.
            LaunchError: a number is not of the kind that the kernel declares, or does not fit.
            CaptureError: the runtime is capturing.
        """
        with self._session.driving("rebind") as driver:
            if not self._is_replayable:
                raise GraphError(f"cannot rebind {self.name} because {self._state}")
            try:
                rebind(self.name, self._segments, tensors, scalars, driver, self._session.context)
            except HalfRebound:
                self._start = None
                self._broken = "an update failed half-way and could not be undone; capture it again"
                raise
            self._counters.graph_rebinds += 1

    def replay(self) -> None:
        """Enqueue all segments, in the order of their capture, on the compute stream or the branch that is entered.

        Raises:
            GraphError: the graph is closed or has no segment.
            CaptureError: the runtime is capturing.
        """
        gate = self._gate
        turn = gate.turn
        if turn.owner == get_ident():
            turn.passing = True
            try:
                start = self._start
                if start is not None and gate.turn is turn:
                    try:
                        (status,) = start.call()
                        if status:
                            raise start.error(status)
                    except DriverError as error:
                        self._session.retry(error, start)
                    self._suspect(self._label)
                    self.replays += 1
                    self._counters.graph_replays += 1
                    return
            finally:
                turn.passing = False
        self._launch(slice(None), self._label)

    def replay_segment(self, index: int) -> None:
        """Enqueue one segment by its position in capture order.

        Raises:
            GraphError: there is no such segment, or the graph is closed.
        """
        if not self._closed and not self._broken and index not in range(len(self._segments)):
            raise GraphError(
                f"cannot replay segment {index!r} of {self.name}; only {len(self._segments)} segment(s) installed"
            )
        self._launch(slice(index, index + 1), f"replay of {self.name}, segment {index}")

    def close(self) -> None:
        """Destroy the executables and let go of the memory they refer to; a second call does nothing.

        Raises:
            CaptureError: the runtime is capturing.
        """
        if self._closed and not self._segments:
            return
        with self._session.driving("graph close") as driver:
            self._closed = True
            self._start = None
            while self._segments:
                self._segments[-1].destroy(driver, self.name)
                self._segments = self._segments[:-1]

    def _launch(self, which: slice, label: str) -> None:
        """Enqueue some of the segments, whatever the session is doing."""
        session = self._session
        with session.lock:
            session.check_usable()
            if session.capturing:
                raise CaptureError(
                    f"cannot replay {self.name} while this runtime captures a CUDA graph",
                    operation="replay",
                    state="capturing",
                )
            if not self._is_replayable:
                raise GraphError(f"cannot replay {self.name} because {self._state}")
            segments = self._segments[which]
            stream, launch = self._streams.current, session.driver.graph_launch
            for segment in segments:
                if session.tracer is None:
                    session.enqueue(launch, segment.executable, stream)
                else:
                    activity = self._activity(segment)
                    session.tracer.run(activity, stream, session.enqueue, launch, segment.executable, stream)
            session.suspects.append(label)
            self.replays += 1
            self._counters.graph_replays += len(segments)
            if session.eager_sync:
                self._streams.wait(stream, label)
                self._counters.synchronizations += 1

    @property
    def _is_replayable(self) -> bool:
        return bool(self._segments) and not self._closed and not self._broken

    @property
    def _state(self) -> str:
        """Why there is nothing to replay."""
        return "it is closed" if self._closed else self._broken or "no executable is installed"

    def _activity(self, segment: Segment) -> Activity:
        """A replay of one segment, for a trace."""
        index = self._segments.index(segment)
        name = self.name if len(self._segments) == 1 else f"{self.name}, segment {index}"
        return Activity("graph", name, {"segment": index, "nodes": len(segment.node_types)})

    def _install(self, segment: Segment) -> None:
        self._segments = (*self._segments, segment)
        self._start = None
        if len(self._segments) == 1:
            self._start = self._session.driver.ready_graph_launch(segment.executable, self._streams.compute)

    def __del__(self) -> None:
        for segment in getattr(self, "_segments", ()):
            self._session.dropped.append(partial(segment.destroy, self._session.driver, self.name))

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.segment_count} segment(s), {self.node_count} node(s)"
        return f"CapturedGraph({self.name!r}, {state}, {self.replays} replay(s))"


@dataclass
class _Recording:
    """The open capture."""

    graph: CapturedGraph
    kernels: list[str] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    owners: dict[MemoryOwner, None] = field(default_factory=dict)
    resources: dict[int, Any] = field(default_factory=dict)
    failure: tuple[str, DriverError] | None = None
    span: AbstractContextManager[object] = field(default_factory=nullcontext)

    def retain(self, resources: Iterable[DeviceGraphResource]) -> None:
        self.resources.update((resource.key, resource.resource) for resource in resources)


class GraphRecorder:
    """The capture state machine of one runtime: idle, or capturing into one graph."""

    def __init__(self, session: Session, streams: Streams, counters: RuntimeCounters) -> None:
        self._session = session
        self._streams = streams
        self._counters = counters
        self._recording: _Recording | None = None

    @property
    def target(self) -> CapturedGraph | None:
        """The graph that the open capture records into."""
        return None if self._recording is None else self._recording.graph

    def begin(self, graph: CapturedGraph, kernels: Iterable[Kernel], mode: CaptureMode) -> None:
        """Open a capture of one more segment of ``graph``; every kernel is asked first.

        ``mode`` says whose unsafe driver calls spoil it: this thread's, every thread's, or nobody's.

        Raises:
            CaptureError: a capture is open, a kernel declines (all that decline are named), or the
                compute stream is one of the driver's legacy streams.
            GraphError: the graph is closed, or another runtime's.
        """
        session = self._session
        session.lock.acquire()
        try:
            session.check_usable()
            if session.capturing:
                raise _refused("cannot begin CUDA graph capture while capture is already active", "begin", "capturing")
            if graph._session is not session:
                raise GraphError(f"cannot capture into {graph.name} because it belongs to another runtime")
            if graph.is_closed:
                raise GraphError(f"cannot capture into {graph.name} because it is closed")
            if self._streams.forks:
                raise _refused("cannot begin CUDA graph capture within a fork; end that first", "begin", "idle")
            if self._streams.compute in _LEGACY_STREAMS:
                raise _refused(
                    f"stream handle {self._streams.compute} is one of the driver's default streams, which cannot "
                    "be captured; open the runtime on a stream of its own",
                    "begin",
                    "idle",
                )
            if not isinstance(kernels, Iterable):
                raise _refused(f"a capture takes a list of kernels, got {kernels!r}", "begin", "idle")
            audit = list(kernels)
            for kernel in audit:
                if not hasattr(kernel, "capture_support"):
                    raise _refused(f"a capture takes a list of kernels, got one with {kernel!r} in it", "begin", "idle")
            declined = [
                f"{type(kernel).__name__}: {support.reason}"
                for kernel in audit
                if not (support := kernel.capture_support())
            ]
            if declined:
                raise _refused(f"CUDA graph capture declined by {'; '.join(declined)}", "begin", "idle")
            recording = _Recording(graph)
            for kernel in audit:
                recording.retain(kernel.device_graph_resources())
            with ExitStack() as undo:
                recording.span = session.traced("capture", f"capture {graph.name}", {})
                undo.enter_context(recording.span)
                with session.driving("a second capture") as driver:
                    session.collect()
                    driver.stream_begin_capture(self._streams.compute, mode)
                undo.pop_all()
            self._recording = recording
            session.enter_capture()
        except BaseException:
            session.lock.release()
            raise

    def record(
        self,
        label: str,
        operands: Sequence[TensorView | None],
        work: Work | None,
        raw: Iterable[MemoryOwner] = (),
    ) -> None:
        """Note what was just recorded, and keep the memory of its operands, and ``raw``, alive.

        ``work`` is None where nothing reached the driver: a copy or a fill of no bytes.

        Raises:
            DriverError: the driver does not say which node it made; the capture will end in that failure.
        """
        recording = self._recording
        assert recording is not None
        views = tuple([view for view in operands if view is not None])
        recording.owners.update((view.owner, None) for view in views)
        recording.owners.update((owner, None) for owner in raw)
        if work is not None:
            try:
                with self._session.current():
                    (handle,) = self._session.driver.stream_capture_dependencies(self._streams.current)
            except DriverError as error:
                self.failed(label, error)
                raise
            recording.nodes.append(Node(handle, label, len(recording.kernels), work, views, tuple(raw)))
        recording.kernels.append(label)

    def retain(self, resources: Iterable[DeviceGraphResource]) -> None:
        """Keep ``resources`` alive with the graph that is being recorded; nothing to do when idle."""
        if self._recording is not None:
            self._recording.retain(resources)

    def failed(self, label: str, error: DriverError) -> None:
        """Latch the first driver failure of the open capture; ending it reports that one."""
        if self._recording is not None and self._recording.failure is None:
            self._recording.failure = (label, error)

    def end(self, *, stacklevel: int = 3) -> CapturedGraph:
        """Close the capture and install what it recorded as the graph's next segment.

        However it ends, the stream has left capture mode and the runtime is idle again. A capture that
        recorded nothing is warned of, ``stacklevel`` frames up.

        Raises:
            CaptureError: there is no open capture, or it belongs to another thread.
            GraphError: the driver could not end or instantiate it, or it allocates memory.
        """
        recording = self._owned("end")
        if self._streams.forks:
            raise _refused("cannot end CUDA graph capture within a fork; end that first", "end", "capturing")
        installed = False
        try:
            with self._session.current():
                segment = self._finish(recording)
            recording.graph._install(segment)
            self._counters.graphs_captured += 1
            installed = True
        finally:
            if not installed:
                self._discard()
            self._leave(aborted=not installed)
        if not segment.node_types:
            warnings.warn(
                f"{recording.graph.name} recorded nothing: no launch reached the captured stream",
                RuntimeWarning,
                stacklevel=stacklevel,
            )
        return recording.graph

    def abort(self) -> None:
        """Leave capture mode and discard what was recorded; does nothing when idle.

        Raises:
            CaptureError: the open capture belongs to another thread.
        """
        if not self._session.capturing:
            return
        self._owned("abort")
        try:
            self._discard()
        finally:
            self._leave(aborted=True)

    def _discard(self) -> None:
        """Take the stream out of capture mode and drop what was recorded."""
        driver = self._session.driver
        # The end of an invalidated capture fails, and the stream is out of it. One that failed otherwise, or was
        # never tried, is to be made now; and if that fails too, once more: nothing else brings the stream back.
        for _ in range(2):
            with suppress(DriverError), self._session.current():
                if driver.stream_capture_status(self._streams.compute) is CaptureStatus.NONE:
                    return
                graph = driver.stream_end_capture(self._streams.compute)
                self._session.dropped.append(partial(driver.graph_destroy, graph))

    def _finish(self, recording: _Recording) -> Segment:
        driver, dropped = self._session.driver, self._session.dropped
        name = recording.graph.name
        graph = 0
        try:
            graph = driver.stream_end_capture(self._streams.compute)
        except DeviceFaultError:
            raise
        except DriverError as error:
            self.failed("its end", error)
        try:
            if recording.failure is not None:
                label, first = recording.failure
                raise GraphError(f"capture of {name} failed at {label}: {first}") from first
            node_types, edges = driver.graph_node_types(graph), driver.graph_edges(graph)
            owning = [kind for kind in node_types if kind in ("MEM_ALLOC", "MEM_FREE")]
            if owning:
                raise GraphError(f"{name} recorded {len(owning)} memory node(s); allocate before the capture")
            executable = driver.graph_instantiate(graph)
            try:
                driver.graph_upload(executable, self._streams.compute)
            except BaseException:
                dropped.append(partial(driver.graph_exec_destroy, executable))
                raise
        except BaseException:
            if graph:
                dropped.append(partial(driver.graph_destroy, graph))
            raise
        kernels, nodes = tuple(recording.kernels), tuple(recording.nodes)
        resources = tuple(recording.resources.values())
        segment = Segment(graph, executable, node_types, kernels, nodes, edges, resources)
        segment.pin(name, recording.owners)
        return segment

    def _owned(self, operation: str) -> _Recording:
        session, recording = self._session, self._recording
        if recording is None or not session.capturing:
            session.check_usable()
            raise _refused(f"cannot {operation} CUDA graph capture because capture is not active", operation, "idle")
        if not session.captures_here:
            raise _refused(
                f"CUDA graph capture must {operation} on the thread that began the thread-local capture",
                operation,
                "capturing",
            )
        return recording

    def _leave(self, *, aborted: bool) -> None:
        recording, self._recording = self._recording, None
        self._session.leave_capture()
        assert recording is not None
        self._counters.aborted_captures += aborted
        try:
            recording.span.__exit__(None, None, None)
        finally:
            self._session.lock.release()


def _picture(segment: Segment) -> SegmentPicture:
    return SegmentPicture(
        [node.work.activity(node.label) for node in segment.nodes], segment.node_types, segment.arrows()
    )


def _refused(message: str, operation: str, state: str) -> CaptureError:
    return CaptureError(message, operation=operation, state=state)
