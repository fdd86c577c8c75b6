"""Graphs as pictures: what is in the text, and that Graphviz reads it."""

from __future__ import annotations

import re
import shutil
import subprocess

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.activity import Activity
from nxrt_cuda.dot import SegmentPicture, to_dot
from tests.small_kernels import ADD_ONE


def labels(dot: str) -> dict[str, str]:
    """The boxes' labels by their names."""
    return dict(re.findall(r'^    (s\d+n\d+) \[label="((?:[^"\\]|\\.)*)"', dot, re.MULTILINE))


@pytest.fixture
def graph(rt: nx.CudaRuntime) -> nx.CapturedGraph:
    """Attention and a fill in one segment, a kernel of no operator and a copy in the next."""
    q = rt.from_array(np.ones((1, 2, 70, 16), np.float32))
    out, x = rt.empty(q.shape, nx.float32), rt.zeros((4,), nx.float32)
    kernel = nx.create_kernel(rt, nx.Node("Attention", attributes={"is_causal": 1}))
    kernel.execute([q, q, q], [out])
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture([kernel], name="step") as graph:
        kernel.execute([q, q, q], [out])
        rt.fill_zero(x)
    with rt.capture(into=graph):
        rt.launch(launch)
        rt.copy(out, q)
    return graph


def test_boxes_say_operator_variant_extents_and_shared_memory(graph: nx.CapturedGraph) -> None:
    """Kernels with all of it, copies and fills with their bytes; as many boxes as the driver has nodes."""
    boxes = labels(graph.to_dot())
    assert list(boxes) == ["s0n0", "s0n1", "s1n0", "s1n1"]
    assert len(boxes) == graph.node_count
    attention = boxes["s0n0"].split("\\n")
    assert attention[0] == "Attention: flash_attention_f32_bf16x6"
    assert "HEAD_DIM=16" in " ".join(attention[1:])
    assert attention[-2] == "grid 2 x 1 x 1, block 512 x 1 x 1"
    assert re.fullmatch(r"shared memory: \d+ bytes dynamic, 0 bytes static", attention[-1])
    assert boxes["s0n1"] == r"memset\n16 bytes"
    assert boxes["s1n0"].startswith(r"add_one\ngrid 1 x 1 x 1")
    assert boxes["s1n1"] == rf"copy\n{2 * 70 * 16 * 4} bytes"


def test_segments_are_frames_and_work_follows_in_order(graph: nx.CapturedGraph) -> None:
    """Solid arrows inside a segment, a dashed one from its end to the next one's beginning."""
    dot = graph.to_dot()
    assert re.findall(r'label="(segment [^"]*)"', dot) == ["segment 0: 2 nodes", "segment 1: 2 nodes"]
    assert dot.count("subgraph cluster_") == 2
    assert "    s0n0 -> s0n1;\n" in dot
    assert "    s1n0 -> s1n1;\n" in dot
    assert "  s0n1 -> s1n0 [style=dashed];\n" in dot
    assert dot.startswith('digraph "step" {')


def test_copies_and_fills_of_nothing_are_no_nodes(rt: nx.CudaRuntime) -> None:
    """They reach no driver, so that they are in no graph and in no picture of one."""
    empty, x = rt.empty((0,), nx.float32), rt.zeros((4,), nx.float32)
    with rt.capture() as graph:
        rt.fill_zero(empty)
        rt.fill_zero(x)
    assert list(labels(graph.to_dot())) == ["s0n0"]
    assert graph.node_count == 1


def test_a_graph_without_segments_is_an_empty_picture(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    with rt.capture() as graph:
        rt.fill_zero(x)
    graph.close()
    assert labels(graph.to_dot()) == {}


def test_nodes_of_other_libraries_are_counted_and_names_are_quoted() -> None:
    """What the runtime has not recorded has a box of its own; quotes and backslashes survive."""
    dot = to_dot(
        'a "b" \\', [SegmentPicture([Activity("memset", "memset", {"bytes": 4})], ["MEMSET", "KERNEL", "HOST"])]
    )
    assert dot.startswith(r'digraph "a \"b\" \\" {')
    assert labels(dot) == {"s0n0": r"memset\n4 bytes", "s0n1": "2 node(s) of other libraries"}


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_draws_it(graph: nx.CapturedGraph) -> None:
    drawn = subprocess.run(
        ["dot", "-Tsvg"], input=graph.to_dot(), capture_output=True, text=True, timeout=60, check=False
    )
    assert drawn.returncode == 0, drawn.stderr
    assert drawn.stderr == ""
    assert "Attention: flash_attention_f32_bf16x6" in drawn.stdout
