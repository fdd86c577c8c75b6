"""Inputs of fused attention whose answers follow from the definition, random ones, and how to run them.

Shared by the tests of the oracle, on the host driver and on a GPU. The closed-form cases cover what attention
kernels are known to get wrong: the origin of the causal triangle, rows without keys, lengths that differ
within a batch, anything at all stored at keys that a row must not see, mask planes, and the range of f16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

import nxrt_cuda as nx
from nxrt_cuda.reference.attention import attention

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
DTYPES = (F32, F16, BF16)

TOLERANCES = {F32: (1e-5, 1e-5), F16: (1e-3, 2e-3), BF16: (4e-3, 8e-3)}
"""(absolute, relative), against the float64 value before its last rounding."""

NAN, INF = np.nan, np.inf

_CANARY = -777.0
_GUARD = 64  # elements; keeps what lies between as aligned as the arena


@dataclass(frozen=True)
class AttentionCase:
    """One call: inputs, attributes, and the float64 output that is right.

    ``key`` and ``value`` are caches [B, KVH, capacity, D], of which the first ``seq_k`` rows are passed;
    None passes all. ``mask`` is as the operator takes it. ``scale`` None is the operator's default.
    """

    name: str
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    expected: np.ndarray
    seq_k: int | None = None
    mask: np.ndarray | None = None
    total: object = None
    past: object = None
    causal: bool = False
    window: int = 0
    softcap: float = 0.0
    scale: float | None = None

    @property
    def dtype(self) -> np.dtype:
        return self.query.dtype

    @property
    def node(self) -> nx.Node:
        attributes: dict[str, object] = {
            "is_causal": int(self.causal),
            "local_window_size": self.window,
            "softcap": self.softcap,
        }
        if self.scale is not None:
            attributes["scale"] = self.scale
        return nx.Node("Attention", attributes=attributes)

    def oracle(self) -> np.ndarray:
        """What the reference computes."""
        scale = self.query.shape[3] ** -0.5 if self.scale is None else self.scale
        return attention(
            self.query,
            self.key[:, :, : self.seq_k],
            self.value[:, :, : self.seq_k],
            mask=self.mask,
            total_lengths=_lengths(self.total),
            past_lengths=_lengths(self.past),
            scale=float(np.float32(scale)),
            causal=self.causal,
            softcap=self.softcap,
            local_window=self.window,
        )

    def in_dtype(self, dtype: np.dtype) -> AttentionCase:
        """The same values in another element type."""
        with np.errstate(over="ignore"):
            query, key, value = (array.astype(dtype) for array in (self.query, self.key, self.value))
            mask = None if self.mask is None else self.mask.astype(dtype)
        return replace(self, name=f"{self.name}-{dtype.name}", query=query, key=key, value=value, mask=mask)

    def alone(self, b: int) -> AttentionCase:
        """Batch element ``b`` as a batch of one."""
        one = slice(b, b + 1)
        return replace(
            self,
            name=f"{self.name}-batch-{b}",
            query=self.query[one],
            key=self.key[one],
            value=self.value[one],
            expected=self.expected[one],
            mask=self.mask if self.mask is None or self.mask.ndim == 2 else self.mask[one],
            total=None if self.total is None else [self.total[b]],
            past=None if self.past is None else [self.past[b]],
        )

    def __str__(self) -> str:
        return self.name


class AttentionOperands:
    """A case's tensors on a runtime, each between guards.

    Those of the inputs are NaN, so that a stray read shows; the output lies in canaries, within and
    around. ``offset`` moves query, key, value and output by so many elements, off their alignment.
    """

    def __init__(self, rt: nx.CudaRuntime, case: AttentionCase, *, offset: int = 0) -> None:
        self._rt, self._case, self._offset = rt, case, offset
        query, key, value = (self._guarded(array) for array in (case.query, case.key, case.value))
        key, value = (cache if case.seq_k is None else cache.narrow(2, 0, case.seq_k) for cache in (key, value))
        self.inputs = [
            query,
            key,
            value,
            None if case.mask is None else self._guarded(case.mask),
            *(None if lengths is None else rt.from_array(_lengths(lengths)) for lengths in (case.total, case.past)),
        ]
        self._first = _GUARD + offset
        self._last = self._first + case.query.size
        self._arena = rt.from_array(np.full(self._last + _GUARD, _CANARY).astype(case.dtype))
        self.output = self._arena.narrow(0, self._first, case.query.size).reshape(case.query.shape)

    def _guarded(self, array: np.ndarray) -> nx.TensorView:
        first = _GUARD + self._offset
        arena = np.full(first + array.size + _GUARD, NAN).astype(array.dtype)
        arena[first : first + array.size] = array.reshape(-1)
        return self._rt.from_array(arena).narrow(0, first, array.size).reshape(array.shape)

    def result(self) -> np.ndarray:
        """The output's elements, after a look at the guards."""
        arena = self._arena.numpy()
        canary = np.array(_CANARY).astype(arena.dtype)
        assert (arena[: self._first] == canary).all(), "written before the output"
        assert (arena[self._last :] == canary).all(), "written past the output"
        return arena[self._first : self._last].reshape(self.output.shape)

    def clear(self) -> None:
        """Put the canary back."""
        self._arena.copy_from(np.full(self._arena.shape, _CANARY).astype(self._case.dtype))


