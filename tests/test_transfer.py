"""Copies: staged uploads, reads that wait, the transfer stream and its fences, and what is refused."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda import transfer
from nxrt_cuda.driver.host import HostDriver
from tests.small_kernels import ADD_ONE, HOST_ENTRIES, SCALE, SLOW, Background, on_thread, open_on

MIB = 1 << 20


# Uploads are staged. The host driver reads a copy's source when the copy runs, so a source that was
# handed to the driver as it is would show its later bytes.


@pytest.mark.parametrize("how", ["from_array", "copy_from", "write async", "htod", "htod_async"])
def test_the_source_may_change_as_soon_as_the_call_returns(rt: nx.CudaRuntime, how: str) -> None:
    source = np.arange(1000, dtype=np.float32)
    expected = source.copy()
    x = rt.zeros((1000,), nx.float32)
    if how == "from_array":
        x = rt.from_array(source)
    elif how == "copy_from":
        x.copy_from(source)
    elif how == "write async":
        rt.write(x, source, asynchronous=True)
    elif how == "htod":
        rt.htod(source, x.ptr)
    else:
        rt.htod_async(source, x.ptr)
    source[:] = -1
    np.testing.assert_array_equal(x.numpy(), expected)


def test_a_temporary_source_may_be_collected_as_soon_as_the_call_returns(rt: nx.CudaRuntime) -> None:
    tensors = [rt.from_array(np.full(4096, value, np.float32)) for value in range(50)]
    gc.collect()
    noise = [np.full(4096, np.nan, np.float32) for _ in range(50)]
    for value, tensor in enumerate(tensors):
        np.testing.assert_array_equal(tensor.numpy(), np.full(4096, value))
    assert len(noise) == 50


def test_staging_is_not_reused_while_a_copy_still_reads_it(rt: nx.CudaRuntime) -> None:
    """Two uploads of one size are both queued before either runs."""
    first, second = rt.zeros((64,), nx.float32), rt.zeros((64,), nx.float32)
    for stream_order in (False, True):
        rt.write(first, np.full(64, 1, np.float32), asynchronous=stream_order)
        rt.write(second, np.full(64, 2, np.float32), asynchronous=not stream_order)
        np.testing.assert_array_equal(first.numpy(), np.full(64, 1))
        np.testing.assert_array_equal(second.numpy(), np.full(64, 2))


def test_staging_is_reused_once_its_copy_is_done(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((1000,), nx.float32)
    for value in range(20):
        x.copy_from(np.full(1000, value, np.float32))
        rt.synchronize()
    assert rt._driver.live().pinned <= 2


def test_uploads_larger_than_a_staging_buffer_go_in_pieces(rt: nx.CudaRuntime) -> None:
    source = np.arange(5 * MIB, dtype=np.uint32)
    before = rt.stats()
    tensor = rt.from_array(source)
    done = rt.stats().since(before)
    assert (done.htod_copies, done.htod_bytes) == (1, 20 * MIB)
    np.testing.assert_array_equal(tensor.numpy(), source)
    assert rt._driver.live().pinned_bytes <= 24 * MIB


def test_no_more_than_a_bound_is_in_flight(rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past it an upload waits for the oldest copy, and for no more than that one."""
    monkeypatch.setattr(transfer, "_IN_FLIGHT_LIMIT", 4 * 4096)
    monkeypatch.setattr(rt._driver, "event_query", lambda event: False)  # a device that is always busy
    x = rt.zeros((1024,), nx.float32)
    for value in range(12):
        x.copy_from(np.full(1024, value, np.float32))
        assert len(rt._transfers.staging.in_flight) == min(value + 1, 4)
    assert rt._driver.calls["event_synchronize"] == 8
    assert rt._driver.live().pinned == 4
    np.testing.assert_array_equal(x.numpy(), np.full(1024, 11))


def test_a_large_read_locks_little_more_than_its_bytes_and_trimming_gives_them_back(rt: nx.CudaRuntime) -> None:
    """What is under way keeps its buffer."""
    x = rt.from_array(np.arange(10 * MIB, dtype=np.uint8))
    rt.synchronize()
    rt.trim_pool()
    assert rt._driver.live().pinned == 0
    done, kept = rt.read_async(x), rt.read_async(x.narrow(0, 0, 5000))
    assert 10 * MIB <= rt._driver.live().pinned_bytes <= 16 * MIB + 8192
    np.testing.assert_array_equal(done.numpy(), np.arange(10 * MIB, dtype=np.uint8))
    rt.trim_pool()
    assert rt._driver.live().pinned_bytes == 8192
    np.testing.assert_array_equal(kept.numpy(), np.arange(5000, dtype=np.uint8))
    del kept
    rt.trim_pool()
    assert rt._driver.live().pinned == 0


