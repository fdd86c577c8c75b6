"""Engines of ONNX models: what corresponds is served as ONNX's own reference computes it, the rest is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.engine.onnx_model import read_model
from nxrt_cuda.reference.dsa_index_select import dsa_index_select

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed (pip install 'nxrt_cuda[onnx]')")
# Before 1.23, ONNX's own reference had NaN where a row sees no key, and another causal origin with lengths.
reference = pytest.importorskip("onnx.reference")
needs_reference = pytest.mark.skipif(
    tuple(map(int, onnx.__version__.split(".")[:2])) < (1, 23), reason="needs the reference of onnx 1.23"
)
helper, Type = onnx.helper, onnx.TensorProto

DOMAINS = {"": 24, "pkg.nxrt": 1, "com.microsoft": 1}


def model_of(
    nodes: list[Any],
    inputs: dict[str, tuple[int, Any]],
    outputs: list[str],
    initializers: dict[str, np.ndarray] | None = None,
) -> Any:
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info(name, *declared) for name, declared in inputs.items()],
        [helper.make_tensor_value_info(name, Type.FLOAT, None) for name in outputs],
        [onnx.numpy_helper.from_array(array, name) for name, array in (initializers or {}).items()],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in DOMAINS.items()]
    return helper.make_model(graph, opset_imports=opsets)


def attention_model(
    extra: tuple[str, ...] = (),
    outputs: tuple[str, ...] = ("y",),
    queries: int = 6,
    initializers: dict[str, np.ndarray] | None = None,
    extra_inputs: dict[str, tuple[int, Any]] | None = None,
    heads: int = 4,
    **attributes: Any,
) -> Any:
    """One ``Attention`` of a batch "N" over six keys and two heads of them."""
    node = helper.make_node("Attention", ["q", "k", "v", *extra], list(outputs), name="attend", **attributes)
    cache = (Type.FLOAT, ("N", 2, 6, 8))
    inputs = {"q": (Type.FLOAT, ("N", heads, queries, 8)), "k": cache, "v": cache, **(extra_inputs or {})}
    return model_of([node], inputs, ["y"], initializers)


def query_key_value(batch: int, queries: int = 6, heads: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(batch)
    shapes = {"q": (batch, heads, queries, 8), "k": (batch, 2, 6, 8), "v": (batch, 2, 6, 8)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def assert_as_onnx(rt: nx.CudaRuntime, model: Any, inputs: dict[str, np.ndarray]) -> None:
    expected = reference.ReferenceEvaluator(model).run(None, inputs)[0]
    result = nx.Engine.from_onnx(rt, model).run(inputs)["y"].numpy()
    np.testing.assert_allclose(result, expected, atol=1e-5, rtol=1e-5)


MASK = np.where(np.random.default_rng(9).random((6, 6)) < 0.7, 0.5, -np.inf).astype(np.float32)


@needs_reference
@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"scale": 0.3},
        {"softcap": 0.7},
        {"is_causal": 1},
        {"is_causal": 1, "softcap": 2.0, "scale": 0.5, "softmax_precision": Type.FLOAT, "qk_matmul_output_mode": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_computes_what_onnx_computes(rt: nx.CudaRuntime, attributes: dict[str, Any], masked: bool) -> None:
    """With grouped heads, the mask after the softcap, and rows that see no key."""
    constants = {"mask": MASK} if masked else {}
    model = attention_model(("mask",) if masked else (), initializers=constants, **attributes)
    assert_as_onnx(rt, model, query_key_value(3))


@needs_reference
@pytest.mark.parametrize("causal", [0, 1])
def test_lengths_are_those_of_an_outside_cache(rt: nx.CudaRuntime, causal: int) -> None:
    """``nonpad_kv_seqlen`` is int64 in ONNX; causal rows end at it, also where there are fewer keys than rows."""
    declared = {"lengths": (Type.INT64, ("N",))}
    model = attention_model(("", "", "", "lengths"), queries=3, extra_inputs=declared, is_causal=causal)
    lengths = np.array([6, 4, 1], np.int64)
    assert_as_onnx(rt, model, query_key_value(3, 3) | {"lengths": lengths})


@needs_reference
def test_lengths_may_be_an_initializer(rt: nx.CudaRuntime) -> None:
    lengths = np.array([6, 4, 1], np.int64)
    model = attention_model(("", "", "", "lengths"), queries=3, initializers={"lengths": lengths}, is_causal=1)
    assert_as_onnx(rt, model, query_key_value(3, 3))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"extra": ("", "pk", "pv")}, "it has a past cache, which the kernel does not append to"),
        ({"outputs": ("y", "present_k", "present_v")}, "only its first output is served, and it has 3"),
        ({"outputs": ("y", "", "", "scores")}, "only its first output is served, and it has 4"),
        ({"queries": 3, "is_causal": 1}, "'q' and 'k' are declared with one sequence length"),
        ({"scale": 0.0}, "scale = 0.0 is not positive"),
        ({"softmax_precision": Type.DOUBLE}, "softmax_precision = 11 is not served"),
        ({"left_window_size": 4}, "left_window_size = 4 is not served"),
        (
            {"extra": ("mask",), "initializers": {"mask": np.ones((6, 6), np.bool_)}},
            "the mask 'mask' is boolean; the kernel adds one of 0 and -inf",
        ),
    ],
)
def test_attention_that_the_kernel_does_not_compute_is_refused(
    rt: nx.CudaRuntime, model: dict[str, Any], reason: str
) -> None:
    with pytest.raises(nx.UnsupportedError) as refusal:
        nx.Engine.from_onnx(rt, attention_model(**model))
    assert str(refusal.value).startswith("the ONNX model 'model' has nodes not served: attend (ai.onnx::Attention): ")
    assert reason in str(refusal.value)


def test_rank_3_is_refused(rt: nx.CudaRuntime) -> None:
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], name="attend", q_num_heads=2, kv_num_heads=2)
    model = model_of([node], dict.fromkeys("qkv", (Type.FLOAT, (1, 6, 16))), ["y"])
    with pytest.raises(nx.UnsupportedError, match="'q' has rank 3; the kernel takes \\(batch, heads, sequence"):
        nx.Engine.from_onnx(rt, model)


def test_a_mask_shorter_than_the_keys_is_refused(rt: nx.CudaRuntime) -> None:
    """ONNX pads it; the kernel's own gate has the reason, once the shapes are known."""
    engine = nx.Engine.from_onnx(rt, attention_model(("mask",), initializers={"mask": MASK[:, :4]}))
    with pytest.raises(nx.UnsupportedError, match=r"attn_mask.*\(6, 4\) does not broadcast"):
        engine.run(query_key_value(2))


