"""The CUDA driver's room where there is no GPU: it refuses clearly, and against a pretend driver it behaves.

The pretend driver is a small libcuda.so.1 built from ``stub_libcuda.c``. It stands behind the real
bindings, so what these tests see is what the bindings do with plain integers and with statuses.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., list[str]]


def _python(code: str, **environment: str) -> list[str]:
    """The lines that ``code`` prints in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-P", "-u", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return [line.rstrip() for line in result.stdout.splitlines()]


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs code against the pretend driver; ``driver`` is a CudaDriver there."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the pretend driver with")
    directory = tmp_path_factory.mktemp("libcuda")
    source = Path(__file__).with_name("stub_libcuda.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", directory / "libcuda.so.1", source], check=True
    )

    def run(code: str, *, status: str = "", missing: str = "") -> list[str]:
        prelude = """
            from nxrt_cuda.driver.base import CaptureMode
            from nxrt_cuda.driver.cuda import CudaDriver
            from nxrt_cuda.errors import *

            def failure(call, *arguments):
                try:
                    call(*arguments)
                except NxrtError as error:
                    print(type(error).__name__, getattr(error, "code", ""), error)

            driver = CudaDriver()
            """
        return _python(
            textwrap.dedent(prelude) + textwrap.dedent(code),
            LD_LIBRARY_PATH=str(directory),
            STUB_STATUS=status,
            STUB_MISSING=missing,
        )

    return run