def run(rt: nx.CudaRuntime, case: AttentionCase, *, offset: int = 0) -> np.ndarray:
    """What a fresh kernel object computes."""
    kernel = nx.create_kernel(rt, case.node)
    operands = AttentionOperands(rt, case, offset=offset)
    kernel.execute(operands.inputs, [operands.output])
    return operands.result()


def check(actual: np.ndarray, expected: np.ndarray, tolerance: tuple[float, float]) -> None:
    """NaN and infinities in the same places, and finite values within (absolute, relative) tolerance."""
    actual = actual.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected), err_msg="NaN in other places")
    infinite = np.isinf(expected)
    np.testing.assert_array_equal(actual[infinite], expected[infinite])
    finite = np.isfinite(expected)
    np.testing.assert_allclose(actual[finite], expected[finite], atol=tolerance[0], rtol=tolerance[1])


def check_case(actual: np.ndarray, case: AttentionCase) -> None:
    """:func:`check` against the case's answer at its element type's tolerance."""
    check(actual, case.expected, TOLERANCES[case.dtype])


def _lengths(values: object) -> np.ndarray | None:
    return None if values is None else np.asarray(values, np.int32)


# Cases with a closed form.


def averaging(
    name: str,
    seq_q: int,
    seq_k: int,
    allowed: Callable[[int, int], Iterable[int]],
    *,
    batch: int = 1,
    heads: int = 1,
    dtype: np.dtype = F32,
    **attributes: object,
) -> AttentionCase:
    """All scores equal, values the unit vectors: row i of batch b is 1/n on the n keys ``allowed(b, i)``."""
    shape = (batch, heads, seq_k, seq_k)
    expected = np.zeros((batch, heads, seq_q, seq_k))
    for b in range(batch):
        for i in range(seq_q):
            keys = list(allowed(b, i))
            expected[b, :, i, keys] = 1 / len(keys) if keys else 0
    return AttentionCase(
        name=name,
        query=np.zeros(expected.shape, dtype),
        key=np.ones(shape, dtype),
        value=np.broadcast_to(np.eye(seq_k, dtype=dtype), shape),
        expected=expected,
        **attributes,
    )


def closed_form_cases() -> list[AttentionCase]:
    """Every case whose answer can be stated without the oracle."""
    return [
        *_causal_origin(),
        *_ragged_lengths(),
        *_empty(),
        *_stale_data(),
        *_windows(),
        *_masks(),
        *_softcap(),
        *_heads(),
        *_range_of_numbers(),
        *_not_numbers(),
        *_tails(),
    ]