def test_a_refused_upload_gives_its_staging_back(rt: nx.CudaRuntime) -> None:
    ptr = rt.alloc_raw(16)
    for _ in range(20):
        with pytest.raises(nx.DriverError):
            rt.htod(np.zeros(10000, np.uint8), ptr)
        with pytest.raises(nx.DriverError):
            rt.dtoh_async(ptr, 10000)
    assert rt._driver.live().pinned <= 2


# Reads.


def test_a_read_sees_everything_queued_before_it_on_both_streams(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    rt.write(x, np.full(4, 5, np.float32), asynchronous=True)
    rt.launch(ADD_ONE.prepare(rt, 4, x, 4))
    np.testing.assert_array_equal(x.numpy(), np.full(4, 6))


def test_dtoh_fills_the_caller_s_array(rt: nx.CudaRuntime) -> None:
    x = rt.from_array(np.arange(6, dtype=np.int32))
    target = np.zeros((2, 3), np.int32)
    rt.dtoh(target, x.ptr)
    np.testing.assert_array_equal(target, [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("target", [np.zeros((4, 4))[:, ::2], np.broadcast_to(np.zeros(2), (2, 2)), [0.0, 0.0]])
def test_a_target_that_cannot_be_filled_is_refused(rt: nx.CudaRuntime, target: Any) -> None:
    with pytest.raises(nx.TensorError, match="dtoh needs a C-contiguous, writable array"):
        rt.dtoh(target, rt.alloc_raw(512))


def test_a_pending_read_has_the_values_of_its_place_in_the_stream(rt: nx.CudaRuntime) -> None:
    """Whatever is queued after it, on the memory that it reads, does not reach it."""
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    pending = []
    for _ in range(4):
        pending.append(rt.read_async(x))
        rt.launch(launch)
    x.copy_from(np.full(4, -1, np.float32))
    for value, read in reversed(list(enumerate(pending))):
        np.testing.assert_array_equal(read.numpy(), np.full(4, value))
        assert read.numpy() is read.numpy()


def test_a_pending_read_may_be_finished_by_several_threads(rt: nx.CudaRuntime) -> None:
    """Its staging buffer goes back once: two later copies do not get the same one."""
    x = rt.from_array(np.arange(64, dtype=np.float32))
    rt.launch(SLOW.prepare(rt, 1, 30))
    pending = rt.read_async(x)
    with Background(pending.numpy) as first, Background(pending.numpy) as second:
        pass
    assert first.result is second.result
    np.testing.assert_array_equal(first.result, np.arange(64))
    one, two = rt.read_async(x), rt.read_async(rt.zeros((64,), nx.float32))
    np.testing.assert_array_equal(two.numpy(), np.zeros(64))
    np.testing.assert_array_equal(one.numpy(), np.arange(64))


def test_a_pending_read_that_is_dropped_gives_its_buffer_back_when_the_copy_is_done(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((1000,), nx.float32)
    for _ in range(20):
        rt.read_async(x)
        rt.synchronize()
    assert rt._driver.live().pinned <= 2


def test_a_pending_read_outlives_its_tensor(rt: nx.CudaRuntime) -> None:
    x = rt.from_array(np.arange(4, dtype=np.float32))
    pending = rt.read_async(x)
    x.free()
    rt.from_array(np.full(4, -1, np.float32))
    np.testing.assert_array_equal(pending.numpy(), np.arange(4))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_small_shapes_are_read_asynchronously_too(rt: nx.CudaRuntime, shape: tuple[int, ...]) -> None:
    assert rt.read_async(rt.zeros(shape, nx.float32)).numpy().shape == shape


def test_raw_bytes_are_read_asynchronously(rt: nx.CudaRuntime) -> None:
    x = rt.from_array(np.arange(4, dtype=np.uint8))
    np.testing.assert_array_equal(rt.dtoh_async(x.ptr + 1, 2).numpy(), [1, 2])
    with pytest.raises(nx.TensorError, match="negative extent"):
        rt.dtoh_async(x.ptr, -1)


def test_a_read_that_fails_after_it_was_queued_does_not_write_into_recycled_memory() -> None:
    """The array that the copy still fills is kept until the work is done."""
    driver = HostDriver(HOST_ENTRIES)
    with open_on(driver) as runtime:
        x = runtime.from_array(np.full(5000, 7, np.float32))
        for _ in range(5):
            with driver.fail_call(call="event_record"), pytest.raises(nx.OutOfMemoryError):
                x.numpy()
        gc.collect()
        bystanders = [np.zeros(5000, np.float32) for _ in range(20)]
        runtime.synchronize()
        assert not any(array.any() for array in bystanders)
        np.testing.assert_array_equal(x.numpy(), np.full(5000, 7))
    assert not driver.live()


def test_a_read_that_fails_counts_for_nothing(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    before = rt.stats()
    with rt._driver.fail_call(call="event_synchronize"), pytest.raises(nx.OutOfMemoryError):
        x.numpy()
    assert rt.stats() == before


# Fences.


def test_asynchronous_uploads_stand_between_the_work_before_and_after(rt: nx.CudaRuntime) -> None:
    """The kernel before reads the old bytes, the kernel after the new ones."""
    x = rt.from_array(np.full(4, 1, np.float32))
    before, after = rt.zeros((4,), nx.float32), rt.zeros((4,), nx.float32)
    rt.launch(SCALE.prepare(rt, 4, before, x, 10.0, 4))
    rt.write(x, np.full(4, 2, np.float32), asynchronous=True)
    rt.launch(SCALE.prepare(rt, 4, after, x, 10.0, 4))
    np.testing.assert_array_equal(after.numpy(), np.full(4, 20))
    np.testing.assert_array_equal(before.numpy(), np.full(4, 10))


def test_asynchronous_copies_run_beside_the_compute_stream(rt: nx.CudaRuntime) -> None:
    recorded: list[int] = []
    driver = rt._driver
    original = driver.memcpy_htod_async

    def spy(dst: int, src: int, nbytes: int, stream: int) -> None:
        recorded.append(stream)
        original(dst, src, nbytes, stream)

    driver.memcpy_htod_async = spy
    x = rt.zeros((4,), nx.float32)
    x.copy_from(np.ones(4))
    rt.write(x, np.ones(4), asynchronous=True)
    assert recorded == [rt.stream, rt._streams.transfer]


def test_draining_waits_for_both_streams(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    rt.read_async(x)
    rt.drain_for_unmap()
    driver = rt._driver
    with rt._session.driving("query"):
        assert driver.stream_query(rt.stream)
        assert driver.stream_query(rt._streams.transfer)


def test_draining_waits_for_the_transfer_stream_by_itself(rt: nx.CudaRuntime) -> None:
    """Also for work that no fence ties to the compute stream, as where a fence has failed."""
    x = rt.zeros((4,), nx.float32)
    rt.synchronize()
    with rt._session.driving("test") as driver:
        driver.memset_d8_async(x.ptr, 1, 16, rt._streams.transfer)
    rt.drain_for_unmap()
    with rt._session.driving("test") as driver:
        assert driver.stream_query(rt._streams.transfer)


def test_events_are_recycled(rt: nx.CudaRuntime) -> None:
    """A thousand waits do not make a thousand events."""
    x = rt.zeros((4,), nx.float32)
    for _ in range(300):
        rt.write(x, np.ones(4), asynchronous=True)
        x.numpy()
    assert rt._driver.live().events < 20


# Between device tensors.


def test_copy_and_fill_are_ordered_with_launches(rt: nx.CudaRuntime) -> None:
    x, y = rt.from_array(np.arange(4, dtype=np.float32)), rt.empty((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    rt.launch(launch)
    rt.copy(y, x)
    rt.launch(launch)
    rt.fill_zero(x)
    np.testing.assert_array_equal(y.numpy(), np.arange(4) + 1)
    np.testing.assert_array_equal(x.numpy(), np.zeros(4))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [((5,), nx.float32, r"copy of Float32 \(4,\) into Float32 \(5,\)"), ((4,), nx.int32, r"into Int32 \(4,\)")],
)
def test_a_copy_between_unlike_tensors_is_refused(
    rt: nx.CudaRuntime, shape: tuple[int, ...], dtype: Any, message: str
) -> None:
    with pytest.raises(nx.TensorError, match=message):
        rt.copy(rt.zeros(shape, dtype), rt.zeros((4,), nx.float32))


def test_zero_bytes_reach_no_driver_and_are_counted(rt: nx.CudaRuntime) -> None:
    x, y = rt.empty((0,), nx.float32), rt.empty((0,), nx.float32)
    calls = rt._driver.calls
    before = calls["memcpy_dtod_async"] + calls["memcpy_htod_async"] + calls["memset_d8_async"]
    counted = rt.stats()
    rt.copy(x, y)
    rt.fill_zero(x)
    x.copy_from(np.empty(0, np.float32))
    assert x.numpy().size == 0
    assert calls["memcpy_dtod_async"] + calls["memcpy_htod_async"] + calls["memset_d8_async"] == before
    done = rt.stats().since(counted)
    assert (done.dtod_copies, done.memsets, done.htod_copies, done.dtoh_copies) == (1, 1, 1, 1)


def test_copies_work_from_any_thread(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    on_thread(x.copy_from, np.full(4, 3, np.float32))
    np.testing.assert_array_equal(on_thread(x.numpy), np.full(4, 3))


def test_a_pending_read_may_be_dropped_on_another_thread_at_any_moment(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while an upload counts what is in flight."""
    pending = [rt.read_async(rt.zeros((4,), nx.float32)) for _ in range(2)]
    size = type("Size", (), {"size": property(lambda _: (on_thread(pending.clear), 4096)[1])})()
    staging = rt._transfers.staging
    staging.in_flight.append((rt._streams.record(rt.stream), transfer._Pinned(0, size)))
    staging.in_flight.append((rt._streams.record(rt.stream), transfer._Pinned(0, size)))
    monkeypatch.setattr(staging, "_collect", lambda waiting: None)
    rt.zeros((4,), nx.float32).copy_from(np.ones(4))
    assert len(staging.dropped) == 2
    staging.in_flight.clear()


@pytest.mark.parametrize("nbytes", [1, transfer._CHUNK, transfer._CHUNK + 1])
def test_what_is_read_goes_through_pinned_memory(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """A copy to other memory would be waited for within the driver's call, with every other thread kept out."""
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    x = rt.from_array(source)
    copy, targets = rt._driver.memcpy_dtoh_async, []

    def spy(dst: int, src: int, size: int, stream: int) -> None:
        targets.append((dst, size))
        copy(dst, src, size, stream)

    monkeypatch.setattr(rt._driver, "memcpy_dtoh_async", spy)
    np.testing.assert_array_equal(x.numpy(), source)
    target = np.zeros(nbytes, np.uint8)
    rt.dtoh(target, x.ptr)
    np.testing.assert_array_equal(target, source)
    pinned = [(buffer.address, buffer.bytes.size) for buffer in rt._transfers.staging._buffers]
    for dst, size in targets:
        assert any(start <= dst and dst + size <= start + length for start, length in pinned)


def test_a_read_larger_than_all_staging_is_made_in_stretches(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts once, and needs no more page-locked memory than one stretch."""
    monkeypatch.setattr(transfer, "_CHUNK", 4096)
    monkeypatch.setattr(transfer, "_IN_FLIGHT_LIMIT", 4 * 4096)
    source = np.arange(10_001, dtype=np.uint32)
    x = rt.from_array(source)
    rt.synchronize()
    before, pinned = rt.stats(), rt._driver.live().pinned_bytes
    np.testing.assert_array_equal(x.numpy(), source)
    done = rt.stats().since(before)
    assert (done.dtoh_copies, done.dtoh_bytes) == (1, source.nbytes)
    assert rt._driver.live().pinned_bytes <= max(pinned, 4 * 4096)


def test_a_refused_read_gives_its_staging_back(rt: nx.CudaRuntime) -> None:
    ptr = rt.alloc_raw(16)
    for _ in range(20):
        with pytest.raises(nx.DriverError):
            rt.dtoh(np.zeros(10000, np.uint8), ptr)
    assert rt._driver.live().pinned <= 1


def test_asynchronous_copies_on_the_device_stand_between_the_work_before_and_after(rt: nx.CudaRuntime) -> None:
    x, y = rt.zeros((4,), nx.float32), rt.empty((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    rt.launch(SLOW.prepare(rt, 1, 20))
    rt.launch(launch)
    before = rt.stats()
    rt.dtod_async(y.ptr, x.ptr, 16)
    rt.launch(launch)
    done = rt.stats().since(before)
    assert (done.dtod_copies, done.dtod_bytes, done.async_copies) == (1, 16, 1)
    np.testing.assert_array_equal(y.numpy(), np.ones(4))
    np.testing.assert_array_equal(x.numpy(), np.full(4, 2))


def test_an_asynchronous_copy_on_the_device_is_refused_in_a_capture(rt: nx.CudaRuntime) -> None:
    x, y = rt.zeros((4,), nx.float32), rt.zeros((4,), nx.float32)
    with rt.capture() as graph:
        with pytest.raises(nx.CaptureError, match="dtod_async is illegal"):
            rt.dtod_async(y.ptr, x.ptr, 16)
        rt.copy(y, x)
    assert graph.node_count == 1


@pytest.mark.parametrize("how", ["dtod", "dtod_async"])
def test_ranges_that_overlap_and_negative_sizes_are_refused_before_the_driver(rt: nx.CudaRuntime, how: str) -> None:
    """The driver leaves the outcome of such a copy undefined."""
    ptr = rt.alloc_raw(64)
    copy = getattr(rt, how)
    before = rt._driver.calls_total
    for dst, src in ((ptr, ptr), (ptr, ptr + 15), (ptr + 15, ptr)):
        with pytest.raises(nx.DeviceMemoryError, match=f"^{how} of 16 bytes from 0x{src:x} to 0x{dst:x}, which over"):
            copy(dst, src, 16)
    with pytest.raises(nx.DeviceMemoryError, match=f"^{how} of -4 bytes: a size is at least 0"):
        copy(ptr, ptr + 32, -4)
    assert rt._driver.calls_total == before
    copy(ptr + 16, ptr, 16)
    copy(ptr, ptr, 0)


def test_tensors_that_overlap_cannot_be_copied_into_each_other(rt: nx.CudaRuntime) -> None:
    x = rt.from_array(np.arange(8, dtype=np.float32))
    low, high = x.narrow(0, 0, 5), x.narrow(0, 3, 5)
    for target, source in ((low, high), (high, low), (x, x)):
        with pytest.raises(nx.TensorError, match="which overlap"):
            rt.copy(target, source)
    rt.copy(x.narrow(0, 0, 4), x.narrow(0, 4, 4))
    np.testing.assert_array_equal(x.numpy(), [4, 5, 6, 7, 4, 5, 6, 7])


def test_an_input_view_is_not_written_to(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    view: Any = nx.TensorView(x.ptr, x.metadata, x.owner)
    for name, attempt in (
        ("copy_from", lambda: rt.write(view, np.ones(4))),
        ("copy", lambda: rt.copy(view, rt.zeros((4,), nx.float32))),
        ("fill_zero", lambda: rt.fill_zero(view)),
    ):
        with pytest.raises(nx.TensorError, match=rf"^{name} into TensorView\(.+\), which is read-only"):
            attempt()
    np.testing.assert_array_equal(x.numpy(), np.zeros(4))


def test_python_objects_have_no_bytes_to_copy(rt: nx.CudaRuntime) -> None:
    ptr = rt.alloc_raw(64)
    objects = np.array([object()])
    for name, attempt in (
        ("htod", lambda: rt.htod(objects, ptr)),
        ("htod_async", lambda: rt.htod_async(objects, ptr)),
        ("dtoh", lambda: rt.dtoh(objects, ptr)),
    ):
        with pytest.raises(nx.TensorError, match=f"^{name} of an array of dtype object, which holds Python objects"):
            attempt()


def test_what_is_no_tensor_cannot_be_read_or_written(rt: nx.CudaRuntime) -> None:
    nothing: Any = None
    array: Any = np.zeros(4)
    for attempt in (lambda: rt.read(nothing), lambda: rt.read_async(array), lambda: rt.fill_zero(array)):
        with pytest.raises(nx.TensorError, match=r"^expected a tensor of this package, got (NoneType|ndarray)$"):
            attempt()
