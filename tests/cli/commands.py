"""The command line as a user starts it, and kernels that go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np

import nxrt_cuda as nx
from nxrt_cuda.driver.host_image import HostEntry, HostLaunch

ROOT = Path(__file__).parents[2]


def start(*command: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run ``command`` with this Python and this checkout, and wait for it."""
    return subprocess.run(
        [sys.executable, *command],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m nxrt_cuda`` with ``arguments``."""
    return start("-m", "nxrt_cuda", *arguments)


def no_driver() -> NoReturn:
    """Takes the place of CudaDriver on a machine that has none."""
    raise nx.NoDeviceError("cuInit", 100, "CUDA_ERROR_NO_DEVICE", "the driver library cannot be loaded", "advice")


def corrupting(entry: HostEntry, output: str, dtype: nx.DataType, on_call: int) -> HostEntry:
    """``entry``, but on one of its calls the lowest bit of the first output element comes out wrong."""
    calls = 0

    def wrapped(launch: HostLaunch) -> None:
        nonlocal calls
        entry(launch)
        if calls == on_call:
            launch.view(launch.args[output], dtype, (1,)).view(np.uint8)[0] ^= 1
        calls += 1

    return wrapped