def _causal_origin() -> Iterator[AttentionCase]:
    """The triangle is aligned to the end of the keys, whichever of Sq and Sk is longer."""
    for seq_q, seq_k in ((2, 5), (3, 20), (17, 40), (70, 128)):
        origin = seq_k - seq_q
        yield averaging(f"causal-{seq_q}x{seq_k}", seq_q, seq_k, lambda b, i, o=origin: range(o + i + 1), causal=True)
    more_queries = averaging("causal-5x2", 5, 2, lambda b, i: range(i - 2), causal=True)
    yield from (more_queries.in_dtype(dtype) for dtype in DTYPES)
    for seq_q in (40, 130):  # whole query tiles without a key
        case = averaging(f"causal-{seq_q}x16", seq_q, 16, lambda b, i, s=seq_q: range(16 - s + i + 1), causal=True)
        yield from (case.in_dtype(dtype) for dtype in (F32, F16))


def _ragged_lengths() -> Iterator[AttentionCase]:
    """A total is a count that limits the keys of its batch; a past is the origin of its batch."""
    past = [0, 2, 11]
    total = [8, 9, 24]
    ragged = {"batch": 3, "heads": 2, "past": past, "causal": True}
    yield averaging("past-and-total", 4, 24, lambda b, i: range(min(total[b], past[b] + i + 1)), total=total, **ragged)
    yield averaging(
        "past-beyond-total-window-3",
        4,
        24,
        lambda b, i: range(max(0, [9, 0, 30][b] + i - 2), min([8, 9, 24][b], [9, 0, 30][b] + i + 1)),
        **{**ragged, "past": [9, 0, 30]},
        total=[8, 9, 24],
        window=3,
    )
    yield averaging(
        "past-window-5-not-causal",
        4,
        24,
        lambda b, i: range(max(0, past[b] + i - 4), 24),
        **{**ragged, "causal": False},
        window=5,
    )
    yield averaging("greatest-past", 3, 5, lambda b, i: range(5), past=[2**31 - 1], causal=True)
    yield averaging(
        "greatest-past-and-window", 3, 5, lambda b, i: range(i + 1, 5), past=[2**31 - 1], causal=True, window=2**31 - 1
    )
    for dtype in (F32, F16):
        for causal in (True, False):
            yield averaging(
                f"totals-8-5-2-{dtype.name}-{'causal' if causal else 'full'}",
                4,
                8,
                lambda b, i, c=causal: range([8, 5, 2][b] - 4 + i + 1 if c else [8, 5, 2][b]),
                batch=3,
                heads=2,
                dtype=dtype,
                total=[8, 5, 2],
                causal=causal,
            )
    totals = [50, 33, 16, 1]
    yield averaging(
        "totals-across-tiles", 20, 50, lambda b, i: range(totals[b] - 19 + i), batch=4, total=totals, causal=True
    )
    totals = [128, 70, 64, 3]
    yield averaging(
        "totals-across-tiles-f16", 100, 128, lambda b, i: range(totals[b]), batch=4, total=totals, dtype=F16
    )
    yield averaging("total-is-a-count", 2, 2, lambda b, i: [0], total=[1])
    yield averaging("totals-out-of-range", 2, 4, lambda b, i: range(4 * b), batch=2, total=[-3, 99])
    yield averaging("past-out-of-range", 2, 4, lambda b, i: range(i + 1), past=[-2], causal=True)
    # A key that is not there would win: its logit is 20000 higher, and its value 100.
    query, key, value = (np.array(x, np.float32).reshape(1, 1, 2, 1) for x in ([-2e4, -2e4], [1, 0], [1, 100]))
    yield AttentionCase("logit-far-below-the-sentinel", query, key, value, np.ones((1, 1, 2, 1)), total=[1])


