"""Other ways to launch a kernel and replay a graph: the bare driver calls, PyTorch, Triton, cuda.core, CuPy.

The probe is an empty kernel with twenty parameters. The bare calls launch ours on our stream; every library
launches one of its own on a stream of its own, and drains that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

import nxrt_cuda as nx
from benchmarks._launch_ops import Op
from benchmarks._stopwatch import Row, Stopwatch
from benchmarks._timing import DeviceClock, Subject, time_subjects

__all__ = ["BARE_GRAPH", "BARE_LAUNCH", "BARE_SEQUENCE", "ENTRY", "PEERS", "probe", "replay_us"]

BARE_LAUNCH = "cuLaunchKernel, arguments packed"
BARE_GRAPH = "cuGraphLaunch, 1 node"

_REPLAY_RATIO = 1.15
_SEQUENCE = 64
_SEQUENCE_RATIO = 1.1
BARE_SEQUENCE = f"cuGraphLaunch, {_SEQUENCE} nodes, on the device"

_POINTERS = 7
_INTEGERS = 11
_FLOATS = 2
_PARAMS = (
    *((f"p{i}", "ptr") for i in range(_POINTERS)),
    *((f"i{i}", "i32") for i in range(_INTEGERS)),
    *((f"f{i}", "f32") for i in range(_FLOATS)),
)
_CUDA_TYPES = {"ptr": "float*", "i32": "int", "f32": "float"}
ENTRY = "launch_probe"
_SOURCE = (
    f'extern "C" __global__ void {ENTRY}('
    + ", ".join(f"{_CUDA_TYPES[kind]} {name}" for name, kind in _PARAMS)
    + ") {}\n"
)
_THREADS = 32


def probe(runtime: nx.CudaRuntime) -> nx.PreparedLaunch:
    function = runtime.nvrtc_function("launch_probe.cu", _SOURCE, ENTRY, _PARAMS, threads=_THREADS)
    tensors = [runtime.empty((16,), nx.float32) for _ in range(_POINTERS)]
    config = nx.LaunchConfig(grid=(1, 1, 1), block=(_THREADS, 1, 1))
    return runtime.prepare(function, config, *tensors, *range(2, 2 + _INTEGERS), *(0.5 for _ in range(_FLOATS)))


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call of cuda.bindings returns beside its status."""
    status, *values = result
    if status:
        raise RuntimeError(status.name)
    return values[0] if values else None


@contextmanager
def _current_context(runtime: nx.CudaRuntime) -> Iterator[None]:
    from cuda.bindings import driver

    _checked(driver.cuCtxPushCurrent(runtime.context))
    try:
        yield
    finally:
        _checked(driver.cuCtxPopCurrent())


def _measure_bindings(runtime: nx.CudaRuntime, bursts: int) -> Iterator[Row]:
    """The driver's own calls, on our kernel and our stream."""
    from cuda.bindings import driver

    prepared, stream = probe(runtime), runtime.stream
    stopwatch = Stopwatch(runtime.synchronize, bursts)
    with _current_context(runtime):
        launch = partial(
            driver.cuLaunchKernel,
            prepared.function.handle,
            *prepared.config.grid,
            *prepared.config.block,
            0,
            stream,
            prepared.params,
            0,
        )
        _checked(launch())
        yield Row(BARE_LAUNCH, stopwatch.us(launch))
        yield Row(
            "rt.launch(prepared), context current", stopwatch.us(partial(runtime.launch, prepared)), bare=BARE_LAUNCH
        )
        with runtime.capture() as graph:
            runtime.launch(prepared)
        yield from _measure_replays(runtime, graph, stopwatch, "1 node", BARE_GRAPH)
        dsa = Op.dsa(runtime)
        execute = dsa.call()
        execute()
        with runtime.capture([dsa.kernel]) as graph:
            execute()
        yield from _measure_replays(runtime, graph, stopwatch, dsa.name, f"cuGraphLaunch, {dsa.name}")
        with runtime.capture() as graph:
            for _ in range(_SEQUENCE):
                runtime.launch(prepared)
        with _bare_graph(stream, launch, _SEQUENCE) as replay:
            subjects = {"ours": Subject(graph.replay, 1), "bare": Subject(replay, 1)}
            times = time_subjects(DeviceClock(runtime), subjects)
        yield Row(BARE_SEQUENCE, 1000 * times["bare"].ms, launches=_SEQUENCE)
        what = f"graph.replay(), {_SEQUENCE} nodes, on the device"
        us = 1000 * times["ours"].ms
        yield Row(what, us, launches=_SEQUENCE, bare=BARE_SEQUENCE, target_ratio=_SEQUENCE_RATIO)


def _measure_replays(
    runtime: nx.CudaRuntime, graph: nx.CapturedGraph, stopwatch: Stopwatch, what: str, bare: str
) -> Iterator[Row]:
    ours, theirs = replay_us(runtime, graph, stopwatch)
    nodes = graph.node_count
    yield Row(bare, theirs, launches=nodes)
    yield Row(f"graph.replay(), {what}", ours, launches=nodes, bare=bare, target_ratio=_REPLAY_RATIO)


