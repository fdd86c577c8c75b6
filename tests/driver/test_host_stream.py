"""The host driver's streams and events: lazy, in order, and blind to what no fence orders."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from nxrt_cuda import dtype as dt
from nxrt_cuda.driver.host import HostLaunch
from nxrt_cuda.driver.host_stream import QUEUE_BOUND
from tests.driver.host_rig import AXPY, Rig, image, in_thread, refused


def test_nothing_runs_before_the_host_waits(rig: Rig) -> None:
    ptr = rig.upload(np.arange(4, dtype=np.float32))
    out = np.full(4, -1.0, np.float32)
    rig.driver.memcpy_dtoh_async(out.ctypes.data, ptr, 16, rig.stream)
    assert (out == -1.0).all()
    rig.driver.stream_synchronize(rig.stream)
    np.testing.assert_array_equal(out, np.arange(4))


def test_a_recycled_host_source_shows_in_the_copy(rig: Rig) -> None:
    """The source is read when the copy runs; a temporary that is overwritten before that is what arrives."""
    ptr = rig.driver.mem_alloc(16)
    temporary = np.ones(4, np.float32)
    rig.driver.memcpy_htod_async(ptr, temporary.ctypes.data, 16, rig.stream)
    temporary[:] = 7
    assert (rig.download(ptr, np.float32, 4) == 7).all()


def test_a_missing_fence_shows_as_stale_data(rig: Rig) -> None:
    """A second stream that does not wait for the first one's write reads what was there before."""
    ptr = rig.driver.mem_alloc(16)
    other = rig.driver.stream_create()
    rig.driver.memset_d8_async(ptr, 0, 16, rig.stream)
    assert np.isnan(rig.download(ptr, np.float32, 4, stream=other)).all()


def test_a_fence_orders_two_streams(rig: Rig) -> None:
    ptr = rig.driver.mem_alloc(16)
    other, event = rig.driver.stream_create(), rig.driver.event_create(timing=False)
    rig.driver.memset_d8_async(ptr, 0, 16, rig.stream)
    rig.driver.event_record(event, rig.stream)
    rig.driver.stream_wait_event(other, event)
    assert (rig.download(ptr, np.float32, 4, stream=other) == 0).all()


def test_a_wait_runs_the_other_stream_only_up_to_the_record(rig: Rig) -> None:
    """What the other stream does after the record stays undone."""
    ptr = rig.driver.mem_alloc(16)
    other, event = rig.driver.stream_create(), rig.driver.event_create(timing=False)
    rig.driver.memset_d8_async(ptr, 1, 16, rig.stream)
    rig.driver.event_record(event, rig.stream)
    rig.driver.memset_d8_async(ptr, 2, 16, rig.stream)
    rig.driver.stream_wait_event(other, event)
    assert (rig.download(ptr, np.uint8, 16, stream=other) == 1).all()
    assert (rig.download(ptr, np.uint8, 16) == 2).all()


def test_a_wait_holds_for_the_record_that_was_the_latest_when_it_was_queued(rig: Rig) -> None:
    """A later record of the same event, or its destruction, does not change a wait already queued."""
    ptr = rig.driver.mem_alloc(16)
    other, event = rig.driver.stream_create(), rig.driver.event_create(timing=False)
    rig.driver.memset_d8_async(ptr, 1, 16, rig.stream)
    rig.driver.event_record(event, rig.stream)
    rig.driver.stream_wait_event(other, event)
    rig.driver.memset_d8_async(ptr, 2, 16, rig.stream)
    rig.driver.event_record(event, rig.stream)
    rig.driver.event_destroy(event)
    assert (rig.download(ptr, np.uint8, 16, stream=other) == 1).all()


def test_waits_back_and_forth_resolve(rig: Rig) -> None:
    """Two streams that wait for each other in turn, as a pipeline does, run in that order."""
    ptr = rig.driver.mem_alloc(1)
    streams = (rig.stream, rig.driver.stream_create())
    for step in range(100):
        mine, theirs = streams[step % 2], streams[1 - step % 2]
        event = rig.driver.event_create(timing=False)
        rig.driver.memset_d8_async(ptr, step, 1, mine)
        rig.driver.event_record(event, mine)
        rig.driver.stream_wait_event(theirs, event)
    assert rig.download(ptr, np.uint8, 1, stream=streams[0])[0] == 99


