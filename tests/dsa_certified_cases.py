"""DsaIndexSelect cases in the shapes that the certified variant takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.dsa_cases import DsaCase, closed_form_cases

HEADS, HEAD_DIM = 32, 64


def widened(case: DsaCase, dtype: np.dtype) -> DsaCase:
    """``case`` in ``dtype``, with heads of zero weight and zero elements added: neither changes a score's bits."""
    query, key, weights, bias = case.inputs
    batch, q_seq, heads, head_dim = query.shape
    wide_query = np.zeros((batch, q_seq, HEADS, HEAD_DIM), dtype)
    wide_key = np.zeros((*key.shape[:2], HEAD_DIM), dtype)
    wide_weights = np.zeros((batch, q_seq, HEADS), dtype)
    with np.errstate(all="ignore"):
        wide_query[:, :, :heads, :head_dim] = query.astype(dtype)
        wide_key[..., :head_dim] = key.astype(dtype)
        wide_weights[..., :heads] = weights.astype(dtype)
    name = f"{case.name}-{np.dtype(dtype).name}"
    wide = replace(case, name=name, query=wide_query, key=wide_key, weights=wide_weights, bias=bias)
    return replace(wide, expected=wide.oracle())


def wide_closed_form_cases(dtype: np.dtype, longest: int) -> list[DsaCase]:
    """The closed forms of up to ``longest`` keys, widened."""
    return [
        widened(case, dtype) for case in closed_form_cases() if 0 < case.key.shape[1] <= longest and case.query.size
    ]
