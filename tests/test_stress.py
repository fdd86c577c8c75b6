"""The whole runtime at once: long random walks over its operations, against plain NumPy arrays.

The host driver lets no slip pass: nothing runs before somebody waits for it, fresh memory is NaN, no address
is used twice, and what touches freed memory ends the context. A walk that fails fails again with its seed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.stats import WorkspaceLedger
from nxrt_cuda.transfer import PendingRead
from nxrt_cuda.workspace import Workspace
from tests.small_kernels import ADD_ONE, HOST_ENTRIES, SCALE, Background

Effect = Callable[[], None]


@dataclass(eq=False)
class Cell:
    """A tensor, and what it must hold."""

    tensor: nx.TensorMut
    expected: np.ndarray


@dataclass(eq=False)
class Recorded:
    """A graph, and what a replay of each segment does to the expected values. Keeps no tensor alive."""

    graph: nx.CapturedGraph
    segments: list[list[Effect]]
    touched: list[np.ndarray]

    def holds(self, cell: Cell) -> bool:
        return any(np.may_share_memory(array, cell.expected) for array in self.touched)


class Abandoned(Exception):
    """Raised by a captured body of its own accord."""


class Walk:
    """Random operations on a runtime, each done to NumPy arrays too.

    Within a capture an operation's effect is recorded beside the launch, and takes place at each replay.
    """

    def __init__(self, rt: nx.CudaRuntime, seed: int, *, whole_replays: bool = True) -> None:
        self.rt = rt
        self.rng = np.random.default_rng(seed)
        self.cells: list[Cell] = []
        self.graphs: list[Recorded] = []
        self.reads: list[tuple[PendingRead, np.ndarray]] = []
        self.raw_memory: list[int] = []
        self.whole_replays = whole_replays
        self.workspace = Workspace(rt, "Stress", WorkspaceLedger())
        self.recording: Recorded | None = None
        self.at_risk: Cell | None = None
        for kernel in (ADD_ONE, SCALE):
            kernel.load(rt)
        for _ in range(4):
            self.create()

    def step(self) -> None:
        """One operation, and the runtime's accounts compared with the driver's."""
        self.at_risk = None
        self.choose(OPERATIONS)(self)
        with self.rt.exclusive():
            stats, live = self.rt.stats(), self.rt._driver.live()
        assert stats.live_bytes == live.device_bytes
        assert stats.driver_allocations - stats.driver_frees == live.allocations - 1  # the capture-error word

    def check(self) -> None:
        """Every tensor holds what it must, but the one that a failed upload has left undefined."""
        for cell in self.cells:
            if cell is not self.at_risk:
                np.testing.assert_array_equal(cell.tensor.numpy(), cell.expected)

    def finish(self) -> None:
        """Check everything, let go of everything, and see that the driver has it back."""
        self.check()
        while self.reads:
            self.finish_read()
        while self.raw_memory:
            self.rt.free_raw(self.raw_memory.pop())
        self.at_risk = None
        self.cells.clear()
        self.graphs.clear()
        self.workspace = Workspace(self.rt, "Stress", WorkspaceLedger())

    # Choices.

    def choose(self, options: Sequence[Any]) -> Any:
        return options[self.rng.integers(len(options))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def values(self, n: int) -> np.ndarray:
        return self.rng.integers(-100, 100, n).astype(np.float32)

    def windows(self, count: int) -> list[tuple[nx.TensorView, np.ndarray]]:
        """Equally long parts of ``count`` different tensors, and of their expected values."""
        cells = [self.cells[i] for i in self.rng.permutation(len(self.cells))[:count]]
        n = int(self.rng.integers(1, min(cell.expected.size for cell in cells) + 1))
        parts = []
        for cell in cells:
            start = int(self.rng.integers(cell.expected.size - n + 1))
            parts.append((cell.tensor.narrow(0, start, n), cell.expected[start : start + n]))
        return parts

    def take_effect(self, effect: Effect, *touched: np.ndarray) -> None:
        """Now, or in a capture at every replay."""
        if self.recording is None:
            effect()
        else:
            self.recording.segments[-1].append(effect)
            self.recording.touched += touched

    def let_go_of_one(self, items: list[Any]) -> None:
        """Drop its last reference, every other time in a cycle that only the collector finds."""
        cycle = [items.pop(int(self.rng.integers(len(items))))]
        if self.chance(0.5):
            cycle.append(cycle)
            del cycle
            gc.collect(0)

    # Memory and copies.

    def create(self) -> None:
        """From an array, of zeros, or empty and then written; small, or larger than anything in the pool."""
        if len(self.cells) > 10:
            self.drop()
        n = int(self.rng.integers(1, 400_000 if self.chance(0.05) else 2000))
        values = self.values(n)
        way = self.rng.integers(3)
        if way == 0:
            tensor = self.rt.from_array(values)
        elif way == 1:
            values[:] = 0
            tensor = self.rt.zeros((n,), nx.float32)
        else:
            tensor = self.rt.empty((n,), nx.float32)
            tensor.copy_from(values)
        self.cells.append(Cell(tensor, values))

    def drop(self) -> None:
        if len(self.cells) > 4:
            self.let_go_of_one(self.cells)

    def free(self) -> None:
        """Refused while a graph refers to the tensor; a freed one is refused everywhere."""
        cell = self.choose(self.cells)
        if any(recorded.holds(cell) for recorded in self.graphs):
            with pytest.raises(nx.DeviceMemoryError, match="referred to by graph"):
                cell.tensor.free()
        elif len(self.cells) > 4:
            cell.tensor.free()
            self.cells.remove(cell)
            with pytest.raises(nx.DeviceMemoryError, match="was freed"):
                cell.tensor.numpy()

    def trim(self) -> None:
        self.rt.trim_pool()

    def write(self) -> None:
        """On either stream, from an array that is overwritten as soon as the call returns."""
        self.at_risk = cell = self.choose(self.cells)
        values = self.values(cell.expected.size)
        source = values.copy()
        self.rt.write(cell.tensor, source, asynchronous=self.chance(0.5))
        source[:] = np.nan
        cell.expected[:] = values

    def read(self) -> None:
        cell = self.choose(self.cells)
        np.testing.assert_array_equal(cell.tensor.numpy(), cell.expected)

    def read_later(self) -> None:
        """What is read is the value at this moment, whatever becomes of the tensor; sometimes nobody wants it."""
        cell = self.choose(self.cells)
        pending = self.rt.read_async(cell.tensor)
        if self.chance(0.7):
            self.reads.append((pending, cell.expected.copy()))

    def finish_read(self) -> None:
        if self.reads:
            pending, expected = self.reads.pop(int(self.rng.integers(len(self.reads))))
            np.testing.assert_array_equal(pending.numpy(), expected)

    def raw(self) -> None:
        """The life of an address: allocated, filled, changed by a kernel, read, freed; on either stream."""
        n = int(self.rng.integers(1, 2000))
        values = self.values(n)
        ptr = self.rt.alloc_raw(values.nbytes)
        self.raw_memory.append(ptr)
        (self.rt.htod_async if self.chance(0.5) else self.rt.htod)(values, ptr)
        self.rt.launch(ADD_ONE.prepare(self.rt, n, ptr, n))
        if self.chance(0.5):
            result = self.rt.dtoh_async(ptr, values.nbytes).numpy().view(np.float32)
        else:
            result = np.empty_like(values)
            self.rt.dtoh(result, ptr)
        self.rt.free_raw(ptr)
        self.raw_memory.remove(ptr)
        np.testing.assert_array_equal(result, values + 1)

    def synchronize(self) -> None:
        self.rt.synchronize()

    # Work that a capture records.

    def add_one(self) -> None:
        ((x, expected),) = self.windows(1)
        self.rt.launch(ADD_ONE.prepare(self.rt, expected.size, x, expected.size))
        self.take_effect(lambda: np.add(expected, 1, out=expected), expected)

    def scale(self) -> None:
        (out, result), (x, source) = self.windows(2)
        factor = np.float32(self.choose([-1, 0.5]))
        self.rt.launch(SCALE.prepare(self.rt, source.size, out, x, float(factor), source.size))
        self.take_effect(lambda: np.multiply(source, factor, out=result), result, source)

    def copy(self) -> None:
        (out, result), (x, source) = self.windows(2)
        self.rt.copy(out, x)
        self.take_effect(lambda: np.copyto(result, source), result, source)

    def zero(self) -> None:
        ((x, expected),) = self.windows(1)
        self.rt.fill_zero(x)
        self.take_effect(lambda: expected.fill(0), expected)

    def through_workspace(self) -> None:
        """Two launches with scratch between them, which grows as needed, and is refused to grow in a capture."""
        (out, result), (x, source) = self.windows(2)
        n = source.size
        if self.recording is not None and 4 * n > self.workspace.nbytes:
            with pytest.raises(nx.CaptureError, match=f"workspace requires {4 * n} bytes during CUDA graph capture"):
                self.workspace.candidate(4 * n)
            return
        slot = self.workspace.candidate(4 * n)
        self.rt.launch(SCALE.prepare(self.rt, n, slot.ptr, x, 0.5, n))
        self.rt.launch(SCALE.prepare(self.rt, n, out, slot.ptr, -1.0, n))
        self.workspace.publish(slot)
        assert self.workspace.ptr == slot.ptr
        self.rt.retain(self.workspace.device_graph_resources())
        self.take_effect(lambda: np.multiply(source, np.float32(-0.5), out=result), result, source)

    # Graphs.

    def capture(self) -> None:
        """Record a few operations, among them some that a capture refuses; now and then give up half-way."""
        while len(self.graphs) > 3:
            self.close_graph()
        extended = self.choose(self.graphs) if self.graphs and self.chance(0.3) else None
        segments = len(extended.segments) if extended else 0
        try:
            with self.rt.capture(into=extended.graph if extended else None) as graph:
                self.recording = Recorded(graph, [[]], [])
                self.zero()
                for _ in range(self.rng.integers(5)):
                    self.choose(RECORDABLE)(self)
                if self.chance(0.2):
                    raise Abandoned
        except (Abandoned, nx.NxrtError) as error:
            assert extended is None or extended.graph.segment_count == segments
            if not isinstance(error, Abandoned):
                raise
        else:
            recorded = extended or Recorded(graph, [], [])
            recorded.segments += self.recording.segments
            recorded.touched += self.recording.touched
            if extended is None:
                self.graphs.append(recorded)
        finally:
            self.recording = None

    def refused(self) -> None:
        """What would spoil the capture raises, and leaves it as it was."""
        cell = self.choose(self.cells)
        attempts = [
            lambda: self.rt.empty((8,), nx.float32),
            lambda: self.rt.read_async(cell.tensor),
            lambda: cell.tensor.copy_from(cell.expected),
            cell.tensor.numpy,
            cell.tensor.free,
            self.rt.synchronize,
            self.rt.trim_pool,
            *(method for recorded in self.graphs for method in (recorded.graph.replay, recorded.graph.close)),
            *(pending.numpy for pending, _ in self.reads),
        ]
        with pytest.raises(nx.CaptureError, match="captures a CUDA graph"):
            self.choose(attempts)()

    def replay(self) -> None:
        """All segments, or one of them."""
        if self.graphs:
            recorded = self.choose(self.graphs)
            which = range(len(recorded.segments))
            if len(which) == 1 or (self.whole_replays and self.chance(0.5)):
                recorded.graph.replay()
            else:
                which = [int(self.rng.integers(len(which)))]
                recorded.graph.replay_segment(which[0])
            for index in which:
                for effect in recorded.segments[index]:
                    effect()

    def close_graph(self) -> None:
        if self.graphs:
            self.graphs.pop(int(self.rng.integers(len(self.graphs)))).graph.close()

    def drop_graph(self) -> None:
        if self.graphs:
            self.let_go_of_one(self.graphs)


RECORDABLE = [
    *[Walk.add_one, Walk.scale, Walk.copy, Walk.zero, Walk.through_workspace] * 3,
    *[Walk.refused, Walk.drop, Walk.drop_graph],
]
OPERATIONS = [
    *[Walk.add_one, Walk.scale, Walk.copy, Walk.zero, Walk.through_workspace] * 3,
    *[Walk.create, Walk.drop, Walk.free, Walk.trim, Walk.raw, Walk.synchronize],
    *[Walk.write, Walk.read, Walk.read_later, Walk.finish_read] * 2,
    *[Walk.capture, Walk.replay, Walk.replay] * 2,
    *[Walk.close_graph, Walk.drop_graph],
]


def open_runtime(pool_limit: int | None) -> nx.CudaRuntime:
    return nx.open_runtime("host", host_entries=HOST_ENTRIES, pool_limit=pool_limit)


def expect_only_the_error_word(rt: nx.CudaRuntime) -> None:
    """All memory and all graphs are back with the driver, before the runtime is closed."""
    gc.collect()
    rt.trim_pool()
    live = rt._driver.live()
    assert (live.allocations, live.graphs, live.graph_execs) == (1, 0, 0), str(live)
    assert rt.stats().pool_retained_bytes == 0


@pytest.fixture(params=[None, 0, 16 << 10], ids=["pool", "no-pool", "small-pool"])
def runtime(request: pytest.FixtureRequest) -> Iterator[nx.CudaRuntime]:
    """One that has given back everything when it is closed."""
    rt = open_runtime(request.param)
    yield rt
    rt.close()
    assert not rt._driver.live(), f"leaked: {rt._driver.live()}"


@pytest.mark.parametrize("seed", range(3))
def test_a_long_walk_leaves_the_values_of_numpy_and_no_memory(runtime: nx.CudaRuntime, seed: int) -> None:
    walk = Walk(runtime, seed)
    for _ in range(1000):
        walk.step()
    stats = runtime.stats()
    counts = stats.graphs_captured, stats.aborted_captures, stats.graph_replays, stats.async_copies, stats.dtod_copies
    assert min(counts) > 5, f"the walk did not get around: {stats}"
    walk.finish()
    expect_only_the_error_word(runtime)


def test_two_threads_walk_on_one_runtime_and_do_not_disturb_each_other(runtime: nx.CudaRuntime) -> None:
    """Each has tensors and graphs of its own; a capture of one keeps the other's work out of it."""

    def run(seed: int) -> None:
        walk = Walk(runtime, seed)
        for _ in range(500):
            walk.step()
        walk.finish()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with Background(run, 100):
            run(101)
    finally:
        sys.setswitchinterval(interval)
    expect_only_the_error_word(runtime)


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_survives_driver_calls_that_fail(runtime: nx.CudaRuntime, seed: int) -> None:
    """A call that fails has changed nothing but the target of an upload; everything else goes on and comes back."""
    walk, driver = Walk(runtime, seed, whole_replays=False), runtime._driver
    failures = 0
    for _ in range(400):
        error = walk.choose(["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NOT_PERMITTED"])
        with driver.fail_call(int(walk.rng.integers(1, 12)), error) as failure:
            try:
                walk.step()
            except (nx.DriverError, nx.GraphError):
                assert failure.fired
                failures += 1
        if failure.fired:
            walk.check()
            if walk.at_risk is not None:
                walk.at_risk.tensor.copy_from(walk.at_risk.expected)
    assert failures > 50
    walk.finish()
    expect_only_the_error_word(runtime)
