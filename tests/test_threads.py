"""Several threads on one runtime: the capture gate, and results and counters that come out right."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda import context
from nxrt_cuda.driver.host import HostDriver
from nxrt_cuda.runtime import _open_runtimes
from tests.small_kernels import ADD_ONE, HOST_ENTRIES, SCALE, SLOW, Background, on_thread, open_on


@pytest.mark.parametrize("read", ["numpy", "pending"])
def test_no_data_is_returned_from_a_runtime_that_another_thread_closes(
    read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is done, and the runtime closed before its bytes are taken out of the host buffer, which goes too."""
    runtime = nx.open_runtime("host")
    x = runtime.from_array(np.ones(4, np.float32))
    take = runtime.read_async(x).numpy if read == "pending" else x.numpy
    streams = runtime._streams
    wait_event = streams.wait_event
    waits: list[int] = []

    def close_meanwhile(event: int) -> None:
        wait_event(event)
        if not waits:
            waits.append(event)
            on_thread(runtime.close)

    monkeypatch.setattr(streams, "wait_event", close_meanwhile)
    with pytest.raises(nx.RuntimeStateError, match="closed"):
        take()
    assert runtime.is_closed


def test_closing_destroys_no_event_that_another_thread_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the event is reached, and the other thread only has to come back from the driver."""
    runtime = nx.open_runtime("host")
    driver, x = runtime._driver, runtime.from_array(np.ones(4, np.float32))
    synchronize, coming_back = driver.event_synchronize, threading.Event()
    inside = threading.Event()

    def come_back_late(event: int) -> None:
        synchronize(event)
        if threading.current_thread() is not threading.main_thread() and not inside.is_set():
            inside.set()
            assert coming_back.wait(10)

    monkeypatch.setattr(driver, "event_synchronize", come_back_late)

    def read() -> None:
        with pytest.raises(nx.RuntimeStateError, match="closed"):
            x.numpy()

    with Background(read):
        assert inside.wait(10)
        with Background(runtime.close) as closing:
            assert not closing.done.wait(0.2)
            assert driver.calls["event_destroy"] == 0
            coming_back.set()
    assert runtime.is_closed
    assert not driver.live()


def test_launches_of_many_threads_all_run(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    before = rt.stats()

    def work() -> None:
        for _ in range(50):
            rt.launch(launch)

    with Background(work), Background(work), Background(work), Background(work):
        pass
    np.testing.assert_array_equal(x.numpy(), np.full(4, 200))
    assert rt.stats().since(before).launches == 200


def test_threads_with_tensors_of_their_own_do_not_disturb_each_other(rt: nx.CudaRuntime) -> None:
    """Allocation, upload, launch, read and free, interleaved: nobody sees another's bytes."""

    def work(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(30):
            source = generator.standard_normal(int(generator.integers(1, 3000)), np.float32)
            x = rt.from_array(source)
            y = rt.empty(x.shape, nx.float32)
            rt.launch(SCALE.prepare(rt, source.size, y, x, 2.0, source.size))
            pending = rt.read_async(y)
            np.testing.assert_array_equal(x.numpy(), source)
            np.testing.assert_array_equal(pending.numpy(), 2 * source)
            y.free()

    with Background(work, 1), Background(work, 2), Background(work, 3):
        pass


def test_a_hundred_captures_beside_a_thread_that_allocates_and_copies(rt: nx.CudaRuntime) -> None:
    """Each graph has its own launches, and nothing else; no capture is lost."""
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    stop = threading.Event()

    def daemon() -> int:
        rounds = 0
        while not stop.is_set():
            y = rt.from_array(np.full(1000, rounds, np.float32))
            rt.write(y, np.full(1000, rounds + 1, np.float32), asynchronous=True)
            np.testing.assert_array_equal(y.numpy(), np.full(1000, rounds + 1))
            rt.alloc_graph_stable(4096).free()
            rounds += 1
        return rounds

    before = rt.stats()
    graphs = []
    with Background(daemon) as other:
        try:
            for _ in range(100):
                with rt.capture() as graph:
                    rt.launch(launch)
                    rt.launch(launch)
                graphs.append(graph)
        finally:
            stop.set()
    assert other.result > 0
    assert [graph.node_count for graph in graphs] == [2] * 100
    done = rt.stats().since(before)
    assert (done.graphs_captured, done.aborted_captures) == (100, 0)
    for graph in graphs:
        graph.replay()
    np.testing.assert_array_equal(x.numpy(), np.full(4, 200))
    for graph in graphs:
        graph.close()


def gated(rt: nx.CudaRuntime) -> dict[str, Callable[[], Any]]:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)

    def capture() -> None:
        with rt.capture():
            rt.launch(launch)

    return {
        "launch": lambda: rt.launch(launch),
        "replay": graph.replay,
        "alloc": lambda: rt.alloc_raw(16),
        "free": rt.zeros((4,), nx.float32).free,
        "upload": lambda: x.copy_from(np.ones(4)),
        "read": x.numpy,
        "copy": lambda: rt.copy(rt.zeros((4,), nx.float32), x),
        "load": lambda: SCALE.load(rt),
        "synchronize": rt.synchronize,
        "capture": capture,
        "close graph": graph.close,
        "trim": rt.trim_pool,
        "event": rt.record_event,
    }


