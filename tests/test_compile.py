"""Compiling without a GPU: targets, options, headers, the log, and when the program cache answers."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from nxrt_cuda import compile as compile_module
from nxrt_cuda import headers as headers_module
from nxrt_cuda.compile import HostCompiler, Image, NvrtcCompiler, compile_spec
from nxrt_cuda.driver.host_image import HostImage
from nxrt_cuda.errors import CompileError, UnsupportedError
from nxrt_cuda.headers import find_cuda_headers, warn_of_other_major
from nxrt_cuda.launch import KernelSpec, Param
from nxrt_cuda.nvrtc import Nvrtc, load_nvrtc
from nxrt_cuda.program_cache import ProgramCache

STORE = KernelSpec(
    source="store.cu",
    entry="store",
    params=(Param("out", "ptr"), Param("scale", "f32")),
    threads=64,
    macros=(("ELEMENT", "float"), ("VALUE", "3")),
    code='extern "C" __global__ void store(ELEMENT* out, float scale) { out[threadIdx.x] = ELEMENT(VALUE * scale); }\n',
)


@pytest.fixture
def cache(tmp_path: Path) -> ProgramCache:
    return ProgramCache(tmp_path / "programs")


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel directory of this test's own."""
    directory = tmp_path / "kernels"
    (directory / "common").mkdir(parents=True)
    monkeypatch.setattr(compile_module, "kernel_directory", lambda: directory)
    return directory


# Targets.


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_a_cubin_for_the_named_architecture(arch: str) -> None:
    """Every supported architecture gets CUBIN, and ptxas's account of the kernel with it."""
    image = compile_spec(STORE, arch)
    assert (image.kind, image.arch, image.cached) == ("cubin", arch, False)
    assert image.data.startswith(b"\x7fELF")
    assert f"Compiling entry function 'store' for '{arch}'" in image.log
    assert "0 bytes spill stores" in image.log
    assert image.seconds > 0


@pytest.mark.parametrize(
    ("compute_capability", "arch"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 0), "sm_120")]
)
def test_a_device_gets_its_own_architecture(compute_capability: tuple[int, int], arch: str) -> None:
    """On Hopper with the suffix, without which its own instructions do not assemble."""
    assert NvrtcCompiler(compute_capability).compile(STORE).arch == arch


def test_hopper_instructions_assemble() -> None:
    """The suffix of sm_90a reaches ptxas."""
    fence = replace(STORE, code='extern "C" __global__ void store() { asm volatile("wgmma.fence.sync.aligned;"); }')
    assert NvrtcCompiler((9, 0)).compile(fence).kind == "cubin"
    with pytest.raises(CompileError, match="wgmma"):
        compile_spec(fence, "sm_90")


def test_a_device_newer_than_nvrtc_gets_ptx(caplog: pytest.LogCaptureFixture) -> None:
    """For the newest architecture that NVRTC knows, which the log says."""
    newest = load_nvrtc().archs[-1]
    with caplog.at_level(logging.INFO, "nxrt_cuda"):
        image = NvrtcCompiler((99, 0)).compile(STORE)
    assert (image.kind, image.arch) == ("ptx", f"compute_{newest}")
    assert f".target sm_{newest}".encode() in image.data
    assert image.data.endswith(b"\0")
    assert f"does not know compute capability 99.0: PTX for compute_{newest}" in caplog.text
    assert f"for compute_{newest} in " in caplog.text
    assert "(ptx)" in caplog.text


@pytest.mark.parametrize("target", [(7, 0), "sm_70", "sm_999", "sm_80a", "sm_90f", "hopper"])
def test_an_unknown_architecture_is_refused_before_compiling(target: str | tuple[int, int]) -> None:
    """The message names it, the NVRTC that was found, what that knows, and what to do."""
    with pytest.raises(CompileError) as caught:
        NvrtcCompiler(target).compile(STORE)
    name = target if isinstance(target, str) else "sm_70"
    message = str(caught.value)
    assert caught.value.arch == name
    assert f"cannot compile for {name!r}; it knows sm_75, sm_80" in message
    assert str(load_nvrtc()) in message
    assert load_nvrtc().path in message
    assert "nvidia-cuda-nvrtc" in message


