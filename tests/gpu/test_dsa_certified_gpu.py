"""The certified DsaIndexSelect on a GPU: it selects what the strict variant selects, and its bound is needed.

All of it twice: on the kernels chosen for the device, and on those that every device runs, as one of compute capability
8.0 would, its bound included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from benchmarks._dsa_inputs import KINDS, Inputs, draw
from nxrt_cuda.dtype import data_type
from nxrt_cuda.ops import dsa_certified
from nxrt_cuda.ops.dsa_certified import Abilities, NormWeights
from nxrt_cuda.ops.dsa_decode import choose_team
from nxrt_cuda.ops.dsa_geometry import WorkspaceLayout
from nxrt_cuda.ops.dsa_index_select import DsaIndexSelectFactory, DsaIndexSelectKernel, DsaRepairStats, Options
from nxrt_cuda.ops.dsa_plan import DsaVariant
from tests.dsa_cases import DTYPES, random_case, run
from tests.dsa_certified_cases import wide_closed_form_cases

HALF_DTYPES = DTYPES[1:]
HEADS_AND_SIZES = [(32, 64), (32, 128), (64, 64), (64, 128)]


@pytest.fixture(scope="module", params=["chosen", "portable"])
def rt(gpu: str, request: pytest.FixtureRequest) -> Iterator[nx.CudaRuntime]:
    """One runtime for all tests of this file."""
    with nx.open_runtime("cuda:0") as runtime, pytest.MonkeyPatch.context() as patch:
        if request.param == "portable":
            portable = dsa_certified.abilities((8, 0))
            patch.setattr(dsa_certified, "abilities", lambda _: portable)
        yield runtime


def able(rt: nx.CudaRuntime) -> Abilities:
    """What the kernels under test count on."""
    return dsa_certified.abilities(rt.capabilities.compute_capability)


def served(rt: nx.CudaRuntime, inputs: Inputs, top_k: int) -> DsaVariant:
    """The certified variant that takes such a call."""
    if not able(rt).has_wgmma:
        return DsaVariant.CERTIFIED_MMA
    element, blocks = data_type(inputs.query.dtype), rt.capabilities.multiprocessor_count
    team = choose_team(element, inputs.dims, top_k, able(rt), blocks, dsa_certified.WORKSPACE_BYTES)
    return DsaVariant.CERTIFIED if team is None else DsaVariant.CERTIFIED_DECODE


def select(
    rt: nx.CudaRuntime, inputs: Inputs, top_k: int, mode: str = "auto", **options: Any
) -> tuple[np.ndarray, DsaIndexSelectKernel]:
    """What a fresh kernel object selects, and the object."""
    attributes = {"top_k": top_k, "scale": inputs.dims.head_dim**-0.5, "weights_scale": 0.7}
    node = nx.Node("DsaIndexSelect", domain="pkg.nxrt", attributes=attributes)
    kernel = DsaIndexSelectFactory(rt, Options(mode=mode, **options)).create(node, ())
    dims = inputs.dims
    operands = [rt.from_array(values) for values in inputs.arrays]
    output = rt.from_array(np.full((dims.batch, 1, dims.q_seq, top_k), -77, np.int64))
    kernel.execute(operands, [output])
    return output.numpy(), kernel


def wrong_rows(rt: nx.CudaRuntime, inputs: Inputs, top_k: int, **options: Any) -> int:
    """How many rows the certified variant selects otherwise than the strict one."""
    selected, kernel = select(rt, inputs, top_k, **options)
    assert kernel.choice is not None
    assert kernel.choice.variant is served(rt, inputs, top_k)
    expected, _ = select(rt, inputs, top_k, "strict")
    return int((selected != expected).any(-1).sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_closed_forms(rt: nx.CudaRuntime, dtype: np.dtype) -> None:
    """Ties, lengths, masks, NaN and order of operations, in the narrower type."""
    for case in wide_closed_form_cases(dtype, 131072):
        np.testing.assert_array_equal(run(rt, case), case.expected, err_msg=case.name)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize(("heads", "head_dim"), HEADS_AND_SIZES)
def test_small_shapes_equal_the_oracle(rt: nx.CudaRuntime, dtype: np.dtype, heads: int, head_dim: int) -> None:
    """NumPy's own answers, for every value of every kind."""
    for values in ("normal", "integers", "wide", "special"):
        for batch, q_seq, key_seq, top_k in ((2, 3, 300, 40), (1, 9, 33, 5), (1, 1, 1000, 100)):
            shape = {"batch": batch, "q_seq": q_seq, "heads": heads, "head_dim": head_dim, "key_seq": key_seq}
            case = random_case(key_seq, dtype, **shape, top_k=top_k, values=values, mask="soft")
            np.testing.assert_array_equal(run(rt, case), case.expected, err_msg=case.name)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_rows_of_every_kind(rt: nx.CudaRuntime, dtype: np.dtype, kind: str) -> None:
    """Ties, scores that are all the same, magnitudes beyond the bound's, NaN and infinities."""
    for heads, head_dim in ((32, 64), (64, 128)):
        inputs = draw(dtype, 1, 601, heads, head_dim, 2500, kind)
        for top_k in (1, 1250):
            assert wrong_rows(rt, inputs, top_k) == 0, (heads, head_dim, top_k)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("mask", ["none", "normal", "fill", "large", "sparse"])
