"""Shapes of DsaIndexSelect: how they relate, and how its workspace is laid out.

Everything is counted as the ABI's 64-bit unsigned sizes are, so that a product which does not fit is
refused and never wraps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nxrt_cuda.errors import KernelError

__all__ = ["INPUT_NAMES", "OP", "Dims", "WorkspaceLayout", "check_shapes", "checked_elements", "resolve_dims"]

OP = "DsaIndexSelect"
INPUT_NAMES = ("query", "key", "weights", "attention_bias")

_AXES = ("B, S, H, D", "B, T, D", "B, S, H", "B, 1, S, T")
_USIZE_MAX = 2**64 - 1
_I32_MAX = 2**31 - 1
_ALIGNMENT = 256


@dataclass(frozen=True)
class Dims:
    """Extents of one call: batch B, query positions S, heads H, head size D, key positions T."""

    batch: int
    q_seq: int
    heads: int
    head_dim: int
    key_seq: int

    @property
    def rows(self) -> int:
        """Query rows, B * S: one selection each."""
        return self.batch * self.q_seq

    @property
    def cells(self) -> int:
        """Scores, B * S * T."""
        return self.rows * self.key_seq


@dataclass(frozen=True)
class WorkspaceLayout:
    """Byte offsets of the segments within the workspace, each aligned to 256, and its size.

    Attributes:
        scores_offset: f32 [B, S, T].
        allowed_offset: u8 [B, S, T].
        nbytes: the whole, a multiple of 256.
    """

    scores_offset: int
    allowed_offset: int
    nbytes: int

    @classmethod
    def of(cls, dims: Dims) -> WorkspaceLayout:
        """The layout for ``dims``.

        Raises:
            KernelError: a size does not fit 64 bits.
        """
        rows = _checked_mul(dims.batch, dims.q_seq, f"{OP} workspace row count overflow")
        cells = _checked_mul(rows, dims.key_seq, f"{OP} workspace cell count overflow")
        scores_nbytes = _checked_mul(cells, 4, f"{OP} score workspace byte count overflow")
        allowed_offset = _align_up(max(scores_nbytes, 1))
        return cls(0, allowed_offset, _align_up(allowed_offset + max(cells, 1)))


def check_shapes(shapes: Sequence[tuple[int, ...] | None]) -> None:
    """Check ranks and relations of the four input shapes; what is unknown (None) is not compared.

    Raises:
        KernelError: a rank or an extent is wrong.
    """
    for index, (name, axes, shape) in enumerate(zip(INPUT_NAMES, _AXES, shapes, strict=True)):
        rank = axes.count(",") + 1
        if shape is not None and len(shape) != rank:
            raise KernelError(
                OP, f"input {index} ('{name}') rank {len(shape)} unsupported; expected {rank} ({axes})", operand=name
            )
    query, key, weights, bias = (
        shape if shape is not None else (None,) * (axes.count(",") + 1)
        for axes, shape in zip(_AXES, shapes, strict=True)
    )
    _require_equal("query/key batch", query[0], key[0], "key")
    _require_equal("query/weights batch", query[0], weights[0], "weights")
    _require_equal("query/bias batch", query[0], bias[0], "attention_bias")
    _require_equal("query/weights seq", query[1], weights[1], "weights")
    _require_equal("query/weights heads", query[2], weights[2], "weights")
    _require_equal("query/key head_dim", query[3], key[2], "key")
    if bias[1] not in (1, None):
        raise KernelError(
            OP, f"input 3 ('attention_bias') dim 1 must be 1 (head-broadcast), got {bias[1]}", operand="attention_bias"
        )
    _require_equal("bias/query seq", query[1], bias[2], "attention_bias")
    _require_equal("bias/key seq", key[1], bias[3], "attention_bias")
    for what, extent in (("heads", query[2]), ("head_dim", query[3])):
        if extent == 0:
            raise KernelError(OP, f"query {what} must be > 0, got 0: there is nothing to score with", operand="query")


def resolve_dims(shapes: Sequence[tuple[int, ...]], top_k: int) -> Dims:
    """The extents that the four input shapes agree on.

    Raises:
        KernelError: they do not agree, or a size does not fit its index type.
    """
    check_shapes(shapes)
    (batch, q_seq, heads, head_dim), key_seq = shapes[0], shapes[1][1]
    checked_elements("query", (batch, q_seq, heads, head_dim))
    checked_elements("key", (batch, key_seq, head_dim))
    checked_elements("weights", (batch, q_seq, heads))
    checked_elements("attention_bias", (batch, q_seq, key_seq))
    checked_elements("selected_indices", (batch, q_seq, top_k))
    for name, what, extent in (
        ("query", "sequence", q_seq),
        ("query", "heads", heads),
        ("query", "head_dim", head_dim),
        ("key", "sequence", key_seq),
    ):
        if extent > _I32_MAX:
            raise KernelError(OP, f"{name} {what} {extent} does not fit i32", operand=name)
    return Dims(batch, q_seq, heads, head_dim, key_seq)


def checked_elements(name: str, extents: Sequence[int]) -> int:
    """The product of ``extents``.

    Raises:
        KernelError: it does not fit 64 bits.
    """
    elements = 1
    for extent in extents:
        elements = _checked_mul(elements, extent, f"{name} element count overflow", operand=name)
    return elements


def _checked_mul(left: int, right: int, message: str, operand: str | None = None) -> int:
    product = left * right
    if product > _USIZE_MAX:
        raise KernelError(OP, message, operand=operand)
    return product


def _align_up(offset: int) -> int:
    aligned = -(-offset // _ALIGNMENT) * _ALIGNMENT
    if aligned > _USIZE_MAX:
        raise KernelError(OP, f"{OP} workspace size overflow")
    return aligned


def _require_equal(what: str, left: int | None, right: int | None, operand: str) -> None:
    if left is not None and right is not None and left != right:
        raise KernelError(OP, f"{what} mismatch: {left} != {right}", operand=operand)