def select_node(**attributes: Any) -> Any:
    attributes = {"top_k": 4, "scale": 0.5, **attributes}
    return helper.make_node("DsaIndexSelect", ["q", "k", "w", "bias"], ["y"], domain="pkg.nxrt", **attributes)


def select_model(element: int = Type.FLOAT, *, constant_keys: np.ndarray | None = None, **attributes: Any) -> Any:
    inputs = {
        "q": (element, (None, "S", 2, 8)),
        "k": (element, (None, 20, 8)),
        "w": (element, (None, "S", 2)),
        "bias": (Type.FLOAT, (None, 1, "S", 20)),
    }
    constants = {} if constant_keys is None else {"k": constant_keys}
    return model_of(
        [select_node(**attributes)], {n: d for n, d in inputs.items() if n not in constants}, ["y"], constants
    )


@pytest.mark.parametrize("element", [Type.FLOAT, Type.FLOAT16, Type.BFLOAT16])
def test_key_selection_is_taken_as_it_is(rt: nx.CudaRuntime, element: int) -> None:
    """With open dimensions, whose sizes each call gives."""
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(element))
    engine = nx.Engine.from_onnx(rt, select_model(element, weights_scale=0.25))
    rng = np.random.default_rng(0)
    for rows in (1, 3):
        shapes = {"q": (2, rows, 2, 8), "k": (2, 20, 8), "w": (2, rows, 2)}
        inputs = {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}
        inputs["bias"] = np.where(rng.random((2, 1, rows, 20)) < 0.5, 0, -np.inf).astype(np.float32)
        np.testing.assert_array_equal(
            engine.run(inputs)["y"].numpy(),
            dsa_index_select(*inputs.values(), top_k=4, scale=0.5, weights_scale=0.25),
        )
    assert engine.report().name == "model"
    assert "q.0=2, S=3, k.0=2" in engine.report().buckets[-1].name


def test_initializers_are_constants_and_unread_ones_are_left_out(rt: nx.CudaRuntime) -> None:
    keys = np.random.default_rng(0).standard_normal((1, 20, 8), np.float32).astype(ml_dtypes.bfloat16)
    model = select_model(Type.BFLOAT16, constant_keys=keys)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(3, np.float32), "unread"))
    graph = read_model(model)
    assert list(graph.constants) == ["k"]
    assert list(graph.inputs) == ["q", "w", "bias"]
    assert graph.constants["k"].dtype == keys.dtype


