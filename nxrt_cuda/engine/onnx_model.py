"""An ONNX model as nodes of an engine. Needs the package ``onnx``.

What is served, and how it corresponds:

``pkg.nxrt::DsaIndexSelect``
    As it is.

``ai.onnx::Attention``, opset 23 or later
    Q, K, V of rank 4, [B, H, S, D]; ``attn_mask`` of their dtype, [Sq, Sk] or with planes; ``nonpad_kv_seqlen``
    as ``total_lengths``, read as int32. Not served: rank 3, a boolean mask, a past or a present cache,
    ``qk_matmul_output``, and ``is_causal`` without ``nonpad_kv_seqlen`` where Sq and Sk are not one and the
    same, for ONNX then lets query i see the keys up to i, and the kernel those up to Sk - Sq + i.

``com.microsoft::GroupQueryAttention``
    Query, key and value of rank 4, [B, H, S, D], as this package's operator takes them; ``seqlens_k`` as an
    initializer (the kernel takes counts, one more than it). Not served: [B, S, H * D], which is another order of
    elements; packed QKV; a past or a present cache, which the kernel does not append to; rotary embedding; a
    local window, whose width differs between releases of onnxruntime.

A row without a key is 0, as ONNX says since its errata of opset 24.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nxrt_cuda.dtype import DataType, bool_, data_type, int32
from nxrt_cuda.engine.wiring import operator_name
from nxrt_cuda.errors import EngineError, UnsupportedError
from nxrt_cuda.node import Node

if TYPE_CHECKING:
    from onnx import AttributeProto, ModelProto, NodeProto, ValueInfoProto

__all__ = ["OnnxGraph", "read_model"]

Declared = dict[str, tuple[Any, tuple[int | str, ...]]]


@dataclass(frozen=True)
class OnnxGraph:
    """The arguments of an engine.

    Attributes:
        name: of the model's graph.
        nodes: (node, input names, output names) each.
        inputs: (dtype, shape) by name.
        constants: the initializers that nodes read.
        outputs: names.
    """

    name: str
    nodes: tuple[tuple[Node, tuple[str, ...], tuple[str, ...]], ...]
    inputs: Declared
    constants: Mapping[str, np.ndarray]
    outputs: tuple[str, ...]


class _Refused(Exception):
    """Why a node is not served."""


def read_model(model: ModelProto | str | Path) -> OnnxGraph:
    """Translate a model, or the model at a path.

    Raises:
        UnsupportedError: nodes are not served, all named, each with the reason; or ``onnx`` is not installed.
        EngineError: the file is missing or holds no model, or an input is declared without element type or shape.
    """
    return _Reader(_load(model)).graph()


def _load(model: ModelProto | str | Path) -> ModelProto:
    try:
        import onnx
    except ImportError:
        raise UnsupportedError("ONNX models need the package onnx: pip install 'nxrt_cuda[onnx]'") from None
    if isinstance(model, onnx.ModelProto):
        return model
    if not isinstance(model, str | os.PathLike):
        raise EngineError(f"a model is a ModelProto or the path of one, got a {type(model).__name__}")
    try:
        return onnx.load(model)
    except Exception as error:  # onnx passes on what its file system and protobuf layers raise
        raise EngineError(f"cannot read {model} as an ONNX model: {error}") from error


class _Reader:
    """The translation of one model."""

    def __init__(self, model: ModelProto) -> None:
        from onnx import numpy_helper

        self._graph = graph = model.graph
        self._initializers = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        self._inputs: Declared = {}
        for value in graph.input:
            if value.name in self._initializers:
                continue
            if not _is_declared(value):
                raise EngineError(
                    f"input '{value.name}' of the ONNX model {graph.name!r} is declared without element type or shape"
                )
            self._inputs[value.name] = _declaration(value)
        # What shape inference could not tell of a tensor inside is not known here either.
        inside = {value.name: _declaration(value) for value in graph.value_info if _is_declared(value)}
        self._known = {**self._inputs, **inside}
        self._known.update((name, (array.dtype, array.shape)) for name, array in self._initializers.items())
        self._derived: dict[str, np.ndarray] = {}

    def graph(self) -> OnnxGraph:
        nodes, refused = [], []
        for index, proto in enumerate(self._graph.node):
            try:
                nodes.append(self._translate(index, proto))
            except _Refused as reason:
                refused.append(str(reason))
        if refused:
            raise UnsupportedError(f"the ONNX model {self._graph.name!r} has nodes not served: {'; '.join(refused)}")
        constants = {**self._initializers, **self._derived}
        used = {name for _, inputs, _ in nodes for name in inputs}
        return OnnxGraph(
            self._graph.name or "onnx model",
            tuple(nodes),
            self._inputs,
            {name: array for name, array in constants.items() if name in used},
            tuple(value.name for value in self._graph.output),
        )

    def _translate(self, index: int, proto: NodeProto) -> tuple[Node, tuple[str, ...], tuple[str, ...]]:
        attributes = {attribute.name: _value(attribute) for attribute in proto.attribute}
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        name = proto.name or f"{proto.op_type} {index}"
        what = f"{name} ({operator_name(Node(proto.op_type, domain))})"
        translate = _TRANSLATORS.get((domain, proto.op_type))
        if translate is None:
            raise _Refused(f"{what}: there is no kernel for the operator")
        outputs = list(proto.output)
        while outputs and not outputs[-1]:
            outputs.pop()
        try:
            inputs = translate(self, list(proto.input), attributes)
            if len(outputs) != 1:
                raise _Refused(f"only its first output is served, and it has {len(outputs)}")
        except _Refused as reason:
            raise _Refused(f"{what}: {reason}") from None
        return Node(proto.op_type, domain, attributes, name), tuple(inputs), tuple(outputs)

    def require_rank_4(self, names: Iterable[str]) -> None:
        for name in names:
            shape = self._shape(name)
            if shape is not None and len(shape) != 4:
                raise _Refused(
                    f"'{name}' has rank {len(shape)}; the kernel takes (batch, heads, sequence, head size), so split "
                    "and transpose it before"
                )

    def same_sequence(self, query: str, key: str) -> bool:
        """Whether both are declared with the same number, or symbol, of positions."""
        query_shape, key_shape = self._shape(query), self._shape(key)
        return query_shape is not None and key_shape is not None and query_shape[2] == key_shape[2]

    def dtype(self, name: str) -> DataType | None:
        """What the model says of a tensor's element type; None if nothing."""
        return data_type(self._known[name][0]) if name in self._known else None

    def initializer(self, name: str) -> np.ndarray | None:
        return self._initializers.get(name)

    def derive(self, name: str, array: np.ndarray) -> str:
        """A further constant of the engine."""
        self._derived[name] = array
        return name

    def as_int32(self, name: str) -> str:
        """An int64 tensor's values as int32: an initializer is converted, and an input is cast as it is uploaded."""
        array = self._initializers.get(name)
        if array is not None:
            limits = np.iinfo(np.int32)
            return self.derive(f"{name} as int32", array.clip(limits.min, limits.max).astype(np.int32))
        if name not in self._inputs:
            raise _Refused(f"'{name}' is an int64 tensor made by a node, and the kernel reads int32")
        self._inputs[name] = (int32, self._inputs[name][1])
        return name

    def _shape(self, name: str) -> tuple[int | str, ...] | None:
        """What the model says of a tensor's shape; None if nothing."""
        return self._known[name][1] if name in self._known else None


