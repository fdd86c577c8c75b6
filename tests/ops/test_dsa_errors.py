"""What DsaIndexSelect refuses, in which words, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.driver.host import HostDriver
from nxrt_cuda.ops.dsa_index_select import DsaIndexSelectFactory
from tests.dsa_cases import DTYPES, DsaCase, DsaOperands, random_case
from tests.small_kernels import open_on

SHAPE = {"batch": 2, "q_seq": 3, "heads": 4, "head_dim": 6, "key_seq": 10}
B, S, H, D, T, K = 2, 3, 4, 6, 10, 5

SHAPES = [(B, S, H, D), (B, T, D), (B, S, H), (B, 1, S, T)]


@pytest.fixture
def case() -> DsaCase:
    return random_case(1, DTYPES[1], **SHAPE, top_k=K)


def node(**attributes: object) -> nx.Node:
    return nx.Node("DsaIndexSelect", "pkg.nxrt", {"top_k": K, "scale": 0.5, **attributes})


# Attributes.

BAD_ATTRIBUTES = [
    ({"top_k": None}, "missing required integer attribute 'top_k'"),
    ({"top_k": 0}, "attribute 'top_k' must be > 0, got 0"),
    ({"top_k": -1}, "attribute 'top_k' must be > 0, got -1"),
    ({"top_k": 2.0}, "attribute 'top_k' must be an integer, got 2.0"),
    ({"top_k": True}, "attribute 'top_k' must be an integer, got True"),
    ({"top_k": "5"}, "attribute 'top_k' must be an integer, got '5'"),
    ({"top_k": 2**63}, f"attribute 'top_k' must fit i64, got {2**63}"),
    ({"scale": None}, "missing required float attribute 'scale'"),
    ({"scale": 1}, "attribute 'scale' must be a float, got 1"),
    ({"scale": "1"}, "attribute 'scale' must be a float, got '1'"),
    ({"scale": 0.0}, "attribute 'scale' must be finite and > 0, got 0.0"),
    ({"scale": -0.5}, "attribute 'scale' must be finite and > 0, got -0.5"),
    ({"scale": float("nan")}, "attribute 'scale' must be finite and > 0, got nan"),
    ({"scale": float("inf")}, "attribute 'scale' must be finite and > 0, got inf"),
    ({"scale": 1e-60}, "attribute 'scale' must be finite and > 0, got 0.0"),
    ({"scale": 1e60}, "attribute 'scale' must be finite and > 0, got inf"),
    ({"weights_scale": 1}, "attribute 'weights_scale' must be a float, got 1"),
    ({"weights_scale": 0.0}, "attribute 'weights_scale' must be finite and > 0, got 0.0"),
    ({"weights_scale": float("inf")}, "attribute 'weights_scale' must be finite and > 0, got inf"),
    ({"topk": 5}, "attribute 'topk' is not part of the frozen v1 ABI"),
    # The known attributes are read before unknown ones are refused.
    ({"scale": 0.0, "topk": 5}, "attribute 'scale' must be finite and > 0, got 0.0"),
]


def with_attributes(changes: dict[str, object]) -> nx.Node:
    attributes = {"top_k": K, "scale": 0.5, **changes}
    return nx.Node("DsaIndexSelect", "pkg.nxrt", {name: v for name, v in attributes.items() if v is not None})


@pytest.mark.parametrize(("changes", "message"), BAD_ATTRIBUTES)
def test_attributes_are_refused_at_creation(rt: nx.CudaRuntime, changes: dict[str, object], message: str) -> None:
    """A missing, ill-typed, out-of-range or unknown attribute makes no kernel object."""
    with pytest.raises(nx.KernelError) as refusal:
        nx.create_kernel(rt, with_attributes(changes))
    assert str(refusal.value) == f"cuda_ep DsaIndexSelect: {message}"
    assert refusal.value.operand in ("top_k", "scale", "weights_scale", "topk")


@pytest.mark.parametrize(("changes", "message"), BAD_ATTRIBUTES)
def test_attributes_are_refused_by_the_claim_gate(changes: dict[str, object], message: str) -> None:
    """The gate gives the same reason without a runtime."""
    reason = nx.unsupported_reason(with_attributes(changes), SHAPES, [nx.float16] * 3 + [nx.float32])
    assert reason == f"DsaIndexSelect: {message}"


def test_weights_scale_defaults_to_one(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """Left out, it is the same as 1.0."""
    operands = DsaOperands(rt, case)
    results = []
    for attributes in ({}, {"weights_scale": 1.0}):
        nx.create_kernel(rt, node(**attributes)).execute(operands.inputs, [operands.output])
        results.append(operands.selected())
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("limit", [0, -3])
def test_grid_limit_must_be_positive(rt: nx.CudaRuntime, limit: int) -> None:
    """A grid of nothing would select nothing."""
    with pytest.raises(nx.KernelError, match="test grid limit must be greater than zero"):
        DsaIndexSelectFactory(rt).create_kernel_with_grid_limit(node(), limit)


# Shapes: the claim gate and execute agree.

BAD_SHAPES = [
    (0, (B, S, H * D), "input 0 ('query') rank 3 unsupported; expected 4 (B, S, H, D)", "query"),
    (1, (B, 1, T, D), "input 1 ('key') rank 4 unsupported; expected 3 (B, T, D)", "key"),
    (2, (B, S, H, 1), "input 2 ('weights') rank 4 unsupported; expected 3 (B, S, H)", "weights"),
    (3, (B, S, T), "input 3 ('attention_bias') rank 3 unsupported; expected 4 (B, 1, S, T)", "attention_bias"),
    (1, (B + 1, T, D), "query/key batch mismatch: 2 != 3", "key"),
    (2, (1, S, H), "query/weights batch mismatch: 2 != 1", "weights"),
    (3, (1, 1, S, T), "query/bias batch mismatch: 2 != 1", "attention_bias"),
    (2, (B, S + 1, H), "query/weights seq mismatch: 3 != 4", "weights"),
    (2, (B, S, H - 1), "query/weights heads mismatch: 4 != 3", "weights"),
    (1, (B, T, D + 2), "query/key head_dim mismatch: 6 != 8", "key"),
    (3, (B, 2, S, T), "input 3 ('attention_bias') dim 1 must be 1 (head-broadcast), got 2", "attention_bias"),
    (3, (B, 1, S + 1, T), "bias/query seq mismatch: 3 != 4", "attention_bias"),
    (3, (B, 1, S, T - 1), "bias/key seq mismatch: 10 != 9", "attention_bias"),
]


@pytest.mark.parametrize(("index", "shape", "message", "operand"), BAD_SHAPES)
def test_shapes_that_do_not_fit(
    rt: nx.CudaRuntime, case: DsaCase, index: int, shape: tuple[int, ...], message: str, operand: str
) -> None:
    """Ranks and relations between the inputs."""
    wrong = rt.zeros(shape, nx.float32 if index == 3 else nx.float16)
    refuses(rt, case, message, operand, lambda inputs, output: (replaced(inputs, index, wrong), [output]))


@pytest.mark.parametrize(("index", "shape", "message", "operand"), BAD_SHAPES)
def test_shapes_are_refused_by_the_claim_gate(index: int, shape: tuple[int, ...], message: str, operand: str) -> None:
    """The gate gives the same reason from shapes alone."""
    wrong = replaced(SHAPES, index, shape)
    assert nx.unsupported_reason(node(), wrong, [nx.float16] * 3 + [nx.float32]) == f"DsaIndexSelect: {message}"


@pytest.mark.parametrize("axis", ["heads", "head_dim"])
def test_nothing_to_score_with(rt: nx.CudaRuntime, case: DsaCase, axis: str) -> None:
    """H = 0 and D = 0 are errors: the scores would be the biases alone."""
    empty = random_case(1, DTYPES[1], **{**SHAPE, axis: 0}, top_k=K)
    inputs = DsaOperands(rt, empty).inputs
    message = f"query {axis} must be > 0, got 0: there is nothing to score with"
    refuses(rt, case, message, "query", lambda _, output: (inputs, [output]))
    shapes = [array.shape for array in empty.inputs]
    assert nx.unsupported_reason(node(), shapes, [nx.float16] * 3 + [nx.float32]) == f"DsaIndexSelect: {message}"


def test_output_shape(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """The output is as wide as top_k says."""
    narrow = rt.zeros((B, 1, S, K - 1), nx.int64)
    message = "output 0 ('selected_indices') shape [2, 1, 3, 4] unsupported; expected [2, 1, 3, 5] (B, 1, S, top_k)"
    refuses(rt, case, message, "selected_indices", lambda inputs, _: (inputs, [narrow]))


@pytest.mark.parametrize("known", [(), (0,), (0, 1, 3), (2, 3)])
def test_the_claim_gate_holds_nothing_unknown_against_a_node(known: tuple[int, ...]) -> None:
    """Unknown shapes and dtypes are None; the query's dtype has to be known."""
    shapes = [shape if index in known else None for index, shape in enumerate(SHAPES)]
    assert nx.unsupported_reason(node(), shapes, [nx.bfloat16]) is None
    assert nx.unsupported_reason(node(), shapes, [nx.bfloat16, None, nx.bfloat16, None]) is None


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        ([], "query dtype Undefined unsupported on CUDA (expected f32, f16, or bf16)"),
        ([None], "query dtype Undefined unsupported on CUDA (expected f32, f16, or bf16)"),
        ([nx.float64] * 4, "query dtype Float64 unsupported on CUDA (expected f32, f16, or bf16)"),
        ([nx.float16, nx.float32], "query, key, and weights must use the same floating dtype on CUDA"),
        ([nx.float16, nx.float16, nx.bfloat16], "query, key, and weights must use the same floating dtype on CUDA"),
        ([nx.float16] * 4, "input 3 ('attention_bias') dtype Float16 unsupported; expected Float32"),
    ],
)
def test_dtypes_are_refused_by_the_claim_gate(dtypes: Sequence[nx.DataType | None], reason: str) -> None:
    """One floating dtype for query, key and weights; the bias is f32, because its fill is."""
    assert nx.unsupported_reason(node(), SHAPES, dtypes) == f"DsaIndexSelect: {reason}"


