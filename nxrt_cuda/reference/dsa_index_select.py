"""The oracle of DsaIndexSelect v1: strict-order f32 scores and exact selection, vectorised in NumPy.

Everything that computes these scores elsewhere has to give the same bits. Inputs of 16 bits are widened
first; from then on each operation is one f32 NumPy operation, rounded on its own::

    dot    = +0; for d ascending: dot += q[h, d] * k[d]
    sum    = +0; for h ascending: sum += relu(scale * dot[h]) * (w[h] * weights_scale)
    score  = sum + bias

A NaN dot counts as zero. A key is allowed where ``bias > -1e30`` (a NaN bias is not); a masked key scores
-inf. A NaN score becomes the positive quiet NaN ``0x7fc00000``, the greatest in total order.

:data:`HOST_ENTRIES` are the two kernels for the host driver; they run the same arithmetic on the same
workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nxrt_cuda.dtype import DataType, bfloat16, float16, float32, int64, uint8

if TYPE_CHECKING:
    from nxrt_cuda.driver.host_image import HostEntry, HostLaunch

__all__ = ["HOST_ENTRIES", "dsa_index_select", "dsa_scores", "dsa_select", "total_order_key"]

_MASK_THRESHOLD = np.float32(-1e30)
_CANONICAL_NAN = np.uint32(0x7FC00000).view(np.float32)

_BLOCK_ELEMENTS = 1 << 16
"""Dots computed at once: 256 KiB of f32, which stay in the core's cache over all of D."""


def dsa_scores(
    query: NDArray, key: NDArray, weights: NDArray, attention_bias: NDArray, *, scale: float, weights_scale: float = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Scores and the allow mask, both [B, S, T].

    Args:
        query: [B, S, H, D] f32, f16 or bf16.
        key: [B, T, D] of the same dtype.
        weights: [B, S, H] of the same dtype.
        attention_bias: [B, 1, S, T] f32.
        scale: of the dots, rounded to f32.
        weights_scale: of the head weights, rounded to f32.
    """
    batch, q_seq, heads, _ = query.shape
    key_seq = key.shape[1]
    bias = attention_bias.reshape(batch, q_seq, key_seq)
    allowed = bias > _MASK_THRESHOLD
    scores = np.full((batch, q_seq, key_seq), -np.inf, np.float32)
    key_step = max(1, min(key_seq, _BLOCK_ELEMENTS // max(heads, 1)))
    row_step = max(1, _BLOCK_ELEMENTS // (key_step * max(heads, 1)))
    with np.errstate(all="ignore"):
        head_weights = weights.astype(np.float32) * np.float32(weights_scale)
        for b in range(batch):
            for t in range(0, key_seq, key_step):
                keys = slice(t, t + key_step)
                keys_by_depth = np.ascontiguousarray(key[b, keys].astype(np.float32).T)
                for s in range(0, q_seq, row_step):
                    rows = slice(s, s + row_step)
                    is_scored = allowed[b, rows, keys]
                    if is_scored.any():
                        sums = _head_sums(
                            query[b, rows].astype(np.float32), keys_by_depth, head_weights[b, rows], np.float32(scale)
                        )
                        block = sums + bias[b, rows, keys]
                        block[np.isnan(block)] = _CANONICAL_NAN
                        np.copyto(scores[b, rows, keys], block, where=is_scored)
    return scores, allowed


def _head_sums(
    query: NDArray[np.float32], keys_by_depth: NDArray[np.float32], weights: NDArray[np.float32], scale: np.float32
) -> NDArray[np.float32]:
    """The weighted sum of relu'd dots: query [R, H, D], keys_by_depth [D, T], weights [R, H] -> [R, T]."""
    rows, heads, depth = query.shape
    keys = keys_by_depth.shape[1]
    dots = np.zeros((rows, heads, keys), np.float32)
    products = np.empty_like(dots)
    for d in range(depth):
        np.multiply(query[:, :, d, None], keys_by_depth[d], out=products)
        np.add(dots, products, out=dots)
    # fmax, not maximum: it returns the zero where the dot is NaN.
    np.fmax(dots * scale, np.float32(0), out=dots)
    sums = np.zeros((rows, keys), np.float32)
    for h in range(heads):
        sums += dots[:, h] * weights[:, h, None]
    return sums


def total_order_key(scores: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Unsigned integers in the IEEE 754 total order of ``scores``."""
    bits = np.ascontiguousarray(scores).view(np.uint32)
    return bits ^ np.where(bits >> np.uint32(31), np.uint32(0xFFFFFFFF), np.uint32(0x80000000))


def dsa_select(scores: NDArray[np.float32], allowed: NDArray, top_k: int) -> NDArray[np.int64]:
    """The best ``min(#allowed, top_k)`` positions along the last axis, ascending, padded with -1.

    Better is a greater score in total order; among equals, the lower position.
    """
    key_seq = scores.shape[-1]
    rows = scores.size // key_seq if key_seq else int(np.prod(scores.shape[:-1]))
    indices = np.full((*scores.shape[:-1], top_k), -1, np.int64)
    flat = indices.reshape(rows, top_k)
    keys = total_order_key(scores).reshape(rows, key_seq)
    for row, is_candidate in enumerate(allowed.reshape(rows, key_seq)):
        candidates = np.flatnonzero(is_candidate)
        if len(candidates) > top_k:
            best_first = np.argsort(~keys[row, candidates], kind="stable")
            candidates = np.sort(candidates[best_first[:top_k]])
        flat[row, : len(candidates)] = candidates
    return indices


def dsa_index_select(
    query: NDArray,
    key: NDArray,
    weights: NDArray,
    attention_bias: NDArray,
    *,
    top_k: int,
    scale: float,
    weights_scale: float = 1.0,
) -> NDArray[np.int64]:
    """Selected key positions [B, 1, S, top_k]; arguments as for :func:`dsa_scores`."""
    scores, allowed = dsa_scores(query, key, weights, attention_bias, scale=scale, weights_scale=weights_scale)
    return dsa_select(scores, allowed, top_k)[:, None]


_ELEMENTS: Mapping[str, DataType] = {dtype.cuda: dtype for dtype in (float32, float16, bfloat16)}


def _score_entry(launch: HostLaunch) -> None:
    args = launch.args
    batch, q_seq, heads, depth, key_seq = (
        int(args[name]) for name in ("batch", "q_seq", "heads", "head_dim", "key_seq")
    )
    element = _ELEMENTS[launch.macros["ELEMENT"]]
    cells = (batch, q_seq, key_seq)
    scores, allowed = dsa_scores(
        launch.view(args["query"], element, (batch, q_seq, heads, depth)),
        launch.view(args["key"], element, (batch, key_seq, depth)),
        launch.view(args["weights"], element, (batch, q_seq, heads)),
        launch.view(args["bias"], float32, (batch, 1, q_seq, key_seq)),
        scale=args["scale"],
        weights_scale=args["weights_scale"],
    )
    launch.view(args["scores"], float32, cells)[...] = scores
    launch.view(args["allowed"], uint8, cells)[...] = allowed


def _select_entry(launch: HostLaunch) -> None:
    args = launch.args
    rows, key_seq, top_k = (int(args[name]) for name in ("total_rows", "key_seq", "top_k"))
    launch.view(args["out"], int64, (rows, top_k))[...] = dsa_select(
        launch.view(args["scores"], float32, (rows, key_seq)),
        launch.view(args["allowed"], uint8, (rows, key_seq)),
        top_k,
    )


HOST_ENTRIES: dict[str, HostEntry] = {
    "dsa_index_select_score": _score_entry,
    "dsa_index_select_select": _select_entry,
}
