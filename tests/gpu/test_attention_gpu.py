"""Fused attention on a GPU: the cases of the host driver, and what only a device can show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.ops import attention_sm90 as sm90
from tests.attention_cases import (
    BF16,
    F16,
    F32,
    INF,
    NAN,
    AttentionCase,
    AttentionOperands,
    check_case,
    closed_form_cases,
    random_case,
    run,
)
from tests.ops import test_attention

# Collected here, they run on this file's runtime.
from tests.ops.test_attention import (  # noqa: F401
    test_addresses_need_no_more_than_the_elements_alignment,
    test_closed_forms,
    test_lengths_out_of_range_are_clamped_and_reported,
    test_magnitude_sweep,
    test_more_planes_than_the_grid_has_in_y,
    test_oracle_cases,
    test_recorded_encoder_tensors,
    test_reruns_and_batch_mates,
)
from tests.ops.test_attention_capture import (  # noqa: F401
    test_lengths_rewritten_on_the_device_take_effect_at_the_next_replay,
    test_replays_are_byte_identical_to_eager_runs,
)


@pytest.fixture(scope="module")
def rt(gpu: str) -> Iterator[nx.CudaRuntime]:
    """One runtime for all tests of this file: the first call of each specialisation compiles it."""
    with nx.open_runtime("cuda:0") as runtime:
        yield runtime


@pytest.fixture(params=["chosen", "portable"])
def choice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that the operator chooses, and those that need no Hopper, which it would pass over there."""
    if request.param == "portable":
        monkeypatch.setattr(sm90, "obstacle", lambda *_: "a test asks for the portable kernels")


@pytest.mark.parametrize("case", [case for case in closed_form_cases() if case.dtype in (F16, BF16)], ids=str)
def test_closed_forms_off_the_alignment_of_tensor_maps(rt: nx.CudaRuntime, case: AttentionCase) -> None:
    """The portable tensor-core kernel answers alike where the device has a kernel of its own for aligned operands."""
    check_case(run(rt, case, offset=4), case)


@pytest.mark.parametrize("case", [case for case in closed_form_cases() if case.dtype in (F16, BF16)], ids=str)
def test_closed_forms_on_the_portable_kernels(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch, case: AttentionCase
) -> None:
    """And with aligned operands, which it copies asynchronously."""
    monkeypatch.setattr(sm90, "obstacle", lambda *_: "a test asks for the portable kernels")
    check_case(run(rt, case), case)


@pytest.mark.usefixtures("choice")
@pytest.mark.parametrize(("dtype", "beyond_rounding"), [(F32, 20), (F16, 1.5), (BF16, 1.5)], ids=str)
def test_long_rows(rt: nx.CudaRuntime, dtype: np.dtype, beyond_rounding: float) -> None:
    """The error of 2048 causal rows, in the Euclidean norm, is a small multiple of rounding the result.

    In f32 it is that of exponentiating scores which are themselves rounded; the 16-bit kernels round the weights to
    the element type too, which by itself makes the factor 1.3 to 1.4.
    """
    case = random_case(7, dtype, heads=4, kv_heads=2, seq_q=2048, seq_k=2048, head_dim=128, causal=True)
    norm = np.linalg.norm
    error = norm(run(rt, case).astype(np.float64) - case.expected)
    rounding = norm(case.expected.astype(dtype).astype(np.float64) - case.expected)
    assert error < beyond_rounding * rounding