@pytest.mark.parametrize(
    ("arch", "compute_capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (8, 0), False),
        ("sm_90a", (10, 0), False),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("compute_80", (9, 0), True),
        ("compute_90", (8, 9), False),
        ("compute_90a", (10, 0), False),
        ("sm_100f", (10, 3), True),
        ("sm_100f", (12, 0), False),
    ],
)
def test_code_that_the_device_cannot_run_is_refused(arch: str, compute_capability: tuple[int, int], runs: bool) -> None:
    """An architecture given by name is checked against the device before anything is compiled."""
    compiler = NvrtcCompiler(arch, compute_capability=compute_capability)
    if runs:
        assert compiler.arch == arch
    else:
        with pytest.raises(CompileError, match=f"code for {arch} does not run on a device of compute capability"):
            compiler.compile(STORE)


# Options.


def test_macros_and_threads_reach_the_kernel() -> None:
    """Values with spaces too."""
    code = """
    static_assert(THREADS == 96 && TILE == 5 + 2, "as declared");
    extern "C" __global__ void store(ELEMENT* out) { static_assert(sizeof(*out) == 8, ""); *out = TILE; }
    """
    macros = (("TILE", "(5 + 2)"), ("ELEMENT", "unsigned long long"))
    assert compile_spec(replace(STORE, code=code, macros=macros, threads=96), "sm_80").data


def test_contraction_is_the_specs_choice() -> None:
    """a * b + c is fused unless the spec forbids it."""
    code = 'extern "C" __global__ void store(float* x) { x[0] = x[1] * x[2] + x[3]; }'
    fused, separate = (compile_spec(replace(STORE, code=code, contract=c), "compute_80").data for c in (True, False))
    assert b"fma.rn.f32" in fused
    assert b"fma" not in separate
    assert b"mul.f32" in separate or b"mul.rn.f32" in separate


def test_parameters_lie_where_the_spec_says() -> None:
    """The layout that arguments are packed by is the one in the compiled code, for every kind."""
    kinds = ("ptr", "i32", "f32", "i64", "u32", "f64", "u64", "i32")
    spec = replace(
        STORE,
        params=tuple(Param(f"p{i}", kind) for i, kind in enumerate(kinds)),
        code='extern "C" __global__ void store(int* p0, int p1, float p2, long long p3, unsigned int p4, double p5, '
        "unsigned long long p6, int p7) { *p0 = p1 + p2 + p3 + p4 + p5 + p6 + p7; }",
    )
    assert [tuple(info) for info in spec.layout] == [
        (0, 8),
        (8, 4),
        (12, 4),
        (16, 8),
        (24, 4),
        (32, 8),
        (40, 8),
        (48, 4),
    ]
    ptx = compile_spec(spec, "compute_80").data.decode()
    widths = [line.split(".param ")[1].split()[0] for line in ptx.splitlines() if ".param ." in line]
    bits = [int("".join(c for c in width if c.isdigit())) for width in widths]
    assert bits[: len(kinds)] == [8 * info.size for info in spec.layout]


# The compiler's log.


def test_an_error_carries_the_whole_log(kernels: Path, cache: ProgramCache) -> None:
    """It begins with the path in kernels/ and the line; nothing is kept, and the program is destroyed."""
    (kernels / "broken.cu").write_text('#include "common/half.cuh"\n\nint x = nonsense;\n')
    (kernels / "common/half.cuh").write_text("static int y = gibberish;\n")
    spec = replace(STORE, source="broken.cu", code=None)
    with pytest.raises(CompileError) as caught:
        NvrtcCompiler("sm_90a", cache).compile(spec)
    error = caught.value
    assert "\nkernels/broken.cu(3): error" in str(error)
    assert "common/half.cuh(1): error" in error.log
    assert "store [ELEMENT=float VALUE=3] of kernels/broken.cu does not compile for sm_90a" in str(error)
    assert (error.source, error.arch) == ("kernels/broken.cu", "sm_90a")
    assert error.options == (
        *("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"),
        *("-DTHREADS=64", "-DELEMENT=float", "-DVALUE=3"),
    )
    assert not cache.directory.exists()