def test_an_input_may_be_bound(rt: nx.CudaRuntime) -> None:
    keys = rt.from_array(np.zeros((4, 20, 8), np.float32))
    model = select_model()
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_value = 1
    engine = nx.Engine.from_onnx(rt, model, bound={"k": keys}, name="mine")
    y = engine.run(
        {
            "q": np.ones((1, 1, 2, 8), np.float32),
            "w": np.ones((1, 1, 2), np.float32),
            "bias": np.zeros((1, 1, 1, 20), np.float32),
        }
    )["y"]
    np.testing.assert_array_equal(y.numpy().ravel(), [0, 1, 2, 3])
    assert engine.report().name == "mine"


def group_query_model(
    lengths: np.ndarray | None = None, extra: tuple[str, ...] = (), rank_3: bool = False, **attributes: Any
) -> Any:
    names = ["query", "key", "value", "", "", "seqlens_k" if lengths is not None else "", *extra]
    while not names[-1]:
        names.pop()
    attributes = {"num_heads": 4, "kv_num_heads": 2, **attributes}
    node = helper.make_node("GroupQueryAttention", names, ["y"], domain="com.microsoft", name="attend", **attributes)
    heads = {"query": 4, "key": 2, "value": 2}
    inputs = {n: (Type.FLOAT, (2, 6, h * 8) if rank_3 else (2, h, 6, 8)) for n, h in heads.items()}
    if extra:
        inputs.update((name, (Type.FLOAT, (1,))) for name in extra if name)
    return model_of([node], inputs, ["y"], {} if lengths is None else {"seqlens_k": lengths})


def test_group_query_attention_of_a_prompt(rt: nx.CudaRuntime) -> None:
    """Causal from the first key however much is padding: ``seqlens_k`` is the index of each last key."""
    rng = np.random.default_rng(5)
    last = np.array([5, 2], np.int32)
    engine = nx.Engine.from_onnx(rt, group_query_model(last, do_rotary=0, local_window_size=-1, softcap=0.0))
    arrays = {n: rng.standard_normal((2, h, 6, 8), np.float32) for n, h in (("query", 4), ("key", 2), ("value", 2))}
    y = engine.run(arrays)["y"].numpy()
    key, value = (np.repeat(arrays[name], 2, axis=1) for name in ("key", "value"))
    for batch, final in enumerate(last):
        for row in range(final + 1):
            scores = np.einsum("hd,hkd->hk", arrays["query"][batch, :, row], key[batch, :, : row + 1]) * 8**-0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            expected = np.einsum("hk,hkd->hd", weights, value[batch, :, : row + 1])
            np.testing.assert_allclose(y[batch, :, row], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"rank_3": True}, "'query' has rank 3; the kernel takes (batch, heads, sequence, head size)"),
        ({"extra": ("", "cos", "sin")}, "rotary embedding and head sinks are not served"),
        ({"extra": ("total",)}, "total_sequence_length 'total' must be an initializer"),
        ({"extra": ("", "", "", "", "bias"), "softcap": 1.0}, "attention_bias together with softcap"),
        ({"do_rotary": 1}, "do_rotary = 1 is not served"),
        ({"smooth_softmax": 1}, "smooth_softmax = 1 is not served"),
        ({"local_window_size": 4}, "local_window_size W means W keys in some releases of onnxruntime"),
    ],
)
def test_group_query_attention_that_the_kernel_does_not_compute_is_refused(
    rt: nx.CudaRuntime, model: dict[str, Any], reason: str
) -> None:
    with pytest.raises(nx.UnsupportedError) as refusal:
        nx.Engine.from_onnx(rt, group_query_model(**model))
    assert f"attend (com.microsoft::GroupQueryAttention): {reason}" in str(refusal.value)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (["query", "", "", "", "", "lens"], "query, key and value are packed into one tensor"),
        (["query", "key", "value", "pk", "pv", "lens"], "it has a past cache"),
        (["query", "key", "value", "", "", "lens"], "seqlens_k 'lens' must be an initializer"),
        (["query", "key", "value", *[""] * 9, "k_scale"], "it has 13 inputs; the operator has 12"),
    ],
)
def test_group_query_attention_in_other_forms_is_refused(rt: nx.CudaRuntime, inputs: list[str], reason: str) -> None:
    node = helper.make_node("GroupQueryAttention", inputs, ["y"], domain="com.microsoft", num_heads=2, kv_num_heads=2)
    declared = {name: (Type.FLOAT, (2, 2, 6, 8)) for name in inputs if name}
    with pytest.raises(nx.UnsupportedError) as refusal:
        nx.Engine.from_onnx(rt, model_of([node], declared, ["y"]))
    assert f"GroupQueryAttention 0 (com.microsoft::GroupQueryAttention): {reason}" in str(refusal.value)


