"""The DSA oracle: bit-equal to the definition written out for one number at a time."""

from __future__ import annotations

import itertools
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from nxrt_cuda.reference import dsa_index_select as reference
from nxrt_cuda.reference.dsa_index_select import dsa_scores, dsa_select, total_order_key
from tests.dsa_cases import DTYPES, INF, NAN, DsaCase, closed_form_cases, nan, random_case, random_cases


def scalar_score(case: DsaCase, b: int, s: int, t: int) -> np.float32:
    """One score from NumPy's f32 scalars, each operation rounded on its own."""
    f32 = np.float32
    bias = case.bias[b, 0, s, t]
    if not bias > f32(-1e30):
        return -INF
    total = f32(0)
    for h in range(case.query.shape[2]):
        dot = f32(0)
        for d in range(case.query.shape[3]):
            dot = dot + f32(case.query[b, s, h, d]) * f32(case.key[b, t, d])
        scored = f32(case.scale) * dot
        scored = scored if scored > 0 else f32(0)
        total = total + scored * (f32(case.weights[b, s, h]) * f32(case.weights_scale))
    score = total + bias
    return nan(0x7FC00000) if np.isnan(score) else score


def assert_bit_equal_to_scalars(case: DsaCase) -> None:
    scores, allowed = dsa_scores(*case.inputs, scale=case.scale, weights_scale=case.weights_scale)
    with np.errstate(all="ignore"):
        expected = np.array([scalar_score(case, *cell) for cell in np.ndindex(scores.shape)], np.float32)
    np.testing.assert_array_equal(scores.view(np.uint32), expected.reshape(scores.shape).view(np.uint32))
    np.testing.assert_array_equal(allowed, np.greater(case.bias[:, 0], np.float32(-1e30)))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("values", ["normal", "integers", "wide", "special"])
@pytest.mark.parametrize("mask", ["random", "soft"])
def test_scores_have_the_bits_of_the_scalar_definition(dtype: np.dtype, values: str, mask: str) -> None:
    """Every dtype, exponent range and special value gives the bits of one scalar operation after another."""
    shape = {"batch": 2, "q_seq": 3, "heads": 3, "head_dim": 5, "key_seq": 11}
    assert_bit_equal_to_scalars(random_case(3, dtype, **shape, top_k=4, values=values, mask=mask))


@pytest.mark.parametrize("seed", [5, 6, 7])
def test_near_ties_keep_the_definitions_order(seed: int) -> None:
    """Keys that differ by rounding alone rank as the strict order of sums ranks them."""
    rng = np.random.default_rng(seed)
    case = random_case(seed, DTYPES[0], heads=8, head_dim=64, key_seq=40, top_k=10, mask="none")
    near = case.key[:, :1] + rng.standard_normal(case.key.shape).astype(np.float32) * np.float32(1e-6)
    assert_bit_equal_to_scalars(DsaCase("near", case.query, near, case.weights, case.bias, 10, case.expected))


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_blocking_changes_no_bit(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores do not depend on how rows and keys are cut into blocks."""
    shape = {"batch": 2, "q_seq": 7, "heads": 3, "head_dim": 9, "key_seq": 29}
    case = random_case(11, DTYPES[2], **shape, top_k=8, values="special")
    whole, _ = dsa_scores(*case.inputs, scale=case.scale)
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", block)
    cut, _ = dsa_scores(*case.inputs, scale=case.scale)
    np.testing.assert_array_equal(cut.view(np.uint32), whole.view(np.uint32))


def test_memory_does_not_hold_all_dots() -> None:
    """Beside its results, scoring holds a few blocks of dots, not [S, H, T] of them."""
    case = random_case(1, DTYPES[0], q_seq=64, heads=16, head_dim=2, key_seq=4096, top_k=1, mask="none")
    all_dots = 64 * 16 * 4096 * 4
    tracemalloc.start()
    scores, allowed = dsa_scores(*case.inputs, scale=case.scale)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < scores.nbytes + allowed.nbytes + all_dots // 4


@pytest.mark.parametrize("case", closed_form_cases(), ids=str)
def test_closed_forms(case: DsaCase) -> None:
    """The answers that follow from the definition."""
    np.testing.assert_array_equal(case.oracle(), case.expected)


def test_total_order_key_orders_all_kinds_of_numbers() -> None:
    """Negative NaN, -inf, numbers, the two zeros apart, +inf, positive NaN."""
    tiny = np.float32(1e-45)
    ascending = [
        nan(0xFFC00000),
        -INF,
        np.float32(-1),
        -tiny,
        np.float32(-0.0),
        np.float32(0),
        tiny,
        np.float32(1),
        INF,
        NAN,
    ]
    keys = total_order_key(np.array(ascending, np.float32))
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    assert keys.min() > 0


def test_selection_is_the_sorted_prefix() -> None:
    """Against sorting (score descending, index ascending) for every small row of a few scores."""
    choices = np.array([-INF, -0.0, 0.0, 1.0, NAN], np.float32)
    for scores in itertools.product(choices, repeat=4):
        row = np.array(scores, np.float32)
        for mask in itertools.product((False, True), repeat=4):
            allowed = np.array(mask)
            keys = total_order_key(row).tolist()
            ranked = sorted(np.flatnonzero(allowed).tolist(), key=lambda t: (-keys[t], t))
            for top_k in (1, 2, 5):
                best = sorted(ranked[:top_k])
                expected = best + [-1] * (top_k - len(best))
                assert dsa_select(row[None], allowed[None], top_k)[0].tolist() == expected


def test_sixteen_bit_inputs_are_widened_first() -> None:
    """A product that f16 or bf16 would round or overflow is kept whole: 300 * 300 + 1 ranks above 300 * 300."""
    for dtype in (np.float16, ml_dtypes.bfloat16):
        query = np.array([[[[300, 1]]]], dtype)
        key = np.array([[[300, 0], [300, 1]]], dtype)
        case = DsaCase("wide", query, key, np.ones((1, 1, 1), dtype), np.zeros((1, 1, 1, 2), np.float32), 1, None)
        assert case.oracle().ravel().tolist() == [1]


def test_random_rows_are_well_formed() -> None:
    """Ascending, unique, allowed, as many as there can be, then -1."""
    for case in random_cases(2, DTYPES[1], count=40, cells=20_000):
        for (b, _, s), row in zip(
            np.ndindex(case.expected.shape[:3]), case.expected.reshape(-1, case.top_k), strict=True
        ):
            allowed = np.flatnonzero(case.bias[b, 0, s] > np.float32(-1e30))
            kept = min(len(allowed), case.top_k)
            assert (np.diff(row[:kept]) > 0).all()
            assert np.isin(row[:kept], allowed).all()
            assert (row[kept:] == -1).all()