def test_every_program_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed compile too."""
    from cuda.bindings import nvrtc

    calls: list[str] = []
    for name in ("nvrtcCreateProgram", "nvrtcDestroyProgram"):
        original = getattr(nvrtc, name)
        monkeypatch.setattr(nvrtc, name, lambda *a, name=name, original=original: (calls.append(name), original(*a))[1])
    compile_spec(STORE, "sm_80")
    with pytest.raises(CompileError):
        compile_spec(replace(STORE, code="nonsense"), "sm_80")
    assert calls == ["nvrtcCreateProgram", "nvrtcDestroyProgram"] * 2


def test_reading_a_log_of_one_byte_leaves_the_interpreter_whole() -> None:
    """PTX has an empty log; the bindings' customary in-place buffer would overwrite the shared b" "."""
    assert compile_spec(STORE, "compute_80").log == ""
    assert list(b" ") == [32]


def test_a_missing_source_is_named(kernels: Path) -> None:
    """With the directory that it was looked for in."""
    for compiler in (NvrtcCompiler("sm_80"), HostCompiler()):
        with pytest.raises(CompileError, match=f"source of store .* cannot be read: .*{kernels}/absent.cu"):
            compiler.compile(replace(STORE, source="absent.cu", code=None))


def test_a_compile_is_logged(caplog: pytest.LogCaptureFixture, cache: ProgramCache) -> None:
    """Once, with the specialisation, the target and the time; a program from the cache is not."""
    with caplog.at_level(logging.INFO, "nxrt_cuda"):
        for _ in range(2):
            NvrtcCompiler("sm_90a", cache).compile(STORE)
    (record,) = caplog.records
    assert record.getMessage().startswith("compiled store [ELEMENT=float VALUE=3] for sm_90a in 0.")
    assert record.getMessage().endswith(" s (cubin)")


# The program cache.


def test_a_kept_program_equals_the_compiled_one(cache: ProgramCache) -> None:
    """Code and log alike."""
    compiled = NvrtcCompiler("sm_90a", cache).compile(STORE)
    kept = NvrtcCompiler("sm_90a", cache).compile(STORE)
    assert (compiled.cached, kept.cached) == (False, True)
    assert replace(kept, seconds=0, cached=False) == replace(compiled, seconds=0)


def is_cached(cache: ProgramCache, spec: KernelSpec, target: str = "sm_90a") -> bool:
    return NvrtcCompiler(target, cache).compile(spec).cached


