"""Streams on a GPU: forks, the user's own streams, and memory that is freed without waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

import nxrt_cuda as nx
from tests import test_side_stream
from tests.small_kernels import ADD_ONE, SCALE, SLOW

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("context_stays")]


@pytest.mark.parametrize(
    "behaviour",
    [
        test_side_stream.test_branches_come_after_what_was_before_the_fork_and_before_what_is_after_it,
        test_side_stream.test_a_captured_fork_is_the_same_shape_in_the_graph,
        test_side_stream.test_a_captured_fork_keeps_its_tensors_and_can_be_rebound,
        test_side_stream.test_a_branch_asked_for_late_still_begins_at_the_fork,
        test_side_stream.test_everything_in_stream_order_follows_the_branch,
        test_side_stream.test_forks_nest,
        test_side_stream.test_memory_freed_in_a_fork_is_not_handed_out_before_the_join,
        test_side_stream.test_memory_dropped_in_a_fork_is_reused_after_the_join,
        test_side_stream.test_a_branch_of_a_fork_that_has_ended_is_refused,
        test_side_stream.test_captures_neither_begin_nor_end_within_a_fork,
        test_side_stream.test_an_error_in_the_body_joins_all_the_same,
        test_side_stream.test_a_capture_aborted_within_a_fork_leaves_both_streams_usable,
        test_side_stream.test_other_threads_work_after_the_fork_and_on_the_compute_stream,
        test_side_stream.test_forks_of_several_threads_follow_each_other,
        test_side_stream.test_a_slow_branch_is_waited_for,
    ],
    ids=lambda behaviour: behaviour.__name__.removeprefix("test_"),
)
def test_as_on_the_host_driver(rt: nx.CudaRuntime, behaviour: Callable[[nx.CudaRuntime], None]) -> None:
    behaviour(rt)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_branches_run_side_by_side(rt: nx.CudaRuntime, captured: bool) -> None:
    """Four kernels of 40 ms take no four times 40 ms."""
    slow = SLOW.prepare(rt, 1, 40)
    rt.launch(slow)
    rt.synchronize()

    def enqueue() -> None:
        with rt.fork() as fork:
            for _ in range(3):
                with fork.branch():
                    rt.launch(slow)
            rt.launch(slow)

    if captured:
        with rt.capture() as graph:
            enqueue()
        run = graph.replay
    else:
        run = enqueue
    start = rt.record_event()
    run()
    took = start.elapsed_time(rt.record_event())
    assert 39 <= took < 90, f"{took:.1f} ms"


def test_two_graphs_replay_side_by_side(rt: nx.CudaRuntime) -> None:
    slow = SLOW.prepare(rt, 1, 40)
    rt.launch(slow)
    graphs = []
    for _ in range(2):
        with rt.capture() as graph:
            rt.launch(slow)
        graphs.append(graph)
    rt.synchronize()
    start = rt.record_event()
    with rt.fork() as fork:
        for graph in graphs:
            with fork.branch():
                graph.replay()
    took = start.elapsed_time(rt.record_event())
    assert 39 <= took < 70, f"{took:.1f} ms"


def test_captures_on_two_runtimes_and_two_threads_do_not_spoil_each_other(gpu: str) -> None:
    """Of one device and one context, each with streams of its own."""
    with nx.open_runtime("cuda:0") as first, nx.open_runtime("cuda:0") as second:
        test_side_stream.capture_forks_on_two_threads(first, second)


def test_work_and_graphs_are_in_order_with_torch_on_its_stream(gpu: str) -> None:
    """Eager, captured with a fork, rebound and replayed, between torch's operations on that stream, and never waited
    for."""
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    with nx.open_runtime("cuda:0", stream=stream) as rt, torch.cuda.stream(stream):
        assert rt.stream == stream.cuda_stream
        theirs = torch.zeros(1000, device="cuda")
        x, y = rt.from_array(theirs), rt.zeros((1000,), nx.float32)
        add, scale = ADD_ONE.prepare(rt, 1000, x, 1000), SCALE.prepare(rt, 1000, y, x, 2.0, 1000)
        rt.launch(add)
        with rt.capture() as graph:
            rt.launch(add)
            with rt.fork() as fork, fork.branch():
                rt.launch(scale)
        for _ in range(10):
            theirs *= 2
            graph.replay()
        expected = 1.0
        for _ in range(10):
            expected = expected * 2 + 1
        others = torch.full((1000,), 5.0, device="cuda")
        graph.rebind({x: rt.from_array(others)})
        others *= 3
        graph.replay()
        others += 1
    stream.synchronize()
    assert theirs.eq(expected).all()
    assert others.eq(17).all()


def test_work_and_graphs_are_in_order_with_cupy_on_its_stream(gpu: str) -> None:
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Stream(non_blocking=True) as stream, nx.open_runtime("cuda:0", stream=stream) as rt:
        assert rt.stream == stream.ptr
        theirs = cupy.zeros(1000, cupy.float32)
        x = rt.from_array(theirs)
        add = ADD_ONE.prepare(rt, 1000, x, 1000)
        rt.launch(add)
        with rt.capture() as graph:
            rt.launch(add)
        for _ in range(10):
            theirs *= 2
            graph.replay()
        assert x.numpy().tolist() == [2**10 + 2**10 - 1] * 1000


def test_freeing_waits_for_nothing_and_memory_comes_back(gpu: str) -> None:
    """Neither of the block's own last use nor, as ``cuMemFree`` would, of everything that the device has to do."""
    with nx.open_runtime("cuda:0", pool_limit=0) as rt:
        slow = SLOW.prepare(rt, 1, 300)
        nbytes = 64 << 20

        def free_behind_work() -> float:
            early, late = (rt.empty((nbytes,), nx.uint8) for _ in range(2))
            early.free()  # nothing uses it; it is given back while the kernel runs
            rt.launch(slow)
            start = time.perf_counter()
            late.free()
            rt.empty((512,), nx.uint8).free()
            return time.perf_counter() - start

        free_behind_work()  # the driver's first free in stream order sets up its pools
        rt.synchronize()
        rt.trim_pool()
        with rt._session.driving("test") as driver:
            before = driver.mem_get_info()[0]
        took = free_behind_work()
        assert took < 0.1, f"{took * 1e3:.0f} ms"
        assert rt.stats().deferred_bytes >= nbytes
        rt.trim_pool()
        assert rt.stats().deferred_bytes == 0
        with rt._session.driving("test") as driver:
            assert driver.mem_get_info()[0] >= before


def test_memory_freed_in_a_branch_is_not_overwritten_while_the_branch_runs(rt: nx.CudaRuntime) -> None:
    """The branch's kernel reads it long after the free; whoever gets the block writes it only then."""
    x, y = rt.from_array(np.full(1000, 3, np.float32)), rt.zeros((1000,), nx.float32)
    scale, slow = SCALE.prepare(rt, 1000, y, x, 2.0, 1000), SLOW.prepare(rt, 1, 50)
    with rt.fork() as fork:
        with fork.branch():
            rt.launch(slow)
            rt.launch(scale)
        x.free()
        taken = [rt.from_array(np.full(1000, 9, np.float32)) for _ in range(5)]
    taken += [rt.from_array(np.full(1000, 9, np.float32)) for _ in range(5)]
    np.testing.assert_array_equal(y.numpy(), np.full(1000, 6))
    assert x.ptr in {tensor.ptr for tensor in taken[5:]}