def test_each_variant_runs(rt: nx.CudaRuntime) -> None:
    """The cases above reach every kernel there is for this device, by the choice that the operator makes."""
    is_hopper = rt.capabilities.compute_capability == (9, 0)
    has_clusters = rt.capabilities.compute_capability >= (9, 0)
    for dtype, seq_q, head_dim, offset, variant in (
        (F32, 2, 16, 0, "bf16x6" if is_hopper else "tf32x3"),
        (F32, 2, 16, 1, "bf16x6" if is_hopper else "tf32x3"),
        (F32, 2, 7, 0, "simt"),
        (F16, 2, 16, 4, "tensor_core"),
        (BF16, 2, 16, 1, "tensor_core"),
        (F16, 2, 16, 0, "sm90" if is_hopper else "tensor_core"),
        (BF16, 2, 16, 0, "sm90" if is_hopper else "tensor_core"),
        (BF16, 1, 16, 0, "decode_tensor_core" if has_clusters else "decode"),
        (BF16, 1, 16, 1, "decode"),
    ):
        case = random_case(1, dtype, heads=2, seq_q=seq_q, seq_k=3, head_dim=head_dim)
        kernel, operands = nx.create_kernel(rt, case.node), AttentionOperands(rt, case, offset=offset)
        kernel.execute(operands.inputs, [operands.output])
        check_case(operands.result(), case)
        assert kernel.launch_stats().variant == variant


HEADS = 40
"""Of one key/value head: with two batch elements, more than two tiles a multiprocessor of an H200."""

LONG = {"batch": 2, "heads": 6, "kv_heads": 2, "seq_q": 500, "seq_k": 700}
"""Several tiles and blocks of keys, none of them whole."""


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (8, 2), (8, 1), (11, 1)])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda d: d.name)
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"head_dim": 80, "seq_k": 2047, "total": [2047, 1300]},
        {"head_dim": 7, "seq_k": 5000},
        {"causal": True, "window": 700, "softcap": 2.0, "total": [3001, 500]},
        {"mask_planes": (1, 1), "total": [0, 3001]},
        {"head_dim": 64, "mask_planes": (), "window": 33, "past": [40, 2999]},
    ],
    ids=str,
)
def test_long_single_rows(
    rt: nx.CudaRuntime, heads: int, kv_heads: int, dtype: np.dtype, features: dict[str, object]
) -> None:
    """Keys that a cluster divides, for groups that fill a block of heads, share it or take two."""
    shape = {"batch": 2, "heads": heads, "kv_heads": kv_heads, "seq_q": 1, "seq_k": 3001, "head_dim": 128}
    case = random_case(11, dtype, **{**shape, **features})
    check_case(run(rt, case), case)


@pytest.mark.parametrize("has_mask", [False, True], ids=["lengths", "mask"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda d: d.name)
def test_single_rows_do_not_see_poison(rt: nx.CudaRuntime, dtype: np.dtype, has_mask: bool) -> None:
    """NaN in keys and values beyond a length, or behind a mask of -inf, changes nothing."""
    shape = {"batch": 2, "heads": 8, "kv_heads": 2, "seq_q": 1, "seq_k": 3000, "head_dim": 128}
    features = {"mask_planes": (2, 1)} if has_mask else {"total": [2011, 77]}
    case = random_case(12, dtype, **shape, **features)
    key, value = case.key.copy(), case.value.copy()
    for b in range(2):
        hidden = case.mask[b, 0, 0] == -np.inf if has_mask else np.arange(3000) >= features["total"][b]
        key[b, :, hidden] = np.nan
        value[b, :, hidden] = np.nan
    check_case(run(rt, replace(case, key=key, value=value)), case)


def test_the_batch_changes_no_bit_of_a_single_row(rt: nx.CudaRuntime) -> None:
    """A batch of 40 divides keys as one of its elements alone does."""
    case = random_case(13, BF16, batch=40, heads=8, kv_heads=2, seq_q=1, seq_k=2500, head_dim=128)
    np.testing.assert_array_equal(run(rt, case)[:1], run(rt, case.alone(0)))


@pytest.mark.usefixtures("choice")
@pytest.mark.parametrize("head_dim", [128, 96, 64, 40])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda d: d.name)
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"causal": True},
        {"causal": True, "total": [700, 130]},
        {"causal": True, "past": [40, 150], "total": [420, 700]},
        {"total": [0, 390]},
        {"causal": True, "window": 150},
        {"window": 100, "softcap": 2.0},
        {"causal": True, "softcap": 2.0},
        {"causal": True, "mask_planes": (2, 6)},
        {"mask_planes": (1, 1), "softcap": 2.0, "window": 300, "total": [700, 130]},
        {"mask_planes": (), "seq_k": 701},
    ],
    ids=str,
)
def test_features_over_many_tiles(
    rt: nx.CudaRuntime, dtype: np.dtype, head_dim: int, features: dict[str, object]
) -> None:
    """Tiles that are empty, partial and full, in every combination with what restricts or changes scores."""
    case = random_case(5, dtype, **{**LONG, "head_dim": head_dim, **features})
    check_case(run(rt, case), case)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("has_mask", [False, True], ids=["plain", "mask"])
