"""What warmed calls cost the host.

Times are medians over bursts of eight calls after a drain: a longer burst fills the queue, and then times the device.
Of several medians the best one counts, for whatever else the machine does only adds to them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import nxrt_cuda as nx
from benchmarks._stopwatch import Stopwatch
from tests.small_kernels import ADD_ONE

pytestmark = pytest.mark.alone

_EXECUTE_US = 25.0
_REPLAY_US = 3.0
_REPLAY_RATIO = 1.15
"""Where a bare cuGraphLaunch alone takes nearly as long, a replay may take this many times that."""

_MEDIANS = 7
_BURSTS = 50


def host_us(rt: nx.CudaRuntime, call: Callable[[], object]) -> float:
    stopwatch = Stopwatch(rt.synchronize, _BURSTS)
    return min(stopwatch.us(call) for _ in range(_MEDIANS))


def attention(rt: nx.CudaRuntime) -> tuple[nx.Kernel, Callable[[], None]]:
    kernel = nx.create_kernel(rt, nx.Node("Attention", attributes={"is_causal": 1}))
    inputs = [rt.zeros((1, 8, 64, 64), nx.float16) for _ in range(3)]
    outputs = [rt.empty((1, 8, 64, 64), nx.float16)]
    return kernel, lambda: kernel.execute(inputs, outputs)


def dsa(rt: nx.CudaRuntime) -> tuple[nx.Kernel, Callable[[], None]]:
    node = nx.Node("DsaIndexSelect", domain="pkg.nxrt", attributes={"top_k": 64, "scale": 0.125})
    kernel = nx.create_kernel(rt, node)
    inputs = [
        rt.zeros((1, 1, 8, 64), nx.bfloat16),
        rt.zeros((1, 1024, 64), nx.bfloat16),
        rt.zeros((1, 1, 8), nx.bfloat16),
        rt.zeros((1, 1, 1, 1024), nx.float32),
    ]
    outputs = [rt.empty((1, 1, 1, 64), nx.int64)]
    return kernel, lambda: kernel.execute(inputs, outputs)


@pytest.mark.parametrize("make", [attention, dsa])
def test_executing_a_warmed_kernel_costs_the_host_at_most_25_us(
    rt: nx.CudaRuntime, make: Callable[[nx.CudaRuntime], tuple[nx.Kernel, Callable[[], None]]]
) -> None:
    _, execute = make(rt)
    execute()
    assert host_us(rt, execute) <= _EXECUTE_US


def bare_us(rt: nx.CudaRuntime, graph: nx.CapturedGraph) -> float:
    """The driver's own launch of the same executable, through cuda.bindings and nothing else."""
    from cuda.bindings import driver

    (executable,) = graph._executables
    return host_us(rt, lambda: driver.cuGraphLaunch(executable, rt.stream))


def test_replaying_one_launch_costs_the_host_little_more_than_the_driver(rt: nx.CudaRuntime) -> None:
    launch = ADD_ONE.prepare(rt, 4, rt.zeros((4,), nx.float32), 4)
    with rt.capture() as graph:
        rt.launch(launch)
    graph.replay()
    assert host_us(rt, graph.replay) <= max(_REPLAY_US, _REPLAY_RATIO * bare_us(rt, graph))


def test_replaying_a_kernel_s_launches_costs_the_host_little_more_than_the_driver(rt: nx.CudaRuntime) -> None:
    kernel, execute = dsa(rt)
    execute()
    with rt.capture([kernel]) as graph:
        execute()
    graph.replay()
    assert host_us(rt, graph.replay) <= max(_REPLAY_US, _REPLAY_RATIO * bare_us(rt, graph))
