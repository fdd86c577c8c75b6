"""Device memory: the pool and its bound, graph-stable addresses, deferred release, and what free refuses."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.driver.host import HostDriver
from nxrt_cuda.memory import pool_limit_from_environment, size_class
from tests.small_kernels import ADD_ONE, FAULT, HOST_ENTRIES, SLOW, Background, on_thread, open_on

MIB = 1 << 20


# The pool.


@pytest.mark.parametrize(
    ("nbytes", "block"),
    [
        (1, 512), (512, 512), (513, 1024), (1000, 1024), (MIB, MIB), (MIB + 1, 2 * MIB), (3 * MIB, 3 * MIB),
        (3 * MIB + 1, 4 * MIB),
    ],
)  # fmt: skip
def test_sizes_are_rounded_to_classes(nbytes: int, block: int) -> None:
    """Powers of two up to 1 MiB, whole MiB above: a block serves requests a little smaller, too."""
    assert size_class(nbytes) == block


def test_freed_memory_is_reused_without_the_driver(rt: nx.CudaRuntime) -> None:
    first = rt.empty((100,), nx.float32)
    address = first.ptr
    first.free()
    before = rt.stats()
    again = rt.empty((120,), nx.float32)
    done = rt.stats().since(before)
    assert again.ptr == address
    assert (done.pool_hits, done.driver_allocations, done.live_bytes) == (1, 0, 0)
    assert done.pool_retained_bytes == -512


def test_memory_that_is_dropped_is_reused_like_memory_that_is_freed(rt: nx.CudaRuntime) -> None:
    address = rt.empty((100,), nx.float32).ptr
    assert rt.empty((100,), nx.float32).ptr == address


def test_a_block_serves_its_own_size_class_only(rt: nx.CudaRuntime) -> None:
    rt.empty((1000,), nx.uint8).free()
    before = rt.stats()
    rt.empty((100,), nx.uint8)
    assert rt.stats().since(before).pool_hits == 0


def test_the_pool_keeps_no_more_than_its_bound() -> None:
    with nx.open_runtime("host", pool_limit=3 * 512) as runtime:
        tensors = [runtime.empty((512,), nx.uint8) for _ in range(5)]
        before = runtime.stats()
        for tensor in tensors:
            tensor.free()
        runtime.synchronize()
        runtime.trim_pool()
        assert runtime.stats().since(before).driver_frees == 5
        assert runtime.stats().pool_retained_bytes == 0

        tensors = [runtime.empty((512,), nx.uint8) for _ in range(5)]
        for tensor in tensors:
            tensor.free()
        assert runtime.stats().pool_retained_bytes == 3 * 512


def test_a_pool_of_zero_bytes_keeps_nothing() -> None:
    with nx.open_runtime("host", pool_limit=0) as runtime:
        runtime.empty((512,), nx.uint8).free()
        assert runtime.stats().pool_retained_bytes == 0
        before = runtime.stats()
        runtime.empty((512,), nx.uint8)
        done = runtime.stats().since(before)
        assert (done.pool_hits, done.driver_allocations) == (0, 1)


def test_the_environment_sets_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NXRT_CUDA_POOL_BYTES", raising=False)
    assert pool_limit_from_environment() == 256 * MIB
    monkeypatch.setenv("NXRT_CUDA_POOL_BYTES", "0")
    with nx.open_runtime("host") as runtime:
        runtime.empty((512,), nx.uint8).free()
        assert runtime.stats().pool_retained_bytes == 0
    with nx.open_runtime("host", pool_limit=512) as runtime:
        runtime.empty((512,), nx.uint8).free()
        assert runtime.stats().pool_retained_bytes == 512


def test_trimming_returns_free_memory_and_only_that(rt: nx.CudaRuntime) -> None:
    base = rt.stats().live_bytes
    kept, dropped = rt.empty((512,), nx.uint8), rt.empty((2 * MIB,), nx.uint8)
    dropped.free()
    assert rt.stats().pool_retained_bytes == 2 * MIB
    rt.trim_pool()
    assert rt.stats().pool_retained_bytes == 0
    assert rt.stats().live_bytes == base + 512
    kept.copy_from(np.full(512, 7, np.uint8))
    np.testing.assert_array_equal(kept.numpy(), np.full(512, 7))


def test_a_trim_that_fails_half_way_hands_nothing_out_twice() -> None:
    driver = HostDriver()
    with open_on(driver) as runtime:
        for tensor in [runtime.empty((512,), nx.uint8) for _ in range(4)]:
            tensor.free()
        with driver.fail_call(3, call="event_record"), pytest.raises(nx.OutOfMemoryError):
            runtime.trim_pool()
        live = [runtime.empty((512,), nx.uint8) for _ in range(8)]
        assert len({tensor.ptr for tensor in live}) == 8
        for value, tensor in enumerate(live):
            tensor.copy_from(np.full(512, value, np.uint8))
        for value, tensor in enumerate(live):
            np.testing.assert_array_equal(tensor.numpy(), np.full(512, value))
    assert not driver.live()


def test_memory_that_ran_out_comes_back_from_the_pool() -> None:
    """An allocation that fails is tried again after the pool, and what waits to be freed, went back."""
    driver = HostDriver(total_memory=8 * MIB)
    with open_on(driver) as runtime:
        for _ in range(3):
            tensors = [runtime.empty((MIB,), nx.uint8) for _ in range(6)]
            for tensor in tensors:
                tensor.free()
            assert runtime.stats().pool_retained_bytes == 6 * MIB
            runtime.empty((6 * MIB,), nx.uint8).free()
        assert runtime.stats().live_bytes <= 8 * MIB


def test_memory_that_is_not_there_is_refused_with_the_amounts() -> None:
    driver = HostDriver(total_memory=8 * MIB)
    with open_on(driver) as runtime:
        kept = runtime.zeros((4 * MIB,), nx.uint8)
        before = runtime.stats()
        with pytest.raises(nx.OutOfMemoryError) as caught:
            runtime.empty((5 * MIB,), nx.uint8)
        assert str(caught.value).startswith("cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory (")
        held = runtime.stats().live_bytes
        assert f"{5 * MIB} bytes asked for; {8 * MIB - held} of {8 * MIB} are free, this runtime holds {held}" in str(
            caught.value
        )
        assert runtime.stats() == before
        assert not kept.numpy().any()


@pytest.mark.parametrize("attempt", ["alloc_raw", "alloc_graph_stable"])
def test_a_negative_size_is_refused(rt: nx.CudaRuntime, attempt: str) -> None:
    with pytest.raises(nx.DeviceMemoryError, match=rf"^{attempt} of -1 bytes"):
        getattr(rt, attempt)(-1)


def test_empty_tensors_have_memory_of_their_own(rt: nx.CudaRuntime) -> None:
    first, second = rt.empty((0, 3), nx.float32), rt.empty((0,), nx.float32)
    assert first.ptr != second.ptr
    assert first.numpy().shape == (0, 3)
    first.free()
    first.free()


# Stream order.


def test_reused_memory_is_written_after_the_work_that_was_queued_on_it(rt: nx.CudaRuntime) -> None:
    """The new owner's upload waits for the old owner's kernel, which has not even run yet."""
    old = rt.zeros((4,), nx.float32)
    rt.launch(ADD_ONE.prepare(rt, 4, old, 4))
    address = old.ptr
    old.free()
    new = rt.from_array(np.full(4, 7, np.float32))
    assert new.ptr == address
    np.testing.assert_array_equal(new.numpy(), np.full(4, 7))


def test_memory_goes_back_to_the_driver_only_after_the_work_that_uses_it() -> None:
    """The host driver faults if memory is freed between queueing and running."""
    driver = HostDriver(HOST_ENTRIES)
    with open_on(driver, pool_limit=0) as runtime:
        x = runtime.zeros((4,), nx.float32)
        runtime.launch(ADD_ONE.prepare(runtime, 4, x, 4))
        x.free()
        assert driver.calls["mem_free_async"] == 0
        assert runtime.stats().deferred_bytes == 512
        runtime.synchronize()
        runtime.empty((1,), nx.uint8)
        assert driver.calls["mem_free_async"] == 1
        assert runtime.stats().deferred_bytes == 0


def test_a_driver_that_cannot_free_in_stream_order_frees_at_once() -> None:
    driver = HostDriver(HOST_ENTRIES, attributes={"MEMORY_POOLS_SUPPORTED": 0})
    with open_on(driver, pool_limit=0) as runtime:
        frees = driver.calls["mem_free"]
        runtime.empty((4,), nx.float32).free()
        runtime.synchronize()
        runtime.empty((1,), nx.uint8)
        assert (driver.calls["mem_free"], driver.calls["mem_free_async"]) == (frees + 1, 0)


def test_memory_is_back_after_trimming() -> None:
    """What was freed in stream order before, and on a GPU returns when the stream is next waited for, too."""
    driver = HostDriver(HOST_ENTRIES)
    with open_on(driver, pool_limit=0) as runtime:
        x, y = runtime.empty((4,), nx.float32), runtime.empty((4,), nx.float32)
        free = driver.mem_get_info()[0]
        x.free()
        runtime.synchronize()
        y.free()
        assert driver.calls["mem_free_async"] == 1
        runtime.trim_pool()
        assert driver.mem_get_info()[0] == free + 1024


def test_after_a_fault_memory_given_up_is_kept_and_counted_and_never_handed_out_again() -> None:
    driver = HostDriver(HOST_ENTRIES)
    runtime = open_on(driver, pool_limit=0)
    x, y = runtime.zeros((4,), nx.float32), runtime.zeros((4,), nx.float32)
    runtime.launch(FAULT.prepare(runtime, 1, 8))
    x.free()
    with pytest.raises(nx.DeviceFaultError):
        runtime.synchronize()
    before = runtime.stats()
    assert before.deferred_bytes == 512
    del y
    with pytest.raises(nx.DeviceFaultError):
        runtime.empty((4,), nx.float32)
    with pytest.raises(nx.DeviceFaultError):
        runtime.trim_pool()
    runtime.close()
    after = runtime.stats()
    assert (after.live_bytes, after.deferred_bytes) == (before.live_bytes, before.deferred_bytes)
    assert driver.live().device_bytes == after.live_bytes > 0


def test_freeing_does_not_wait_for_the_device() -> None:
    """Nor does it make the one call that waits in the driver: a plain free."""
    with nx.open_runtime("host", pool_limit=0, host_entries=HOST_ENTRIES) as runtime:
        x = runtime.zeros((4,), nx.float32)
        runtime.launch(SLOW.prepare(runtime, 1, 300))
        calls = runtime._driver.calls
        waits = calls.copy()
        x.free()
        runtime.empty((4,), nx.float32)
        for call in ("event_synchronize", "stream_synchronize", "mem_free"):
            assert calls[call] == waits[call]


def test_memory_with_an_upload_under_way_can_be_freed(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    rt.write(x, np.ones(4, np.float32), asynchronous=True)
    x.free()
    y = rt.zeros((4,), nx.float32)
    assert y.ptr == x.ptr
    np.testing.assert_array_equal(y.numpy(), np.zeros(4))


# Graph-stable memory.


def test_a_graph_stable_address_is_nobody_else_s_while_it_is_held(rt: nx.CudaRuntime) -> None:
    stable = rt.alloc_graph_stable(512)
    assert stable.ptr % 256 == 0
    others = [rt.empty((512,), nx.uint8) for _ in range(20)]
    for other in others:
        other.free()
    assert stable.ptr not in {other.ptr for other in others}
    rt.trim_pool()
    before = rt.stats()
    del stable
    rt.trim_pool()
    done = rt.stats().since(before)
    assert (done.driver_frees, done.live_bytes) == (1, -512)


def test_graph_stable_memory_bypasses_the_pool(rt: nx.CudaRuntime) -> None:
    rt.empty((512,), nx.uint8).free()
    before = rt.stats()
    rt.alloc_graph_stable(512).free()
    done = rt.stats().since(before)
    assert (done.pool_hits, done.pool_retained_bytes, done.driver_allocations) == (0, 0, 1)


# Freeing.


def test_freeing_twice_is_freeing_once(rt: nx.CudaRuntime) -> None:
    x = rt.empty((4,), nx.float32)
    x.free()
    before = rt.stats()
    x.free()
    x.reshape((2, 2)).free()
    assert rt.stats() == before


def test_freeing_from_two_threads_at_once_is_freeing_once(rt: nx.CudaRuntime) -> None:
    """Both have seen it alive and wait for the runtime; the second must not give the block back again."""
    for _ in range(20):
        x = rt.empty((4,), nx.float32)
        with ExitStack() as both, rt.exclusive():
            both.enter_context(Background(x.free))
            both.enter_context(Background(x.free))
            time.sleep(0.002)
        taken = [rt.empty((4,), nx.float32) for _ in range(3)]
        assert len({tensor.ptr for tensor in taken}) == 3


def test_freed_memory_is_refused_everywhere(rt: nx.CudaRuntime) -> None:
    x, y = rt.zeros((4,), nx.float32), rt.zeros((4,), nx.float32)
    x.free()
    attempts: list[Callable[[], Any]] = [
        x.numpy,
        lambda: rt.read_async(x),
        lambda: x.copy_from(np.ones(4)),
        lambda: rt.copy(x, y),
        lambda: rt.copy(y, x),
        lambda: rt.fill_zero(x),
        lambda: x.narrow(0, 0, 2).numpy(),
        x.__dlpack__,
        lambda: x.__cuda_array_interface__,
    ]
    before = rt.stats()
    for attempt in attempts:
        with pytest.raises(nx.DeviceMemoryError, match=r"^TensorMut\(Float32, .*, freed\) was freed$"):
            attempt()
    assert rt.stats() == before


def test_a_failed_free_has_freed_nothing() -> None:
    driver = HostDriver()
    with open_on(driver, pool_limit=0) as runtime:
        x = runtime.zeros((4,), nx.float32)
        with driver.fail_call(call="event_record"), pytest.raises(nx.DriverError):
            x.free()
        np.testing.assert_array_equal(x.numpy(), np.zeros(4))
        x.free()
        assert x.owner.is_freed


def test_the_last_reference_may_go_on_another_thread(rt: nx.CudaRuntime) -> None:
    """It is released once, by the runtime, on its own stream and context."""
    held = [rt.zeros((4,), nx.float32)]
    address = held[0].ptr
    frees = rt._driver.calls["mem_free"]
    on_thread(held.clear)
    assert rt._driver.calls["mem_free"] == frees
    assert rt.zeros((4,), nx.float32).ptr == address


def test_dropping_an_allocation_calls_no_driver(rt: nx.CudaRuntime) -> None:
    held: list[Any] = [rt.zeros((4,), nx.float32), rt.alloc_graph_stable(4), rt.read_async(rt.zeros((4,), nx.float32))]
    held.append(held)
    before = rt._driver.calls_total
    held = []
    gc.collect()
    assert rt._driver.calls_total == before


def test_a_view_keeps_its_memory_alive(rt: nx.CudaRuntime) -> None:
    x = rt.from_array(np.arange(4, dtype=np.float32))
    alive = weakref.ref(x.owner)
    part = x.narrow(0, 1, 2)
    del x
    gc.collect()
    assert alive() is not None
    np.testing.assert_array_equal(part.numpy(), [1, 2])
    del part
    gc.collect()
    assert alive() is None


# By address.


def test_raw_memory_lives_until_it_is_freed(rt: nx.CudaRuntime) -> None:
    ptr = rt.alloc_raw(16)
    rt.htod(np.arange(4, dtype=np.float32), ptr)
    gc.collect()
    target = np.zeros(4, np.float32)
    rt.dtoh(target, ptr)
    np.testing.assert_array_equal(target, np.arange(4))
    rt.free_raw(ptr)


@pytest.mark.parametrize("offset", [0, 8])
def test_an_address_that_is_not_there_cannot_be_freed(rt: nx.CudaRuntime, offset: int) -> None:
    ptr = rt.alloc_raw(16)
    rt.free_raw(ptr)
    with pytest.raises(
        nx.DeviceMemoryError, match=f"free_raw of 0x{ptr + offset:x}, which alloc_raw did not return or"
    ):
        rt.free_raw(ptr + offset)


def test_a_tensor_s_memory_is_not_raw_memory(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    with pytest.raises(nx.DeviceMemoryError, match="which alloc_raw did not return"):
        rt.free_raw(x.ptr)
    np.testing.assert_array_equal(x.numpy(), np.zeros(4))


def test_a_copy_past_the_end_is_the_driver_s_to_refuse_and_counts_for_nothing(rt: nx.CudaRuntime) -> None:
    ptr, other = rt.alloc_raw(512), rt.alloc_raw(512)
    before = rt.stats()
    for attempt in (
        lambda: rt.htod(np.zeros(513, np.uint8), ptr),
        lambda: rt.dtoh(np.zeros(513, np.uint8), ptr),
        lambda: rt.dtod(other, ptr, 513),
        lambda: rt.dtoh_async(ptr, 513),
        lambda: rt.htod_async(np.zeros(513, np.uint8), ptr),
    ):
        with pytest.raises(nx.DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            attempt()
    assert rt.stats() == before


def test_a_size_is_a_whole_number_of_any_integer_type(rt: nx.CudaRuntime) -> None:
    ptr = rt.alloc_raw(np.int64(16))
    rt.htod(np.zeros(16, np.uint8), ptr)
    for size in (1.5, "16", None):
        with pytest.raises(nx.DeviceMemoryError, match="a size is a whole number"):
            rt.alloc_raw(size)  # type: ignore[arg-type]


def test_what_is_no_address_cannot_be_freed(rt: nx.CudaRuntime) -> None:
    with pytest.raises(nx.DeviceMemoryError, match="free_raw of 'a', which alloc_raw did not return"):
        rt.free_raw("a")  # type: ignore[arg-type]


def test_what_the_driver_never_takes_back_does_not_block_what_comes_after(
    rt: nx.CudaRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the caller's error once, and tried again whenever something is released."""
    calls: list[str] = []

    def never() -> None:
        calls.append("never")
        raise nx.DriverError("cuEventRecord", 1, "CUDA_ERROR_INVALID_VALUE", "invalid argument")

    rt._session.dropped.extend([never, lambda: calls.append("after")])
    with pytest.raises(nx.DriverError, match="cuEventRecord"):
        rt.alloc_raw(16)
    assert calls == ["never"]
    rt.alloc_raw(16)
    assert calls == ["never", "never", "after"]
    assert "what was dropped cannot be released yet: cuEventRecord failed" in caplog.text
    rt.alloc_raw(16)
    assert calls == ["never", "never", "after", "never"]
    rt._session.dropped.clear()


def test_memory_that_the_driver_never_takes_back_does_not_block_allocations(caplog: pytest.LogCaptureFixture) -> None:
    """Its error is the caller's once; it stays counted, and what was retired after it is freed."""
    rt = open_on(HostDriver(), pool_limit=0)
    driver = rt._session.driver
    free, refused = driver.mem_free_async, []

    def refuse_one(ptr: int, stream: int) -> None:
        refused[:] = refused or [ptr]
        if ptr in refused:
            raise nx.DriverError("cuMemFreeAsync", 1, "CUDA_ERROR_INVALID_VALUE", "invalid argument")
        free(ptr, stream)

    driver.mem_free_async = refuse_one  # type: ignore[method-assign]
    first, second = rt.empty((1000,), nx.float32), rt.empty((3000,), nx.float32)
    first.free()
    second.free()
    rt.synchronize()
    with pytest.raises(nx.DriverError, match="cuMemFreeAsync"):
        rt.alloc_raw(16)
    rt.alloc_raw(16)
    assert "cannot be released yet: cuMemFreeAsync failed" in caplog.text
    assert rt.stats().deferred_bytes == 4096
    rt.close()
