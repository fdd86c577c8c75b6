"""DsaIndexSelect on the GPU, beside the same selection composed of PyTorch operators.

    python -m benchmarks.dsa --out benchmarks/results/h200-dsa.json

64 heads of 128, or 32 where it says so, select 2048 keys a row. Where there are several query rows they are
the last ones of the sequence, and causal. Ours is exact, and is compared with the oracle before it is timed;
PyTorch's rounds scores to the dtype, and the table says how many of the right keys it misses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

import nxrt_cuda as nx
from benchmarks._bench import Bench, Operands, Peer, WrongResultError, normal, progress
from benchmarks._harness import run
from benchmarks._table import Table, milliseconds, speedup
from benchmarks._torch import TorchPeer
from nxrt_cuda.ops import dsa_certified
from nxrt_cuda.reference.dsa_index_select import dsa_index_select

__all__ = ["CASES", "Case", "measure", "tabulate"]

_DTYPES = {"bf16": nx.bfloat16, "f16": nx.float16, "f32": nx.float32}
_HEADS = 64
_POISON = -7
_PEER = "torch composite"

_PORTABLE = dsa_certified.abilities((8, 0))
"""What the kernels for all devices count on; their bound is then that of the coarsest tensor cores, too."""

_CHECKED_KEYS = 1 << 17
"""How many keys the oracle scores: half a second's worth."""

_PEER_LIMIT = 0.1
"""The share of missed keys up to which a peer still computes the same function."""

_COMPARED_ROWS = 128
"""How many rows of PyTorch's are compared with ours."""


