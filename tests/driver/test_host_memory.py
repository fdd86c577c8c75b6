"""The host driver's memory: what is detected, and what the error says."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from nxrt_cuda.driver.base import PointerInfo
from nxrt_cuda.errors import DeviceFaultError, OutOfMemoryError
from tests.driver.host_rig import Rig, refused


def test_fresh_memory_reads_as_nan(rig: Rig) -> None:
    """Memory that nobody wrote holds 0xFF bytes, so that a result that depends on it shows."""
    assert np.isnan(rig.download(rig.driver.mem_alloc(16), np.float32, 4)).all()
    assert np.isnan(rig.download(rig.driver.mem_alloc(16), np.float16, 8)).all()


def test_addresses_are_aligned_distinct_and_never_reused(rig: Rig) -> None:
    seen = set()
    for size in (1, 255, 256, 257, 1) * 4:
        ptr = rig.driver.mem_alloc(size)
        assert ptr % 256 == 0
        assert ptr not in seen
        seen.add(ptr)
        rig.driver.mem_free(ptr)


def test_a_copy_round_trip(rig: Rig) -> None:
    """Bytes come back as they went, through interior addresses and device to device too."""
    values = np.arange(64, dtype=np.float32)
    source, target = rig.upload(values), rig.driver.mem_alloc(values.nbytes)
    rig.driver.memcpy_dtod_async(target + 128, source, 128, rig.stream)
    rig.driver.memset_d8_async(target, 0, 128, rig.stream)
    np.testing.assert_array_equal(rig.download(target, np.float32, 64), np.r_[np.zeros(32), values[:32]])


def test_running_out_of_memory_says_how_much_is_left() -> None:
    rig = Rig(total_memory=1000)
    first = rig.driver.mem_alloc(600)
    with pytest.raises(OutOfMemoryError, match="asked for 401 bytes; 400 of 1000 are free"):
        rig.driver.mem_alloc(401)
    assert rig.driver.mem_get_info() == (400, 1000)
    rig.driver.mem_free(first)
    rig.driver.mem_alloc(1000)
    assert rig.driver.mem_get_info() == (0, 1000)


def test_memory_is_taken_from_the_machine_when_it_is_touched() -> None:
    """An allocation far beyond this machine's memory is only a number until something is written to it."""
    rig = Rig(total_memory=1 << 50)
    rig.driver.mem_alloc(1 << 49)
    assert rig.driver.live().device_bytes == 1 << 49


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_allocation_without_bytes_is_refused(rig: Rig, nbytes: int) -> None:
    with refused("CUDA_ERROR_INVALID_VALUE", "cuMemAlloc", f"{nbytes} bytes"):
        rig.driver.mem_alloc(nbytes)
    with refused("CUDA_ERROR_INVALID_VALUE", "cuMemHostAlloc", f"{nbytes} bytes"):
        rig.driver.mem_host_alloc(nbytes)


def test_wrong_frees_are_refused(rig: Rig) -> None:
    """A second free, a free of an interior address, of nothing, and of another driver's memory."""
    ptr = rig.driver.mem_alloc(64)
    with refused("CUDA_ERROR_INVALID_VALUE", f"0x{ptr + 8:x} is not the start of allocation #0"):
        rig.driver.mem_free(ptr + 8)
    rig.driver.mem_free(ptr)
    with refused("CUDA_ERROR_INVALID_VALUE", "allocation #0", "was freed before"):
        rig.driver.mem_free(ptr)
    with refused("CUDA_ERROR_INVALID_VALUE", "0x1234 is not a device address"):
        rig.driver.mem_free(0x1234)
    with refused("CUDA_ERROR_INVALID_VALUE", "is not a device address"):
        rig.driver.mem_free(Rig().driver.mem_alloc(64))