def _empty() -> Iterator[AttentionCase]:
    """Without keys the output is written, with zeros; without rows there is nothing to write."""
    for name, batch, seq_q, capacity, seq_k in (
        ("no-keys", 2, 4, 0, None),
        ("no-keys-of-capacity-7", 1, 2, 7, 0),
        ("no-keys-one-row", 2, 1, 7, 0),
        ("no-batch", 0, 3, 5, None),
        ("no-rows", 2, 0, 5, None),
    ):
        for dtype in (F32, F16):
            query = np.full((batch, 3, seq_q, 16), NAN).astype(dtype)
            cache = np.full((batch, 1, capacity, 16), NAN).astype(dtype)
            yield AttentionCase(f"{name}-{dtype.name}", query, cache, cache, np.zeros(query.shape), seq_k=seq_k)


def _stale_data() -> Iterator[AttentionCase]:
    """NaN and infinities at keys that a row may not see are as good as zeros."""
    for head_dim, dtype in ((7, F32), (128, F32), (7, F16), (16, F16), (64, F16), (64, BF16)):
        clean = random_case(head_dim, dtype, batch=2, heads=2, seq_q=5, seq_k=21, head_dim=head_dim, total=[3, 18])
        for seq_q in (5, 1):
            rows = replace(clean, query=clean.query[:, :, :seq_q])
            key, value = clean.key.copy(), clean.value.copy()
            for b, total in enumerate(clean.total):
                key[b, :, total:] = value[b, :, total:] = NAN
                value[b, :, total + 1] = INF
            yield replace(
                rows, name=f"stale-{dtype.name}-D{head_dim}-Sq{seq_q}", key=key, value=value, expected=rows.oracle()
            )
    for dtype in DTYPES:
        clean = random_case(
            15, dtype, batch=2, heads=4, kv_heads=2, seq_q=3, seq_k=5, head_dim=16, mask_planes=(2, 4), causal=True
        )
        key, value = np.full((2, 2, 2, 32, 16), NAN).astype(dtype)
        key[:, :, :5], value[:, :, :5] = clean.key, clean.value
        yield replace(clean, name=f"capacity-32-{dtype.name}", key=key, value=value, seq_k=5)
    zero_length = averaging("total-zero", 3, 6, lambda b, i: range(6 * b), batch=2, total=[0, 6])
    for dtype in DTYPES:
        case = zero_length.in_dtype(dtype)
        query, key, value = (array.copy() for array in (case.query, case.key, case.value))
        query[0] = key[0] = value[0] = NAN
        yield replace(case, query=query, key=key, value=value)
    # In the tiles of the diagonal some rows see the key and others must not.
    for dtype in DTYPES:
        for poison in (NAN, INF, -INF):
            case = averaging(
                f"diagonal-{poison}-{dtype.name}", 80, 80, lambda b, i: range(i + 1), dtype=dtype, causal=True
            )
            value, expected = case.value.copy(), case.expected.copy()
            value[0, 0, 40, 3] = poison
            expected[0, 0, 40:, 3] = poison
            yield replace(case, value=value, expected=expected)


def _windows() -> Iterator[AttentionCase]:
    """A window of W covers the W keys up to the row's limit, itself included; 0 and less are no window."""
    for window in (1, 3, 8, 100):
        yield averaging(
            f"window-{window}",
            8,
            8,
            lambda b, i, w=window: range(max(0, i + 1 - w), i + 1),
            causal=True,
            window=window,
        )
    for window in (0, -1):
        yield averaging(f"window-off{window}", 4, 8, lambda b, i: range(5 + i), causal=True, window=window)
    for seq_q, seq_k, window in ((33, 48, 16), (100, 128, 70), (2, 128, 4)):
        origin = seq_k - seq_q
        case = averaging(
            f"window-{window}-{seq_q}x{seq_k}",
            seq_q,
            seq_k,
            lambda b, i, o=origin, w=window: range(max(0, o + i + 1 - w), o + i + 1),
            causal=True,
            window=window,
        )
        yield from (case.in_dtype(dtype) for dtype in (F32, F16))
    # Behind masked tiles the running maximum starts at -300; a maximum reset to zero would lose all weights.
    key = np.full((1, 1, 48, 1), 300, np.float32)
    key[0, 0, 44:, 0] += np.arange(4)
    value = np.arange(48, dtype=np.float32).reshape(1, 1, 48, 1)
    expected = np.array([43.8556107, 44.5073533]).reshape(1, 1, 2, 1)
    query = np.full((1, 1, 2, 1), -1, np.float32)
    yield AttentionCase("logits-near-minus-300", query, key, value, expected, causal=True, window=4, scale=1.0)


