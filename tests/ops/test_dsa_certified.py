"""The certified variant of DsaIndexSelect on the host driver: when it serves, what it launches, and its bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.driver.host import HostDriver
from nxrt_cuda.dtype import DataType, bfloat16, data_type, float16, float32
from nxrt_cuda.ops.dsa_certified import (
    BIAS_ERROR,
    CertifiedLayout,
    abilities,
    certified_specs,
    certify_config,
    certify_spec,
    chunk_bytes,
    chunks,
    error_scale,
    norm_weights,
    score_spec,
    uses_prepare,
)
from nxrt_cuda.ops.dsa_geometry import Dims
from nxrt_cuda.ops.dsa_index_select import DsaIndexSelectFactory, DsaRepairStats, Options
from nxrt_cuda.ops.dsa_plan import DsaVariant, choose_variant
from nxrt_cuda.reference import HOST_ENTRIES
from tests.dsa_cases import DTYPES, DsaCase, DsaOperands, random_case
from tests.dsa_certified_cases import wide_closed_form_cases
from tests.small_kernels import open_on

HALF_DTYPES = DTYPES[1:]
SMALL = {"heads": 32, "head_dim": 64}
PREFILL = {**SMALL, "q_seq": 4 * 132 + 3, "key_seq": 21}
"""Rows enough for the bias to be looked through first, on the host driver's 132 multiprocessors."""


SERVED = {(9, 0): DsaVariant.CERTIFIED, (8, 0): DsaVariant.CERTIFIED_MMA}
"""The variant on each device that tests pretend to have."""

DECODED = {**SERVED, (9, 0): DsaVariant.CERTIFIED_DECODE}
"""The same of short decode steps of 16-bit elements."""


@pytest.fixture(params=SERVED, ids=lambda capability: "{}.{}".format(*capability))
def rt(request: pytest.FixtureRequest) -> Iterator[nx.CudaRuntime]:
    """A runtime on the host driver as a Hopper, and as an older device."""
    major, minor = request.param
    changes = {"COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": minor}
    with open_on(HostDriver(HOST_ENTRIES, attributes=changes)) as runtime:
        yield runtime


def served(rt: nx.CudaRuntime) -> DsaVariant:
    """The certified variant of the runtime's device."""
    return SERVED[rt.capabilities.compute_capability]


def decoded(rt: nx.CudaRuntime) -> DsaVariant:
    """That of decode steps."""
    return DECODED[rt.capabilities.compute_capability]


def execute(rt: nx.CudaRuntime, case: DsaCase, options: Options | None = None):
    """The kernel object that ran ``case``, after a look at what it selected."""
    kernel, operands = DsaIndexSelectFactory(rt, options or Options()).create(case.node, ()), DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    np.testing.assert_array_equal(operands.selected(), case.expected, err_msg=case.name)
    return kernel


# The choice.


REPAIRED = "repaired where their error leaves a rank open"


@pytest.mark.parametrize(
    ("change", "variant", "reason"),
    [
        ({"heads": 16}, "strict", "16 heads; tensor-core scores take 32 or 64"),
        ({"head_dim": 96}, "strict", "head size 96; tensor-core scores take 64 or 128"),
        ({"key_seq": 131073}, "strict", "131073 keys; rows of 1 to 131072 are certified"),
        ({"key_seq": 0}, "strict", "0 keys; rows of 1 to 131072 are certified"),
        ({"q_seq": 0}, "strict", "there are no rows"),
        ({"top_k": 2**31}, "strict", "top_k 2147483648 does not fit 31 bits"),
        (
            {"capability": (7, 5)},
            *("strict", "compute capability 7.5 is below 8.0, which has no tensor cores for all dtypes"),
        ),
        ({"aligned": False}, "strict", "query or key does not begin at a multiple of 16 bytes"),
        ({"aligned": False, "capability": (8, 0)}, "strict", "query or key does not begin at a multiple of 16 bytes"),
        ({}, "certified", f"tensor-core scores, {REPAIRED}"),
        ({"dtype": float32}, "certified", f"tensor-core scores, {REPAIRED}"),
        (
            {"heads": 32, "head_dim": 64, "dtype": float16, "key_seq": 131072},
            *("certified", f"tensor-core scores, {REPAIRED}"),
        ),
        *(
            (
                {"capability": (major, minor), "dtype": dtype, "key_seq": 131072},
                "certified_mma",
                f"tensor-core scores through mma.sync on compute capability {major}.{minor}, {REPAIRED}",
            )
            for major, minor in ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0))
            for dtype in (float32, float16, bfloat16)
        ),
    ],
)
def test_the_reason_names_the_limit(change: dict, variant: str, reason: str) -> None:
    """The choice is one function of dtype, extents, device and alignment."""
    call = {"dtype": bfloat16, "q_seq": 2, "heads": 64, "head_dim": 128, "key_seq": 500, "top_k": 9} | change
    dims = Dims(1, call["q_seq"], call["heads"], call["head_dim"], call["key_seq"])
    capability, aligned = call.get("capability", (9, 0)), call.get("aligned", True)
    assert choose_variant(call["dtype"], dims, call["top_k"], capability, aligned=aligned) == (variant, reason)


