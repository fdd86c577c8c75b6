"""DsaIndexSelect on a GPU: scores and selections bit-equal to the NumPy oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.ops.dsa_geometry import Dims, WorkspaceLayout
from nxrt_cuda.ops.dsa_index_select import DsaIndexSelectFactory
from nxrt_cuda.reference.dsa_index_select import dsa_scores
from nxrt_cuda.testing import count
from tests.dsa_cases import DTYPES, INF, DsaCase, DsaOperands, closed_form_cases, random_case, random_cases, run


@pytest.fixture(scope="module")
def rt(gpu: str) -> Iterator[nx.CudaRuntime]:
    """One runtime for all tests of this file: the first call of each specialisation compiles it."""
    with nx.open_runtime("cuda:0") as runtime:
        yield runtime


def assert_equals_oracle(rt: nx.CudaRuntime, case: DsaCase, *, aligned: bool = True) -> None:
    """Compare the workspace's scores and flags bit by bit, then the selection."""
    kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case, aligned=aligned)
    kernel.execute(operands.inputs, [operands.output])
    selected = operands.selected()
    batch, q_seq, heads, head_dim = case.query.shape
    dims = Dims(batch, q_seq, heads, head_dim, case.key.shape[1])
    layout, workspace = WorkspaceLayout.of(dims), kernel.workspace_stats().last_ptr
    scores, allowed = dsa_scores(*case.inputs, scale=case.scale, weights_scale=case.weights_scale)
    device_scores, device_allowed = np.empty_like(scores), np.empty(allowed.shape, np.uint8)
    rt.dtoh(device_scores, workspace + layout.scores_offset)
    rt.dtoh(device_allowed, workspace + layout.allowed_offset)
    np.testing.assert_array_equal(device_allowed, allowed, err_msg=case.name)
    np.testing.assert_array_equal(device_scores.view(np.uint32), scores.view(np.uint32), err_msg=case.name)
    np.testing.assert_array_equal(selected, case.expected, err_msg=case.name)


def test_closed_forms(rt: nx.CudaRuntime) -> None:
    """The answers that follow from the definition."""
    for case in closed_form_cases():
        np.testing.assert_array_equal(run(rt, case), case.expected, err_msg=case.name)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("seed", range(4))