@pytest.mark.parametrize("direction", ["htod", "dtoh", "dtod", "memset"])
def test_a_copy_with_a_bad_device_range_is_refused_at_the_call(rig: Rig, direction: str) -> None:
    """Out of bounds, freed and unknown: the message has the operand, the size, the address and the allocation."""
    host = np.zeros(256, np.uint8)
    other = rig.driver.mem_alloc(256)

    def copy(ptr: int, nbytes: int) -> None:
        if direction == "htod":
            rig.driver.memcpy_htod_async(ptr, host.ctypes.data, nbytes, rig.stream)
        elif direction == "dtoh":
            rig.driver.memcpy_dtoh_async(host.ctypes.data, ptr, nbytes, rig.stream)
        elif direction == "dtod":
            rig.driver.memcpy_dtod_async(other, ptr, nbytes, rig.stream)
        else:
            rig.driver.memset_d8_async(ptr, 0, nbytes, rig.stream)

    what = "source" if direction in ("dtoh", "dtod") else "destination"
    ptr = rig.driver.mem_alloc(100)
    copy(ptr, 100)
    with refused("CUDA_ERROR_INVALID_VALUE", f"{what}: 100 bytes at 0x{ptr + 4:x} reach 4 bytes past", "allocation #1"):
        copy(ptr + 4, 100)
    with refused("CUDA_ERROR_INVALID_VALUE", f"{what}: 8 bytes at 0x{ptr + 100:x}", "past the end of allocation #1"):
        copy(ptr + 100, 8)
    with refused("CUDA_ERROR_INVALID_VALUE", f"{what}: 8 bytes at 0x10", "no device address"):
        copy(0x10, 8)
    with refused("CUDA_ERROR_INVALID_VALUE", "-8 bytes"):
        copy(ptr, -8)
    rig.driver.stream_synchronize(rig.stream)
    rig.driver.mem_free(ptr)
    with refused("CUDA_ERROR_INVALID_VALUE", f"{what}: 8 bytes at 0x{ptr:x} lie in allocation #1", "was freed"):
        copy(ptr, 8)


def test_neighbouring_allocations_do_not_touch(rig: Rig) -> None:
    """Running off the end of one never arrives in the next, however small the step."""
    first, second = rig.driver.mem_alloc(256), rig.driver.mem_alloc(256)
    assert second > first
    with refused("CUDA_ERROR_INVALID_VALUE", f"1 bytes at 0x{first + 256:x}", "past the end of allocation #0"):
        rig.driver.memset_d8_async(first + 256, 0, 1, rig.stream)


def test_empty_copies_do_nothing_whatever_their_addresses(rig: Rig) -> None:
    rig.driver.memcpy_htod_async(0, 0, 0, rig.stream)
    rig.driver.memcpy_dtoh_async(0, 0, 0, rig.stream)
    rig.driver.memcpy_dtod_async(0, 0, 0, rig.stream)
    rig.driver.memset_d8_async(0, 0, 0, rig.stream)
    rig.driver.stream_synchronize(rig.stream)


def test_host_pointers_are_checked_as_far_as_they_can_be(rig: Rig) -> None:
    ptr = rig.driver.mem_alloc(64)
    with refused("CUDA_ERROR_INVALID_VALUE", "source: 8 bytes at a null host pointer"):
        rig.driver.memcpy_htod_async(ptr, 0, 8, rig.stream)
    with refused("CUDA_ERROR_INVALID_VALUE", "source", "is a device address, not a host one"):
        rig.driver.memcpy_htod_async(ptr, ptr, 8, rig.stream)
    with refused("CUDA_ERROR_INVALID_VALUE", "destination", "is a device address, not a host one"):
        rig.driver.memcpy_dtoh_async(ptr, ptr, 8, rig.stream)


def test_overlapping_device_copies_and_wide_memset_values_are_refused(rig: Rig) -> None:
    ptr = rig.driver.mem_alloc(64)
    with refused("CUDA_ERROR_INVALID_VALUE", "overlap"):
        rig.driver.memcpy_dtod_async(ptr, ptr + 8, 16, rig.stream)
    with refused("CUDA_ERROR_INVALID_VALUE", "memset value 256"):
        rig.driver.memset_d8_async(ptr, 256, 8, rig.stream)


def test_memory_freed_before_the_queued_copy_ran_is_a_fault(rig: Rig) -> None:
    """Freeing waits for nothing, so the copy finds its memory gone, and the context is lost."""
    ptr = rig.driver.mem_alloc(64)
    rig.driver.memset_d8_async(ptr, 0, 64, rig.stream)
    rig.driver.mem_free(ptr)
    with pytest.raises(DeviceFaultError, match=r"memset of 64 bytes .*allocation #0 .*was freed before this work ran"):
        rig.driver.stream_synchronize(rig.stream)