def _masks() -> Iterator[AttentionCase]:
    """-inf hides a key whatever it holds; the rank says the planes, and a row is Sk long."""
    for head_dim, dtype in ((5, F32), (16, F16), (5, BF16)):
        value = np.random.default_rng(1).standard_normal((1, 1, 5, head_dim)).astype(dtype)
        query, key = np.zeros((1, 1, 3, head_dim), dtype), np.ones(value.shape, dtype)
        mask = np.zeros((3, 5), dtype)
        mask[1], mask[2, :4] = -INF, -INF
        expected = np.zeros(query.shape)
        expected[0, 0, 0], expected[0, 0, 2] = value[0, 0].astype(np.float64).mean(axis=0), value[0, 0, 4]
        yield AttentionCase(f"masked-row-{dtype.name}", query, key, value, expected, mask=mask)
    for seq_k, hidden in ((48, 40), (128, 100)):
        mask = np.zeros((2, seq_k), np.float32)
        mask[:, :hidden] = -INF
        case = averaging(f"leading-{hidden}-masked", 2, seq_k, lambda b, i, h=hidden, s=seq_k: range(h, s), mask=mask)
        yield from (case.in_dtype(dtype) for dtype in (F32, F16))
    for dtype in DTYPES:
        for poisoned in ("key", "value"):
            for seq_q in (2, 1):
                mask = np.zeros((seq_q, 16), np.float32)
                mask[:, 4] = -INF
                allowed = [j for j in range(16) if j != 4]
                name = f"masked-nan-{poisoned}-Sq{seq_q}"
                case = averaging(name, seq_q, 16, lambda b, i, a=allowed: a, mask=mask).in_dtype(dtype)
                arrays = {"key": case.key.copy(), "value": case.value.copy()}
                arrays[poisoned][0, 0, 4] = NAN
                yield replace(case, **arrays)
    for planes in ((), (1, 1), (2, 1), (1, 3), (2, 3)):
        for dtype in (F32, F16):
            yield _one_open_column(f"mask-planes-{planes}-{dtype.name}", 2, 3, 3, 17, planes, dtype)
    yield _one_open_column("mask-1-H-where-B-is-H", 2, 2, 2, 4, (1, 2), F32)
    yield _one_open_column("mask-row-stride-43", 1, 1, 3, 43, (), F32, first=40)
    lowest = np.full((2, 6), np.finfo(np.float32).min, np.float32)
    yield averaging("finfo-min-hides-nothing", 2, 6, lambda b, i: range(6), mask=lowest)


def _one_open_column(
    name: str, batch: int, heads: int, seq_q: int, seq_k: int, planes: tuple[int, ...], dtype: np.dtype, first: int = 0
) -> AttentionCase:
    """Row i of mask plane p sees nothing but key ``(first + 5 * p + i) % seq_k``."""
    mask = np.full((*planes, seq_q, seq_k), -INF).astype(dtype)
    for plane, rows in enumerate(mask.reshape(-1, seq_q, seq_k)):
        rows[range(seq_q), [(first + 5 * plane + i) % seq_k for i in range(seq_q)]] = 0
    case = averaging(name, seq_q, seq_k, lambda b, i: [], batch=batch, heads=heads, dtype=dtype, mask=mask)
    return replace(case, expected=np.array(np.broadcast_to(np.isfinite(mask), case.expected.shape), np.float64))


