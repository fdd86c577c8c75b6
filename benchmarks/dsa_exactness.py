"""Is the certified DsaIndexSelect exact? Rows against the strict variant, and a search for errors beyond the bound.

    python -m benchmarks.dsa_exactness --out benchmarks/results/h200-dsa-exactness.json

Rows of every kind and length go through both variants, whose kernels share no step; of some calls a row is compared
with the NumPy oracle too. The search climbs from vectors that roundings dislike to ones that they dislike more, and
measures how much of the bound is used. Last, the bound is cut until rows come out wrong: it says what the rest is for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import nxrt_cuda as nx
from benchmarks._bench import Bench, WrongResultError, progress
from benchmarks._dsa_inputs import KINDS, MASKS, Inputs, draw
from benchmarks._harness import run
from benchmarks._table import Table
from nxrt_cuda.dtype import data_type
from nxrt_cuda.ops import dsa_certified
from nxrt_cuda.ops.dsa_certified import CertifiedLayout, NormWeights
from nxrt_cuda.ops.dsa_geometry import WorkspaceLayout
from nxrt_cuda.ops.dsa_index_select import DsaIndexSelectFactory, DsaIndexSelectKernel, Options
from nxrt_cuda.ops.dsa_plan import DsaVariant
from nxrt_cuda.reference.dsa_index_select import dsa_index_select

__all__ = ["measure", "tabulate"]

_DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
_HEADS_AND_SIZES = ((32, 64), (32, 128), (64, 64), (64, 128))
_LENGTHS = (
    *((1, 900), (2, 900), (31, 900), (257, 900), (700, 700), (1300, 500), (2048, 400), (4099, 300), (8192, 150)),
    *((16384, 60), (40000, 20), (131072, 4)),
)
"""Keys, and rows that are drawn with so many."""

_DRAWERS = 8
_UNIT = 2.0**-24


@dataclass(frozen=True)
class _Case:
    dtype: np.dtype[Any]
    batch: int
    q_seq: int
    heads: int
    head_dim: int
    key_seq: int
    kind: str
    mask: str
    top_k: int

    def draw(self) -> Inputs:
        return draw(self.dtype, self.batch, self.q_seq, self.heads, self.head_dim, self.key_seq, self.kind, self.mask)


def _cases(dtype: np.dtype[Any], quick: bool) -> Iterator[_Case]:
    """Every kind with every head size, three lengths each; masks and widths of the selection take turns."""
    lengths = itertools.cycle(((1, 3), (40, 4), (300, 2)) if quick else _LENGTHS)
    masks = itertools.cycle(MASKS)
    widths = itertools.cycle((lambda t: t // 2, lambda t: 2048, lambda t: 1, lambda t: t // 7, lambda t: t - 1))
    shapes = _HEADS_AND_SIZES[:1] if quick else _HEADS_AND_SIZES
    for (heads, head_dim), kind, _ in itertools.product(shapes, KINDS, range(1 if quick else 3)):
        key_seq, rows = next(lengths)
        batch = 2 if rows % 3 == 1 else 1
        mask = next(masks)
        top_k = max(1, next(widths)(key_seq))
        yield _Case(dtype, batch, -(-rows // batch), heads, head_dim, key_seq, kind, mask, top_k)


def _select(
    runtime: nx.CudaRuntime, inputs: Inputs, top_k: int, mode: str, scale: float | None = None
) -> tuple[NDArray[np.int64], DsaIndexSelectKernel]:
    attributes = {"top_k": top_k, "scale": scale or inputs.dims.head_dim**-0.5}
    node = nx.Node("DsaIndexSelect", domain="pkg.nxrt", attributes=attributes)
    kernel = DsaIndexSelectFactory(runtime, Options(mode=mode)).create(node, ())
    operands = [runtime.from_array(values) for values in inputs.arrays]
    output = runtime.from_array(np.full((inputs.dims.batch, 1, inputs.dims.q_seq, top_k), -7, np.int64))
    kernel.execute(operands, [output])
    if kernel.choice is None or (kernel.choice.variant is DsaVariant.STRICT) != (mode == "strict"):
        raise WrongResultError(f"the {mode} variant did not serve {inputs.dims}: {kernel.choice}")
    return output.numpy(), kernel


def _wrong_rows(runtime: nx.CudaRuntime, inputs: Inputs, top_k: int) -> int:
    selected, _ = _select(runtime, inputs, top_k, "auto")
    expected, _ = _select(runtime, inputs, top_k, "strict")
    return int((selected != expected).any(-1).sum())


def _campaign(runtime: nx.CudaRuntime, dtype: np.dtype[Any], quick: bool) -> dict[str, int]:
    """Rows of all cases through both variants, and one of each tenth case through NumPy."""
    cases = list(_cases(dtype, quick))
    rows = wrong = oracle_rows = oracle_wrong = 0
    with ThreadPoolExecutor(_DRAWERS) as pool:
        pending = [pool.submit(case.draw) for case in cases[:_DRAWERS]]
        for number, case in enumerate(cases):
            inputs = pending.pop(0).result()
            if number + _DRAWERS < len(cases):
                pending.append(pool.submit(cases[number + _DRAWERS].draw))
            selected, _ = _select(runtime, inputs, case.top_k, "auto")
            expected, _ = _select(runtime, inputs, case.top_k, "strict")
            is_wrong = (selected != expected).any(-1)
            if is_wrong.any():
                progress(f"WRONG: {int(is_wrong.sum())} rows of {case}")
            rows += is_wrong.size
            wrong += int(is_wrong.sum())
            if number % 10 == 0:
                one = (inputs.query[-1:, -1:], inputs.key[-1:], inputs.weights[-1:, -1:], inputs.bias[-1:, :, -1:])
                oracle = dsa_index_select(*one, top_k=case.top_k, scale=inputs.dims.head_dim**-0.5)
                oracle_rows += 1
                oracle_wrong += not np.array_equal(oracle[0, 0, 0], selected[-1, 0, -1])
    return {"rows": rows, "wrong": wrong, "oracle_rows": oracle_rows, "oracle_wrong": oracle_wrong}


# How much of the bound is used.


def _norms(vectors: NDArray[Any], weights: NormWeights) -> NDArray[np.float64]:
    """Along the last axis, without the floor."""
    wide = vectors.astype(np.float64)
    squares = np.square(wide) @ np.array([weights.of(d, vectors.shape[-1]) for d in range(vectors.shape[-1])])
    if weights.low:
        high = vectors.astype(ml_dtypes.bfloat16).astype(np.float32)
        low = (vectors - high).astype(ml_dtypes.bfloat16).astype(np.float64)
        squares = squares + weights.low * np.square(low).sum(-1)
    root: NDArray[np.float64] = np.sqrt(squares)
    return root


def _scores(runtime: nx.CudaRuntime, inputs: Inputs, scale: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Approximate and strict scores of one batch, [S, T]; none of the rows may be looked through first."""
    dims = inputs.dims
    _, certified = _select(runtime, inputs, 1, "auto", scale)
    layout = CertifiedLayout.of(dims, data_type(inputs.key.dtype), dsa_certified.WORKSPACE_BYTES)
    approximate = np.empty((dims.q_seq, dsa_certified.row_stride(dims)), np.float32)
    runtime.dtoh(approximate, certified.workspace_stats().last_ptr + layout.scores_offset)
    _, strict = _select(runtime, inputs, 1, "strict", scale)
    scores = np.empty((dims.q_seq, dims.key_seq), np.float32)
    runtime.dtoh(scores, strict.workspace_stats().last_ptr + WorkspaceLayout.of(dims).scores_offset)
    return approximate[:, : dims.key_seq], scores


