"""``doctor``: what this machine can run, what is missing, and the command that installs it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import nxrt_cuda
from nxrt_cuda.compile import NvrtcCompiler
from nxrt_cuda.devices import open_runtime
from nxrt_cuda.driver.base import Driver
from nxrt_cuda.driver.cuda import CudaDriver
from nxrt_cuda.dtype import float16
from nxrt_cuda.errors import DriverError, NxrtError, RuntimeStateError
from nxrt_cuda.memory import POOL_VARIABLE, pool_limit_from_environment
from nxrt_cuda.nvrtc import load_nvrtc
from nxrt_cuda.ops.dsa_variants import kernel_specs
from nxrt_cuda.program_cache import ProgramCache
from nxrt_cuda.resources import kernel_directory
from nxrt_cuda.text import as_bytes

__all__ = ["add_parser"]

_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "cuda-python",
    "cuda-bindings",
    "cuda-core",
    "cuda-pathfinder",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cuda-crt",
    "nvidia-cuda-cccl",
)
_WITHOUT_DEVICE = (9, 0)
"""The compute capability of the trial compile where no device says its own."""

_INSTALL_COMPILER = 'pip install "nxrt_cuda[nvrtc]"'
_INSTALL_BINDINGS = 'pip install "cuda-python>=13.0,<14"'
_INSTALL_DRIVER = (
    "to use a GPU, install NVIDIA's driver, release 580 or newer (on Ubuntu: sudo ubuntu-drivers install; "
    "in a container: docker run --gpus all)"
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what.
        text: what was found, for people.
        details: the same for programs.
        missing: what has to be done about it, with the command; empty where nothing has.
    """

    name: str
    text: str
    details: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine can run, and what is missing",
        description="Look at the driver, the devices, the compiler, its headers and the program cache. "
        "Exit status 0 where something can run: a GPU, or the host driver.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; see the parser for ``options``."""
    findings = tuple(_examine())
    runs_on = _verdict(findings)
    if options.json:
        report = {
            "nxrt_cuda": nxrt_cuda.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "runs_on": runs_on,
            "missing": {finding.name: finding.missing for finding in findings if finding.missing},
            **{finding.name.replace(" ", "_"): finding.details for finding in findings},
        }
        print(json.dumps(report, indent=2))
    else:
        print(_text(findings, runs_on))
    return 0 if runs_on else 1


def _text(findings: Sequence[Finding], runs_on: str | None) -> str:
    width = 2 + max(len(finding.name) for finding in findings)

    def entry(name: str, text: str) -> str:
        lines = [
            part
            for line in text.splitlines()
            for part in textwrap.wrap(line, 116 - width, break_long_words=False, break_on_hyphens=False)
        ]
        return "\n".join(
            f"  {label:<{width}}{line}" for label, line in zip(chain([name], repeat("")), lines, strict=False)
        )

    blocks = [
        f"nxrt_cuda {nxrt_cuda.__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"this machine: {_VERDICTS.get(runs_on, runs_on)}",
        "\n".join(entry(finding.name, finding.text) for finding in findings),
    ]
    remedies: dict[str, list[str]] = {}
    for finding in findings:
        if finding.missing:
            remedies.setdefault(finding.missing, []).append(finding.name)
    if remedies:
        entries = (f"  {', '.join(names)}: {remedy}" for remedy, names in remedies.items())
        blocks.append("\n".join(["missing:", *entries]))
    return "\n\n".join(blocks)


_VERDICTS = {
    "host": "host driver (kernels run on the CPU, in NumPy)",
    None: "nothing can run; see below",
}


def _verdict(findings: Sequence[Finding]) -> str | None:
    """The device that runs kernels here: ``"cuda:0"``, ``"host"`` or None."""
    by_name = {finding.name: finding for finding in findings}
    if by_name["memory pool"].missing:  # no runtime opens
        return None
    on_gpu = ("packages", "driver", "devices", "NVRTC", "headers", "trial compile")
    if not any(by_name[name].missing for name in on_gpu):
        return "cuda:0"
    return None if by_name["host driver"].missing else "host"


def _examine() -> Iterator[Finding]:
    driver, finding = _driver()
    yield finding
    yield _devices(driver)
    yield _nvrtc()
    compiler = NvrtcCompiler(_WITHOUT_DEVICE if driver is None else _capability(driver, 0))
    yield _headers(compiler)
    yield _trial_compile(compiler)
    yield _host_driver()
    yield _memory_pool()
    yield _program_cache()
    yield _packages()


def _driver() -> tuple[Driver | None, Finding]:
    try:
        driver = CudaDriver()
        version = driver.driver_version()
    except NxrtError as error:
        return None, Finding(
            "driver",
            f"none: {error.text if isinstance(error, DriverError) else error}",
            {"version": None, "problem": str(error)},
            _INSTALL_DRIVER,
        )
    text = f"{version // 1000}.{version % 1000 // 10}"
    missing = "" if version >= 13000 else f"the driver is of CUDA {text} and CUDA 13 is needed; {_INSTALL_DRIVER}"
    return driver, Finding("driver", f"CUDA {text}", {"version": text}, missing)


