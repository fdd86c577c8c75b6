"""One bucket of an engine: kernels, memory and graph for one combination of symbol sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from nxrt_cuda.dtype import uint8
from nxrt_cuda.engine.plan import BucketPlan
from nxrt_cuda.engine.report import BucketReport, NodeReport
from nxrt_cuda.engine.run_memory import Run, RunMemory
from nxrt_cuda.engine.signature import Sizes
from nxrt_cuda.engine.wiring import Step, operator_name
from nxrt_cuda.errors import NxrtError
from nxrt_cuda.interop import is_device_array
from nxrt_cuda.kernel import Kernel, create_kernel
from nxrt_cuda.tensor import MemoryOwner, TensorMetadata, TensorMut, TensorView

if TYPE_CHECKING:
    from nxrt_cuda.graph import CapturedGraph
    from nxrt_cuda.runtime import CudaRuntime

__all__ = ["Bucket"]

_NO_WORK = "launches nothing for these shapes"


@dataclass(frozen=True)
class _Execution:
    """A kernel and its operands; ``declined`` says why it is not recorded, None where it is."""

    step: Step
    kernel: Kernel
    inputs: tuple[TensorView | None, ...]
    outputs: tuple[TensorMut, ...]
    declined: str | None = None

    def __call__(self) -> None:
        self.kernel.execute(self.inputs, self.outputs)


class Bucket:
    """Made ready by :meth:`build`; then a run is :meth:`write` and :meth:`run`.

    Attributes:
        name: as graphs and reports call it.
        runs: how often it has run.
    """

    def __init__(
        self, runtime: CudaRuntime, plan: BucketPlan, bound: Mapping[str, TensorView], name: str, *, debug: bool
    ) -> None:
        self.name = name
        self.runs = 0
        self._runtime = runtime
        self._plan = plan
        self._bound = bound
        self._arena = runtime.alloc_graph_stable(plan.nbytes)
        self._tensors = {
            name: TensorMut(self._arena.ptr + offset, plan.metadata[name], self._arena)
            for name, offset in plan.offsets.items()
        }
        self._filled = dict.fromkeys(plan.padded, 0)
        self._fronts: dict[tuple[str, int], TensorMut] = {}
        self._executions: tuple[_Execution, ...] = ()
        self._graph: CapturedGraph | None = None
        self._calls: tuple[Callable[[], None], ...] = ()
        self._pinned: list[MemoryOwner] = []
        # Whose outputs are refused once the next has begun; None where nobody asked for that.
        self._run: Run | None = Run() if debug else None

    @classmethod
    def build(
        cls,
        runtime: CudaRuntime,
        steps: Sequence[Step],
        plan: BucketPlan,
        bound: Mapping[str, TensorView],
        name: str,
        *,
        debug: bool = False,
    ) -> Bucket:
        """Allocate, run once eagerly on zeros, and record what can be recorded.

        The caller holds the runtime. If anything fails, nothing is left behind.
        """
        bucket = cls(runtime, plan, bound, name, debug=debug)
        bucket._warm_up(steps)
        try:
            bucket._calls = tuple(bucket._record())
            if bucket._graph is not None and len(bucket._calls) == 1:
                bucket._calls = (bucket._graph.replay,)  # which costs less than one segment by its number
            bucket._pin()
        except BaseException:
            with suppress(NxrtError):  # what is raised already says what went wrong
                bucket.close()
            raise
        return bucket

    @property
    def nbytes(self) -> int:
        """Device memory that goes with the bucket: the arena, and the kernels' workspaces."""
        return self._arena.nbytes + self._workspace_nbytes

    @property
    def segments(self) -> int:
        return 0 if self._graph is None else self._graph.segment_count

    @property
    def eager_nodes(self) -> int:
        """How many nodes every run executes outside the graph."""
        return sum(execution.declined is not None for execution in self._executions)

    @property
    def _workspace_nbytes(self) -> int:
        return sum(int(execution.kernel.workspace_stats().live_bytes) for execution in self._executions)

    def write(self, name: str, value: Any, sizes: Sizes) -> None:
        """Fill an input. Where a batch is padded, the rows beyond its size are zeros."""
        runtime, target = self._runtime, self._tensors[name]
        symbol = self._plan.padded.get(name)
        if symbol is not None:
            rows, filled = sizes[symbol], self._filled[name]
            if rows < filled:
                runtime.fill_zero(target.narrow(0, rows, filled - rows))
            self._filled[name] = rows
            target = self._front(name, rows)
        if isinstance(value, TensorView):
            runtime.copy(target, value)
        elif is_device_array(value):
            runtime.copy(target, runtime.from_array(value))
        else:
            runtime.write(target, value)

    def run(self) -> None:
        """Enqueue the sequence: replays, and the kernels that are not recorded between them."""
        if self._run is not None:
            self._run.is_over = True
            self._run = Run()
            self._runtime.check_again()
        for call in self._calls:
            call()
        self.runs += 1

    def output(self, name: str, sizes: Sizes) -> TensorMut:
        """An output, without the rows of a padded batch."""
        symbol = self._plan.padded.get(name)
        tensor = self._tensors[name] if symbol is None else self._front(name, sizes[symbol])
        if self._run is None:
            return tensor
        return TensorMut(tensor.ptr, tensor.metadata, RunMemory(self._arena, self._run, self.name))

    def close(self) -> None:
        """Destroy the graph. The memory goes when nobody refers to it any more."""
        if self._graph is not None:
            self._graph.close()
        while self._pinned:
            self._pinned.pop().pins.remove(self.name)

    def report(self) -> BucketReport:
        return BucketReport(
            name=self.name,
            nodes=tuple(
                NodeReport(e.step.label, operator_name(e.step.node), e.declined is None, e.declined or "")
                for e in self._executions
            ),
            segments=self.segments,
            graph_nodes=0 if self._graph is None else self._graph.node_count,
            buffers=len(self._plan.offsets),
            buffer_nbytes=self._plan.nbytes,
            buffer_nbytes_without_reuse=self._plan.nbytes_without_reuse,
            workspace_nbytes=self._workspace_nbytes,
            runs=self.runs,
        )

    def _warm_up(self, steps: Sequence[Step]) -> None:
        """Run every kernel once, so that it is compiled and has its workspace; then ask whether it can be recorded."""
        arena = TensorMetadata(uint8, (self._arena.nbytes,))
        self._runtime.fill_zero(TensorMut(self._arena.ptr, arena, self._arena))
        executions = []
        for step in steps:
            shapes = [self._plan.metadata[name].shape if name else None for name in step.inputs]
            kernel = create_kernel(self._runtime, step.node, shapes)
            inputs = tuple(self._operand(name) if name else None for name in step.inputs)
            outputs = tuple(self._tensors[name] for name in step.outputs)
            work = self._work_done()
            kernel.execute(inputs, outputs)
            # A segment must not be empty, and a kernel that enqueues nothing has nothing to record.
            declined = kernel.capture_support().reason if self._work_done() > work else _NO_WORK
            executions.append(_Execution(step, kernel, inputs, outputs, declined))
        self._executions = tuple(executions)

    def _record(self) -> Iterator[Callable[[], None]]:
        """Record every run of kernels that can be; the calls that a run of the bucket makes."""
        for is_recorded, group in groupby(self._executions, key=lambda execution: execution.declined is None):
            if is_recorded:
                graph = self._record_segment([*group])
                yield partial(graph.replay_segment, graph.segment_count - 1)
            else:
                yield from group

    def _record_segment(self, executions: Sequence[_Execution]) -> CapturedGraph:
        kernels = [execution.kernel for execution in executions]
        with self._runtime.capture(kernels, into=self._graph, name=self.name) as self._graph:
            for execution in executions:
                execution()
        return self._graph

    def _pin(self) -> None:
        """Keep what runs outside the graph works on from being freed under it; the graph keeps what is its own."""
        outside = (execution for execution in self._executions if execution.declined is not None)
        views = (view for execution in outside for view in (*execution.inputs, *execution.outputs) if view is not None)
        for owner in {id(view.owner): view.owner for view in views}.values():
            owner.pins.append(self.name)
            self._pinned.append(owner)

    def _operand(self, name: str) -> TensorView:
        return self._bound[name] if name in self._bound else self._tensors[name]

    def _front(self, name: str, rows: int) -> TensorMut:
        if (name, rows) not in self._fronts:
            self._fronts[name, rows] = self._tensors[name].narrow(0, 0, rows)
        return self._fronts[name, rows]

    def _work_done(self) -> int:
        stats = self._runtime.stats()
        return stats.launches + stats.memsets + stats.dtod_copies
