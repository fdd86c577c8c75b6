"""``doctor``: what it says of machines that have, and have not, what a GPU needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import nxrt_cuda as nx
import nxrt_cuda.compile
from nxrt_cuda.cli import doctor
from nxrt_cuda.headers import CudaHeaders
from nxrt_cuda.nvrtc import load_nvrtc
from nxrt_cuda.program_cache import ProgramCache
from tests.cli.commands import ROOT, no_driver, process
from tests.cli.conftest import Call


class Gpu:
    """As much of a driver as the doctor asks: one device."""

    version = 13000

    def driver_version(self) -> int:
        return self.version

    def device_count(self) -> int:
        return 1

    def device_name(self, device: int) -> str:
        return "NVIDIA Test"

    def device_attribute(self, device: int, attribute: str) -> int:
        return {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132}[attribute]

    def primary_ctx_retain(self, device: int) -> int:
        return 1

    def primary_ctx_release(self, device: int) -> None: ...
    def ctx_push_current(self, context: int) -> None: ...
    def ctx_pop_current(self) -> int:
        return 1

    def mem_get_info(self) -> tuple[int, int]:
        return 130 << 30, 140 << 30


class OldGpu(Gpu):
    version = 12040


class BusyGpu(Gpu):
    def primary_ctx_retain(self, device: int) -> int:
        raise nx.DriverError("cuDevicePrimaryCtxRetain", 46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "busy or unavailable")


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Gpu]], None]:
    """Lets the doctor find a driver of this kind."""
    return lambda kind: monkeypatch.setattr(doctor, "CudaDriver", kind)


@pytest.fixture
def nvrtc() -> None:
    """Skips where there is no compiler."""
    try:
        load_nvrtc()
    except nx.CompileError as error:
        pytest.skip(str(error))


def without_nvrtc() -> None:
    raise nx.CompileError("NVRTC cannot be loaded (no wheel)", source="NVRTC", arch="")


def test_doctor_names_what_will_run() -> None:
    """In a process of its own it succeeds, and agrees with the device that a runtime opens on."""
    done = process("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    with nx.open_runtime() as rt:
        assert report["runs_on"] == rt.device
    assert report["nxrt_cuda"] == nx.__version__
    assert report["packages"]["numpy"] == np.__version__
    assert Path(report["host_driver"]["kernels"]).samefile(ROOT / "kernels")


def test_doctor_without_a_driver_says_host_driver_and_what_to_install(
    call: Call, with_gpu: Callable[..., None]
) -> None:
    """No GPU is no failure: the host driver runs, and the driver's line says how to get one."""
    with_gpu(no_driver)
    status, out, err = call("doctor")
    assert (status, err) == (0, "")
    assert "this machine: host driver (kernels run on the CPU, in NumPy)\n" in out
    assert "driver         none: the driver library cannot be loaded\n" in out
    assert "driver: to use a GPU, install NVIDIA's driver, release 580 or newer" in out


@pytest.mark.usefixtures("nvrtc")
def test_doctor_with_a_gpu_and_a_compiler_says_cuda(call: Call, with_gpu: Callable[..., None]) -> None:
    """Name, capability and memory of the device, a trial compile for it, and nothing missing."""
    with_gpu(Gpu)
    status, out, _ = call("doctor")
    assert status == 0
    assert "this machine: cuda:0\n" in out
    assert "cuda:0: NVIDIA Test, compute capability 9.0, 132 multiprocessors, 130 GiB of 140 GiB memory free" in out
    assert "for sm_90a in" in out
    assert "missing:" not in out


