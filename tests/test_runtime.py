"""The runtime object: opening, closing, the context it lives in, faults, and what it counts."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.driver.host import HostDriver, HostLaunch
from tests.small_kernels import ADD_ONE, FAULT, HOST_ENTRIES, LATCH, SCALE, SLOW, Background, on_thread, open_on

NOWHERE = 0x10


@pytest.fixture
def faulted() -> Iterator[nx.CudaRuntime]:
    """A runtime whose context a kernel has destroyed; nothing has noticed yet."""
    runtime = nx.open_runtime("host", host_entries=HOST_ENTRIES)
    runtime.launch(FAULT.prepare(runtime, 1, NOWHERE))
    yield runtime
    runtime.close()


# Opening.


def test_a_host_runtime_says_what_it_is(rt: nx.CudaRuntime) -> None:
    assert (rt.device, rt.device_name, rt.is_closed) == ("host", "host", False)
    assert repr(rt) == "CudaRuntime('host', 'host')"
    rt.close()
    assert repr(rt) == "CudaRuntime('host', 'host', closed)"


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1.0", "host:0", "", "CUDA:0", "cuda:²"])
def test_a_device_name_of_another_form_is_refused(device: str) -> None:
    with pytest.raises(nx.RuntimeStateError, match=r"device must be 'cuda', 'cuda:<ordinal>' or 'host', got "):
        nx.open_runtime(device)


def test_the_host_driver_takes_no_foreign_stream() -> None:
    with pytest.raises(nx.RuntimeStateError, match="the host driver has streams of its own only"):
        nx.open_runtime("host", stream=0x1000)


@pytest.mark.parametrize("text", ["-1", "1.5", "lots", "", "\N{FULLWIDTH DIGIT ONE}"])
def test_a_pool_bound_that_is_no_number_is_refused_and_opens_nothing(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("NXRT_CUDA_POOL_BYTES", text)
    driver = HostDriver()
    with pytest.raises(nx.RuntimeStateError, match=r"NXRT_CUDA_POOL_BYTES must be a whole number of bytes >= 0, got "):
        open_on(driver)
    assert not driver.live()


def test_opening_makes_two_streams_and_one_allocation_and_counts_from_zero() -> None:
    driver = HostDriver()
    with open_on(driver) as runtime:
        live = driver.live()
        assert (live.contexts, live.streams, live.allocations) == (1, 2, 1)
        stats = runtime.stats()
        assert (stats.driver_allocations, stats.memsets, stats.launches) == (0, 0, 0)
        assert stats.live_bytes == live.device_bytes


def test_capabilities_are_the_device_s_own() -> None:
    with nx.open_runtime("host") as runtime:
        found = runtime.capabilities
    assert found.compute_capability == (9, 0)
    assert found.max_grid_dim_x == 2**31 - 1
    assert found.max_threads_per_block == 1024
    assert found.shared_memory_per_block == 48 * 1024
    assert found.shared_memory_per_block_optin == 227 * 1024
    assert found.multiprocessor_count == 132
    assert found.l2_cache_bytes == 50 << 20


def test_capabilities_are_conservative_where_the_driver_does_not_say() -> None:
    silent = dict.fromkeys(
        [
            "MAX_GRID_DIM_X", "MAX_THREADS_PER_BLOCK", "MAX_SHARED_MEMORY_PER_BLOCK",
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "MULTIPROCESSOR_COUNT", "L2_CACHE_SIZE",
        ]
    )  # fmt: skip
    with open_on(HostDriver(attributes=silent)) as runtime:
        found = runtime.capabilities
    assert found.max_grid_dim_x == 65535
    assert found.max_threads_per_block == 512
    assert found.shared_memory_per_block == found.shared_memory_per_block_optin == 48 * 1024
    assert found.multiprocessor_count == 1
    assert found.l2_cache_bytes == 0


def test_an_opt_in_below_the_default_is_not_believed() -> None:
    with open_on(HostDriver(attributes={"MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 1024})) as runtime:
        assert runtime.capabilities.shared_memory_per_block_optin == 48 * 1024


def test_a_grid_beyond_the_device_is_refused_before_the_driver_sees_it() -> None:
    narrow = HostDriver(HOST_ENTRIES, attributes={"MAX_GRID_DIM_X": 100})
    with open_on(narrow) as runtime, pytest.raises(nx.LaunchError, match=r"^add_one: grid.x = 101 exceeds 100$"):
        ADD_ONE.prepare(runtime, 101 * 128, 0, 0)


# The context.


def test_two_runtimes_share_one_primary_context() -> None:
    """It is retained once however many use it, and released by the last one."""
    driver = HostDriver(HOST_ENTRIES)
    first, second = open_on(driver), open_on(driver)
    assert driver.calls["primary_ctx_retain"] == 1
    assert first.context == second.context
    first.close()
    assert driver.live().contexts == 1
    np.testing.assert_array_equal(second.zeros((2,), nx.float32).numpy(), [0, 0])
    second.close()
    assert driver.calls["primary_ctx_release"] == 1
    assert not driver.live()


def test_two_runtimes_do_not_mix_their_memory(rt: nx.CudaRuntime) -> None:
    with nx.open_runtime(rt.device) as other:
        mine, theirs = rt.zeros((4,), nx.float32), other.zeros((4,), nx.float32)
        for attempt in (
            lambda: rt.read(theirs),
            lambda: rt.write(theirs, np.ones(4)),
            lambda: rt.copy(mine, theirs),
            lambda: rt.fill_zero(theirs),
            lambda: rt.read_async(theirs),
            lambda: rt.to_dlpack(theirs),
        ):
            with pytest.raises(
                nx.DeviceMemoryError, match=f"belongs to another runtime, not to this one on {rt.device}"
            ):
                attempt()


def test_every_call_works_from_a_fresh_thread(rt: nx.CudaRuntime) -> None:
    def work() -> np.ndarray:
        x = rt.from_array(np.arange(4, dtype=np.float32))
        launch = ADD_ONE.prepare(rt, 4, x, 4)
        with rt.capture() as graph:
            rt.launch(launch)
        graph.replay()
        rt.launch(launch)
        rt.synchronize()
        return x.numpy()

    np.testing.assert_array_equal(on_thread(work), [2, 3, 4, 5])


def test_every_call_works_beside_a_foreign_context_which_is_current_again_afterwards() -> None:
    driver = HostDriver(HOST_ENTRIES)
    with open_on(driver) as runtime:
        x = runtime.zeros((4,), nx.float32)
        launch = ADD_ONE.prepare(runtime, 4, x, 4)

        def work() -> None:
            foreign = driver.foreign_context()
            driver.ctx_push_current(foreign)
            runtime.launch(launch)
            assert driver.ctx_get_current() == foreign
            with runtime.capture() as graph:
                runtime.launch(launch)
                assert driver.ctx_get_current() == foreign
            graph.replay()
            assert driver.ctx_get_current() == foreign
            np.testing.assert_array_equal(x.numpy(), np.full(4, 2))
            with pytest.raises(nx.DeviceMemoryError):
                runtime.free_raw(1)
            graph.close()
            runtime.read_async(x).numpy()
            assert driver.ctx_get_current() == foreign
            assert driver.ctx_pop_current() == foreign
            assert driver.ctx_get_current() in (0, runtime.context)

        on_thread(work)


def test_a_thread_is_left_without_a_released_context() -> None:
    driver = HostDriver()
    open_on(driver).close()
    assert driver.ctx_get_current() == 0


# Closing.


def everything(rt: nx.CudaRuntime) -> dict[str, Callable[[], Any]]:
    """Each public call that reaches the driver."""
    x, y = rt.zeros((4,), nx.float32), rt.zeros((4,), nx.float32)
    raw = rt.alloc_raw(64)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture(name="old") as graph:
        rt.launch(launch)
    pending = rt.read_async(x)
    start, end = rt.record_event(), rt.record_event()
    return {
        "empty": lambda: rt.empty((4,), nx.float32),
        "zeros": lambda: rt.zeros((4,), nx.float32),
        "from_array": lambda: rt.from_array(np.ones(4)),
        "numpy": x.numpy,
        "read_async": lambda: rt.read_async(x),
        "pending read": pending.numpy,
        "copy_from": lambda: x.copy_from(np.ones(4)),
        "write async": lambda: rt.write(x, np.ones(4), asynchronous=True),
        "copy": lambda: rt.copy(x, y),
        "fill_zero": lambda: rt.fill_zero(x),
        "dlpack": x.__dlpack__,
        "alloc_raw": lambda: rt.alloc_raw(64),
        "alloc_graph_stable": lambda: rt.alloc_graph_stable(64),
        "trim_pool": rt.trim_pool,
        "htod": lambda: rt.htod(np.ones(4), raw),
        "htod_async": lambda: rt.htod_async(np.ones(4), raw),
        "dtoh": lambda: rt.dtoh(np.ones(4), raw),
        "dtoh_async": lambda: rt.dtoh_async(raw, 4),
        "dtod": lambda: rt.dtod(raw, raw + 32, 4),
        "load": lambda: SCALE.load(rt),
        "launch": lambda: rt.launch(launch),
        "replay": graph.replay,
        "replay_segment": lambda: graph.replay_segment(0),
        "capture": lambda: rt.capture().__enter__(),
        "begin_graph_capture": rt.begin_graph_capture,
        "synchronize": rt.synchronize,
        "drain_for_unmap": rt.drain_for_unmap,
        "wait_for_stream": lambda: rt.wait_for_stream(1),
        "record_event": rt.record_event,
        "elapsed_time": lambda: start.elapsed_time(end),
        "check_capture_error": rt.check_capture_error,
        "reset_capture_error": rt.reset_capture_error,
        "capture_status": rt.capture_status,
    }


def test_a_closed_runtime_refuses_every_call_and_makes_none(rt: nx.CudaRuntime) -> None:
    calls = everything(rt)
    driver = rt._driver
    rt.close()
    before = driver.calls_total
    for name, call in calls.items():
        with pytest.raises((nx.RuntimeStateError, nx.DeviceMemoryError, nx.GraphError)) as caught:
            call()
        assert any(word in str(caught.value) for word in ("closed", "freed")), f"{name}: {caught.value}"
    assert driver.calls_total == before


def test_closing_twice_and_from_two_threads_at_once_is_closing_once() -> None:
    driver = HostDriver(HOST_ENTRIES)
    runtime = open_on(driver)
    runtime.launch(SLOW.prepare(runtime, 1, 50))
    with Background(runtime.close):
        runtime.close()
    runtime.close()
    assert runtime.is_closed
    assert not driver.live()


def test_closing_waits_for_queued_work_and_takes_back_what_others_still_hold(rt: nx.CudaRuntime) -> None:
    """Tensors, reads under way, events and graphs that are still referred to do not keep the driver's objects."""
    driver = rt._driver
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)
    graph.replay()
    pending, event, raw = rt.read_async(x), rt.record_event(), rt.alloc_raw(16)
    rt.close()
    assert not driver.live(), str(driver.live())
    assert graph.is_closed
    assert x.owner.is_freed
    del pending, event, graph, launch, x, raw
    assert not driver.live()


