"""The host driver's captures and graphs.

A capture begins on one stream and spreads: a stream that waits for an event recorded in it joins it
(fork), and must be waited for in turn (join) before it ends. What is queued on its streams becomes nodes,
each depending on the tail of its stream; nothing runs. The capture is invalid from the first illegal act
on, and then ends without a graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from nxrt_cuda.driver.base import CaptureMode
from nxrt_cuda.driver.host_failure import Failure
from nxrt_cuda.driver.host_stream import Stream
from nxrt_cuda.driver.host_work import KernelCall, Operation

__all__ = ["Capture", "CapturedMark", "Captures", "Graph", "GraphExec", "GraphNode", "GraphRun"]

Tail = frozenset[int]
"""The nodes, by index, that the next node of a stream must wait for."""


@dataclass(slots=True)
class GraphNode:
    """Recorded work, which may be replaced, and the nodes it must come after."""

    handle: int
    work: Operation
    dependencies: Tail

    @property
    def is_cooperative(self) -> bool:
        """Whether it is a launch whose blocks run at the same time; new parameters leave it one."""
        return isinstance(self.work, KernelCall) and self.work.cooperative

    def replace(self, work: Operation) -> None:
        _require_alike(self.work, work)
        self.work = work


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Nodes in the order they were recorded in; dependencies point backwards."""

    nodes: tuple[GraphNode, ...]

    def index(self, handle: int) -> int | None:
        """The position of the node ``handle``; None where it is another graph's."""
        return next((index for index, node in enumerate(self.nodes) if node.handle == handle), None)


@dataclass(frozen=True, slots=True)
class CapturedMark:
    """An event record inside a capture: the tail of its stream at that moment."""

    capture: Capture
    tail: Tail


class Capture:
    """One capture in progress.

    Attributes:
        mode: which calls of which threads invalidate it.
        thread: the one that began it.
        invalidated_by: the first illegal act, in words.
    """

    def __init__(self, origin: Stream, mode: CaptureMode, handles: Iterator[int]) -> None:
        self.mode = mode
        self.thread = threading.current_thread()
        self.invalidated_by: str | None = None
        self._origin = origin
        self._handles = handles
        self._nodes: list[GraphNode] = []
        self._tails: dict[Stream, Tail] = {origin: frozenset()}
        origin.capture = self

    def record(self, stream: Stream, work: Operation) -> None:
        """Append ``work`` to ``stream``'s part of the graph."""
        self._require_valid()
        self._nodes.append(GraphNode(next(self._handles), work, self._tails[stream]))
        self._tails[stream] = frozenset({len(self._nodes) - 1})

    def dependencies(self, stream: Stream) -> tuple[int, ...]:
        """The nodes, by handle, that the next work of ``stream`` will come after."""
        self._require_valid()
        return tuple(self._nodes[index].handle for index in sorted(self._tails[stream]))

    def mark(self, stream: Stream) -> CapturedMark:
        self._require_valid()
        return CapturedMark(self, self._tails[stream])

    def join(self, stream: Stream, mark: CapturedMark) -> None:
        """Let ``stream``, which may be new to this capture, continue after ``mark``."""
        self._require_valid()
        self._tails[stream] = self._tails.get(stream, frozenset()) | mark.tail
        stream.capture = self

    def invalidate(self, reason: str) -> None:
        self.invalidated_by = self.invalidated_by or reason

    def refuse(self, status: str, reason: str) -> NoReturn:
        """Invalidate the capture, and fail the call that did it."""
        self.invalidate(reason)
        raise Failure(status, reason)

    def end(self, stream: Stream) -> Graph:
        """Finish; every stream leaves the capture, whether or not a graph comes of it."""
        if stream is not self._origin:
            reason = f"cuStreamEndCapture on {stream}, which joined a capture that began on {self._origin}"
            self.refuse("CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", reason)
        for member in self._tails:
            member.capture = None
        if self.mode is not CaptureMode.RELAXED and self.thread is not threading.current_thread():
            raise Failure(
                "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", f"the capture on {stream} began on thread {self.thread.name}"
            )
        self._require_valid()
        joined = self._ancestors(self._tails[self._origin])
        loose = [str(member) for member, tail in self._tails.items() if not tail <= joined]
        if loose:
            self.invalidate(f"{', '.join(loose)} was not joined")
            raise Failure(
                "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
                f"{self._origin} does not wait for the last work captured on {', '.join(loose)}",
            )
        return Graph(tuple(self._nodes))

    def _ancestors(self, tail: Tail) -> set[int]:
        """``tail`` and everything it comes after."""
        seen: set[int] = set()
        pending = set(tail)
        while pending:
            index = pending.pop()
            seen.add(index)
            pending |= self._nodes[index].dependencies - seen
        return seen

    def _require_valid(self) -> None:
        if self.invalidated_by is not None:
            raise Failure("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", f"invalidated by: {self.invalidated_by}")


class _Mode(threading.local):
    def __init__(self) -> None:
        self.value = CaptureMode.GLOBAL


