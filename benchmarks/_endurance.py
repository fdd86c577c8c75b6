"""Graphs that run for long: rebound a hundred thousand times, and replayed over a context that grows."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

import nxrt_cuda as nx
from benchmarks._bench import Bench, WrongResultError, progress
from benchmarks._stopwatch import Row
from nxrt_cuda.reference.attention import attention
from nxrt_cuda.reference.dsa_index_select import dsa_index_select

__all__ = ["measure_decode", "measure_rebinding"]

_REPLAYS = 100_000
_QUICK_REPLAYS = 40
_WARM = 0.05
"""The part of the replays that comes before memory is looked at: caches fill, and arenas of malloc grow."""

_HOST_SLACK = 4 << 20
"""Bytes by which the process may be larger after all replays, of whatever else it does."""


def measure_rebinding(bench: Bench) -> Iterator[Row]:
    """Replays of DsaIndexSelect's launches, each on another query.

    Raises:
        WrongResultError: memory has grown.
    """
    replays = _QUICK_REPLAYS if bench.quick else _REPLAYS
    progress(f"{replays} replays, rebound")
    runtime = bench.runtime
    select = _Select(runtime, capacity=256)
    queries = [runtime.zeros(select.query.shape, select.query.dtype) for _ in range(4)]
    select.execute()
    with runtime.capture([select.kernel]) as graph:
        select.execute()
    bound = select.query
    warm = int(_WARM * replays)
    for count in range(warm + replays):
        if count == warm:
            runtime.synchronize()
            gc.collect()
            before, started = _memory(runtime), perf_counter_ns()
        following = queries[count % len(queries)]
        graph.rebind({bound: following})
        graph.replay()
        bound = following
    us = (perf_counter_ns() - started) / replays / 1000
    runtime.synchronize()
    gc.collect()
    device, host = (after - earlier for after, earlier in zip(_memory(runtime), before, strict=True))
    if device != 0 or host > _HOST_SLACK:
        raise WrongResultError(f"{replays} replays, each rebound, leave {device} bytes on the device and {host} here")
    note = f"{replays} of them: {device:+} bytes on the device, {host / 2**20:+.1f} MiB in the process"
    yield Row("graph.rebind() and replay()", us, launches=graph.node_count, note=note)


def _memory(runtime: nx.CudaRuntime) -> tuple[int, int]:
    """Bytes in use on the device, and bytes of this process that are in memory."""
    with runtime._session.driving("memory") as driver:
        free, total = driver.mem_get_info()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total - free, resident


class _Select:
    """DsaIndexSelect of one token over a cache, of which a bias hides what is not written yet."""

    def __init__(self, runtime: nx.CudaRuntime, capacity: int, heads: int = 8, head_dim: int = 64) -> None:
        self.attributes: dict[str, Any] = {"top_k": min(64, capacity // 2), "scale": head_dim**-0.5}
        self.kernel = nx.create_kernel(runtime, nx.Node("DsaIndexSelect", "pkg.nxrt", self.attributes))
        self.query = runtime.zeros((1, 1, heads, head_dim), nx.bfloat16)
        self.keys = runtime.zeros((1, capacity, head_dim), nx.bfloat16)
        self.weights = runtime.zeros((1, 1, heads), nx.bfloat16)
        self.bias = runtime.from_array(np.full((1, 1, 1, capacity), -np.inf, np.float32))
        self.selected = runtime.empty((1, 1, 1, self.attributes["top_k"]), nx.int64)
        inputs = [self.query, self.keys, self.weights, self.bias]
        self.execute = partial(self.kernel.execute, inputs, [self.selected])


class _Attend:
    """Attention of one token to the keys of a cache that are in use; all heads share them."""

    def __init__(self, runtime: nx.CudaRuntime, capacity: int, heads: int = 8, head_dim: int = 64) -> None:
        self.kernel = nx.create_kernel(runtime, nx.Node("Attention"))
        self.query = runtime.zeros((1, heads, 1, head_dim), nx.float16)
        self.keys, self.values = (runtime.zeros((1, 1, capacity, head_dim), nx.float16) for _ in range(2))
        self.length = runtime.from_array(np.ones(1, np.int32))
        self.context = runtime.empty(self.query.shape, nx.float16)
        inputs = [self.query, self.keys, self.values, None, self.length]
        self.execute = partial(self.kernel.execute, inputs, [self.context])


def measure_decode(bench: Bench) -> Iterator[Row]:
    """A decode loop: every step appends to the caches, and replays the graph that the first one was recorded in.

    Raises:
        WrongResultError: a step computes something else than the oracles, or is anything but one replay.
    """
    runtime, rng = bench.runtime, np.random.default_rng(3)
    capacity = 8 if bench.quick else 512
    progress(f"a decode loop of {capacity} steps")
    select, attend = _Select(runtime, capacity), _Attend(runtime, capacity)
    executions = (select.execute, attend.execute)
    for execute in executions:
        execute()
    with runtime.capture([select.kernel, attend.kernel]) as graph:
        for execute in executions:
            execute()
    drawn = {
        tensor: rng.standard_normal((capacity, *shape), np.float32)
        for tensor, shape in (
            (select.query, select.query.shape),
            (select.weights, select.weights.shape),
            (attend.query, attend.query.shape),
            (select.keys, (1, 1, 64)),
            (attend.keys, (1, 1, 1, 64)),
            (attend.values, (1, 1, 1, 64)),
        )
    }
    before, started, checking = runtime.stats(), perf_counter_ns(), 0
    for position in range(capacity):
        for tensor in (select.query, select.weights, attend.query):
            tensor.copy_from(drawn[tensor][position])
        select.keys.narrow(1, position, 1).copy_from(drawn[select.keys][position])
        attend.keys.narrow(2, position, 1).copy_from(drawn[attend.keys][position])
        attend.values.narrow(2, position, 1).copy_from(drawn[attend.values][position])
        select.bias.narrow(3, position, 1).copy_from(np.zeros((1, 1, 1, 1), np.float32))
        attend.length.copy_from(np.array([position + 1], np.int32))
        graph.replay()
        if position & (position + 1) == 0:  # lengths 1, 2, 4, 8 and so on
            begun = perf_counter_ns()
            _check_step(select, attend, position + 1)
            checking += perf_counter_ns() - begun
    us = (perf_counter_ns() - started - checking) / capacity / 1000
    done = runtime.stats().since(before)
    if (done.graph_replays, done.graphs_captured, done.launches) != (capacity, 0, 0):
        raise WrongResultError(f"{capacity} decode steps are {done}")
    note = f"lengths 1 to {capacity} in one graph: {done.graphs_captured} captures, {done.launches} launches"
    yield Row("decode step: uploads, one replay", us, launches=graph.node_count, note=note)


def _check_step(select: _Select, attend: _Attend, length: int) -> None:
    """Compare a step with the oracles."""
    query, keys, weights, bias = (view.numpy() for view in (select.query, select.keys, select.weights, select.bias))
    if not np.array_equal(select.selected.numpy(), dsa_index_select(query, keys, weights, bias, **select.attributes)):
        raise WrongResultError(f"DsaIndexSelect over {length} positions differs from the oracle")
    query, keys, values = (view.numpy() for view in (attend.query, attend.keys, attend.values))
    lengths = np.array([length], np.int32)
    expected = attention(query, keys, values, total_lengths=lengths, scale=query.shape[-1] ** -0.5)
    error = float(np.abs(attend.context.numpy() - expected).max())
    if not error < 5e-3:
        raise WrongResultError(f"attention to {length} keys is off by {error}")
