"""Compiling ahead, without a GPU: what is compiled, that a runtime's compiler finds it, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import nxrt_cuda as nx
from nxrt_cuda import ahead_of_time
from nxrt_cuda.compile import NvrtcCompiler
from nxrt_cuda.compile_worker import CompileJob, CompileWorker
from nxrt_cuda.ops import attention, dsa_index_select
from nxrt_cuda.program_cache import ProgramCache
from tests.cli.commands import no_driver

STORE = nx.KernelSpec(
    source="store.cu",
    entry="store",
    params=(nx.Param("out", "ptr"),),
    threads=32,
    macros=(("ELEMENT", "float"),),
    code='extern "C" __global__ void store(ELEMENT* out) { out[threadIdx.x] = ELEMENT(1); }\n',
)
BROKEN = replace(STORE, macros=(("ELEMENT", "no_such_type"),))


@pytest.fixture
def cache(tmp_path: Path) -> ProgramCache:
    return ProgramCache(tmp_path / "programs")


@pytest.mark.parametrize(
    ("named", "compute_capability"), [("sm_90a", (9, 0)), ("sm_90", (9, 0)), ("sm_80", (8, 0)), ("sm_120", (12, 0))]
)
def test_a_device_s_compiler_finds_what_was_compiled_ahead(
    cache: ProgramCache, named: str, compute_capability: tuple[int, int]
) -> None:
    """Under the same key: the runtime's compiler, given the device's capability alone, compiles nothing."""
    report = nx.precompile(named, specs=[STORE], cache=cache)
    assert (report.compiled, report.found, report.failures) == (1, 0, ())
    image = NvrtcCompiler(compute_capability, cache).compile(STORE)
    assert image.cached
    assert image.arch == report.programs[0].arch
    assert image.data.startswith(b"\x7fELF")


def test_a_kernel_of_the_package_is_found_too(cache: ProgramCache) -> None:
    """With its headers, which are part of the key."""
    specs = [spec for spec in dsa_index_select.kernel_specs() if ("ELEMENT", "__half") in spec.macros][:1]
    nx.precompile("sm_90a", specs=specs, cache=cache)
    assert NvrtcCompiler((9, 0), cache).compile(specs[0]).cached


def test_what_is_in_the_cache_is_not_compiled_again(cache: ProgramCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler process is even started."""
    nx.precompile("sm_80", specs=[STORE], cache=cache)
    monkeypatch.setattr(ahead_of_time, "CompileWorker", None)
    report = nx.precompile(["sm_80"], specs=[STORE, STORE], cache=str(cache.directory))
    assert (report.compiled, report.found) == (0, 1)


def test_several_architectures_in_several_processes(cache: ProgramCache) -> None:
    """Each architecture once, however it is spelled; every program is announced as it is done."""
    announced: list[nx.Precompiled] = []
    archs = ["sm_80", "sm_90", "sm_90a", "compute_80"]
    report = nx.precompile(archs, specs=[STORE], cache=cache, jobs=2, on_done=announced.append)
    assert sorted(program.arch for program in report.programs) == ["compute_80", "sm_80", "sm_90a"]
    assert list(report.programs) == announced
    assert all(program.seconds > 0 for program in announced)
    assert cache.usage()[0] == 3


def test_failures_are_in_the_report_and_the_others_are_kept(cache: ProgramCache) -> None:
    """With the compiler's own words, for every program that failed."""
    other = replace(BROKEN, entry="other")
    report = nx.precompile("sm_80", specs=[BROKEN, STORE, other], cache=cache)
    assert report.compiled == 1
    assert {program.spec for program in report.failures} == {BROKEN, other}
    for program in report.failures:
        assert isinstance(program.error, nx.CompileError)
        assert "no_such_type" in program.error.log
    text = str(report)
    assert "3 programs for sm_80: 1 compiled in " in text
    assert "2 failed" in text
    assert "failed: other [ELEMENT=no_such_type] for sm_80" in text
    assert NvrtcCompiler("sm_80", cache).compile(STORE).cached