def test_an_event_that_was_never_recorded_holds_nobody(rig: Rig) -> None:
    event = rig.driver.event_create(timing=True)
    assert rig.driver.event_query(event)
    rig.driver.event_synchronize(event)
    rig.driver.stream_wait_event(rig.stream, event)
    rig.driver.stream_synchronize(rig.stream)


def test_queries_report_first_and_then_take_one_step(rig: Rig) -> None:
    """A query answers for what had run before it; polling gets to the end, one item at a time."""
    ptr, event = rig.driver.mem_alloc(16), rig.driver.event_create(timing=False)
    rig.driver.memset_d8_async(ptr, 0, 16, rig.stream)
    rig.driver.event_record(event, rig.stream)
    for _ in range(2):
        rig.driver.memset_d8_async(ptr, 0, 16, rig.stream)
    assert [rig.driver.event_query(event) for _ in range(3)] == [False, False, True]
    assert [rig.driver.stream_query(rig.stream) for _ in range(3)] == [False, False, True]


def test_event_synchronize_waits_for_the_record_alone(rig: Rig) -> None:
    ptr, event = rig.driver.mem_alloc(16), rig.driver.event_create(timing=False)
    rig.driver.event_record(event, rig.stream)
    rig.driver.memset_d8_async(ptr, 0, 16, rig.stream)
    rig.driver.event_synchronize(event)
    assert rig.driver.event_query(event)
    assert not rig.driver.stream_query(rig.stream)


def test_elapsed_time_is_of_the_run_and_not_of_the_queueing() -> None:
    """Both events are queued long before the slow kernel between them runs, and the time is no less than its own."""
    nap, ran = image("nap"), []

    def entry(launch: HostLaunch) -> None:
        began = time.perf_counter()
        time.sleep(0.02)
        ran.append(time.perf_counter() - began)

    rig = Rig({"nap": entry})
    start, end = rig.driver.event_create(timing=True), rig.driver.event_create(timing=True)
    rig.driver.event_record(start, rig.stream)
    rig.launch(rig.function(nap), nap)
    rig.driver.event_record(end, rig.stream)
    time.sleep(0.05)
    waited_from = time.perf_counter()
    rig.driver.event_synchronize(end)
    waited = time.perf_counter() - waited_from
    assert ran[0] <= rig.driver.event_elapsed_time(start, end) / 1000 <= waited


def test_elapsed_time_needs_two_completed_timing_events(rig: Rig) -> None:
    start, end = rig.driver.event_create(timing=True), rig.driver.event_create(timing=True)
    silent = rig.driver.event_create(timing=False)
    with refused("CUDA_ERROR_INVALID_HANDLE", f"event 0x{start:x} was never recorded"):
        rig.driver.event_elapsed_time(start, end)
    rig.driver.event_record(start, rig.stream)
    rig.driver.event_record(end, rig.stream)
    rig.driver.event_synchronize(start)
    with refused("CUDA_ERROR_NOT_READY", f"event 0x{end:x} has not completed"):
        rig.driver.event_elapsed_time(start, end)
    with refused("CUDA_ERROR_INVALID_HANDLE", "created without timing"):
        rig.driver.event_elapsed_time(start, silent)


def test_a_full_queue_runs_its_oldest_work(rig: Rig) -> None:
    """Past the bound each new item makes the oldest one run, and no more."""
    first, second = rig.driver.mem_alloc(1), rig.driver.mem_alloc(1)
    other = rig.driver.stream_create()
    rig.driver.memset_d8_async(first, 1, 1, rig.stream)
    rig.driver.memset_d8_async(second, 1, 1, rig.stream)
    for _ in range(QUEUE_BOUND - 2):
        rig.driver.memset_d8_async(rig.driver.mem_alloc(1), 0, 1, rig.stream)
    assert rig.download(first, np.uint8, 1, stream=other)[0] == 0xFF
    rig.driver.memset_d8_async(first, 1, 1, rig.stream)
    assert rig.download(first, np.uint8, 1, stream=other)[0] == 1
    assert rig.download(second, np.uint8, 1, stream=other)[0] == 0xFF


