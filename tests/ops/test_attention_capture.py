"""Fused attention in CUDA graphs: when it may be recorded, and that a replay is a run."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.testing import count
from tests.attention_cases import DTYPES, F16, F32, AttentionOperands, check_case, random_case

NOT_WARMED = "requires a warmed fixed-shape eager Attention pass to compile the NVRTC kernel"

SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "seq_k": 30, "head_dim": 16}


def test_capture_is_declined_before_a_warm_up(rt: nx.CudaRuntime) -> None:
    """The reason says what is missing, and nothing is recorded."""
    case = random_case(1, F16, **SHAPE, seq_q=5)
    kernel, operands = nx.create_kernel(rt, case.node), AttentionOperands(rt, case)
    assert kernel.capture_support().reason == NOT_WARMED
    with pytest.raises(nx.CaptureError) as refusal, rt.capture([kernel]):
        pytest.fail("the capture was opened")
    assert NOT_WARMED in str(refusal.value)
    assert not rt.is_capturing()
    kernel.execute(operands.inputs, [operands.output])
    assert kernel.capture_support() == nx.CaptureSupport.supported()


def test_neither_a_refused_nor_an_empty_call_is_a_warm_up(rt: nx.CudaRuntime) -> None:
    """Capture support comes from a launch, not from a call."""
    case = random_case(1, F16, **SHAPE, seq_q=5)
    kernel, operands = nx.create_kernel(rt, case.node), AttentionOperands(rt, case)
    with pytest.raises(nx.KernelError):
        kernel.execute(operands.inputs[:2], [operands.output])
    empty = AttentionOperands(rt, random_case(1, F16, **SHAPE, seq_q=0))
    kernel.execute(empty.inputs, [empty.output])
    assert kernel.launch_stats().executions == 1
    assert not kernel.capture_support()


@pytest.mark.parametrize("seq_q", [70, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_replays_are_byte_identical_to_eager_runs(rt: nx.CudaRuntime, dtype: np.dtype, seq_q: int) -> None:
    """Only buffer contents change between replays: every input anew, the addresses never."""
    shape = {"batch": 2, "heads": 4, "kv_heads": 2, "seq_q": seq_q, "seq_k": 150, "head_dim": 64}
    first, *later = (
        random_case(seed, dtype, **shape, mask_planes=(2, 4), causal=True, total=[150, 90]) for seed in range(4)
    )
    kernel, operands = nx.create_kernel(rt, first.node), AttentionOperands(rt, first)
    kernel.execute(operands.inputs, [operands.output])
    operands.clear()
    with rt.capture([kernel]) as graph:
        kernel.execute(operands.inputs, [operands.output])
    assert (operands.result() == np.array(-777).astype(dtype)).all(), "recording is not running"
    assert graph.node_types == ("KERNEL",)
    for case in (first, *later):
        arrays = (case.query, case.key, case.value, case.mask)
        for tensor, array in zip(operands.inputs, arrays, strict=False):
            tensor.copy_from(array)
        operands.clear()
        with count(rt) as seen:
            graph.replay()
        replayed = operands.result()
        operands.clear()
        kernel.execute(operands.inputs, [operands.output])
        np.testing.assert_array_equal(replayed, operands.result())
        check_case(replayed, case)
        assert (seen.replays, seen.launches, seen.allocations) == (1, 0, 0)


@pytest.mark.parametrize("seq_q", [4, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_lengths_rewritten_on_the_device_take_effect_at_the_next_replay(
    rt: nx.CudaRuntime, dtype: np.dtype, seq_q: int
) -> None:
    """Shorter, longer than at capture, zero and out of range: each replay equals an eager run with those lengths."""
    shape = {"batch": 2, "heads": 2, "seq_q": seq_q, "seq_k": 200, "head_dim": 16}
    case = random_case(39, dtype, **shape, causal=True, total=[4, 4], past=[0, 0])
    rt.reset_capture_error()
    kernel, operands = nx.create_kernel(rt, case.node), AttentionOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture([kernel]) as graph:
        kernel.execute(operands.inputs, [operands.output])
    for total in ([4, 4], [200, 18], [0, 7], [70, 200], [-5, 200]):
        past = [max(length - seq_q, 0) for length in total]
        operands.inputs[4].copy_from(np.array(total, np.int32))
        operands.inputs[5].copy_from(np.array(past, np.int32))
        operands.clear()
        graph.replay()
        now = replace(case, total=total, past=past)
        check_case(operands.result(), replace(now, expected=now.oracle()))
    assert rt.check_capture_error() == nx.CaptureErrorCode.TOTAL_LENGTH


def test_an_unwarmed_specialisation_is_refused_inside_a_capture(rt: nx.CudaRuntime) -> None:
    """Compiling would spoil the capture; it is refused before the driver is called, and the capture goes on."""
    case, decode = (random_case(1, F16, **SHAPE, seq_q=seq_q) for seq_q in (5, 1))
    kernel = nx.create_kernel(rt, case.node)
    operands, other = AttentionOperands(rt, case), AttentionOperands(rt, decode)
    kernel.execute(operands.inputs, [operands.output])
    before = kernel.launch_stats()
    with rt.capture([kernel]) as graph:
        with pytest.raises(nx.CaptureError, match="attention_decode_f16"):
            kernel.execute(other.inputs, [other.output])
        assert kernel.launch_stats() == before
        kernel.execute(operands.inputs, [operands.output])
    assert graph.node_count == 1
    operands.clear()
    graph.replay()
    check_case(operands.result(), case)


def test_another_shape_of_a_warmed_specialisation_may_be_recorded(rt: nx.CudaRuntime) -> None:
    """What needs no other code needs no warm-up of its own."""
    warm, other = (random_case(1, F16, **SHAPE, seq_q=seq_q) for seq_q in (5, 9))
    kernel = nx.create_kernel(rt, warm.node)
    operands, recorded = AttentionOperands(rt, warm), AttentionOperands(rt, other)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture([kernel]) as graph:
        kernel.execute(recorded.inputs, [recorded.output])
    graph.replay()
    check_case(recorded.result(), other)


def test_a_graph_outlives_its_kernel_and_its_tensors(rt: nx.CudaRuntime) -> None:
    """What was recorded stays alive with the graph."""
    case = random_case(1, F32, **SHAPE, seq_q=5, total=[30, 2])
    kernel, operands = nx.create_kernel(rt, case.node), AttentionOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture([kernel]) as graph:
        kernel.execute(operands.inputs, [operands.output])
    del kernel
    operands.inputs.clear()
    gc.collect()
    operands.clear()
    graph.replay()
    check_case(operands.result(), case)


def test_recorded_executions_are_counted_once(rt: nx.CudaRuntime) -> None:
    """Recording counts as an execution; replays are the graph's, not the kernel's."""
    case = random_case(1, F16, **SHAPE, seq_q=5)
    kernel, operands = nx.create_kernel(rt, case.node), AttentionOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture([kernel]) as graph:
        kernel.execute(operands.inputs, [operands.output])
    for _ in range(3):
        graph.replay()
    assert kernel.launch_stats().executions == 2
    assert graph.replays == 3