def _softcap() -> Iterator[AttentionCase]:
    """The cap bounds the score before the mask is added: a masked key does not come back as -cap."""
    logits = np.array([0.5, 3.0, -0.25], np.float32)
    query = np.tile(logits, (1, 1, 2, 1))
    identity = np.eye(3, dtype=np.float32).reshape(1, 1, 3, 3)
    for name, bias, row in (
        ("inf-mask", [0, -INF, 0], [0.6697459, 0, 0.3302541]),
        ("finite-mask", [0, -100, 2.5], [0.1427097, 0, 0.8572903]),
    ):
        mask = np.tile(np.array(bias, np.float32), (2, 1))
        expected = np.tile(row, (1, 1, 2, 1))
        yield AttentionCase(f"softcap-{name}", query, identity, identity, expected, mask=mask, softcap=1.0, scale=1.0)


def _heads() -> Iterator[AttentionCase]:
    """Query head h reads key/value head h // (H / KVH)."""
    for heads, kv_heads in ((6, 2), (6, 3), (5, 1), (8, 8), (14, 2)):
        for dtype, head_dim, seq_q in ((F32, 4, 2), (F16, 16, 2), (BF16, 4, 2), (F16, 16, 1)):
            number = 10 * np.arange(2).reshape(2, 1, 1, 1) + 1
            value = np.broadcast_to(number + np.arange(kv_heads).reshape(1, -1, 1, 1), (2, kv_heads, 3, head_dim))
            query = np.ones((2, heads, seq_q, head_dim), dtype)
            group = np.arange(heads) // (heads // kv_heads)
            expected = np.broadcast_to(number + group.reshape(1, -1, 1, 1), query.shape)
            yield AttentionCase(
                f"heads-{heads}-{kv_heads}-{dtype.name}-Sq{seq_q}",
                query,
                np.ones(value.shape, dtype),
                value.astype(dtype),
                expected.astype(np.float64),
            )


def _range_of_numbers() -> Iterator[AttentionCase]:
    """Large logits, light tails and the largest values stay within the range of what holds them."""
    for dtype, head_dim in ((BF16, 16), (BF16, 64), (F32, 64)):
        for seq_q in (2, 1):
            large = np.full((1, 1, 4, head_dim), 133120).astype(dtype)
            expected = np.full((1, 1, seq_q, head_dim), 133120.0)
            yield AttentionCase(
                f"logits-of-1e11-{dtype.name}-D{head_dim}-Sq{seq_q}", large[:, :, :seq_q], large, large, expected
            )
    # 8191 keys of weight exp(-17.5), below the least f16, against one of weight 1.
    for seq_q in (2, 1):
        query = np.zeros((1, 1, seq_q, 16), np.float16)
        query[..., 0] = 1
        key, value = np.zeros((2, 1, 1, 8192, 16), np.float16)
        key[0, 0, 1:, 0], value[0, 0, 1:] = -17.5, 1000
        expected = np.full(query.shape, 0.2056336)
        yield AttentionCase(f"tail-mass-Sq{seq_q}", query, key, value, expected, scale=1.0)
    # All weights but the first round up in f16, by 2**-11 of their size: unless the denominator sums the
    # rounded weights, the mean of the largest f16 is carried past it.
    score = np.log(0.5 * (1 + 2.0**-11 + 2.0**-14))
    query, key, value = np.zeros((1, 1, 3, 16), np.float16), *np.zeros((2, 1, 1, 300, 16), np.float16)
    query[..., :2] = 1
    key[..., 1:, 0] = score
    key[..., 1:, 1] = score - np.float64(np.float16(score))
    value[...] = 65504
    yield AttentionCase("largest-f16", query, key, value, np.full(query.shape, 65504.0), scale=1.0)


