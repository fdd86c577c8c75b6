"""Random inputs of DsaIndexSelect of many kinds: what makes scores tie, nearly tie, vanish or overflow."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nxrt_cuda.ops.dsa_geometry import Dims

__all__ = ["KINDS", "MASKS", "Inputs", "draw"]

KINDS = (
    *("normal", "clustered", "duplicated", "near ties", "permuted", "tied in the middle", "integers", "zero weights"),
    *("zero queries", "negative", "sparse relu", "outliers", "tiny", "huge", "special"),
)
"""How keys, queries and weights lie."""

MASKS = ("none", "causal", "normal", "fill", "large", "sparse")
"""What the bias is."""


@dataclass(frozen=True)
class Inputs:
    """Of one call."""

    query: NDArray[Any]
    key: NDArray[Any]
    weights: NDArray[Any]
    bias: NDArray[np.float32]

    @property
    def dims(self) -> Dims:
        batch, q_seq, heads, head_dim = self.query.shape
        return Dims(batch, q_seq, heads, head_dim, self.key.shape[1])

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        return self.query, self.key, self.weights, self.bias


def draw(
    dtype: np.dtype[Any],
    batch: int,
    q_seq: int,
    heads: int,
    head_dim: int,
    key_seq: int,
    kind: str = "normal",
    mask: str = "causal",
) -> Inputs:
    """One of :data:`KINDS` under one of :data:`MASKS`; the same arguments give the same inputs."""
    seed = zlib.crc32(repr((dtype.name, batch, q_seq, heads, head_dim, key_seq, kind, mask)).encode())
    rng = np.random.default_rng(seed)
    query, key, weights = (
        rng.standard_normal(shape, np.float32)
        for shape in ((batch, q_seq, heads, head_dim), (batch, key_seq, head_dim), (batch, q_seq, heads))
    )
    step = 2.0**-7 if dtype == ml_dtypes.bfloat16 else 2.0**-10
    if kind == "clustered":
        key = key[:, rng.integers(0, max(1, key_seq // 64), key_seq)] + np.float32(0.001) * key
    elif kind == "duplicated":
        key = key[:, rng.integers(0, max(1, key_seq // 8), key_seq)]
    elif kind == "near ties":
        key = key[:, :1] + np.float32(step) * (rng.random(key.shape) < 0.02)
    elif kind in ("permuted", "tied in the middle"):
        # Exact dots are all the same, whatever the order of a key's elements; rounded ones are not.
        query[...] = query[..., :1]
        key = rng.permuted(np.broadcast_to(key[:, :1], key.shape), axis=-1)
        if kind == "tied in the middle":
            key *= np.exp2(rng.integers(-1, 2, (batch, key_seq, 1))).astype(np.float32)
    elif kind == "integers":
        query, key, weights = np.round(query), np.round(key), np.round(weights)
    elif kind == "zero weights":
        weights *= 0
    elif kind == "zero queries":
        query[:, ::2] = 0
    elif kind == "negative":
        query, key = -np.abs(query), np.abs(key)
    elif kind == "sparse relu":
        query -= np.float32(0.35) * np.sign(key[:, :1, None])
    elif kind == "outliers":
        key[:, ::37] *= 300
    elif kind == "tiny":
        query *= np.float32(2.0**-22)
        key *= np.float32(2.0**-22)
    elif kind == "huge":
        scale = np.float32(6e4 if dtype == np.float16 else 2.0**62)
        query, key = query * scale, key * scale
    elif kind == "special":
        for values in (query, key, weights):
            values[rng.random(values.shape) < 2e-5] = np.nan
            values[rng.random(values.shape) < 2e-5] = np.inf
    with np.errstate(all="ignore"):
        narrow = (np.ascontiguousarray(values.astype(dtype)) for values in (query, key, weights))
        return Inputs(*narrow, _bias(rng, (batch, 1, q_seq, key_seq), mask))


def _bias(rng: np.random.Generator, shape: tuple[int, ...], mask: str) -> NDArray[np.float32]:
    q_seq, key_seq = shape[-2:]
    if mask == "normal":
        return rng.standard_normal(shape, np.float32)
    bias = np.zeros(shape, np.float32)
    if mask == "causal":
        bias[..., np.arange(key_seq) > np.arange(q_seq)[:, None] + key_seq - q_seq] = -np.inf
    elif mask == "fill":
        bias[rng.random(shape, np.float32) < 0.6] = -1e9
    elif mask == "large":
        bias[...] = 1e6
    elif mask == "sparse":
        bias[rng.random(shape, np.float32) < 0.997] = -np.inf
    return bias