_Translator = Callable[[_Reader, list[str], dict[str, Any]], Sequence[str]]
"""The kernel's inputs from the node's; unless refused, ``attributes`` holds those of the kernel afterwards."""


def _dsa_index_select(reader: _Reader, inputs: list[str], attributes: dict[str, Any]) -> Sequence[str]:
    return inputs


def _attention(reader: _Reader, inputs: list[str], attributes: dict[str, Any]) -> Sequence[str]:
    query, key, value, mask, past_key, past_value, lengths = _padded(inputs, 7)
    if past_key or past_value:
        raise _Refused("it has a past cache, which the kernel does not append to; update the cache outside")
    reader.require_rank_4((query, key, value))
    if mask and reader.dtype(mask) == bool_:
        raise _Refused(f"the mask '{mask}' is boolean; the kernel adds one of 0 and -inf")
    _discard(attributes, left_window_size=(-1,), right_window_size=(-1,), qk_matmul_output_mode=(0, 1, 2, 3))
    # The kernel's softmax is f32, which is at least as precise as the types other than DOUBLE.
    _discard(attributes, softmax_precision=(1, 10, 16))
    if attributes.get("scale", 1.0) <= 0:
        raise _Refused(f"scale = {attributes['scale']} is not positive")
    if attributes.get("is_causal") and not lengths and not reader.same_sequence(query, key):
        raise _Refused(
            "is_causal without nonpad_kv_seqlen starts at the first key, the kernel's ends at the last; they are the "
            f"same only where '{query}' and '{key}' are declared with one sequence length"
        )
    return query, key, value, mask, reader.as_int32(lengths) if lengths else ""


