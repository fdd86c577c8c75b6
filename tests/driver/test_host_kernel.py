"""The host driver's modules, launches and faults."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from nxrt_cuda import dtype as dt
from nxrt_cuda.driver.base import ParamInfo
from nxrt_cuda.driver.host import HostImage, HostLaunch
from nxrt_cuda.errors import DeviceFaultError
from tests.driver.host_rig import AXPY, Rig, image, refused

EVERY_KIND = image(
    "every",
    ("a", "i32"),
    ("b", "f64"),
    ("c", "u32"),
    ("d", "ptr"),
    ("e", "f32"),
    ("f", "i64"),
    ("g", "u64"),
)


def test_a_launch_runs_its_entry_on_device_memory(rig: Rig) -> None:
    x, y = rig.upload(np.arange(5, dtype=np.float32)), rig.upload(np.ones(5, np.float32))
    rig.launch(rig.function(AXPY), AXPY, x, y, 5, 2.0)
    np.testing.assert_array_equal(rig.download(y, np.float32, 5), [1, 3, 5, 7, 9])


def test_an_entry_sees_the_whole_launch() -> None:
    seen: list[HostLaunch] = []
    rig = Rig({"look": seen.append})
    look = HostImage("look.cu", "look", (("n", "i32"),), (("HEAD_DIM", "64"), ("CAUSAL", "1")), 256)
    rig.launch(rig.function(look), look, 3, grid=(7, 5, 3), block=(16, 8, 2), shared_bytes=1024)
    rig.driver.stream_synchronize(rig.stream)
    (launch,) = seen
    assert (launch.entry, dict(launch.args)) == ("look", {"n": 3})
    assert dict(launch.macros) == {"HEAD_DIM": "64", "CAUSAL": "1"}
    assert (launch.grid, launch.block, launch.shared_bytes) == ((7, 5, 3), (16, 8, 2), 1024)


def test_arguments_of_every_kind_arrive_at_their_width() -> None:
    """Each has a different value, at the edge of its range; the storage is overwritten after the call."""
    seen: list[HostLaunch] = []
    rig = Rig({"every": seen.append})
    values = (-(2**31), 1e300, 2**32 - 1, 2**60 + 5, 0.1, -(2**63), 2**64 - 1)
    rig.launch(rig.function(EVERY_KIND), EVERY_KIND, *values)
    rig.driver.stream_synchronize(rig.stream)
    expected = dict(zip("abcdefg", values, strict=True)) | {"e": float(np.float32(0.1))}
    assert dict(seen[0].args) == expected


def test_param_info_is_the_layout_of_cuda(rig: Rig) -> None:
    """Each parameter at its natural alignment."""
    rig = Rig({"every": lambda launch: None})
    infos = rig.driver.func_param_info(rig.function(EVERY_KIND))
    assert infos == tuple(ParamInfo(*pair) for pair in ((0, 4), (8, 8), (16, 4), (24, 8), (32, 4), (40, 8), (48, 8)))


def test_an_image_survives_its_encoding() -> None:
    whole = HostImage("a b.cu", "entry", (("x", "ptr"), ("n", "i32")), (("ELEMENT", "__half"),), 128)
    assert HostImage.decode(whole.encode()) == whole


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "0 bytes that are no host image"),
        (b"\x7fELF\x02\x01\x01\x33" + bytes(60), "68 bytes that are no host image; they begin with b'\\x7fELF"),
        (AXPY.encode()[:-9], "a damaged host image"),
        (AXPY.encode().replace(b"threads", b"treads"), "a damaged host image: KeyError"),
        (AXPY.encode().replace(b"f32", b"f16"), "parameter kinds ['f16']"),
    ],
    ids=["empty", "cubin", "truncated", "field", "kind"],
)
def test_what_is_no_host_image_is_refused(rig: Rig, data: bytes, text: str) -> None:
    with refused("CUDA_ERROR_INVALID_IMAGE", "cuModuleLoadDataEx", text):
        rig.driver.module_load(data)


def test_a_missing_kernel_is_refused_with_the_names_that_exist(rig: Rig) -> None:
    module = rig.driver.module_load(AXPY.encode())
    with refused("CUDA_ERROR_NOT_FOUND", "'axpi'", "axpy.cu has 'axpy'"):
        rig.driver.module_get_function(module, "axpi")
    unknown = rig.driver.module_load(image("unknown").encode())
    with refused("CUDA_ERROR_NOT_FOUND", "'unknown'", "given the entries: axpy"):
        rig.driver.module_get_function(unknown, "unknown")


def test_an_unloaded_module_takes_its_functions_along(rig: Rig) -> None:
    module = rig.driver.module_load(AXPY.encode())
    function = rig.driver.module_get_function(module, "axpy")
    rig.driver.module_unload(module)
    with refused("CUDA_ERROR_INVALID_HANDLE", f"0x{function:x} is no live function"):
        rig.launch(function, AXPY, 0, 0, 0, 0.0)
    with refused("CUDA_ERROR_INVALID_HANDLE", f"0x{module:x} is no live module"):
        rig.driver.module_unload(module)


def test_a_module_unloaded_before_its_queued_launch_ran_is_a_fault(rig: Rig) -> None:
    module = rig.driver.module_load(AXPY.encode())
    rig.launch(rig.driver.module_get_function(module, "axpy"), AXPY, 0, 0, 0, 0.0)
    rig.driver.module_unload(module)
    with pytest.raises(DeviceFaultError, match=r"kernel 'axpy' .* its module was unloaded before it ran"):
        rig.driver.stream_synchronize(rig.stream)


@pytest.mark.parametrize(
    ("launch", "text"),
    [
        ({"grid": (0, 1, 1)}, "grid x = 0 is outside [1, 2147483647]"),
        ({"grid": (2**31, 1, 1)}, "grid x = 2147483648 is outside"),
        ({"grid": (1, 65536, 1)}, "grid y = 65536 is outside [1, 65535]"),
        ({"grid": (1, 1, 65536)}, "grid z = 65536 is outside [1, 65535]"),
        ({"block": (1025, 1, 1)}, "block x = 1025 is outside [1, 1024]"),
        ({"block": (1, 1, 65)}, "block z = 65 is outside [1, 64]"),
        ({"block": (32, 0, 1)}, "block y = 0 is outside"),
        ({"block": (32, 33, 1)}, "threads of a block = 1056 is outside [1, 1024]"),
        ({"shared_bytes": 48 * 1024 + 1}, "dynamic shared memory = 49153 is outside [0, 49152]"),
        ({"shared_bytes": -1}, "dynamic shared memory = -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_launch_outside_the_limits_is_refused(rig: Rig, launch: dict[str, object], text: str) -> None:
    with refused("CUDA_ERROR_INVALID_VALUE", "cuLaunchKernel", "kernel 'axpy'", text):
        rig.launch(rig.function(AXPY), AXPY, 0, 0, 0, 0.0, **launch)


def test_a_block_larger_than_the_kernel_was_compiled_for_is_refused() -> None:
    rig = Rig({"small": lambda launch: None})
    small = image("small", threads=128)
    function = rig.function(small)
    assert rig.driver.func_attribute(function, "MAX_THREADS_PER_BLOCK") == 128
    rig.launch(function, small, block=(128, 1, 1))
    with refused("CUDA_ERROR_INVALID_VALUE", "threads of a block = 129 is outside [1, 128]"):
        rig.launch(function, small, block=(129, 1, 1))


@pytest.mark.parametrize(("threads", "shared_bytes", "most"), [(1024, 0, 264), (512, 0, 528), (128, 48 << 10, 528)])
def test_blocks_that_wait_for_each_other_must_run_at_the_same_time(
    rig: Rig, threads: int, shared_bytes: int, most: int
) -> None:
    """As many as threads and shared memory of 132 multiprocessors allow; other launches may have more."""
    function, launch = rig.function(AXPY), {"block": (threads, 1, 1), "shared_bytes": shared_bytes}
    rig.launch(function, AXPY, 0, 0, 0, 0.0, grid=(most, 1, 1), cooperative=True, **launch)
    with refused("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "kernel 'axpy'", f"{most + 1} blocks", f"room for {most}"):
        rig.launch(function, AXPY, 0, 0, 0, 0.0, grid=(most + 1, 1, 1), cooperative=True, **launch)
    rig.launch(function, AXPY, 0, 0, 0, 0.0, grid=(most + 1, 1, 1), **launch)


def test_more_shared_memory_has_to_be_opted_in(rig: Rig) -> None:
    function = rig.function(AXPY)
    with refused("CUDA_ERROR_INVALID_VALUE", "cuFuncSetAttribute", "232449 bytes", "the limit is 232448"):
        rig.driver.func_set_max_dynamic_shared(function, 227 * 1024 + 1)
    assert rig.driver.func_attribute(function, "MAX_DYNAMIC_SHARED_SIZE_BYTES") == 48 * 1024
    rig.driver.func_set_max_dynamic_shared(function, 227 * 1024)
    assert rig.driver.func_attribute(function, "MAX_DYNAMIC_SHARED_SIZE_BYTES") == 227 * 1024
    ptr = rig.upload(np.zeros(1, np.float32))
    rig.launch(function, AXPY, ptr, ptr, 1, 0.0, shared_bytes=227 * 1024)
    rig.driver.stream_synchronize(rig.stream)


def test_function_attributes_are_known_by_name(rig: Rig) -> None:
    function = rig.function(AXPY)
    for name in ("NUM_REGS", "LOCAL_SIZE_BYTES", "SHARED_SIZE_BYTES", "CONST_SIZE_BYTES"):
        assert rig.driver.func_attribute(function, name) == 0
    with refused("CUDA_ERROR_INVALID_VALUE", "unknown function attribute 'REGS'", "NUM_REGS"):
        rig.driver.func_attribute(function, "REGS")


def test_missing_arguments_are_refused(rig: Rig) -> None:
    function = rig.function(AXPY)
    with refused("CUDA_ERROR_INVALID_VALUE", "kernel 'axpy' takes 4 arguments, got a null pointer"):
        rig.driver.launch_kernel(function, (1, 1, 1), (1, 1, 1), 0, rig.stream, 0)
    value = ctypes.c_uint64(0)
    pointers = (ctypes.c_uint64 * 4)(ctypes.addressof(value), 0, 0, 0)
    with refused("CUDA_ERROR_INVALID_VALUE", "no value for argument 'y'"):
        rig.driver.launch_kernel(function, (1, 1, 1), (1, 1, 1), 0, rig.stream, ctypes.addressof(pointers))


def test_a_kernel_without_parameters_needs_no_arguments() -> None:
    ran: list[HostLaunch] = []
    rig = Rig({"bare": ran.append})
    rig.driver.launch_kernel(rig.function(image("bare")), (1, 1, 1), (1, 1, 1), 0, rig.stream, 0)
    rig.driver.stream_synchronize(rig.stream)
    assert len(ran) == 1


@pytest.mark.parametrize(
    ("case", "name", "text"),
    [
        ("past", "CUDA_ERROR_ILLEGAL_ADDRESS", "argument 'x': 20 bytes at 0x{x:x} reach 4 bytes past the end"),
        ("freed", "CUDA_ERROR_ILLEGAL_ADDRESS", "argument 'x': 16 bytes at 0x{x:x} lie in allocation #0"),
        ("null", "CUDA_ERROR_ILLEGAL_ADDRESS", "argument 'x': 16 bytes at 0x0, which is no device address"),
        ("misaligned", "CUDA_ERROR_MISALIGNED_ADDRESS", "argument 'x': 0x{x2:x} does not align Float32"),
    ],
)
def test_a_bad_access_in_a_kernel_is_a_fault(rig: Rig, case: str, name: str, text: str) -> None:
    """The launch succeeds; the wait reports the kernel, its stream, the argument and the allocation."""
    x, y = rig.upload(np.zeros(4, np.float32)), rig.upload(np.zeros(8, np.float32))
    if case == "freed":
        rig.driver.mem_free(x)
    address = {"null": 0, "misaligned": x + 2}.get(case, x)
    rig.launch(rig.function(AXPY), AXPY, address, y, 5 if case == "past" else 4, 1.0)
    with pytest.raises(DeviceFaultError) as caught:
        rig.driver.stream_synchronize(rig.stream)
    assert caught.value.name == name
    assert caught.value.call == "cuStreamSynchronize"
    assert text.format(x=x, x2=x + 2) in str(caught.value)
    assert f"kernel 'axpy' <<<(1, 1, 1), (32, 1, 1)>>> on stream 0x{rig.stream:x}" in str(caught.value)


def test_a_view_of_nothing_needs_no_address() -> None:
    shapes = []
    rig = Rig({"empty": lambda launch: shapes.append(launch.view(0, dt.float32, (3, 0)).shape)})
    empty = image("empty")
    rig.launch(rig.function(empty), empty)
    rig.driver.stream_synchronize(rig.stream)
    assert shapes == [(3, 0)]


def test_a_kernel_cannot_swallow_its_fault() -> None:
    """An entry that catches the exception of a bad access has made it all the same."""

    def entry(launch: HostLaunch) -> None:
        try:
            launch.view(launch.args["p"], dt.uint8, (1,))
        except Exception:
            raise KeyError("something else") from None

    rig = Rig({"quiet": entry})
    quiet = image("quiet", ("p", "ptr"))
    rig.launch(rig.function(quiet), quiet, 0x40)
    with refused("CUDA_ERROR_ILLEGAL_ADDRESS", "argument 'p': 1 bytes at 0x40"):
        rig.driver.stream_synchronize(rig.stream)


def test_an_exception_in_a_kernel_is_a_launch_failure_that_carries_it() -> None:
    def entry(launch: HostLaunch) -> None:
        raise ZeroDivisionError("by zero")

    rig = Rig({"boom": entry})
    boom = image("boom")
    rig.launch(rig.function(boom), boom)
    with pytest.raises(DeviceFaultError, match=r"kernel 'boom' .*ZeroDivisionError: by zero") as caught:
        rig.driver.stream_synchronize(rig.stream)
    assert caught.value.name == "CUDA_ERROR_LAUNCH_FAILED"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_interrupt_in_a_kernel_gets_through_and_ends_the_context() -> None:
    """Ctrl-C is not turned into a driver error, but what it interrupted is half done."""

    def entry(launch: HostLaunch) -> None:
        raise KeyboardInterrupt

    rig = Rig({"stop": entry})
    stop = image("stop")
    rig.launch(rig.function(stop), stop)
    with pytest.raises(KeyboardInterrupt):
        rig.driver.stream_synchronize(rig.stream)
    with refused("CUDA_ERROR_LAUNCH_FAILED", "KeyboardInterrupt"):
        rig.driver.stream_synchronize(rig.stream)


def test_after_a_fault_every_call_that_needs_the_context_repeats_it(rig: Rig) -> None:
    """Releases too, and no data comes back. What needs no context still answers."""
    x = rig.upload(np.zeros(4, np.float32))
    y = rig.upload(np.zeros(4, np.float32))
    event, other = rig.driver.event_create(timing=False), rig.driver.stream_create()
    rig.launch(rig.function(AXPY), AXPY, 0, x, 4, 1.0)
    with pytest.raises(DeviceFaultError):
        rig.driver.stream_synchronize(rig.stream)

    out = np.full(4, -1.0, np.float32)
    for call in (
        lambda: rig.driver.memcpy_dtoh_async(out.ctypes.data, y, 16, other),
        lambda: rig.driver.stream_synchronize(other),
        lambda: rig.driver.stream_query(other),
        lambda: rig.driver.event_query(event),
        lambda: rig.driver.event_destroy(event),
        lambda: rig.driver.stream_destroy(other),
        lambda: rig.driver.mem_alloc(4),
        lambda: rig.driver.mem_free(x),
        lambda: rig.driver.primary_ctx_retain(0),
        lambda: rig.driver.primary_ctx_release(0),
    ):
        with pytest.raises(DeviceFaultError, match=r"kernel 'axpy' .*argument 'x': 16 bytes at 0x0"):
            call()
    assert (out == -1.0).all()
    assert rig.driver.device_count() == 1
    assert rig.driver.ctx_pop_current() == rig.context


def test_the_first_fault_stays_and_ends_all_queued_work(rig: Rig) -> None:
    """Work behind the fault, and on other streams, never runs."""
    ptr, other = rig.upload(np.zeros(4, np.float32)), rig.driver.stream_create()
    out = np.full(4, -1.0, np.float32)
    rig.driver.memcpy_dtoh_async(out.ctypes.data, ptr, 16, other)
    function = rig.function(AXPY)
    rig.launch(function, AXPY, 0x100, ptr, 4, 1.0)
    rig.launch(function, AXPY, 0x200, ptr, 4, 1.0)
    for _ in range(3):
        with refused("CUDA_ERROR_ILLEGAL_ADDRESS", "16 bytes at 0x100"):
            rig.driver.stream_synchronize(rig.stream)
    with refused("CUDA_ERROR_ILLEGAL_ADDRESS", "16 bytes at 0x100"):
        rig.driver.stream_synchronize(other)
    assert (out == -1.0).all()


def test_a_fault_reached_through_a_fence_names_the_work_that_made_it(rig: Rig) -> None:
    """The waiting stream reports the other stream's kernel, and not its own wait."""
    ptr, other = rig.upload(np.zeros(4, np.float32)), rig.driver.stream_create()
    event = rig.driver.event_create(timing=False)
    rig.launch(rig.function(AXPY), AXPY, 0x100, ptr, 4, 1.0)
    rig.driver.event_record(event, rig.stream)
    rig.driver.stream_wait_event(other, event)
    with pytest.raises(DeviceFaultError) as caught:
        rig.driver.stream_synchronize(other)
    assert f"(kernel 'axpy' <<<(1, 1, 1), (32, 1, 1)>>> on stream 0x{rig.stream:x}: argument 'x'" in str(caught.value)