def test_every_kind_of_bias(rt: nx.CudaRuntime, dtype: np.dtype, mask: str) -> None:
    """Finite fills are allowed keys, and large biases round the scores away."""
    for q_seq in (2, 333):
        assert wrong_rows(rt, draw(dtype, 2, q_seq, 64, 128, 3001, "normal", mask), 512) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize(
    ("batch", "q_seq", "key_seq"),
    [
        (1, 300, 8192),
        (1, 40, 8193),
        (1, 290, 20001),
        (1, 3, 40000),
        (2, 1, 70001),
        (1, 1, 131072),
        (32, 1, 9000),
        (140, 1, 5001),
    ],
)
def test_long_rows(rt: nx.CudaRuntime, dtype: np.dtype, batch: int, q_seq: int, key_seq: int) -> None:
    """Rows spread over one to eight blocks, or all of one; prefill and decode."""
    assert wrong_rows(rt, draw(dtype, batch, q_seq, 64, 128, key_seq), 2048) == 0
    assert wrong_rows(rt, draw(dtype, batch, q_seq, 32, 64, key_seq, "near ties"), 2048) == 0


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("kind", KINDS)
def test_decode_steps_of_every_kind(rt: nx.CudaRuntime, dtype: np.dtype, kind: str) -> None:
    """Rows of one block, of several, and of the whole device; wide bands, crowded bins, and numbers without a bound."""
    shapes = ((1, 64, 128, 20000), (3, 32, 64, 4099), (66, 64, 64, 700), (1, 32, 128, 300))
    for mask, (batch, heads, head_dim, key_seq) in zip(("normal", "none", "sparse", "large"), shapes, strict=True):
        inputs = draw(dtype, batch, 1, heads, head_dim, key_seq, kind, mask)
        for top_k in (1, key_seq // 2, key_seq - 1):
            assert wrong_rows(rt, inputs, top_k) == 0, (batch, heads, head_dim, key_seq, top_k)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("batch", [1, 2, 5, 16, 33, 64, 128])
def test_decode_steps_of_many_batches(rt: nx.CudaRuntime, dtype: np.dtype, batch: int) -> None:
    """As many keys as the blocks of a row hold, and one more."""
    limit = rt.capabilities.multiprocessor_count // batch * 1024
    for key_seq in (limit, limit + 1):
        if key_seq <= 131072:
            assert wrong_rows(rt, draw(dtype, batch, 1, 64, 128, key_seq, "normal", "causal"), 500) == 0


def test_decode_steps_one_after_the_other(rt: nx.CudaRuntime) -> None:
    """200 launches without a look in between: each finds what the one before has left.

    Their rows are divided in three ways, and selected in every way: short and long bands, and fewer keys than wanted.
    """
    attributes = {"top_k": 700, "scale": 128**-0.5, "weights_scale": 0.7}
    kernel = nx.create_kernel(rt, nx.Node("DsaIndexSelect", domain="pkg.nxrt", attributes=attributes))
    calls = []
    for batch, key_seq, kind, mask in (
        (1, 30000, "normal", "causal"),
        (7, 2500, "near ties", "normal"),
        (64, 1800, "special", "none"),
        (1, 30000, "normal", "sparse"),
        (1, 30000, "clustered", "causal"),
    ):
        inputs = draw(HALF_DTYPES[1], batch, 1, 64, 128, key_seq, kind, mask)
        operands = [rt.from_array(values) for values in inputs.arrays]
        output = rt.zeros((batch, 1, 1, 700), np.int64)
        calls.append((operands, output, select(rt, inputs, 700, "strict")[0]))
    for i in range(200):
        operands, output, _ = calls[i % len(calls)]
        kernel.execute(operands, [output])
    for _, output, expected in calls:
        np.testing.assert_array_equal(output.numpy(), expected)


def test_decode_steps_in_a_graph(rt: nx.CudaRuntime) -> None:
    """Replays of changing contents, then of other operands: the launch stays one of blocks that wait for each other."""
    kinds = ("normal", "near ties", "special", "clustered")
    inputs = [draw(HALF_DTYPES[1], 2, 1, 64, 128, 9000, kind, "normal") for kind in kinds]
    expected = [select(rt, each, 600, "strict")[0] for each in inputs]
    attributes = {"top_k": 600, "scale": 128**-0.5, "weights_scale": 0.7}
    kernel = nx.create_kernel(rt, nx.Node("DsaIndexSelect", domain="pkg.nxrt", attributes=attributes))
    operands = [rt.from_array(values) for values in inputs[0].arrays]
    output = rt.zeros(expected[0].shape, np.int64)
    kernel.execute(operands, [output])
    with rt.capture([kernel]) as graph:
        kernel.execute(operands, [output])
    assert graph.node_types == ("KERNEL",) * (1 if able(rt).has_wgmma else 2)
    for each, right in zip(inputs, expected, strict=True):
        for tensor, values in zip(operands, each.arrays, strict=True):
            tensor.copy_from(values)
        rt.fill_zero(output)
        graph.replay()
        np.testing.assert_array_equal(output.numpy(), right)
    others = [rt.from_array(values) for values in inputs[1].arrays]
    other_output = rt.zeros(expected[1].shape, np.int64)
    graph.rebind(dict(zip((*operands, output), (*others, other_output), strict=True)))
    for _ in range(3):
        rt.fill_zero(other_output)
        graph.replay()
        np.testing.assert_array_equal(other_output.numpy(), expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_chunks_of_rows(rt: nx.CudaRuntime, dtype: np.dtype) -> None:
    """A small workspace: several launches of each kernel, some of them of a few rows."""
    inputs = draw(dtype, 2, 700, 64, 128, 1500)
    assert wrong_rows(rt, inputs, 300, workspace_bytes=5 << 20) == 0


def test_reruns_are_identical_and_replays_follow(rt: nx.CudaRuntime) -> None:
    """25 runs over duplicated keys, byte for byte; then other keys in a replay."""
    first, second = (draw(HALF_DTYPES[1], 1, 600, 64, 128, 3000, kind) for kind in ("duplicated", "normal"))
    expected = [select(rt, inputs, 400, "strict")[0] for inputs in (first, second)]
    attributes = {"top_k": 400, "scale": 128**-0.5, "weights_scale": 0.7}
    kernel = nx.create_kernel(rt, nx.Node("DsaIndexSelect", domain="pkg.nxrt", attributes=attributes))
    operands = [rt.from_array(values) for values in first.arrays]
    output = rt.zeros(expected[0].shape, np.int64)
    for _ in range(25):
        rt.fill_zero(output)
        kernel.execute(operands, [output])
        np.testing.assert_array_equal(output.numpy(), expected[0])
    with rt.capture([kernel]) as graph:
        kernel.execute(operands, [output])
    assert graph.node_types == ("KERNEL", "KERNEL", "KERNEL")
    for tensor, values in zip(operands, second.arrays, strict=True):
        tensor.copy_from(values)
    graph.replay()
    np.testing.assert_array_equal(output.numpy(), expected[1])


def test_repairs_are_counted(rt: nx.CudaRuntime) -> None:
    """Some keys a row where scores are regular; whole rows where an allowed key is not."""
    inputs = draw(HALF_DTYPES[1], 1, 600, 64, 128, 3000)
    _, kernel = select(rt, inputs, 400)
    regular = kernel.repair_stats()
    assert regular.rows_scored_strictly == 0
    assert 600 <= regular.keys_scored_strictly < 100 * 600
    inputs.key[0, 100, 5] = np.nan
    _, kernel = select(rt, inputs, 400)
    assert kernel.repair_stats() == DsaRepairStats(600, sum(2401 + s for s in range(600)))


def norms(values: np.ndarray, weights: NormWeights) -> np.ndarray:
    """Along the last axis, in f64 and without the floor."""
    wide = values.astype(np.float64)
    squares = np.square(wide) @ [weights.of(d, values.shape[-1]) for d in range(values.shape[-1])]
    if weights.low:
        low = (values - values.astype(HALF_DTYPES[1]).astype(np.float32)).astype(HALF_DTYPES[1])
        squares += weights.low * np.square(low.astype(np.float64)).sum(-1)
    return np.sqrt(squares)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("kind", ["normal", "clustered", "near ties", "permuted", "outliers"])
def test_scores_lie_within_the_bound(rt: nx.CudaRuntime, dtype: np.dtype, kind: str) -> None:
    """Approximate and strict scores of the device, against the bound with each key's own norm.

    They differ, else nothing would be compared; how close to the bound they come is measured by
    benchmarks/dsa_exactness.py.
    """
    inputs = draw(dtype, 1, 600, 64, 128, 2048, kind, "none")
    dims, element = inputs.dims, data_type(dtype)
    _, kernel = select(rt, inputs, 100)
    approximate = np.empty((dims.q_seq, dims.key_seq), np.float32)
    layout = dsa_certified.CertifiedLayout.of(dims, element, dsa_certified.WORKSPACE_BYTES)
    rt.dtoh(approximate, kernel.workspace_stats().last_ptr + layout.scores_offset)
    _, strict = select(rt, inputs, 100, "strict")
    scores = np.empty_like(approximate)
    rt.dtoh(scores, strict.workspace_stats().last_ptr + WorkspaceLayout.of(dims).scores_offset)
    weights = dsa_certified.norm_weights(element, dims.heads, dims.head_dim, able(rt).step_error)
    head_weights = np.abs(inputs.weights.astype(np.float64) * 0.7)
    bound = (head_weights * norms(inputs.query, weights)).sum(-1)[0][:, None] * norms(inputs.key, weights)[0]
    bound *= dsa_certified.error_scale(dims.head_dim**-0.5)
    worst = (np.abs(approximate.astype(np.float64) - scores) / bound).max()
    assert 0 < worst <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize(("batch", "q_seq"), [(1, 600), (3, 1)])
def test_a_smaller_bound_selects_wrong_keys(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch, dtype: np.dtype, batch: int, q_seq: int
) -> None:
    """Keys that differ by roundings alone: with the bound no row is wrong, without it most are."""
    inputs = draw(dtype, batch, q_seq, 64, 128, 8192, "permuted", "none")
    assert wrong_rows(rt, inputs, 2048) == 0
    monkeypatch.setattr(dsa_certified, "norm_weights", lambda *_: NormWeights(0, 0, 0, 0, 0))
    assert wrong_rows(rt, inputs, 2048) > batch * q_seq // 2


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize(("q_seq", "key_seq"), [(300, 4096), (140, 20000)])
def test_roundings_that_all_go_one_way(rt: nx.CudaRuntime, dtype: np.dtype, q_seq: int, key_seq: int) -> None:
    """Strict scores far above the approximate ones, though within the bound; the bias alone tells keys apart.

    Products after the first are a little more than half an ulp of it: each rounds the strict dot up by an ulp.
    """
    rng = np.random.default_rng(3)
    query = np.full((1, q_seq, 64, 128), 2.0**-12, dtype)
    key = np.full((1, key_seq, 128), 1.0078125 * 2.0**-12, dtype)
    query[..., 0] = key[..., 0] = 1
    weights = np.full((1, q_seq, 64), 1 / 64, dtype)
    bias = rng.uniform(0, key_seq * 2.0**-24, (1, 1, q_seq, key_seq)).astype(np.float32)
    inputs = Inputs(query, key, weights, bias)
    assert wrong_rows(rt, inputs, 2048) == 0
    _, kernel = select(rt, inputs, 2048)
    shifted = kernel.repair_stats().keys_scored_strictly
    query[..., 1:] = 0
    assert wrong_rows(rt, inputs, 2048) == 0
    _, kernel = select(rt, inputs, 2048)
    plain = kernel.repair_stats().keys_scored_strictly
    if able(rt).has_clusters:  # the kernel that expects scores to be close
        assert shifted > 1.3 * plain
