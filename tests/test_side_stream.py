"""Forks: work on branches beside the compute stream, eager and captured, with memory, errors and other threads."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.driver.base import CaptureStatus
from nxrt_cuda.driver.host import HostDriver
from nxrt_cuda.fork import Branch
from tests.small_kernels import ADD_ONE, FAULT, HOST_ENTRIES, SCALE, SLOW, Background, on_thread, open_on
from tests.test_fault_injection import each_call_failing

REFUSED = "CUDA_ERROR_NOT_PERMITTED"


class Diamond:
    """``a = 2 x`` and ``b = 3 x`` side by side, ``x`` being made before, and ``a += b`` after both."""

    def __init__(self, rt: nx.CudaRuntime) -> None:
        self.rt = rt
        self.x, self.a, self.b = (rt.zeros((4,), nx.float32) for _ in range(3))
        self.before = ADD_ONE.prepare(rt, 4, self.x, 4)
        self.left = SCALE.prepare(rt, 4, self.a, self.x, 2.0, 4)
        self.right = SCALE.prepare(rt, 4, self.b, self.x, 3.0, 4)
        self.after = ADD_ONE.prepare(rt, 4, self.a, 4)

    def enqueue(self) -> None:
        rt = self.rt
        rt.launch(self.before)
        with rt.fork() as fork:
            with fork.branch():
                rt.launch(self.left)
            with fork.branch():
                rt.launch(self.right)
        rt.launch(self.after)

    def check(self, steps: int) -> None:
        np.testing.assert_array_equal(self.a.numpy(), np.full(4, 2 * steps + 1))
        np.testing.assert_array_equal(self.b.numpy(), np.full(4, 3 * steps))


def test_branches_come_after_what_was_before_the_fork_and_before_what_is_after_it(rt: nx.CudaRuntime) -> None:
    """The host driver's streams are lazy: a missing fence would show as stale values."""
    diamond = Diamond(rt)
    before = rt.stats()
    diamond.enqueue()
    diamond.check(1)
    diamond.enqueue()
    diamond.check(2)
    done = rt.stats().since(before)
    assert (done.forks, done.launches) == (2, 8)


def test_a_captured_fork_is_the_same_shape_in_the_graph(rt: nx.CudaRuntime) -> None:
    diamond = Diamond(rt)
    with rt.capture(name="diamond") as graph:
        diamond.enqueue()
    assert graph.node_count == 4
    for steps in (1, 2, 3):
        graph.replay()
        diamond.check(steps)
    dot = graph.to_dot()
    for arrow in ("n0 -> s0n1", "n0 -> s0n2", "n1 -> s0n3", "n2 -> s0n3"):
        assert f"    s0{arrow};\n" in dot
    assert dot.count(" -> ") == 4


def test_a_captured_fork_keeps_its_tensors_and_can_be_rebound(rt: nx.CudaRuntime) -> None:
    diamond = Diamond(rt)
    with rt.capture() as graph:
        diamond.enqueue()
    c = rt.zeros((4,), nx.float32)
    graph.rebind({diamond.b: c}, scalars={(2, "factor"): 7.0})
    graph.replay()
    assert c.numpy()[0] == 7
    assert diamond.b.numpy()[0] == 0
    assert diamond.b.owner.pins == []


def test_work_of_the_body_itself_is_beside_the_branches(rt: nx.CudaRuntime) -> None:
    """The compute stream is read without waiting for the branch."""
    x, y = rt.zeros((4,), nx.float32), rt.zeros((4,), nx.float32)
    on_x, on_y = (ADD_ONE.prepare(rt, 4, tensor, 4) for tensor in (x, y))
    rt.synchronize()
    with rt.fork() as fork:
        branch = fork.branch()
        with branch:
            rt.launch(on_x)
        rt.launch(on_y)
        assert y.numpy()[0] == 1
        assert x.numpy()[0] == 0  # in no order, and the host driver does not run it early
        with branch:
            assert x.numpy()[0] == 1
    assert branch.stream not in (rt.stream, rt._streams.transfer)


def test_a_branch_asked_for_late_still_begins_at_the_fork(rt: nx.CudaRuntime) -> None:
    """And not after what the body did since: in a graph, it does not depend on that."""
    diamond = Diamond(rt)
    with rt.capture() as graph, rt.fork() as fork:
        rt.launch(diamond.left)
        with fork.branch():
            rt.launch(diamond.right)
    assert " -> " not in graph.to_dot()


