"""Declared inputs: symbols get their sizes from the shapes of a call, and sizes are rounded up to buckets."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.engine.signature import Signature

DECLARED = {"x": (nx.float32, ("B", 4)), "y": ("float16", ("B", "T")), "cache": (nx.float32, ("B", "T", 8))}


def signature(**bucket_sizes: Any) -> Signature:
    return Signature(DECLARED, ["cache"], bucket_sizes)


def test_shapes_give_the_symbols_their_sizes() -> None:
    declared = signature()
    assert declared.symbols == ("B", "T")
    assert declared.bind({"y": (3, 7), "x": (3, 4)}) == {"B": 3, "T": 7}
    assert declared.inputs["y"].resolve({"B": 3, "T": 7}) == nx.TensorMetadata(nx.float16, (3, 7))
    assert list(declared.windows) == ["cache"]


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({"x": (3, 4)}, "input 'y' is missing"),
        ({"x": (3, 4), "y": (3, 7), "z": ()}, "there is no input 'z'; the inputs are 'x', 'y'"),
        ({"x": (3, 4), "y": (3, 7), "cache": (3, 7, 8)}, "there is no input 'cache'"),
        ({"x": (3, 5), "y": (3, 7)}, "input 'x' has shape (3, 5), declared ('B', 4)"),
        ({"x": (3, 4, 1), "y": (3, 7)}, "input 'x' has shape (3, 4, 1), declared ('B', 4)"),
        ({"x": (3, 4), "y": (2, 7)}, "input 'y' has shape (2, 7), declared ('B', 'T'), where B = 3 by another input"),
    ],
)
def test_a_call_that_does_not_fit_is_explained(shapes: dict[str, tuple[int, ...]], problem: str) -> None:
    with pytest.raises(nx.EngineError) as refusal:
        signature().bind(shapes)
    assert problem in str(refusal.value)


def test_everything_wrong_with_a_call_is_named() -> None:
    with pytest.raises(nx.EngineError) as refusal:
        signature().bind({"z": (), "x": (3, 5)})
    assert str(refusal.value) == (
        "the call does not fit the engine: there is no input 'z'; the inputs are 'x', 'y'; "
        "input 'x' has shape (3, 5), declared ('B', 4); input 'y' is missing"
    )


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (nx.float32, "give (dtype, shape)"),
        ((nx.float32, 4), "give (dtype, shape)"),
        ((nx.float32, (4.5,)), "give (dtype, shape)"),
        ((nx.float32, (-1,)), "shape (-1,) has a negative or nameless dimension"),
        ((nx.float32, ("",)), "has a negative or nameless dimension"),
    ],
)
def test_a_malformed_declaration_is_refused(entry: Any, problem: str) -> None:
    with pytest.raises(nx.EngineError) as refusal:
        Signature({"x": entry}, [], {})
    assert problem in str(refusal.value)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(nx.TensorError, match=r"^input 'x': dtype .*complex64.* is not supported"):
        Signature({"x": (np.complex64, (4,))}, [], {})


def test_sizes_are_rounded_up_to_the_next_bucket() -> None:
    declared = Signature({"x": (nx.float32, ("B", "T"))}, [], {"B": (8, 1, 4)})
    for size, bucket in ((0, 1), (1, 1), (2, 4), (4, 4), (5, 8), (8, 8)):
        assert declared.round_up({"B": size, "T": 9}) == {"B": bucket, "T": 9}
    with pytest.raises(nx.EngineError, match="B = 9 exceeds its largest bucket, 8"):
        declared.round_up({"B": 9, "T": 9})
    assert declared.padding == {"x": "B"}


@pytest.mark.parametrize("sizes", [(), (0, 4), (-1, 2), (1.5,), ("a",), ("a", 1), 4, None])
def test_bucket_sizes_are_positive_whole_numbers(sizes: Any) -> None:
    message = f"bucket sizes of 'B' are a list of whole numbers >= 1, got {re.escape(repr(sizes))}"
    with pytest.raises(nx.EngineError, match=message):
        signature(B=sizes)


def test_bucket_sizes_of_an_unknown_symbol_are_refused() -> None:
    with pytest.raises(nx.EngineError, match="bucket sizes of 'N'; the symbols are 'B', 'T'"):
        signature(N=(1, 2))


def test_only_a_batch_at_axis_0_may_be_padded() -> None:
    """In a bound tensor's declaration too."""
    with pytest.raises(nx.UnsupportedError, match="'T' cannot have bucket sizes: it is axis 1 of 'y'"):
        signature(T=(8, 16))
    with pytest.raises(nx.UnsupportedError, match="'B' cannot have bucket sizes: it is axis 1 of 'w'"):
        Signature({"x": (nx.float32, ("B",)), "w": (nx.float32, (4, "B"))}, ["w"], {"B": (1, 2)})


def test_a_symbol_of_bound_tensors_only_is_refused() -> None:
    """No call would give it a size."""
    with pytest.raises(nx.EngineError, match="'T' of the bound 'w' is a dimension of no input of a call"):
        Signature({"x": (nx.float32, ("B",)), "w": (nx.float32, ("T",))}, ["w"], {})


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"B": 1}, "sizes of 'B' given; the symbols are 'B', 'T'"),
        ({"B": 1, "T": 2, "N": 3}, "the symbols are 'B', 'T'"),
        ({"B": 1, "T": -1}, "T = -1 is no whole number >= 0"),
        ({"B": 1, "T": 1.5}, "T = 1.5 is no whole number >= 0"),
    ],
)
def test_sizes_given_by_symbol_are_checked(sizes: dict[str, Any], problem: str) -> None:
    with pytest.raises(nx.EngineError, match=problem):
        signature().check(sizes)
    assert signature().check({"T": 2, "B": np.int64(1)}) == {"B": 1, "T": 2}
