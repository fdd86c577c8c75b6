"""Decode steps of DsaIndexSelect on Hopper, on the host driver: which calls are one launch, and what that is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.driver.host import HostDriver
from nxrt_cuda.dtype import DataType, bfloat16, data_type, float16, float32
from nxrt_cuda.ops.dsa_certified import WORKSPACE_BYTES, abilities
from nxrt_cuda.ops.dsa_decode import Team, choose_team, decode_config, decode_spec, decode_specs
from nxrt_cuda.ops.dsa_geometry import Dims
from nxrt_cuda.ops.dsa_index_select import DsaIndexSelectFactory, Options
from nxrt_cuda.ops.dsa_plan import DsaVariant
from nxrt_cuda.reference import HOST_ENTRIES
from tests.dsa_cases import DTYPES, DsaCase, DsaOperands, random_case
from tests.small_kernels import open_on

HALF_DTYPES = DTYPES[1:]
HOPPER = abilities((9, 0))
HEADS_AND_SIZES = [(32, 64), (32, 128), (64, 64), (64, 128)]


@pytest.fixture
def rt() -> Iterator[nx.CudaRuntime]:
    """A runtime on the host driver, which is a Hopper."""
    with open_on(HostDriver(HOST_ENTRIES)) as runtime:
        yield runtime


def execute(rt: nx.CudaRuntime, case: DsaCase, options: Options | None = None):
    """The kernel object that ran ``case``, after a look at what it selected."""
    kernel, operands = DsaIndexSelectFactory(rt, options or Options()).create(case.node, ()), DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    np.testing.assert_array_equal(operands.selected(), case.expected, err_msg=case.name)
    return kernel


@pytest.mark.parametrize(
    ("dims", "team"),
    [
        (Dims(1, 1, 64, 128, 131072), Team(1, 128, 1024)),
        (Dims(1, 1, 64, 128, 131071), Team(1, 128, 1024)),
        (Dims(1, 1, 32, 64, 40000), Team(1, 79, 512)),
        (Dims(1, 1, 64, 128, 2049), Team(1, 9, 256)),
        (Dims(1, 1, 64, 128, 200), Team(1, 1, 256)),
        (Dims(4, 1, 64, 64, 32768), Team(4, 32, 1024)),
        (Dims(33, 1, 64, 128, 4096), Team(33, 4, 1024)),
        (Dims(132, 1, 64, 128, 1024), Team(132, 1, 1024)),
    ],
)
def test_rows_are_divided_among_the_blocks_that_run_at_once(dims: Dims, team: Team) -> None:
    """Whole tiles for every warpgroup; no block without keys."""
    assert choose_team(bfloat16, dims, 100, HOPPER, 132, WORKSPACE_BYTES) == team
    assert (team.blocks - 1) * team.block_keys < dims.key_seq <= team.blocks * team.block_keys
    assert team.rows * team.blocks <= 132


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": float32}, "vectors of parts"),
        ({"q_seq": 2}, "no decode step"),
        ({"top_k": 4096}, "every key is selected"),
        ({"batch": 133}, "more rows than blocks"),
        ({"batch": 32, "key_seq": 32768}, "longer rows than the blocks hold"),
        ({"blocks": 3}, "a bounded grid"),
        ({"capability": (10, 0)}, "no wgmma"),
        ({"workspace_bytes": 30000}, "a small workspace"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_calls_take_several_launches(change: dict, why: str) -> None:
    """One function of shapes, device and limits."""
    call = {"dtype": bfloat16, "batch": 1, "q_seq": 1, "key_seq": 4096, "top_k": 2048, "blocks": 132} | change
    dims = Dims(call["batch"], call["q_seq"], 64, 128, call["key_seq"])
    able = abilities(call.get("capability", (9, 0)))
    limit = call.get("workspace_bytes", WORKSPACE_BYTES)
    assert choose_team(call["dtype"], dims, call["top_k"], able, call["blocks"], limit) is None


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("values", ["normal", "integers", "wide", "special"])
@pytest.mark.parametrize("key_seq", [2, 33, 256, 257, 1100])
def test_decode_steps_equal_the_oracle(rt: nx.CudaRuntime, dtype: np.dtype, values: str, key_seq: int) -> None:
    """One launch of blocks that divide the row, whatever its length."""
    for (heads, head_dim), batch in zip(HEADS_AND_SIZES, (1, 3, 2, 132), strict=True):
        shape = {"batch": batch, "heads": heads, "head_dim": head_dim, "key_seq": min(key_seq, 60_000 // batch)}
        kernel = execute(rt, random_case(key_seq, dtype, **shape, top_k=max(1, key_seq // 3), values=values))
        assert kernel.choice.variant is DsaVariant.CERTIFIED_DECODE
        assert "a decode step in one launch" in kernel.choice.reason


def test_the_launch_counts_as_one_that_scores_and_one_that_selects(rt: nx.CudaRuntime) -> None:
    """It is one launch of the runtime's; its grid is that of both, and its workspace is what the blocks share."""
    case = random_case(3, HALF_DTYPES[1], heads=64, head_dim=128, key_seq=1500, top_k=40)
    before = rt.stats().launches
    kernel = execute(rt, case)
    assert rt.stats().launches == before + 1
    stats = kernel.launch_stats()
    assert (stats.executions, stats.score_launches, stats.selection_launches) == (1, 1, 1)
    assert (stats.last_score_grid_x, stats.last_selection_grid_x) == (6, 6)
    team = choose_team(bfloat16, Dims(1, 1, 64, 128, 1500), 40, HOPPER, 132, WORKSPACE_BYTES)
    assert kernel.workspace_stats().live_bytes == team.nbytes