def test_the_kernel_says_which_variant_served_and_why(rt: nx.CudaRuntime) -> None:
    """Per execution; before the first there is none."""
    case = random_case(1, HALF_DTYPES[0], **SMALL, key_seq=40, top_k=7)
    kernel = nx.create_kernel(rt, case.node)
    assert kernel.choice is None
    operands = DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    assert kernel.choice.variant is decoded(rt)
    shifted = DsaOperands(rt, case, aligned=False)
    kernel.execute(shifted.inputs, [shifted.output])
    assert kernel.choice == (DsaVariant.STRICT, "query or key does not begin at a multiple of 16 bytes")
    np.testing.assert_array_equal(shifted.selected(), operands.selected())


def test_the_environment_or_the_factory_s_options_name_the_mode(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certified variant where it applies, unless asked otherwise; an unknown mode is refused."""
    case = random_case(1, HALF_DTYPES[0], **SMALL, key_seq=40, top_k=7)
    assert execute(rt, case, Options(mode="strict")).choice == (DsaVariant.STRICT, "asked for")
    for mode, variant in ((None, decoded(rt)), ("strict", DsaVariant.STRICT), ("auto", decoded(rt))):
        if mode is not None:
            monkeypatch.setenv("NXRT_CUDA_DSA", mode)
        kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
        kernel.execute(operands.inputs, [operands.output])
        assert kernel.choice.variant is variant
    monkeypatch.setenv("NXRT_CUDA_DSA", "fast")
    with pytest.raises(nx.KernelError, match="NXRT_CUDA_DSA must be auto or strict, got 'fast'"):
        nx.create_kernel(rt, case.node)
    with pytest.raises(nx.KernelError, match="mode must be 'auto' or 'strict', got 'fast'"):
        Options(mode="fast")
    with pytest.raises(nx.KernelError, match="workspace_bytes must be > 0, got 0"):
        Options(workspace_bytes=0)


# What is launched.


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_closed_forms(rt: nx.CudaRuntime, dtype: np.dtype) -> None:
    """Ties, lengths, masks, NaN and order of operations, through three launches or two."""
    for case in wide_closed_form_cases(dtype, 3000):
        execute(rt, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("mask", ["none", "random", "causal", "soft"])
def test_prefill_rows_equal_the_oracle(rt: nx.CudaRuntime, dtype: np.dtype, mask: str) -> None:
    """Three launches hand each other masks, accounts, tiles, scores and norms; an incomplete tile of rows."""
    kernel = execute(rt, random_case(3, dtype, **PREFILL, top_k=6, mask=mask))
    assert kernel.choice.variant is served(rt)
    assert (kernel.launch_stats().score_launches, kernel.launch_stats().selection_launches) == (1, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("values", ["normal", "integers", "wide", "special"])
@pytest.mark.parametrize("key_seq", [1, 33, 256, 257, 700])
def test_few_rows_equal_the_oracle(rt: nx.CudaRuntime, dtype: np.dtype, values: str, key_seq: int) -> None:
    """Without a look at the bias first: several batches, all head sizes."""
    for heads, head_dim, top_k in ((32, 64, 5), (64, 128, key_seq), (64, 64, max(1, key_seq - 1))):
        shape = {"batch": 2, "q_seq": 3, "heads": heads, "head_dim": head_dim, "key_seq": key_seq}
        execute(rt, random_case(key_seq, dtype, **shape, top_k=top_k, values=values))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("heads", [32, 64])
def test_decode_steps_of_many_batches_equal_the_oracle(rt: nx.CudaRuntime, dtype: np.dtype, heads: int) -> None:
    """Rows enough for a look at the bias first, in tiles of one row."""
    shape = {"batch": 133, "q_seq": 1, "heads": heads, "head_dim": 64, "key_seq": 300}
    execute(rt, random_case(7, dtype, **shape, top_k=5, mask="random"))


def test_rows_that_select_every_allowed_key_are_not_scored(rt: nx.CudaRuntime) -> None:
    """Where top_k reaches the number of keys there is no score launch."""
    kernel = execute(rt, random_case(4, HALF_DTYPES[0], **SMALL, key_seq=30, top_k=30))
    assert (kernel.launch_stats().score_launches, kernel.launch_stats().selection_launches) == (0, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize(("batch", "q_seq", "row_limit"), [(1, 11, 4), (5, 3, 7), (3, 9, 1), (2, 4, 100)])
def test_chunks_of_rows_give_the_same_result(
    rt: nx.CudaRuntime, dtype: np.dtype, batch: int, q_seq: int, row_limit: int
) -> None:
    """Parts of a batch, several batches, single tiles of rows: whatever the workspace allows."""
    case = random_case(5, dtype, **SMALL, batch=batch, q_seq=q_seq, key_seq=90, top_k=8, mask="random")
    dims, element = Dims(batch, q_seq, 32, 64, 90), data_type(dtype)
    limit = chunk_bytes(dims, element, -(-row_limit // q_seq), row_limit)
    kernel = execute(rt, case, Options(workspace_bytes=limit))
    expected = len(list(chunks(dims, element, limit)))
    assert kernel.launch_stats().score_launches == expected
    assert (expected > 1) == (row_limit < batch * q_seq)


@pytest.mark.parametrize("limit", [1, 2, 7, 1000])
def test_any_grid_gives_the_same_result(rt: nx.CudaRuntime, limit: int) -> None:
    """A bounded grid does the same work in strides, in whole clusters."""
    case = random_case(6, HALF_DTYPES[0], **PREFILL, top_k=6)
    kernel = DsaIndexSelectFactory(rt, Options()).create_kernel_with_grid_limit(case.node, limit)
    operands = DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    np.testing.assert_array_equal(operands.selected(), case.expected)
    assert kernel.launch_stats().last_score_grid_x == min(limit, 132)
    assert kernel.launch_stats().last_selection_grid_x == min(limit, PREFILL["q_seq"])


def test_replays_follow_changed_contents(rt: nx.CudaRuntime) -> None:
    """Inputs rewritten in place, at fixed addresses, with nothing allocated: masks that widen and narrow included."""
    shape = {**PREFILL, "top_k": 6}
    first, *later = (
        random_case(seed, HALF_DTYPES[1], **shape, mask=mask)
        for seed, mask in ((1, "random"), (2, "none"), (3, "causal"), (4, "random"))
    )
    later = [replace(case, scale=first.scale, weights_scale=first.weights_scale) for case in later]
    kernel, operands = nx.create_kernel(rt, first.node), DsaOperands(rt, first)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture([kernel]) as graph:
        kernel.execute(operands.inputs, [operands.output])
    workspace = kernel.workspace_stats()
    for case in later:
        operands.rewrite(case)
        operands.clear()
        graph.replay()
        np.testing.assert_array_equal(operands.selected(), case.oracle())
    assert kernel.workspace_stats() == workspace


def test_a_graph_can_be_given_other_operands(rt: nx.CudaRuntime) -> None:
    """Tensor maps follow, in every chunk of rows."""
    first, second = (random_case(seed, HALF_DTYPES[1], **SMALL, q_seq=11, key_seq=90, top_k=8) for seed in (1, 2))
    second = replace(second, scale=first.scale, weights_scale=first.weights_scale)
    kernel = DsaIndexSelectFactory(rt, Options(workspace_bytes=2000)).create(first.node, ())
    operands, others = DsaOperands(rt, first), DsaOperands(rt, second)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture([kernel]) as graph:
        kernel.execute(operands.inputs, [operands.output])
    old, new = (*operands.inputs, operands.output), (*others.inputs, others.output)
    graph.rebind(dict(zip(old, new, strict=True)))
    graph.replay()
    np.testing.assert_array_equal(others.selected(), second.oracle())


def test_repairs_are_counted_on_the_device(rt: nx.CudaRuntime) -> None:
    """The host driver's scores need none; a kernel that was never certified has no counters."""
    case = random_case(1, HALF_DTYPES[0], **SMALL, key_seq=40, top_k=7)
    assert execute(rt, case).repair_stats() == DsaRepairStats(0, 0)
    assert execute(rt, case, Options(mode="strict")).repair_stats() == DsaRepairStats()
    assert str(DsaRepairStats(1, 2)).splitlines()[0] == "DsaIndexSelect repairs"


# The workspace.


@pytest.mark.parametrize("dtype", [bfloat16, float32], ids=str)
@pytest.mark.parametrize("limit", [1, 5000, 100_000, 1 << 28])
@pytest.mark.parametrize("dims", [Dims(1, 1, 64, 128, 7), Dims(3, 33, 32, 64, 700), Dims(7, 2, 64, 64, 131072)])
def test_chunks_cover_all_rows_once_and_stay_below_the_limit(dims: Dims, limit: int, dtype: DataType) -> None:
    """In order; a chunk is above the limit only if it is one tile of rows."""
    parts = list(chunks(dims, dtype, limit))
    rows = [part.first_row + row for part in parts for row in range(part.rows)]
    assert rows == list(range(dims.rows))
    tile_rows = 128 // dims.heads
    for part in parts:
        assert part.first_row == part.first_batch * dims.q_seq + part.first_row % dims.q_seq
        assert part.batch == 1 or part.q_seq == dims.q_seq
        assert chunk_bytes(dims, dtype, part.batch, part.rows) <= limit or part.rows <= tile_rows
    layout = CertifiedLayout.of(dims, dtype, limit)
    offsets = [
        *(layout.scores_offset, layout.allowed_offset, layout.rows_offset, layout.tiles_offset),
        *(layout.key_words_offset, layout.bounds_offset),
        *([layout.query_parts_offset, layout.key_parts_offset] if dtype == float32 else []),
        layout.nbytes,
    ]
    assert sorted(set(offsets)) == offsets


@pytest.mark.parametrize(
    ("key_seq", "rows", "capability", "cluster", "threads"),
    [
        (8192, 512, (9, 0), 1, 256),
        (8193, 512, (9, 0), 2, 256),
        (32768, 1024, (9, 0), 4, 256),
        (65536, 500, (9, 0), 8, 256),
        (131072, 1, (9, 0), 8, 512),
        (32768, 32, (9, 0), 8, 256),
        (500, 1, (9, 0), 1, 256),
        (4096, 1, (9, 0), 4, 256),
        (131072, 1, (10, 0), 8, 512),
        (65536, 1, (12, 0), 8, 256),
    ],
)
def test_a_row_is_spread_over_blocks_that_hold_it(
    key_seq: int, rows: int, capability: tuple[int, int], cluster: int, threads: int
) -> None:
    """Long rows because they must be, few rows because they may."""
    able = abilities(capability)
    spec = certify_spec(bfloat16, Dims(1, rows, 64, 128, key_seq), rows, 132, able)
    assert (dict(spec.macros)["CLUSTER"], spec.threads, spec.arch) == (str(cluster), threads, able.arch)


@pytest.mark.parametrize(
    ("key_seq", "capability", "threads", "thread_words"),
    [
        (4096, (8, 0), 256, 1),
        (8192, (8, 6), 256, 1),
        (8193, (8, 9), 512, 8),
        (131072, (8, 0), 512, 8),
        (65537, (12, 0), 512, 8),
        (131072, (12, 0), 512, 8),
    ],
)
def test_one_block_takes_a_row_where_none_can_share_it(
    key_seq: int, capability: tuple[int, int], threads: int, thread_words: int
) -> None:
    """Before clusters, and where eight small blocks do not hold the row; for any architecture."""
    dims = Dims(1, 1, 64, 128, key_seq)
    spec = certify_spec(bfloat16, dims, 1, 132, abilities(capability))
    assert (spec.source, spec.arch) == ("dsa_index_select_certify_block.cu", None)
    assert (spec.threads, dict(spec.macros)["THREAD_WORDS"]) == (threads, str(thread_words))
    assert threads * thread_words * 32 >= key_seq
    config, shares = certify_config(spec, dims, 100, 1 << 20)
    assert (config.grid, shares) == ((100, 1, 1), ())


@pytest.mark.parametrize(
    ("capability", "limit"),
    [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((10, 0), 227), ((12, 0), 99)],
)
def test_a_block_fits_the_shared_memory_of_its_device(capability: tuple[int, int], limit: int) -> None:
    """The kernels for all devices fit the smallest of them; KiB as in the CUDA programming guide."""
    able = abilities(capability)
    for spec in certified_specs(able):
        macros = dict(spec.macros)
        nbytes = int(macros.get("SHARED_BYTES", 0))
        if "certify" in spec.entry:
            keys = 32 * spec.threads * int(macros.get("CLUSTER", 1)) * int(macros.get("THREAD_WORDS", 1))
            config, _ = certify_config(spec, Dims(1, 1, 64, 128, keys), 1, 1 << 20)
            nbytes = config.shared_bytes
        assert nbytes <= limit << 10, spec.label


@pytest.mark.parametrize("dtype", [float16, bfloat16, float32], ids=str)
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_whatever_a_call_launches_can_be_compiled_ahead(capability: tuple[int, int], dtype: DataType) -> None:
    """The list for a device has the kernels of every row length, few rows and many."""
    able = abilities(capability)
    listed = certified_specs(able)
    for heads, head_dim in HEADS_AND_SIZES:
        for key_seq in (1, 4096, 8193, 40000, 65536, 131072):
            for rows in (1, 50, 4096):
                dims = Dims(1, rows, heads, head_dim, key_seq)
                assert score_spec(dtype, dims, able) in listed
                assert certify_spec(dtype, dims, rows, 132, able) in listed


def test_the_bias_is_looked_through_first_where_rows_fill_the_device() -> None:
    """One block takes a tile of rows."""
    dims = Dims(1, 264, 64, 128, 500)
    (chunk,) = chunks(dims, bfloat16, 1 << 28)
    assert uses_prepare(dims, chunk, 132)
    assert not uses_prepare(dims, replace(chunk, q_seq=262), 132)


# The bound.


def tensor_core_dot(query: np.ndarray, key: np.ndarray, products: int = 16, fraction_bits: int = 25) -> float:
    """A dot as public models have tensor cores compute it: Hopper's and later ones, if not told otherwise.

    So many products and the accumulator are aligned to the greatest exponent, cut after so many fraction bits, added
    exactly and cut to f32.
    """
    total = Fraction(0)
    for begin in range(0, len(query), products):
        pairs = zip(query[begin : begin + products], key[begin : begin + products], strict=True)
        terms = [total, *(Fraction(float(q)) * Fraction(float(k)) for q, k in pairs)]
        greatest = max(map(abs, terms))
        if greatest == 0:
            continue
        step = Fraction(2) ** (_exponent(greatest) - fraction_bits)
        total = sum((_cut(term, step) for term in terms), Fraction(0))
        if total != 0:
            total = _cut(total, Fraction(2) ** (_exponent(abs(total)) - 23))
    return float(total)


def _exponent(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def _cut(value: Fraction, step: Fraction) -> Fraction:
    """Towards zero, to a multiple of ``step``."""
    steps = abs(value) // step
    return (1 if value >= 0 else -1) * steps * step


def strict_dot(query: np.ndarray, key: np.ndarray) -> float:
    """In ascending order, each operation rounded to f32."""
    total = np.float32(0)
    for q, k in zip(query.astype(np.float32), key.astype(np.float32), strict=True):
        total += q * k
    return float(total)


def families(rng: np.random.Generator, depth: int, fraction_bits: int):
    """Vectors that the roundings of a dot dislike: one large product, then ones just under the step of the cut."""
    ones = np.ones(depth)
    large_first = np.full(depth, 2.0**-fraction_bits * 1.984375)
    large_first[0] = 1
    yield ones, large_first
    yield np.where(np.arange(depth) == 0, 255 / 128, 2.0**-12 * 255 / 128), np.where(ones == 1, 2.0**-12 * 1.9921875, 0)
    for _ in range(30):
        yield rng.standard_normal(depth), rng.standard_normal(depth)
        yield np.abs(rng.standard_normal(depth)), np.abs(rng.standard_normal(depth))
        yield (
            np.ldexp(1.0, -rng.integers(0, 13, depth)),
            np.ldexp(rng.uniform(1, 2, depth), -rng.integers(0, 13, depth)),
        )


@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize(
    ("capability", "products", "fraction_bits"), [((8, 0), 8, 24), ((9, 0), 16, 25), ((10, 0), 16, 25)]
)
def test_the_bound_on_a_dot_holds_and_is_needed(
    depth: int, capability: tuple[int, int], products: int, fraction_bits: int
) -> None:
    """Strict and modelled dots lie within their shares of the units; a tenth of them would not do."""
    strict_units, tensor_units = depth - 1, abilities(capability).step_error * depth / 16
    worst = 0.0
    for pair in families(np.random.default_rng(depth), depth, fraction_bits):
        query, key = (vector.astype(ml_dtypes.bfloat16) for vector in pair)
        terms = [Fraction(float(q)) * Fraction(float(k)) for q, k in zip(query, key, strict=True)]
        exact, unit = sum(terms), float(sum(map(abs, terms))) * 2.0**-24
        strict_error = abs(float(Fraction(strict_dot(query, key)) - exact))
        tensor_error = abs(float(Fraction(tensor_core_dot(query, key, products, fraction_bits)) - exact))
        assert strict_error <= strict_units * unit
        assert tensor_error <= tensor_units * unit
        worst = max(worst, tensor_error / unit)
    assert worst > tensor_units / 10


def test_a_device_without_a_model_is_taken_for_the_coarsest() -> None:
    """Its step may lose what one of any other may."""
    assert abilities((11, 0)).step_error == max(abilities((major, 0)).step_error for major in (8, 9, 10, 12))


HEADS_AND_SIZES = [(32, 64), (32, 128), (64, 64), (64, 128)]


@pytest.mark.parametrize("dtype", [float16, bfloat16, float32], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), HEADS_AND_SIZES)
@pytest.mark.parametrize("step_error", [10.5, 22.0])
def test_the_weight_of_an_element_covers_every_rounding_of_its_product(
    dtype: DataType, heads: int, head_dim: int, step_error: float
) -> None:
    """The sums of docs/dsa_exactness.md, a tenth in hand, and little more."""
    weights = norm_weights(dtype, heads, head_dim, step_error)
    split = 128 if dtype == float32 else 0
    for d in range(head_dim):
        strict = (head_dim - max(d, 1)) + 1 + 1 + (heads - 1)
        tensor_cores = step_error * (head_dim / 16 - d // 16)
        head_sum = 1 + heads / 4 + 2
        split_only = 1 + 2 * 2 * 2**-8 * step_error * head_dim / 16 if split else 0
        needed = 1.1 * (strict + tensor_cores + head_sum + split_only) + split
        assert needed <= weights.of(d, head_dim) < needed + 3
    assert weights.low == (3 * 2**24 if split else 0)


@pytest.mark.parametrize("scale", [0.1, 1.0, 2.0**-126, 1e30])
def test_the_scale_of_the_error_is_rounded_up(scale: float) -> None:
    """To an f32 above a unit times the f32 nearest to the scale."""
    assert np.float32(2.0**-24) * np.float32(scale) <= error_scale(scale)
    assert error_scale(scale) == np.float32(error_scale(scale))


@pytest.mark.parametrize(("dtype", "least"), [(float16, np.finfo(np.float16).smallest_normal), (bfloat16, 2.0**-62)])
def test_the_floor_of_norms_covers_elements_below_the_normal_range(dtype: DataType, least: float) -> None:
    """Each element counts at least as the least normal f16, or as one whose square is still an f32."""
    weights = norm_weights(dtype, 64, 128, 10.5)
    assert weights.floor >= np.sqrt(sum(weights.of(d, 128) for d in range(128))) * float(least)


def split(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As the split kernel does it, widened to f64."""
    high = values.astype(ml_dtypes.bfloat16)
    low = (values - high.astype(np.float32)).astype(ml_dtypes.bfloat16)
    return high.astype(np.float64), low.astype(np.float64)


def test_three_products_of_parts_leave_no_more_than_the_norms_allow() -> None:
    """f32 vectors of all magnitudes, and ones whose lower parts are as large as they come."""
    rng = np.random.default_rng(5)
    weights = norm_weights(float32, 64, 128, 10.5)
    worst = 0.0
    for trial in range(300):
        query, key = rng.standard_normal((2, 128)) * np.exp2(rng.integers(-30, 30, (2, 1)) * (trial % 3))
        if trial % 3 == 1:
            query = key = np.full(128, 1 + 2.0**-8 - 2.0**-17 - 2.0**-23)
        query, key = query.astype(np.float32), key.astype(np.float32)
        (q_high, q_low), (k_high, k_low) = split(query), split(key)
        query, key = query.astype(np.float64), key.astype(np.float64)
        error = abs(query @ key - (q_high @ k_high + q_high @ k_low + q_low @ k_high))
        # The weights of splitting alone: those of roundings are left out.
        norms = [np.sqrt(128 * x @ x + weights.low * (low @ low)) for x, low in ((query, q_low), (key, k_low))]
        worst = max(worst, error / (2.0**-24 * norms[0] * norms[1]))
    assert 0.5 < worst <= 1


# Adding the bias.


def fl(value: Fraction) -> Fraction:
    """Rounded to f32, to nearest even, for values of ordinary size."""
    if value == 0:
        return value
    step = Fraction(2) ** (_exponent(abs(value)) - 23)
    return round(value / step) * step


def outward(value: Fraction, up: bool) -> Fraction:
    """The f32 at or beyond ``value``."""
    step = Fraction(2) ** (_exponent(abs(value)) - 23) if value else Fraction(1)
    steps = value / step
    return (-(-steps.numerator // steps.denominator) if up else steps.numerator // steps.denominator) * step


def is_covered(near: Fraction, far: Fraction, error: Fraction, share: Fraction) -> bool:
    """Whether the range around f = fl(near) contains s = fl(far), with ``share`` of |f| added to the error."""
    f, s = fl(near), fl(far)
    whole = error + share * abs(f)
    return outward(f - whole, up=False) <= s <= outward(f + whole, up=True)


def test_the_error_of_adding_a_bias_is_needed_and_is_enough() -> None:
    """Where f and s are in binades of different steps directed rounding alone does not cover what rounding moved."""
    ulp = Fraction(2) ** -23
    # From -1 - ulp on the steps are twice as wide as above -1. x rounds away to there, by almost half a step.
    near = -(1 + ulp) + ulp / 2 * Fraction(999, 1000)
    error = 2 * ulp
    far = near + error * Fraction(9999, 10000)
    assert not is_covered(near, far, error, Fraction(0))
    assert is_covered(near, far, error, Fraction(BIAS_ERROR))
    rng = np.random.default_rng(3)
    for _ in range(3000):
        near = Fraction(float(rng.choice([-1, 1]) * rng.uniform(0.5, 4))) + ulp * Fraction(float(rng.uniform(-2, 2)))
        error = ulp * Fraction(float(np.exp2(rng.uniform(-4, 4))))
        far = near + error * Fraction(float(rng.uniform(-1, 1)))
        assert is_covered(near, far, error, Fraction(BIAS_ERROR))


# The selection's bins and thresholds, as kernels/dsa_index_select_certify.cu computes them.


BINS = 4096


def bin_of(x: Fraction, low: Fraction, per_unit: Fraction) -> int:
    """The number of the bin that ``x`` falls into."""
    place = fl(fl(x - low) * per_unit + 2**23 + 1)
    return int(min(max(place - 2**23, 0), BINS - 1))


def edges(number: int, low: Fraction, per_unit: Fraction) -> tuple[Fraction, Fraction]:
    """What ``Bins::edges`` says of a bin that is not open."""
    least = Fraction(2) ** -149
    below = outward(outward((number - Fraction(3, 2)) / per_unit, up=False) - least, up=False)
    above = outward(outward((number - Fraction(1, 2)) / per_unit, up=True) + least, up=True)
    return outward(low + below, up=False), outward(low + above, up=True)


def test_whatever_falls_into_a_bin_lies_within_its_edges() -> None:
    """Bins wider than a step of f32, and narrower ones; the edges are no more than a few steps beyond a bin."""
    rng = np.random.default_rng(4)
    for _ in range(1500):
        low = Fraction(float(np.float32(rng.normal() * np.exp2(rng.integers(-6, 6)))))
        span = fl(Fraction(float(abs(rng.normal()) + 0.01)) * Fraction(2) ** int(rng.integers(-22, 3)))
        per_unit = fl(Fraction(BINS - 3) / span)
        x = fl(low + span * Fraction(float(rng.uniform(-0.01, 1.01))))
        number = bin_of(x, low, per_unit)
        if 0 < number < BINS - 1:
            lower, upper = edges(number, low, per_unit)
            assert lower <= x <= upper
            step = Fraction(2) ** -22 * (abs(low) + span)
            assert upper - lower <= 1 / per_unit + 2 * step


def beyond(lower: Fraction, upper: Fraction, error: Fraction, share: Fraction) -> tuple[Fraction, Fraction]:
    """What ``beyond`` says of strict scores: with an f below the first a key is below them, above the second above."""
    more = outward(share * (1 + Fraction(2) ** -20), up=True)

    def end(score: Fraction, up: bool) -> Fraction:
        sign = 1 if up else -1
        far = outward(score + sign * error, up)
        return outward(far + sign * outward(more * abs(far), up=True), up)

    return end(lower, up=False), end(upper, up=True)


def thresholds(lower: Fraction, upper: Fraction, error: Fraction, share: Fraction) -> tuple[Fraction, Fraction]:
    """What ``thresholds`` says of edges: below the first f a key is out, above the second one in."""
    least = outward(lower - outward(share * abs(lower) + error, up=True), up=False)
    most = outward(upper + outward(share * abs(upper) + error, up=True), up=True)
    return beyond(least, most, error, share)


def intervals_and_errors(seed: int) -> Iterator[tuple[Fraction, Fraction, Fraction]]:
    """Lower and upper ends of many magnitudes, and an error, all of them values of f32."""
    rng = np.random.default_rng(seed)
    for _ in range(2000):
        lower = Fraction(float(np.float32(rng.normal() * np.exp2(rng.integers(-10, 10)))))
        upper = fl(lower + Fraction(float(rng.uniform(0, 1))) * Fraction(2) ** int(rng.integers(-20, 2)))
        error = fl(Fraction(float(rng.uniform(0.1, 1))) * Fraction(2) ** int(rng.integers(-24, 2)))
        yield lower, upper, error


@pytest.mark.parametrize("share", [0.0, BIAS_ERROR])
def test_thresholds_decide_what_every_error_up_to_the_greatest_decides(share: float) -> None:
    """A key beyond them lies beyond every score that a key within the edges may have; and they are not far out."""
    part = Fraction(share)
    for lower, upper, error in intervals_and_errors(6):
        out, into = thresholds(lower, upper, error, part)
        assert into - part * abs(into) - error >= upper + part * abs(upper) + error
        assert out + part * abs(out) + error <= lower - part * abs(lower) - error
        step = Fraction(2) ** -21 * (max(abs(lower), abs(upper)) + 2 * error)
        assert into <= upper + 2 * error + 4 * step
        assert out >= lower - 2 * error - 4 * step


@pytest.mark.parametrize("share", [0.0, BIAS_ERROR])
def test_beyond_holds_for_every_error_up_to_the_greatest(share: float) -> None:
    """The lowest strict score of a key above, and the highest of one below; and they are not far out."""
    part = Fraction(share)
    for lower, upper, error in intervals_and_errors(7):
        below, above = beyond(lower, upper, error, part)
        assert above - part * abs(above) - error >= upper
        assert below + part * abs(below) + error <= lower
        step = Fraction(2) ** -22 * (max(abs(lower), abs(upper)) + error)
        assert above <= upper + error + 4 * step
        assert below >= lower - error - 4 * step


def test_a_guess_that_passes_its_check_is_the_selection() -> None:
    """Scores within their bounds of f, on a grid so that many tie; errors that all go one way, too, and are great."""
    rng = np.random.default_rng(8)
    passed = failed = wrong = 0
    for _ in range(3000):
        error = int(rng.integers(1, 40))
        f = rng.integers(-100, 100, 60)
        spread = int(rng.integers(0, error + 1))
        shift = int(rng.integers(-(error - spread), error - spread + 1))
        strict = f + shift + rng.integers(-spread, spread + 1, f.size)
        k = int(rng.integers(1, f.size))
        last_f = int(np.sort(f)[-k])
        edges = last_f - int(rng.integers(0, 3)), last_f + int(rng.integers(0, 3))
        expected = edges[0] - error // 8, edges[1] + error // 8
        below, above = beyond(*map(Fraction, expected), Fraction(error), Fraction(0))
        surely = [t for t in range(f.size) if f[t] > above]
        band = [t for t in range(f.size) if below <= f[t] <= above]
        wanted = k - len(surely)
        assert 1 <= wanted <= len(band)
        best = sorted(band, key=lambda t: (-strict[t], t))[:wanted]
        is_right = {*surely, *best} == set(sorted(range(f.size), key=lambda t: (-strict[t], t))[:k])
        if expected[0] <= strict[best[-1]] <= expected[1]:
            passed += 1
            assert is_right
        else:
            failed += 1
            wrong += not is_right
    assert passed > 1000
    assert failed > wrong > 0