@pytest.mark.parametrize("head_dim", [128, 64])
def test_all_combinations_of_features_over_lengths(
    rt: nx.CudaRuntime, head_dim: int, has_mask: bool, softcap: float, window: int, causal: bool
) -> None:
    """Several tiles a multiprocessor, of many blocks, few and none, whole ones between partial ones, with poison.

    What walks blocks at a pace of its own must neither take one for another nor fall out of step.
    """
    for seed, (seq_q, seq_k, total) in enumerate(
        ((500, 700, None), (300, 1500, [1500, 900]), (900, 400, None), (640, 640, [0, 517]), (129, 129, [129, 1]))
    ):
        case = random_case(
            seed,
            BF16,
            batch=2,
            seq_q=seq_q,
            seq_k=seq_k,
            head_dim=head_dim,
            causal=causal,
            window=window,
            softcap=softcap,
            total=total,
            mask_planes=(2, 1) if has_mask else None,
        )
        value = case.value.copy()
        for key in np.random.default_rng(seed).integers(0, seq_k, 6):
            value[:, :, key, key % head_dim] = (NAN, INF, -INF)[key % 3]
        case = replace(case, value=value)
        case = replace(case, expected=case.oracle())
        actual = run(rt, replace(case, query=case.query.repeat(HEADS, 1)))
        check_case(actual[:, :1], case)
        bits = actual.view(np.uint16)
        assert (bits == bits[:, :1]).all(), "heads of the same queries differ"


@pytest.mark.usefixtures("choice")
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda d: d.name)
@pytest.mark.parametrize("head_dim", [128, 64])
def test_poisoned_values_over_many_tiles(rt: nx.CudaRuntime, dtype: np.dtype, head_dim: int) -> None:
    """NaN and infinities reach the rows that see them, and no others, wherever in a block they stand."""
    case = random_case(6, dtype, **LONG, head_dim=head_dim, causal=True)
    value = case.value.copy()
    for key, poison in ((3, NAN), (255, INF), (256, -INF), (400, INF), (401, -INF), (699, NAN)):
        value[:, :, key, key % head_dim] = poison
    poisoned = replace(case, value=value)
    check_case(run(rt, poisoned), replace(poisoned, expected=poisoned.oracle()))


@pytest.mark.usefixtures("choice")
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize(
    ("operand", "number"),
    [("query", INF), ("query", NAN), ("key", INF), ("key", -INF), ("key", NAN), ("value", 3.4e38)],
    ids=str,
)
def test_numbers_without_parts(rt: nx.CudaRuntime, operand: str, number: float, head_dim: int) -> None:
    """f32 operands are split into parts: those of an infinity, or of what rounds to one, are not numbers, but the row's
    answer may be."""
    case = random_case(8, F32, heads=2, seq_q=200, seq_k=300, head_dim=head_dim)
    array = getattr(case, operand).copy()
    array[0, 0, 77, 5] = number
    extreme = replace(case, **{operand: array})
    check_case(run(rt, extreme), replace(extreme, expected=extreme.oracle()))


