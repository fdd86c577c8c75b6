"""Every driver call of every scenario fails once: a typed error, nothing leaked, and the next run is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.driver.base import CaptureStatus
from nxrt_cuda.driver.host import HostDriver
from nxrt_cuda.stats import WorkspaceLedger
from nxrt_cuda.workspace import Workspace
from tests.small_kernels import ADD_ONE, HOST_ENTRIES, SCALE, open_on

Scenario = Callable[[nx.CudaRuntime, Any], None]

REFUSED = "CUDA_ERROR_INVALID_VALUE"
FAULT = "CUDA_ERROR_ILLEGAL_ADDRESS"


class Fixtures:
    """What the scenarios work on, made before a call is told to fail."""

    def __init__(self, rt: nx.CudaRuntime) -> None:
        self.x = rt.from_array(np.arange(4, dtype=np.float32))
        self.y = rt.zeros((4,), nx.float32)
        self.scale = SCALE.prepare(rt, 4, self.y, self.x, 2.0, 4)
        self.add = ADD_ONE.prepare(rt, 4, self.y, 4)
        with rt.capture(name="old") as self.graph:
            rt.launch(self.scale)
        self.workspace = Workspace(rt, "Op", WorkspaceLedger())
        self.workspace.publish(self.workspace.candidate(100))
        rt.synchronize()


def eager_launch(rt: nx.CudaRuntime, on: Fixtures) -> None:
    rt.launch(on.scale)
    rt.launch(on.add)
    np.testing.assert_array_equal(on.y.numpy(), [1, 3, 5, 7])


def load(rt: nx.CudaRuntime, on: Fixtures) -> None:
    loaded = rt.nvrtc_function("m", ADD_ONE.source, "add_one", ADD_ONE.params, macros={"FRESH": 1})
    config = nx.LaunchConfig((1, 1, 1), (128, 1, 1), 100 * 1024)
    y = rt.zeros((4,), nx.float32)
    rt.launch(rt.prepare(loaded, config, y, 4))
    np.testing.assert_array_equal(y.numpy(), np.ones(4))


def upload(rt: nx.CudaRuntime, on: Fixtures) -> None:
    for asynchronous in (False, True):
        rt.write(on.x, np.full(4, 9, np.float32), asynchronous=asynchronous)
        fresh = rt.from_array(np.arange(5000, dtype=np.float32))
        on.x.copy_from(np.arange(4, dtype=np.float32))
        np.testing.assert_array_equal(fresh.numpy(), np.arange(5000))
    np.testing.assert_array_equal(on.x.numpy(), np.arange(4))


def read(rt: nx.CudaRuntime, on: Fixtures) -> None:
    pending = [rt.read_async(on.x), rt.dtoh_async(on.x.ptr, 16)]
    np.testing.assert_array_equal(on.x.numpy(), np.arange(4))
    np.testing.assert_array_equal(pending[0].numpy(), np.arange(4))
    np.testing.assert_array_equal(pending[1].numpy().view(np.float32), np.arange(4))
    assert rt.check_capture_error() is nx.CaptureErrorCode.NONE


def copies(rt: nx.CudaRuntime, on: Fixtures) -> None:
    z = rt.empty((4,), nx.float32)
    rt.fill_zero(z)
    rt.copy(z, on.x)
    raw = rt.alloc_raw(16)
    try:
        rt.dtod(raw, z.ptr, 16)
        target = np.zeros(4, np.float32)
        rt.dtoh(target, raw)
    finally:
        rt.free_raw(raw)
    np.testing.assert_array_equal(target, np.arange(4))


def capture(rt: nx.CudaRuntime, on: Fixtures) -> None:
    on.x.copy_from(np.arange(4, dtype=np.float32))
    with rt.capture() as graph:
        rt.launch(on.scale)
        rt.launch(on.add)
        rt.copy(on.x, on.y)
        rt.fill_zero(on.y)
    assert graph.node_count == 4
    graph.replay()
    np.testing.assert_array_equal(on.x.numpy(), [1, 3, 5, 7])
    graph.close()


def segments(rt: nx.CudaRuntime, on: Fixtures) -> None:
    rt.reset_graph()
    for launch in (on.scale, on.add):
        rt.begin_graph_capture()
        try:
            rt.launch(launch)
        except nx.NxrtError:
            rt.abort_graph_capture()
            raise
        rt.end_graph_capture()
    assert rt.graph_segment_count() == 2
    rt.replay_graph()
    np.testing.assert_array_equal(on.y.numpy(), [1, 3, 5, 7])


def replay(rt: nx.CudaRuntime, on: Fixtures) -> None:
    for _ in range(3):
        on.graph.replay()
    np.testing.assert_array_equal(on.y.numpy(), [0, 2, 4, 6])


def growth(rt: nx.CudaRuntime, on: Fixtures) -> None:
    needed = on.workspace.nbytes * 3
    slot = on.workspace.candidate(needed)
    rt.launch(ADD_ONE.prepare(rt, 4, slot.ptr, 4))
    on.workspace.publish(slot)
    del slot
    assert on.workspace.nbytes == needed
    rt.trim_pool()


def release(rt: nx.CudaRuntime, on: Fixtures) -> None:
    """Everything that gives something back, dropped and explicit."""
    tensors = [rt.zeros((1000,), nx.float32) for _ in range(3)]
    with rt.capture() as graph:
        rt.launch(on.add)
    tensors.pop().free()
    rt.alloc_graph_stable(100).free()
    del tensors, graph
    rt.trim_pool()
    assert rt.stats().pool_retained_bytes == 0


def events(rt: nx.CudaRuntime, on: Fixtures) -> None:
    start = rt.record_event()
    rt.launch(on.scale)
    end = rt.record_event()
    assert start.elapsed_time(end) >= 0
    rt.wait_for_stream(2)
    rt.drain_for_unmap()


SCENARIOS = [eager_launch, load, upload, read, copies, capture, segments, replay, growth, release, events]


def opened(driver: HostDriver) -> tuple[nx.CudaRuntime, Fixtures]:
    runtime = open_on(driver)
    return runtime, Fixtures(runtime)


def each_call_failing(
    error: str, make: Callable[[HostDriver], Any], attempt: Callable[[Any], None], *, spared: tuple[str, ...] = ()
) -> Iterator[tuple[HostDriver, Any, nx.NxrtError | None]]:
    """``attempt(make(driver))``, each time with a fresh driver of which one call more is let pass before one fails.

    Yields the driver, what was made, and the error; the last time the attempt has passed without meeting the failure.
    ``spared``: calls whose failure the attempt is free to cope with.
    """
    for n in count(1):
        driver = HostDriver(HOST_ENTRIES)
        made = make(driver)
        seen: Counter[str] = driver.calls.copy()
        raised: nx.NxrtError | None = None
        with driver.fail_call(n, error) as failure:
            try:
                attempt(made)
            except nx.NxrtError as caught:
                raised = caught
        if not failure.fired:
            assert raised is None
            assert n > 3, "the attempt makes driver calls"
        elif raised is None:
            assert set(driver.calls - seen) & set(spared), f"the failure of call {n} went unreported"
        else:
            assert error in str(raised)
        yield driver, made, raised
        if not failure.fired:
            return


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_refused_call_is_a_typed_error_and_the_next_run_is_right(scenario: Scenario) -> None:
    for driver, (runtime, on), _ in each_call_failing(REFUSED, opened, lambda made: scenario(*made)):
        assert not runtime.is_capturing()
        assert runtime.capture_status() is CaptureStatus.NONE
        scenario(runtime, on)
        runtime.close()
        assert not driver.live(), str(driver.live())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_fault_at_any_call_poisons_the_runtime(scenario: Scenario) -> None:
    for _, (runtime, _on), raised in each_call_failing(FAULT, opened, lambda made: scenario(*made)):
        if raised is not None:
            assert isinstance(raised, nx.DeviceFaultError)
            assert "restart the process" in str(raised)
            assert not runtime.is_capturing()
            for attempt in (runtime.synchronize, runtime.trim_pool, runtime.begin_graph_capture):
                with pytest.raises(nx.DeviceFaultError) as again:
                    attempt()
                assert str(again.value) == str(raised)
        runtime.close()
        assert runtime.is_closed


def test_opening_fails_cleanly_at_every_call() -> None:
    """And does without the attributes that a driver need not tell."""
    opened_: list[nx.CudaRuntime] = []

    def attempt(driver: HostDriver) -> None:
        opened_.append(open_on(driver))

    for driver, _, raised in each_call_failing(REFUSED, lambda driver: driver, attempt, spared=("device_attribute",)):
        if raised is not None:
            assert not driver.live(), str(driver.live())
            assert driver.ctx_get_current() == 0
            attempt(driver)
        runtime = opened_.pop()
        np.testing.assert_array_equal(runtime.zeros((4,), nx.float32).numpy(), np.zeros(4))
        runtime.close()
        assert not driver.live(), str(driver.live())


def test_closing_goes_on_where_a_failed_call_stopped_it() -> None:
    """Whichever call fails, the error is raised, and the next close takes back the rest."""

    def busy(driver: HostDriver) -> tuple[nx.CudaRuntime, list[Any]]:
        runtime, on = opened(driver)
        held: list[Any] = [on, runtime.read_async(on.x), runtime.record_event(), runtime.alloc_raw(4)]
        runtime.zeros((1000,), nx.float32).free()
        runtime.launch(on.scale)
        on.graph.replay()
        return runtime, held

    for driver, (runtime, _), raised in each_call_failing(REFUSED, busy, lambda made: made[0].close()):
        if raised is not None:
            assert not runtime.is_closed
            runtime.close()
        assert runtime.is_closed
        assert not driver.live(), str(driver.live())
        calls = driver.calls_total
        runtime.close()
        assert driver.calls_total == calls


def test_memory_that_is_short_for_a_moment_is_asked_for_again() -> None:
    driver = HostDriver(HOST_ENTRIES)
    with open_on(driver) as runtime:
        runtime.empty((512,), nx.uint8).free()
        with driver.fail_call(call="mem_alloc") as failure:
            runtime.empty((1024,), nx.uint8)
        assert failure.fired
        assert runtime.stats().pool_retained_bytes == 0
    assert not driver.live()