def test_closing_inside_a_capture_ends_the_capture(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    rt.begin_graph_capture()
    rt.launch(launch)
    rt.close()
    assert not rt.is_capturing()
    with pytest.raises(nx.RuntimeStateError, match="the runtime on host is closed"):
        rt.end_graph_capture()


def test_closing_waits_for_the_capture_of_another_thread() -> None:
    driver = HostDriver(HOST_ENTRIES)
    runtime = open_on(driver)
    x = runtime.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(runtime, 4, x, 4)
    runtime.begin_graph_capture()
    with Background(runtime.close) as closing:
        runtime.launch(launch)
        assert not closing.done.wait(0.05)
        runtime.end_graph_capture()
    assert runtime.is_closed
    assert not driver.live()


def test_nothing_is_launched_on_memory_that_a_close_cut_short_has_returned(rt: nx.CudaRuntime) -> None:
    """The launch was checked before, and the runtime is not closed yet."""
    launch = ADD_ONE.prepare(rt, 4, rt.zeros((4,), nx.float32), 4)
    rt.launch(launch)
    with rt._driver.fail_call(call="module_unload"), pytest.raises(nx.DriverError):
        rt.close()
    assert not rt.is_closed
    with pytest.raises(nx.DeviceMemoryError, match="was freed"):
        rt.launch(launch)
    rt.close()


def test_leaving_the_with_block_closes() -> None:
    driver = HostDriver()
    with pytest.raises(ZeroDivisionError), open_on(driver) as runtime:
        raise ZeroDivisionError
    assert runtime.is_closed
    assert not driver.live()


# Streams.


def test_the_streams_are_the_runtime_s_own_and_two(rt: nx.CudaRuntime) -> None:
    assert rt.stream not in (0, 1, 2)
    assert rt.__cuda_stream__() == (0, rt.stream)
    assert rt._streams.transfer not in (0, 1, 2, rt.stream)


def test_a_foreign_stream_is_used_and_left_alone() -> None:
    driver = HostDriver(HOST_ENTRIES)
    with open_on(driver) as owner:
        with open_on(driver, stream=owner.stream) as guest:
            assert guest.stream == owner.stream
            x = guest.zeros((4,), nx.float32)
            guest.launch(ADD_ONE.prepare(guest, 4, x, 4))
            owner.synchronize()
            np.testing.assert_array_equal(x.numpy(), np.ones(4))
        owner.zeros((4,), nx.float32).numpy()
    assert not driver.live()


class ForeignStream:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def wait_event(self, event: object) -> None: ...


def test_the_owner_of_a_foreign_stream_is_kept() -> None:
    """CuPy destroys a stream with its object, which the caller need not hold."""
    driver = HostDriver(HOST_ENTRIES)
    with open_on(driver) as owner:
        stream = ForeignStream(owner.stream)
        alive = weakref.ref(stream)
        with open_on(driver, stream=stream) as guest:
            del stream
            gc.collect()
            assert alive() is not None
            assert guest.stream == owner.stream


def test_what_is_no_stream_opens_nothing() -> None:
    driver = HostDriver()
    with pytest.raises(nx.RuntimeStateError, match=r"stream must be a handle \(an int\), or an object with "):
        open_on(driver, stream="7")
    assert not driver.live()


def test_waiting_for_a_stream_orders_later_work_behind_it() -> None:
    driver = HostDriver(HOST_ENTRIES)
    with open_on(driver) as producer, open_on(driver) as consumer:
        x = producer.zeros((4,), nx.float32)
        y = consumer.zeros((4,), nx.float32)
        producer.launch(ADD_ONE.prepare(producer, 4, x, 4))
        consumer.wait_for_stream(producer.stream)
        consumer.dtod(y.ptr, x.ptr, x.nbytes)
        np.testing.assert_array_equal(y.numpy(), np.ones(4))


def test_without_waiting_the_other_stream_s_work_is_not_seen() -> None:
    """The test above would pass on a driver that ran everything at once; this one shows that it does not."""
    driver = HostDriver(HOST_ENTRIES)
    with open_on(driver) as producer, open_on(driver) as consumer:
        x = producer.zeros((4,), nx.float32)
        producer.synchronize()
        y = consumer.zeros((4,), nx.float32)
        producer.launch(ADD_ONE.prepare(producer, 4, x, 4))
        consumer.dtod(y.ptr, x.ptr, x.nbytes)
        np.testing.assert_array_equal(y.numpy(), np.zeros(4))


@pytest.mark.parametrize("stream", [None, "stream", object()])
def test_what_is_no_stream_cannot_be_waited_for(rt: nx.CudaRuntime, stream: Any) -> None:
    with pytest.raises(nx.StreamTypeError, match="stream"):
        rt.wait_for_stream(stream)


def test_a_failing_wait_for_a_stream_is_the_driver_s_own_error(rt: nx.CudaRuntime) -> None:
    with pytest.raises(nx.DriverError, match=r"cuEventRecord failed: CUDA_ERROR_INVALID_HANDLE \(400\)"):
        rt.wait_for_stream(0xDEAD)


# Timing.


def test_two_marks_tell_the_time_of_the_work_between_them(rt: nx.CudaRuntime) -> None:
    launch = SLOW.prepare(rt, 1, 20)
    start = rt.record_event()
    rt.launch(launch)
    end = rt.record_event()
    assert 19 <= start.elapsed_time(end) < 2000
    assert start.elapsed_time(start) == 0


# The capture-error word.


def test_latched_codes_add_up_until_they_are_reset(rt: nx.CudaRuntime) -> None:
    assert rt.check_capture_error() is nx.CaptureErrorCode.NONE
    for code in (1, 2, 1):
        rt.launch(LATCH.prepare(rt, 1, rt.capture_error_ptr, code))
    assert rt.check_capture_error() == nx.CaptureErrorCode.TOTAL_LENGTH | nx.CaptureErrorCode.PAST_LENGTH
    rt.reset_capture_error()
    assert rt.check_capture_error() is nx.CaptureErrorCode.NONE


def test_a_replay_latches_too(rt: nx.CudaRuntime) -> None:
    launch = LATCH.prepare(rt, 1, rt.capture_error_ptr, 2)
    with rt.capture() as graph:
        rt.launch(launch)
    assert rt.check_capture_error() is nx.CaptureErrorCode.NONE
    graph.replay()
    assert rt.check_capture_error() is nx.CaptureErrorCode.PAST_LENGTH


# Counters.


def test_each_operation_is_counted_once(rt: nx.CudaRuntime) -> None:
    x = rt.from_array(np.zeros(1024, np.float32))
    y = rt.empty((1024,), nx.float32)
    launch = ADD_ONE.prepare(rt, 1024, x, 1024)
    before = rt.stats()
    rt.launch(launch)
    rt.copy(y, x)
    rt.fill_zero(x)
    x.copy_from(np.ones(1024))
    rt.write(x, np.ones(1024), asynchronous=True)
    y.numpy()
    rt.read_async(y).numpy()
    rt.synchronize()
    done = rt.stats().since(before)
    assert (done.launches, done.memsets, done.synchronizations) == (1, 1, 1)
    assert (done.dtod_copies, done.dtod_bytes) == (1, 4096)
    assert (done.htod_copies, done.htod_bytes) == (2, 8192)
    assert (done.dtoh_copies, done.dtoh_bytes) == (2, 8192)
    assert done.async_copies == 2
    assert (done.driver_allocations, done.driver_frees, done.pool_hits) == (0, 0, 0)


def test_compiles_are_counted_once_a_specialisation(rt: nx.CudaRuntime) -> None:
    for _ in range(3):
        ADD_ONE.load(rt)
    assert rt.stats().modules_compiled + rt.stats().program_cache_hits == 1
    other = rt.nvrtc_function("m", ADD_ONE.source, "add_one", ADD_ONE.params, macros={"N": 1})
    assert other is not ADD_ONE.load(rt)
    assert rt.stats().modules_compiled + rt.stats().program_cache_hits == 2


def test_statistics_are_a_snapshot_that_prints_as_a_table(rt: nx.CudaRuntime) -> None:
    before = rt.stats()
    rt.zeros((4,), nx.float32)
    assert before.memsets == 0
    title, *rows = str(rt.stats()).splitlines()
    assert title == "runtime"
    assert ["memsets", "1"] in [row.split() for row in rows]
    assert len({len(row) - len(row.split()[1]) for row in rows}) == 1, "the values stand in one column"


def test_bools_among_macros_are_numbers(rt: nx.CudaRuntime) -> None:
    """In ``#if CAUSAL``, ``True`` would be the name of nothing, and 0."""
    macros = {"CAUSAL": True, "MASKED": np.False_, "TILE": 32, "ELEMENT": "float"}
    function = rt.nvrtc_function("m", ADD_ONE.source, ADD_ONE.entry, ADD_ONE.params, macros=macros)
    assert function.spec.macros == (("CAUSAL", "1"), ("MASKED", "0"), ("TILE", "32"), ("ELEMENT", "float"))


# Faults.


def test_a_fault_is_reported_by_the_call_that_waits_with_the_launches_since_the_last_good_one() -> None:
    with nx.open_runtime("host", host_entries=HOST_ENTRIES) as runtime:
        x = runtime.zeros((4,), nx.float32)
        good = ADD_ONE.prepare(runtime, 4, x, 4)
        runtime.launch(good)
        runtime.synchronize()
        runtime.launch(FAULT.prepare(runtime, 1, NOWHERE))
        runtime.launch(good)
        with pytest.raises(nx.DeviceFaultError) as caught:
            runtime.synchronize()
    error = caught.value
    assert error.suspects == (
        "fault grid=(1, 1, 1) block=(128, 1, 1)",
        "add_one grid=(1, 1, 1) block=(128, 1, 1)",
    )
    assert (error.call, error.code, error.name) == ("cuEventSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert "launched since the last good synchronise: fault grid=(1, 1, 1)" in str(error)
    assert str(error).endswith("the CUDA context is lost, restart the process)")


def test_the_host_driver_says_what_was_wrong_with_an_access() -> None:
    with nx.open_runtime("host", host_entries=HOST_ENTRIES) as runtime:
        runtime.launch(FAULT.prepare(runtime, 1, NOWHERE))
        with pytest.raises(nx.DeviceFaultError, match=rf"argument 'address': .* at 0x{NOWHERE:x}, which is no device"):
            runtime.synchronize()


def test_what_a_host_entry_raised_is_in_the_fault_and_behind_it() -> None:
    def fail(launch: nx.HostLaunch) -> None:
        raise ValueError("mine")

    with nx.open_runtime("host", host_entries={**HOST_ENTRIES, "add_one": fail}) as runtime:
        x = runtime.zeros((4,), nx.float32)
        runtime.launch(ADD_ONE.prepare(runtime, 4, x, 4))
        with pytest.raises(nx.DeviceFaultError, match=r"'add_one' .*: ValueError: mine; launched") as caught:
            x.numpy()
        assert isinstance(caught.value.__cause__, ValueError)


def test_a_read_that_succeeds_clears_the_suspects_too() -> None:
    with nx.open_runtime("host", host_entries=HOST_ENTRIES) as runtime:
        x = runtime.zeros((4,), nx.float32)
        runtime.launch(ADD_ONE.prepare(runtime, 4, x, 4))
        x.numpy()
        runtime.launch(FAULT.prepare(runtime, 1, NOWHERE))
        with pytest.raises(nx.DeviceFaultError) as caught:
            x.numpy()
    assert caught.value.suspects == ("fault grid=(1, 1, 1) block=(128, 1, 1)",)


def test_what_is_launched_during_a_wait_stays_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait was for what had been launched before; other threads go on meanwhile."""
    with nx.open_runtime("host", host_entries=HOST_ENTRIES) as runtime:
        x = runtime.zeros((4,), nx.float32)
        good, bad = ADD_ONE.prepare(runtime, 4, x, 4), FAULT.prepare(runtime, 1, NOWHERE)
        runtime.launch(good)
        streams = runtime._streams
        wait = type(streams).wait_event

        def launch_meanwhile(event: int) -> None:
            wait(streams, event)
            on_thread(runtime.launch, bad)

        with monkeypatch.context() as patch:
            patch.setattr(streams, "wait_event", launch_meanwhile)
            runtime.synchronize()
        with pytest.raises(nx.DeviceFaultError) as caught:
            runtime.synchronize()
    assert caught.value.suspects == ("fault grid=(1, 1, 1) block=(128, 1, 1)",)


def test_a_wait_may_meet_the_fault_while_another_thread_launches() -> None:
    """It holds no lock, so that there is a new suspect while it names those that there are."""
    runtime = nx.open_runtime("host", host_entries=HOST_ENTRIES)
    suspects = runtime._session.suspects

    class Interrupted:
        """Stands among the labels; when it is looked at, the other thread has its turn."""

        @property
        def __class__(self) -> type:
            suspects.append("a launch of another thread")
            return Interrupted

    runtime.launch(FAULT.prepare(runtime, 1, NOWHERE))
    suspects.append(Interrupted())  # type: ignore[arg-type]
    with pytest.raises(nx.DeviceFaultError) as caught:
        runtime._streams.wait_event(runtime._streams.record(runtime.stream))
    assert caught.value.suspects == ("fault grid=(1, 1, 1) block=(128, 1, 1)",)
    runtime.close()


def test_only_so_many_suspects_are_named() -> None:
    with nx.open_runtime("host", host_entries=HOST_ENTRIES) as runtime:
        x = runtime.zeros((4,), nx.float32)
        good = ADD_ONE.prepare(runtime, 4, x, 4)
        for _ in range(200):
            runtime.launch(good)
        runtime.launch(FAULT.prepare(runtime, 1, NOWHERE))
        with pytest.raises(nx.DeviceFaultError) as caught:
            runtime.synchronize()
    assert len(caught.value.suspects) == 64
    assert caught.value.suspects[-1].startswith("fault ")


def test_after_a_fault_every_call_repeats_the_first_error_and_returns_no_data(faulted: nx.CudaRuntime) -> None:
    driver = faulted._driver
    with pytest.raises(nx.DeviceFaultError) as first:
        faulted.synchronize()
    before = driver.calls_total
    for attempt in (
        faulted.synchronize,
        lambda: faulted.zeros((4,), nx.float32),
        lambda: faulted.from_array(np.ones(4)),
        lambda: faulted.alloc_raw(4),
        faulted.check_capture_error,
        lambda: ADD_ONE.load(faulted),
        faulted.begin_graph_capture,
        faulted.drain_for_unmap,
    ):
        with pytest.raises(nx.DeviceFaultError) as again:
            attempt()
        assert str(again.value) == str(first.value)
        assert again.value.suspects == first.value.suspects
    assert driver.calls_total == before


def test_data_of_a_faulted_context_is_not_returned(faulted: nx.CudaRuntime) -> None:
    with pytest.raises(nx.DeviceFaultError):
        faulted.check_capture_error()
    target = np.full(1, 7, np.uint32)
    with pytest.raises(nx.DeviceFaultError):
        faulted.dtoh(target, faulted.capture_error_ptr)
    assert target[0] == 7


@pytest.mark.parametrize("how", ["numpy", "pending", "launch", "replay", "alloc", "event"])
def test_whichever_call_meets_the_fault_first_poisons_the_runtime(how: str) -> None:
    """A launch and a replay, too, which take a shorter way to the driver than the rest."""
    with nx.open_runtime("host", host_entries=HOST_ENTRIES) as runtime:
        x = runtime.zeros((4,), nx.float32)
        launch = ADD_ONE.prepare(runtime, 4, x, 4)
        with runtime.capture() as graph:
            runtime.launch(launch)
        runtime.launch(FAULT.prepare(runtime, 1, NOWHERE))
        pending, event = runtime.read_async(x), runtime.record_event()
        if how in ("launch", "replay", "alloc"):
            # The device has run the work by now, and nobody has asked.
            with pytest.raises(nx.DeviceFaultError):
                runtime._driver.stream_synchronize(runtime.stream)
        attempts: dict[str, Callable[[], Any]] = {
            "numpy": x.numpy,
            "pending": pending.numpy,
            "launch": lambda: runtime.launch(launch),
            "replay": graph.replay,
            "alloc": lambda: runtime.alloc_raw(4),
            "event": lambda: event.elapsed_time(event),
        }
        stats = runtime.stats()
        with pytest.raises(nx.DeviceFaultError, match="restart the process") as first:
            attempts[how]()
        assert any(suspect.startswith("fault ") for suspect in first.value.suspects)
        assert runtime.stats() == stats
        with pytest.raises(nx.DeviceFaultError) as again:
            runtime.synchronize()
        assert str(again.value) == str(first.value)


def test_a_fault_inside_a_replay_names_the_replay() -> None:
    with nx.open_runtime("host", host_entries=HOST_ENTRIES) as runtime:
        launch = FAULT.prepare(runtime, 1, NOWHERE)
        with runtime.capture(name="decoder") as graph:
            runtime.launch(launch)
        graph.replay()
        with pytest.raises(nx.DeviceFaultError) as caught:
            runtime.synchronize()
    assert caught.value.suspects == ("replay of decoder",)


def test_eager_sync_makes_the_launch_itself_raise() -> None:
    runtime = nx.open_runtime("host", host_entries=HOST_ENTRIES, eager_sync=True)
    assert runtime.eager_sync
    x = runtime.zeros((4,), nx.float32)
    runtime.launch(ADD_ONE.prepare(runtime, 4, x, 4))
    with pytest.raises(nx.DeviceFaultError) as caught:
        runtime.launch(FAULT.prepare(runtime, 1, NOWHERE))
    assert caught.value.suspects == ("fault grid=(1, 1, 1) block=(128, 1, 1)",)
    runtime.close()


def test_what_eager_sync_waits_for_is_counted() -> None:
    with nx.open_runtime("host", host_entries=HOST_ENTRIES, eager_sync=True) as runtime:
        launch = ADD_ONE.prepare(runtime, 4, runtime.zeros((4,), nx.float32), 4)
        with runtime.capture() as graph:
            runtime.launch(launch)
        before = runtime.stats()
        runtime.launch(launch)
        graph.replay()
        assert runtime.stats().since(before).synchronizations == 2


def test_eager_sync_makes_the_replay_itself_raise() -> None:
    runtime = nx.open_runtime("host", host_entries=HOST_ENTRIES, eager_sync=True)
    latch, fault = LATCH.prepare(runtime, 1, runtime.capture_error_ptr, 1), FAULT.prepare(runtime, 1, NOWHERE)
    with runtime.capture(name="first") as good:
        runtime.launch(latch)
    with runtime.capture(name="second") as bad:
        runtime.launch(fault)
    good.replay()
    with pytest.raises(nx.DeviceFaultError) as caught:
        bad.replay()
    assert caught.value.suspects == ("replay of second",)
    runtime.close()


def test_a_fault_met_while_ending_a_capture_is_the_error() -> None:
    """Not a GraphError: the process has to be restarted, and the type says so."""
    with nx.open_runtime("host", host_entries=HOST_ENTRIES) as runtime:
        launch = LATCH.prepare(runtime, 1, runtime.capture_error_ptr, 1)
        runtime.begin_graph_capture()
        runtime.launch(launch)
        runtime._driver.fail_call(error="CUDA_ERROR_ILLEGAL_ADDRESS", call="stream_end_capture")
        with pytest.raises(nx.DeviceFaultError, match="restart the process"):
            runtime.end_graph_capture()
        assert not runtime.is_capturing()
        with pytest.raises(nx.DeviceFaultError):
            runtime.synchronize()


def test_closing_after_a_fault_is_quiet(faulted: nx.CudaRuntime) -> None:
    with pytest.raises(nx.DeviceFaultError):
        faulted.synchronize()
    faulted.close()
    assert faulted.is_closed


def test_a_fault_that_closing_meets_is_raised_and_the_second_close_is_quiet(faulted: nx.CudaRuntime) -> None:
    with pytest.raises(nx.DeviceFaultError, match="fault grid"):
        faulted.close()
    faulted.close()
    assert faulted.is_closed


def test_a_fault_is_logged_once(faulted: nx.CudaRuntime, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "nxrt_cuda"):
        for _ in range(3):
            with pytest.raises(nx.DeviceFaultError):
                faulted.synchronize()
    assert len(caplog.records) == 1


def test_an_error_that_is_no_fault_leaves_the_runtime_usable(rt: nx.CudaRuntime) -> None:
    launch = LATCH.prepare(rt, 1, rt.capture_error_ptr, 1)
    rt._driver.fail_call(error="CUDA_ERROR_INVALID_VALUE", call="launch_kernel")
    with pytest.raises(nx.DriverError, match=r"cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
        rt.launch(launch)
    assert rt.check_capture_error() is nx.CaptureErrorCode.NONE


# Waiting.


def test_other_threads_go_on_while_one_waits(rt: nx.CudaRuntime) -> None:
    """Neither the runtime's lock nor the interpreter's is held while the device is waited for."""
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    rt.launch(SLOW.prepare(rt, 1, 300))
    with Background(rt.synchronize) as waiting:
        launched = 0
        while not waiting.done.wait(0.005):
            rt.launch(launch)
            launched += 1
    assert launched > 5
    np.testing.assert_array_equal(x.numpy(), np.full(4, launched))


@pytest.mark.parametrize("how", ["synchronize", "check_capture_error", "trim_pool", "close"])
def test_a_heartbeat_goes_on_while_the_runtime_waits(how: str) -> None:
    """The kernel that is waited for lasts until another thread has counted to twenty meanwhile."""
    beats, stop = threading.Semaphore(0), threading.Event()
    counted: list[bool] = []

    def entry(launch: HostLaunch) -> None:
        while beats.acquire(blocking=False):
            pass
        counted.append(all(beats.acquire(timeout=10) for _ in range(20)))

    def beat() -> None:
        while not stop.wait(0.001):
            beats.release()

    runtime = nx.open_runtime("host", host_entries={**HOST_ENTRIES, "slow": entry})
    runtime.launch(SLOW.prepare(runtime, 1, 0))
    runtime.from_array(np.zeros(1000)).free()
    with Background(beat):
        try:
            getattr(runtime, how)()
        finally:
            stop.set()
    runtime.close()
    assert counted == [True]


# A context that is gone.


def test_a_thread_that_still_has_an_earlier_context_works_on_the_present_one() -> None:
    """The context of an earlier runtime is released; that the driver says so is no fault of this one's."""
    driver = HostDriver(HOST_ENTRIES)
    with ThreadPoolExecutor(1) as worker:
        with open_on(driver) as first:
            worker.submit(first.synchronize).result()
        with open_on(driver) as second:
            x = second.zeros((4,), nx.float32)
            launch = ADD_ONE.prepare(second, 4, x, 4)
            worker.submit(second.launch, launch).result()
            np.testing.assert_array_equal(x.numpy(), np.ones(4))


def test_a_context_that_is_destroyed_while_it_is_current_is_lost(rt: nx.CudaRuntime) -> None:
    launch = ADD_ONE.prepare(rt, 4, rt.zeros((4,), nx.float32), 4)
    with (
        rt._driver.fail_call(error="CUDA_ERROR_CONTEXT_IS_DESTROYED", call="event_record"),
        pytest.raises(nx.DeviceFaultError, match=r"CONTEXT_IS_DESTROYED .* restart the process"),
    ):
        rt.synchronize()
    with pytest.raises(nx.DeviceFaultError, match="CONTEXT_IS_DESTROYED"):
        rt.launch(launch)


def test_a_lost_context_is_let_go_by_its_last_runtime() -> None:
    """The driver is not asked to take it back, and nothing of it is kept for the life of the process."""
    driver = HostDriver(HOST_ENTRIES)
    alive = weakref.ref(driver)
    runtimes = [open_on(driver), open_on(driver)]
    runtimes[0].launch(FAULT.prepare(runtimes[0], 1, 16))
    for runtime in runtimes:
        with pytest.raises(nx.DeviceFaultError):
            runtime.synchronize()
        runtime.close()
    assert driver.calls["primary_ctx_release"] == 0
    del driver, runtimes, runtime
    gc.collect()
    assert alive() is None


# Arguments of the wrong kind.


def test_the_per_thread_default_stream_is_refused() -> None:
    """It is another stream on each thread."""
    driver = HostDriver(HOST_ENTRIES)
    with pytest.raises(nx.RuntimeStateError, match="stream handle 2 is CUDA's per-thread default stream"):
        open_on(driver, stream=2)
    assert not driver.live()


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        (0, {}, "device must be 'cuda', 'cuda:<ordinal>' or 'host', got 0"),
        ("host", {"pool_limit": -5}, "pool_limit must be a whole number of bytes >= 0, got -5"),
        ("host", {"pool_limit": 1.5}, "pool_limit must be a whole number of bytes >= 0, got 1.5"),
    ],
)
def test_a_runtime_is_not_opened_with_options_of_the_wrong_kind(
    device: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(nx.RuntimeStateError) as caught:
        nx.open_runtime(device, **options)
    assert str(caught.value) == message


def test_a_tensor_is_not_copied_or_shared_by_from_array(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    with pytest.raises(nx.TensorError, match=r"from_array of TensorMut\(.+\), which is a tensor already; copy it with"):
        rt.from_array(x)


def test_a_slot_may_be_named_by_its_value_and_others_do_not_exist(rt: nx.CudaRuntime) -> None:
    slots: list[Any] = ["primary", "third"]
    with pytest.raises(nx.GraphError, match="no executable is installed in the primary slot"):
        rt.replay_graph(slots[0])
    for attempt in (rt.replay_graph, rt.reset_graph, rt.has_graph_executable, lambda s: rt.begin_graph_capture([], s)):
        with pytest.raises(nx.GraphError, match=r"there is no graph slot 'third'; there are 'primary', 'verify'$"):
            attempt(slots[1])


def test_a_capture_takes_a_list_of_kernels(rt: nx.CudaRuntime) -> None:
    kernel: Any = nx.create_kernel(rt, nx.Node("Attention"))
    for given in (kernel, [kernel, rt.zeros((3,), nx.float32)]):
        with pytest.raises(nx.CaptureError, match="a capture takes a list of kernels, got "), rt.capture(given):
            pytest.fail("the body must not run")
    assert not rt.is_capturing()
