"""Captures and graphs: what a graph owns, what a capture refuses, and how it always ends."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.driver.base import CaptureStatus
from nxrt_cuda.driver.host import HostDriver
from nxrt_cuda.stats import WorkspaceLedger
from nxrt_cuda.workspace import Workspace
from tests.small_kernels import ADD_ONE, HOST_ENTRIES, LATCH, SCALE, Background, open_on


@pytest.fixture
def x(rt: nx.CudaRuntime) -> nx.TensorMut:
    return rt.zeros((4,), nx.float32)


@pytest.fixture
def add_one(rt: nx.CudaRuntime, x: nx.TensorMut) -> nx.PreparedLaunch:
    return ADD_ONE.prepare(rt, 4, x, 4)


class Asked(nx.Kernel):
    """A kernel that answers the audit as it is told to."""

    def __init__(self, support: nx.CaptureSupport, resource: Any = None) -> None:
        self.support = support
        self.resource = resource

    def execute(self, inputs: Any, outputs: Any) -> None:
        raise NotImplementedError

    def capture_support(self) -> nx.CaptureSupport:
        return self.support

    def device_graph_resources(self) -> tuple[nx.DeviceGraphResource, ...]:
        return () if self.resource is None else (nx.DeviceGraphResource(id(self.resource), self.resource),)

    def launch_stats(self) -> None: ...

    def workspace_stats(self) -> None: ...


# Recording and replaying.


def test_a_capture_records_and_runs_nothing(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)
        rt.launch(launch)
    np.testing.assert_array_equal(x.numpy(), np.zeros(4))
    assert (graph.node_count, graph.segment_count, graph.replays) == (2, 1, 0)
    assert graph.node_types == ("KERNEL", "KERNEL")
    assert graph.kernels == ("add_one grid=(1, 1, 1) block=(128, 1, 1)",) * 2


def test_each_replay_is_the_recorded_work_once_more(rt: nx.CudaRuntime) -> None:
    """Equal to eager when only the contents of its inputs change."""
    x, y = rt.zeros((1000,), nx.float32), rt.zeros((1000,), nx.float32)
    scale, add = SCALE.prepare(rt, 1000, y, x, 3.0, 1000), ADD_ONE.prepare(rt, 1000, y, 1000)
    with rt.capture() as graph:
        rt.launch(scale)
        rt.launch(add)
    for seed in range(4):
        x.copy_from(np.random.default_rng(seed).standard_normal(1000, np.float32))
        rt.launch(scale)
        rt.launch(add)
        eager = y.numpy()
        rt.fill_zero(y)
        graph.replay()
        np.testing.assert_array_equal(y.numpy(), eager)
    assert graph.replays == 4


def test_copies_and_fills_are_recorded_too(rt: nx.CudaRuntime) -> None:
    x, y, z = (rt.from_array(np.full(4, value, np.float32)) for value in (1, 2, 3))
    with rt.capture() as graph:
        rt.copy(y, x)
        rt.fill_zero(x)
        rt.dtod(z.ptr, y.ptr, 8)
    np.testing.assert_array_equal(y.numpy(), np.full(4, 2))
    graph.replay()
    np.testing.assert_array_equal(x.numpy(), np.zeros(4))
    np.testing.assert_array_equal(y.numpy(), np.ones(4))
    np.testing.assert_array_equal(z.numpy(), [1, 1, 3, 3])
    assert sorted(graph.node_types) == ["MEMCPY", "MEMCPY", "MEMSET"]


def test_a_result_that_was_read_is_not_overwritten_by_the_next_replay(rt: nx.CudaRuntime) -> None:
    """Copied out by numpy, by an asynchronous read, or into another tensor, between one replay and the next."""
    x, kept = rt.zeros((4,), nx.float32), rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)
    graph.replay()
    pending = rt.read_async(x)
    rt.copy(kept, x)
    graph.replay()
    second = x.numpy()
    graph.replay()
    np.testing.assert_array_equal(pending.numpy(), np.full(4, 1))
    np.testing.assert_array_equal(kept.numpy(), np.full(4, 1))
    np.testing.assert_array_equal(second, np.full(4, 2))
    np.testing.assert_array_equal(x.numpy(), np.full(4, 3))


def test_graph_counters(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    before = rt.stats()
    with rt.capture() as graph:
        rt.launch(launch)
    with rt.capture(into=graph):
        rt.launch(launch)
        rt.launch(launch)
    graph.replay()
    graph.replay_segment(1)
    done = rt.stats().since(before)
    assert (done.graphs_captured, done.graph_replays, done.aborted_captures, done.launches) == (2, 3, 0, 3)
    np.testing.assert_array_equal(x.numpy(), np.full(4, 5))


def test_a_replay_is_one_driver_call_a_segment(rt: nx.CudaRuntime, add_one: nx.PreparedLaunch) -> None:
    with rt.capture() as graph:
        for _ in range(10):
            rt.launch(add_one)
    driver = rt._driver
    before, launches = driver.calls_total, driver.calls["graph_launch"]
    graph.replay()
    assert driver.calls_total - before == driver.calls["graph_launch"] - launches == 1


def test_a_graph_prints_its_state(rt: nx.CudaRuntime, add_one: nx.PreparedLaunch) -> None:
    with rt.capture(name="decoder") as graph:
        rt.launch(add_one)
    graph.replay()
    assert repr(graph) == "CapturedGraph('decoder', 1 segment(s), 1 node(s), 1 replay(s))"
    graph.close()
    assert repr(graph) == "CapturedGraph('decoder', closed, 1 replay(s))"


def test_a_capture_that_recorded_nothing_is_warned_of_where_it_was_written(rt: nx.CudaRuntime) -> None:
    """An empty graph is most often work that went to another stream."""
    message = "recorded nothing: no launch reached the captured stream"
    with pytest.warns(RuntimeWarning, match=f"^graph 1 {message}$") as seen, rt.capture() as graph:
        pass
    assert seen[0].filename == __file__
    assert graph.node_count == 0
    graph.replay()
    rt.begin_graph_capture()
    with pytest.warns(RuntimeWarning, match=f"^the primary graph {message}$") as seen:
        rt.end_graph_capture()
    assert seen[0].filename == __file__


def test_a_zero_grid_records_nothing(rt: nx.CudaRuntime, x: nx.TensorMut) -> None:
    empty = rt.prepare(ADD_ONE.load(rt), nx.LaunchConfig((0, 1, 1), (128, 1, 1)), x, 0)
    with pytest.warns(RuntimeWarning, match="recorded nothing"), rt.capture() as graph:
        rt.launch(empty)
    assert graph.node_count == 0


# What a graph owns.


def test_a_graph_keeps_its_buffers_until_it_is_closed(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    owner, address = weakref.ref(x.owner), x.ptr
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)
    del x, launch
    gc.collect()
    assert owner() is not None
    assert rt.zeros((4,), nx.float32).ptr != address
    graph.replay()
    rt.synchronize()
    graph.close()
    gc.collect()
    assert owner() is None
    assert rt.zeros((4,), nx.float32).ptr == address


def test_a_graph_that_is_dropped_lets_go_like_one_that_is_closed(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    owner = weakref.ref(x.owner)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)
    del x, launch, graph
    gc.collect()
    rt.alloc_raw(1)
    gc.collect()
    assert owner() is None
    assert rt._driver.live().graphs == rt._driver.live().graph_execs == 0


def test_operands_of_copies_and_fills_are_kept_too(rt: nx.CudaRuntime) -> None:
    tensors = [rt.zeros((4,), nx.float32) for _ in range(3)]
    owners = [weakref.ref(tensor.owner) for tensor in tensors]
    with rt.capture() as graph:
        rt.copy(tensors[0], tensors[1])
        rt.fill_zero(tensors[2])
    del tensors
    gc.collect()
    assert all(owner() is not None for owner in owners)
    graph.replay()
    graph.close()
    gc.collect()
    assert all(owner() is None for owner in owners)


def test_operands_named_to_launch_are_kept(rt: nx.CudaRuntime) -> None:
    """A kernel object renews addresses in a launch that it keeps, and names the tensors."""
    launch = ADD_ONE.prepare(rt, 4, 0, 4)
    x = rt.zeros((4,), nx.float32)
    launch.bind(x.ptr)
    owner = weakref.ref(x.owner)
    with rt.capture() as graph:
        rt.launch(launch, [x])
    del x
    gc.collect()
    assert owner() is not None
    graph.close()
    gc.collect()
    assert owner() is None


def test_resources_of_audited_kernels_and_retained_ones_are_kept(
    rt: nx.CudaRuntime, add_one: nx.PreparedLaunch
) -> None:
    class Resource:
        pass

    audited, retained = Resource(), Resource()
    alive = [weakref.ref(audited), weakref.ref(retained)]
    kernel = Asked(nx.CaptureSupport.supported(), audited)
    with rt.capture([kernel]) as graph:
        rt.launch(add_one)
        rt.retain([nx.DeviceGraphResource(1, retained)])
    del audited, retained, kernel
    gc.collect()
    assert all(resource() is not None for resource in alive)
    graph.close()
    gc.collect()
    assert all(resource() is None for resource in alive)


def test_retaining_outside_a_capture_keeps_nothing(rt: nx.CudaRuntime) -> None:
    class Resource:
        pass

    resource = Resource()
    alive = weakref.ref(resource)
    rt.retain([nx.DeviceGraphResource(1, resource)])
    del resource
    gc.collect()
    assert alive() is None


def test_memory_of_a_live_graph_cannot_be_freed(rt: nx.CudaRuntime) -> None:
    """The error names every graph that refers to it; all must be closed first."""
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    graphs = []
    for name in ("encoder", "decoder"):
        with rt.capture(name=name) as graph:
            rt.launch(launch)
        graphs.append(graph)
    with pytest.raises(nx.DeviceMemoryError, match=r"the memory at 0x[0-9a-f]+ is referred to by encoder, decoder; "):
        x.free()
    graphs[0].close()
    with pytest.raises(nx.DeviceMemoryError, match="is referred to by decoder; "):
        x.free()
    graphs[1].replay()
    graphs[1].close()
    x.free()
    assert x.owner.is_freed


def test_raw_memory_of_a_live_graph_cannot_be_freed_either(rt: nx.CudaRuntime) -> None:
    """Used by address, at its start or inside, by a copy alone, a launch alone or both; what is not used stays free."""
    source, middle, raw, unused = (rt.alloc_raw(nbytes) for nbytes in (16, 16, 64, 64))
    rt.htod(np.arange(4, dtype=np.float32), source)
    launch = SCALE.prepare(rt, 4, raw + 48, middle, 2.0, 4)
    with rt.capture(name="decoder") as graph:
        rt.dtod(middle, source, 16)
        rt.launch(launch)
    for ptr in (source, middle, raw):
        with pytest.raises(nx.DeviceMemoryError, match="is referred to by decoder"):
            rt.free_raw(ptr)
    rt.free_raw(unused)
    graph.replay()
    target = np.zeros(4, np.float32)
    rt.dtoh(target, raw + 48)
    np.testing.assert_array_equal(target, [0, 2, 4, 6])
    graph.close()
    for ptr in (source, middle, raw):
        rt.free_raw(ptr)


def test_two_graphs_of_one_name_pin_twice(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    graphs = []
    for _ in range(2):
        with rt.capture(name="same") as graph:
            rt.launch(launch)
        graphs.append(graph)
    graphs[0].close()
    assert x.owner.pins == ["same"]
    graphs[1].close()
    assert x.owner.pins == []


def test_a_tensor_that_a_graph_uses_many_times_is_pinned_once(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture(name="g") as graph:
        for _ in range(5):
            rt.launch(launch)
    assert x.owner.pins == ["g"]
    graph.close()


# Closing.


def test_a_closed_graph_does_not_replay(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture(name="decoder") as graph:
        rt.launch(launch)
    graph.close()
    graph.close()
    assert graph.is_closed
    for replay in (graph.replay, lambda: graph.replay_segment(0)):
        with pytest.raises(nx.GraphError, match=r"^cannot replay decoder because it is closed$"):
            replay()
    with pytest.raises(nx.GraphError, match="cannot capture into decoder because it is closed"), rt.capture(into=graph):
        pytest.fail("the body must not run")
    assert not rt.is_capturing()


def test_closing_does_not_disturb_a_replay_that_is_queued(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)
    graph.replay()
    graph.close()
    rt.trim_pool()
    np.testing.assert_array_equal(x.numpy(), np.ones(4))


def test_a_close_that_fails_can_be_repeated(rt: nx.CudaRuntime, add_one: nx.PreparedLaunch, x: nx.TensorMut) -> None:
    for call in ("graph_exec_destroy", "graph_destroy"):
        with rt.capture() as graph:
            rt.launch(add_one)
        with rt._driver.fail_call(call=call), pytest.raises(nx.DriverError):
            graph.close()
        assert x.owner.pins
        graph.close()
        assert not x.owner.pins
        assert rt._driver.live().graphs == rt._driver.live().graph_execs == 0


def test_a_thousand_graphs_leave_nothing_behind(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    before = rt.stats()
    for _ in range(1000):
        with rt.capture() as graph:
            rt.launch(launch)
        graph.close()
    done = rt.stats().since(before)
    assert (done.graphs_captured, done.live_bytes, done.driver_allocations) == (1000, 0, 0)
    assert x.owner.pins == []


def test_a_thousand_dropped_graphs_do_not_pile_up(rt: nx.CudaRuntime, add_one: nx.PreparedLaunch) -> None:
    """A program that captures again and again, and closes and allocates nothing, keeps one graph, not all."""
    for _ in range(1000):
        with rt.capture() as graph:
            rt.launch(add_one)
    assert rt._driver.live().graph_execs <= 2
    assert graph.node_count == 1


# What a capture refuses: before the driver sees it, by the operation's name, and without harm to the capture.


def refused(rt: nx.CudaRuntime) -> dict[str, tuple[str, Callable[[], Any]]]:
    x, y = rt.zeros((4,), nx.float32), rt.zeros((4,), nx.float32)
    raw = rt.alloc_raw(64)
    stable = rt.alloc_graph_stable(64)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture(name="old") as graph:
        rt.launch(launch)
    pending = rt.read_async(x)
    start, end = rt.record_event(), rt.record_event()
    shared = nx.LaunchConfig((1, 1, 1), (128, 1, 1), 100 * 1024)
    return {
        "empty": ("empty of 16 bytes", lambda: rt.empty((4,), nx.float32)),
        "zeros": ("empty of 16 bytes", lambda: rt.zeros((4,), nx.float32)),
        "from_array": ("from_array of 32 bytes", lambda: rt.from_array(np.ones(4))),
        "alloc_raw": ("alloc_raw of 640 bytes", lambda: rt.alloc_raw(640)),
        "graph_stable": ("alloc_graph_stable of 640 bytes", lambda: rt.alloc_graph_stable(640)),
        "free": ("free", y.free),
        "free_raw": ("free", lambda: rt.free_raw(raw)),
        "free stable": ("free", stable.free),
        "trim_pool": ("trim_pool", rt.trim_pool),
        "numpy": ("numpy", x.numpy),
        "read_async": ("read_async", lambda: rt.read_async(x)),
        "pending": ("waiting for a read", pending.numpy),
        "copy_from": ("copy_from", lambda: x.copy_from(np.ones(4))),
        "write async": ("copy_from", lambda: rt.write(x, np.ones(4), asynchronous=True)),
        "htod": ("htod", lambda: rt.htod(np.ones(4), raw)),
        "htod_async": ("htod_async", lambda: rt.htod_async(np.ones(4), raw)),
        "dtoh": ("dtoh", lambda: rt.dtoh(np.ones(4), raw)),
        "dtoh_async": ("dtoh_async", lambda: rt.dtoh_async(raw, 4)),
        "synchronize": ("synchronize", rt.synchronize),
        "drain_for_unmap": ("synchronize", rt.drain_for_unmap),
        "wait_for_stream": ("wait_for_stream", lambda: rt.wait_for_stream(1)),
        "record_event": ("record_event", rt.record_event),
        "elapsed_time": ("elapsed_time", lambda: start.elapsed_time(end)),
        "check_capture_error": ("check_capture_error", rt.check_capture_error),
        "reset_capture_error": ("reset_capture_error", rt.reset_capture_error),
        "load": ("loading scale", lambda: SCALE.load(rt)),
        "shared opt-in": ("the shared memory opt-in of add_one", lambda: rt.prepare(ADD_ONE.load(rt), shared, 0, 0)),
        "replay": ("cannot replay old", graph.replay),
        "replay_segment": ("cannot replay old", lambda: graph.replay_segment(0)),
        "graph close": ("graph close", graph.close),
        "begin": ("cannot begin CUDA graph capture", rt.begin_graph_capture),
        "nested": ("cannot begin CUDA graph capture", lambda: rt.capture().__enter__()),
        "reset_graph": ("cannot reset CUDA graph", rt.reset_graph),
        "dlpack": ("numpy", x.__dlpack__),
    }


REFUSED = [
    "empty", "zeros", "from_array", "alloc_raw", "graph_stable", "free", "free_raw", "free stable", "trim_pool",
    "numpy", "read_async", "pending", "copy_from", "write async", "htod", "htod_async", "dtoh", "dtoh_async",
    "synchronize", "drain_for_unmap", "wait_for_stream", "record_event", "elapsed_time", "check_capture_error",
    "reset_capture_error", "load", "shared opt-in", "replay", "replay_segment", "graph close", "begin", "nested",
    "reset_graph", "dlpack",
]  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_capture_refuses_what_would_spoil_it_and_stays_usable(rt: nx.CudaRuntime, what: str) -> None:
    y = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, y, 4)
    attempts = refused(rt)
    assert sorted(attempts) == sorted(REFUSED)
    operation, attempt = attempts[what]
    with rt.capture() as graph:
        rt.launch(launch)
        before, calls = rt.stats(), rt._driver.calls_total
        with pytest.raises(nx.CaptureError) as caught:
            attempt()
        assert str(caught.value).startswith(operation)
        assert caught.value.state == "capturing"
        assert (rt.stats(), rt._driver.calls_total) == (before, calls)
        assert rt.capture_status() is CaptureStatus.ACTIVE
        rt.launch(launch)
    assert graph.node_count == 2
    graph.replay()
    np.testing.assert_array_equal(y.numpy(), np.full(4, 2))


def test_allocation_in_a_capture_says_how_much_to_allocate_before_it(rt: nx.CudaRuntime) -> None:
    launch = LATCH.prepare(rt, 1, rt.capture_error_ptr, 1)
    with rt.capture():
        rt.launch(launch)
        with pytest.raises(nx.CaptureError) as caught:
            rt.alloc_raw(12345)
    assert str(caught.value) == (
        "alloc_raw of 12345 bytes is illegal while this thread captures a CUDA graph; allocate before the capture"
    )
    assert caught.value.operation == "alloc_raw"


def test_a_workspace_that_is_large_enough_is_handed_out_in_a_capture(rt: nx.CudaRuntime) -> None:
    workspace = Workspace(rt, "Op", WorkspaceLedger())
    workspace.publish(workspace.candidate(1000))
    launch = LATCH.prepare(rt, 1, rt.capture_error_ptr, 1)
    with rt.capture():
        rt.launch(launch)
        assert workspace.candidate(900).ptr == workspace.ptr
        with pytest.raises(nx.CaptureError, match="workspace requires 1001 bytes during CUDA graph capture"):
            workspace.candidate(1001)


def test_another_runtime_s_work_on_this_thread_cannot_spoil_the_capture(rt: nx.CudaRuntime) -> None:
    """The driver forbids it to the thread, whichever runtime asks: both have to know of the capture."""
    with nx.open_runtime(rt.device) as other:
        x = rt.zeros((4,), nx.float32)
        launch = ADD_ONE.prepare(rt, 4, x, 4)
        theirs = other.zeros((4,), nx.float32)
        with rt.capture() as graph:
            rt.launch(launch)
            assert rt.is_capturing()
            assert not other.is_capturing()
            for attempt in (lambda: other.alloc_raw(4), other.synchronize, theirs.numpy, other.begin_graph_capture):
                with pytest.raises(nx.CaptureError, match="is illegal while this thread captures a CUDA graph"):
                    attempt()
        assert graph.node_count == 1
        theirs.numpy()
        with other.capture() as second:
            other.fill_zero(theirs)
        assert second.node_count == 1


def test_runtimes_on_one_driver_capture_one_after_the_other() -> None:
    driver = HostDriver(HOST_ENTRIES)
    with open_on(driver) as first, open_on(driver) as second:
        x = first.zeros((4,), nx.float32)
        launch = ADD_ONE.prepare(first, 4, x, 4)
        with first.capture() as graph:
            first.launch(launch)
            with pytest.raises(nx.CaptureError):
                second.alloc_raw(4)
            assert first.capture_status() is CaptureStatus.ACTIVE
        graph.replay()
        np.testing.assert_array_equal(x.numpy(), np.ones(4))
        with pytest.raises(nx.GraphError, match="because it belongs to another runtime"), second.capture(into=graph):
            pytest.fail("the body must not run")


def test_kernels_are_asked_before_anything_is_recorded(rt: nx.CudaRuntime) -> None:
    kernels = [
        Asked(nx.CaptureSupport.supported()),
        Asked(nx.CaptureSupport.unsupported("it is cold")),
        Asked(nx.CaptureSupport.unsupported("it reads back")),
    ]
    before = rt.stats()
    with pytest.raises(nx.CaptureError) as caught, rt.capture(kernels):
        pytest.fail("the body must not run")
    assert str(caught.value) == "CUDA graph capture declined by Asked: it is cold; Asked: it reads back"
    assert rt.stats() == before
    assert not rt.is_capturing()
    assert rt.capture_status() is CaptureStatus.NONE


@pytest.mark.parametrize("stream", [0, 1])
def test_the_driver_s_default_streams_cannot_be_captured(stream: int) -> None:
    driver = HostDriver(HOST_ENTRIES)
    with open_on(driver, stream=stream) as runtime:
        x = runtime.zeros((4,), nx.float32)
        runtime.launch(ADD_ONE.prepare(runtime, 4, x, 4))
        np.testing.assert_array_equal(x.numpy(), np.ones(4))
        with pytest.raises(nx.CaptureError, match=f"^stream handle {stream} is one of the driver's default streams"):
            runtime.begin_graph_capture()
        runtime.launch(ADD_ONE.prepare(runtime, 4, x, 4))
        np.testing.assert_array_equal(x.numpy(), np.full(4, 2))


# How a capture ends.


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit, GeneratorExit, nx.KernelError])
def test_an_error_in_the_body_ends_the_capture_and_is_what_the_caller_sees(
    rt: nx.CudaRuntime, kind: type[BaseException]
) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    error = kind("Op", "of the body") if kind is nx.KernelError else kind("of the body")
    before = rt.stats()

    def body() -> None:
        with rt.capture():
            rt.launch(launch)
            raise error

    with pytest.raises(kind) as caught:
        body()
    assert caught.value is error
    assert error.__context__ is None
    assert not rt.is_capturing()
    assert rt.capture_status() is CaptureStatus.NONE
    done = rt.stats().since(before)
    assert (done.aborted_captures, done.graphs_captured) == (1, 0)

    rt.launch(launch)
    np.testing.assert_array_equal(x.numpy(), np.ones(4))
    with rt.capture() as graph:
        rt.launch(launch)
    graph.replay()
    np.testing.assert_array_equal(x.numpy(), np.full(4, 2))


def test_an_aborted_capture_leaves_no_graph_and_no_pins(rt: nx.CudaRuntime, add_one: nx.PreparedLaunch) -> None:
    for _ in range(3):
        rt.begin_graph_capture()
        rt.launch(add_one)
        rt.abort_graph_capture()
    rt.alloc_raw(1)
    assert rt._driver.live().graphs == 0
    assert add_one.operands[0].owner.pins == []
    assert not rt.has_graph_executable()


def test_aborting_when_idle_does_nothing(rt: nx.CudaRuntime) -> None:
    before = rt.stats()
    rt.abort_graph_capture()
    assert rt.stats() == before


def test_ending_when_idle_is_refused(rt: nx.CudaRuntime) -> None:
    with pytest.raises(nx.CaptureError, match="cannot end CUDA graph capture because capture is not active") as caught:
        rt.end_graph_capture()
    assert (caught.value.operation, caught.value.state) == ("end", "idle")


def test_the_first_driver_failure_of_a_capture_is_what_its_end_reports(
    rt: nx.CudaRuntime, add_one: nx.PreparedLaunch
) -> None:
    """A body that swallows it, and goes on into more failures, does not hide it."""
    driver = rt._driver
    rt.begin_graph_capture()
    rt.launch(add_one)
    for error in ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "CUDA_ERROR_INVALID_VALUE"):
        with driver.fail_call(error=error, call="launch_kernel"), pytest.raises(nx.DriverError):
            rt.launch(add_one)
    driver.fail_call(error="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", call="stream_end_capture")
    with pytest.raises(nx.GraphError) as caught:
        rt.end_graph_capture()
    assert str(caught.value).startswith(
        "capture of the primary graph failed at add_one grid=(1, 1, 1) block=(128, 1, 1): cuLaunchKernel failed: "
        "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701): "
    )
    assert isinstance(caught.value.__cause__, nx.DriverError)
    assert rt.capture_status() is CaptureStatus.NONE
    rt.begin_graph_capture()
    rt.launch(add_one)
    assert rt.end_graph_capture().node_count == 1


@pytest.mark.parametrize(
    ("label", "call"), [("copy", "memcpy_dtod_async"), ("memset", "memset_d8_async"), ("dtod", "memcpy_dtod_async")]
)
def test_a_failed_copy_or_fill_is_reported_by_the_end_too(rt: nx.CudaRuntime, label: str, call: str) -> None:
    x, y = rt.zeros((4,), nx.float32), rt.zeros((4,), nx.float32)
    attempt = {
        "copy": lambda: rt.copy(x, y), "memset": lambda: rt.fill_zero(x), "dtod": lambda: rt.dtod(x.ptr, y.ptr, 4)
    }[label]  # fmt: skip
    rt.begin_graph_capture()
    with rt._driver.fail_call(call=call), pytest.raises(nx.OutOfMemoryError):
        attempt()
    with pytest.raises(nx.GraphError, match=f"capture of the primary graph failed at {label}: cuMem"):
        rt.end_graph_capture()


@pytest.mark.parametrize("call", ["stream_end_capture", "graph_node_types", "graph_instantiate", "graph_upload"])
def test_however_the_end_fails_the_stream_is_out_of_the_capture(
    rt: nx.CudaRuntime, add_one: nx.PreparedLaunch, call: str
) -> None:
    before = rt.stats()
    rt.begin_graph_capture()
    rt.launch(add_one)
    with rt._driver.fail_call(call=call), pytest.raises((nx.GraphError, nx.DriverError), match="out of memory"):
        rt.end_graph_capture()
    assert not rt.is_capturing()
    assert rt.capture_status() is CaptureStatus.NONE
    assert rt.stats().since(before).aborted_captures == 1
    assert add_one.operands[0].owner.pins == []
    rt.begin_graph_capture()
    rt.launch(add_one)
    assert rt.end_graph_capture().segment_count == 1
    assert rt._driver.live().graphs == rt._driver.live().graph_execs == 1


def test_an_abort_that_fails_does_not_hide_the_error_of_the_body(
    rt: nx.CudaRuntime, add_one: nx.PreparedLaunch
) -> None:
    def body() -> None:
        with rt.capture():
            rt.launch(add_one)
            rt._driver.fail_call(call="stream_end_capture")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert rt.capture_status() is CaptureStatus.NONE
    rt.launch(add_one)


def test_a_capture_invalidated_from_outside_ends_with_the_driver_s_reason(
    rt: nx.CudaRuntime, add_one: nx.PreparedLaunch
) -> None:
    """Somebody calls the driver behind the runtime's back; no graph is left that could be destroyed, and none is."""
    destroyed = rt._driver.calls["graph_destroy"]
    rt.begin_graph_capture()
    rt.launch(add_one)
    with pytest.raises(nx.DriverError):
        rt._driver.mem_alloc(4)
    assert rt.capture_status() is CaptureStatus.INVALIDATED
    with pytest.raises(nx.GraphError, match=r"failed at its end: cuStreamEndCapture failed: .*INVALIDATED \(901\)"):
        rt.end_graph_capture()
    with rt.capture() as graph:
        rt.launch(add_one)
    assert graph.node_count == 1
    assert rt._driver.calls["graph_destroy"] == destroyed


