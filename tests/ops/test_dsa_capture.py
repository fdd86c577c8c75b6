"""DsaIndexSelect in CUDA graphs: when it may be recorded, and that a replay is a run."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.ops.dsa_index_select import dsa_workspace_stats
from nxrt_cuda.testing import count
from tests.dsa_cases import DTYPES, INF, DsaCase, DsaOperands, biased, random_case

NOT_WARMED = (
    "requires a warmed fixed-shape eager DsaIndexSelect pass to compile the NVRTC kernel and size the "
    "kernel-owned workspace"
)


def ramp(keys: int) -> DsaCase:
    return biased("ramp", np.arange(keys), 5, np.arange(keys)[-5:])


def test_capture_is_declined_before_a_warm_up(rt: nx.CudaRuntime) -> None:
    """The reason says what is missing, and nothing is recorded."""
    case = ramp(20)
    kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
    assert kernel.capture_support().reason == NOT_WARMED
    with pytest.raises(nx.CaptureError) as refusal, rt.capture([kernel]):
        pytest.fail("the capture was opened")
    assert NOT_WARMED in str(refusal.value)
    assert not rt.is_capturing()
    kernel.execute(operands.inputs, [operands.output])
    assert kernel.capture_support() == nx.CaptureSupport.supported()


def test_a_refused_call_is_no_warm_up(rt: nx.CudaRuntime) -> None:
    """Capture support does not come from a call that launched nothing."""
    case = ramp(20)
    kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
    with pytest.raises(nx.KernelError):
        kernel.execute(operands.inputs[:3], [operands.output])
    assert not kernel.capture_support()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("q_seq", [1, 19])
def test_replays_are_byte_identical_to_eager_runs(rt: nx.CudaRuntime, dtype: np.dtype, q_seq: int) -> None:
    """Only buffer contents change between replays: every input anew, the addresses never."""
    shape = {"batch": 2, "q_seq": q_seq, "heads": 6, "head_dim": 32, "key_seq": 300, "top_k": 128}
    first, *later = (random_case(seed, dtype, **shape, values="integers") for seed in range(5))
    later = [replace(case, scale=first.scale, weights_scale=first.weights_scale) for case in later]
    kernel, operands = nx.create_kernel(rt, first.node), DsaOperands(rt, first)
    kernel.execute(operands.inputs, [operands.output])
    operands.clear()
    with rt.capture([kernel]) as graph:
        kernel.execute(operands.inputs, [operands.output])
    assert (operands.selected() == -77).all(), "recording is not running"
    assert [label.split()[0] for label in graph.kernels] == ["dsa_index_select_score", "dsa_index_select_select"]
    ptr = kernel.workspace_stats().last_ptr
    for case in (first, *later):
        operands.rewrite(case)
        operands.clear()
        with count(rt) as seen:
            graph.replay()
        replayed = operands.selected()
        operands.clear()
        kernel.execute(operands.inputs, [operands.output])
        np.testing.assert_array_equal(replayed, operands.selected())
        np.testing.assert_array_equal(replayed, case.oracle())
        assert (seen.replays, seen.launches, seen.allocations) == (1, 0, 0)
    assert kernel.workspace_stats().last_ptr == ptr
    assert kernel.workspace_stats().allocations == 1


def test_the_number_of_allowed_keys_may_change_between_replays(rt: nx.CudaRuntime) -> None:
    """3, then 64, 300 and no allowed keys: every replay writes the whole row, and nothing is left over."""
    case = random_case(3, DTYPES[1], q_seq=2, heads=4, head_dim=16, key_seq=300, top_k=64, mask="none")
    kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture([kernel]) as graph:
        kernel.execute(operands.inputs, [operands.output])
    for allowed in (3, 64, 300, 0):
        bias = np.where(np.arange(300) < allowed, np.float32(0), -INF) * np.ones((1, 1, 2, 1), np.float32)
        operands.inputs[3].copy_from(bias)
        graph.replay()
        np.testing.assert_array_equal(operands.selected(), replace(case, bias=bias).oracle())


def test_growth_in_a_capture_is_refused_before_anything_is_recorded(rt: nx.CudaRuntime) -> None:
    """The message says how many bytes; the capture stays usable, and the workspace as it was."""
    small, large = ramp(20), ramp(2000)
    kernel = nx.create_kernel(rt, small.node)
    operands, grown = DsaOperands(rt, small), DsaOperands(rt, large)
    kernel.execute(operands.inputs, [operands.output])
    before = kernel.launch_stats(), kernel.workspace_stats()
    with rt.capture([kernel]) as graph:
        with pytest.raises(nx.CaptureError) as refusal:
            kernel.execute(grown.inputs, [grown.output])
        assert (kernel.launch_stats(), kernel.workspace_stats()) == before
        kernel.execute(operands.inputs, [operands.output])
    assert str(refusal.value) == (
        "cuda_ep DsaIndexSelect: workspace requires 10240 bytes during CUDA graph capture; "
        "warm the fixed shape before capture"
    )
    assert graph.node_count == 2
    graph.replay()
    np.testing.assert_array_equal(operands.selected(), small.expected)
    np.testing.assert_array_equal(grown.selected(), np.full(large.expected.shape, -77))


def test_an_unwarmed_kernel_is_refused_inside_a_capture_too(rt: nx.CudaRuntime) -> None:
    """A kernel object that nobody announced to the capture cannot slip in."""
    case = ramp(20)
    warmed, fresh = nx.create_kernel(rt, case.node), nx.create_kernel(rt, case.node)
    operands = DsaOperands(rt, case)
    warmed.execute(operands.inputs, [operands.output])
    with rt.capture([warmed]) as graph:
        with pytest.raises(nx.CaptureError, match="workspace requires 512 bytes during CUDA graph capture"):
            fresh.execute(operands.inputs, [operands.output])
        warmed.execute(operands.inputs, [operands.output])
    assert graph.node_count == 2
    assert not fresh.capture_support()


def test_a_smaller_shape_may_be_recorded_in_the_warmed_workspace(rt: nx.CudaRuntime) -> None:
    """What fits the workspace and needs no other code needs no warm-up of its own."""
    large, small = ramp(2000), ramp(20)
    kernel = nx.create_kernel(rt, large.node)
    operands, fitting = DsaOperands(rt, large), DsaOperands(rt, small)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture([kernel]) as graph:
        kernel.execute(fitting.inputs, [fitting.output])
    graph.replay()
    np.testing.assert_array_equal(fitting.selected(), small.expected)


def test_a_graph_keeps_the_workspace_of_a_kernel_that_outgrew_it(rt: nx.CudaRuntime) -> None:
    """The old workspace lives on in the graph, also when the kernel object and its tensors are gone."""
    gc.collect()
    assert dsa_workspace_stats().live_bytes == 0
    small, large = ramp(20), ramp(2000)
    kernel = nx.create_kernel(rt, small.node)
    operands, grown = DsaOperands(rt, small), DsaOperands(rt, large)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture([kernel]) as graph:
        kernel.execute(operands.inputs, [operands.output])
    kernel.execute(grown.inputs, [grown.output])
    assert kernel.workspace_stats().releases == 0
    operands.clear()
    graph.replay()
    np.testing.assert_array_equal(operands.selected(), small.expected)
    assert dsa_workspace_stats().live_bytes == 512 + 10240
    del kernel
    gc.collect()
    operands.clear()
    graph.replay()
    np.testing.assert_array_equal(operands.selected(), small.expected)
    assert dsa_workspace_stats().live_bytes == 512
    graph.close()
    gc.collect()
    assert dsa_workspace_stats().live_bytes == 0


def test_a_graph_keeps_the_workspace_of_a_kernel_it_was_not_told_of(rt: nx.CudaRuntime) -> None:
    """Executing in a capture is enough; the kernel need not be in its list."""
    case = ramp(20)
    kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture() as graph:
        kernel.execute(operands.inputs, [operands.output])
    del kernel
    gc.collect()
    operands.clear()
    graph.replay()
    np.testing.assert_array_equal(operands.selected(), case.expected)


def test_two_kernels_in_one_graph_keep_their_scratch_apart(rt: nx.CudaRuntime) -> None:
    """Recorded one after the other, each writes its own workspace."""
    cases = [ramp(20), ramp(33)]
    kernels = [nx.create_kernel(rt, case.node) for case in cases]
    operands = [DsaOperands(rt, case) for case in cases]
    for kernel, own in zip(kernels, operands, strict=True):
        kernel.execute(own.inputs, [own.output])
    with rt.capture(kernels) as graph:
        for kernel, own in zip(kernels, operands, strict=True):
            kernel.execute(own.inputs, [own.output])
    for own in operands:
        own.clear()
    graph.replay()
    for case, own in zip(cases, operands, strict=True):
        np.testing.assert_array_equal(own.selected(), case.expected)


def test_recorded_executions_are_counted_once(rt: nx.CudaRuntime) -> None:
    """Recording counts as an execution; replays are the graph's, not the kernel's."""
    case = ramp(20)
    kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture([kernel]) as graph:
        kernel.execute(operands.inputs, [operands.output])
    for _ in range(3):
        graph.replay()
    assert kernel.launch_stats().executions == 2
    assert graph.replays == 3