def test_destroying_a_stream_completes_its_work(rig: Rig) -> None:
    ptr, stream = rig.driver.mem_alloc(1), rig.driver.stream_create()
    rig.driver.memset_d8_async(ptr, 5, 1, stream)
    rig.driver.stream_destroy(stream)
    assert rig.download(ptr, np.uint8, 1)[0] == 5
    with refused("CUDA_ERROR_INVALID_HANDLE", f"0x{stream:x} is no live stream"):
        rig.driver.stream_synchronize(stream)


def test_a_handle_of_one_kind_is_none_of_another(rig: Rig) -> None:
    event = rig.driver.event_create(timing=False)
    with refused("CUDA_ERROR_INVALID_HANDLE", f"0x{event:x} is no live stream"):
        rig.driver.stream_synchronize(event)
    with refused("CUDA_ERROR_INVALID_HANDLE", f"0x{rig.stream:x} is no live event"):
        rig.driver.event_record(rig.stream, rig.stream)
    rig.driver.event_destroy(event)
    with refused("CUDA_ERROR_INVALID_HANDLE", f"0x{event:x} is no live event"):
        rig.driver.event_query(event)


def test_the_default_streams_are_served(rig: Rig) -> None:
    """0 and 1 are the one legacy stream; 2 is another, and each thread has its own."""
    ptr = rig.driver.mem_alloc(1)
    rig.driver.memset_d8_async(ptr, 4, 1, 0)
    assert rig.download(ptr, np.uint8, 1, stream=2)[0] == 0xFF
    assert rig.download(ptr, np.uint8, 1, stream=1)[0] == 4
    rig.driver.memset_d8_async(ptr, 5, 1, 2)

    def elsewhere() -> None:
        rig.driver.ctx_push_current(rig.context)
        assert rig.driver.stream_query(2)

    in_thread(elsewhere)
    assert not rig.driver.stream_query(2)


def test_other_threads_queue_while_a_kernel_runs() -> None:
    """A running kernel holds up waiting calls, and no others."""
    running, release = threading.Event(), threading.Event()
    hold = image("hold")

    def entry(launch: HostLaunch) -> None:
        running.set()
        assert release.wait(10)

    rig = Rig({"hold": entry})
    ptr = rig.upload(np.zeros(4, np.float32))
    rig.launch(rig.function(hold), hold)

    def drain() -> None:
        rig.driver.ctx_push_current(rig.context)
        rig.driver.stream_synchronize(rig.stream)

    thread = threading.Thread(target=drain)
    thread.start()
    assert running.wait(10)
    other = rig.driver.stream_create()
    rig.launch(rig.function(AXPY), AXPY, ptr, ptr, 4, 1.0, stream=other)
    assert thread.is_alive()
    release.set()
    thread.join()
    assert (rig.download(ptr, np.float32, 4, stream=other) == 0).all()


def test_threads_that_wait_at_once_run_everything_exactly_once() -> None:
    """Eight threads queue and drain one stream; each of the 400 launches has counted once."""
    count = image("count", ("cell", "ptr"))

    def entry(launch: HostLaunch) -> None:
        launch.view(launch.args["cell"], dt.int64, (1,))[:] += 1

    rig = Rig({"count": entry})
    cell, function = rig.upload(np.zeros(1, np.int64)), rig.function(count)

    def work() -> None:
        rig.driver.ctx_push_current(rig.context)
        for _ in range(50):
            rig.launch(function, count, cell)
            rig.driver.stream_synchronize(rig.stream)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rig.download(cell, np.int64, 1)[0] == 400


@pytest.mark.parametrize("run", range(3))
def test_runs_are_repeatable(run: int) -> None:
    """The same calls give the same stale bytes on every run."""
    rig = Rig()
    ptr, other = rig.driver.mem_alloc(4), rig.driver.stream_create()
    rig.driver.memset_d8_async(ptr, 1, 4, rig.stream)
    rig.driver.memset_d8_async(ptr, 2, 2, other)
    assert rig.download(ptr, np.uint8, 4, stream=other).tolist() == [2, 2, 0xFF, 0xFF]
    assert rig.download(ptr, np.uint8, 4).tolist() == [1, 1, 1, 1]
