"""DsaIndexSelect on a GPU: strict scores and selections bit-equal to the NumPy oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.ops.dsa_geometry import Dims, WorkspaceLayout
from nxrt_cuda.ops.dsa_index_select import DsaIndexSelectFactory, Options
from nxrt_cuda.reference.dsa_index_select import dsa_scores
from tests.dsa_cases import DTYPES, DsaCase, DsaOperands, random_case, random_cases
from tests.ops import test_dsa_index_select

# Collected here, they run on this file's runtime.
from tests.ops.test_dsa_capture import (  # noqa: F401
    test_growth_in_a_capture_is_refused_before_anything_is_recorded,
    test_replays_are_byte_identical_to_eager_runs,
    test_the_number_of_allowed_keys_may_change_between_replays,
)
from tests.ops.test_dsa_index_select import test_closed_forms  # noqa: F401


@pytest.fixture(scope="module")
def rt(gpu: str) -> Iterator[nx.CudaRuntime]:
    """One runtime for all tests of this file: the first call of each specialisation compiles it."""
    with nx.open_runtime("cuda:0") as runtime:
        yield runtime


def assert_equals_oracle(rt: nx.CudaRuntime, case: DsaCase, *, aligned: bool = True) -> None:
    """Compare the strict variant's scores and flags bit by bit, then its selection."""
    kernel = DsaIndexSelectFactory(rt, Options(mode="strict")).create(case.node, ())
    operands = DsaOperands(rt, case, aligned=aligned)
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


def test_a_warmed_call_allocates_copies_and_compiles_nothing(rt: nx.CudaRuntime) -> None:
    """It is two launches, with the tiles of a device."""
    case = random_case(1, DTYPES[2], q_seq=20, heads=8, head_dim=64, key_seq=500, top_k=50)
    test_dsa_index_select.test_a_warmed_call_allocates_copies_and_compiles_nothing(rt, case)
