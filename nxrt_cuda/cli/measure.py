"""What ``bench`` measures: this package's kernels on the device, and what its calls cost the host.

A device time is that of a graph of several calls, between two timing events, divided by the number of
calls, so host time and launch gaps stay out. The calls go round several sets of operands where one set
would fit into the L2 cache. A host time is taken in bursts of eight calls after a drain: in a long burst the
queue fills up, and what is measured is the device.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import numpy as np

from nxrt_cuda.dtype import DataType, bfloat16, float16, float32, int64
from nxrt_cuda.graph import CapturedGraph
from nxrt_cuda.kernel import create_kernel
from nxrt_cuda.node import Node
from nxrt_cuda.runtime import CudaRuntime
from nxrt_cuda.tensor import TensorMetadata, TensorMut
from nxrt_cuda.timing import TimingEvent

__all__ = ["SUITES", "Panel", "Point", "Suite"]

_DTYPES = (float32, bfloat16, float16)
_CALLS = 16
_MOST_SETS = 8
_MILLISECONDS = 200.0
_REPLAYS = (3, 100)
"""The fewest and the most replays of one point; in between, as many as fit into the time above."""

_BURST = 8
_BURSTS, _QUICK_BURSTS = 300, 3

_RANDOM_ELEMENTS = 1 << 20
"""Random values that larger tensors repeat: drawing a gigabyte would take longer than measuring it."""


@dataclass(frozen=True)
class Panel:
    """A set of measurements that share their axes.

    Attributes:
        title: what is measured.
        setting: what all of its points have in common.
        x: the varied size, or ``""`` where every point is a call of its own.
        y: the measured quantity and its unit.
        logarithmic: whether it spans orders of magnitude.
    """

    title: str
    setting: str
    x: str
    y: str
    logarithmic: bool = False


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        panel: where it belongs.
        series: the dtype, or the call.
        x: the size; 0 where there is none.
        value: in the unit of the panel's ``y``.
        microseconds: the median time that it is computed from.
        samples: how many times that is the median of.
    """

    panel: Panel
    series: str
    x: int
    value: float
    microseconds: float
    samples: int


Suite = Callable[[CudaRuntime, bool], Iterator[Point]]
"""Measures on a runtime; the flag asks for tiny sizes, to see that everything runs."""


def _attention(runtime: CudaRuntime, quick: bool) -> Iterator[Point]:
    heads, head_dim = (2, 16) if quick else (16, 128)
    prefill = Panel(
        "Attention, prefill",
        f"causal, batch 1, {heads} heads of {head_dim}, queries = keys",
        "sequence length",
        "TFLOP/s",
    )
    for dtype in _DTYPES:
        for seq in (16, 32) if quick else (512, 1024, 2048, 4096, 8192):
            shape = (1, heads, seq, head_dim)
            node = Node("Attention", attributes={"is_causal": 1})
            timing = _device_time(
                runtime, quick, node, [TensorMetadata(dtype, shape)] * 3, TensorMetadata(dtype, shape)
            )
            flops = 2 * heads * seq * seq * head_dim  # half of 4 B H Sq Sk D: the other half is masked
            yield timing.point(prefill, dtype, seq, flops / timing.microseconds * 1e-6)
    batch, q_heads, kv_heads = (1, 2, 1) if quick else (8, 32, 8)
    decode = Panel(
        "Attention, decode",
        f"batch {batch}, {q_heads} query and {kv_heads} key heads of {head_dim}, one query",
        "keys",
        "GB/s of operands, each once",
    )
    for dtype in _DTYPES:
        for keys in (16, 32) if quick else (1024, 2048, 4096, 8192, 16384):
            query = TensorMetadata(dtype, (batch, q_heads, 1, head_dim))
            cache = TensorMetadata(dtype, (batch, kv_heads, keys, head_dim))
            timing = _device_time(runtime, quick, Node("Attention"), [query, cache, cache], query)
            yield timing.point(decode, dtype, keys, 2 * (query.nbytes + cache.nbytes) / timing.microseconds * 1e-3)


def _dsa(runtime: CudaRuntime, quick: bool) -> Iterator[Point]:
    heads, head_dim, top_k, rows = (2, 8, 4, 6) if quick else (64, 128, 2048, 512)
    node = Node("DsaIndexSelect", domain="pkg.nxrt", attributes={"top_k": top_k, "scale": head_dim**-0.5})
    for title, q_seq, key_seqs in (
        ("DsaIndexSelect, prefill", rows, (16, 32) if quick else (4096, 8192, 16384, 32768)),
        ("DsaIndexSelect, decode", 1, (16, 32) if quick else (8192, 16384, 32768, 65536, 131072)),
    ):
        queries = "one query" if q_seq == 1 else f"{q_seq} queries"
        setting = f"batch 1, {queries}, {heads} heads of {head_dim}, top {top_k}"
        panel = Panel(title, setting, "keys", "device time, us", logarithmic=True)
        for dtype in _DTYPES:
            for key_seq in key_seqs:
                inputs = [
                    TensorMetadata(dtype, (1, q_seq, heads, head_dim)),
                    TensorMetadata(dtype, (1, key_seq, head_dim)),
                    TensorMetadata(dtype, (1, q_seq, heads)),
                    TensorMetadata(float32, (1, 1, q_seq, key_seq)),
                ]
                timing = _device_time(runtime, quick, node, inputs, TensorMetadata(int64, (1, 1, q_seq, top_k)))
                yield timing.point(panel, dtype, key_seq, timing.microseconds)


