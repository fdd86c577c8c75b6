"""The driver seam on a real driver: each call does what the protocol says, and each error is typed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from nxrt_cuda.compile import NvrtcCompiler
from nxrt_cuda.driver.base import CaptureMode, CaptureStatus, ParamInfo, PointerInfo
from nxrt_cuda.driver.cuda import CudaDriver
from nxrt_cuda.errors import DriverError, OutOfMemoryError
from nxrt_cuda.launch import KernelSpec

CODE = """
extern "C" __global__ void add(int* out, int value) { out[threadIdx.x] += value; }

extern "C" __global__ void spin(int* out, long long cycles) {
    for (const long long start = clock64(); clock64() - start < cycles;) {}
    *out = 1;
}

extern "C" __global__ void last_of_shared(int* out, int bytes) {
    extern __shared__ char scratch[];
    scratch[bytes - 1] = 77;
    *out = scratch[bytes - 1];
}
"""


@pytest.fixture
def driver(gpu: str) -> Iterator[CudaDriver]:
    """A driver with the primary context of device 0 current."""
    driver = CudaDriver()
    context = driver.primary_ctx_retain(0)
    driver.ctx_push_current(context)
    yield driver
    assert driver.ctx_pop_current() == context
    driver.primary_ctx_release(0)


@pytest.fixture
def stream(driver: CudaDriver) -> Iterator[int]:
    stream = driver.stream_create()
    yield stream
    driver.stream_destroy(stream)


@pytest.fixture
def memory(driver: CudaDriver, stream: int) -> Iterator[int]:
    """4 KiB of zeros on the device."""
    ptr = driver.mem_alloc(4096)
    driver.memset_d8_async(ptr, 0, 4096, stream)
    yield ptr
    driver.mem_free(ptr)


@pytest.fixture
def module(driver: CudaDriver) -> Iterator[int]:
    """The kernels of ``CODE``."""
    module = driver.module_load(compile_for_device(driver))
    yield module
    driver.module_unload(module)


def compile_for_device(driver: CudaDriver, code: str = CODE) -> bytes:
    major, minor = (driver.device_attribute(0, f"COMPUTE_CAPABILITY_{name}") for name in ("MAJOR", "MINOR"))
    spec = KernelSpec("driver_test.cu", "add", (), 32, code=code)
    return NvrtcCompiler((major, minor)).compile(spec).data


class Arguments:
    """Values for one launch, and the array of pointers to them."""

    def __init__(self, *values: ctypes._SimpleCData) -> None:
        self._values = values
        self._pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.address = ctypes.addressof(self._pointers)


def launch(
    driver: CudaDriver, module: int, entry: str, stream: int, *values: ctypes._SimpleCData, **shape: int
) -> None:
    function = driver.module_get_function(module, entry)
    threads, shared_bytes = shape.get("threads", 1), shape.get("shared_bytes", 0)
    arguments = Arguments(*values)
    driver.launch_kernel(function, (1, 1, 1), (threads, 1, 1), shared_bytes, stream, arguments.address)


def read(driver: CudaDriver, ptr: int, count: int, stream: int) -> list[int]:
    host = np.full(count, -1, np.int32)
    driver.memcpy_dtoh_async(host.ctypes.data, ptr, host.nbytes, stream)
    driver.stream_synchronize(stream)
    return host.tolist()


# Device and context.


def test_the_device_describes_itself(driver: CudaDriver) -> None:
    """Version, count, name, attributes and memory are sane."""
    assert driver.driver_version() >= 12000
    assert driver.device_count() >= 1
    assert driver.device_name(0).isprintable()
    assert driver.device_attribute(0, "COMPUTE_CAPABILITY_MAJOR") >= 7
    assert driver.device_attribute(0, "MULTIPROCESSOR_COUNT") > 0
    free, total = driver.mem_get_info()
    assert 0 < free <= total
    with pytest.raises(DriverError, match="did you mean MULTIPROCESSOR_COUNT"):
        driver.device_attribute(0, "MULTIPROCESSORS_COUNT")


def test_a_thread_begins_without_a_context(driver: CudaDriver) -> None:
    """There, a call that needs one says so; pushing the context cures it, and popping gives it back."""
    context = driver.ctx_get_current()
    results: list[object] = []

    def work() -> None:
        results.append(driver.ctx_get_current())
        try:
            driver.mem_alloc(16)
        except DriverError as error:
            results.append(error.name)
        driver.ctx_push_current(context)
        driver.mem_free(driver.mem_alloc(16))
        results.append(driver.ctx_pop_current())
        results.append(driver.ctx_get_current())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [0, "CUDA_ERROR_INVALID_CONTEXT", context, 0]


def test_a_device_that_does_not_exist_is_refused(driver: CudaDriver) -> None:
    """By the driver's own code."""
    with pytest.raises(DriverError, match=r"cuDevicePrimaryCtxRetain failed: CUDA_ERROR_INVALID_DEVICE \(101\)"):
        driver.primary_ctx_retain(1000)


