"""Loading on a GPU: what is declared is what was compiled, arguments arrive, and limits are the device's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.compile import NvrtcCompiler
from nxrt_cuda.driver.cuda import CudaDriver
from nxrt_cuda.modules import ModuleCache
from nxrt_cuda.nvrtc import load_nvrtc
from tests.test_kernel_sources import SPECS

EVERY_KIND = (
    ("out", "ptr"),
    ("i32", "i32"),
    ("f32", "f32"),
    ("i64", "i64"),
    ("u32", "u32"),
    ("f64", "f64"),
    ("u64", "u64"),
    ("last", "i32"),
)
STORE_EVERY_KIND = """
extern "C" __global__ void store_every_kind(
    double* out, int i32, float f32, long long i64, unsigned int u32, double f64, unsigned long long u64, int last) {
    out[0] = i32;
    out[1] = f32;
    out[2] = i64;
    out[3] = u32;
    out[4] = f64;
    out[5] = u64;
    out[6] = last;
}
"""
EVERY_KIND_SPEC = nx.KernelSpec(
    "kinds.cu", "store_every_kind", tuple(nx.Param(*param) for param in EVERY_KIND), 32, code=STORE_EVERY_KIND
)


def test_a_kernel_is_compiled_for_this_device_and_loaded(rt: nx.CudaRuntime) -> None:
    """As CUBIN, with its resources known, found again without a compile, and counted."""
    before = rt.stats()
    code = f'extern "C" __global__ void unique(int* out) {{ *out = {np.random.default_rng().integers(2**31)}; }}'
    function = rt.nvrtc_function("unique.cu", code, "unique", [("out", "ptr")])
    assert rt.nvrtc_function("unique.cu", code, "unique", [("out", "ptr")]) is function
    assert function.module.kind == "cubin"
    assert function.num_regs > 0
    assert (function.static_shared_bytes, function.local_bytes, function.max_threads) == (0, 0, 1024)
    made = rt.stats().since(before)
    assert (made.modules_compiled, made.program_cache_hits) == (1, 0)
    assert made.compile_seconds > 0


def test_every_kind_of_argument_arrives(rt: nx.CudaRuntime) -> None:
    """The last value after all the alignment gaps, and the extremes of each width."""
    function = rt.nvrtc_function("kinds.cu", STORE_EVERY_KIND, "store_every_kind", EVERY_KIND)
    out = rt.zeros((8,), nx.float64)
    values = (-(2**31), 0.25, -(2**52) - 1, 2**32 - 1, -1e300, 2**53 - 1, 12345)
    rt.launch(rt.prepare(function, nx.LaunchConfig((1, 1, 1), (1, 1, 1)), out, *values))
    assert out.numpy().tolist() == [*values, 0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (EVERY_KIND[:-1], "declared with 7 parameters .* compiled with 8"),
        (
            (*EVERY_KIND[:3], ("i64", "i32"), *EVERY_KIND[4:]),
            "parameter 'i64' is declared as i32, 4 bytes at offset 16, and compiled as 8 bytes at offset 16",
        ),
    ],
)
def test_a_false_declaration_is_found_when_loading(
    rt: nx.CudaRuntime, params: tuple[tuple[str, str], ...], message: str
) -> None:
    """By the driver's own account of the parameters, from 12.4 on."""
    if CudaDriver().driver_version() < 12040:
        pytest.skip("the driver cannot describe parameters")
    with pytest.raises(nx.LaunchError, match=message):
        rt.nvrtc_function("kinds.cu", STORE_EVERY_KIND, "store_every_kind", params)


def test_a_missing_entry_lists_what_there_is(rt: nx.CudaRuntime) -> None:
    """The module is unloaded again; the runtime goes on."""
    with pytest.raises(nx.DriverError, match=r"CUDA_ERROR_NOT_FOUND.*store_everything"):
        rt.nvrtc_function("kinds.cu", STORE_EVERY_KIND, "store_everything", EVERY_KIND)
    assert rt.nvrtc_function("kinds.cu", STORE_EVERY_KIND, "store_every_kind", EVERY_KIND)


def test_every_operator_kernel_loads_as_declared(rt: nx.CudaRuntime) -> None:
    """Each specialisation worth compiling: its parameters, no local memory, and a block that can be resident."""
    for spec in SPECS:
        function = rt.function(spec)
        assert function.local_bytes == 0, spec.label
        assert spec.threads <= function.max_threads, spec.label
        info = function.module.driver.func_param_info(function.handle) or spec.layout
        assert [param.size for param in info] == [param.size for param in spec.layout], spec.label
        if all(param.kind != "tensor_map" for param in spec.params):  # those lie where the compiler puts them
            assert info == spec.layout, spec.label