@pytest.mark.parametrize(
    "change",
    [
        {"code": STORE.code + "\n"},
        {"macros": (("ELEMENT", "float"), ("VALUE", "4"))},
        {"macros": (("VALUE", "3"), ("ELEMENT", "float"))},
        {"macros": (*STORE.macros, ("MORE", "1"))},
        {"threads": 65},
        {"contract": False},
        {"source": "other.cu"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_the_program_changes_its_key(cache: ProgramCache, change: dict[str, object]) -> None:
    """Source, macros and their order, threads, contraction, and the name in messages."""
    assert not is_cached(cache, STORE)
    assert not is_cached(cache, replace(STORE, **change))
    assert is_cached(cache, STORE)


def test_architecture_compiler_build_and_schema_are_in_the_key(
    cache: ProgramCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suffix of an architecture counts, and so does a build of NVRTC with the same version."""
    assert not is_cached(cache, STORE)
    assert not is_cached(cache, STORE, "sm_90")
    assert not is_cached(cache, STORE, "compute_90")
    with monkeypatch.context() as patch:
        patch.setattr(load_nvrtc(), "build", load_nvrtc().build.replace(b"Build", b"Rebuild"))
        assert not is_cached(cache, STORE)
    monkeypatch.setattr(compile_module, "_SCHEMA", b"next")
    assert not is_cached(cache, STORE)


def test_the_build_names_more_than_the_version() -> None:
    """What stands for NVRTC in a key tells two builds of one release apart."""
    assert b"Build ID" in load_nvrtc().build


def test_editing_a_header_changes_the_key(kernels: Path, cache: ProgramCache) -> None:
    """One that is included directly or through another; a header that is not included does not matter."""
    (kernels / "store.cu").write_text(f'#include "common/first.cuh"\n{STORE.code}')
    (kernels / "common/first.cuh").write_text('#  include "common/second.cuh"\n')
    (kernels / "common/second.cuh").write_text("constexpr int kSecond = 2;\n")
    (kernels / "common/third.cuh").write_text("constexpr int kThird = 3;\n")
    spec = replace(STORE, code=None)
    assert not is_cached(cache, spec)
    (kernels / "common/third.cuh").write_text("constexpr int kThird = 4;\n")
    assert is_cached(cache, spec)
    (kernels / "common/second.cuh").write_text("constexpr int kSecond = 3;\n")
    assert not is_cached(cache, spec)
    (kernels / "common/first.cuh").write_text('#include "common/second.cuh"\n#include "common/third.cuh"\n')
    assert not is_cached(cache, spec)


def test_the_order_of_include_directories_matters(tmp_path: Path, cache: ProgramCache) -> None:
    """Two headers of one name: the first directory wins, and the other order is another program."""
    spec = replace(STORE, code=f"#include <chosen.h>\n{STORE.code.replace('VALUE', 'CHOSEN')}")
    directories = [tmp_path / "a", tmp_path / "b"]
    for value, directory in enumerate(directories):
        directory.mkdir()
        (directory / "chosen.h").write_text(f"#define CHOSEN {value + 5}\n")
    images = [
        NvrtcCompiler("compute_80", cache, include_directories=order).compile(spec)
        for order in (directories, directories[::-1])
    ]
    assert [image.cached for image in images] == [False, False]
    assert images[0].data != images[1].data


def test_equal_headers_elsewhere_share_the_program(tmp_path: Path, cache: ProgramCache) -> None:
    """Two environments with the same CUDA headers need one compile: bytes are in the key, paths are not."""
    spec = replace(STORE, code=f"#include <chosen.h>\n{STORE.code}")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chosen.h").write_text("#define CHOSEN 1\n")
    first, second = (NvrtcCompiler("sm_80", cache, include_directories=[tmp_path / name]) for name in ("a", "b"))
    assert not first.compile(spec).cached
    assert second.compile(spec).cached


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-100], lambda data: data[:-1] + b"\x55"])
def test_a_damaged_entry_is_compiled_again(cache: ProgramCache, damage: object) -> None:
    """And counted; the code is the right one."""
    compiled = NvrtcCompiler("sm_90a", cache).compile(STORE)
    (path,) = cache.directory.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    compiler = NvrtcCompiler("sm_90a", cache)
    again = compiler.compile(STORE)
    assert not again.cached
    assert again.data == compiled.data
    assert compiler.damaged_entries == 1
    assert is_cached(cache, STORE)


def compile_in_worker(directory: str) -> tuple[bytes, int]:
    compiler = NvrtcCompiler("sm_90a", ProgramCache(directory))
    return compiler.compile(STORE).data, compiler.damaged_entries


def test_processes_race_on_a_cold_key(cache: ProgramCache) -> None:
    """Twelve at once: no error, no damaged entry, the same bytes for all, one entry at the end."""
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = set(pool.map(compile_in_worker, [str(cache.directory)] * 12))
    ((data, damaged),) = results
    assert data == compile_spec(STORE, "sm_90a").data
    assert damaged == 0
    assert len(list(cache.directory.iterdir())) == 1


def test_compile_spec_serves_a_process_pool() -> None:
    """It, what it takes and what it gives can be pickled."""
    spec, function, image = pickle.loads(pickle.dumps((STORE, compile_spec, Image(b"code", "cubin", "sm_80", "log"))))
    assert function(spec, "sm_80").data == compile_spec(STORE, "sm_80").data
    assert image == Image(b"code", "cubin", "sm_80", "log")


def test_a_worker_can_raise_what_went_wrong() -> None:
    """An error keeps its type, message and attributes on its way out of another process."""
    with pytest.raises(CompileError) as caught:
        compile_spec(replace(STORE, code="nonsense"), "sm_80")
    error = pickle.loads(pickle.dumps(caught.value))
    assert type(error) is CompileError
    assert str(error) == str(caught.value)
    assert (error.log, error.options, error.arch) == (caught.value.log, caught.value.options, "sm_80")


def test_compiling_touches_no_driver() -> None:
    """libcuda is not loaded, nor cuda.core, whose objects would reach for it."""
    code = """
import sys
from nxrt_cuda.compile import NvrtcCompiler
from nxrt_cuda.launch import KernelSpec
spec = KernelSpec("x", "f", (), 32, code='#include <cuda_fp16.h>\\nextern "C" __global__ void f() {}')
assert NvrtcCompiler("sm_90a").compile(spec).kind == "cubin"
assert "cuda.core" not in sys.modules
assert "libcuda." not in open("/proc/self/maps").read()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-P", "-c", code], check=True, env=environment, timeout=60)


def test_compiling_releases_the_gil() -> None:
    """Other threads run while NVRTC works."""
    slow = replace(STORE, code='#include <mma.h>\nextern "C" __global__ void store(float* out) { *out = 1; }')
    ticks, done = [], threading.Event()

    def heartbeat() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=heartbeat)
    thread.start()
    try:
        for _ in range(5):
            compile_spec(slow, "sm_90a")
    finally:
        done.set()
        thread.join()
    # NVRTC is inside one call for most of these compiles, which take 40 ms each or more.
    assert len(ticks) >= 20


# Headers.


def test_kernel_headers_come_from_the_package(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernels/ folder in the working directory does not step in between."""
    (kernels / "store.cu").write_text(f'#include "common/value.cuh"\n{STORE.code}')
    (kernels / "common/value.cuh").write_text("constexpr int kValue = 1;\n")
    decoy = tmp_path / "elsewhere/kernels/common"
    decoy.mkdir(parents=True)
    (decoy / "value.cuh").write_text("#error the wrong file\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert compile_spec(replace(STORE, code=None), "sm_80").data


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if cuda.pathfinder found no headers; CUDA_HOME and CUDA_PATH are not set."""
    monkeypatch.setattr(headers_module, "_pathfinder_directories", lambda: ())
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    headers_module._find_cuda_headers.cache_clear()
    yield monkeypatch
    headers_module._find_cuda_headers.cache_clear()


def toolkit(root: Path, version: int = 13000) -> Path:
    include = root / "include"
    for header in ("cuda_fp16.h", "crt/host_defines.h", "nv/target"):
        (include / header).parent.mkdir(parents=True, exist_ok=True)
        (include / header).write_text("")
    (include / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    return include


def test_the_wheels_headers_serve_both_gates() -> None:
    """With the nvrtc extra installed, as in CI, nothing is missing."""
    NvrtcCompiler("sm_90a").require_half_headers("an op")
    NvrtcCompiler("sm_90a").require_tensor_core_headers("an op")
    HostCompiler().require_half_headers("an op")
    HostCompiler().require_tensor_core_headers("an op")


@pytest.mark.parametrize(("tensor_core", "header"), [(False, "cuda_bf16.h"), (True, "mma.h")])
def test_missing_headers_are_named_with_the_places(
    no_wheel: pytest.MonkeyPatch, tmp_path: Path, tensor_core: bool, header: str
) -> None:
    """The op, the headers, every place looked at, and the wheel to install."""
    no_wheel.setenv("CUDA_HOME", str(tmp_path))
    compiler = NvrtcCompiler("sm_90a", include_directories=["/my/headers"])
    gate = compiler.require_tensor_core_headers if tensor_core else compiler.require_half_headers
    with pytest.raises(UnsupportedError) as caught:
        gate("flash_attention_f16")
    message = str(caught.value)
    assert message.startswith("flash_attention_f16 needs the CUDA headers cuda_fp16.h, cuda_bf16.h")
    assert header in message
    for place in (
        "include_directories /my/headers",
        "cuda.pathfinder: nothing",
        f"CUDA_HOME: no cuda_fp16.h, crt/host_defines.h, nv/target in {tmp_path}/include",
        "CUDA_PATH (not set): nothing",
        'pip install "nxrt_cuda[nvrtc]"',
    ):
        assert place in message


def test_a_compile_without_headers_says_where_they_were_looked_for(no_wheel: pytest.MonkeyPatch) -> None:
    """The missing header is in the log, the places are in the message."""
    spec = replace(STORE, code=f"#include <cuda_fp16.h>\n{STORE.code}")
    with pytest.raises(CompileError, match=r"looked for at cuda\.pathfinder: nothing; CUDA_HOME \(not set\)") as caught:
        compile_spec(spec, "sm_80")
    assert "cuda_fp16.h" in caught.value.log


def test_headers_are_searched_in_the_documented_order(no_wheel: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The caller's, pathfinder's, CUDA_HOME, CUDA_PATH; only one toolkit is ever used, and it must be whole."""
    path, home, wheel, mine = (toolkit(tmp_path / name) for name in ("path", "home", "wheel", "mine"))
    partial = tmp_path / "partial/include"
    partial.mkdir(parents=True)
    (partial / "cuda_fp16.h").write_text("")
    no_wheel.setenv("CUDA_PATH", str(path.parent))
    no_wheel.setenv("CUDA_HOME", str(partial.parent))
    assert find_cuda_headers().directories == (str(path), str(path / "cccl"))
    no_wheel.setenv("CUDA_HOME", str(home.parent))
    assert find_cuda_headers().directories == (str(home), str(home / "cccl"))
    no_wheel.setattr(headers_module, "_pathfinder_directories", lambda: (str(wheel),))
    headers_module._find_cuda_headers.cache_clear()
    assert find_cuda_headers().directories == (str(wheel),)
    assert find_cuda_headers([tmp_path]).directories == (str(tmp_path), str(wheel))
    assert find_cuda_headers([mine]).directories == (str(mine),)


def test_headers_of_another_major_version_warn_once(
    no_wheel: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiles go on, and the log says what does not match."""
    no_wheel.setenv("CUDA_HOME", str(toolkit(tmp_path, 12040).parent))
    for _ in range(2):
        warn_of_other_major(find_cuda_headers(), 13)
    (record,) = caplog.records
    assert "of CUDA 12 and NVRTC is of CUDA 13" in record.getMessage()
    warn_of_other_major(find_cuda_headers(), 12)
    assert len(caplog.records) == 1


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel, and what the search for the library found."""
    from cuda import pathfinder

    def absent(name: str) -> None:
        raise RuntimeError(f"no lib{name} here")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", absent)
    with pytest.raises(CompileError, match=r'no libnvrtc here.*pip install "nxrt_cuda\[nvrtc\]"'):
        Nvrtc()


# The host.


def test_the_host_image_is_the_spec() -> None:
    """What the host driver needs to run an entry in Python, and the same fields as a real image."""
    image = HostCompiler().compile(STORE)
    assert (image.kind, image.arch, image.cached) == ("host", "host", False)
    assert HostImage.decode(image.data) == HostImage(
        source="store.cu",
        entry="store",
        params=(("out", "ptr"), ("scale", "f32")),
        macros=(("ELEMENT", "float"), ("VALUE", "3")),
        threads=64,
    )