def _group_query_attention(reader: _Reader, inputs: list[str], attributes: dict[str, Any]) -> Sequence[str]:
    query, key, value, past_key, past_value, lengths, total, *rotary, bias, sink = _padded(inputs, 12)
    if not key or not value:
        raise _Refused("query, key and value are packed into one tensor")
    if past_key or past_value:
        raise _Refused("it has a past cache, which the kernel does not append to")
    if any(rotary) or sink:
        raise _Refused("rotary embedding and head sinks are not served")
    reader.require_rank_4((query, key, value))
    if not reader.same_sequence(query, key):
        raise _Refused(f"without a past, '{query}' and '{key}' must be declared with one sequence length")
    _discard(attributes, do_rotary=(0,), rotary_interleaved=(0, 1), smooth_softmax=(0, -1), qk_output=(0,))
    if attributes.pop("local_window_size", -1) > 0:
        raise _Refused("local_window_size W means W keys in some releases of onnxruntime, and W + 1 in others")
    if bias and attributes.get("softcap"):
        raise _Refused("attention_bias together with softcap is not served")
    if total and reader.initializer(total) is None:
        raise _Refused(f"total_sequence_length '{total}' must be an initializer")
    if not lengths:
        return query, key, value, bias
    last = reader.initializer(lengths)
    if last is None:
        raise _Refused(
            f"seqlens_k '{lengths}' must be an initializer: it is one less than the count that the kernel reads"
        )
    counts = (last.reshape(-1) + 1).astype(np.int32)
    # A prompt's row i sees the keys up to i, however much of it is padding.
    past = reader.derive(f"{lengths} past", np.zeros_like(counts))
    return query, key, value, bias, reader.derive(f"{lengths} + 1", counts), past


_TRANSLATORS: dict[tuple[str, str], _Translator] = {
    ("pkg.nxrt", "DsaIndexSelect"): _dsa_index_select,
    ("", "Attention"): _attention,
    ("com.microsoft", "GroupQueryAttention"): _group_query_attention,
}


def _padded(inputs: list[str], count: int) -> list[str]:
    if len(inputs) > count:
        raise _Refused(f"it has {len(inputs)} inputs; the operator has {count}")
    return inputs + [""] * (count - len(inputs))


def _discard(attributes: dict[str, Any], **neutral: tuple[int, ...]) -> None:
    """Drop attributes that the kernel does not have, where their values ask for what it does."""
    for name, values in neutral.items():
        value = attributes.pop(name, values[0])
        if value not in values:
            raise _Refused(f"{name} = {value} is not served")


def _is_declared(value: ValueInfoProto) -> bool:
    """Whether ``value`` is a tensor of a known element type and rank."""
    tensor = value.type.tensor_type
    return bool(tensor.elem_type) and tensor.HasField("shape")


def _declaration(value: ValueInfoProto) -> tuple[Any, tuple[int | str, ...]]:
    """The dtype and shape of a value. A dimension that the model leaves open becomes a symbol of its own."""
    from onnx import helper

    tensor = value.type.tensor_type
    shape = tuple(
        dimension.dim_param or (dimension.dim_value if dimension.HasField("dim_value") else f"{value.name}.{axis}")
        for axis, dimension in enumerate(tensor.shape.dim)
    )
    return helper.tensor_dtype_to_np_dtype(tensor.elem_type), shape


def _value(attribute: AttributeProto) -> Any:
    from onnx import helper

    value = helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value
