"""Workspace layout, index spaces and specialisations of DsaIndexSelect."""

from __future__ import annotations

import itertools

import pytest

import nxrt_cuda as nx
from nxrt_cuda.ops.dsa_geometry import Dims, WorkspaceLayout, checked_elements, resolve_dims
from nxrt_cuda.ops.dsa_variants import choose_tile, kernel_specs, score_spec, score_tiles, select_spec

USIZE_MAX = 2**64 - 1


@pytest.mark.parametrize(
    ("dims", "scores", "allowed", "nbytes"),
    [
        ((1, 1, 1, 1, 1), 0, 256, 512),
        ((1, 1, 1, 1, 64), 0, 256, 512),
        ((1, 1, 1, 1, 65), 0, 512, 768),
        ((2, 3, 4, 5, 100), 0, 2560, 3328),
        ((1, 512, 64, 128, 8192), 0, 16777216, 20971520),
        ((2, 3, 4, 5, 0), 0, 256, 512),
        ((0, 3, 4, 5, 7), 0, 256, 512),
    ],
)
def test_segments_are_aligned_to_256_bytes(dims: tuple[int, ...], scores: int, allowed: int, nbytes: int) -> None:
    """f32 scores, then u8 flags, each at least one byte long."""
    assert WorkspaceLayout.of(Dims(*dims)) == WorkspaceLayout(scores, allowed, nbytes)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((USIZE_MAX, 2, 1, 1, 1), "workspace row count overflow"),
        ((1, USIZE_MAX, 1, 1, 2), "workspace cell count overflow"),
        ((1, 2**62, 1, 1, 1), "score workspace byte count overflow"),
        ((1, 2**62 - 1, 1, 1, 1), "workspace size overflow"),
    ],
)
def test_workspace_layout_rejects_overflow(dims: tuple[int, ...], message: str) -> None:
    """Rows, cells, score bytes and the sum of the segments must each fit 64 bits."""
    with pytest.raises(nx.KernelError, match=f"^cuda_ep DsaIndexSelect: DsaIndexSelect {message}$"):
        WorkspaceLayout.of(Dims(*dims))


def test_tensor_index_spaces_reject_overflow() -> None:
    """A tensor whose element count does not fit 64 bits is refused by name."""
    assert checked_elements("query", (USIZE_MAX, 1)) == USIZE_MAX
    with pytest.raises(nx.KernelError, match="query element count overflow") as refusal:
        checked_elements("query", (USIZE_MAX, 2))
    assert refusal.value.operand == "query"


@pytest.mark.parametrize(
    ("extents", "top_k", "name"),
    [
        ({"B": 2**40, "S": 2**20, "H": 16}, 1, "query"),
        ({"B": 2**40, "T": 2**24}, 1, "key"),
        ({"B": 2**40, "S": 2**12, "T": 2**12}, 1, "attention_bias"),
        ({"B": 2**40}, 2**24, "selected_indices"),
    ],
)
def test_each_index_space_is_checked(extents: dict[str, int], top_k: int, name: str) -> None:
    """The product that overflows is the one that is named."""
    with pytest.raises(nx.KernelError, match=f"{name} element count overflow"):
        resolve_dims(shapes(**extents), top_k)


@pytest.mark.parametrize(
    ("axis", "what"), [("S", "query sequence"), ("H", "query heads"), ("D", "query head_dim"), ("T", "key sequence")]
)
def test_extents_fit_i32(axis: str, what: str) -> None:
    """A row's positions are counted in 32 bits; one extent more is refused by name."""
    resolve_dims(shapes(**{axis: 2**31 - 1}), 1)
    with pytest.raises(nx.KernelError, match=f"{what} {2**31} does not fit i32"):
        resolve_dims(shapes(**{axis: 2**31}), 1)


def shapes(B: int = 1, S: int = 1, H: int = 1, D: int = 1, T: int = 1) -> list[tuple[int, ...]]:
    return [(B, S, H, D), (B, T, D), (B, S, H), (B, 1, S, T)]


def test_every_specialisation_that_can_be_chosen_is_listed() -> None:
    """What any shape and dtype leads to is among the specialisations that are compiled in CI."""
    known = set(kernel_specs())
    for q_seq in (0, 1, 3, 4, 7, 8, 100):
        for key_seq in (0, 1, 16384, 16385, 131073):
            dims = Dims(1, q_seq, 2, 2, key_seq)
            assert select_spec(dims) in known
            for dtype in (nx.float32, nx.float16, nx.bfloat16):
                for head_dim, aligned in itertools.product((1, 2, 4, 8, 12, 128), (True, False)):
                    assert score_spec(dtype, choose_tile(dims), head_dim, aligned=aligned) in known


def test_strict_order_is_compiled_without_contraction() -> None:
    """No specialisation lets the compiler fuse a multiply and an add."""
    assert not any(spec.contract for spec in kernel_specs())


@pytest.mark.parametrize(
    ("dtype", "head_dim", "aligned", "width"),
    [
        (nx.float32, 4, True, 4),
        (nx.float32, 6, True, 1),
        (nx.float16, 8, True, 8),
        (nx.float16, 12, True, 1),
        (nx.bfloat16, 128, True, 8),
        (nx.bfloat16, 128, False, 1),
    ],
)
def test_wide_accesses_need_alignment(dtype: nx.DataType, head_dim: int, aligned: bool, width: int) -> None:
    """16 bytes at a time only where every row of query and key begins at a multiple of 16."""
    spec = score_spec(dtype, choose_tile(Dims(1, 1, 1, head_dim, 1)), head_dim, aligned=aligned)
    assert dict(spec.macros)["LOAD_WIDTH"] == str(width)


def test_tiles_cover_every_batch_apart() -> None:
    """A tile holds rows of one batch, so partly filled ones are counted per batch."""
    dims = Dims(batch=3, q_seq=9, heads=1, head_dim=1, key_seq=129)
    assert score_tiles(dims, choose_tile(dims)) == 3 * 2 * 2
    decode = Dims(batch=3, q_seq=1, heads=1, head_dim=1, key_seq=513)
    assert score_tiles(decode, choose_tile(decode)) == 3 * 1 * 2
