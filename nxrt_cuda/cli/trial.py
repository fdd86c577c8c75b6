"""One operator run eagerly, captured and replayed; every step counted, checked and timed.

Replays read their inputs from the addresses that were recorded, so each replay here gets new contents
first, and an output full of a canary: what it leaves there is its own work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

import numpy as np

from nxrt_cuda.capture import CaptureErrorCode
from nxrt_cuda.cli.operators import Arrays, Comparison, Operator
from nxrt_cuda.kernel import create_kernel
from nxrt_cuda.node import Node
from nxrt_cuda.runtime import CudaRuntime
from nxrt_cuda.stats import RuntimeStats
from nxrt_cuda.tensor import TensorMetadata

__all__ = ["Check", "Contents", "Step", "Timing", "Trial", "TrialReport"]

_REPLAY = "replay"

_CANARY = 0xA5

_MOST_REPETITIONS = 50
_SECONDS_FOR_REPETITIONS = 1.0


@dataclass(frozen=True)
class Contents:
    """Values for every input.

    Attributes:
        name: what they are, in words.
        arrays: by input name.
    """

    name: str
    arrays: Arrays


@dataclass(frozen=True)
class Step:
    """What the runtime did in one kind of step of the trial.

    Attributes:
        name: the step.
        times: how often it was taken.
        counters: of all those times together.
    """

    name: str
    times: int
    counters: RuntimeStats


@dataclass(frozen=True)
class Check:
    """What one execution left in the output.

    Attributes:
        name: ``"eager"`` or ``"replay 1"``.
        contents: what the inputs were.
        oracle: how it compares with the oracle; None where that was not asked for.
        equals_eager: whether an eager execution on the same contents gives the same bytes; None for the
            eager execution itself.
    """

    name: str
    contents: str
    oracle: Comparison | None
    equals_eager: bool | None

    @property
    def passed(self) -> bool:
        return self.equals_eager is not False and (self.oracle is None or self.oracle.passed)

    @property
    def failure(self) -> str:
        """Why it did not pass."""
        if self.oracle is not None and not self.oracle.passed:
            return f"{self.name} ({self.contents}) against the oracle: {self.oracle.text}"
        return f"{self.name} ({self.contents}) does not give the bytes of an eager execution"


@dataclass(frozen=True)
class Timing:
    """Medians over a number of repetitions.

    Attributes:
        repetitions: how many.
        stream_ms: milliseconds between events on the compute stream before and after.
        call_us: microseconds until the call returns to the caller.
    """

    repetitions: int
    stream_ms: float
    call_us: float


@dataclass(frozen=True)
class TrialReport:
    """All that a trial found.

    Attributes:
        node: what was run.
        operands: the inputs and the output by name.
        steps: what the runtime did, step by step.
        checks: the eager execution's, then one a replay.
        timings: ``"eager"`` and ``"replay"``.
        kernel_stats, workspace_stats: the kernel object's own counters, after the steps.
        clamped: the lengths that kernels had to clamp.
        result: what the last execution wrote.
    """

    node: Node
    operands: Mapping[str, TensorMetadata]
    steps: tuple[Step, ...]
    checks: tuple[Check, ...]
    timings: Mapping[str, Timing]
    kernel_stats: Mapping[str, Any]
    workspace_stats: Mapping[str, Any]
    clamped: CaptureErrorCode
    result: np.ndarray

    @property
    def failures(self) -> tuple[str, ...]:
        """What is not as it has to be: results, and replays that are more than one call into the driver."""
        wrong = [check.failure for check in self.checks if not check.passed]
        for step in self.steps:
            if step.name == _REPLAY:
                extra = {f.name: getattr(step.counters, f.name) for f in fields(RuntimeStats)}
                replays = extra.pop("graph_replays")
                noted = ", ".join(f"{name} {value}" for name, value in extra.items() if value)
                if replays != step.times or noted:
                    wrong.append(f"{step.times} calls of replay() gave graph_replays {replays}, {noted}")
        return tuple(wrong)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything but the result."""
        return {
            "op": self.node.op_type,
            "domain": self.node.domain,
            "attributes": dict(self.node.attributes),
            "operands": {
                name: {"dtype": operand.dtype.numpy.name, "shape": list(operand.shape)}
                for name, operand in self.operands.items()
            },
            "passed": not self.failures,
            "failures": list(self.failures),
            "checks": [{**asdict(check), "passed": check.passed} for check in self.checks],
            "steps": {step.name: {"times": step.times, **asdict(step.counters)} for step in self.steps},
            "times": {name: asdict(timing) for name, timing in self.timings.items()},
            "kernel": dict(self.kernel_stats),
            "workspace": dict(self.workspace_stats),
            "clamped": [code.name for code in CaptureErrorCode if code & self.clamped],
        }


