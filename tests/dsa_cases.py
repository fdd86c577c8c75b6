"""Inputs of DsaIndexSelect whose answers follow from the definition, random ones, and how to run them.

Shared by the tests on the host driver and on a GPU. The closed-form cases cover what top-k kernels and
indexers are known to get wrong: ties, crowded histogram bins, positions beyond 65535, rows shorter than
top_k, mask thresholds, NaN of every kind, and sums in another order or with fused multiply-adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

import nxrt_cuda as nx
from nxrt_cuda.reference.dsa_index_select import dsa_index_select

INF = np.float32(np.inf)
NAN = np.float32(np.nan)
ULP = np.float32(2.0**-23)  # of numbers in [1, 2)

DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

_CANARY = -77
_GUARD = 64


@dataclass(frozen=True)
class DsaCase:
    """One call: inputs, attributes, and the output that is right."""

    name: str
    query: np.ndarray
    key: np.ndarray
    weights: np.ndarray
    bias: np.ndarray
    top_k: int
    expected: np.ndarray
    scale: float = 1.0
    weights_scale: float = 1.0

    @property
    def node(self) -> nx.Node:
        attributes = {"top_k": self.top_k, "scale": self.scale, "weights_scale": self.weights_scale}
        return nx.Node("DsaIndexSelect", domain="pkg.nxrt", attributes=attributes)

    @property
    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.query, self.key, self.weights, self.bias

    def oracle(self) -> np.ndarray:
        """What the reference selects."""
        return dsa_index_select(*self.inputs, top_k=self.top_k, scale=self.scale, weights_scale=self.weights_scale)

    def with_top_k(self, top_k: int, indices: object) -> DsaCase:
        """The same inputs with another width and answer."""
        return replace(self, name=f"{self.name}-k{top_k}", top_k=top_k, expected=padded(indices, top_k))

    def in_dtype(self, dtype: np.dtype) -> DsaCase:
        """The same values in another element type."""
        query, key, weights = (array.astype(dtype) for array in (self.query, self.key, self.weights))
        return replace(self, name=f"{self.name}-{dtype.name}", query=query, key=key, weights=weights)

    def __str__(self) -> str:
        return self.name


class DsaOperands:
    """A case's tensors on a runtime. The output is pre-filled with a canary and lies between guards."""

    def __init__(self, rt: nx.CudaRuntime, case: DsaCase, *, aligned: bool = True) -> None:
        """Unless ``aligned``, the inputs begin one element into their allocations."""
        self.inputs = [rt.from_array(array) if aligned else _shifted(rt, array) for array in case.inputs]
        size = case.expected.size
        self._arena = rt.from_array(np.full(size + 2 * _GUARD, _CANARY, np.int64))
        self.output = self._arena.narrow(0, _GUARD, size).reshape(case.expected.shape)

    def rewrite(self, case: DsaCase) -> None:
        """Another case's inputs, of the same shapes and dtypes, in the place of these."""
        for tensor, array in zip(self.inputs, case.inputs, strict=True):
            tensor.copy_from(array)

    def selected(self) -> np.ndarray:
        """The output, after a look at the guards."""
        arena = self._arena.numpy()
        assert (arena[:_GUARD] == _CANARY).all(), "written before the output"
        assert (arena[arena.size - _GUARD :] == _CANARY).all(), "written past the output"
        return arena[_GUARD : arena.size - _GUARD].reshape(self.output.shape)

    def clear(self) -> None:
        """Put the canary back."""
        self._arena.copy_from(np.full(self._arena.shape, _CANARY, np.int64))


def _shifted(rt: nx.CudaRuntime, array: np.ndarray) -> nx.TensorMut:
    arena = rt.from_array(np.concatenate([np.ones(1, array.dtype), array.ravel()]))
    return arena.narrow(0, 1, array.size).reshape(array.shape)


def run(rt: nx.CudaRuntime, case: DsaCase) -> np.ndarray:
    """What a fresh kernel object selects."""
    kernel = nx.create_kernel(rt, case.node)
    operands = DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    return operands.selected()


def padded(indices: object, top_k: int) -> np.ndarray:
    """One row's indices as an output [1, 1, 1, top_k]."""
    row = np.full(top_k, -1, np.int64)
    row[: np.size(indices)] = indices
    return row.reshape(1, 1, 1, top_k)


def nan(bits: int) -> np.float32:
    """The NaN with exactly these bits."""
    return np.uint32(bits).view(np.float32)


def biased(name: str, bias: object, top_k: int, indices: object) -> DsaCase:
    """One row whose scores are its biases: the query is zero."""
    bias = np.asarray(bias, np.float32).reshape(1, 1, 1, -1)
    key = np.ones((1, bias.shape[-1], 1), np.float32)
    zero, one = np.zeros((1, 1, 1, 1), np.float32), np.ones((1, 1, 1), np.float32)
    return DsaCase(name, zero, key, one, bias, top_k, padded(indices, top_k))