@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("seq_k", [704, 700, 698, 697])
def test_rows_of_a_mask_at_any_address(rt: nx.CudaRuntime, seq_k: int, causal: bool, head_dim: int) -> None:
    """Of a multiple of eight, four or two keys, or an odd number of them.

    One row sees no key, one a single key, one only a key whose score is -inf, and all rows are kept from keys and
    values that are not numbers.
    """
    case = random_case(9, BF16, heads=2, seq_q=300, seq_k=seq_k, head_dim=head_dim, causal=causal, mask_planes=(1, 2))
    query, key, value, mask = (array.copy() for array in (case.query, case.key, case.value, case.mask))
    key[:, :, 77], value[:, :, 78], key[:, :, 79] = NAN, INF, INF
    key[:, :, 100], key[:, :, 100, 0], query[:, :, 40, 0] = 0, -INF, 1
    mask[..., [77, 78, 79, 100]] = -INF
    mask[:, :, [5, 17, 40]] = -INF
    mask[:, :, 17, 3] = mask[:, :, 40, 100] = 0
    case = replace(case, query=query, key=key, value=value, mask=mask)
    case = replace(case, expected=case.oracle())
    assert (case.expected[:, :, 5] == 0).all()
    assert np.isnan(case.expected[:, :, 40]).all()
    assert np.isnan(case.expected).any(-1).sum() == 2
    check_case(run(rt, case), case)


@pytest.mark.usefixtures("choice")
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda d: d.name)
@pytest.mark.parametrize("growth", [0.05, 0.3, 1.0, 8.0])
def test_scores_near_the_cap_and_far_below_it(
    rt: nx.CudaRuntime, growth: float, dtype: np.dtype, head_dim: int
) -> None:
    """A kernel may treat them differently, from block to block: keys grow towards the first."""
    case = random_case(10, dtype, heads=2, seq_q=300, seq_k=700, head_dim=head_dim, causal=True, softcap=5.0)
    ramp = np.linspace(growth, 0, 700).reshape(1, 1, 700, 1)
    case = replace(case, key=(case.key * ramp).astype(dtype))
    check_case(run(rt, case), replace(case, expected=case.oracle()))


@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("window", [0, 1, 64, 130])
def test_ranges_that_cut_blocks_anywhere(rt: nx.CudaRuntime, window: int, head_dim: int) -> None:
    """Rows of one tile that see either half of a block of keys, the whole or nothing of it."""
    for past in (0, 1, 40, 63, 64, 65, 100, 127, 128):
        shape = {"seq_q": 200, "seq_k": 500, "head_dim": head_dim, "causal": True}
        case = random_case(past, BF16, **shape, past=[past], window=window)
        check_case(run(rt, case), case)


@pytest.mark.usefixtures("choice")
@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda d: d.name)
def test_maxima_that_grow_with_every_block(rt: nx.CudaRuntime, dtype: np.dtype) -> None:
    """Blocks are walked from the last; scores that rise towards the first move every row's origin again and again."""
    case = random_case(7, dtype, heads=2, seq_q=200, seq_k=1000, head_dim=64)
    query, key = np.abs(case.query), np.abs(case.key)
    for growth in (1.0, 30.0):
        ramp = np.linspace(growth, 0, 1000).reshape(1, 1, 1000, 1)
        rising = replace(case, query=query, key=(key * ramp).astype(dtype))
        check_case(run(rt, rising), replace(rising, expected=rising.oracle()))


def test_a_tile_counter_is_left_at_zero(rt: nx.CudaRuntime) -> None:
    """More tiles than multiprocessors, launch after launch: each finds what the first found."""
    case = random_case(8, F16, batch=8, heads=16, seq_q=400, seq_k=64, head_dim=64)
    kernel, operands = nx.create_kernel(rt, case.node), AttentionOperands(rt, case)
    for _ in range(3):
        operands.clear()
        kernel.execute(operands.inputs, [operands.output])
        check_case(operands.result(), case)


def test_a_warmed_call_allocates_copies_and_compiles_nothing(rt: nx.CudaRuntime) -> None:
    """With tiles of a device."""
    case = random_case(1, F16, batch=2, heads=4, kv_heads=2, seq_q=70, seq_k=90, head_dim=64)
    test_attention.test_a_warmed_call_allocates_copies_and_compiles_nothing(rt, case)