def replay_us(runtime: nx.CudaRuntime, graph: nx.CapturedGraph, stopwatch: Stopwatch) -> tuple[float, float]:
    """What a replay of a graph of one segment costs the host, and the driver's own launch of its executable, in turns.

    Microseconds; the driver's is through cuda.bindings and nothing else.
    """
    from cuda.bindings import driver

    (segment,) = graph._segments
    launch = partial(driver.cuGraphLaunch, segment.executable, runtime.stream)
    _checked(launch())
    ours, theirs = stopwatch.us_in_turns(graph.replay, launch)
    return ours, theirs


@contextmanager
def _bare_graph(stream: int, launch: Callable[[], tuple[Any, ...]], launches: int) -> Iterator[Callable[[], object]]:
    """``launches`` of the same kernel, captured and instantiated by the driver's own calls; what replays them."""
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    _checked(driver.cuStreamBeginCapture(stream, mode))
    for _ in range(launches):
        _checked(launch())
    graph = _checked(driver.cuStreamEndCapture(stream))
    executable = _checked(driver.cuGraphInstantiate(graph, 0))
    replay = partial(driver.cuGraphLaunch, executable, stream)
    _checked(replay())
    yield replay
    _checked(driver.cuGraphExecDestroy(executable))
    _checked(driver.cuGraphDestroy(graph))


def _measure_torch(runtime: nx.CudaRuntime, bursts: int) -> Iterator[Row]:
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        stopwatch = Stopwatch(torch.cuda.current_stream().synchronize, bursts)
        x, y, out = torch.ones(3, 16, device="cuda")
        add = partial(torch.add, x, y, out=out)
        add()
        yield Row("torch.add(out=...)", stopwatch.us(add))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            add()
        yield Row("torch CUDAGraph.replay(), 1 node", stopwatch.us(graph.replay), bare=BARE_GRAPH)


def _measure_triton(runtime: nx.CudaRuntime, bursts: int) -> Iterator[Row]:
    import torch
    import triton

    @triton.jit
    def probe(p0, p1, p2, p3, p4, p5, p6, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, f0, f1):  # type: ignore[no-untyped-def]
        pass

    tensors = [torch.empty(16, device="cuda") for _ in range(_POINTERS)]
    launch = partial(probe[(1,)], *tensors, *range(2, 2 + _INTEGERS), *(0.5 for _ in range(_FLOATS)), num_warps=1)
    launch()
    yield Row("Triton, 20 arguments", Stopwatch(torch.cuda.synchronize, bursts).us(launch), bare=BARE_LAUNCH)


def _scalars() -> tuple[np.generic, ...]:
    return (*(np.int32(2 + i) for i in range(_INTEGERS)), *(np.float32(0.5) for _ in range(_FLOATS)))


def _measure_core(runtime: nx.CudaRuntime, bursts: int) -> Iterator[Row]:
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    stopwatch = Stopwatch(stream.sync, bursts)
    program = Program(_SOURCE, "c++", ProgramOptions(arch=f"sm_{device.arch}"))
    kernel = program.compile("cubin").get_kernel(ENTRY)
    config = LaunchConfig(grid=1, block=_THREADS)
    buffer = device.allocate(64, stream=stream)
    arguments = (config, kernel, *(buffer for _ in range(_POINTERS)), *_scalars())
    probe = partial(launch, stream, *arguments)
    probe()
    yield Row("cuda.core launch, 20 arguments", stopwatch.us(probe), bare=BARE_LAUNCH)
    builder = stream.create_graph_builder().begin_building()
    launch(builder, *arguments)
    graph = builder.end_building().complete()
    yield Row("cuda.core Graph.launch, 1 node", stopwatch.us(partial(graph.launch, stream)), bare=BARE_GRAPH)


def _measure_cupy(runtime: nx.CudaRuntime, bursts: int) -> Iterator[Row]:
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        stopwatch = Stopwatch(stream.synchronize, bursts)
        kernel = cupy.RawKernel(_SOURCE, ENTRY)
        arrays = (cupy.zeros(16, cupy.float32) for _ in range(_POINTERS))
        probe = partial(kernel, (1,), (_THREADS,), (*arrays, *_scalars()))
        probe()
        yield Row("CuPy RawKernel, 20 arguments", stopwatch.us(probe), bare=BARE_LAUNCH)
        stream.begin_capture()
        probe()
        graph = stream.end_capture()
        yield Row("CuPy Graph.launch, 1 node", stopwatch.us(partial(graph.launch, stream)), bare=BARE_GRAPH)


PEERS = {
    "cuda.bindings": ("cuda.bindings", _measure_bindings),
    "PyTorch": ("torch", _measure_torch),
    "Triton": ("triton", _measure_triton),
    "cuda.core": ("cuda.core", _measure_core),
    "CuPy": ("cupy", _measure_cupy),
}
