"""The attention oracle against closed forms, and against a loop that follows the definition word by word."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nxrt_cuda.capture import CaptureErrorCode
from nxrt_cuda.reference import attention as oracle
from nxrt_cuda.reference.attention import attention, clamp_lengths
from tests.attention_cases import F16, F32, AttentionCase, check_case, closed_form_cases, random_case


@pytest.mark.parametrize("case", closed_form_cases(), ids=str)
def test_closed_forms(case: AttentionCase) -> None:
    """The answers that follow from the definition."""
    check_case(case.oracle(), case)


def by_definition(case: AttentionCase) -> np.ndarray:
    """One score at a time, in Python's own floats."""
    batch, heads, seq_q, head_dim = case.query.shape
    kv_heads, seq_k = case.key.shape[1:3]
    scale = float(np.float32(head_dim**-0.5 if case.scale is None else case.scale))
    output = np.zeros(case.query.shape)
    for b, h, i in np.ndindex(batch, heads, seq_q):
        keys = seq_k if case.total is None else case.total[b]
        limit = keys - seq_q + i if case.past is None else case.past[b] + i
        scores = {}
        for j in range(keys):
            if (case.causal and j > limit) or (case.window > 0 and j < limit + 1 - case.window):
                continue
            row, column = case.query[b, h, i], case.key[b, h * kv_heads // heads, j]
            score = scale * math.fsum(float(x) * float(y) for x, y in zip(row, column, strict=True))
            if case.softcap > 0:
                score = case.softcap * math.tanh(score / case.softcap)
            if case.mask is not None:
                bias = float(np.broadcast_to(case.mask, (batch, heads, seq_q, seq_k))[b, h, i, j])
                if bias == -math.inf:
                    continue
                score += bias
            scores[j] = score
        if scores:
            weights = {j: math.exp(score - max(scores.values())) for j, score in scores.items()}
            values = [w * case.value[b, h * kv_heads // heads, j].astype(np.float64) for j, w in weights.items()]
            output[b, h, i] = sum(values) / math.fsum(weights.values())
    return output


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"causal": True},
        {"causal": True, "window": 5, "softcap": 1.5},
        {"mask_planes": (), "total": [11, 0]},
        {"mask_planes": (2, 1), "causal": True, "past": [0, 9]},
        {"mask_planes": (2, 4), "window": 3, "past": [2, 20], "total": [13, 6], "softcap": 2.0, "scale": 0.7},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [F32, F16], ids=lambda d: d.name)
def test_the_definition_word_by_word(attributes: dict[str, object], dtype: np.dtype) -> None:
    """Every feature, alone and together, agrees to float64 rounding."""
    case = random_case(3, dtype, batch=2, heads=4, kv_heads=2, seq_q=5, seq_k=13, head_dim=6, **attributes)
    np.testing.assert_allclose(case.oracle(), by_definition(case), rtol=1e-13, atol=1e-13)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on the scores held at once splits batches, and rows of one batch, and changes nothing but rounding."""
    case = random_case(4, F32, batch=3, heads=4, kv_heads=2, seq_q=9, seq_k=13, head_dim=6, causal=True)
    whole = case.oracle()
    for block_scores in (1, 4 * 13 * 2, 4 * 13 * 9, 4 * 13 * 9 * 2):
        monkeypatch.setattr(oracle, "_BLOCK_SCORES", block_scores)
        np.testing.assert_allclose(case.oracle(), whole, rtol=0, atol=1e-14)


def test_sixteen_bit_inputs_are_widened_before_anything_else() -> None:
    """The sum of 4096 ones and the square of 300 are exact, which f16 holds neither of."""
    query = np.full((1, 1, 1, 1), 300, np.float16)
    key = np.array([300, 300.5], np.float16).reshape(1, 1, 2, 1)
    value = np.array([0, 1], np.float16).reshape(1, 1, 2, 1)
    weight = 1 / (1 + math.exp(-150 * 2.0**-10))
    np.testing.assert_allclose(attention(query, key, value, scale=2.0**-10), weight, rtol=1e-12)


def test_clamped_lengths_and_their_codes() -> None:
    """Totals go to [0, Sk] and pasts to 0 and above; either leaves its own bit."""
    total, past, code = clamp_lengths(np.array([-1, 5, 9]), np.array([-7, 0, 2**31 - 1]), batch=3, seq_k=8)
    assert (total.tolist(), past.tolist()) == ([0, 5, 8], [0, 0, 2**31 - 1])
    assert code == CaptureErrorCode.TOTAL_LENGTH | CaptureErrorCode.PAST_LENGTH
    assert clamp_lengths(np.array([8]), np.array([0]), batch=1, seq_k=8)[2] == CaptureErrorCode.NONE
    assert clamp_lengths(None, None, batch=2, seq_k=8)[0].tolist() == [8, 8]