def test_the_claim_gate_counts_inputs() -> None:
    """No input is optional."""
    assert nx.unsupported_reason(node(), SHAPES[:3], [nx.float16] * 3) == "DsaIndexSelect: expected 4 inputs, got 3"


# Operands.


def test_operand_counts(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """Four inputs, none of them absent, and one output."""
    refuses(rt, case, "expected 4 inputs, got 3", None, lambda inputs, output: (inputs[:3], [output]))
    refuses(rt, case, "expected 1 output, got 0", None, lambda inputs, _: (inputs, []))
    refuses(rt, case, "expected 1 output, got 2", None, lambda inputs, output: (inputs, [output, output]))
    for index, name in enumerate(("query", "key", "weights", "attention_bias")):
        refuses(
            rt,
            case,
            f"required input {index} ('{name}') is absent",
            name,
            lambda inputs, output, index=index: (replaced(inputs, index, None), [output]),
        )


def test_dtypes(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """Each operand's dtype, and which was expected."""
    for index, dtype, message, operand in (
        (0, nx.float64, "input 0 ('query') dtype Float64 unsupported; expected Float32, Float16, or BFloat16", "query"),
        (1, nx.bfloat16, "input 1 ('key') dtype BFloat16 must match query dtype Float16", "key"),
        (2, nx.float32, "input 2 ('weights') dtype Float32 must match query dtype Float16", "weights"),
        (3, nx.float16, "input 3 ('attention_bias') dtype Float16 unsupported; expected Float32", "attention_bias"),
    ):
        wrong = rt.zeros(SHAPES[index], dtype)
        refuses(
            rt,
            case,
            message,
            operand,
            lambda inputs, output, index=index, wrong=wrong: (replaced(inputs, index, wrong), [output]),
        )
    narrow = rt.zeros((B, 1, S, K), nx.int32)
    message = "output 0 ('selected_indices') dtype Int32 unsupported; expected Int64"
    refuses(rt, case, message, "selected_indices", lambda inputs, _: (inputs, [narrow]))


def test_strides(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """Every operand is contiguous; a broadcast bias (stride 0) is refused too."""
    strided_key = rt.zeros((B, T, 2 * D), nx.float16).narrow(2, 0, D)
    message = f"input 1 ('key') must be contiguous, got strides [{2 * T * D}, {2 * D}, 1]"
    refuses(rt, case, message, "key", lambda inputs, output: (replaced(inputs, 1, strided_key), [output]))

    one_row = rt.zeros((T,), nx.float32)
    broadcast = nx.TensorView(one_row.ptr, nx.TensorMetadata(nx.float32, (B, 1, S, T), (0, 0, 0, 1)), one_row.owner)
    message = "input 3 ('attention_bias') must be contiguous, got strides [0, 0, 0, 1]"
    refuses(rt, case, message, "attention_bias", lambda inputs, output: (replaced(inputs, 3, broadcast), [output]))

    strided = rt.zeros((B, 1, S, 2 * K), nx.int64).narrow(3, 0, K)
    message = f"output 0 ('selected_indices') must be contiguous, got strides [{2 * S * K}, {2 * S * K}, {2 * K}, 1]"
    refuses(rt, case, message, "selected_indices", lambda inputs, _: (inputs, [strided]))


def test_freed_memory(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """A freed input or output is named before anything is launched."""
    freed = rt.zeros(SHAPES[1], nx.float16)
    freed.free()
    refuses(
        rt,
        case,
        f"input 1 ('key') was freed: {freed!r}",
        "key",
        lambda inputs, output: (replaced(inputs, 1, freed), [output]),
    )
    gone = rt.zeros((B, 1, S, K), nx.int64)
    gone.free()
    name, operand = "output 0 ('selected_indices')", "selected_indices"
    refuses(rt, case, f"{name} was freed: {gone!r}", operand, lambda inputs, _: (inputs, [gone]))


def test_memory_of_another_runtime(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """Two runtimes do not order their work, so their tensors do not mix."""
    with nx.open_runtime("host") as other:
        foreign = other.zeros(SHAPES[2], nx.float16)
        name, operand = "input 2 ('weights')", "weights"
        message = f"{name} belongs to another runtime, not to the kernel's: {foreign!r}"
        refuses(rt, case, message, operand, lambda inputs, output: (replaced(inputs, 2, foreign), [output]))


def test_an_element_aligned_address_is_enough(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """Tensors may start at any element of an allocation, and move there between calls."""
    kernel = nx.create_kernel(rt, case.node)
    for aligned in (True, False, True):
        operands = DsaOperands(rt, case, aligned=aligned)
        kernel.execute(operands.inputs, [operands.output])
        np.testing.assert_array_equal(operands.selected(), case.expected)


def test_a_read_only_output(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """A TensorView is an input."""
    memory = rt.zeros((B, 1, S, K), nx.int64)
    view = nx.TensorView(memory.ptr, memory.metadata, memory.owner)
    name, operand = "output 0 ('selected_indices')", "selected_indices"
    message = f"{name} is read-only; an output is a TensorMut, got {view!r}"
    refuses(rt, case, message, operand, lambda inputs, _: (inputs, [view]))


def test_an_output_that_overlaps_an_input(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """Indices may not be written over what they are computed from."""
    memory = rt.zeros((4096,), nx.uint8)
    bias = nx.TensorView(memory.ptr, nx.TensorMetadata(nx.float32, SHAPES[3]), memory.owner)
    output = nx.TensorMut(memory.ptr + bias.nbytes - 8, nx.TensorMetadata(nx.int64, (B, 1, S, K)), memory.owner)
    name, operand = "output 0 ('selected_indices')", "selected_indices"
    message = f"{name} overlaps input 3 ('attention_bias'): {output!r} and {bias!r}"
    refuses(rt, case, message, operand, lambda inputs, _: (replaced(inputs, 3, bias), [output]))


def test_neighbours_in_one_allocation_do_not_overlap(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """An output may begin where an input ends."""
    memory = rt.zeros((4096,), nx.uint8)
    bias = nx.TensorMut(memory.ptr, nx.TensorMetadata(nx.float32, SHAPES[3]), memory.owner)
    output = nx.TensorMut(memory.ptr + bias.nbytes, nx.TensorMetadata(nx.int64, (B, 1, S, K)), memory.owner)
    bias.copy_from(case.bias)
    inputs = [*DsaOperands(rt, case).inputs[:3], bias]
    nx.create_kernel(rt, case.node).execute(inputs, [output])
    np.testing.assert_array_equal(output.numpy(), case.expected)


def test_validation_order(rt: nx.CudaRuntime, case: DsaCase) -> None:
    """Of several faults, dtypes are named before strides, and strides before shapes."""
    bias = rt.zeros((B, 2, S, 2 * T), nx.float16)
    strided = bias.narrow(3, 0, T)
    contiguous = rt.zeros((B, 2, S, T), nx.float32)
    for wrong, message in (
        (strided, "input 3 ('attention_bias') dtype Float16 unsupported; expected Float32"),
        (rt.zeros((B, 2, S, 2 * T), nx.float32).narrow(3, 0, T), "input 3 ('attention_bias') must be contiguous"),
        (contiguous, "input 3 ('attention_bias') dim 1 must be 1 (head-broadcast), got 2"),
    ):
        operands = DsaOperands(rt, case)
        with pytest.raises(nx.KernelError) as refusal:
            nx.create_kernel(rt, case.node).execute(replaced(operands.inputs, 3, wrong), [operands.output])
        assert str(refusal.value).startswith(f"cuda_ep DsaIndexSelect: {message}")


Spoil = Callable[[list, nx.TensorMut], tuple[Sequence, Sequence]]


def refuses(rt: nx.CudaRuntime, case: DsaCase, message: str, operand: str | None, spoil: Spoil) -> None:
    """Executing with spoilt operands raises exactly ``message``, on a fresh and on a warmed kernel object,
    and leaves counters, workspace and output as they were."""
    for warmed in (False, True):
        kernel, operands = nx.create_kernel(rt, case.node), DsaOperands(rt, case)
        if warmed:
            kernel.execute(operands.inputs, [operands.output])
            operands.clear()
        before = kernel.launch_stats(), kernel.workspace_stats(), rt.stats().launches, bool(kernel.capture_support())
        untouched = operands.selected()
        inputs, outputs = spoil(operands.inputs, operands.output)
        with pytest.raises(nx.KernelError) as refusal:
            kernel.execute(inputs, outputs)
        assert str(refusal.value) == f"cuda_ep DsaIndexSelect: {message}"
        assert (refusal.value.op, refusal.value.operand) == ("DsaIndexSelect", operand)
        assert before == (
            kernel.launch_stats(),
            kernel.workspace_stats(),
            rt.stats().launches,
            bool(kernel.capture_support()),
        )
        np.testing.assert_array_equal(operands.selected(), untouched)


def replaced(values: Sequence, index: int, value: object) -> list:
    """A copy of ``values`` with another item at ``index``."""
    return [value if i == index else item for i, item in enumerate(values)]


def test_metadata_is_checked_like_operands(rt: nx.CudaRuntime) -> None:
    """workspace_requirement refuses what execute would, overflow included."""
    kernel = nx.create_kernel(rt, node())
    metadata = [nx.TensorMetadata(nx.float16, shape) for shape in SHAPES]
    with pytest.raises(nx.KernelError, match="bias/key seq mismatch: 10 != 11"):
        kernel.workspace_requirement([*metadata[:3], replace(metadata[3], shape=(B, 1, S, T + 1), strides=())])
    huge = 2**60
    shapes = [(huge, 1, 1, 1), (huge, 8, 1), (huge, 1, 1), (huge, 1, 1, 8)]
    with pytest.raises(nx.KernelError, match="score workspace byte count overflow"):
        kernel.workspace_requirement([nx.TensorMetadata(nx.float16, shape) for shape in shapes])


def test_a_device_without_warp_reductions_is_refused() -> None:
    """Before anything is compiled; __reduce_add_sync came with compute capability 8.0."""
    turing = HostDriver({}, attributes={"COMPUTE_CAPABILITY_MAJOR": 7, "COMPUTE_CAPABILITY_MINOR": 5})
    node = nx.Node("DsaIndexSelect", "pkg.nxrt", {"top_k": 1, "scale": 1.0})
    with open_on(turing) as rt, pytest.raises(nx.UnsupportedError, match=r"capability 8\.0 or later; .* has 7\.5"):
        nx.create_kernel(rt, node)
