"""What ``nxrt_cuda.testing`` gives to the tests of others."""

from __future__ import annotations

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.testing import Counts, count
from tests.small_kernels import ADD_ONE

pytest_plugins = ["pytester"]


def test_counts_are_of_the_with_block_alone(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)
    with count(rt) as seen:
        rt.launch(launch)
        graph.replay()
        graph.replay()
        assert (seen.launches, seen.replays) == (1, 2)
        x.copy_from(np.ones(4))
        x.numpy()
        x.numpy()
        fresh = rt.empty((4,), nx.float32)
        fresh.free()
        rt.empty((4,), nx.float32)
    rt.launch(launch)
    x.numpy()
    assert (seen.launches, seen.replays, seen.allocations) == (1, 2, 2)
    assert (seen.htod_copies, seen.dtoh_copies, seen.compiles) == (1, 2, 0)
    assert seen.stats.htod_bytes == 16


def test_an_allocation_counts_whether_or_not_the_pool_served_it(rt: nx.CudaRuntime) -> None:
    rt.empty((4,), nx.float32).free()
    with count(rt) as seen:
        rt.empty((4,), nx.float32)
    assert (seen.allocations, seen.stats.pool_hits, seen.stats.driver_allocations) == (1, 1, 0)


def test_a_compile_is_counted(rt: nx.CudaRuntime) -> None:
    with count(rt) as seen:
        ADD_ONE.load(rt)
        ADD_ONE.load(rt)
    assert seen.compiles == 1


def test_counts_stay_readable_after_an_error_and_after_close() -> None:
    runtime = nx.open_runtime("host")
    seen: Counts | None = None

    def body() -> None:
        nonlocal seen
        with count(runtime) as seen:
            runtime.zeros((4,), nx.float32)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    runtime.close()
    assert seen is not None
    assert seen.allocations == 1
    assert "memsets" in repr(seen)
    assert "launches" not in repr(seen)


def test_counts_nest(rt: nx.CudaRuntime) -> None:
    with count(rt) as outer:
        rt.zeros((4,), nx.float32)
        with count(rt) as inner:
            rt.zeros((4,), nx.float32)
    assert (outer.stats.memsets, inner.stats.memsets) == (2, 1)


def test_the_fixture_is_a_runtime_on_what_there_is(nxrt_runtime: nx.CudaRuntime) -> None:
    assert nxrt_runtime.device in ("host", "cuda:0")
    np.testing.assert_array_equal(nxrt_runtime.zeros((4,), nx.float32).numpy(), np.zeros(4))


def test_another_project_gets_the_fixture_by_naming_the_plugin(pytester: pytest.Pytester) -> None:
    """And the runtime is closed after each test."""
    pytester.makeconftest('pytest_plugins = ["nxrt_cuda.testing"]')
    pytester.makepyfile(
        """
        from nxrt_cuda.testing import count
        kept = []

        def test_first(nxrt_runtime):
            with count(nxrt_runtime) as seen:
                nxrt_runtime.alloc_raw(4)
            assert seen.allocations == 1
            kept.append(nxrt_runtime)

        def test_second(nxrt_runtime):
            assert kept[0].is_closed
            assert not nxrt_runtime.is_closed
        """
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)