def _launch(runtime: CudaRuntime, quick: bool) -> Iterator[Point]:
    panel = Panel("Host time of a call", "attention of 64 float16 tokens, 8 heads of 64", "", "microseconds")
    bursts = _QUICK_BURSTS if quick else _BURSTS
    operand = TensorMetadata(float16, (1, 8, 64, 64))
    kernel = create_kernel(runtime, Node("Attention", attributes={"is_causal": 1}))

    def call() -> Callable[[], None]:
        """An execution on tensors of its own."""
        inputs = [runtime.zeros(operand.shape, operand.dtype) for _ in range(3)]
        return partial(kernel.execute, inputs, [runtime.empty(operand.shape, operand.dtype)])

    execute = call()
    execute()
    graphs = {}
    for nodes in (1, 64):
        with runtime.capture([kernel]) as graph:
            for _ in range(nodes):
                execute()
        graphs[nodes] = graph
    subjects: Mapping[str, Callable[[], Sequence[Callable[[], None]]]] = {
        "execute, the same tensors": lambda: [execute] * _BURST,
        "execute, new tensors": lambda: [call() for _ in range(_BURST)],
        "replay of 1 node": lambda: [graphs[1].replay] * _BURST,
        "replay of 64 nodes": lambda: [graphs[64].replay] * _BURST,
    }
    for name, prepare in subjects.items():
        microseconds = _host_time(runtime, prepare, bursts)
        yield Point(panel, name, 0, microseconds, microseconds, bursts)


SUITES: Mapping[str, Suite] = {"attention": _attention, "dsa": _dsa, "launch": _launch}


@dataclass(frozen=True)
class _Timing:
    microseconds: float
    samples: int

    def point(self, panel: Panel, dtype: DataType, x: int, value: float) -> Point:
        return Point(panel, dtype.numpy.name, x, value, self.microseconds, self.samples)


@dataclass(frozen=True)
class _Operands:
    inputs: Sequence[TensorMut]
    output: TensorMut


def _device_time(
    runtime: CudaRuntime, quick: bool, node: Node, inputs: Sequence[TensorMetadata], output: TensorMetadata
) -> _Timing:
    """Device time of one call."""
    nbytes = sum(operand.nbytes for operand in (*inputs, output))
    sets = min(math.ceil(2 * runtime.capabilities.l2_cache_bytes / nbytes) or 1, _MOST_SETS)
    rng = np.random.default_rng(0)
    operands = [
        _Operands([_random(runtime, rng, operand) for operand in inputs], runtime.empty(output.shape, output.dtype))
        for _ in range(sets)
    ]
    kernel = create_kernel(runtime, node, [operand.shape for operand in inputs])
    for one in operands:
        kernel.execute(one.inputs, [one.output])
    with runtime.capture([kernel]) as graph:
        for i in range(_CALLS):
            kernel.execute(operands[i % sets].inputs, [operands[i % sets].output])
    low, high = _REPLAYS
    (warm,) = _intervals(runtime, graph, 1)
    replays = low if quick else min(max(low, int(_MILLISECONDS / warm)), high)
    samples = _intervals(runtime, graph, replays)
    return _Timing(median(samples) * 1e3 / _CALLS, len(samples))


def _intervals(runtime: CudaRuntime, graph: CapturedGraph, replays: int) -> list[float]:
    """Milliseconds of each of ``replays``, enqueued back to back behind one that is not timed.

    The host is ahead of the device then, and no interval has the host's time in it.
    """
    marks: list[TimingEvent] = []
    for _ in range(replays + 1):
        graph.replay()
        marks.append(runtime.record_event())
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def _random(runtime: CudaRuntime, rng: np.random.Generator, operand: TensorMetadata) -> TensorMut:
    values = rng.standard_normal(min(operand.elements, _RANDOM_ELEMENTS), np.float32)
    return runtime.from_array(np.resize(values.astype(operand.dtype.numpy), operand.shape))


def _host_time(runtime: CudaRuntime, prepare: Callable[[], Sequence[Callable[[], None]]], bursts: int) -> float:
    """Median microseconds of one call; every burst has calls of its own, prepared outside the time."""
    samples = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(bursts):
            burst = prepare()
            runtime.synchronize()
            started = time.perf_counter_ns()
            for call in burst:
                call()
            samples.append((time.perf_counter_ns() - started) / len(burst))
        runtime.synchronize()
    finally:
        gc.enable()
    return median(samples) / 1e3
