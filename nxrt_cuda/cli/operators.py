"""What a command has to know of each operator: the names of its inputs, its output, and its oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from nxrt_cuda.cli.errors import InputError
from nxrt_cuda.dtype import bfloat16, data_type, float16, float32, int64
from nxrt_cuda.node import Node
from nxrt_cuda.ops import attention_geometry, dsa_geometry
from nxrt_cuda.ops.attention_geometry import AttentionAttributes, AttentionGeometry
from nxrt_cuda.reference.attention import attention
from nxrt_cuda.reference.dsa_index_select import dsa_index_select
from nxrt_cuda.tensor import TensorMetadata

__all__ = ["OPERATORS", "Arrays", "Comparison", "Operator", "find_operator"]

Arrays = Mapping[str, np.ndarray]

_TOLERANCES = {float32: (1e-5, 1e-5), float16: (1e-3, 2e-3), bfloat16: (4e-3, 8e-3)}
"""Absolute and relative, to the float64 oracle before any rounding."""


@dataclass(frozen=True)
class Comparison:
    """How a result compares with the oracle's.

    Attributes:
        passed: whether it is as it has to be.
        text: by how much, in words.
    """

    passed: bool
    text: str


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        op_type, domain: its name.
        inputs: the names of its inputs, in order.
        required: how many of them, from the first on, must be given.
        output: the name of its output.
        output_metadata: the output's dtype and shape, from valid inputs.
        compare: a result against the oracle's, from the inputs.
    """

    op_type: str
    domain: str
    inputs: tuple[str, ...]
    required: int
    output: str
    output_metadata: Callable[[Node, Arrays], TensorMetadata]
    compare: Callable[[Node, Arrays, np.ndarray], Comparison]

    @property
    def qualified_name(self) -> str:
        return f"{self.domain or 'ai.onnx'}::{self.op_type}"

    def given(self, arrays: Arrays) -> tuple[str, ...]:
        """The names of the inputs in order, up to the last one that ``arrays`` has."""
        return self.inputs[: 1 + max(i for i, name in enumerate(self.inputs) if name in arrays)]


def find_operator(name: str) -> Operator:
    """The operator called ``name``, with or without its domain.

    Raises:
        InputError: there is none.
    """
    for operator in OPERATORS:
        if name in (operator.op_type, operator.qualified_name):
            return operator
    served = ", ".join(operator.qualified_name for operator in OPERATORS)
    raise InputError(f"there is no operator {name!r}; there are {served}")


def _dsa_output(node: Node, arrays: Arrays) -> TensorMetadata:
    batch, rows = arrays["query"].shape[:2]
    return TensorMetadata(int64, (batch, 1, rows, node.positive_int_attr("top_k")))


def _compare_dsa(node: Node, arrays: Arrays, result: np.ndarray) -> Comparison:
    expected = dsa_index_select(
        *(arrays[name] for name in dsa_geometry.INPUT_NAMES),
        top_k=node.positive_int_attr("top_k"),
        scale=node.finite_positive_float_attr("scale"),
        weights_scale=node.finite_positive_float_attr("weights_scale", 1.0),
    )
    differing = np.argwhere(result != expected)
    if len(differing) == 0:
        return Comparison(True, f"all {expected.size} indices equal")
    first = tuple(int(i) for i in differing[0])
    return Comparison(
        False,
        f"{len(differing)} of {expected.size} indices differ, the first at {list(first)}: "
        f"{result[first]}, expected {expected[first]}",
    )


def _attention_output(node: Node, arrays: Arrays) -> TensorMetadata:
    query = arrays["query"]
    return TensorMetadata(data_type(query.dtype), query.shape)


def _compare_attention(node: Node, arrays: Arrays, result: np.ndarray) -> Comparison:
    attributes = AttentionAttributes.from_node(node)
    operands = [arrays.get(name) for name in attention_geometry.INPUT_NAMES]
    geometry = AttentionGeometry.resolve(attributes, [None if a is None else _metadata(a) for a in operands])
    query, key, value, mask, total_lengths, past_lengths = operands
    assert query is not None
    assert key is not None
    assert value is not None
    expected = attention(
        query,
        key,
        value,
        mask=mask,
        total_lengths=total_lengths,
        past_lengths=past_lengths,
        scale=geometry.scale,
        causal=geometry.causal,
        softcap=geometry.softcap,
        local_window=geometry.local_window,
    )
    return _within_tolerance(result, expected, *_TOLERANCES[data_type(result.dtype)])


def _within_tolerance(result: np.ndarray, expected: np.ndarray, absolute: float, relative: float) -> Comparison:
    values = result.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.abs(values - expected)
        share = error / (absolute + relative * np.abs(expected))
    # Infinities of one sign, and NaN where NaN is due, are equal; any other meeting of them is not.
    same = (values == expected) | (np.isnan(values) & np.isnan(expected))
    error = np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))
    share = np.where(same, 0.0, np.where(np.isnan(share), np.inf, share))
    if share.size == 0:
        return Comparison(True, "empty")
    worst = np.unravel_index(share.argmax(), share.shape)
    if share[worst] <= 1:
        return Comparison(True, f"max error {error.max():.1e}, {share[worst]:.0%} of the tolerance")
    position = [int(i) for i in worst]
    return Comparison(
        False,
        f"{np.count_nonzero(share > 1)} of {share.size} elements are off, the worst at {position}: "
        f"{values[worst]:.7g}, expected {expected[worst]:.7g}",
    )


def _metadata(array: np.ndarray) -> TensorMetadata:
    return TensorMetadata(data_type(array.dtype), array.shape)


def _attention_operator(op_type: str, domain: str) -> Operator:
    return Operator(
        op_type=op_type,
        domain=domain,
        inputs=attention_geometry.INPUT_NAMES,
        required=3,
        output="output",
        output_metadata=_attention_output,
        compare=_compare_attention,
    )


OPERATORS = (
    _attention_operator("Attention", ""),
    _attention_operator("GroupQueryAttention", "com.microsoft"),
    Operator(
        op_type=dsa_geometry.OP,
        domain="pkg.nxrt",
        inputs=dsa_geometry.INPUT_NAMES,
        required=4,
        output="selected_indices",
        output_metadata=_dsa_output,
        compare=_compare_dsa,
    ),
)