def test_hiding_the_devices_is_no_device(gpu: str) -> None:
    """With the driver there and every device hidden, opening fails the same way twice."""
    code = """
        from nxrt_cuda.driver.cuda import CudaDriver
        from nxrt_cuda.errors import NoDeviceError
        for _ in range(2):
            try:
                CudaDriver()
            except NoDeviceError as error:
                print(error.name)
        """
    assert run(code, CUDA_VISIBLE_DEVICES="").split() == ["CUDA_ERROR_NO_DEVICE"] * 2


# Memory, streams, events.


def test_bytes_travel_there_and_back(driver: CudaDriver, stream: int, memory: int) -> None:
    """Host to device, device to device and back, in stream order, and nothing beyond them is touched."""
    sent = np.arange(256, dtype=np.int32)
    driver.memset_d8_async(memory, 0xA5, 4096, stream)
    driver.memcpy_htod_async(memory + 1024, sent.ctypes.data, sent.nbytes, stream)
    driver.memcpy_dtod_async(memory + 2048, memory + 1024, sent.nbytes, stream)
    received = np.zeros(1024, np.int32)
    driver.memcpy_dtoh_async(received.ctypes.data, memory, received.nbytes, stream)
    driver.stream_synchronize(stream)
    canary = np.full(256, 0xA5A5A5A5, np.uint32).view(np.int32)
    np.testing.assert_array_equal(received, np.concatenate([canary, sent, sent, canary]))


def test_pinned_host_memory(driver: CudaDriver, stream: int, memory: int) -> None:
    """It is ordinary memory at the address that was given, and copies reach it."""
    address = driver.mem_host_alloc(64)
    try:
        pinned = np.frombuffer((ctypes.c_char * 64).from_address(address), np.uint8)
        pinned[:] = 1
        driver.memset_d8_async(memory, 9, 32, stream)
        driver.memcpy_dtoh_async(address, memory, 32, stream)
        driver.stream_synchronize(stream)
        assert pinned.tolist() == [9] * 32 + [1] * 32
    finally:
        driver.mem_host_free(address)


def test_an_address_tells_where_it_lies(driver: CudaDriver, memory: int) -> None:
    """Device memory, inside it too; pinned memory is not the device's; other memory is unknown."""
    assert driver.pointer_info(memory) == driver.pointer_info(memory + 100) == PointerInfo(0, True)
    address = driver.mem_host_alloc(64)
    info = driver.pointer_info(address)
    driver.mem_host_free(address)
    assert info is not None
    assert not info.is_device
    assert driver.pointer_info(np.zeros(16).ctypes.data) is None