def test_a_graph_with_memory_nodes_is_refused(
    rt: nx.CudaRuntime, add_one: nx.PreparedLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rt._driver, "graph_node_types", lambda graph: ("KERNEL", "MEM_ALLOC", "MEM_FREE"))
    rt.begin_graph_capture()
    rt.launch(add_one)
    with pytest.raises(nx.GraphError, match=r"recorded 2 memory node\(s\); allocate before the capture"):
        rt.end_graph_capture()


def test_a_warning_turned_into_an_error_leaves_the_runtime_idle(rt: nx.CudaRuntime) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rt.begin_graph_capture()
        with pytest.raises(RuntimeWarning):
            rt.end_graph_capture()
    assert not rt.is_capturing()
    rt.synchronize()


# The collector.


def test_garbage_in_a_capture_makes_no_driver_call(rt: nx.CudaRuntime, add_one: nx.PreparedLaunch) -> None:
    """Tensors, graphs, reads, events and workspaces may be finalised in the middle; they are released afterwards."""
    driver = rt._driver
    base = driver.live()

    def garbage() -> list[Any]:
        with rt.capture() as graph:
            rt.launch(add_one)
        cycle: list[Any] = [
            rt.zeros((4,), nx.float32),
            rt.alloc_graph_stable(512),
            graph,
            rt.read_async(add_one.operands[0]),
        ]
        cycle += [rt.record_event(), Workspace(rt, "Op", WorkspaceLedger()).candidate(100)]
        cycle.append(cycle)
        return cycle

    gc.disable()
    try:
        cycle = garbage()
        finalised = weakref.ref(cycle[2])
        with rt.capture() as graph:
            rt.launch(add_one)
            before = driver.calls_total
            del cycle
            gc.collect()
            assert finalised() is None
            assert driver.calls_total == before
            rt.launch(add_one)
    finally:
        gc.enable()
    assert graph.node_count == 2
    graph.close()
    rt.trim_pool()
    rt.trim_pool()
    live = driver.live()
    assert (live.allocations, live.graphs, live.graph_execs) == (base.allocations, base.graphs, base.graph_execs)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was_found(rt: nx.CudaRuntime, add_one: nx.PreparedLaunch, enabled: bool) -> None:
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        frozen, thresholds = gc.get_freeze_count(), gc.get_threshold()
        with rt.capture():
            rt.launch(add_one)
            assert gc.isenabled() is enabled
        with pytest.raises(ZeroDivisionError), rt.capture():
            raise ZeroDivisionError
        assert (gc.isenabled(), gc.get_freeze_count(), gc.get_threshold()) == (enabled, frozen, thresholds)
    finally:
        (gc.enable if was else gc.disable)()