@pytest.mark.parametrize(
    "what",
    [
        "launch", "replay", "alloc", "free", "upload", "read", "copy", "load", "synchronize", "capture", "close graph",
        "trim", "event",
    ],
)  # fmt: skip
def test_another_thread_s_work_waits_at_the_gate_until_the_capture_has_ended(rt: nx.CudaRuntime, what: str) -> None:
    """It is neither refused nor recorded."""
    mine = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, mine, 4)
    attempts = gated(rt)
    rt.begin_graph_capture()
    rt.launch(launch)
    with Background(attempts[what]) as other:
        assert not other.done.wait(0.02)
        rt.launch(launch)
        graph = rt.end_graph_capture()
        assert other.done.wait(10)
    assert graph.node_count == 2


def test_the_gate_opens_when_a_capture_is_aborted(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    rt.begin_graph_capture()
    with Background(rt.launch, launch) as other:
        assert not other.done.wait(0.02)
        rt.abort_graph_capture()
    np.testing.assert_array_equal(x.numpy(), np.ones(4))


def test_a_thread_that_waits_already_is_not_held_up_by_a_capture(rt: nx.CudaRuntime) -> None:
    """And does not spoil it: what waits does so outside the runtime's lock."""
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    rt.launch(SLOW.prepare(rt, 1, 60))
    mark = rt.record_event()
    with Background(lambda: rt._streams.wait_event(mark._handle)) as waiting:
        time.sleep(0.01)
        with rt.capture() as graph:
            rt.launch(launch)
            assert waiting.done.wait(10)
            rt.launch(launch)
    assert graph.node_count == 2


def test_captures_of_several_threads_follow_each_other(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    counts: list[int] = []

    def work(launches: int) -> None:
        for _ in range(20):
            with rt.capture() as graph:
                for _ in range(launches):
                    rt.launch(launch)
            counts.append(graph.node_count)
            graph.close()

    with Background(work, 1), Background(work, 2), Background(work, 3):
        pass
    assert sorted(counts) == [1] * 20 + [2] * 20 + [3] * 20


def test_exclusive_keeps_other_threads_out_of_a_sequence(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with ExitStack() as theirs, rt.exclusive():
        other = theirs.enter_context(Background(rt.launch, launch))
        assert not other.done.wait(0.02)
        before = rt.stats()
        rt.launch(launch)
        rt.synchronize()
        assert rt.stats().since(before).launches == 1
    np.testing.assert_array_equal(x.numpy(), np.full(4, 2))


def test_two_threads_that_capture_on_two_runtimes_and_touch_each_other_s_are_refused_and_go_on() -> None:
    """Neither waits for the other's capture, whatever is asked for."""
    driver = HostDriver(HOST_ENTRIES)
    with open_on(driver) as first, open_on(driver) as second:
        both = threading.Barrier(2)

        def work(mine: nx.CudaRuntime, theirs: nx.CudaRuntime) -> int:
            launch, stray = (ADD_ONE.prepare(rt, 4, rt.zeros((4,), nx.float32), 4) for rt in (mine, theirs))
            x, y = theirs.zeros((4,), nx.float32), theirs.zeros((4,), nx.float32)
            attempts: list[Callable[[], Any]] = [
                lambda: theirs.empty((4,), nx.float32),
                lambda: theirs.launch(stray),
                lambda: theirs.copy(x, y),
                lambda: theirs.fill_zero(x),
                lambda: theirs.dtod(x.ptr, y.ptr, 16),
                theirs.stats,
                theirs.close,
                theirs.begin_graph_capture,
                theirs.reset_graph,
                lambda: theirs.exclusive().__enter__(),
            ]
            both.wait(10)
            with mine.capture() as graph:
                mine.launch(launch)
                both.wait(10)
                for attempt in attempts:
                    with pytest.raises(nx.CaptureError, match="is illegal while this thread captures a CUDA graph"):
                        attempt()
                both.wait(10)
            return graph.node_count

        with Background(work, first, second) as one, Background(work, second, first) as other:
            pass
        assert (one.result, other.result) == (1, 1)


@pytest.mark.parametrize("before", [False, True])
def test_a_thread_that_ends_in_a_capture_is_named_to_those_who_wait(
    monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """To those who come later, and to those who wait already: nobody can end its capture any more."""
    monkeypatch.setattr(context, "_PATIENCE", 0.01)
    runtime = open_on(HostDriver(HOST_ENTRIES))
    may_end = threading.Event()

    def capture() -> None:
        runtime.begin_graph_capture()
        assert may_end.wait(10)

    capturing = threading.Thread(target=capture, name="careless")
    capturing.start()
    while not runtime._session.capturing:
        time.sleep(0.001)
    if not before:
        may_end.set()
        capturing.join()

    def wait() -> None:
        with pytest.raises(nx.CaptureError, match="the thread 'careless' has ended without ending its capture"):
            runtime.stats()

    with Background(wait):
        may_end.set()
    for _ in range(50):  # One or another goes by the identifier of the thread that ended.
        on_thread(wait)
    with pytest.raises(nx.CaptureError, match="the thread 'careless'"):
        runtime.close()
    context._capturing.discard(runtime._session)
    _open_runtimes.discard(runtime)
    runtime._closed = True  # There is nothing left that could close it.


def short_ways(rt: nx.CudaRuntime) -> dict[str, Callable[[], None]]:
    """Calls that take the short way, the thread that asks for them being the owner of the gate."""
    x, out = rt.zeros((4,), nx.float32), rt.zeros((1, 1, 2, 8), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)
    kernel = nx.create_kernel(rt, nx.Node("Attention"))
    operands = [rt.zeros((1, 1, 2, 8), nx.float32) for _ in range(3)]
    kernel.execute(operands, [out])
    kernel.execute(operands, [out])
    outputs = cycle([rt.zeros((1, 1, 2, 8), nx.float32) for _ in range(2)])
    rt.launch(launch)
    return {
        "launch": partial(rt.launch, launch),
        "replay": graph.replay,
        "execute": partial(kernel.execute, operands, [out]),
        "execute on others": lambda: kernel.execute(operands, [next(outputs)]),
    }


@pytest.mark.parametrize("what", ["launch", "replay", "execute", "execute on others"])
def test_whoever_comes_in_waits_for_the_call_on_the_short_way(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The owner makes it without the lock; a thread that comes meanwhile finds it made and counted."""
    call = short_ways(rt)[what]
    name = "graph_launch" if what == "replay" else "launch_kernel"
    reached, go_on = threading.Event(), threading.Event()
    reach_driver = getattr(rt._driver, name)

    def hesitate(*arguments: Any) -> None:
        reached.set()
        assert go_on.wait(10)
        reach_driver(*arguments)

    def come_in() -> nx.RuntimeStats:
        assert reached.wait(10)
        return rt.stats()

    before = rt.stats()
    with Background(come_in) as other:
        monkeypatch.setattr(rt._driver, name, hesitate)
        late = threading.Timer(0.05, go_on.set)
        late.start()
        call()
    late.join()
    done = other.result.since(before)
    assert (done.launches, done.graph_replays) == ((0, 1) if what == "replay" else (1, 0))


@pytest.mark.parametrize("what", ["launch", "replay", "execute", "execute on others"])
def test_the_short_way_is_of_the_thread_that_was_in_last(rt: nx.CudaRuntime, what: str) -> None:
    """Another goes the long way once, and is then the owner; what is counted is what was called."""
    call = short_ways(rt)[what]
    before, gate = rt.stats(), rt._session.lock
    for _ in range(3):
        assert gate.turn.owner == threading.get_ident()
        call()
        on_thread(call)
        assert gate.turn.owner != threading.get_ident()
        call()
    assert not gate.turn.passing
    done = rt.stats().since(before)
    assert done.launches + done.graph_replays == 9


@pytest.mark.parametrize("what", ["launch", "replay", "execute", "execute on others"])
def test_a_thread_that_captures_has_no_short_way_on_another_runtime(rt: nx.CudaRuntime, what: str) -> None:
    """Its calls there are refused as by the long way, and work again afterwards; other threads keep theirs."""
    call = short_ways(rt)[what]
    with open_on(HostDriver(HOST_ENTRIES)) as other:
        launch = ADD_ONE.prepare(other, 4, other.zeros((4,), nx.float32), 4)
        with other.capture():
            other.launch(launch)
            with pytest.raises(nx.CaptureError, match="on another runtime"):
                call()
            on_thread(call)
            turn = rt._session.lock.turn
            assert turn.owner not in (0, threading.get_ident())
        call()
        call()
    assert rt._session.lock.turn.owner == threading.get_ident()


def test_what_is_in_the_way_of_a_bare_call_closes_the_short_way(rt: nx.CudaRuntime) -> None:
    """Until it is gone again, whoever has the turn."""
    gate = rt._session.lock

    def is_open() -> bool:
        rt.stats()
        return gate.turn.owner == threading.get_ident()

    launch = ADD_ONE.prepare(rt, 4, rt.zeros((4,), nx.float32), 4)
    assert is_open()
    with rt.capture():
        rt.launch(launch)
        assert not is_open()
    with rt.trace():
        assert not is_open()
    assert is_open()
    with rt.fork() as fork:
        assert is_open()
        with fork.branch():
            assert not is_open()
        assert is_open()
    rt.close()
    assert not is_open()


def test_an_interrupt_while_another_passes_leaves_the_gate_as_it_was(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes after that still waits for the call, and nothing is locked."""
    gate = rt._session.lock
    rt.stats()
    turn = gate.turn
    turn.passing = True

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    def come_in() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(context, "sleep", interrupted)
            with pytest.raises(KeyboardInterrupt):
                rt.stats()
        assert gate.turn is turn
        rt.stats()

    with Background(come_in) as other:
        assert not other.done.wait(0.05)
        turn.passing = False
    assert gate.turn is not turn
    rt.stats()


def test_short_ways_of_many_threads_lose_nothing(rt: nx.CudaRuntime) -> None:
    """Replays and launches that change hands all the time, beside captures: every one runs once, none is recorded."""
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)
    before = rt.stats()

    def work(call: Callable[[], None]) -> None:
        for _ in range(300):
            call()

    def record() -> None:
        for _ in range(30):
            with rt.capture() as own:
                rt.launch(launch)
            assert own.node_count == 1

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with (
            Background(work, graph.replay), Background(work, graph.replay),
            Background(work, partial(rt.launch, launch)), Background(work, partial(rt.launch, launch, [x])),
            Background(record),
        ):  # fmt: skip
            pass
    finally:
        sys.setswitchinterval(switch)
    done = rt.stats().since(before)
    assert (done.launches, done.graph_replays, graph.replays) == (630, 600, 600)
    np.testing.assert_array_equal(x.numpy(), np.full(4, 1200))


def test_two_captures_into_one_slot_from_two_threads_are_two_segments(rt: nx.CudaRuntime) -> None:
    launch = ADD_ONE.prepare(rt, 4, rt.zeros((4,), nx.float32), 4)

    class Hesitant(nx.Kernel):
        """Lets the other thread come in while it is asked."""

        def execute(self, inputs: Any, outputs: Any) -> None:
            raise NotImplementedError

        launch_stats = workspace_stats = lambda self: None

        def capture_support(self) -> nx.CaptureSupport:
            time.sleep(0.05)
            return nx.CaptureSupport.supported()

    def capture() -> None:
        rt.begin_graph_capture([Hesitant()])
        rt.launch(launch)
        rt.end_graph_capture()

    with Background(capture), Background(capture):
        pass
    assert rt.graph_segment_count() == 2
    rt.reset_graph()
