"""Where a run happens: device, driver, compiler, packages, date, and what is not there."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import nxrt_cuda as nx
from nxrt_cuda.nvrtc import load_nvrtc

__all__ = ["environment", "header", "missing"]

_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "cuda-bindings",
    "cuda-core",
    "nvidia-cuda-nvrtc",
    "torch",
    "nvidia-cudnn-cu13",
    "triton",
    "cupy-cuda13x",
)


def environment(runtime: nx.CudaRuntime) -> dict[str, Any]:
    """Where and when this run happens."""
    try:
        nvrtc = str(load_nvrtc())
    except nx.CompileError:
        nvrtc = "no NVRTC"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": runtime.device_name,
        "multiprocessors": runtime.capabilities.multiprocessor_count,
        "driver": "none" if runtime.device == "host" else runtime.driver_version,
        "nvrtc": nvrtc,
        "python": platform.python_version(),
        "nxrt_cuda": nx.__version__,
        "packages": {name: found for name in _PACKAGES if (found := _installed(name))},
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def header(results: Mapping[str, Any]) -> str:
    """The lines above a table: what was run where, with what, and what was not there."""
    where = results["environment"]
    lines = [
        f"{results['benchmark']} on {where['device']}, {where['date'][:10]}: driver {where['driver']}, "
        f"{where['nvrtc']}, Python {where['python']}, nxrt_cuda {where['nxrt_cuda']}",
        ", ".join(f"{name} {found}" for name, found in where["packages"].items()),
    ]
    if results["absent"]:
        lines.append("absent: " + "; ".join(f"{name} ({why})" for name, why in results["absent"].items()))
    if results["caveat"]:
        lines.append(f"NOTE: {results['caveat']}")
    return "\n".join(lines)


def missing(module: str, runtime: nx.CudaRuntime) -> str | None:
    """Why a peer that needs ``module`` and a GPU cannot take part; None if it can."""
    try:
        installed = find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that the module is in
        installed = False
    if not installed:
        return "not installed"
    return "the host driver has no GPU" if runtime.device == "host" else None
