"""Node attributes: what the readers accept, and the sentence that they refuse with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx


def node(**attributes: Any) -> nx.Node:
    return nx.Node("Op", attributes=attributes)


def refusal(read: Callable[[], object]) -> str:
    with pytest.raises(nx.KernelError) as caught:
        read()
    assert caught.value.op == "Op"
    assert caught.value.operand == "a"
    message = str(caught.value)
    assert message.startswith("cuda_ep Op: ")
    return message.removeprefix("cuda_ep Op: ")


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_an_integer_attribute_is_read_as_an_int(value: Any) -> None:
    read = node(a=value).int_attr("a")
    assert read == 3
    assert type(read) is int


def test_a_default_stands_in_for_a_missing_attribute() -> None:
    assert node().int_attr("a", 4) == 4
    assert node().positive_int_attr("a", 4) == 4
    assert node().float_attr("a", 0.5) == 0.5
    assert node().finite_positive_float_attr("a", 0.5) == 0.5


def test_a_missing_required_attribute_is_named() -> None:
    assert refusal(lambda: node().int_attr("a")) == "missing required integer attribute 'a'"
    assert refusal(lambda: node().positive_int_attr("a")) == "missing required integer attribute 'a'"
    assert refusal(lambda: node().float_attr("a")) == "missing required float attribute 'a'"


@pytest.mark.parametrize("value", [1.0, "1", True, np.bool_(True), [1], np.float32(1)])
def test_an_integer_attribute_of_another_type_is_refused(value: Any) -> None:
    assert refusal(lambda: node(a=value).int_attr("a")) == f"attribute 'a' must be an integer, got {value!r}"


@pytest.mark.parametrize("value", [0, -1])
def test_a_count_must_be_positive(value: int) -> None:
    assert refusal(lambda: node(a=value).positive_int_attr("a")) == f"attribute 'a' must be > 0, got {value}"


@pytest.mark.parametrize("value", [1, "1.0", True, np.int64(1), [1.0], 1 + 0j])
def test_a_float_attribute_of_another_type_is_refused(value: Any) -> None:
    """ONNX types its attributes: an int is not a float."""
    assert refusal(lambda: node(a=value).float_attr("a")) == f"attribute 'a' must be a float, got {value!r}"


def test_a_float_attribute_is_rounded_to_f32() -> None:
    assert node(a=0.1).float_attr("a") == float(np.float32(0.1))
    assert node(a=np.float64(0.1)).float_attr("a") == float(np.float32(0.1))
    assert node(a=-2.5).float_attr("a") == -2.5


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e39, 1e-60])
def test_a_scale_must_be_finite_and_positive_as_f32(value: float) -> None:
    """What f32 rounds to infinity or to zero is refused too."""
    assert refusal(lambda: node(a=value).finite_positive_float_attr("a")).startswith(
        "attribute 'a' must be finite and > 0, got "
    )


def test_an_attribute_outside_the_contract_is_refused() -> None:
    node(b=1, c=2).reject_unknown_attributes(("b", "c", "d"), "the contract")
    assert (
        refusal(lambda: node(b=1, a=2).reject_unknown_attributes(("b",), "the contract"))
        == "attribute 'a' is not part of the contract"
    )


def test_a_node_cannot_be_changed_through_the_mapping_it_was_made_of() -> None:
    attributes = {"a": 1}
    made = nx.Node("Op", attributes=attributes)
    attributes["a"] = 2
    assert made.int_attr("a") == 1
    with pytest.raises(TypeError):
        made.attributes["a"] = 3  # type: ignore[index]


def test_a_name_is_no_node(rt: nx.CudaRuntime) -> None:
    name: Any = "Attention"
    for attempt in (lambda: nx.create_kernel(rt, name), lambda: nx.unsupported_reason(name, [], [])):
        with pytest.raises(
            nx.KernelError, match=r"a kernel is made of a Node, such as Node\('Attention'\), not of 'Att"
        ):
            attempt()
