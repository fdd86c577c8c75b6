"""Every kernel as it will be launched: its signature in the source, and what it costs once compiled.

Each operator module under ``nxrt_cuda.ops`` lists the specialisations worth compiling in its
``kernel_specs()``. All of them are compiled here for every supported architecture, without a GPU.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest

from nxrt_cuda import ops
from nxrt_cuda.compile import Image, compile_spec
from nxrt_cuda.launch import KernelSpec
from nxrt_cuda.resources import kernel_directory

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")

MODULES = [importlib.import_module(f"{ops.__name__}.{module.name}") for module in pkgutil.iter_modules(ops.__path__)]
SPECS = sorted(
    {spec for module in MODULES if hasattr(module, "kernel_specs") for spec in module.kernel_specs()},
    key=lambda spec: spec.label,
)

_KINDS = {
    "int": "i32",
    "unsigned int": "u32",
    "long long": "i64",
    "unsigned long long": "u64",
    "float": "f32",
    "double": "f64",
    "__grid_constant__ TensorMap": "tensor_map",
}
_ENTRY = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:(?:__launch_bounds__|__cluster_dims__|CLUSTER_ROW)\s*\([^()]*\)\s*)*(\w+)\s*\(([^()]*)\)\s*{'
)
_PARAMETER = re.compile(r"(?:const\s+)?([\w ]+?)\s*(\*?)\s*(?:__restrict__\s+)?(\w+)")


def declared_entries(source: str) -> dict[str, list[tuple[str, str]]]:
    """Name and kind of each parameter of each entry in CUDA C++ text, as ``Param`` has them."""
    entries = {}
    for entry, parameters in _ENTRY.findall(source):
        matches = [_PARAMETER.fullmatch(text.strip()) for text in parameters.split(",")]
        entries[entry] = [(match[3], "ptr" if match[2] else _KINDS[match[1]]) for match in matches]
    return entries


def test_the_parser_reads_every_kind_of_parameter() -> None:
    """Or the comparison below would be with nothing."""
    source = """
    __global__ void internal(int x) {}
    extern "C" __global__ void __launch_bounds__(kThreads, 2) first(
        const Element* __restrict__ q, unsigned char *out, int rows, unsigned int n,
        long long stride, unsigned long long big, float scale, double exact, const __grid_constant__ TensorMap map) {
    }
    extern "C" __global__ void ENTRY(float* x) { f(x); }
    """
    assert declared_entries(source) == {
        "first": [
            ("q", "ptr"),
            ("out", "ptr"),
            ("rows", "i32"),
            ("n", "u32"),
            ("stride", "i64"),
            ("big", "u64"),
            ("scale", "f32"),
            ("exact", "f64"),
            ("map", "tensor_map"),
        ],
        "ENTRY": [("x", "ptr")],
    }


@pytest.mark.parametrize("source", sorted(path.name for path in kernel_directory().glob("*.cu")))
def test_every_entry_has_the_parameters_that_its_operator_declares(source: str) -> None:
    """Names, kinds and order; a file with an entry that no operator launches is dead code."""
    entries = declared_entries((kernel_directory() / source).read_text())
    specs = [spec for spec in SPECS if spec.source == source]
    assert entries
    launched = set()
    for spec in specs:
        # An entry may be named by a macro of the specialisation.
        (name,) = (name for name in entries if dict(spec.macros).get(name, name) == spec.entry)
        assert [tuple(param) for param in spec.params] == entries[name], spec.label
        launched.add(name)
    assert launched == entries.keys()


def test_every_specialisation_has_a_source() -> None:
    """No operator names a file that is not there."""
    assert {spec.source for spec in SPECS} <= {path.name for path in kernel_directory().glob("*.cu")}


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_and_keeps_to_its_registers(pool: ProcessPoolExecutor, arch: str) -> None:
    """No spill, no stack frame, no warning, and a block of the declared size fits a multiprocessor."""
    specs = [spec for spec in SPECS if spec.arch in (None, arch)]
    images = pool.map(partial(compile_spec, arch=arch), specs)
    faults = [
        f"{spec.label}: {fault}" for spec, image in zip(specs, images, strict=True) for fault in _faults(spec, image)
    ]
    assert not faults, "\n".join(faults)


def _faults(spec: KernelSpec, image: Image) -> Iterator[str]:
    # ptxas numbers what it says of wgmma and setmaxnreg C75xx: products serialised, or registers not dealt out.
    if image.kind != "cubin" or "warning" in image.log or "(C75" in image.log:
        yield image.log
    functions = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", image.log)
    if not functions:
        yield f"no account of its registers in the log: {image.log}"
    for function in functions:
        if set(function) != {"0"}:
            yield "{} bytes of stack, {} spilt, {} read back".format(*function)
    registers = max(int(count) for count in re.findall(r"Used (\d+) registers", image.log))
    # Registers are handed out to a warp 256 at a time; a multiprocessor has 65536.
    needed = -(-registers * 32 // 256) * 256 * (spec.threads // 32)
    if needed > 65536:
        yield f"{registers} registers in {spec.threads} threads need {needed}, a block has at most 65536"


def test_a_spill_would_be_noticed() -> None:
    """The check reads what ptxas really prints."""
    code = """
    extern "C" __global__ void __launch_bounds__(1024, 2) f(float* x) {
        float v[64];
    #pragma unroll
        for (int i = 0; i < 64; ++i) v[i] = x[i * blockDim.x];
        __syncthreads();
    #pragma unroll
        for (int i = 0; i < 64; ++i) x[i] += v[63 - i] * v[i ^ 5];
    }
    """
    spec = KernelSpec("spill", "f", (), 1024, code=code)
    assert any("spilt" in fault for fault in _faults(spec, compile_spec(spec, "sm_90a")))
    wide = KernelSpec("wide", "f", (), 1024, code=code.replace("1024, 2", "256"))
    assert any("a block has at most 65536" in fault for fault in _faults(wide, compile_spec(wide, "sm_90a")))