def test_an_address_names_its_device(driver: CudaDriver) -> None:
    """On a machine with several."""
    if driver.device_count() < 2:
        pytest.skip("needs two devices")
    driver.ctx_push_current(driver.primary_ctx_retain(1))
    ptr = driver.mem_alloc(64)
    info = driver.pointer_info(ptr)
    driver.mem_free(ptr)
    driver.ctx_pop_current()
    driver.primary_ctx_release(1)
    assert info == PointerInfo(1, True)


def test_more_memory_than_there_is(driver: CudaDriver) -> None:
    """An error of its own type, with the size; the driver goes on."""
    with pytest.raises(OutOfMemoryError, match=f"{2**50} bytes were asked for"):
        driver.mem_alloc(2**50)
    driver.mem_free(driver.mem_alloc(64))


def test_events_order_and_time_work(driver: CudaDriver, stream: int, memory: int, module: int) -> None:
    """A query answers at once, a wait waits, and the time between two is that of the work."""
    start, end = driver.event_create(True), driver.event_create(True)
    other = driver.stream_create()
    driver.event_record(start, stream)
    launch(driver, module, "spin", stream, ctypes.c_uint64(memory), ctypes.c_longlong(50_000_000))
    driver.event_record(end, stream)
    driver.stream_wait_event(other, end)
    assert not driver.event_query(end)
    assert not driver.stream_query(other)
    driver.event_synchronize(end)
    assert driver.event_query(end)
    assert driver.event_elapsed_time(start, end) > 5
    driver.stream_synchronize(other)
    assert driver.stream_query(stream)
    untimed = driver.event_create(False)
    driver.event_record(untimed, stream)
    driver.event_synchronize(untimed)
    with pytest.raises(DriverError, match="cuEventElapsedTime"):
        driver.event_elapsed_time(start, untimed)
    for event in (start, end, untimed):
        driver.event_destroy(event)
    driver.stream_destroy(other)


def test_waiting_releases_the_gil(driver: CudaDriver, stream: int, memory: int, module: int) -> None:
    """Other threads run while one waits for the device."""
    ticks, done = [], threading.Event()

    def heartbeat() -> None:
        while not done.wait(0.005):
            ticks.append(1)

    thread = threading.Thread(target=heartbeat)
    launch(driver, module, "spin", stream, ctypes.c_uint64(memory), ctypes.c_longlong(300_000_000))
    thread.start()
    driver.stream_synchronize(stream)
    done.set()
    thread.join()
    assert len(ticks) >= 5


# Modules and launches.


def test_a_kernel_reads_its_arguments(driver: CudaDriver, stream: int, memory: int, module: int) -> None:
    """The array of pointers is read at the launch."""
    launch(driver, module, "add", stream, ctypes.c_uint64(memory), ctypes.c_int(5), threads=3)
    launch(driver, module, "add", stream, ctypes.c_uint64(memory), ctypes.c_int(-7), threads=2)
    assert read(driver, memory, 4, stream) == [-2, -2, 5, 0]


def test_a_kernel_describes_itself(driver: CudaDriver, module: int) -> None:
    """Registers, memory, threads, and offset and size of each parameter."""
    function = driver.module_get_function(module, "add")
    assert driver.func_attribute(function, "NUM_REGS") > 0
    assert driver.func_attribute(function, "SHARED_SIZE_BYTES") == 0
    assert driver.func_attribute(function, "MAX_THREADS_PER_BLOCK") == 1024
    if driver.driver_version() >= 12040:
        assert driver.func_param_info(function) == (ParamInfo(0, 8), ParamInfo(8, 4))


def test_an_unknown_entry_lists_the_others(driver: CudaDriver, module: int) -> None:
    """The way out of a misspelt or mangled name."""
    with pytest.raises(DriverError) as caught:
        driver.module_get_function(module, "_Z3addPii")
    assert caught.value.name == "CUDA_ERROR_NOT_FOUND"
    assert caught.value.call == "cuModuleGetFunction"
    if driver.driver_version() >= 12040:
        assert "the module has add, last_of_shared, spin" in str(caught.value)