def test_pinned_memory_is_host_memory_at_a_real_address(rig: Rig) -> None:
    address = rig.driver.mem_host_alloc(16)
    array = np.ctypeslib.as_array((ctypes.c_uint8 * 16).from_address(address))
    assert (array == 0xFF).all()
    array[:] = np.arange(16)
    ptr = rig.driver.mem_alloc(16)
    rig.driver.memcpy_htod_async(ptr, address, 16, rig.stream)
    np.testing.assert_array_equal(rig.download(ptr, np.uint8, 16), np.arange(16))


def test_wrong_uses_of_pinned_memory_are_refused(rig: Rig) -> None:
    ptr, address = rig.driver.mem_alloc(64), rig.driver.mem_host_alloc(64)
    with refused("CUDA_ERROR_INVALID_VALUE", "reach 8 bytes past the end of pinned memory"):
        rig.driver.memcpy_htod_async(ptr, address + 8, 64, rig.stream)
    with refused("CUDA_ERROR_INVALID_VALUE", "is not the start of pinned memory"):
        rig.driver.mem_host_free(address + 8)
    rig.driver.mem_host_free(address)
    with refused("CUDA_ERROR_INVALID_VALUE", "cuMemFreeHost", "was freed before"):
        rig.driver.mem_host_free(address)
    with refused("CUDA_ERROR_INVALID_VALUE", "lies in pinned memory", "which was freed"):
        rig.driver.memcpy_htod_async(ptr, address, 8, rig.stream)


def test_pinned_memory_freed_before_the_queued_copy_ran_is_a_fault(rig: Rig) -> None:
    ptr, address = rig.driver.mem_alloc(64), rig.driver.mem_host_alloc(64)
    rig.driver.memcpy_htod_async(ptr, address, 64, rig.stream)
    rig.driver.mem_host_free(address)
    with pytest.raises(DeviceFaultError, match=r"pinned memory .* was freed before this work ran"):
        rig.driver.stream_synchronize(rig.stream)


def test_pointer_info_knows_device_and_pinned_memory_while_it_lives(rig: Rig) -> None:
    ptr, address = rig.driver.mem_alloc(64), rig.driver.mem_host_alloc(64)
    pageable = np.zeros(64, np.uint8)
    assert rig.driver.pointer_info(ptr + 63) == PointerInfo(device=0, is_device=True)
    assert rig.driver.pointer_info(address) == PointerInfo(device=0, is_device=False)
    assert rig.driver.pointer_info(ptr + 64) is None
    assert rig.driver.pointer_info(pageable.ctypes.data) is None
    rig.driver.mem_free(ptr)
    rig.driver.mem_host_free(address)
    assert rig.driver.pointer_info(ptr) is None
    assert rig.driver.pointer_info(address) is None


# Freeing in stream order


def test_memory_freed_in_stream_order_lives_until_the_stream_has_come_to_it(rig: Rig) -> None:
    """Work queued before it still runs; what it gives back can be had only after it ran."""
    ptr = rig.driver.mem_alloc(64)
    free, _ = rig.driver.mem_get_info()
    rig.driver.memset_d8_async(ptr, 1, 64, rig.stream)
    rig.driver.mem_free_async(ptr, rig.stream)
    assert not rig.driver.live().allocations
    assert rig.driver.mem_get_info()[0] == free
    rig.driver.stream_synchronize(rig.stream)
    assert rig.driver.mem_get_info()[0] == free + 64
    with refused("CUDA_ERROR_INVALID_VALUE", "which was freed"):
        rig.driver.memset_d8_async(ptr, 1, 64, rig.stream)


def test_work_after_a_free_in_stream_order_is_a_fault(rig: Rig) -> None:
    """As is work on another stream that comes too late."""
    ptr = rig.driver.mem_alloc(64)
    rig.driver.mem_free_async(ptr, rig.stream)
    rig.driver.memset_d8_async(ptr, 1, 64, rig.stream)
    with pytest.raises(DeviceFaultError, match="was freed before this work ran"):
        rig.driver.stream_synchronize(rig.stream)


def test_memory_is_freed_once_in_whichever_way(rig: Rig) -> None:
    ptr = rig.driver.mem_alloc(64)
    rig.driver.mem_free_async(ptr, rig.stream)
    for again in (lambda: rig.driver.mem_free(ptr), lambda: rig.driver.mem_free_async(ptr, rig.stream)):
        with refused("CUDA_ERROR_INVALID_VALUE", "was freed before"):
            again()
    with refused("CUDA_ERROR_INVALID_VALUE", "is not the start of"):
        rig.driver.mem_free_async(rig.driver.mem_alloc(64) + 8, rig.stream)
