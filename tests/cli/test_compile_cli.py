"""``compile``: it fills the runtimes' cache, and says what is wrong with its arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nxrt_cuda import ahead_of_time
from nxrt_cuda.compile import NvrtcCompiler
from nxrt_cuda.ops.dsa_index_select import DsaIndexSelectFactory
from nxrt_cuda.program_cache import ProgramCache
from tests.cli.commands import no_driver
from tests.cli.conftest import Call

_HALF = [
    spec for spec in DsaIndexSelectFactory.kernel_specs((8, 9)) if dict(spec.macros).get("ELEMENT") in ("__half", None)
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProgramCache:
    """The cache that the environment names, empty."""
    monkeypatch.setenv("NXRT_CUDA_CACHE_DIR", str(tmp_path / "programs"))
    return ProgramCache(tmp_path / "programs")


def test_a_cache_filled_without_a_gpu_serves_a_device(call: Call, cache: ProgramCache) -> None:
    """Status 0 and a count; a second run compiles nothing, and an Ada device's compiler finds them all."""
    arguments = ("compile", "--arch", "sm_89", "--op", "DsaIndexSelect", "--dtype", "float16")
    status, out, err = call(*arguments)
    assert (status, err) == (0, "")
    assert out.startswith(f"{len(_HALF)} programs for sm_89: {len(_HALF)} compiled in ")
    assert f"program cache: {cache.directory}" in out
    status, out, _ = call(*arguments, "--jobs", 1)
    assert f"0 compiled in 0.0 s, {len(_HALF)} in the cache already" in out
    compiler = NvrtcCompiler((8, 9), cache)
    assert all(compiler.compile(spec).cached for spec in _HALF)


def test_failures_are_all_listed_at_the_end_with_status_1(
    call: Call, cache: ProgramCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error line counts them; what does compile is kept."""
    good = _HALF[0]
    broken = [replace(good, macros=(*good.macros, ("BAD", "")), code=f"broken {i}") for i in range(2)]
    monkeypatch.setattr(ahead_of_time, "_specs_of", lambda ops, arch: [broken[0], good, broken[1]])
    status, out, err = call("compile", "--arch", "sm_80")
    assert (status, err) == (1, "nxrt_cuda compile: 2 of 3 programs are not in the cache\n")
    assert out.count("\nfailed: dsa_index_select_score [") == 2
    assert out.count("NVRTC_ERROR_COMPILATION") == 2
    assert NvrtcCompiler("sm_80", cache).is_cached(good)


def test_json_lists_every_program(call: Call, cache: ProgramCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_time, "_specs_of", lambda ops, arch: _HALF[:3])
    status, out, _ = call("compile", "--arch", "sm_80", "sm_89", "--json")
    report = json.loads(out)
    assert status == 0
    assert (report["compiled"], report["found"], report["failed"]) == (6, 0, 0)
    assert {program["arch"] for program in report["programs"]} == {"sm_80", "sm_89"}
    assert all(program["error"] is None for program in report["programs"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "sm_91"), "cannot compile for 'sm_91'; it knows sm_75, sm_80"),
        (("--arch", ""), "cannot compile for ''; it knows sm_75, sm_80"),
        (("--arch", "sm_80", "--op", "Softmax"), "there is no operator 'Softmax'; there are ai.onnx::Attention"),
        (("--arch", "sm_80", "--dtype", "float8"), "'float8' is not supported; use one of"),
        (("--arch", "sm_80", "--dtype", "int32"), "no kernel among these takes Int32"),
        (("--arch", "sm_80", "--jobs", "0"), "'0' is not a whole number from 1 on"),
    ],
)
def test_a_wrong_argument_is_status_2_and_names_the_choices(
    call: Call, cache: ProgramCache, arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = call("compile", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert cache.usage() == (0, 0)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("NXRT_CUDA_CACHE", "0", "there is no program cache to fill; unset NXRT_CUDA_CACHE"),
        ("NXRT_CUDA_CACHE_DIR", __file__, f"nothing can be kept in the program cache {__file__}: "),
    ],
)
def test_a_cache_that_keeps_nothing_is_status_2(
    call: Call, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    status, out, err = call("compile", "--arch", "sm_80")
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_without_a_gpu_it_asks_for_an_architecture(
    call: Call, cache: ProgramCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nxrt_cuda.driver.cuda.CudaDriver", no_driver)
    status, _, err = call("compile")
    assert status == 2
    assert "there is no device to compile for; name an architecture, such as sm_90a" in err