@pytest.mark.parametrize(
    "image", [b"not an image\0", b".version 7.0\n.target sm_70\n.address_size 64\nnonsense;\n\0"], ids=["text", "ptx"]
)
def test_what_is_no_image_is_refused(driver: CudaDriver, image: bytes) -> None:
    """With the driver's code, and nothing loaded."""
    with pytest.raises(DriverError, match=r"cuModuleLoadDataEx failed: CUDA_ERROR_\w+"):
        driver.module_load(image)


def test_dynamic_shared_memory_is_opted_into(driver: CudaDriver, stream: int, memory: int, module: int) -> None:
    """Above 48 KiB a launch needs it, up to the device's limit it works, beyond it is refused."""
    function = driver.module_get_function(module, "last_of_shared")
    limit = driver.device_attribute(0, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")

    def use(nbytes: int) -> None:
        values = (ctypes.c_uint64(memory), ctypes.c_int(nbytes))
        launch(driver, module, "last_of_shared", stream, *values, shared_bytes=nbytes)

    with pytest.raises(DriverError, match=rf"cuLaunchKernel failed: .*{limit} shared bytes"):
        use(limit)
    driver.func_set_max_dynamic_shared(function, limit)
    use(limit)
    assert read(driver, memory, 1, stream) == [77]
    with pytest.raises(DriverError, match=f"{limit + 1} bytes of dynamic shared memory"):
        driver.func_set_max_dynamic_shared(function, limit + 1)


# Capture and graphs.


def test_work_is_recorded_and_replayed(driver: CudaDriver, stream: int, memory: int, module: int) -> None:
    """Nothing runs while it is recorded; each replay runs all of it."""
    # The driver loads a kernel at its first launch, which is not for a capture.
    launch(driver, module, "add", stream, ctypes.c_uint64(memory), ctypes.c_int(0))
    driver.stream_begin_capture(stream, CaptureMode.THREAD_LOCAL)
    assert driver.stream_capture_status(stream) is CaptureStatus.ACTIVE
    driver.memset_d8_async(memory + 64, 1, 64, stream)
    launch(driver, module, "add", stream, ctypes.c_uint64(memory), ctypes.c_int(3), threads=2)
    driver.memcpy_dtod_async(memory + 128, memory, 64, stream)
    graph = driver.stream_end_capture(stream)
    assert driver.stream_capture_status(stream) is CaptureStatus.NONE
    assert sorted(driver.graph_node_types(graph)) == ["KERNEL", "MEMCPY", "MEMSET"]
    assert read(driver, memory, 2, stream) == [0, 0]

    executable = driver.graph_instantiate(graph)
    driver.graph_destroy(graph)
    driver.graph_upload(executable, stream)
    for _ in range(3):
        driver.graph_launch(executable, stream)
    assert read(driver, memory, 2, stream) == [9, 9]
    assert read(driver, memory + 128, 2, stream) == [9, 9]
    driver.graph_exec_destroy(executable)


def test_an_empty_capture_is_a_graph_without_nodes(driver: CudaDriver, stream: int) -> None:
    """Which can be told from one that recorded something."""
    driver.stream_begin_capture(stream, CaptureMode.THREAD_LOCAL)
    graph = driver.stream_end_capture(stream)
    assert driver.graph_node_types(graph) == ()
    driver.graph_destroy(graph)


def test_what_spoils_a_capture_leaves_no_graph(driver: CudaDriver, stream: int, memory: int) -> None:
    """A wait on the capturing stream invalidates it; ending it raises, and the stream then works again."""
    driver.stream_begin_capture(stream, CaptureMode.THREAD_LOCAL)
    with pytest.raises(DriverError) as wait:
        driver.stream_synchronize(stream)
    assert wait.value.name == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert driver.stream_capture_status(stream) is CaptureStatus.INVALIDATED
    with pytest.raises(DriverError) as end:
        driver.stream_end_capture(stream)
    assert end.value.name == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    assert driver.stream_capture_status(stream) is CaptureStatus.NONE
    driver.memset_d8_async(memory, 1, 4, stream)
    assert read(driver, memory, 1, stream) == [0x01010101]


def test_a_relaxed_thread_may_allocate_in_a_capture(driver: CudaDriver, stream: int) -> None:
    """Exchanging the thread's mode returns the one before; the capture stays whole."""
    driver.stream_begin_capture(stream, CaptureMode.THREAD_LOCAL)
    before = driver.thread_exchange_capture_mode(CaptureMode.RELAXED)
    ptr = driver.mem_alloc(64)
    assert driver.thread_exchange_capture_mode(before) is CaptureMode.RELAXED
    assert driver.stream_capture_status(stream) is CaptureStatus.ACTIVE
    driver.graph_destroy(driver.stream_end_capture(stream))
    driver.mem_free(ptr)


def test_a_capture_ends_on_its_own_thread(driver: CudaDriver, stream: int) -> None:
    """Another thread is told so."""
    context = driver.ctx_get_current()
    names: list[str] = []

    def end() -> None:
        driver.ctx_push_current(context)
        try:
            driver.stream_end_capture(stream)
        except DriverError as error:
            names.append(error.name)
        driver.ctx_pop_current()

    driver.stream_begin_capture(stream, CaptureMode.THREAD_LOCAL)
    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    with suppress(DriverError):
        driver.graph_destroy(driver.stream_end_capture(stream))
    assert names == ["CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"]


def test_ending_what_was_not_begun_is_refused(driver: CudaDriver, stream: int) -> None:
    """And does no harm."""
    with pytest.raises(DriverError, match="cuStreamEndCapture"):
        driver.stream_end_capture(stream)
    assert driver.stream_capture_status(stream) is CaptureStatus.NONE


# Faults. Each loses its process, so each has one of its own.


def run(code: str, **environment: str) -> str:
    """What ``code`` prints in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("*(volatile int*)8 = 1;", {"CUDA_ERROR_ILLEGAL_ADDRESS"}),
        ("*(volatile int*)((char*)out + 1) = 1;", {"CUDA_ERROR_MISALIGNED_ADDRESS"}),
        ("__trap();", {"CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_ILLEGAL_INSTRUCTION"}),
    ],
    ids=["illegal address", "misaligned", "trap"],
)
def test_a_device_fault_is_one_and_stays(gpu: str, body: str, names: set[str]) -> None:
    """The wait that meets it raises a DeviceFaultError, and so does every call after it."""
    code = f"""
        import ctypes
        from nxrt_cuda.compile import NvrtcCompiler
        from nxrt_cuda.driver.cuda import CudaDriver
        from nxrt_cuda.errors import DeviceFaultError
        from nxrt_cuda.launch import KernelSpec
        driver = CudaDriver()
        driver.ctx_push_current(driver.primary_ctx_retain(0))
        capability = tuple(driver.device_attribute(0, "COMPUTE_CAPABILITY_" + name) for name in ("MAJOR", "MINOR"))
        source = 'extern "C" __global__ void fault(int* out) {{ {body} }}'
        spec = KernelSpec("fault.cu", "fault", (), 32, code=source)
        module = driver.module_load(NvrtcCompiler(capability).compile(spec).data)
        out = ctypes.c_uint64(driver.mem_alloc(64))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(out))
        stream = driver.stream_create()
        function = driver.module_get_function(module, "fault")
        driver.launch_kernel(function, (1, 1, 1), (1, 1, 1), 0, stream, ctypes.addressof(pointers))
        for call in (driver.stream_synchronize, driver.stream_synchronize):
            try:
                call(stream)
            except DeviceFaultError as error:
                print(error.name)
        """
    first, second = run(code).split()
    assert first == second
    assert first in names