def test_eight_threads_load_one_kernel_once(rt: nx.CudaRuntime) -> None:
    """From threads that have no context of their own."""
    code = f'extern "C" __global__ void raced(int* out) {{ *out = {np.random.default_rng().integers(2**31)}; }}'
    before = rt.stats()
    barrier = threading.Barrier(8)

    def load() -> object:
        barrier.wait(10)
        return rt.nvrtc_function("raced.cu", code, "raced", [("out", "ptr")])

    with ThreadPoolExecutor(8) as pool:
        functions = {future.result(60) for future in [pool.submit(load) for _ in range(8)]}
    assert len(functions) == 1
    assert rt.stats().since(before).modules_compiled == 1


def test_dynamic_shared_memory_up_to_the_devices_limit(rt: nx.CudaRuntime) -> None:
    """Beside a kernel's static memory; a byte more is refused before the launch, with the numbers."""
    code = """
    extern "C" __global__ void use_shared(int* out, int bytes) {
        __shared__ volatile int fixed[256];  // else the compiler keeps its one value in a register
        extern __shared__ char scratch[];
        fixed[255] = 2;
        scratch[bytes - 1] = 40;
        *out = fixed[255] + scratch[bytes - 1];
    }
    """
    function = rt.nvrtc_function("shared.cu", code, "use_shared", [("out", "ptr"), ("bytes", "i32")])
    assert function.static_shared_bytes == 1024
    most = rt.capabilities.shared_memory_per_block_optin - 1024
    out = rt.zeros((1,), nx.int32)
    for nbytes in (48 * 1024, most, 1024):
        rt.fill_zero(out)
        rt.launch(rt.prepare(function, nx.LaunchConfig((1, 1, 1), (1, 1, 1), nbytes), out, nbytes))
        assert out.numpy().tolist() == [42]
    with pytest.raises(nx.LaunchError, match=f"{most + 1} bytes of dynamic shared memory beside 1024 static ones"):
        rt.prepare(function, nx.LaunchConfig((1, 1, 1), (1, 1, 1), most + 1), out, most + 1)


@pytest.fixture
def driver(rt: nx.CudaRuntime) -> Iterator[CudaDriver]:
    """A driver with the runtime's context current, for a module cache beside the runtime's own."""
    driver = CudaDriver()
    driver.ctx_push_current(rt.context)
    yield driver
    driver.ctx_pop_current()


def test_ptx_loads_unless_the_driver_is_older(driver: CudaDriver) -> None:
    """The fallback for devices newer than NVRTC; a driver that refuses it is told from one that cannot run it."""
    major, minor = load_nvrtc().version
    modules = ModuleCache(driver, NvrtcCompiler("compute_80"))
    if driver.driver_version() < 1000 * major + 10 * minor:
        with pytest.raises(nx.DriverError, match=f"ptx of store_every_kind for compute_80, made by NVRTC {major}"):
            modules.load(EVERY_KIND_SPEC)
    else:
        assert modules.load(EVERY_KIND_SPEC).module.kind == "ptx"
        assert modules.stats().ptx_images == 1
    modules.unload_all()


def test_code_for_another_architecture_is_refused_by_the_driver(rt: nx.CudaRuntime, driver: CudaDriver) -> None:
    """The message names what it was made for."""
    other = "sm_80" if rt.capabilities.compute_capability[0] == 12 else "sm_120"
    with pytest.raises(nx.DriverError, match=f"cubin of store_every_kind for {other}, made by NVRTC"):
        ModuleCache(driver, NvrtcCompiler(other)).load(EVERY_KIND_SPEC)


def test_a_launch_of_an_unloaded_kernel_is_refused(rt: nx.CudaRuntime, driver: CudaDriver) -> None:
    """Its handle is gone, so that the driver refuses it rather than run what lies there now."""
    modules = ModuleCache(driver, NvrtcCompiler(rt.capabilities.compute_capability))
    function = modules.load(EVERY_KIND_SPEC)
    modules.unload_all()
    with pytest.raises(nx.DriverError, match="cuLaunchKernel"):
        driver.launch_kernel(function.handle, (1, 1, 1), (1, 1, 1), 0, rt.stream, 0)