@pytest.mark.parametrize("limit", [1, 5, 6, 1000])
def test_a_bounded_grid_takes_the_launch_only_if_it_holds_the_row(rt: nx.CudaRuntime, limit: int) -> None:
    """Longer runs of keys a block, up to those that it can hold; then scores and selection are apart."""
    case = random_case(6, HALF_DTYPES[0], heads=32, head_dim=64, key_seq=1500, top_k=6)
    kernel = DsaIndexSelectFactory(rt, Options()).create_kernel_with_grid_limit(case.node, limit)
    operands = DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    np.testing.assert_array_equal(operands.selected(), case.expected)
    assert (kernel.choice.variant is DsaVariant.CERTIFIED_DECODE) == (limit > 1)
    assert kernel.launch_stats().last_score_grid_x == {1: 1, 5: 3, 6: 6, 1000: 6}[limit]


def test_replays_follow_changed_contents_and_other_operands(rt: nx.CudaRuntime) -> None:
    """One node, with nothing allocated; tensor maps follow what a graph is given instead."""
    shape = {"batch": 2, "heads": 32, "head_dim": 64, "key_seq": 700, "top_k": 60}
    first, *later = (random_case(seed, HALF_DTYPES[1], **shape) for seed in range(4))
    later = [replace(case, scale=first.scale, weights_scale=first.weights_scale) for case in later]
    kernel, operands = nx.create_kernel(rt, first.node), DsaOperands(rt, first)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture([kernel]) as graph:
        kernel.execute(operands.inputs, [operands.output])
    assert graph.node_types == ("KERNEL",)
    workspace = kernel.workspace_stats()
    for case in later:
        operands.rewrite(case)
        operands.clear()
        graph.replay()
        np.testing.assert_array_equal(operands.selected(), case.oracle())
    others = DsaOperands(rt, later[0])
    old, new = (*operands.inputs, operands.output), (*others.inputs, others.output)
    graph.rebind(dict(zip(old, new, strict=True)))
    graph.replay()
    np.testing.assert_array_equal(others.selected(), later[0].oracle())
    assert kernel.workspace_stats() == workspace


def test_a_graph_outlives_its_kernel_object(rt: nx.CudaRuntime) -> None:
    """What the blocks meet at is kept, as the workspace is."""
    case = random_case(9, HALF_DTYPES[0], heads=32, head_dim=64, key_seq=300, top_k=20)
    kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
    kernel.execute(operands.inputs, [operands.output])
    with rt.capture([kernel]) as graph:
        kernel.execute(operands.inputs, [operands.output])
    del kernel
    operands.clear()
    graph.replay()
    np.testing.assert_array_equal(operands.selected(), case.expected)


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
def test_whatever_a_call_launches_can_be_compiled_ahead(dtype: DataType) -> None:
    """The list for a Hopper has it; no other device's has."""
    for heads, head_dim in HEADS_AND_SIZES:
        assert decode_spec(dtype, heads, head_dim) in decode_specs(HOPPER)
    assert decode_specs(abilities((8, 0))) == decode_specs(abilities((10, 0))) == ()


def test_a_block_fits_the_shared_memory_of_a_hopper() -> None:
    """227 KiB, as the CUDA programming guide has it; and all blocks run at once."""
    for spec in decode_specs(HOPPER):
        config = decode_config(spec, Team(3, 44, 1024))
        assert config.shared_bytes <= 227 << 10
        assert (config.grid, config.cooperative) == ((132, 1, 1), True)


def test_the_element_types_are_those_that_are_multiplied_as_they_are() -> None:
    """The tests above leave none out."""
    assert {dict(spec.macros)["ELEMENT"] for spec in decode_specs(HOPPER)} == {
        data_type(dtype).cuda for dtype in HALF_DTYPES
    }
