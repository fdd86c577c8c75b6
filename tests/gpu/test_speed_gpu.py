"""What warmed calls cost the host.

Times are medians over bursts of eight calls after a drain: a longer burst fills the queue, and then times the device.
Of several medians the best one counts, for whatever else the machine does only adds to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

import nxrt_cuda as nx
from benchmarks._launch_ops import Op
from benchmarks._launch_peers import replay_us
from benchmarks._stopwatch import BURST, Call, Stopwatch
from tests.small_kernels import ADD_ONE

pytestmark = pytest.mark.alone

_EXECUTE_RATIO = 1.7
"""How many times the bare launches that it makes an execution on the same tensors may take."""

_NEW_TENSORS_US = 12.0
_NEW_TENSORS_RATIO = 3.0
"""Where bare launches alone take nearly as long, an execution on new tensors may take this many times theirs: it is
some hundred lines of Python that look at every operand, and a slow host is slow at both."""

_REPLAY_US = 3.0
_REPLAY_RATIO = 1.15
"""Where a bare cuGraphLaunch alone takes nearly as long, a replay may take this many times that."""

_MEDIANS = 7
_BURSTS = 50


def host_us(rt: nx.CudaRuntime, call: Call) -> float:
    return us_of_bursts(rt, lambda: [call] * BURST)


def us_of_bursts(rt: nx.CudaRuntime, prepare: Callable[[], Sequence[Call]]) -> float:
    stopwatch = Stopwatch(rt.synchronize, _BURSTS)
    return min(stopwatch.us_of_bursts(prepare) for _ in range(_MEDIANS))


OPERATORS = [Op.attention, Op.dsa]


def bare_us(rt: nx.CudaRuntime, operator: Op) -> float:
    """The driver's own launches of what the kernel launched last, through cuda.bindings and nothing else."""
    from cuda.bindings import driver

    return sum(
        host_us(
            rt,
            partial(
                driver.cuLaunchKernel,
                launch.function.handle,
                *launch.config.grid,
                *launch.config.block,
                launch.config.shared_bytes,
                rt.stream,
                launch.params,
                0,
            ),
        )
        for launch in operator.kernel._short_way._plan.launches
    )


@pytest.mark.parametrize("make", OPERATORS)
def test_executing_on_the_same_tensors_costs_the_host_little_more_than_its_launches(
    rt: nx.CudaRuntime, make: Callable[[nx.CudaRuntime], Op]
) -> None:
    operator = make(rt)
    execute = operator.call()
    assert host_us(rt, execute) <= _EXECUTE_RATIO * bare_us(rt, operator)


@pytest.mark.parametrize("make", OPERATORS)
def test_executing_on_new_tensors_of_the_same_shapes_costs_the_host_at_most_12_us(
    rt: nx.CudaRuntime, make: Callable[[nx.CudaRuntime], Op]
) -> None:
    operator = make(rt)
    execute = operator.call()
    execute()
    execute()
    us = us_of_bursts(rt, lambda: operator.calls(BURST))
    execute()
    execute()
    assert us <= max(_NEW_TENSORS_US, _NEW_TENSORS_RATIO * bare_us(rt, operator))


def check_replays(rt: nx.CudaRuntime, graph: nx.CapturedGraph) -> None:
    """Beside the driver's own launch of the same executable."""
    stopwatch = Stopwatch(rt.synchronize, _BURSTS)
    medians = [replay_us(rt, graph, stopwatch) for _ in range(_MEDIANS)]
    ours, bare = map(min, zip(*medians, strict=True))
    assert ours <= max(_REPLAY_US, _REPLAY_RATIO * bare)


def test_replaying_one_launch_costs_the_host_little_more_than_the_driver(rt: nx.CudaRuntime) -> None:
    launch = ADD_ONE.prepare(rt, 4, rt.zeros((4,), nx.float32), 4)
    with rt.capture() as graph:
        rt.launch(launch)
    check_replays(rt, graph)


def test_replaying_a_kernel_s_launches_costs_the_host_little_more_than_the_driver(rt: nx.CudaRuntime) -> None:
    operator = Op.dsa(rt)
    execute = operator.call()
    execute()
    with rt.capture([operator.kernel]) as graph:
        execute()
    check_replays(rt, graph)