def test_all_nodes_that_are_not_served_are_named(rt: nx.CudaRuntime) -> None:
    """With the reason of each, unknown operators among them."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="activate"),
        helper.make_node("Attention", ["a", "a", "a"], ["y", "k", "v"], name="attend"),
        helper.make_node("Gelu", ["a"], ["b"], domain="com.microsoft"),
    ]
    with pytest.raises(nx.UnsupportedError) as refusal:
        nx.Engine.from_onnx(rt, model_of(nodes, {"x": (Type.FLOAT, (1, 1, 4, 8))}, ["y", "b"]))
    assert str(refusal.value) == (
        "the ONNX model 'model' has nodes not served: activate (ai.onnx::Relu): there is no kernel for the operator; "
        "attend (ai.onnx::Attention): only its first output is served, and it has 3; "
        "Gelu 2 (com.microsoft::Gelu): there is no kernel for the operator"
    )


def test_an_attribute_outside_the_kernels_contract_is_refused(rt: nx.CudaRuntime) -> None:
    model = select_model(eps=1.0)
    engine = nx.Engine.from_onnx(rt, model)
    with pytest.raises(nx.UnsupportedError, match="attribute 'eps' is not part of the frozen v1 ABI"):
        engine.prepare({"q.0": 1, "S": 1, "k.0": 1, "w.0": 1, "bias.0": 1})


def undeclared(name: str) -> list[Any]:
    """The ways in which a model may say little of a tensor."""
    return [
        onnx.ValueInfoProto(name=name),
        helper.make_tensor_value_info(name, Type.FLOAT, None),
        helper.make_tensor_value_info(name, Type.UNDEFINED, ("N", 4, 6, 8)),
    ]


@pytest.mark.parametrize("how", [0, 1, 2])
def test_what_a_model_does_not_say_of_a_tensor_inside_is_no_rank(rt: nx.CudaRuntime, how: int) -> None:
    """Shape inference leaves it open where it does not know an operator."""
    model = attention_model()
    model.graph.node[0].output[0] = "hidden"
    model.graph.node.append(helper.make_node("Attention", ["hidden", "k", "v"], ["y"]))
    model.graph.value_info.append(undeclared("hidden")[how])
    assert nx.Engine.from_onnx(rt, model).run(query_key_value(1))["y"].shape == (1, 4, 6, 8)


@pytest.mark.parametrize("how", [0, 1, 2])
def test_an_input_needs_an_element_type_and_a_shape(rt: nx.CudaRuntime, how: int) -> None:
    model = attention_model()
    model.graph.input[0].CopyFrom(undeclared("q")[how])
    with pytest.raises(nx.EngineError, match="input 'q' of the ONNX model 'model' is declared without element type or"):
        nx.Engine.from_onnx(rt, model)


def test_a_model_is_read_from_a_file(rt: nx.CudaRuntime, tmp_path: Path) -> None:
    onnx.save(attention_model(), tmp_path / "model.onnx")
    for path in (tmp_path / "model.onnx", str(tmp_path / "model.onnx")):
        assert nx.Engine.from_onnx(rt, path).run(query_key_value(1))["y"].shape == (1, 4, 6, 8)


def test_what_is_no_model_is_refused(rt: nx.CudaRuntime, tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model at all")
    for name in ("text.onnx", "missing.onnx"):
        with pytest.raises(nx.EngineError, match=f"cannot read .*{name} as an ONNX model: "):
            nx.Engine.from_onnx(rt, tmp_path / name)
    serialised: Any = attention_model().SerializeToString()
    with pytest.raises(nx.EngineError, match="a model is a ModelProto or the path of one, got a bytes"):
        nx.Engine.from_onnx(rt, serialised)


def test_without_onnx_the_command_that_installs_it_is_named(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(nx.UnsupportedError, match=r"need the package onnx: pip install 'nxrt_cuda\[onnx\]'"):
        nx.Engine.from_onnx(rt, "model.onnx")
