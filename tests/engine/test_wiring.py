"""Connecting nodes by names: an order that runs, or everything that is wrong in one error."""

from __future__ import annotations

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.engine.wiring import refuse_unknown_operators, wire
from tests.engine.operators import combine, random_nodes


@pytest.mark.parametrize("seed", range(10))
def test_shuffled_nodes_run_after_those_they_read_from(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, unread = random_nodes(rng, 30)
    steps = wire([nodes[index] for index in rng.permutation(30)], ["x", "y"], unread)
    known = {"x", "y"}
    for step in steps:
        assert known.issuperset(step.inputs)
        known.update(step.outputs)
    assert len(steps) == 30


def test_an_order_that_runs_is_kept() -> None:
    nodes = [combine(["x"], "a"), combine(["x"], "b"), combine(["b", "a"], "c")]
    assert [step.outputs[0] for step in wire(nodes, ["x"], ["c"])] == ["a", "b", "c"]


def test_a_node_without_a_name_is_called_by_its_operator_and_position() -> None:
    (step,) = wire([(nx.Node("Combine", "test"), ["x", None, ""], ["a"])], ["x"], ["a"])
    assert step.label == "Combine 0"
    assert step.inputs == ("x", "", "")
    assert step.present_inputs == ("x",)


@pytest.mark.parametrize(
    ("nodes", "sources", "outputs", "problem"),
    [
        ([combine(["z"], "a")], [], ["a"], "'z', input 0 of make a, is undefined"),
        ([combine(["x"], "a"), combine(["x"], "a")], ["x"], ["a"], "'a' is produced 2 times"),
        ([combine(["x"], "x")], ["x"], ["x"], "'x' is given to the engine and produced by a node too"),
        ([combine(["x"], "a"), combine(["x"], "b")], ["x"], ["a"], "'b' is produced and not used"),
        ([combine(["x"], "a")], ["x", "w"], ["a"], "'w' is declared and not used"),
        ([combine(["x"], "a")], ["x"], ["a", "q"], "the output 'q' is produced by no node"),
        ([combine(["x"], "a")], ["x"], ["a", "x"], "the output 'x' is produced by no node"),
        ([combine(["x"], "a"), combine(["a"], "b")], ["x"], [], "there are no outputs"),
        ([combine(["x"], "")], ["x"], ["a"], "make  has an output without a name"),
        ([combine(["a"], "a")], [], ["a"], "there is a circle through, or before, make a"),
        (
            [combine(["x", "c"], "a"), combine(["a"], "b"), combine(["b"], "c"), combine(["x"], "d")],
            ["x"],
            ["c", "d"],
            "there is a circle through, or before, make a, make b, make c",
        ),
    ],
)
def test_wrong_wiring_is_named(nodes: list, sources: list[str], outputs: list[str], problem: str) -> None:
    with pytest.raises(nx.EngineError) as refusal:
        wire(nodes, sources, outputs)
    assert problem in str(refusal.value)


def test_all_that_is_wrong_is_in_one_error() -> None:
    with pytest.raises(nx.EngineError) as refusal:
        wire([combine(["z"], "a"), combine(["x"], "b"), combine(["x"], "b")], ["x", "w"], ["q"])
    assert str(refusal.value) == (
        "the engine's nodes do not fit together: 'z', input 0 of make a, is undefined; 'a' is produced and not used; "
        "'b' is produced 2 times; 'b' is produced and not used; 'w' is declared and not used; "
        "the output 'q' is produced by no node"
    )


@pytest.mark.parametrize("entry", [3, (nx.Node("Combine", "test"), ["x"]), ("Combine", ["x"], ["a"])])
def test_what_is_no_node_is_refused(entry: object) -> None:
    with pytest.raises(nx.EngineError, match=r"node 1 is .*give \(Node, "):
        wire([combine(["x"], "a"), entry], ["x"], ["a"])


def test_a_string_is_no_list_of_names() -> None:
    """It would be read letter by letter."""
    with pytest.raises(nx.EngineError, match=r"give \(Node, \[input names\], \[output names\]\)"):
        wire([(nx.Node("Combine", "test"), "xy", ["a"])], ["x", "y"], ["a"])
    with pytest.raises(nx.EngineError, match="outputs is 'ab'; give a list of names"):
        wire([combine(["x"], "ab")], ["x"], "ab")


def test_all_unknown_operators_are_named_once() -> None:
    nodes = [nx.Node("Relu"), nx.Node("Combine", "test"), nx.Node("Gelu", "com.microsoft"), nx.Node("Relu")]
    with pytest.raises(nx.UnsupportedError) as refusal:
        refuse_unknown_operators(nodes)
    assert str(refusal.value).startswith("no kernel for ai.onnx::Relu, com.microsoft::Gelu; there are kernels for ")
    assert "pkg.nxrt::DsaIndexSelect" in str(refusal.value)