def test_the_operators_say_what_is_compiled(cache: ProgramCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, or those named, with or without a domain; and of those the dtypes asked for."""
    monkeypatch.setattr(NvrtcCompiler, "is_cached", lambda self, spec: True)

    def chosen(**options: object) -> set[nx.KernelSpec]:
        return {program.spec for program in nx.precompile("sm_90a", cache=cache, **options).programs}

    of_attention = set(attention.AttentionFactory.kernel_specs((9, 0)))
    of_dsa = set(dsa_index_select.DsaIndexSelectFactory.kernel_specs((9, 0)))
    assert of_attention < set(attention.kernel_specs())
    assert of_dsa < set(dsa_index_select.kernel_specs())
    assert chosen() >= of_attention | of_dsa
    assert chosen(ops=["Attention"]) == chosen(ops=["com.microsoft::GroupQueryAttention"]) == of_attention
    assert chosen(ops=["pkg.nxrt::DsaIndexSelect"]) == of_dsa
    halves = chosen(ops=["DsaIndexSelect"], dtypes=["float16"])
    assert halves < of_dsa
    assert {dict(spec.macros).get("ELEMENT") for spec in halves} <= {"__half", None}
    assert chosen(specs=[STORE], dtypes=[nx.float32]) == {STORE}


@pytest.mark.parametrize("arch", ["sm_12", "sm90", "sm_70", "host", ""])
def test_an_architecture_that_does_not_exist_is_refused_with_those_that_do(cache: ProgramCache, arch: str) -> None:
    with pytest.raises(nx.CompileError, match=r"cannot compile for .*; it knows sm_75, .*sm_90"):
        nx.precompile(["sm_80", arch], specs=[STORE], cache=cache)
    assert cache.usage() == (0, 0)


def test_unknown_operators_and_dtypes_are_refused(cache: ProgramCache) -> None:
    with pytest.raises(nx.UnsupportedError, match=r"there is no operator 'Softmax'; there are ai\.onnx::Attention"):
        nx.precompile("sm_80", ops=["Softmax"], cache=cache)
    with pytest.raises(nx.UnsupportedError, match="no kernel among these takes Int32"):
        nx.precompile("sm_80", ops=["Attention"], dtypes=[nx.int32], cache=cache)


def test_a_cache_that_keeps_nothing_is_an_error_and_not_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switched off, without a directory, or too small for a program."""
    monkeypatch.setenv("NXRT_CUDA_CACHE", "0")
    with pytest.raises(nx.RuntimeStateError, match="there is no program cache to fill"):
        nx.precompile("sm_80", specs=[STORE])
    (tmp_path / "file").write_text("")
    with pytest.raises(nx.RuntimeStateError, match="nothing can be kept in the program cache"):
        nx.precompile("sm_80", specs=[STORE], cache=tmp_path / "file" / "cache")
    report = nx.precompile("sm_80", specs=[STORE], cache=ProgramCache(tmp_path / "small", max_bytes=100))
    (failure,) = report.failures
    assert "which keeps 100 bytes" in str(failure.error)


def test_without_a_gpu_an_architecture_must_be_named(cache: ProgramCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nxrt_cuda.driver.cuda.CudaDriver", no_driver)
    with pytest.raises(
        nx.NoDeviceError, match="there is no device to compile for; name an architecture, such as sm_90a"
    ):
        nx.precompile(specs=[STORE], cache=cache)


def test_a_plain_script_may_call_it(tmp_path: Path) -> None:
    """Its main module is not run again by the compiler processes, so that it needs no guard."""
    script = tmp_path / "script.py"
    script.write_text(
        "import nxrt_cuda as nx\n"
        "print('once')\n"
        "spec = nx.KernelSpec('a.cu', 'f', (), 32, code='extern \"C\" __global__ void f() {}')\n"
        f"print(nx.precompile('sm_80', specs=[spec], cache={str(tmp_path / 'programs')!r}).compiled)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["once", "1"], "")


def test_a_compiler_that_dies_fails_its_program_alone(cache: ProgramCache) -> None:
    """The worker starts a new process for the next one; a killed worker starts none."""
    job = CompileJob(STORE, "sm_80", str(cache.directory), cache.max_bytes)
    worker = CompileWorker()
    try:
        worker.compile(job)
        assert worker._process is not None
        os.kill(worker._process.pid, signal.SIGSTOP)  # it answers no more, and is killed while it should
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(nx.CompileError, match=r"store \[ELEMENT=float\] for sm_80: the process .* status -9"):
            worker.compile(job)
        worker.compile(job)
        worker.kill()
        with pytest.raises(nx.CompileError, match="has ended"):
            worker.compile(job)
    finally:
        worker.close()