def single_row(
    name: str, query: object, key: object, weights: object, top_k: int, indices: object, bias: object = None
) -> DsaCase:
    """One row in f32: query [H, D], key [T, D], weights [H], bias [T] (zeros)."""
    query, key, weights = (np.asarray(values, np.float32)[None] for values in (query, key, weights))
    bias = np.zeros(key.shape[1], np.float32) if bias is None else np.asarray(bias, np.float32)
    return DsaCase(name, query[None], key, weights[None], bias.reshape(1, 1, 1, -1), top_k, padded(indices, top_k))


def closed_form_cases() -> list[DsaCase]:
    """Every case whose answer can be stated without computing a score."""
    return [*_ties(), *_lengths(), *_masks(), *_nans(), *_order_of_operations(), *_layout()]


def _ties() -> Iterator[DsaCase]:
    """Among equal scores the lowest positions win, however many share one histogram bin."""
    for keys, top_k in ((600, 300), (257, 256), (4097, 2048)):
        yield biased(f"all-equal-T{keys}", np.full(keys, 1.5), top_k, np.arange(top_k))
    for keys in (20000, 60000):
        rank = np.random.default_rng(keys).permutation(keys)
        best = np.flatnonzero(rank >= keys - 2048)
        yield biased(f"one-ulp-apart-T{keys}", 1 + rank.astype(np.float32) * ULP, 2048, best)
    bias = np.ones(20000, np.float32)
    bias[19000:] += np.arange(19000, 20000, dtype=np.float32) * ULP
    yield biased("19000-ties-under-1000-winners", bias, 2048, [*range(1048), *range(19000, 20000)])
    every_seventh = np.arange(5000) % 7 == 0
    tail = np.flatnonzero(~every_seventh)[:285]
    yield biased("715-at-one-rest-at-zero", every_seventh, 1000, np.sort([*np.flatnonzero(every_seventh), *tail]))
    yield single_row("repeated-keys", [[1]], np.tile([[1], [5], [2]], (4, 1)), [1], 5, [1, 2, 4, 7, 10])
    yield biased("signed-zeros-tie-after-the-sum", [-0.0, 0.0, -0.0, 0.0], 2, [0, 1])

    winners = [3, 65535, 65536, 69999, 70000]
    bias = np.zeros(70001, np.float32)
    bias[winners] = 5, 4, 3, 2, 1
    yield biased("winners-beyond-65535", bias, 5, winners)
    yield biased("ramp-T131073", np.arange(131073), 2048, np.arange(131073 - 2048, 131073))


def _lengths() -> Iterator[DsaCase]:
    """A row emits min(#allowed, top_k) positions; every other slot is written with -1."""
    for top_k, indices in ((1, [2]), (2, [0, 2]), (3, [0, 1, 2]), (4, [0, 1, 2]), (300, [0, 1, 2])):
        yield biased("three-keys", [2, 1, 3], 3, [0, 1, 2]).with_top_k(top_k, indices)
    yield biased("one-key", [0], 1, [0])
    for keys, top_k in ((255, 7), (256, 257), (257, 256), (511, 510), (513, 512), (1000, 257), (1024, 1023)):
        rank = np.random.default_rng(keys).permutation(keys)
        yield biased(f"permuted-T{keys}-k{top_k}", rank, top_k, np.flatnonzero(rank >= keys - top_k))
    for name, batch, q_seq, key_seq in (("no-keys", 2, 3, 0), ("no-rows", 2, 0, 6), ("no-batch", 0, 3, 6)):
        yield DsaCase(
            name,
            np.ones((batch, q_seq, 2, 4), np.float32),
            np.ones((batch, key_seq, 4), np.float32),
            np.ones((batch, q_seq, 2), np.float32),
            np.zeros((batch, 1, q_seq, key_seq), np.float32),
            5,
            np.full((batch, 1, q_seq, 5), -1, np.int64),
        )
    yield biased("ascending-then-padding", [9, -INF, 8, 7, -INF, 10], 6, [0, 2, 3, 5])