def test_doctor_with_a_gpu_and_no_compiler_gives_the_command(
    call: Call, with_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that nothing can be compiled for does not run kernels; the host driver does."""
    with_gpu(Gpu)
    monkeypatch.setattr(doctor, "load_nvrtc", without_nvrtc)
    monkeypatch.setattr(nxrt_cuda.compile, "load_nvrtc", without_nvrtc)
    status, out, _ = call("doctor")
    assert status == 0
    assert "this machine: host driver" in out
    assert 'NVRTC, trial compile: pip install "nxrt_cuda[nvrtc]"' in out


@pytest.mark.usefixtures("nvrtc")
def test_doctor_names_missing_headers_and_where_it_looked(
    call: Call, with_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers that the kernels include and that are not found are named, with the places and the command."""
    with_gpu(Gpu)
    empty = CudaHeaders((), ("cuda.pathfinder: nothing", "CUDA_HOME (not set): nothing"))
    monkeypatch.setattr(nxrt_cuda.compile, "find_cuda_headers", lambda _: empty)
    status, out, _ = call("doctor")
    assert status == 0
    assert "this machine: host driver" in out
    assert "cuda_fp16.h" in out
    assert "CUDA_HOME (not set): nothing" in " ".join(out.split())
    assert 'headers, trial compile: pip install "nxrt_cuda[nvrtc]"' in out


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OldGpu, "driver: the driver is of CUDA 12.4 and CUDA 13 is needed"),
        (BusyGpu, "devices: cuda:0 cannot be opened: cuDevicePrimaryCtxRetain failed: CUDA_ERROR_DEVICE_UNAVAILABLE"),
    ],
)
def test_doctor_with_a_gpu_that_cannot_be_used_says_why(
    call: Call, with_gpu: Callable[..., None], kind: type[Gpu], message: str
) -> None:
    """An old driver or a device that cannot be opened leaves the host driver."""
    with_gpu(kind)
    status, out, _ = call("doctor")
    assert status == 0
    assert "this machine: host driver" in out
    assert message in out


def test_doctor_fails_where_nothing_can_run(
    call: Call,
    with_gpu: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Without the kernel sources not even the host driver runs: status 1, and how to repair it."""
    with_gpu(no_driver)
    for module in (doctor, nxrt_cuda.compile):
        monkeypatch.setattr(module, "kernel_directory", lambda: tmp_path)
    status, out, _ = call("doctor")
    assert status == 1
    assert "this machine: nothing can run" in out
    assert "host driver: reinstall the package in its checkout: pip install --force-reinstall ." in out


@pytest.mark.parametrize("kind", [Gpu, no_driver])
def test_doctor_names_a_variable_that_keeps_every_runtime_from_opening(
    call: Call, with_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, kind: Callable[[], Gpu]
) -> None:
    """And does not advise to install anything anew."""
    with_gpu(kind)
    monkeypatch.setenv("NXRT_CUDA_POOL_BYTES", "abc")
    status, out, _ = call("doctor")
    assert status == 1
    assert "this machine: nothing can run" in out
    assert "NXRT_CUDA_POOL_BYTES must be a whole number of bytes >= 0, got 'abc'" in " ".join(out.split())
    assert "memory pool: unset NXRT_CUDA_POOL_BYTES" in out
    assert "reinstall" not in out


def test_doctor_reports_the_program_cache(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where it is, what it holds, whether it can be written; that it is off, where it is."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("NXRT_CUDA_CACHE_DIR", str(directory))
    monkeypatch.setenv("NXRT_CUDA_CACHE_BYTES", str(1 << 20))
    ProgramCache(directory).put("a" * 64, bytes(1000))
    _, out, _ = call("doctor")
    assert f"{directory}: 1 entries, 1.0 KiB of 1.0 MiB, writable" in " ".join(out.split())

    monkeypatch.setenv("NXRT_CUDA_CACHE_DIR", str(Path(__file__)))
    status, out, _ = call("doctor")
    assert status == 0
    assert "program cache: export NXRT_CUDA_CACHE_DIR=" in out

    monkeypatch.setenv("NXRT_CUDA_CACHE", "0")
    _, out, _ = call("doctor")
    assert "program cache  off: every process compiles anew" in out
