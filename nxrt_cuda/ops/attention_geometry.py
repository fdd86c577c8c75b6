"""What one attention call is: its attributes, and the geometry that they and the operands' metadata give.

Pure: no runtime, no device, nothing allocated. Every relation between operands is checked here, so a
kernel is never launched on operands that do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nxrt_cuda.dtype import DataType, bfloat16, float16, float32, int32
from nxrt_cuda.errors import KernelError, UnsupportedError
from nxrt_cuda.node import Node
from nxrt_cuda.ops.operands import operand_label
from nxrt_cuda.tensor import TensorMetadata

__all__ = ["DTYPES", "INPUT_NAMES", "MAX_HEAD_DIM", "AttentionAttributes", "AttentionGeometry", "supported"]

DTYPES = (float32, float16, bfloat16)
MAX_HEAD_DIM = 128

INPUT_NAMES = ("query", "key", "value", "attn_mask", "total_lengths", "past_lengths")

_REQUIRED_INPUTS = 3
_I32_MAX = 2**31 - 1
_I64_MAX = 2**63 - 1
_GROUP_QUERY = "GroupQueryAttention"


def supported(seq_q: int, head_dim: int) -> bool:
    """Whether the prefill variants serve this shape."""
    return seq_q > 1 and 1 <= head_dim <= MAX_HEAD_DIM


@dataclass(frozen=True)
class AttentionAttributes:
    """The attributes of an ``Attention`` or ``com.microsoft.GroupQueryAttention`` node, validated.

    Attributes:
        op: the operator type, for messages.
        num_heads: query heads (``num_heads``, or ``q_num_heads`` as ONNX ``Attention`` calls it); None
            where the operands may say. ``GroupQueryAttention`` requires it.
        kv_num_heads: key and value heads, likewise.
        causal: ``is_causal``; 0 by default for ``Attention``, 1 for ``GroupQueryAttention``.
        scale: None for the default, 1/sqrt(head_dim), which an absent attribute and 0 stand for.
        softcap: 0 for none.
        local_window: ``local_window_size``; 0 for none, which any value of 0 or less stands for.
    """

    op: str
    num_heads: int | None
    kv_num_heads: int | None
    causal: bool
    scale: float | None
    softcap: float
    local_window: int

    @classmethod
    def from_node(cls, node: Node) -> AttentionAttributes:
        """Read a node.

        Raises:
            KernelError: an attribute is missing, ill-typed, out of range or unknown.
        """
        is_group_query = node.op_type == _GROUP_QUERY
        node.reject_unknown_attributes(
            ("num_heads", "q_num_heads", "kv_num_heads", "is_causal", "scale", "softcap", "local_window_size"),
            f"{node.op_type} as served here",
        )

        def heads(name: str, *, required: bool = False) -> int | None:
            return node.positive_int_attr(name) if required or name in node.attributes else None

        num_heads, q_num_heads = heads("num_heads", required=is_group_query), heads("q_num_heads")
        if num_heads is not None and q_num_heads is not None and num_heads != q_num_heads:
            raise KernelError(
                node.op_type, f"num_heads {num_heads} and q_num_heads {q_num_heads} differ", operand="q_num_heads"
            )
        is_causal = node.int_attr("is_causal", int(is_group_query))
        if is_causal not in (0, 1):
            raise KernelError(
                node.op_type, f"attribute 'is_causal' must be 0 or 1, got {is_causal}", operand="is_causal"
            )
        scale = node.float_attr("scale", 0.0)
        if not math.isfinite(scale):
            raise KernelError(node.op_type, f"attribute 'scale' must be finite, got {scale}", operand="scale")
        softcap = node.float_attr("softcap", 0.0)
        if not math.isfinite(softcap) or softcap < 0.0:
            raise KernelError(
                node.op_type, f"attribute 'softcap' must be finite and >= 0, got {softcap}", operand="softcap"
            )
        return cls(
            op=node.op_type,
            num_heads=num_heads or q_num_heads,
            kv_num_heads=heads("kv_num_heads", required=is_group_query),
            causal=bool(is_causal),
            scale=scale or None,
            softcap=softcap,
            local_window=max(node.int_attr("local_window_size", 0), 0),
        )


@dataclass(frozen=True)
class AttentionGeometry:
    """The shape of one attention call. Everything that a variant or a launch depends on is in here.

    Attributes:
        batch, num_heads, seq_q, head_dim: the query is [batch, num_heads, seq_q, head_dim].
        kv_num_heads, seq_k: key and value are [batch, kv_num_heads, seq_k, head_dim].
        kv_capacity: rows from one key/value plane to the next, at least ``seq_k``.
        causal: whether row i sees no key beyond its limit.
        local_window: how many keys up to its limit a row sees; 0 for all.
        softcap: bound of a score before the mask; 0 for none.
        scale: of the dot products, an f32 value.
        has_mask: whether there is an additive mask.
        mask_batch_stride, mask_head_stride: mask elements from one batch, or head, to the next; 0 where
            it is broadcast.
    """

    batch: int
    num_heads: int
    kv_num_heads: int
    seq_q: int
    seq_k: int
    kv_capacity: int
    head_dim: int
    causal: bool
    local_window: int
    softcap: float
    scale: float
    has_mask: bool = False
    mask_batch_stride: int = 0
    mask_head_stride: int = 0

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.kv_num_heads

    @classmethod
    def resolve(
        cls,
        attributes: AttentionAttributes,
        inputs: Sequence[TensorMetadata | None],
        output: TensorMetadata | None = None,
    ) -> AttentionGeometry:
        """The geometry of a call with these operands; absent optional inputs are None or left off.

        Key and value may be the front of a larger cache: a ``narrow()`` along dim 2 of a contiguous
        [B, KVH, capacity, D] tensor. Their strides then say the capacity, so there is no separate
        argument that could disagree with the memory. No other striding is taken.

        Raises:
            KernelError: an operand does not fit; the message names it and both values.
            UnsupportedError: the call is well formed, and head_dim or dtype is not served.
        """
        return _Resolver(attributes, inputs).geometry(output)


class _Resolver:
    """The checks behind :meth:`AttentionGeometry.resolve`."""

    def __init__(self, attributes: AttentionAttributes, inputs: Sequence[TensorMetadata | None]) -> None:
        self._attributes = attributes
        if not _REQUIRED_INPUTS <= len(inputs) <= len(INPUT_NAMES):
            raise self._error(f"expected {_REQUIRED_INPUTS} to {len(INPUT_NAMES)} inputs, got {len(inputs)}")
        self._inputs = dict(zip(INPUT_NAMES, inputs, strict=False))
        for name in INPUT_NAMES[:_REQUIRED_INPUTS]:
            if self._inputs[name] is None:
                raise self._error(f"required {_what(name)} is absent", name)

    def geometry(self, output: TensorMetadata | None) -> AttentionGeometry:
        attributes = self._attributes
        query, key, value = (self._required(name) for name in INPUT_NAMES[:_REQUIRED_INPUTS])
        if query.dtype not in DTYPES:
            raise UnsupportedError(
                f"cuda_ep {attributes.op}: fused Attention dtype {query.dtype} "
                f"(supported: {', '.join(str(dtype) for dtype in DTYPES)})"
            )
        batch, num_heads, seq_q, head_dim = self._shape("query", "(B, H, Sq, D)")
        kv_batch, kv_num_heads, seq_k, _ = self._shape("key", "(B, KVH, Sk, D)")
        self._shape("value", "(B, KVH, Sk, D)")
        for name, extent in (("num_heads", num_heads), ("kv_num_heads", kv_num_heads), ("head_dim", head_dim)):
            if extent == 0:
                raise self._error(f"{name} is 0", "key" if name == "kv_num_heads" else "query")
        self._equal("query/key batch", batch, kv_batch, "key")
        self._equal("query/key head_dim", head_dim, key.shape[3], "key")
        if key.shape != value.shape:
            raise self._error(f"key shape {key.shape} and value shape {value.shape} differ", "value")
        self._dtype("key", query.dtype)
        self._dtype("value", query.dtype)
        self._check_heads(num_heads, kv_num_heads)
        if head_dim > MAX_HEAD_DIM:
            raise UnsupportedError(
                f"cuda_ep {attributes.op}: fused Attention requires seq_q > 1 and head_dim <= {MAX_HEAD_DIM}; "
                f"got seq_q={seq_q}, head_dim={head_dim}"
            )
        self._contiguous("query")
        kv_capacity = self._capacity("key")
        value_capacity = self._capacity("value")
        if kv_capacity != value_capacity:
            raise self._error(f"KV capacity {kv_capacity} of key and {value_capacity} of value differ", "value")
        mask_batch_stride, mask_head_stride = self._mask_strides(query.dtype, (batch, num_heads, seq_q, seq_k))
        self._check_lengths("total_lengths", batch)
        self._check_lengths("past_lengths", batch)
        if output is not None:
            self._check_output(output, query)
        geometry = AttentionGeometry(
            batch=batch,
            num_heads=num_heads,
            kv_num_heads=kv_num_heads,
            seq_q=seq_q,
            seq_k=seq_k,
            kv_capacity=kv_capacity,
            head_dim=head_dim,
            causal=attributes.causal,
            local_window=attributes.local_window,
            softcap=attributes.softcap,
            scale=float(np.float32(attributes.scale or 1.0 / math.sqrt(head_dim))),
            has_mask=self._inputs.get("attn_mask") is not None,
            mask_batch_stride=mask_batch_stride,
            mask_head_stride=mask_head_stride,
        )
        self._check_i32(geometry)
        self._check_offsets(geometry)
        return geometry

    def _required(self, name: str) -> TensorMetadata:
        metadata = self._inputs[name]
        assert metadata is not None
        return metadata

    def _shape(self, name: str, expected: str) -> tuple[int, ...]:
        shape = self._required(name).shape
        if len(shape) != 4:
            raise self._error(f"{_what(name)} rank {len(shape)} unsupported; expected 4 {expected}", name)
        return shape

    def _dtype(self, name: str, expected: DataType) -> None:
        actual = self._required(name).dtype
        if actual != expected:
            raise self._error(f"{_what(name)} dtype {actual} must match query dtype {expected}", name)

    def _equal(self, what: str, left: int, right: int, operand: str) -> None:
        if left != right:
            raise self._error(f"{what} mismatch: {left} != {right}", operand)

    def _contiguous(self, name: str) -> None:
        metadata = self._required(name)
        if not metadata.is_contiguous:
            raise self._error(
                f"{_what(name)} must be contiguous; shape {metadata.shape} has strides {metadata.strides}", name
            )

    def _check_heads(self, num_heads: int, kv_num_heads: int) -> None:
        attributes = self._attributes
        if attributes.num_heads is not None:
            self._equal("attribute num_heads/query heads", attributes.num_heads, num_heads, "query")
        if attributes.kv_num_heads is not None:
            self._equal("attribute kv_num_heads/key heads", attributes.kv_num_heads, kv_num_heads, "key")
        if num_heads % kv_num_heads != 0:
            raise self._error(f"num_heads {num_heads} is not a multiple of kv_num_heads {kv_num_heads}", "key")

    def _capacity(self, name: str) -> int:
        """Rows between the planes of key or value, read off its strides."""
        metadata = self._required(name)
        batch, heads, seq_k, head_dim = metadata.shape
        if metadata.is_contiguous:
            return seq_k
        # The stride of an extent of one says nothing; a plane is then found through the other.
        plane = metadata.strides[1] if heads > 1 else metadata.strides[0]
        strides = (heads * plane, plane, head_dim, 1)
        matters = (batch > 1, heads > 1, seq_k > 1, head_dim > 1)
        if plane % head_dim != 0 or any(
            matter and actual != expected
            for matter, actual, expected in zip(matters, metadata.strides, strides, strict=True)
        ):
            raise self._error(
                f"{_what(name)} must be contiguous, or a narrow() of a contiguous [B, KVH, capacity, D] cache along "
                f"dim 2; shape {metadata.shape} has strides {metadata.strides}",
                name,
            )
        capacity = plane // head_dim
        if capacity < seq_k:
            raise self._error(f"KV capacity {capacity} of {_what(name)} is below its {seq_k} keys", name)
        return capacity

    def _mask_strides(self, dtype: DataType, shape: tuple[int, int, int, int]) -> tuple[int, int]:
        mask = self._inputs.get("attn_mask")
        if mask is None:
            return 0, 0
        batch, num_heads, seq_q, seq_k = shape
        name = "attn_mask"
        self._dtype(name, dtype)
        if len(mask.shape) not in (2, 4):
            raise self._error(
                f"{_what(name)} rank {len(mask.shape)} does not say which planes it has; expected "
                "(Sq, Sk), (1 or B, 1, Sq, Sk) or (B, H, Sq, Sk)",
                name,
            )
        planes = mask.shape[:-2] or (1, 1)
        if mask.shape[-2:] != (seq_q, seq_k) or planes[0] not in (1, batch) or planes[1] not in (1, num_heads):
            raise self._error(
                f"{_what(name)} shape {mask.shape} does not broadcast to {shape}, the (B, H, Sq, Sk) of query and key",
                name,
            )
        self._contiguous(name)
        plane = seq_q * seq_k
        return planes[1] * plane if planes[0] > 1 else 0, plane if planes[1] > 1 else 0

    def _check_lengths(self, name: str, batch: int) -> None:
        lengths = self._inputs.get(name)
        if lengths is None:
            return
        if lengths.dtype != int32:
            raise self._error(f"{_what(name)} dtype {lengths.dtype} unsupported; expected Int32", name)
        if lengths.shape != (batch,):
            raise self._error(
                f"{_what(name)} shape {lengths.shape} unsupported; expected ({batch},), one a batch", name
            )
        self._contiguous(name)

    def _check_output(self, output: TensorMetadata, query: TensorMetadata) -> None:
        what = "output 0 ('output')"
        if output.dtype != query.dtype:
            raise self._error(f"{what} dtype {output.dtype} must match query dtype {query.dtype}", "output")
        if output.shape != query.shape:
            raise self._error(
                f"{what} shape {output.shape} unsupported; expected {query.shape} (B, H, Sq, D)", "output"
            )
        if not output.is_contiguous:
            raise self._error(f"{what} must be contiguous; shape {output.shape} has strides {output.strides}", "output")

    def _check_i32(self, geometry: AttentionGeometry) -> None:
        for name, value in (
            ("batch", geometry.batch),
            ("num_heads", geometry.num_heads),
            ("num_kv_heads", geometry.kv_num_heads),
            ("seq_q", geometry.seq_q),
            ("seq_k", geometry.seq_k),
            ("KV capacity", geometry.kv_capacity),
            ("head_dim", geometry.head_dim),
            ("GQA group", geometry.group),
            ("local_window", geometry.local_window),
        ):
            if value > _I32_MAX:
                raise self._error(f"fused Attention: {name} {value} exceeds i32")

    def _check_offsets(self, geometry: AttentionGeometry) -> None:
        kv_elements = geometry.batch * geometry.kv_num_heads * geometry.kv_capacity * geometry.head_dim
        mask = self._inputs.get("attn_mask")
        for name, elements in (
            ("query", self._required("query").elements),
            ("key", kv_elements),
            ("attn_mask", 0 if mask is None else mask.elements),
        ):
            if elements > _I64_MAX:
                raise self._error(f"{_what(name)} element count overflow: {elements} exceeds i64", name)

    def _error(self, message: str, operand: str | None = None) -> KernelError:
        return KernelError(self._attributes.op, message, operand=operand)


def _what(name: str) -> str:
    return operand_label(INPUT_NAMES, len(INPUT_NAMES), INPUT_NAMES.index(name))