def _masks() -> Iterator[DsaCase]:
    """A key is allowed where bias > -1e30 as f32 numbers compare; NaN does not compare."""
    edge = np.float32(-1e30)
    lowest = np.finfo(np.float32).min, np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).min)
    bias = [edge, np.nextafter(edge, INF), np.nextafter(edge, -INF), -INF, *lowest]
    bias += [-65504, -1e9, -1e4, -9.9e29, 0, INF, -1.1e30]
    yield biased("mask-threshold", bias, 13, [1, 6, 7, 8, 9, 10, 11])
    nans = [nan(0x7FC00000), nan(0xFFC00000), nan(0x7F800001), nan(0x7FFFFFFF)]
    case = biased("nan-bias", [*nans, 1, -1], 6, [4, 5])
    yield from (case.with_top_k(top_k, indices) for top_k, indices in ((1, [4]), (2, [4, 5]), (4, [4, 5])))
    yield biased("nothing-but-nan-bias", np.full(300, NAN), 4, [])
    yield biased("everything-masked", np.full(2049, -INF), 7, [])


def _nans() -> Iterator[DsaCase]:
    """A NaN dot counts as zero; a NaN score of any sign or payload is one value, the greatest."""
    overflow = single_row(
        "inf-times-zero", [[1e30]], [[1], [1e30], [2], [1e30], [3]], [0], 5, range(5), [1e10, 0, INF, 0, 7]
    )
    for top_k, indices in ((1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3])):
        yield overflow.with_top_k(top_k, indices)
    for bits in (0xFFC00000, 0x7FC12345, 0xFFABCDEF):
        yield single_row(
            f"nan-weight-{bits:x}", [[1], [1]], [[1], [5], [-3], [2]], [0, nan(bits)], 2, [0, 1], [-5, 3, INF, 1]
        )
    for bits in (0x7FC00001, 0xFFC00001):
        for top_k in (1, 2, 3):
            # inf * 0 and the weight's own payload: NaN of two kinds, and all of them tie.
            yield single_row(
                f"nan-of-two-kinds-{bits:x}-k{top_k}",
                [[1e30], [1e30]],
                [[1], [1e30], [2], [1e30], [3]],
                [0, nan(bits)],
                top_k,
                range(top_k),
            )
    yield single_row("minus-inf-plus-inf", [[1e30]], [[-1], [1e30], [-1]], [-1], 1, [1], [INF] * 3)
    nan_key = single_row("nan-key", [[1]], [[NAN], [0.5], [-1], [0.25]], [1], 4, range(4))
    for top_k, indices in ((1, [1]), (2, [1, 3]), (3, [0, 1, 3])):
        yield nan_key.with_top_k(top_k, indices)
    yield single_row("nan-query-head", [[NAN], [1]], [[1], [2], [3]], [1, 1], 1, [2])
    yield single_row("inf-minus-inf-dot", [[1, 1]], [[INF, -INF], [1, 0], [-1, 0]], [1], 2, [0, 1])


def _order_of_operations() -> Iterator[DsaCase]:
    """Another order of sums, or one fused multiply-add, picks another key."""
    a = 1 + 2.0**-12  # a * a = 1 + 2**-11 + 2**-24: the last bit is lost where the product is rounded
    square, lost = 1 + 2.0**-11, 2.0**-26
    yield single_row("unfused-dot", [[-1, a]], [[-lost, 0], [square, a]], [1], 1, [0])
    yield single_row("unfused-head-sum", [[square], [a]], [[0], [1]], [-1, a], 1, [0], [lost, 0])
    yield single_row("unfused-bias", [[1]], [[0], [a]], [a], 1, [0], [lost, -square])
    # Products outside f32, from values that bf16 holds too. Half the least subnormal rounds to zero, but
    # makes two of one when fused; 2**128 overflows, but not when fused with what it is added to.
    underflow = single_row("product-underflow", [[2.0**-100] * 2], [[2.0**-49, 0], [2.0**-49, 2.0**-50]], [1], 1, [0])
    overflow = single_row(
        "product-overflow", [[1, 2.0**64]], [[2.0**126, 0], [-1.984375 * 2.0**127, 2.0**64]], [1], 1, [1]
    )
    yield from (case.in_dtype(dtype) for case in (underflow, overflow) for dtype in (DTYPES[0], DTYPES[2]))
    # 1e8 + 1 rounds to 1e8: in ascending order the sum of the second key is 1, else 0 or 2.
    keys = [[0, 0.5, 0, 0], [1e8, 1, -1e8, 1], [0, 1.5, 0, 0]]
    heads = [[1e8, 0], [1, 1], [1e8, 0], [1, 0]]
    for top_k, indices in ((1, [2]), (2, [1, 2])):
        yield single_row(f"ascending-d-k{top_k}", [[1, 1, 1, 1]], keys, [1], top_k, indices)
        yield single_row(f"ascending-h-k{top_k}", heads, [[0, 0.5], [1, 0], [0, 1.5]], [1, 1, -1, 1], top_k, indices)