# Threads.


def test_a_capture_ends_on_the_thread_that_began_it(rt: nx.CudaRuntime, add_one: nx.PreparedLaunch) -> None:
    rt.begin_graph_capture()
    rt.launch(add_one)
    for operation, attempt in (("end", rt.end_graph_capture), ("abort", rt.abort_graph_capture)):
        with pytest.raises(nx.CaptureError) as caught, Background(attempt):
            pass
        assert str(caught.value) == (
            f"CUDA graph capture must {operation} on the thread that began the thread-local capture"
        )
    assert rt.is_capturing()
    assert rt.end_graph_capture().node_count == 1


def test_only_the_capturing_thread_is_told_that_it_captures_and_nobody_waits_to_ask(
    rt: nx.CudaRuntime, add_one: nx.PreparedLaunch
) -> None:
    with rt.capture():
        rt.launch(add_one)
        assert rt.is_capturing()
        with Background(rt.is_capturing) as asked:
            assert asked.done.wait(5)
        assert asked.result is False


# Segments and slots.


def test_segments_replay_in_the_order_of_their_capture(rt: nx.CudaRuntime) -> None:
    """Work between them is the owner's to run."""
    x = rt.zeros((4,), nx.float32)
    add, double = ADD_ONE.prepare(rt, 4, x, 4), SCALE.prepare(rt, 4, x, x, 2.0, 4)
    with rt.capture(name="split") as graph:
        rt.launch(add)
    with rt.capture(into=graph):
        rt.launch(double)
    assert (graph.segment_count, graph.node_count) == (2, 2)
    graph.replay()
    np.testing.assert_array_equal(x.numpy(), np.full(4, 2))
    graph.replay_segment(1)
    rt.launch(add)
    graph.replay_segment(0)
    np.testing.assert_array_equal(x.numpy(), np.full(4, 6))


