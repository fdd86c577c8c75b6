"""Kernels of a few lines for the runtime's own tests: CUDA text for a GPU, a Python entry for the host driver.

Both sides read the same declared parameters, so one test body serves both drivers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import nxrt_cuda as nx
from nxrt_cuda.driver.host import HostDriver, HostEntry, HostLaunch

__all__ = [
    "ADD_ONE",
    "FAULT",
    "HOST_ENTRIES",
    "LATCH",
    "MIXED",
    "SCALE",
    "SLOW",
    "Background",
    "SmallKernel",
    "on_thread",
    "open_on",
]

Params = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SmallKernel:
    """One kernel: how to load it, and how many elements a block covers."""

    entry: str
    params: Params
    source: str
    threads: int = 128

    def load(self, rt: nx.CudaRuntime) -> Any:
        return rt.nvrtc_function("small_kernels.cu", self.source, self.entry, self.params, threads=self.threads)

    def prepare(self, rt: nx.CudaRuntime, elements: int, *arguments: Any) -> nx.PreparedLaunch:
        blocks = -(-elements // self.threads)
        return rt.prepare(self.load(rt), nx.LaunchConfig((blocks, 1, 1), (self.threads, 1, 1)), *arguments)


ADD_ONE = SmallKernel(
    "add_one",
    (("x", "ptr"), ("n", "i32")),
    """
    extern "C" __global__ void add_one(float* x, int n) {
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) x[i] += 1.0f;
    }
    """,
)

SCALE = SmallKernel(
    "scale",
    (("out", "ptr"), ("x", "ptr"), ("factor", "f32"), ("n", "i32")),
    """
    extern "C" __global__ void scale(float* out, const float* x, float factor, int n) {
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) out[i] = factor * x[i];
    }
    """,
)

MIXED = SmallKernel(
    "mixed",
    (("out", "ptr"), ("a", "i32"), ("b", "u64"), ("c", "f32"), ("d", "i64"), ("e", "u32"), ("f", "f64")),
    """
    extern "C" __global__ void mixed(double* out, int a, unsigned long long b, float c, long long d, unsigned int e,
                                     double f) {
      if (threadIdx.x == 0) {
        out[0] = a; out[1] = double(b); out[2] = c; out[3] = double(d); out[4] = e; out[5] = f;
      }
    }
    """,
)

LATCH = SmallKernel(
    "latch",
    (("word", "ptr"), ("code", "u32")),
    """
    extern "C" __global__ void latch(unsigned int* word, unsigned int code) {
      if (threadIdx.x == 0) atomicOr(word, code);
    }
    """,
)

FAULT = SmallKernel(
    "fault",
    (("address", "ptr"),),
    """
    extern "C" __global__ void fault(int* address) {
      if (threadIdx.x == 0) *address = 1;
    }
    """,
)
"""Writes to the address it is given, whatever that is."""

SLOW = SmallKernel(
    "slow",
    (("milliseconds", "i32"),),
    """
    extern "C" __global__ void slow(int milliseconds) {
      unsigned long long begin, now;
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
      do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
      } while (now - begin < milliseconds * 1000000ull);
    }
    """,
    threads=1,
)


def _add_one(launch: HostLaunch) -> None:
    x = launch.view(launch.args["x"], nx.float32, (int(launch.args["n"]),))
    x += 1


def _scale(launch: HostLaunch) -> None:
    shape = (int(launch.args["n"]),)
    x = launch.view(launch.args["x"], nx.float32, shape)
    launch.view(launch.args["out"], nx.float32, shape)[:] = np.float32(launch.args["factor"]) * x


def _mixed(launch: HostLaunch) -> None:
    launch.view(launch.args["out"], nx.float64, (6,))[:] = [launch.args[name] for name in "abcdef"]


def _latch(launch: HostLaunch) -> None:
    launch.view(launch.args["word"], nx.uint32, (1,))[:] |= np.uint32(launch.args["code"])


def _fault(launch: HostLaunch) -> None:
    launch.view(launch.args["address"], nx.int32, (1,))[:] = 1


def _slow(launch: HostLaunch) -> None:
    time.sleep(launch.args["milliseconds"] / 1000)


HOST_ENTRIES: dict[str, HostEntry] = {
    "add_one": _add_one,
    "scale": _scale,
    "mixed": _mixed,
    "latch": _latch,
    "fault": _fault,
    "slow": _slow,
}


def open_on(driver: HostDriver, **options: Any) -> nx.CudaRuntime:
    """A runtime on a driver of the test's own making: shared with another runtime, small, or with another name."""
    from nxrt_cuda.compile import HostCompiler
    from nxrt_cuda.context import PrimaryContext

    primary = PrimaryContext.acquire(driver, 0)
    try:
        return nx.CudaRuntime(primary, HostCompiler(), **options)
    except BaseException:
        primary.release()
        raise


class Background:
    """Run a function on a thread while the ``with`` body runs; it is joined, and its error raised, at the end.

    Attributes:
        started: set by the thread just before it calls the function.
        done: set when the function has returned.
        result: what it returned.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.started = threading.Event()
        self.done = threading.Event()
        self.result: Any = None
        self._error: BaseException | None = None
        self._call = (function, arguments)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        function, arguments = self._call
        self.started.set()
        try:
            self.result = function(*arguments)
        except BaseException as error:
            self._error = error
        self.done.set()

    def __enter__(self) -> Background:
        self._thread.start()
        assert self.started.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive(), "the thread hangs"
        if self._error is not None and exc_info[0] is None:
            raise self._error


def on_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function`` returns or raises on a thread of its own."""
    with Background(function, *arguments) as call:
        pass
    return call.result
