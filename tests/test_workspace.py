"""Workspaces: one address while they are large enough, growth outside captures only, and the ledger."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.stats import WorkspaceLedger
from nxrt_cuda.workspace import Workspace, WorkspaceSlot
from tests.small_kernels import ADD_ONE


@pytest.fixture
def process() -> WorkspaceLedger:
    """Stands for the ledger of all kernels of an operator."""
    return WorkspaceLedger()


def grow(workspace: Workspace, nbytes: int) -> WorkspaceSlot:
    slot = workspace.candidate(nbytes)
    workspace.publish(slot)
    return slot


def test_an_unused_workspace_holds_nothing(rt: nx.CudaRuntime, process: WorkspaceLedger) -> None:
    workspace = Workspace(rt, "Op", process)
    assert (workspace.ptr, workspace.nbytes, workspace.device_graph_resources()) == (0, 0, ())
    assert workspace.stats() == nx.WorkspaceStats()


def test_it_stays_where_it_is_while_it_is_large_enough(rt: nx.CudaRuntime, process: WorkspaceLedger) -> None:
    workspace = Workspace(rt, "Op", process)
    slot = grow(workspace, 1000)
    before = rt.stats()
    for nbytes in (1000, 1, 0, 999):
        assert workspace.candidate(nbytes) is slot
    assert rt.stats() == before
    assert (workspace.ptr, workspace.nbytes) == (slot.ptr, 1000)
    assert slot.ptr % 256 == 0


def test_a_candidate_that_is_not_published_leaves_the_workspace_as_it_was(
    rt: nx.CudaRuntime, process: WorkspaceLedger
) -> None:
    """A failed execution has not moved the workspace of the graphs that recorded it."""
    workspace = Workspace(rt, "Op", process)
    slot = grow(workspace, 100)
    candidate = workspace.candidate(5000)
    assert candidate is not slot
    assert workspace.ptr == slot.ptr
    address = candidate.ptr
    del candidate
    assert workspace.stats() == nx.WorkspaceStats(allocations=2, releases=1, live_bytes=100, last_ptr=address)


def test_growth_is_counted_here_and_for_the_process(rt: nx.CudaRuntime, process: WorkspaceLedger) -> None:
    one, two = Workspace(rt, "Op", process), Workspace(rt, "Op", process)
    grow(one, 100)
    slot = grow(two, 200)
    grow(one, 300)
    assert one.stats() == nx.WorkspaceStats(allocations=2, releases=1, live_bytes=300, last_ptr=one.ptr)
    assert two.stats() == nx.WorkspaceStats(allocations=1, releases=0, live_bytes=200, last_ptr=slot.ptr)
    assert process.stats() == nx.WorkspaceStats(allocations=3, releases=1, live_bytes=500, last_ptr=one.ptr)
    two.candidate(1)
    assert process.stats().last_ptr == slot.ptr


def test_counters_are_reset_only_when_nothing_is_live(rt: nx.CudaRuntime, process: WorkspaceLedger) -> None:
    workspace = Workspace(rt, "Op", process)
    slot = grow(workspace, 100)
    counted = process.stats()
    assert process.reset() is False
    assert process.stats() == counted
    del workspace, slot
    gc.collect()
    assert process.stats().live_bytes == 0
    assert process.reset() is True
    assert process.stats() == nx.WorkspaceStats()


def test_growth_in_a_capture_is_refused_and_nothing_changes(rt: nx.CudaRuntime, process: WorkspaceLedger) -> None:
    workspace = Workspace(rt, "Op", process)
    slot = grow(workspace, 100)
    counted = workspace.stats()
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)
        with pytest.raises(nx.CaptureError) as caught:
            workspace.candidate(101)
        assert workspace.candidate(100) is slot
    assert str(caught.value) == (
        "cuda_ep Op: workspace requires 101 bytes during CUDA graph capture; warm the fixed shape before capture"
    )
    assert (caught.value.operation, caught.value.state) == ("workspace growth", "capturing")
    assert workspace.stats() == counted
    graph.replay()
    np.testing.assert_array_equal(x.numpy(), np.ones(4))


def test_growth_that_finds_no_memory_changes_nothing(rt: nx.CudaRuntime, process: WorkspaceLedger) -> None:
    workspace = Workspace(rt, "Op", process)
    grow(workspace, 100)
    counted = process.stats()
    with pytest.raises(nx.OutOfMemoryError):
        workspace.candidate(1 << 40)
    assert process.stats() == counted


def test_a_replaced_workspace_lives_on_in_the_graphs_that_recorded_it(
    rt: nx.CudaRuntime, process: WorkspaceLedger
) -> None:
    workspace = Workspace(rt, "Op", process)
    slot = grow(workspace, 16)
    launch = ADD_ONE.prepare(rt, 4, slot.ptr, 4)
    with rt.capture() as graph:
        rt.launch(launch)
        rt.retain(workspace.device_graph_resources())
    del slot
    frees = rt._driver.calls["mem_free"]
    grow(workspace, 5000)
    rt.trim_pool()
    assert process.stats().live_bytes == 16 + 5000
    graph.replay()
    rt.synchronize()
    graph.close()
    rt.trim_pool()
    assert process.stats().live_bytes == 5000
    assert rt._driver.calls["mem_free"] == frees + 1


def test_a_replaced_workspace_returns_after_the_work_that_uses_it(rt: nx.CudaRuntime, process: WorkspaceLedger) -> None:
    """The launch is still queued when the larger one takes its place; the host driver faults if it is freed early."""
    workspace = Workspace(rt, "Op", process)
    slot = grow(workspace, 16)
    rt.launch(ADD_ONE.prepare(rt, 4, slot.ptr, 4))
    before = rt.stats()
    del slot
    larger = grow(workspace, 5000)
    rt.trim_pool()
    seen = rt.stats().since(before)
    assert (seen.driver_allocations, seen.driver_frees) == (1, 1)
    assert workspace.stats() == nx.WorkspaceStats(allocations=2, releases=1, live_bytes=5000, last_ptr=larger.ptr)


def test_no_two_workspaces_share_memory(rt: nx.CudaRuntime, process: WorkspaceLedger) -> None:
    workspaces = [Workspace(rt, "Op", process) for _ in range(10)]
    slots = [grow(workspace, 512) for workspace in workspaces]
    assert len({slot.ptr for slot in slots}) == 10


def test_the_graph_resource_is_the_present_slot(rt: nx.CudaRuntime, process: WorkspaceLedger) -> None:
    workspace = Workspace(rt, "Op", process)
    first = grow(workspace, 100)
    (before,) = workspace.device_graph_resources()
    second = grow(workspace, 200)
    (after,) = workspace.device_graph_resources()
    assert (before.resource, after.resource) == (first, second)
    assert before.key != after.key