@pytest.mark.parametrize("index", [-1, 1, 99, "first"])
def test_a_segment_that_is_not_there_is_refused(rt: nx.CudaRuntime, index: Any) -> None:
    launch = LATCH.prepare(rt, 1, rt.capture_error_ptr, 1)
    with rt.capture(name="split") as graph:
        rt.launch(launch)
    with pytest.raises(nx.GraphError) as caught:
        graph.replay_segment(index)
    assert str(caught.value) == f"cannot replay segment {index!r} of split; only 1 segment(s) installed"


def test_a_failed_segment_leaves_the_segments_before_it(rt: nx.CudaRuntime, add_one: nx.PreparedLaunch) -> None:
    with rt.capture() as graph:
        rt.launch(add_one)
    with pytest.raises(ZeroDivisionError), rt.capture(into=graph):
        raise ZeroDivisionError
    assert graph.segment_count == 1
    graph.replay()
    np.testing.assert_array_equal(add_one.operands[0].numpy(), np.ones(4))


def test_the_slots_are_apart(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    add, double = ADD_ONE.prepare(rt, 4, x, 4), SCALE.prepare(rt, 4, x, x, 2.0, 4)
    for slot in nx.GraphSlot:
        assert rt.graph_segment_count(slot) == 0
        assert not rt.has_graph_executable(slot)
        assert rt.reset_graph(slot) is False
        with pytest.raises(nx.GraphError) as caught:
            rt.replay_graph(slot)
        assert str(caught.value) == (
            f"cannot replay CUDA graph because no executable is installed in the {slot.value} slot"
        )
    rt.begin_graph_capture()
    rt.launch(add)
    rt.end_graph_capture()
    rt.begin_graph_capture(slot=nx.GraphSlot.VERIFY)
    rt.launch(double)
    rt.end_graph_capture()
    rt.begin_graph_capture(slot=nx.GraphSlot.VERIFY)
    rt.launch(add)
    rt.end_graph_capture()
    assert (rt.graph_segment_count(), rt.graph_segment_count(nx.GraphSlot.VERIFY)) == (1, 2)

    rt.replay_graph()
    rt.replay_graph(nx.GraphSlot.VERIFY)
    np.testing.assert_array_equal(x.numpy(), np.full(4, 3))
    rt.replay_graph_segment(0, nx.GraphSlot.VERIFY)
    np.testing.assert_array_equal(x.numpy(), np.full(4, 6))

    assert rt.reset_graph() is True
    assert not rt.has_graph_executable()
    assert rt.has_graph_executable(nx.GraphSlot.VERIFY)
    with pytest.raises(nx.GraphError, match="no executable is installed in the primary slot"):
        rt.replay_graph()
    assert rt.reset_graph(nx.GraphSlot.VERIFY) is True


def test_a_slot_whose_capture_was_aborted_has_nothing_to_replay(rt: nx.CudaRuntime, add_one: nx.PreparedLaunch) -> None:
    rt.begin_graph_capture()
    rt.launch(add_one)
    rt.abort_graph_capture()
    with pytest.raises(nx.GraphError, match="cannot replay the primary graph because no executable is"):
        rt.replay_graph()
    assert rt.reset_graph() is False


def test_a_slot_that_was_closed_by_its_owner_begins_anew(rt: nx.CudaRuntime, add_one: nx.PreparedLaunch) -> None:
    rt.begin_graph_capture()
    rt.launch(add_one)
    rt.end_graph_capture().close()
    rt.begin_graph_capture()
    rt.launch(add_one)
    rt.end_graph_capture()
    rt.replay_graph()
    np.testing.assert_array_equal(add_one.operands[0].numpy(), np.ones(4))


@pytest.fixture(autouse=True)
def _out_of_capture(rt: nx.CudaRuntime) -> Iterator[None]:
    """No test ends inside a capture."""
    yield
    assert not rt.is_capturing()


@pytest.mark.parametrize("mode", nx.CaptureMode)
def test_a_capture_records_in_every_mode(rt: nx.CudaRuntime, add_one: nx.PreparedLaunch, mode: nx.CaptureMode) -> None:
    with rt.capture(mode=mode) as graph:
        rt.launch(add_one)
    assert graph.node_types == ("KERNEL",)


def test_a_global_capture_is_spoiled_by_another_threads_allocation(
    rt: nx.CudaRuntime, add_one: nx.PreparedLaunch
) -> None:
    """On another runtime, that is: this one's own calls wait at the gate."""
    with open_on(rt._driver) as other:

        def allocate() -> None:
            with pytest.raises(nx.DriverError, match="STREAM_CAPTURE_UNSUPPORTED"):
                other.alloc_raw(1)

        rt.begin_graph_capture(mode=nx.CaptureMode.GLOBAL)
        rt.launch(add_one)
        with Background(allocate):
            pass
        with pytest.raises(nx.GraphError, match="capture of the primary graph failed"):
            rt.end_graph_capture()


def test_a_launch_on_another_runtime_is_refused_in_a_capture(rt: nx.CudaRuntime, add_one: nx.PreparedLaunch) -> None:
    """It would run at once, and be missing from the graph."""
    with open_on(rt._driver) as other:
        y = other.zeros((4,), nx.float32)
        stray = ADD_ONE.prepare(other, 4, y, 4)
        with rt.capture() as graph:
            with pytest.raises(nx.CaptureError, match="captures a CUDA graph on another runtime"):
                other.launch(stray)
            rt.launch(add_one)
        graph.replay()
        assert graph.node_count == 1
        np.testing.assert_array_equal(y.numpy(), np.zeros(4))


def test_a_graph_tells_what_memory_it_keeps(rt: nx.CudaRuntime) -> None:
    """Once for each tensor, however often it is used."""
    x, y = rt.zeros((4,), nx.float32), rt.zeros((8,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)
        rt.launch(launch)
        rt.fill_zero(y)
    assert graph.nbytes == 16 + 32
    graph.close()
    assert graph.nbytes == 0