def _not_numbers() -> Iterator[AttentionCase]:
    """A NaN score spoils its own row, and so do scores that are all -inf; one -inf among others has no weight."""
    for dtype in DTYPES:
        for seq_q in (9, 1):
            clean = random_case(35, dtype, heads=2, seq_q=seq_q, seq_k=20, head_dim=16)
            query, expected = clean.query.copy(), clean.expected.copy()
            query[0, 1, seq_q // 2] = expected[0, 1, seq_q // 2] = NAN
            yield replace(clean, name=f"nan-query-{dtype.name}-Sq{seq_q}", query=query, expected=expected)
            key = np.full((1, 1, 6, 16), -INF).astype(dtype)
            case = AttentionCase(
                f"scores-all-minus-inf-{dtype.name}-Sq{seq_q}",
                np.ones((1, 1, seq_q, 16), dtype),
                key,
                np.ones(key.shape, dtype),
                np.full((1, 1, seq_q, 16), NAN),
            )
            yield case
            key = key.copy()
            key[0, 0, 5] = 0
            name = f"one-score-above-minus-inf-{dtype.name}-Sq{seq_q}"
            yield replace(case, name=name, key=key, expected=np.ones(case.expected.shape))


def _tails() -> Iterator[AttentionCase]:
    """Key and query tails of tiles: a zero-filled key must not win over logits of -20."""
    for seq_k in (1, 15, 16, 17, 31, 33, 63, 64, 65, 129):
        for dtype, seq_q in ((F32, 2), (F16, 2), (F32, 1), (F16, 1)):
            query, key, value = (np.zeros((1, 1, extent, 16), dtype) for extent in (seq_q, seq_k, seq_k))
            query[..., 0], key[..., 0] = -20, 1
            value[...] = np.arange(1, seq_k + 1).reshape(1, 1, -1, 1)
            expected = np.full(query.shape, (seq_k + 1) / 2)
            yield AttentionCase(f"key-tail-{seq_k}-{dtype.name}-Sq{seq_q}", query, key, value, expected, scale=1.0)


def many_planes(batch: int, heads: int) -> AttentionCase:
    """More planes than CUDA's grid has in y: every row is the mean of its plane's two values."""
    value = np.arange(batch * heads * 2, dtype=np.float32).reshape(batch, heads, 2, 1) % 1024
    query = np.zeros((batch, heads, 2, 1), np.float32)
    expected = np.broadcast_to(value.astype(np.float64).mean(axis=2, keepdims=True), query.shape)
    return AttentionCase(f"planes-{batch}x{heads}", query, np.ones(value.shape, np.float32), value, expected)


# Cases whose answer is the oracle's.


def random_case(
    seed: int,
    dtype: np.dtype,
    *,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int = 1,
    seq_q: int,
    seq_k: int,
    head_dim: int,
    mask_planes: tuple[int, ...] | None = None,
    name: str = "random",
    **attributes: object,
) -> AttentionCase:
    """Normal values; a third of a mask is -inf."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((batch, heads, seq_q, head_dim)).astype(dtype)
    key, value = rng.standard_normal((2, batch, kv_heads, seq_k, head_dim)).astype(dtype)
    mask = None
    if mask_planes is not None:
        mask = rng.standard_normal((*mask_planes, seq_q, seq_k)).astype(dtype)
        mask[rng.random(mask.shape) < 1 / 3] = -INF
    label = f"{name}-{dtype.name}-B{batch}H{heads}KVH{kv_heads}Sq{seq_q}Sk{seq_k}D{head_dim}"
    case = AttentionCase(label, query, key, value, np.empty(query.shape), mask=mask, **attributes)
    return replace(case, expected=case.oracle())


def oracle_cases() -> list[AttentionCase]:
    """Every head size, tile tail and feature, in every dtype."""
    return [*_head_sizes(), *_query_tails(), *_features()]


def _head_sizes() -> Iterator[AttentionCase]:
    for head_dim in (1, 2, 3, 7, 31, 33, 65, 127, 128):
        for dtype in DTYPES:
            yield random_case(22, dtype, heads=2, seq_q=9, seq_k=19, head_dim=head_dim, causal=True)
    for head_dim in (16, 48, 80, 96, 112):
        yield random_case(22, F16, heads=2, seq_q=18, seq_k=35, head_dim=head_dim, causal=True)
    for head_dim in (1, 7, 80, 127, 128):
        for dtype in DTYPES:
            yield random_case(23, dtype, batch=2, heads=4, kv_heads=2, seq_q=1, seq_k=600, head_dim=head_dim)


def _query_tails() -> Iterator[AttentionCase]:
    for seq_q in (1, 2, 7, 8, 9, 15, 16, 17, 25, 63, 64, 65, 129):
        for dtype in DTYPES:
            yield random_case(32, dtype, batch=2, heads=3, seq_q=seq_q, seq_k=11, head_dim=16)


def _features() -> Iterator[AttentionCase]:
    plain = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 32}
    for dtype in DTYPES:
        for seq_q, seq_k in ((9, 37), (70, 150), (1, 150)):
            shape = {**plain, "seq_q": seq_q, "seq_k": seq_k}
            yield random_case(5, dtype, **shape, name="causal", causal=True)
            yield random_case(5, dtype, **shape, name="window", causal=True, window=20)
            yield random_case(5, dtype, **shape, name="softcap", softcap=2.0, scale=1.0)
            yield random_case(
                5,
                dtype,
                **shape,
                name="everything",
                mask_planes=(2, 4),
                causal=True,
                window=33,
                softcap=3.0,
                total=[seq_k, seq_k - 7],
                past=[seq_k - seq_q, 4],
            )


# The magnitude sweep.

SWEEP_LENGTHS = (2, 4, 8, 16, 30, 64, 96, 128, 192, 256, 300)
SWEEP_AMPLITUDES = (1.0, 3.0)


def sweep_bounds(dtype: np.dtype) -> tuple[float, float]:
    """Greatest absolute error at amplitude 1, and greatest relative error at any amplitude.

    16-bit results round to 2**-11 or 2**-8 of their size; the bounds are 4 and 12 times that. In f32 the
    error of a weight is that of its score, which reaches 8 and 72 at the two amplitudes: 4 units of 2**-24
    times these.
    """
    if dtype == F32:
        return 4 * 8 * 2.0**-24, 4 * 72 * 2.0**-24
    epsilon = {F16: 1.0, BF16: 8.0}[dtype]
    return 2e-3 * epsilon, 6e-3 * epsilon


def sweep_case(seq: int, amplitude: float, dtype: np.dtype, *, last_row_only: bool = False) -> AttentionCase:
    """Causal self-attention of 14 query and 2 key/value heads, uniform in [-amplitude, 0).

    One sign, so that no output is small by cancellation and relative errors mean something. The sweep bears
    load: with f16 accumulators the error of the products grows with the magnitude of the inputs, to 1% and
    more at amplitude 3, where no absolute bound would notice it. ``last_row_only`` keeps one query row, which
    another variant serves.
    """
    rng = np.random.default_rng(seq)
    query = rng.uniform(-amplitude, 0, (1, 14, seq, 64)).astype(dtype)
    key, value = rng.uniform(-amplitude, 0, (2, 1, 2, seq, 64)).astype(dtype)
    query = query[:, :, -1:] if last_row_only else query
    case = AttentionCase(f"sweep-{seq}-{amplitude}", query, key, value, np.empty(query.shape), causal=True)
    return replace(case, expected=case.oracle())


def sweep_errors(run_case: Callable[[AttentionCase], np.ndarray], dtype: np.dtype, *, last_row_only: bool) -> tuple:
    """The worst absolute error at amplitude 1, and the worst relative error, its denominator at least 1e-2."""
    worst_absolute = worst_relative = 0.0
    for amplitude in SWEEP_AMPLITUDES:
        for seq in SWEEP_LENGTHS:
            case = sweep_case(seq, amplitude, dtype, last_row_only=last_row_only)
            actual = run_case(case).astype(np.float64)
            assert np.isfinite(actual).all()
            error = np.abs(actual - case.expected)
            worst_relative = max(worst_relative, float((error / np.maximum(np.abs(case.expected), 1e-2)).max()))
            if amplitude == 1.0:
                worst_absolute = max(worst_absolute, float(error.max()))
    return worst_absolute, worst_relative