def test_opening_without_a_device_fails_the_same_way_twice() -> None:
    """There is one clear error, a second attempt gives it again, and nothing hangs."""
    lines = _python(
        """
        from nxrt_cuda.driver.cuda import CudaDriver
        from nxrt_cuda.errors import NoDeviceError
        for _ in range(2):
            try:
                CudaDriver()
            except NoDeviceError as error:
                print(error.call, error.name, error)
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert lines[0].startswith("cuInit CUDA_ERROR_NO_DEVICE")
    assert 'open_runtime("host") runs without a GPU' in lines[0]


def test_a_missing_driver_library_is_named() -> None:
    """Where libcuda.so.1 itself is missing, the message says so and what to install."""
    lines = _python(
        """
        from cuda.bindings import driver
        def absent(*arguments):
            raise RuntimeError("not found in /some/where")
        driver.cuInit = absent
        from nxrt_cuda.driver.cuda import CudaDriver
        from nxrt_cuda.errors import NoDeviceError
        try:
            CudaDriver()
        except NoDeviceError as error:
            print(error)
        """
    )
    assert "libcuda.so.1 cannot be loaded (not found in /some/where)" in lines[0]
    assert "install the NVIDIA driver" in lines[0]


def test_missing_bindings_are_named() -> None:
    """Where cuda.bindings cannot be imported the error is a NoDeviceError too, with the package to install."""
    lines = _python(
        """
        import sys
        sys.modules["cuda.bindings"] = None
        from nxrt_cuda.driver.cuda import CudaDriver
        from nxrt_cuda.errors import NoDeviceError
        try:
            CudaDriver()
        except NoDeviceError as error:
            print(error)
        """
    )
    assert "pip install cuda-bindings" in lines[0]


def test_importing_the_driver_module_loads_no_cuda() -> None:
    """Only making a CudaDriver imports the bindings."""
    lines = _python("import nxrt_cuda.driver.cuda, sys; print([m for m in sys.modules if m.split('.')[0] == 'cuda'])")
    assert lines == ["[]"]


@pytest.mark.parametrize("code", [100, 34])
def test_no_device_and_the_stub_library_are_no_device(stub: Run, code: int) -> None:
    """CUDA_ERROR_NO_DEVICE, and the toolkit's link-time stub, are a NoDeviceError; nothing else is."""
    lines = _stub_init(stub, code)
    assert lines[0].startswith(f"NoDeviceError {code}")
    assert lines[0].endswith("""(open_runtime("host") runs without a GPU)""")


def test_a_driver_that_does_not_start_is_not_a_missing_one(stub: Run) -> None:
    """A broken driver must not look like a machine without one, or a runtime would fall back silently."""
    assert _stub_init(stub, 803)[0].startswith("DriverError 803 cuInit failed: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)")


def _stub_init(stub: Run, code: int) -> list[str]:
    lines = stub(f"import os; os.environ['STUB_STATUS'] = 'cuInit={code}'; failure(CudaDriver)")
    return [line for line in lines if not line.startswith("cu")]


def test_integers_reach_the_driver_unchanged(stub: Run) -> None:
    """Handles and addresses, 64 bits wide, cross the bindings as plain integers in both directions."""
    lines = stub(
        """
        print(driver.stream_create(), driver.event_create(True), driver.event_create(False), driver.mem_alloc(1 << 40))
        driver.launch_kernel(0x7f00000000f0, (2**31 - 1, 2, 3), (4, 5, 6), 7, 0x7f0000000010, 0x7ffc00000008)
        driver.memcpy_htod_async(0xfffffffffffff000, 0x7ffc00000008, 2**33, 0x7f0000000010)
        driver.memcpy_dtoh_async(0x7ffc00000008, 0xfffffffffffff000, 9, 0x7f0000000010)
        driver.memset_d8_async(0xfffffffffffff000, 255, 9, 0x7f0000000010)
        driver.func_set_max_dynamic_shared(0xf0, 100000)
        driver.graph_launch(0x7f0000000abc, 0x7f0000000010)
        driver.ready_launch_kernel(0x7f00000000f0, (2**31 - 1, 2, 3), (4, 5, 6), 7, 0x7f0000000010, 0x7ffc00000008)()
        driver.ready_graph_launch(0x7f0000000abc, 0x7f0000000010)()
        driver.tensor_map_replace_address(0x7f0000000040, 0xfffffffffffff000)
        print(driver.ctx_get_current(), driver.driver_version(), driver.device_name(0), driver.func_param_info(0xf0))
        """
    )
    assert lines[2:] == [
        "cuStreamCreate 1",
        "cuEventCreate 0",
        "cuEventCreate 2",
        "cuMemAlloc 1099511627776",
        f"{0x7F0000000010} {0xE0} {0xE0} {0xFFFFFFFFFFFFF000}",
        "cuLaunchKernel 0x7f00000000f0 (2147483647 2 3) (4 5 6) 7 0x7f0000000010 0x7ffc00000008 (nil)",
        "cuMemcpyHtoDAsync 0xfffffffffffff000 0x7ffc00000008 8589934592 0x7f0000000010",
        "cuMemcpyDtoHAsync 0x7ffc00000008 0xfffffffffffff000 9 0x7f0000000010",
        "cuMemsetD8Async 0xfffffffffffff000 255 9 0x7f0000000010",
        "cuFuncSetAttribute 0xf0 8 100000",
        "cuGraphLaunch 0x7f0000000abc 0x7f0000000010",
        "cuLaunchKernel 0x7f00000000f0 (2147483647 2 3) (4 5 6) 7 0x7f0000000010 0x7ffc00000008 (nil)",
        "cuGraphLaunch 0x7f0000000abc 0x7f0000000010",
        "cuTensorMapReplaceAddress 0x7f0000000040 0xfffffffffffff000",
        "cuCtxGetCurrent",
        "cuDeviceGetName 0",
        "192 13000 Stub GPU (ParamInfo(offset=0, size=8), ParamInfo(offset=8, size=4), ParamInfo(offset=16, size=8))",
    ]


def test_errors_are_typed_and_carry_the_drivers_words(stub: Run) -> None:
    """Each status becomes its class, with call, code, symbol and the driver's own description."""
    lines = stub(
        """
        failure(driver.mem_alloc, 4096)
        failure(driver.stream_synchronize, 1)
        failure(driver.memset_d8_async, 1, 2, 3, 4)
        failure(driver.graph_launch, 1, 2)
        failure(driver.ready_graph_launch(1, 2))
        failure(driver.ready_launch_kernel(1, (1, 2, 3), (4, 5, 6), 7, 8, 9))
        failure(driver.tensor_map_replace_address, 0x7f0000000040, 24)
        print(driver.stream_query(1))
        """,
        status="cuMemAlloc=2 cuStreamSynchronize=700 cuMemsetD8Async=1 cuGraphLaunch=719 cuStreamQuery=600 "
        "cuLaunchKernel=1 cuTensorMapReplaceAddress=1",
    )
    errors = [line for line in lines if not line.startswith("cu")]
    assert errors == [
        "OutOfMemoryError 2 cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2): the driver's own words "
        "(4096 bytes were asked for)",
        "DeviceFaultError 700 cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): the driver's own words",
        "DriverError 1 cuMemsetD8Async failed: CUDA_ERROR_INVALID_VALUE (1): the driver's own words",
        "DeviceFaultError 719 cuGraphLaunch failed: CUDA_ERROR_LAUNCH_FAILED (719): the driver's own words",
        "DeviceFaultError 719 cuGraphLaunch failed: CUDA_ERROR_LAUNCH_FAILED (719): the driver's own words",
        "DriverError 1 cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE (1): the driver's own words "
        "(grid (1, 2, 3), block (4, 5, 6), 7 shared bytes)",
        "DriverError 1 cuTensorMapReplaceAddress failed: CUDA_ERROR_INVALID_VALUE (1): the driver's own words "
        "(address 0x18)",
        "False",
    ]


def test_a_refused_module_carries_the_drivers_log(stub: Run) -> None:
    """What the driver's own assembler says of an image is in the error."""
    lines = stub("failure(driver.module_load, b'some ptx')", status="cuModuleLoadDataEx=218")
    assert "cuModuleLoadDataEx some ptx" in lines
    assert lines[-1].endswith("CUDA_ERROR_INVALID_PTX (218): the driver's own words (ptxas says why)")


def test_an_unknown_entry_lists_the_modules_kernels(stub: Run) -> None:
    """A mangled or misspelt name is answered with the names there are; an older driver cannot list them."""
    lookup = "failure(driver.module_get_function, 0xd0, 'alfa')"
    assert stub(lookup)[-1].endswith("""('alfa'; the module has alpha, beta; is it declared extern "C"?)""")
    old = stub(lookup, missing="cuModuleGetFunctionCount")[-1]
    assert "CUDA_ERROR_NOT_FOUND (500)" in old
    assert old.endswith("""('alfa'; is it declared extern "C"?)""")


def test_a_driver_without_parameter_info_says_none(stub: Run) -> None:
    """Drivers before 12.4 cannot describe parameters, which is no error."""
    assert stub("print(driver.func_param_info(0xf0))", missing="cuFuncGetParamInfo")[-1] == "None"


def test_capture_calls(stub: Run) -> None:
    """Modes, states and node types come back as the protocol's own; an invalidated capture leaves no graph."""
    lines = stub(
        """
        driver.stream_begin_capture(1, CaptureMode.THREAD_LOCAL)
        print(repr(driver.stream_capture_status(1)), repr(driver.thread_exchange_capture_mode(CaptureMode.RELAXED)))
        print(driver.graph_node_types(0xa0))
        failure(driver.stream_end_capture, 1)
        """,
        status="cuStreamEndCapture=901",
    )
    assert lines[2:] == [
        "cuStreamBeginCapture 0x1 1",
        "cuStreamIsCapturing 0x1",
        "cuThreadExchangeStreamCaptureMode 2",
        "<CaptureStatus.INVALIDATED: 2> <CaptureMode.GLOBAL: 0>",
        "('KERNEL', 'MEMCPY', 'MEMSET')",
        "cuStreamEndCapture 0x1",
        "DriverError 901 cuStreamEndCapture failed: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED (901): "
        "the driver's own words",
    ]


def test_nodes_and_their_parameters(stub: Run) -> None:
    """Every field of the bindings' structures is what the driver reads; a refused update says what differs."""
    lines = stub(
        """
        print(driver.stream_capture_dependencies(1), driver.graph_edges(0xa0))
        kernel = (0x7f00000000f0, (2**31 - 1, 2, 3), (4, 5, 6), 7, 0x7ffc00000008)
        copy, fill = (0xfffffffffffff000, 0xffffffffffff0000, 2**33, 0xc0), (0xfffffffffffff000, 255, 2**33, 0xc0)
        driver.graph_exec_kernel_node_set_params(0x7f0000000abc, 0x7f0000000def, *kernel)
        driver.graph_exec_memcpy_node_set_params(0x7f0000000abc, 0x7f0000000def, *copy)
        driver.graph_exec_memset_node_set_params(0x7f0000000abc, 0x7f0000000def, *fill)
        driver.graph_kernel_node_set_params(0x7f0000000def, *kernel)
        driver.graph_memcpy_node_set_params(0x7f0000000def, *copy)
        driver.graph_memset_node_set_params(0x7f0000000def, *fill)
        driver.mem_free_async(0xfffffffffffff000, 0x7f0000000010)
        failure(driver.graph_exec_update, 0x7f0000000abc, 0xa0)
        """,
        status="cuGraphExecUpdate=910",
    )
    target = "0x7f0000000abc 0x7f0000000def:"
    assert lines[2:] == [
        "cuStreamGetCaptureInfo 0x1",
        "(16, 18) ((16, 17), (17, 18))",
        f"cuGraphExecKernelNodeSetParams {target} 0x7f00000000f0 (2147483647 2 3) (4 5 6) 7 0x7ffc00000008 "
        "(nil) (nil) (nil)",
        f"cuGraphExecMemcpyNodeSetParams {target} 2 0xfffffffffffff000 from 2 0xffffffffffff0000, "
        "8589934592 x 1 x 1, 0xc0",
        f"cuGraphExecMemsetNodeSetParams {target} 0xfffffffffffff000 = 255, 1 x 8589934592 x 1, 0xc0",
        "cuGraphKernelNodeSetParams 0x7f0000000def: 0x7f00000000f0 0x7ffc00000008",
        "cuGraphMemcpyNodeSetParams 0x7f0000000def: 0xfffffffffffff000 0xffffffffffff0000 8589934592",
        "cuGraphMemsetNodeSetParams 0x7f0000000def: 0xfffffffffffff000 255 8589934592",
        "cuMemFreeAsync 0xfffffffffffff000 0x7f0000000010",
        "cuGraphExecUpdate 0x7f0000000abc 0xa0",
        "DriverError 910 cuGraphExecUpdate failed: CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE (910): "
        "the driver's own words (CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED)",
    ]


def test_pointer_info(stub: Run) -> None:
    """The device of an address is the driver's answer, and an address it does not know has none."""
    assert stub("print(driver.pointer_info(0x1000))")[-1] == "PointerInfo(device=3, is_device=True)"
    assert stub("print(driver.pointer_info(0x1000))", status="cuPointerGetAttribute=1")[-1] == "None"


def test_attributes_by_name(stub: Run) -> None:
    """An attribute is asked for by its name; one that does not exist is refused with the nearest names."""
    lines = stub(
        """
        print(driver.device_attribute(0, "MULTIPROCESSOR_COUNT"))
        failure(driver.device_attribute, 0, "MULTIPROCESOR_COUNT")
        failure(driver.func_attribute, 0, "REGISTERS_OF_THE_SHADER")
        """
    )
    assert lines[2:4] == ["cuDeviceGetAttribute 16 0", "132"]
    assert "CU_DEVICE_ATTRIBUTE_MULTIPROCESOR_COUNT'; did you mean MULTIPROCESSOR_COUNT" in lines[4]
    assert lines[5].endswith("the bindings know no CUfunction_attribute 'CU_FUNC_ATTRIBUTE_REGISTERS_OF_THE_SHADER')")


def test_waiting_calls_release_the_gil(stub: Run) -> None:
    """Other threads run while one waits for the device."""
    lines = stub(
        """
        import threading, time
        ticks, done = 0, threading.Event()

        def heartbeat():
            global ticks
            while not done.wait(0.01):
                ticks += 1

        thread = threading.Thread(target=heartbeat)
        thread.start()
        driver.stream_synchronize(1)  # 300 ms in the pretend driver
        done.set()
        thread.join()
        print(ticks)
        """
    )
    assert int(lines[-1]) >= 5