def _random_share(runtime: nx.CudaRuntime, dtype: np.dtype[Any], quick: bool) -> float:
    """The greatest share of the bound between approximate and strict scores, over kinds of regular inputs."""
    heads, head_dim = (32, 64) if quick else (64, 128)
    rows, keys = (2, 40) if quick else (64, 4096)
    weights = dsa_certified.norm_weights(data_type(dtype), heads, head_dim, _step_error(runtime))
    greatest = 0.0
    for kind in ("normal", "clustered", "near ties", "permuted", "integers", "negative", "sparse relu", "outliers"):
        inputs = draw(dtype, 1, rows, heads, head_dim, keys, kind, "none")
        approximate, strict = _scores(runtime, inputs, head_dim**-0.5)
        sums = (np.abs(inputs.weights.astype(np.float64)) * _norms(inputs.query, weights)).sum(-1)[0]
        bound = head_dim**-0.5 * _UNIT * sums[:, None] * _norms(inputs.key, weights)[0]
        greatest = max(greatest, float((np.abs(approximate.astype(np.float64) - strict) / bound).max()))
    return greatest


def _step_error(runtime: nx.CudaRuntime) -> float:
    return dsa_certified.abilities(runtime.capabilities.compute_capability).step_error


def _tensor_core_weights(dtype: np.dtype[Any], head_dim: int, per_step: float) -> NormWeights:
    """The part of the bound that the tensor cores have, with nothing in hand."""
    if dtype != np.float32:
        return NormWeights(0.0, 0.0, per_step, 0.0, 0.0)
    small_products = 2 * (head_dim / 16) * per_step * 2**-7
    return NormWeights(small_products + 128, 0.0, per_step, 2.0**32 / 128 + 2.0**24, 0.0)