def _layout() -> Iterator[DsaCase]:
    """Keys come from the row's own batch, bias, weights and query from the row itself."""
    batch, q_seq, heads, key_seq, top_k = 3, 5, 3, 40, 4
    # Key t of batch b is the unit vector t: a row's dot is the query's element t. Head h of row (b, s)
    # asks for key 7 * b + 2 * s + h; its weight ranks it, and head 1 is masked away.
    query = np.zeros((batch, q_seq, heads, key_seq), np.float32)
    bias = np.full((batch, 1, q_seq, key_seq), -1.0, np.float32)
    weights = np.broadcast_to(np.array([3, 9, 5], np.float32), (batch, q_seq, heads))
    expected = np.empty((batch, 1, q_seq, top_k), np.int64)
    for b in range(batch):
        for s in range(q_seq):
            first = 7 * b + 2 * s
            query[b, s, range(heads), range(first, first + heads)] = 1
            bias[b, 0, s, first + 1] = -INF
            # The other two slots go to the lowest positions of all that tie at -1.
            ties = [t for t in range(key_seq) if t not in range(first, first + heads)][:2]
            expected[b, 0, s] = sorted([first, first + 2, *ties])
    key = np.broadcast_to(np.eye(key_seq, dtype=np.float32), (batch, key_seq, key_seq))
    case = DsaCase("own-row-own-batch", query, key, weights, bias, top_k, expected)
    yield from (case.in_dtype(dtype) for dtype in DTYPES)


def random_case(
    seed: int,
    dtype: np.dtype,
    *,
    batch: int = 1,
    q_seq: int = 1,
    heads: int = 1,
    head_dim: int = 1,
    key_seq: int = 1,
    top_k: int = 1,
    values: str = "normal",
    mask: str = "random",
) -> DsaCase:
    """A case whose answer is the oracle's.

    Args:
        values: ``"normal"``; ``"integers"``, which tie; ``"wide"``, over all exponents, so that products
            underflow and overflow; ``"special"``, with NaN, infinities and zeros strewn in.
        mask: ``"none"``, ``"random"``, ``"causal"``, or ``"soft"``: finite biases of all sizes.
    """
    rng = np.random.default_rng(seed)
    shapes = (batch, q_seq, heads, head_dim), (batch, key_seq, head_dim), (batch, q_seq, heads)
    with np.errstate(over="ignore", under="ignore"):
        query, key, weights = (_values(rng, values, shape).astype(dtype) for shape in shapes)
    bias = _bias(rng, mask, (batch, 1, q_seq, key_seq))
    scale, weights_scale = (float(np.float32(x)) for x in rng.uniform(0.05, 1.5, 2))
    extents = f"B{batch}S{q_seq}H{heads}D{head_dim}T{key_seq}k{top_k}"
    name = f"{dtype.name}-{extents}-{values}-{mask}-{seed}"
    empty = np.empty((batch, 1, q_seq, top_k), np.int64)
    case = DsaCase(name, query, key, weights, bias, top_k, empty, scale, weights_scale)
    return replace(case, expected=case.oracle())


def _values(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape)
    if kind == "integers":
        return np.round(values)
    if kind == "wide":
        return np.ldexp(values, rng.integers(-140, 120, shape))
    if kind == "special":
        strewn = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0])
        return np.where(rng.random(shape) < 0.03, rng.choice(strewn, shape), values)
    return values


def _bias(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    _, _, q_seq, key_seq = shape
    bias = np.zeros(shape, np.float32)
    if kind == "random":
        bias[rng.random(shape) < rng.choice([0.1, 0.5, 0.98, 1.0])] = -INF
    elif kind == "causal":
        bias[..., np.arange(key_seq) > np.arange(q_seq)[:, None] + key_seq - q_seq] = -INF
    elif kind == "soft":
        bias[...] = rng.standard_normal(shape) * rng.choice([1e-3, 1.0, 1e4, 1e9, 1e29], shape)
    return bias


def random_cases(seed: int, dtype: np.dtype, count: int, cells: int) -> Iterator[DsaCase]:
    """``count`` cases of mixed shapes, with about ``cells`` products q * k at most."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        batch, q_seq = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 5, 8, 9, 17, 33]))
        heads, head_dim = int(rng.choice([1, 2, 3, 7, 8, 12, 17, 32])), int(rng.choice([1, 2, 5, 16, 17, 40, 64, 100]))
        longest = max(1, min(3000, cells // (batch * q_seq * heads * head_dim)))
        key_seq = int(rng.integers(1, longest + 1))
        yield random_case(
            seed * 1000 + number,
            dtype,
            batch=batch,
            q_seq=q_seq,
            heads=heads,
            head_dim=head_dim,
            key_seq=key_seq,
            top_k=int(rng.choice([1, 2, 7, 64, 500, key_seq, key_seq + 1])),
            values=str(rng.choice(["normal", "integers", "wide", "special"])),
            mask=str(rng.choice(["none", "random", "causal", "soft"])),
        )
