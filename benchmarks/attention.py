"""Attention on the GPU: prefill and decode, beside PyTorch's scaled_dot_product_attention.

    python -m benchmarks.attention --out benchmarks/results/h200-attention.json

A prefill of Sq queries and Sk keys counts as 4 B H Sq Sk D operations, half of them if causal, and no more
than 4 D for each key that a row sees where a window or lengths hide some; a decode step is bound by memory, and
counts the bytes of its operands, each read or written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

import nxrt_cuda as nx
from benchmarks._bench import Bench, Operands, Peer, WrongResultError, normal, progress, relative_error
from benchmarks._harness import run
from benchmarks._table import Table, milliseconds, speedup
from benchmarks._torch import TorchPeer
from nxrt_cuda.ops import attention_sm90
from nxrt_cuda.reference.attention import attention

__all__ = ["CASES", "Case", "measure", "tabulate"]

_DTYPES = {"f32": nx.float32, "bf16": nx.bfloat16, "f16": nx.float16}

_LIMITS = {"f32": 1e-5, "bf16": 8e-3, "f16": 1e-3}
"""The relative error against float64 that a result may have; rounding it costs 1.6e-3 in bf16, 2e-4 in f16."""

_PEER_LIMIT = 2e-2
"""Enough to tell that a peer computes the same function."""

_CHECKED_ROWS = 4

_PEERS = {
    "torch flash": "FLASH_ATTENTION",
    "torch cuDNN": "CUDNN_ATTENTION",
    "torch efficient": "EFFICIENT_ATTENTION",
}
_F32_PEERS = ("torch efficient",)
_HALF_PEERS = ("torch flash", "torch cuDNN")
_MASK_PEERS = ("torch cuDNN", "torch efficient")


@dataclass(frozen=True)
class Case:
    """One row of the table: shapes, dtype, and what restricts or changes scores.

    ``portable``: on the kernels that need no Hopper. ``is_ragged``: of B batch elements, element b has (b + 1) / B of
    the keys in use; not for causal rows.
    """

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    causal: bool
    window: int = 0
    softcap: float = 0.0
    has_mask: bool = False
    is_ragged: bool = False
    portable: bool = False

    @property
    def label(self) -> str:
        heads = f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}/{self.kv_heads}"
        seq = f"S{self.seq_k}" if self.seq_q == self.seq_k else f"Sq{self.seq_q} Sk{self.seq_k}"
        kind = "decode" if self.is_decode else "causal" if self.causal else "full"
        features = (
            f" window {self.window}" if self.window else "",
            f" softcap {self.softcap:g}" if self.softcap else "",
            " mask" if self.has_mask else "",
            " ragged" if self.is_ragged else "",
            ", portable" if self.portable else "",
        )
        return f"{self.dtype} B{self.batch} {heads} {seq} D{self.head_dim} {kind}" + "".join(features)

    @property
    def is_decode(self) -> bool:
        return self.seq_q == 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of query (and output), key and value."""
        key = (self.batch, self.kv_heads, self.seq_k, self.head_dim)
        return (self.batch, self.heads, self.seq_q, self.head_dim), key, key

    @property
    def element(self) -> nx.DataType:
        return _DTYPES[self.dtype]

    @property
    def node(self) -> nx.Node:
        attributes = {"is_causal": int(self.causal), "local_window_size": self.window, "softcap": self.softcap}
        return nx.Node("Attention", attributes=attributes)

    @property
    def total_lengths(self) -> NDArray[np.int32]:
        """Keys in use, of each batch element."""
        steps = np.arange(1, self.batch + 1) if self.is_ragged else np.full(self.batch, self.batch)
        return (self.seq_k * steps // self.batch).astype(np.int32)

    @property
    def flops(self) -> int:
        seen = sum(self._pairs(int(keys)) for keys in self.total_lengths)
        return 4 * self.heads * self.head_dim * seen

    def _pairs(self, keys: int) -> int:
        """Pairs of a query row and one of ``keys`` keys that it sees, a triangle counted as half a rectangle."""
        if not self.window:
            return self.seq_q * keys // (2 if self.causal else 1)
        limit = np.arange(keys - self.seq_q, keys) + 1
        end = np.clip(limit, 0, keys) if self.causal else keys
        return int(np.sum(end - np.clip(limit - self.window, 0, keys)))

    @property
    def nbytes(self) -> int:
        query, key, value = (prod(shape) for shape in self.shapes)
        mask = self.seq_q * self.seq_k if self.has_mask else 0
        return (2 * query + key + value + mask) * self.element.itemsize

    def rate(self, ms: float) -> tuple[float, str]:
        """What ``ms`` milliseconds amount to, and its unit."""
        return (self.nbytes / ms * 1e-9, "TB/s") if self.is_decode else (self.flops / ms * 1e-9, "TFLOP/s")


def _prefill(
    dtype: str, batch: int, heads: int, kv_heads: int, seq: int, head_dim: int, *, portable: bool = False
) -> Iterator[Case]:
    for causal in (True, False):
        yield Case(dtype, batch, heads, kv_heads, seq, seq, head_dim, causal, portable=portable)


_FEATURES: dict[bool, tuple[dict[str, Any], ...]] = {
    True: ({"window": 1024}, {"softcap": 30.0}, {"has_mask": True}),
    False: ({"softcap": 30.0}, {"has_mask": True}, {"is_ragged": True}),
}
"""Of causal prefills, and of full ones."""

CASES = (
    # 16384 tokens in shorter and longer rows: the shapes that FlashAttention-3 and cuDNN are compared on.
    *(c for batch in (32, 16, 8, 4, 2, 1) for c in _prefill("bf16", batch, 16, 16, 16384 // batch, 128)),
    *(c for batch in (32, 8, 2, 1) for c in _prefill("bf16", batch, 32, 32, 16384 // batch, 64)),
    # Groups of query heads, and few tiles.
    *(c for seq in (2048, 8192) for c in _prefill("bf16", 1, 32, 8, seq, 128)),
    *(c for batch in (8, 1) for c in _prefill("f16", batch, 16, 16, 16384 // batch, 128)),
    # What restricts or changes scores, beside the plain rows of the same shapes above.
    *(
        replace(plain, **features)
        for heads, head_dim, batch in ((16, 128, 4), (32, 64, 2))
        for plain in _prefill("bf16", batch, heads, heads, 16384 // batch, head_dim)
        for features in _FEATURES[plain.causal]
    ),
    *_prefill("f32", 1, 16, 16, 8192, 128),
    *_prefill("f32", 8, 16, 16, 1024, 128),
    *_prefill("f32", 1, 32, 32, 8192, 64),
    # The kernels for every device.
    *_prefill("f32", 1, 16, 16, 8192, 128, portable=True),
    *_prefill("f32", 1, 32, 32, 8192, 64, portable=True),
    *(c for batch in (8, 1) for c in _prefill("bf16", batch, 16, 16, 16384 // batch, 128, portable=True)),
    *_prefill("bf16", 1, 32, 32, 16384, 64, portable=True),
    *_prefill("bf16", 1, 16, 16, 4096, 100),
    # One query row: groups of query heads in larger and smaller batches, and heads of their own.
    *(Case("bf16", batch, 32, 8, 1, seq_k, 128, causal=False) for batch, seq_k in ((8, 8192), (1, 8192), (64, 1024))),
    Case("bf16", 8, 64, 8, 1, 8192, 128, causal=False),
    Case("bf16", 32, 32, 32, 1, 2048, 128, causal=False),
    Case("f32", 8, 32, 8, 1, 8192, 128, causal=False),
)

_QUICK_CASES = (
    Case("f32", 1, 2, 2, 20, 20, 8, causal=True),
    Case("bf16", 1, 4, 2, 20, 20, 8, causal=False),
    Case("f16", 2, 2, 2, 20, 20, 16, causal=True),
    Case("f16", 1, 2, 1, 1, 33, 16, causal=False),
    Case("f16", 2, 2, 2, 20, 20, 16, causal=True, window=5, softcap=3.0, has_mask=True),
    Case("f16", 2, 2, 2, 20, 20, 16, causal=False, is_ragged=True),
)


def _draw(case: Case, runtime: nx.CudaRuntime, rng: np.random.Generator) -> Operands:
    """Random inputs, and an output of NaN, which nothing but an attention result can replace."""
    arrays: list[NDArray[Any] | None] = [normal(rng, shape, case.element) for shape in case.shapes]
    mask = normal(rng, (case.seq_q, case.seq_k), case.element) if case.has_mask else None
    arrays += [mask, case.total_lengths if case.is_ragged else None]
    return Operands.upload(runtime, arrays, np.full(case.shapes[0], np.nan, case.element.numpy))


@dataclass(frozen=True)
class _Spot:
    """A few query rows of one head, and their attention in float64."""

    batch: int
    head: int
    rows: slice
    expected: NDArray[np.float64]

    @classmethod
    def compute(cls, case: Case, arrays: Sequence[Any], batch: int, head: int, first: int) -> _Spot:
        query, key, value, *optional = arrays
        mask = optional[0] if optional else None
        rows = slice(first, min(first + _CHECKED_ROWS, case.seq_q))
        kv_head = head // (case.heads // case.kv_heads)
        keys = case.total_lengths[batch]
        expected = attention(
            query[batch, head, rows][None, None],
            key[batch, kv_head][None, None],
            value[batch, kv_head][None, None],
            mask=None if mask is None else mask[rows],
            total_lengths=keys[None],
            past_lengths=keys[None] - case.seq_q + first,
            scale=case.head_dim**-0.5,
            causal=case.causal,
            softcap=case.softcap,
            local_window=case.window,
        )
        return cls(batch, head, rows, expected[0, 0])

    def of(self, output: Any) -> Any:
        return output[self.batch, self.head, self.rows]


def measure(bench: Bench) -> list[dict[str, Any]]:
    """All rows of the table."""
    rng = np.random.default_rng(1)
    return [_measure(bench, case, rng) for case in (_QUICK_CASES if bench.quick else CASES)]


def _measure(bench: Bench, case: Case, rng: np.random.Generator) -> dict[str, Any]:
    obstacle = (lambda *_: "the benchmark asks for the portable kernels") if case.portable else attention_sm90.obstacle
    with patch.object(attention_sm90, "obstacle", obstacle):
        warmed = bench.warm(case.node, case.nbytes, partial(_draw, case, bench.runtime, rng))
    sets, arrays = warmed.sets, warmed.sets[0].arrays
    spots = [
        _Spot.compute(case, arrays, 0, 0, 0),
        _Spot.compute(case, arrays, case.batch - 1, case.heads // 2, case.seq_q // 2),
        _Spot.compute(case, arrays, case.batch - 1, case.heads - 1, max(0, case.seq_q - _CHECKED_ROWS)),
    ]
    error = _check(case, sets, spots)
    compared = bench.compare(warmed, _torch_peers(bench.torch, case, sets, spots))

    rate, unit = case.rate(compared.ours.ms)
    stats = warmed.kernel.launch_stats()
    progress(f"{case.label}: {milliseconds(compared.ours.ms)} ms, {rate:.2f} {unit}, relative error {error:.1e}")
    return {
        "case": case.label,
        "variant": stats.variant,
        "variant_reason": stats.reason,
        **asdict(compared.ours),
        "rate": rate,
        "unit": unit,
        "error": error,
        "peers": compared.peers,
        "refused": compared.refused,
    }


def _check(case: Case, sets: Sequence[Operands], spots: Sequence[_Spot]) -> float:
    """The greatest relative error of the first set's spots; every element of all sets must be written."""
    for operands in sets:
        if not np.isfinite(operands.output.numpy()).all():
            raise WrongResultError(f"{case.label}: the output has elements that are NaN, or were not written")
    output = sets[0].output.numpy()
    error = _greatest_error(output, spots)
    if not error <= _LIMITS[case.dtype]:
        raise WrongResultError(f"{case.label}: relative error {error:.1e} exceeds {_LIMITS[case.dtype]}")
    return error


def _greatest_error(output: Any, spots: Sequence[_Spot], to_numpy: Callable[[Any], NDArray[Any]] = np.asarray) -> float:
    """NaN where a spot has one, which the built-in max would pass over."""
    return float(np.max([relative_error(to_numpy(spot.of(output)), spot.expected) for spot in spots]))


# PyTorch.


def _torch_peers(
    peer: TorchPeer | None, case: Case, sets: Sequence[Operands], spots: Sequence[_Spot]
) -> dict[str, Peer]:
    """PyTorch's backends that have what the case asks for."""
    if peer is None or case.window or case.softcap or case.is_ragged or (case.causal and case.has_mask):
        return {}
    names = _F32_PEERS if case.dtype == "f32" else _MASK_PEERS if case.has_mask else _HALF_PEERS
    tensors = [tuple(map(peer.view, operands.inputs[:4])) for operands in sets]
    return {
        name: Peer(partial(_sdpa, peer.torch, _PEERS[name], case, tensors), partial(_judge, spots=spots))
        for name in names
    }


def _sdpa(torch: Any, backend: str, case: Case, tensors: Sequence[tuple[Any, ...]], i: int) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return torch.nn.functional.scaled_dot_product_attention(
            *tensors[i], is_causal=case.causal, enable_gqa=case.heads != case.kv_heads
        )


def _judge(output: Any, spots: Sequence[_Spot]) -> float:
    error = _greatest_error(output, spots, lambda rows: rows.double().cpu().numpy())
    if not error <= _PEER_LIMIT:
        raise WrongResultError(f"computes something else: relative error {error:.1e}")
    return error


# The table.


def tabulate(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table of measured rows."""
    peers = [name for name in _PEERS if any(name in row["peers"] for row in rows)]
    return Table(
        ("case", "variant", "ms", "±", "rate", "error", *(f"{name}, ms" for name in peers)),
        [
            (
                row["case"],
                row["variant"],
                milliseconds(row["ms"]),
                f"{row['spread']:.1%}",
                f"{row['rate']:.2f} {row['unit']}",
                f"{row['error']:.1e}",
                *(_peer_cell(row, name) for name in peers),
            )
            for row in rows
        ],
    )


def _peer_cell(row: Mapping[str, Any], name: str) -> str:
    peer = row["peers"].get(name)
    return f"{milliseconds(peer['ms'])} ({speedup(peer['ms'], row['ms'])})" if peer else "-"


if __name__ == "__main__":
    run("attention", measure, tabulate)