def _devices(driver: Driver | None) -> Finding:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    note = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    if driver is None:
        return Finding("devices", f"none{note}", {"devices": [], "visible": visible})
    devices = [_device(driver, ordinal) for ordinal in range(driver.device_count())]
    return Finding(
        "devices",
        "\n".join(_device_text(i, device) for i, device in enumerate(devices)) + note,
        {"devices": devices, "visible": visible},
        # The default device decides; another's trouble is shown beside it.
        f"cuda:0 cannot be opened: {devices[0]['problem']}" if devices[0]["problem"] else "",
    )


def _device(driver: Driver, ordinal: int) -> dict[str, Any]:
    major, minor = _capability(driver, ordinal)
    device: dict[str, Any] = {
        "name": driver.device_name(ordinal),
        "compute_capability": f"{major}.{minor}",
        "multiprocessors": driver.device_attribute(ordinal, "MULTIPROCESSOR_COUNT"),
        "memory_free": None,
        "memory_total": None,
        "problem": None,
    }
    try:
        driver.ctx_push_current(driver.primary_ctx_retain(ordinal))
        try:
            device["memory_free"], device["memory_total"] = driver.mem_get_info()
        finally:
            driver.ctx_pop_current()
            driver.primary_ctx_release(ordinal)
    except NxrtError as error:
        device["problem"] = str(error)
    return device


def _device_text(ordinal: int, device: Mapping[str, Any]) -> str:
    memory = device["problem"] or f"{as_bytes(device['memory_free'])} of {as_bytes(device['memory_total'])} memory free"
    return (
        f"cuda:{ordinal}: {device['name']}, compute capability {device['compute_capability']}, "
        f"{device['multiprocessors']} multiprocessors, {memory}"
    )


def _capability(driver: Driver, ordinal: int) -> tuple[int, int]:
    return (
        driver.device_attribute(ordinal, "COMPUTE_CAPABILITY_MAJOR"),
        driver.device_attribute(ordinal, "COMPUTE_CAPABILITY_MINOR"),
    )


def _nvrtc() -> Finding:
    try:
        nvrtc = load_nvrtc()
    except NxrtError as error:
        return Finding("NVRTC", "not found", {"version": None, "problem": str(error)}, _INSTALL_COMPILER)
    version = f"{nvrtc.version[0]}.{nvrtc.version[1]}"
    archs = [f"sm_{arch}" for arch in nvrtc.archs]
    return Finding(
        "NVRTC",
        f"{version}, {nvrtc.path}\ncompiles for {' '.join(archs)}",
        {"version": version, "path": nvrtc.path, "archs": archs},
    )


def _headers(compiler: NvrtcCompiler) -> Finding:
    headers = compiler.headers
    details = {"directories": headers.directories, "searched": headers.searched}
    try:
        compiler.require_half_headers("nxrt_cuda")
    except NxrtError as error:
        return Finding("headers", str(error), details, _INSTALL_COMPILER)
    return Finding("headers", "\n".join((*headers.directories, "complete")), details)


def _trial_compile(compiler: NvrtcCompiler) -> Finding:
    """Compile one kernel, past the program cache: it shows that compiler, headers and sources fit together."""
    spec = next(spec for spec in kernel_specs() if ("ELEMENT", float16.cuda) in spec.macros)
    try:
        image = compiler.compile(spec)
    except NxrtError as error:
        return Finding("trial compile", str(error), {"problem": str(error)}, _INSTALL_COMPILER)
    return Finding(
        "trial compile",
        f"{spec.entry} for {image.arch} in {image.seconds:.1f} s",
        {"kernel": spec.entry, "arch": image.arch, "seconds": image.seconds},
    )


def _host_driver() -> Finding:
    directory = kernel_directory()
    details = {"kernels": str(directory)}
    try:
        with open_runtime("host", pool_limit=0) as runtime:
            for spec in kernel_specs():
                runtime.function(spec)
    except NxrtError as error:
        return Finding(
            "host driver", str(error), details, "reinstall the package in its checkout: pip install --force-reinstall ."
        )
    return Finding("host driver", f"ready, kernel sources in {directory}", details)


def _memory_pool() -> Finding:
    try:
        limit = pool_limit_from_environment()
    except RuntimeStateError as error:
        return Finding("memory pool", str(error), {"max_bytes": None, "problem": str(error)}, f"unset {POOL_VARIABLE}")
    return Finding("memory pool", f"keeps up to {as_bytes(limit)} of free memory", {"max_bytes": limit})


def _program_cache() -> Finding:
    cache = ProgramCache.from_environment()
    if cache is None:
        return Finding("program cache", "off: every process compiles anew", {"directory": None})
    problem = cache.problem()
    entries, nbytes = cache.usage()
    state = problem or "writable"
    return Finding(
        "program cache",
        f"{cache.directory}: {entries} entries, {as_bytes(nbytes)} of {as_bytes(cache.max_bytes)}, {state}",
        {
            "directory": str(cache.directory),
            "entries": entries,
            "bytes": nbytes,
            "max_bytes": cache.max_bytes,
            "problem": problem,
        },
        "" if problem is None else "export NXRT_CUDA_CACHE_DIR=a directory of yours",
    )


def _packages() -> Finding:
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    bindings = versions.get("cuda-bindings", "")
    return Finding(
        "packages",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        versions,
        "" if bindings.startswith("13.") else f"cuda-bindings {bindings or 'not installed'}; {_INSTALL_BINDINGS}",
    )