@dataclass(frozen=True)
class Case:
    """One row of the table: B, S, T, H, D, top_k, the dtype, and whether on the kernels that need no Hopper."""

    dtype: str
    batch: int
    q_seq: int
    key_seq: int
    heads: int = _HEADS
    head_dim: int = 128
    top_k: int = 2048
    portable: bool = False

    @property
    def label(self) -> str:
        heads = "" if self.heads == _HEADS else f" H{self.heads}"
        return f"{self.dtype} B{self.batch} S{self.q_seq} T{self.key_seq}{heads}{', portable' if self.portable else ''}"

    @property
    def element(self) -> nx.DataType:
        return _DTYPES[self.dtype]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of query, key, weights and attention_bias."""
        return (
            (self.batch, self.q_seq, self.heads, self.head_dim),
            (self.batch, self.key_seq, self.head_dim),
            (self.batch, self.q_seq, self.heads),
            (self.batch, 1, self.q_seq, self.key_seq),
        )

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.batch, 1, self.q_seq, self.top_k)

    @property
    def attributes(self) -> dict[str, Any]:
        return {"top_k": self.top_k, "scale": self.head_dim**-0.5}

    @property
    def node(self) -> nx.Node:
        return nx.Node("DsaIndexSelect", domain="pkg.nxrt", attributes=self.attributes)

    @property
    def nbytes(self) -> int:
        *inputs, bias = (prod(shape) for shape in self.shapes)
        return sum(inputs) * self.element.itemsize + bias * 4 + prod(self.output_shape) * 8

    @property
    def operations(self) -> float:
        """Of the dots of all keys that rows may see, if more than top_k; of f32 ones, three bf16 products each."""
        seen = self.key_seq - np.arange(self.q_seq)
        products = 3 if self.element == nx.float32 else 1
        return 2.0 * self.heads * self.head_dim * products * self.batch * int(seen[seen > self.top_k].sum())


_BF16_SHAPES = ((1, 512, 8192), (1, 2048, 8192), (1, 1024, 32768), (1, 4096, 4096), (1, 1, 131072), (32, 1, 32768))

CASES = (
    *(Case("bf16", *shape) for shape in _BF16_SHAPES),
    Case("f16", 1, 2048, 8192),
    Case("f32", 1, 512, 8192),
    *(Case("bf16", *shape, heads=32) for shape in _BF16_SHAPES),
    *(Case("bf16", *shape, portable=True) for shape in _BF16_SHAPES),
    Case("f32", 1, 512, 8192, portable=True),
)

_QUICK_CASES = tuple(
    Case(dtype, batch, q_seq, key_seq, heads=2, head_dim=8, top_k=5)
    for dtype, (batch, q_seq, key_seq) in zip(_DTYPES, ((1, 6, 20), (1, 1, 40), (3, 1, 24)), strict=True)
)


def _draw(case: Case, runtime: nx.CudaRuntime, rng: np.random.Generator) -> Operands:
    """Random inputs under a causal bias, and an output that no selection contains."""
    *shapes, _ = case.shapes
    arrays = (*(normal(rng, shape, case.element) for shape in shapes), _causal_bias(case))
    return Operands.upload(runtime, arrays, np.full(case.output_shape, _POISON, np.int64))


def _causal_bias(case: Case) -> NDArray[np.float32]:
    """0 where a row may see a key, else -inf; the last row sees all."""
    limit = case.key_seq - case.q_seq + np.arange(case.q_seq)
    bias = np.where(np.arange(case.key_seq) <= limit[:, None], np.float32(0), np.float32(-np.inf))
    return np.broadcast_to(bias, case.shapes[3]).copy()


def measure(bench: Bench) -> list[dict[str, Any]]:
    """All rows of the table."""
    rng = np.random.default_rng(2)
    return [_measure(bench, case, rng) for case in (_QUICK_CASES if bench.quick else CASES)]


def _measure(bench: Bench, case: Case, rng: np.random.Generator) -> dict[str, Any]:
    abilities = (lambda _: _PORTABLE) if case.portable else dsa_certified.abilities
    with patch.object(dsa_certified, "abilities", abilities):
        warmed = bench.warm(case.node, case.nbytes, partial(_draw, case, bench.runtime, rng))
    checked = _check(case, warmed.sets)
    compared = bench.compare(warmed, _torch_peers(bench.torch, case, warmed.sets))
    choice = warmed.kernel.choice
    # A decode step is bound by memory, not by products.
    rate = bench.tensor_rate if case.q_seq > 1 else None
    progress(f"{case.label}: {milliseconds(compared.ours.ms)} ms, {checked} row(s) checked")
    return {
        "case": case.label,
        "variant": choice.variant.value,
        "variant_reason": choice.reason,
        **asdict(compared.ours),
        "floor_ms": case.operations / rate if rate else None,
        "checked_rows": checked,
        "peers": compared.peers,
        "refused": compared.refused,
    }


def _check(case: Case, sets: Sequence[Operands]) -> int:
    """Compare rows of the first set with the oracle; every element of all sets must be written."""
    for operands in sets:
        selected = operands.output.numpy()
        if selected.min() < -1 or selected.max() >= case.key_seq:
            raise WrongResultError(f"{case.label}: the output has elements that were not written, or are no keys")
    query, key, weights, bias = sets[0].arrays
    selected = sets[0].output.numpy()
    rows = case.batch * case.q_seq
    checked = np.unique(np.linspace(0, rows - 1, max(1, _CHECKED_KEYS // case.key_seq), dtype=int))
    for b, s in zip(*divmod(checked, case.q_seq), strict=True):
        row = slice(s, s + 1)
        expected = dsa_index_select(
            query[b : b + 1, row], key[b : b + 1], weights[b : b + 1, row], bias[b : b + 1, :, row], **case.attributes
        )
        if not np.array_equal(selected[b, 0, s], expected[0, 0, 0]):
            raise WrongResultError(f"{case.label}: row {s} of batch {b} differs from the oracle")
    return len(checked)


# PyTorch.


def _torch_peers(peer: TorchPeer | None, case: Case, sets: Sequence[Operands]) -> dict[str, Peer]:
    if peer is None:
        return {}
    torch = peer.torch
    tensors = [tuple(map(peer.view, operands.inputs)) for operands in sets]

    def judge(selected: Any) -> float:
        return _missed_share(selected.cpu().numpy(), sets[0].output.numpy())

    return {_PEER: Peer(lambda i: _composite(torch, *tensors[i], **case.attributes), judge)}


def _composite(torch: Any, query: Any, key: Any, weights: Any, bias: Any, *, top_k: int, scale: float) -> Any:
    """The selection with as few PyTorch operators, and as little memory traffic, as it takes."""
    dots = torch.einsum("bshd,btd->bsht", query, key).relu_()
    # A positive scale may as well be part of the weights, which are few.
    scores = torch.einsum("bsht,bsh->bst", dots, weights * scale) + bias[:, 0]
    key_seq = key.shape[1]
    best = scores.topk(min(top_k, key_seq), sorted=False)
    indices = best.indices.masked_fill(best.values == -torch.inf, key_seq).sort().values
    padded = torch.nn.functional.pad(indices, (0, top_k - indices.shape[-1]), value=key_seq)
    return padded.masked_fill(padded == key_seq, -1)[:, None]


def _missed_share(theirs: NDArray[np.int64], ours: NDArray[np.int64]) -> float:
    """The share of our keys that a peer has not selected, over the first rows."""
    pairs = zip(theirs.reshape(-1, theirs.shape[-1]), ours.reshape(-1, ours.shape[-1]), strict=True)
    missed = selected = 0
    for peer_row, row in islice(pairs, _COMPARED_ROWS):
        keys = row[row >= 0]
        missed += np.setdiff1d(keys, peer_row).size
        selected += keys.size
    share = missed / selected
    if share > _PEER_LIMIT:
        raise WrongResultError(f"computes something else: {share:.0%} of the keys are missing")
    return share


# The table.


def tabulate(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table of measured rows."""
    has_peer = any(row["peers"] for row in rows)
    return Table(
        (
            "case",
            "variant",
            "ms",
            "±",
            "of the tensor floor",
            *((f"{_PEER}, ms", "keys it misses") if has_peer else ()),
        ),
        [
            (
                row["case"],
                row["variant"],
                milliseconds(row["ms"]),
                f"{row['spread']:.1%}",
                f"{row['floor_ms'] / row['ms']:.0%}" if row["floor_ms"] else "-",
                *(_peer_cells(row) if has_peer else ()),
            )
            for row in rows
        ],
    )


def _peer_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    peer = row["peers"].get(_PEER)
    return (
        (f"{milliseconds(peer['ms'])} ({speedup(peer['ms'], row['ms'])})", f"{peer['error']:.2%}")
        if peer
        else ("-", "-")
    )


if __name__ == "__main__":
    run("dsa", measure, tabulate)