class Captures:
    """The captures in progress, and which calls they forbid to whom."""

    def __init__(self, handles: Iterator[int]) -> None:
        self._handles = handles
        self._open: list[Capture] = []
        self._mode = _Mode()

    def begin(self, stream: Stream, mode: CaptureMode) -> None:
        if stream.capture is not None:
            raise Failure("CUDA_ERROR_ILLEGAL_STATE", f"{stream} is capturing already")
        self._open.append(Capture(stream, mode, self._handles))

    def end(self, stream: Stream) -> Graph:
        capture = stream.capture
        if capture is None:
            raise Failure("CUDA_ERROR_ILLEGAL_STATE", f"{stream} is not capturing")
        try:
            return capture.end(stream)
        finally:
            if stream.capture is None:
                self._open.remove(capture)

    def join(self, stream: Stream, mark: CapturedMark) -> None:
        """Make ``stream`` wait for a record that was made in a capture."""
        try:
            capture = self.in_progress(mark, f"{stream} was told to wait")
        except Failure:
            if stream.capture is not None:
                stream.capture.invalidate(f"{stream} was told to wait for an event of a capture that has ended")
            raise
        if stream.capture is not None and stream.capture is not capture:
            reason = f"{stream} was told to wait for an event of another capture"
            stream.capture.invalidate(reason)
            capture.refuse("CUDA_ERROR_STREAM_CAPTURE_MERGE", reason)
        capture.join(stream, mark)

    def in_progress(self, mark: CapturedMark, act: str) -> Capture:
        """The capture that ``mark`` was made in; once it has ended, ``act`` and all else is refused."""
        if mark.capture not in self._open:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"{act} for an event last recorded in a capture that has ended")
        return mark.capture

    def exchange_mode(self, mode: CaptureMode) -> CaptureMode:
        """Set how far the calling thread heeds captures; returns what it was."""
        previous, self._mode.value = self._mode.value, mode
        return previous

    def refuse_unsafe(self, function: str) -> None:
        """The rule of cuThreadExchangeStreamCaptureMode: who may make a potentially unsafe call now.

        A thread is bound by its own captures, and in global mode by the global captures of others, too;
        relaxed threads and relaxed captures are not concerned. The refused call invalidates what it met.
        """
        mode = self._mode.value
        if mode is CaptureMode.RELAXED:
            return
        thread = threading.current_thread()
        met = [
            capture
            for capture in self._open
            if (capture.mode is not CaptureMode.RELAXED and capture.thread is thread)
            or (capture.mode is CaptureMode.GLOBAL and mode is CaptureMode.GLOBAL)
        ]
        if met:
            reason = f"{function} on thread {thread.name}"
            for capture in met:
                capture.invalidate(reason)
            raise Failure("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", f"{reason} invalidates the capture in progress")


class GraphExec:
    """An executable copy of a graph.

    Of nodes that no dependency orders, the one recorded last runs first. A GPU may run them in any order,
    so a fence that was forgotten within a capture shows as stale data here.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        # Replaced and never changed, so that replays already queued keep what they had.
        self.nodes = tuple((index, graph.nodes[index].work) for index in _latest_first(graph.nodes))

    def replace(self, index: int, work: Operation) -> None:
        """Let the node at ``index`` do ``work`` in replays from now on."""
        _require_alike(self.graph.nodes[index].work, work)
        self.nodes = tuple((position, work if position == index else present) for position, present in self.nodes)

    def update(self, graph: Graph) -> None:
        """Take over the work of every node of ``graph``, which must have the same nodes in the same order."""
        if [node.dependencies for node in graph.nodes] != [node.dependencies for node in self.graph.nodes]:
            raise Failure(
                "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
                f"CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED: {len(self.graph.nodes)} nodes, and "
                f"{len(graph.nodes)} in the graph given, or other dependencies",
            )
        for index, (mine, given) in enumerate(zip(self.graph.nodes, graph.nodes, strict=True)):
            try:
                _require_alike(mine.work, given.work)
            except Failure as difference:
                raise Failure(
                    "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
                    f"CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED: node {index}: {difference.context}",
                ) from None
        self.nodes = tuple((index, graph.nodes[index].work) for index, _ in self.nodes)

    def check(self) -> None:
        """Refuse a replay that would touch memory or code that is gone."""
        for index, work in self.nodes:
            dead = work.dead_operand()
            if dead is not None:
                raise Failure(
                    "CUDA_ERROR_INVALID_VALUE", f"replay refers to freed memory: node {index} ({work}): {dead}"
                )


@dataclass(frozen=True, slots=True)
class GraphRun:
    """One replay in a stream, with the work that the executable had when it was queued."""

    nodes: tuple[tuple[int, Operation], ...]

    def run(self) -> None:
        for index, work in self.nodes:
            try:
                work.run()
            except Failure as fault:
                raise Failure(fault.name, f"node {index} ({work}): {fault.context}") from fault.__cause__

    def __str__(self) -> str:
        return f"graph of {len(self.nodes)} nodes"


def _require_alike(present: Operation, work: Operation) -> None:
    """Refuse ``work`` as new parameters of a node that does ``present``, unless only its operands differ."""
    if present.node_type != work.node_type:
        raise Failure("CUDA_ERROR_INVALID_VALUE", f"{work} in place of {present}")
    if isinstance(present, KernelCall) and isinstance(work, KernelCall) and present.function is not work.function:
        raise Failure("CUDA_ERROR_INVALID_VALUE", f"another function: {work} in place of {present}")
    dead = work.dead_operand()
    if dead is not None:
        raise Failure("CUDA_ERROR_INVALID_VALUE", f"{work} refers to freed memory: {dead}")


def _latest_first(nodes: Sequence[GraphNode]) -> list[int]:
    """The topological order that always takes the highest index that is ready."""
    missing = [len(node.dependencies) for node in nodes]
    successors: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        for dependency in node.dependencies:
            successors[dependency].append(index)
    ready = [index for index, count in enumerate(missing) if count == 0]
    order = []
    while ready:
        # Ascending: a successor has a higher index than the node it followed, which was the highest.
        index = ready.pop()
        order.append(index)
        for successor in successors[index]:
            missing[successor] -= 1
            if missing[successor] == 0:
                ready.append(successor)
    return order