def test_random_shapes(rt: nx.CudaRuntime, dtype: np.dtype, seed: int) -> None:
    """Mixed shapes, values over all exponents, NaN and infinities, ties, all kinds of masks."""
    for number, case in enumerate(random_cases(seed, dtype, count=50, cells=400_000)):
        assert_equals_oracle(rt, case, aligned=number % 3 != 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("key_seq", [16384, 16385, 70001, 131073])
@pytest.mark.parametrize("values", ["normal", "integers"])
def test_long_rows(rt: nx.CudaRuntime, dtype: np.dtype, key_seq: int, values: str) -> None:
    """Rows beyond 16 bits of positions, with and without ties; a decode step and a few prefill rows."""
    shape = {"heads": 4, "head_dim": 16, "key_seq": key_seq, "top_k": 2048, "values": values}
    assert_equals_oracle(rt, random_case(key_seq, dtype, batch=2, q_seq=1, **shape))
    assert_equals_oracle(rt, random_case(key_seq, dtype, q_seq=5, **shape, mask="causal"))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_model_sized_rows(rt: nx.CudaRuntime, dtype: np.dtype) -> None:
    """64 heads of 128, as the models have them, prefill and decode."""
    shape = {"heads": 64, "head_dim": 128, "top_k": 2048}
    prefill = random_case(1, dtype, q_seq=16, key_seq=2300, mask="causal", **shape)
    assert_equals_oracle(rt, prefill)
    assert_equals_oracle(rt, prefill, aligned=False)
    assert_equals_oracle(rt, random_case(2, dtype, q_seq=1, key_seq=9000, mask="none", **shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_near_ties(rt: nx.CudaRuntime, dtype: np.dtype) -> None:
    """Keys that differ in their last bits rank by rounding alone."""
    rng = np.random.default_rng(1)
    case = random_case(1, dtype, q_seq=8, heads=8, head_dim=128, key_seq=4000, top_k=100, mask="none")
    near = case.key[:, :1].astype(np.float32) * (1 + rng.integers(-2, 3, case.key.shape) * np.float32(2.0**-10))
    case = replace(case, key=near.astype(dtype))
    assert_equals_oracle(rt, replace(case, expected=case.oracle()))


def test_recorded_encoder_tensors(rt: nx.CudaRuntime, data: Path) -> None:
    """Keys and queries of a real encoder, with its padding mask."""
    with np.load(data / "sentence_dsa.npz") as archive:
        arrays = [archive[name] for name in ("query", "key", "weights", "attention_bias")]
    empty = np.empty((*arrays[3].shape[:3], 16), np.int64)
    case = DsaCase("encoder", *arrays, 16, empty, scale=32**-0.5)
    assert_equals_oracle(rt, replace(case, expected=case.oracle()))


@pytest.mark.parametrize("limit", [1, 2, 7])
@pytest.mark.parametrize("q_seq", [1, 40])
def test_any_grid_gives_the_same_result(rt: nx.CudaRuntime, q_seq: int, limit: int) -> None:
    """A bounded grid does the same work in strides."""
    case = random_case(2, DTYPES[2], batch=3, q_seq=q_seq, heads=5, head_dim=24, key_seq=1700, top_k=300)
    kernel = DsaIndexSelectFactory(rt).create_kernel_with_grid_limit(case.node, limit)
    operands = DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    np.testing.assert_array_equal(operands.selected(), case.expected)
    assert kernel.launch_stats().last_score_grid_x == limit


def test_reruns_are_identical(rt: nx.CudaRuntime) -> None:
    """25 runs over a few thousand tied keys a row, byte for byte."""
    shape = {"q_seq": 64, "heads": 16, "head_dim": 8, "key_seq": 8192, "top_k": 2048}
    case = random_case(5, DTYPES[2], **shape, values="integers", mask="causal")
    kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
    for _ in range(25):
        operands.clear()
        kernel.execute(operands.inputs, [operands.output])
        np.testing.assert_array_equal(operands.selected(), case.expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("q_seq", [1, 19])
def test_replays_are_byte_identical_to_eager_runs(rt: nx.CudaRuntime, dtype: np.dtype, q_seq: int) -> None:
    """Only buffer contents change between replays."""
    shape = {"batch": 2, "q_seq": q_seq, "heads": 6, "head_dim": 32, "key_seq": 900, "top_k": 128}
    first, *later = (random_case(seed, dtype, **shape, values="integers") for seed in range(5))
    later = [replace(case, scale=first.scale, weights_scale=first.weights_scale) for case in later]
    kernel, operands = nx.create_kernel(rt, first.node), DsaOperands(rt, first)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture([kernel]) as graph:
        kernel.execute(operands.inputs, [operands.output])
    assert graph.node_types == ("KERNEL", "KERNEL")
    for case in (first, *later):
        for tensor, array in zip(operands.inputs, case.inputs, strict=True):
            tensor.copy_from(array)
        operands.clear()
        graph.replay()
        replayed = operands.selected()
        operands.clear()
        kernel.execute(operands.inputs, [operands.output])
        np.testing.assert_array_equal(replayed, operands.selected())
        np.testing.assert_array_equal(replayed, case.oracle())
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


def test_growth_in_a_capture_is_refused_and_leaves_it_usable(rt: nx.CudaRuntime) -> None:
    """The refusal reaches no driver call that could invalidate the capture."""
    small, large = (random_case(1, DTYPES[0], q_seq=2, key_seq=keys, top_k=5) for keys in (30, 3000))
    large = replace(large, scale=small.scale, weights_scale=small.weights_scale)
    kernel = nx.create_kernel(rt, small.node)
    operands, grown = DsaOperands(rt, small), DsaOperands(rt, large)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture([kernel]) as graph:
        with pytest.raises(nx.CaptureError, match="workspace requires 30208 bytes during CUDA graph capture"):
            kernel.execute(grown.inputs, [grown.output])
        kernel.execute(operands.inputs, [operands.output])
    operands.clear()
    graph.replay()
    np.testing.assert_array_equal(operands.selected(), small.expected)


def test_a_warmed_call_is_two_launches(rt: nx.CudaRuntime) -> None:
    """No allocation, copy, compile or wait after the first call of a shape."""
    case = random_case(1, DTYPES[2], q_seq=20, heads=8, head_dim=64, key_seq=500, top_k=50)
    kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    with count(rt) as seen:
        kernel.execute(operands.inputs, [operands.output])
    assert (seen.launches, seen.allocations, seen.htod_copies, seen.dtoh_copies, seen.compiles) == (2, 0, 0, 0, 0)
    assert seen.stats.synchronizations == 0
