"""Timing an operator beside PyTorch's ways to the same result.

A device time is that of a CUDA graph of several calls, replayed many times between the driver's own events
on the runtime's compute stream, divided by the number of calls: host time and launch gaps stay out. A peer
is recorded and timed in the same way on the same stream. The subjects of a case take turns, so that all of
them see one clock rate and one temperature. Calls go round several sets of operands where one set would fit
into the L2 cache.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nxrt_cuda as nx
from benchmarks._ceilings import measure_tensor_rate
from benchmarks._environment import missing
from benchmarks._timing import DeviceClock, Subject, Timing, time_subjects
from benchmarks._torch import TorchPeer

__all__ = [
    "Bench",
    "Comparison",
    "Operands",
    "Peer",
    "Warmed",
    "WrongResultError",
    "first_line",
    "normal",
    "progress",
    "relative_error",
]

_OURS = "nxrt_cuda"

_GRAPH_MS = 8.0
"""How long a graph should run: long beside the few microseconds that an event costs."""

_CALLS = (2, 32)

_MAX_SETS = 8


class WrongResultError(Exception):
    """A subject does not compute what it should; nothing of it is timed."""


class Bench:
    """A run: what the scripts measure with.

    Attributes:
        runtime: the runtime.
        clock: device time on its stream.
        quick: whether sizes are tiny.
        absent: peers that are not there, and why.
    """

    def __init__(self, runtime: nx.CudaRuntime, quick: bool) -> None:
        self.runtime = runtime
        self.clock = DeviceClock(runtime)
        self.quick = quick
        self.absent: dict[str, str] = {}

    @cached_property
    def torch(self) -> TorchPeer | None:
        """PyTorch on the runtime's stream, where it is installed and there is a GPU."""
        if why := missing("torch", self.runtime):
            self.absent["PyTorch"] = why
            return None
        peer = TorchPeer.find(self.runtime)
        if peer is None:
            self.absent["PyTorch"] = "it finds no GPU"
        return peer

    @cached_property
    def tensor_rate(self) -> float | None:
        """The bf16 operations a millisecond that the device reaches at best, where PyTorch is there to say so."""
        return None if self.torch is None else measure_tensor_rate(self.clock, self.torch)

    def operand_sets(self, nbytes: int) -> int:
        """How many sets of ``nbytes`` to go round so that no set stays in the L2 cache."""
        return min(max(1, math.ceil(2 * self.runtime.capabilities.l2_cache_bytes / max(nbytes, 1))), _MAX_SETS)

    def warm(self, node: nx.Node, nbytes: int, draw: Callable[[], Operands]) -> Warmed:
        """A kernel for ``node`` that has run on each of several sets of operands, of ``nbytes`` each."""
        sets = [draw() for _ in range(self.operand_sets(nbytes))]
        shapes = [None if tensor is None else tensor.shape for tensor in sets[0].inputs]
        warmed = Warmed(nx.create_kernel(self.runtime, node, shapes), sets)
        for i in range(len(sets)):
            warmed.call(i)
        return warmed

    def compare(self, warmed: Warmed, peers: Mapping[str, Peer]) -> Comparison:
        """Time a warmed kernel, and PyTorch's calls beside it, in turns."""
        sets = len(warmed.sets)
        calls = self._calls(partial(warmed.call, 0))
        with self.runtime.capture([warmed.kernel]) as graph:
            for i in range(calls):
                warmed.call(i % sets)
        subjects = {_OURS: Subject(graph.replay, calls)}
        errors: dict[str, float] = {}
        refused: dict[str, str] = {}
        for name, peer in peers.items():
            try:
                errors[name] = peer.judge(peer.call(0))
                subjects[name] = self._record(peer, sets)
            except (RuntimeError, WrongResultError) as error:
                refused[name] = first_line(error)
                progress(f"{name} refuses: {refused[name]}")
        timings = time_subjects(self.clock, subjects)
        graph.close()
        ours = timings.pop(_OURS)
        compared = {name: {**asdict(timing), "error": errors[name]} for name, timing in timings.items()}
        return Comparison(ours, compared, refused)

    def _record(self, peer: Peer, sets: int) -> Subject:
        assert self.torch is not None
        calls = self._calls(partial(peer.call, 0))
        return Subject(self.torch.record(peer.call, [i % sets for i in range(calls)]), calls)

    def _calls(self, call: Callable[[], object]) -> int:
        low, high = _CALLS
        return min(max(low, math.ceil(_GRAPH_MS / median(self.clock.intervals(call, 3)))), high)


@dataclass(frozen=True)
class Operands:
    """One set of operands: the inputs' values, which are arrays, and the tensors. None is an input left off."""

    arrays: tuple[Any, ...]
    inputs: tuple[nx.TensorMut | None, ...]
    output: nx.TensorMut

    @classmethod
    def upload(cls, runtime: nx.CudaRuntime, arrays: Sequence[NDArray[Any] | None], poison: NDArray[Any]) -> Operands:
        """Tensors of ``arrays``, and an output that holds ``poison`` until it is written."""
        inputs = tuple(None if array is None else runtime.from_array(array) for array in arrays)
        return cls(tuple(arrays), inputs, runtime.from_array(poison))


@dataclass(frozen=True)
class Warmed:
    """A kernel, and the sets of operands that it is called on."""

    kernel: nx.Kernel
    sets: Sequence[Operands]

    def call(self, i: int) -> None:
        """Execute on one of the sets."""
        operands = self.sets[i]
        self.kernel.execute(operands.inputs, [operands.output])


@dataclass(frozen=True)
class Peer:
    """PyTorch's way to the same result.

    Attributes:
        call: computes the result for one set of operands.
        judge: the error of the first set's result; raises WrongResultError where it is another function's.
    """

    call: Callable[[int], Any]
    judge: Callable[[Any], float]


@dataclass(frozen=True)
class Comparison:
    """Device times of one case.

    Attributes:
        ours: this package's.
        peers: by name, the fields of a :class:`Timing`, and ``error``.
        refused: by name, why a peer could not be timed.
    """

    ours: Timing
    peers: dict[str, dict[str, float]]
    refused: dict[str, str]


_DRAWN = 4_194_301
"""Random numbers drawn at most, a prime: their repetition falls into step with no row, head or batch."""


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: nx.DataType) -> NDArray[Any]:
    """Normally distributed random numbers; of large arrays, the same few million again and again."""
    drawn = rng.standard_normal(min(math.prod(shape), _DRAWN), np.float32).astype(dtype.numpy, copy=False)
    return np.resize(drawn, tuple(shape))


def relative_error(actual: NDArray[Any], expected: NDArray[np.float64]) -> float:
    """‖actual - expected‖ / ‖expected‖; NaN where ``actual`` holds one."""
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected))


def first_line(error: Exception) -> str:
    """What an error says first; its type where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def progress(text: str) -> None:
    """One line on stderr, at once."""
    print(f"[{time.monotonic() - _started:6.1f} s] {text}", file=sys.stderr, flush=True)


_started = time.monotonic()