def test_everything_in_stream_order_follows_the_branch(rt: nx.CudaRuntime) -> None:
    """Uploads, fills, copies, asynchronous reads, replays, events, and the stream that others are told of."""
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)
    compute = rt.stream
    with rt.fork() as fork, fork.branch() as branch:
        assert rt.stream == branch.stream != compute
        assert branch.__cuda_stream__() == rt.__cuda_stream__() == (0, branch.stream)
        y = rt.from_array(np.full(4, 3, np.float32))
        rt.copy(x, y)
        graph.replay()
        start = rt.record_event()
        rt.write(y, np.full(4, 9, np.float32), asynchronous=True)
        pending = rt.read_async(y)
        z = rt.zeros((4,), nx.float32)
        assert start.elapsed_time(rt.record_event()) >= 0
    assert rt.stream == compute
    assert [tensor.numpy()[0] for tensor in (x, y, z)] == [4, 9, 0]
    assert pending.numpy()[0] == 9


def test_synchronize_within_a_fork_waits_for_every_branch(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.fork() as fork:
        with fork.branch():
            rt.launch(launch)
        rt.synchronize()
        assert rt._driver.stream_query(rt._streams.branches[0])
    assert x.numpy()[0] == 1


def test_forks_nest(rt: nx.CudaRuntime) -> None:
    """A branch of a branch joins that branch."""
    diamond = Diamond(rt)
    x = diamond.x

    def enqueue() -> None:
        with rt.fork() as outer, outer.branch():
            rt.launch(diamond.before)
            with rt.fork() as inner:
                with inner.branch():
                    rt.launch(diamond.left)
                rt.launch(diamond.right)
            rt.launch(diamond.after)

    enqueue()
    diamond.check(1)
    with rt.capture() as graph:
        enqueue()
    graph.replay()
    diamond.check(2)
    assert x.numpy()[0] == 2
    assert rt._streams.branches == []


def test_streams_of_branches_are_reused(rt: nx.CudaRuntime) -> None:
    diamond = Diamond(rt)
    diamond.enqueue()
    streams = rt._driver.live().streams
    events = rt._driver.live().events
    for _ in range(50):
        diamond.enqueue()
    with rt.capture():
        diamond.enqueue()
    assert (rt._driver.live().streams, rt._driver.live().events) == (streams, events)


def test_a_trace_has_a_track_for_each_branch(rt: nx.CudaRuntime) -> None:
    diamond = Diamond(rt)
    with rt.trace() as trace:
        diamond.enqueue()
    events = list(trace.events())
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    work = [tracks[event["tid"]] for event in events if event.get("cat") == "kernel"]
    assert sorted(work) == ["branch 1", "branch 2", "compute stream", "compute stream"]


def test_a_trace_of_branches_outlives_its_runtime(tmp_path: Path) -> None:
    """It may be saved when the runtime, and with it the branches' streams, is closed."""
    with nx.open_runtime("host", host_entries=HOST_ENTRIES) as rt:
        diamond = Diamond(rt)
        with rt.trace() as trace:
            diamond.enqueue()
        events = list(trace.events())
    assert list(trace.events()) == events
    trace.save(tmp_path / "trace.json")


# Memory.


def test_memory_freed_in_a_fork_is_not_handed_out_before_the_join(rt: nx.CudaRuntime) -> None:
    """Nor to the other branches, which come after nothing that used it."""
    x = rt.zeros((4,), nx.float32)
    address = x.ptr
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.fork() as fork:
        with fork.branch():
            rt.launch(launch)
            x.free()
        with fork.branch():
            assert rt.zeros((4,), nx.float32).ptr != address
        assert rt.zeros((4,), nx.float32).ptr != address
        assert rt.stats().deferred_bytes >= 512
    y = rt.from_array(np.full(4, 5, np.float32))
    assert rt.stats().deferred_bytes == 0
    assert y.numpy()[0] == 5


def test_memory_dropped_in_a_fork_is_reused_after_the_join(rt: nx.CudaRuntime) -> None:
    """After the work of the branch, which the host driver has not run by then."""
    x = rt.zeros((4,), nx.float32)
    address, launch = x.ptr, ADD_ONE.prepare(rt, 4, x, 4)
    with rt.fork() as fork:
        with fork.branch():
            rt.launch(launch)
        del x, launch
        gc.collect()
        assert rt.zeros((4,), nx.float32).ptr != address
    taken = [rt.from_array(np.full(4, 5, np.float32)) for _ in range(3)]
    assert address in {tensor.ptr for tensor in taken}
    assert all(tensor.numpy()[0] == 5 for tensor in taken)


def test_unpooled_memory_freed_in_a_fork_goes_back_after_the_branches() -> None:
    """The host driver faults if it is freed before they ran."""
    driver = HostDriver(HOST_ENTRIES)
    with open_on(driver, pool_limit=0) as rt:
        x = rt.zeros((4,), nx.float32)
        launch = ADD_ONE.prepare(rt, 4, x, 4)
        with rt.fork() as fork:
            with fork.branch():
                rt.launch(launch)
            x.free()
            rt.empty((1,), nx.uint8)
        rt.synchronize()
        rt.trim_pool()
    assert not driver.live()


def test_short_memory_in_a_fork_does_not_take_what_branches_use() -> None:
    driver = HostDriver(HOST_ENTRIES, total_memory=8192)
    with open_on(driver) as rt:
        x = rt.zeros((1024,), nx.float32)
        launch = ADD_ONE.prepare(rt, 1024, x, 1024)
        with rt.fork() as fork:
            with fork.branch():
                rt.launch(launch)
                x.free()
            with pytest.raises(nx.OutOfMemoryError):
                rt.zeros((1024,), nx.float32)
        assert rt.zeros((1024,), nx.float32).numpy().sum() == 0


# Order of calls, errors, threads.


def test_a_branch_of_a_fork_that_has_ended_is_refused(rt: nx.CudaRuntime) -> None:
    with rt.fork() as fork:
        branch = fork.branch()
    for attempt in (fork.branch, branch.__enter__):
        with pytest.raises(nx.RuntimeStateError, match="has ended; open another"):
            attempt()
    assert rt.stream == rt._streams.compute


def test_captures_neither_begin_nor_end_within_a_fork(rt: nx.CudaRuntime) -> None:
    """Both are refused before they reach the driver, and the capture stays usable."""
    diamond = Diamond(rt)
    with rt.fork(), pytest.raises(nx.CaptureError, match="capture within a fork; end that first"):
        rt.begin_graph_capture()
    assert not rt.is_capturing()
    rt.begin_graph_capture()
    with rt.fork() as fork, fork.branch():
        rt.launch(diamond.left)
        with pytest.raises(nx.CaptureError, match="capture within a fork; end that first"):
            rt.end_graph_capture()
    assert rt.end_graph_capture().node_count == 1


def test_a_fork_that_outlives_the_body_of_a_capture_leaves_none_open(rt: nx.CudaRuntime) -> None:
    """The ``with`` has ended, and other threads wait for nothing; both work again afterwards."""
    diamond = Diamond(rt)

    def record() -> None:
        with rt.capture():
            fork = later.enter_context(rt.fork())
            with fork.branch():
                rt.launch(diamond.left)

    with ExitStack() as later:
        with pytest.raises(nx.CaptureError, match="capture within a fork; end that first"):
            record()
        assert not rt.is_capturing()
        assert rt.capture_status() is CaptureStatus.NONE
    assert on_thread(rt.is_capturing) is False
    assert rt.stats().aborted_captures == 1
    with rt.capture() as graph:
        diamond.enqueue()
    graph.replay()
    on_thread(rt.synchronize)


def test_an_error_in_the_body_joins_all_the_same(rt: nx.CudaRuntime) -> None:
    diamond = Diamond(rt)
    rt.launch(diamond.before)

    def fail() -> None:
        with rt.fork() as fork, fork.branch():
            rt.launch(diamond.left)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert diamond.a.numpy()[0] == 2
    with pytest.raises(ZeroDivisionError), rt.capture():
        fail()
    assert rt.capture_status() is CaptureStatus.NONE
    diamond.enqueue()
    diamond.check(2)


def test_a_capture_aborted_within_a_fork_leaves_both_streams_usable(rt: nx.CudaRuntime) -> None:
    diamond = Diamond(rt)
    rt.begin_graph_capture()
    with rt.fork() as fork, fork.branch():
        rt.launch(diamond.left)
        rt.abort_graph_capture()
    diamond.enqueue()
    diamond.check(1)


def test_closing_within_a_fork_is_clean() -> None:
    driver = HostDriver(HOST_ENTRIES)
    runtime = open_on(driver)
    diamond = Diamond(runtime)
    with runtime.fork() as fork, fork.branch():
        runtime.launch(diamond.before)
        runtime.close()
    assert not driver.live()
    with pytest.raises(nx.RuntimeStateError, match="closed"), runtime.fork():
        pass


def test_other_threads_work_after_the_fork_and_on_the_compute_stream(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    streams: list[int] = []

    def theirs() -> None:
        rt.launch(launch)
        with rt.exclusive():
            streams.append(rt.stream)

    with ExitStack() as threads, rt.fork() as fork, fork.branch():
        other = threads.enter_context(Background(theirs))
        assert not other.done.wait(0.02)
        rt.launch(launch)
    assert x.numpy()[0] == 2
    assert streams == [rt.stream]


def test_a_branch_entered_on_another_thread_is_refused_once_the_fork_has_ended(rt: nx.CudaRuntime) -> None:

    def enter(branch: Branch) -> None:
        with pytest.raises(nx.RuntimeStateError, match="has ended"):
            branch.__enter__()

    with ExitStack() as threads, rt.fork() as fork:
        other = threads.enter_context(Background(enter, fork.branch()))
        time.sleep(0.01)
        assert not other.done.is_set()


def test_forks_of_several_threads_follow_each_other(rt: nx.CudaRuntime) -> None:
    diamonds = [Diamond(rt) for _ in range(3)]

    def work(diamond: Diamond) -> None:
        for step in range(1, 20):
            diamond.enqueue()
            diamond.check(step)

    with Background(work, diamonds[0]), Background(work, diamonds[1]), Background(work, diamonds[2]):
        pass


def capture_forks_on_two_threads(first: nx.CudaRuntime, second: nx.CudaRuntime) -> None:
    """Capture, replay and check forks on both runtimes at once; no capture may be lost."""

    def work(rt: nx.CudaRuntime) -> None:
        diamond = Diamond(rt)
        for step in range(1, 30):
            with rt.capture() as graph:
                diamond.enqueue()
            assert graph.node_count == 4
            graph.replay()
            diamond.check(step)
            graph.close()

    with Background(work, first), Background(work, second):
        pass
    assert first.stats().aborted_captures == second.stats().aborted_captures == 0


def test_captures_with_forks_on_two_runtimes_and_two_threads_do_not_spoil_each_other() -> None:
    """Of one driver and one context, each with streams of its own."""
    driver = HostDriver(HOST_ENTRIES)
    with open_on(driver) as first, open_on(driver) as second:
        capture_forks_on_two_threads(first, second)
    assert not driver.live()


def test_a_fault_in_a_branch_names_it_and_is_reported_at_the_join(rt: nx.CudaRuntime) -> None:
    """What was read from the compute stream meanwhile does not clear the branch of suspicion."""
    x = rt.zeros((4,), nx.float32)
    with rt.fork() as fork:
        with fork.branch():
            rt.launch(FAULT.prepare(rt, 1, 8))
        x.numpy()
    with pytest.raises(nx.DeviceFaultError, match="fault grid"):
        rt.synchronize()


def test_a_slow_branch_is_waited_for(rt: nx.CudaRuntime) -> None:
    with rt.fork() as fork, fork.branch():
        rt.launch(SLOW.prepare(rt, 1, 30))
    start = time.perf_counter()
    rt.synchronize()
    assert time.perf_counter() - start >= 0.029


# The driver refuses.


def eager(diamond: Diamond) -> None:
    diamond.enqueue()
    diamond.check(1)


def captured(diamond: Diamond) -> None:
    with diamond.rt.capture() as graph:
        diamond.enqueue()
    graph.replay()
    diamond.check(1)


@pytest.mark.parametrize("scenario", [eager, captured])
def test_each_driver_call_of_a_fork_refused_once(scenario: object) -> None:
    """A typed error, no stream left behind in a capture or a branch, no leak, and the next fork is right."""
    assert callable(scenario)
    for driver, diamond, _ in each_call_failing(REFUSED, lambda driver: Diamond(open_on(driver)), scenario):
        rt = diamond.rt
        assert rt.capture_status() is CaptureStatus.NONE
        assert (rt.stream, rt._streams.branches, rt._streams.forks) == (rt._streams.compute, [], 0)
        on_thread(rt.fill_zero, diamond.x)
        scenario(diamond)
        rt.close()
        assert not driver.live(), str(driver.live())


def test_a_join_that_fails_is_made_up_for_by_waiting(rt: nx.CudaRuntime) -> None:
    diamond = Diamond(rt)
    rt.launch(diamond.before)

    def fork_that_cannot_join() -> None:
        with rt.fork() as fork:
            with fork.branch():
                rt.launch(diamond.left)
            rt._driver.fail_call(error=REFUSED, call="stream_wait_event")

    with pytest.raises(nx.DriverError, match="NOT_PERMITTED"):
        fork_that_cannot_join()
    rt.launch(diamond.after)
    assert diamond.a.numpy()[0] == 3


def test_a_branch_that_could_not_be_joined_is_joined_by_the_next_fork(rt: nx.CudaRuntime) -> None:
    """Until then nothing that was freed meanwhile is handed out again."""
    diamond = Diamond(rt)
    address = diamond.a.ptr
    driver = rt._driver

    def fork_that_cannot_join() -> None:
        with rt.fork() as fork:
            with fork.branch():
                rt.launch(diamond.left)
            diamond.a.free()
            for n in (1, 2):
                driver.fail_call(n, error=REFUSED, call="stream_wait_event")
                driver.fail_call(n, error=REFUSED, call="stream_synchronize")

    def addresses(count: int) -> set[int]:
        tensors = [rt.zeros((4,), nx.float32) for _ in range(count)]
        return {tensor.ptr for tensor in tensors}

    with pytest.raises(nx.DriverError, match="NOT_PERMITTED"):
        fork_that_cannot_join()
    assert len(rt._streams.branches) == 1
    assert address not in addresses(4)
    with rt.fork():
        pass
    assert rt._streams.branches == []
    assert address in addresses(8)