_Objective = Callable[[Inputs, NDArray[np.float32], NDArray[np.float32]], NDArray[np.float64]]


def _tensor_core_share(
    weights: NormWeights, inputs: Inputs, approximate: NDArray[np.float32], strict: NDArray[np.float32]
) -> NDArray[np.float64]:
    del strict
    query, key = inputs.query[0, :, 0].astype(np.float64), inputs.key[0].astype(np.float64)
    exact = np.maximum(query @ key.T, 0)
    bound = _UNIT * _norms(inputs.query[0, :, 0], weights)[:, None] * _norms(inputs.key[0], weights)
    share: NDArray[np.float64] = np.abs(approximate - exact) / bound
    return share


def _whole_share(
    weights: NormWeights, inputs: Inputs, approximate: NDArray[np.float32], strict: NDArray[np.float32]
) -> NDArray[np.float64]:
    bound = _UNIT * _norms(inputs.query[0, :, 0], weights)[:, None] * _norms(inputs.key[0], weights)
    share: NDArray[np.float64] = np.abs(approximate.astype(np.float64) - strict) / bound
    return share


def _search(runtime: nx.CudaRuntime, dtype: np.dtype[Any], objective: _Objective, generations: int) -> float:
    """The greatest share of a bound that hill climbing over pairs of vectors reaches, one head of weight 1 each."""
    heads, head_dim, rows, keys = 32, 128, 64, 256
    rng = np.random.default_rng(7)
    query, key = _families(rng, rows, head_dim), _families(rng, keys, head_dim)
    weights = np.zeros((1, rows, heads), dtype)
    weights[..., 0] = 1
    bias = np.zeros((1, 1, rows, keys), np.float32)
    greatest = 0.0
    for _ in range(generations):
        wide_query = np.zeros((1, rows, heads, head_dim), dtype)
        wide_query[0, :, 0] = query
        inputs = Inputs(wide_query, key.astype(dtype)[None], weights, bias)
        share = objective(inputs, *_scores(runtime, inputs, 1.0))
        if not np.isfinite(share).all():
            raise WrongResultError("the search left the numbers for which there is a bound")
        greatest = max(greatest, float(share.max()))
        best = np.argsort(share, axis=None)[::-1][: rows // 4]
        parents = [(query[r], key[t]) for r, t in zip(*np.unravel_index(best, share.shape), strict=True)]
        query = np.array([_mutated(rng, parents[i % len(parents)][0], i >= len(parents)) for i in range(rows)])
        key = np.array([_mutated(rng, parents[i % len(parents)][1], i >= len(parents)) for i in range(keys)])
    return greatest


def _families(rng: np.random.Generator, count: int, depth: int) -> NDArray[np.float32]:
    """Positive vectors; among them one large element and then ones just under the step at which it cuts products."""
    vectors = np.abs(rng.standard_normal((count, depth)))
    large = rng.integers(-13, -7, count)
    vectors[::4] = np.exp2(large[::4, None]) * rng.choice([1.0, 255 / 128, 1.5], (len(vectors[::4]), depth))
    vectors[::4, 0] = 1
    vectors[1::4] = np.ldexp(rng.uniform(1, 2, vectors[1::4].shape), -rng.integers(0, 13, vectors[1::4].shape))
    vectors[2::8] = 255 / 128
    return vectors.astype(np.float32)


def _mutated(rng: np.random.Generator, vector: NDArray[np.float32], changes: bool) -> NDArray[np.float32]:
    """A copy with some elements scaled, swapped, drawn anew or given the greatest significand."""
    vector = vector.copy()
    if not changes:
        return vector
    for _ in range(rng.integers(1, 6)):
        d, other = rng.integers(0, len(vector), 2)
        change = rng.integers(0, 5)
        if change == 0:
            vector[d:] = np.clip(np.abs(vector[d:]) * np.exp2(rng.integers(-2, 3)), 2.0**-13, 2.0**6)
        elif change == 1:
            vector[[d, other]] = vector[[other, d]]
        elif change == 2:
            vector[d] = rng.uniform(0.5, 2) * vector[other]
        elif change == 3:
            vector[d:] = np.exp2(np.floor(np.log2(np.abs(vector[d:]) + 2.0**-20))) * (2 - 2.0**-7)
        else:
            vector[d] = -vector[d]
    return np.clip(vector, -(2.0**6), 2.0**6)


def _needed(runtime: nx.CudaRuntime, dtype: np.dtype[Any], quick: bool) -> dict[str, int]:
    """Wrong rows among near ties with 1, 1/4, 1/16 ... of the bound, and with none."""
    rows, keys = (2, 40) if quick else (256, 4096)
    inputs = draw(dtype, 1, rows, 64, 128, keys, "permuted", "none")
    whole = dsa_certified.norm_weights
    wrong = {}
    for cut in (1,) if quick else (1, 4, 16, 64, 256, 1024, 4096, 0):

        def weights(*arguments: Any, cut: int = cut) -> NormWeights:
            exact = whole(*arguments)
            return NormWeights(*(value / cut if cut else 0.0 for value in exact))

        with mock.patch.object(dsa_certified, "norm_weights", weights):
            wrong[f"1/{cut}" if cut else "0"] = _wrong_rows(runtime, inputs, keys // 4)
    return wrong


# The table.


def measure(bench: Bench) -> list[dict[str, Any]]:
    """A row of the table for each dtype, on the device's own kernels and on those for all devices."""
    portable = dsa_certified.abilities((8, 0))
    rows = []
    for name, dtype in _DTYPES.items():
        rows.append(_measure(bench, name, dtype))
        with mock.patch.object(dsa_certified, "abilities", return_value=portable):
            rows.append(_measure(bench, f"{name}, portable", dtype))
    if any(row["wrong"] or row["oracle_wrong"] or row["wrong_by_bound"]["1/1"] for row in rows):
        raise WrongResultError(f"rows were selected wrongly: {rows}")
    if any(max(row["random_share"], row["searched_share"]) > 1 for row in rows):
        raise WrongResultError(f"an error lies beyond its bound: {rows}")
    return rows


def _measure(bench: Bench, name: str, dtype: np.dtype[Any]) -> dict[str, Any]:
    found = _campaign(bench.runtime, dtype, bench.quick)
    generations = 2 if bench.quick else 40
    head_dim = 128
    step_error = _step_error(bench.runtime)
    tensor = partial(_tensor_core_share, _tensor_core_weights(dtype, head_dim, step_error))
    whole = partial(_whole_share, dsa_certified.norm_weights(data_type(dtype), 32, head_dim, step_error))
    row = {
        "dtype": name,
        **found,
        "random_share": _random_share(bench.runtime, dtype, bench.quick),
        "searched_share": _search(bench.runtime, dtype, whole, generations),
        "tensor_core_share": _search(bench.runtime, dtype, tensor, generations),
        "wrong_by_bound": _needed(bench.runtime, dtype, bench.quick),
    }
    progress(f"{name}: {row}")
    return row


def tabulate(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table of measured rows."""
    cuts = list(rows[0]["wrong_by_bound"])[1:]
    return Table(
        (
            *("dtype", "rows", "wrong", "bound used", "by search", "tensor cores' part"),
            *(f"wrong with {cut} of it" for cut in cuts),
        ),
        [
            (
                *(row["dtype"], f"{row['rows']}", f"{row['wrong']}"),
                *(f"{row[share]:.2%}" for share in ("random_share", "searched_share", "tensor_core_share")),
                *(f"{row['wrong_by_bound'][cut]}" for cut in cuts),
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    run("dsa_exactness", measure, tabulate)