class Trial:
    """The tensors and the kernel object of one node on one runtime.

    Raises:
        KernelError, UnsupportedError: the node or an operand is not what the operator takes.
    """

    def __init__(self, runtime: CudaRuntime, operator: Operator, node: Node, contents: Contents) -> None:
        self._runtime = runtime
        self._operator = operator
        self._node = node
        self._first = contents
        self._steps: dict[str, Step] = {}
        metadata = operator.output_metadata(node, contents.arrays)
        with self._counting("upload inputs"):
            self._output = runtime.empty(metadata.shape, metadata.dtype)
            self._tensors = {name: runtime.from_array(array) for name, array in contents.arrays.items()}
        self._canary = np.full(metadata.nbytes, _CANARY, np.uint8).view(metadata.dtype.numpy).reshape(metadata.shape)
        self._inputs = [self._tensors.get(name) for name in operator.given(contents.arrays)]
        self._kernel = create_kernel(runtime, node, [None if t is None else t.shape for t in self._inputs])

    def run(self, replays: Sequence[Contents], *, check: bool) -> TrialReport:
        """Execute eagerly, capture, and replay once for each of ``replays``.

        ``check`` compares every result with the oracle; that each replay gives an eager execution's bytes
        is always checked. There are no replays of an empty output, for which nothing is launched.
        """
        runtime = self._runtime
        if self._output.metadata.elements == 0:
            replays = ()
        runtime.reset_capture_error()
        results = [self._result_of("execute, first", self._execute)]
        with self._counting("execute, again"):
            self._execute()
        if replays:
            with self._counting("capture"), runtime.capture([self._kernel], name=self._node.op_type) as graph:
                self._execute()
            results += [self._result_of(_REPLAY, graph.replay, contents) for contents in replays]
        steps = tuple(self._steps.values())
        kernel_stats, workspace_stats = self._kernel.launch_stats(), self._kernel.workspace_stats()
        checks = [self._check("eager", self._first, results[0], None, with_oracle=check)]
        for number, (contents, result) in enumerate(zip(replays, results[1:], strict=True), start=1):
            eager = self._result_of("execute, to compare", self._execute, contents)
            checks.append(self._check(f"replay {number}", contents, result, eager, with_oracle=check))
        clamped = runtime.check_capture_error()
        timings = {"eager": self._time(self._execute)}
        if replays:
            timings["replay"] = self._time(graph.replay)
        return TrialReport(
            node=self._node,
            operands={
                **{name: tensor.metadata for name, tensor in self._tensors.items()},
                self._operator.output: self._output.metadata,
            },
            steps=steps,
            checks=tuple(checks),
            timings=timings,
            kernel_stats=asdict(kernel_stats),
            workspace_stats=asdict(workspace_stats),
            clamped=clamped,
            result=results[-1],
        )

    def _execute(self) -> None:
        self._kernel.execute(self._inputs, [self._output])

    def _result_of(self, step: str, run: Callable[[], None], contents: Contents | None = None) -> np.ndarray:
        """What ``run`` writes over the canary, with new contents in the inputs if they are given."""
        with self._counting("refill buffers"):
            if contents is not None:
                for name, tensor in self._tensors.items():
                    tensor.copy_from(contents.arrays[name])
            self._output.copy_from(self._canary)
        with self._counting(step):
            run()
        with self._counting("read output"):
            return self._output.numpy()

    @contextmanager
    def _counting(self, name: str) -> Iterator[None]:
        before = self._runtime.stats()
        yield
        seen = self._runtime.stats().since(before)
        step = self._steps.get(name, Step(name, 0, RuntimeStats()))
        self._steps[name] = Step(name, step.times + 1, _sum(step.counters, seen))

    def _check(
        self, name: str, contents: Contents, result: np.ndarray, eager: np.ndarray | None, *, with_oracle: bool
    ) -> Check:
        return Check(
            name=name,
            contents=contents.name,
            oracle=self._operator.compare(self._node, contents.arrays, result) if with_oracle else None,
            equals_eager=None if eager is None else result.tobytes() == eager.tobytes(),
        )

    def _time(self, run: Callable[[], None]) -> Timing:
        runtime = self._runtime
        stream_ms: list[float] = []
        call_us: list[float] = []
        deadline = time.perf_counter() + _SECONDS_FOR_REPETITIONS
        while not call_us or (len(call_us) < _MOST_REPETITIONS and time.perf_counter() < deadline):
            start = runtime.record_event()
            called = time.perf_counter()
            run()
            call_us.append((time.perf_counter() - called) * 1e6)
            stream_ms.append(start.elapsed_time(runtime.record_event()))
        return Timing(len(call_us), median(stream_ms), median(call_us))


def _sum(left: RuntimeStats, right: RuntimeStats) -> RuntimeStats:
    return RuntimeStats(**{f.name: getattr(left, f.name) + getattr(right, f.name) for f in fields(RuntimeStats)})
