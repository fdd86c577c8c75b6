"""What fused attention refuses, in which words, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.ops.attention import AttentionLaunchStats
from nxrt_cuda.testing import count
from tests.attention_cases import F16, AttentionCase, AttentionOperands, random_case

B, H, KVH, SQ, SK, D = 2, 6, 3, 4, 7, 8


@pytest.fixture
def case() -> AttentionCase:
    shape = {"batch": B, "heads": H, "kv_heads": KVH, "seq_q": SQ, "seq_k": SK, "head_dim": D}
    return random_case(1, F16, **shape, mask_planes=(B, H), total=[SK, SK], past=[0, 0])


# Attributes.

BAD_ATTRIBUTES = [
    ({"num_heads": 0}, "attribute 'num_heads' must be > 0, got 0"),
    ({"num_heads": 6.0}, "attribute 'num_heads' must be an integer, got 6.0"),
    ({"num_heads": 6, "q_num_heads": 5}, "num_heads 6 and q_num_heads 5 differ"),
    ({"kv_num_heads": -1}, "attribute 'kv_num_heads' must be > 0, got -1"),
    ({"is_causal": 2}, "attribute 'is_causal' must be 0 or 1, got 2"),
    ({"is_causal": True}, "attribute 'is_causal' must be an integer, got True"),
    ({"scale": 1}, "attribute 'scale' must be a float, got 1"),
    ({"scale": float("nan")}, "attribute 'scale' must be finite, got nan"),
    ({"scale": 1e60}, "attribute 'scale' must be finite, got inf"),
    ({"softcap": -1.0}, "attribute 'softcap' must be finite and >= 0, got -1.0"),
    ({"softcap": float("inf")}, "attribute 'softcap' must be finite and >= 0, got inf"),
    ({"softcap": "30"}, "attribute 'softcap' must be a float, got '30'"),
    ({"local_window_size": 1.5}, "attribute 'local_window_size' must be an integer, got 1.5"),
    ({"do_rotary": 1}, "attribute 'do_rotary' is not part of Attention as served here"),
]


@pytest.mark.parametrize(("attributes", "message"), BAD_ATTRIBUTES)
def test_attributes_are_refused_at_creation_and_by_the_claim_gate(
    rt: nx.CudaRuntime, attributes: dict[str, object], message: str
) -> None:
    """An ill-typed, out-of-range or unknown attribute makes no kernel object, and the gate says the same."""
    node = nx.Node("Attention", attributes=attributes)
    with pytest.raises(nx.KernelError) as refusal:
        nx.create_kernel(rt, node)
    assert str(refusal.value) == f"cuda_ep Attention: {message}"
    assert refusal.value.operand in attributes
    assert nx.unsupported_reason(node, [None] * 3, [None] * 3) == f"Attention: {message}"


@pytest.mark.parametrize("missing", ["num_heads", "kv_num_heads"])
def test_group_query_attention_requires_its_heads(rt: nx.CudaRuntime, missing: str) -> None:
    """com.microsoft's operator has two required attributes."""
    attributes = {name: 1 for name in ("num_heads", "kv_num_heads") if name != missing}
    with pytest.raises(nx.KernelError, match=f"GroupQueryAttention: missing required integer attribute '{missing}'"):
        nx.create_kernel(rt, nx.Node("GroupQueryAttention", "com.microsoft", attributes))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_heads": 5}, "attribute num_heads/query heads mismatch: 5 != 6"),
        ({"q_num_heads": 7}, "attribute num_heads/query heads mismatch: 7 != 6"),
        ({"kv_num_heads": 6}, "attribute kv_num_heads/key heads mismatch: 6 != 3"),
        ({"local_window_size": 2**31}, f"fused Attention: local_window {2**31} exceeds i32"),
    ],
)
def test_attributes_must_fit_the_operands(
    rt: nx.CudaRuntime, case: AttentionCase, attributes: dict[str, object], message: str
) -> None:
    """Head counts that the node states are those of the tensors."""
    refused(rt, case, message, node=nx.Node("Attention", attributes=attributes))


# Operands. Each entry changes one thing in a call that is right.


class Call:
    """Inputs and outputs of a call, to be spoilt."""

    def __init__(self, rt: nx.CudaRuntime, operands: AttentionOperands) -> None:
        self.rt = rt
        self.inputs = operands.inputs
        self.outputs = [operands.output]

    def put(self, index: int, shape: tuple[int, ...], dtype: object = nx.float16) -> None:
        """Another tensor as input ``index``."""
        self.inputs[index] = self.rt.zeros(shape, dtype)

    def put_kv(self, shape: tuple[int, ...]) -> None:
        self.put(1, shape)
        self.put(2, shape)

    def stride(self, index: int, strides: tuple[int, ...]) -> None:
        """Other strides for input ``index``, within memory that is large enough."""
        view = self.inputs[index]
        memory = self.rt.zeros((4 * B * H * SK * 16,), view.dtype)
        self.inputs[index] = nx.TensorMut(memory.ptr, nx.TensorMetadata(view.dtype, view.shape, strides), memory.owner)

    def free(self, index: int) -> None:
        view = self.inputs[index]
        self.inputs[index] = self.rt.zeros(view.shape, view.dtype)
        self.inputs[index].free()


NEITHER = "must be contiguous, or a narrow() of a contiguous [B, KVH, capacity, D] cache along dim 2"
CACHE = (KVH * SK * D, SK * D, D, 1)

BAD_OPERANDS: list[tuple[str, Callable[[Call], object], str]] = [
    # Count and presence.
    ("two inputs", lambda c: c.inputs.__delitem__(slice(2, None)), "required input 2 ('value') is absent"),
    ("no query", lambda c: c.inputs.__setitem__(0, None), "required input 0 ('query') is absent"),
    ("seven inputs", lambda c: c.inputs.append(None), "expected 3 to 6 inputs, got 7"),
    ("no output", lambda c: c.outputs.clear(), "expected 1 output, got 0"),
    ("two outputs", lambda c: c.outputs.append(c.outputs[0]), "expected 1 output, got 2"),
    # Rank.
    (
        "query rank",
        lambda c: c.put(0, (B, SQ, H * D)),
        "input 0 ('query') rank 3 unsupported; expected 4 (B, H, Sq, D)",
    ),
    (
        "key rank",
        lambda c: c.put(1, (B, SK, KVH * D)),
        "input 1 ('key') rank 3 unsupported; expected 4 (B, KVH, Sk, D)",
    ),
    ("value rank", lambda c: c.put(2, (B,)), "input 2 ('value') rank 1 unsupported; expected 4 (B, KVH, Sk, D)"),
    (
        "mask rank",
        lambda c: c.put(3, (B, SQ, SK)),
        "input 3 ('attn_mask') rank 3 does not say which planes it has; expected (Sq, Sk), (1 or B, 1, Sq, Sk) or "
        "(B, H, Sq, Sk)",
    ),
    # Dtype.
    (
        "key dtype",
        lambda c: c.put(1, (B, KVH, SK, D), nx.float32),
        "('key') dtype Float32 must match query dtype Float16",
    ),
    (
        "value dtype",
        lambda c: c.put(2, (B, KVH, SK, D), nx.bfloat16),
        "('value') dtype BFloat16 must match query dtype",
    ),
    (
        "mask dtype",
        lambda c: c.put(3, (SQ, SK), nx.float32),
        "('attn_mask') dtype Float32 must match query dtype Float16",
    ),
    ("bool mask", lambda c: c.put(3, (SQ, SK), nx.bool_), "('attn_mask') dtype Bool must match query dtype Float16"),
    (
        "total dtype",
        lambda c: c.put(4, (B,), nx.int64),
        "input 4 ('total_lengths') dtype Int64 unsupported; expected Int32",
    ),
    (
        "past dtype",
        lambda c: c.put(5, (B,), nx.int64),
        "input 5 ('past_lengths') dtype Int64 unsupported; expected Int32",
    ),
    (
        "output dtype",
        lambda c: c.outputs.__setitem__(0, c.rt.zeros((B, H, SQ, D), nx.float32)),
        "output 0 ('output') dtype Float32 must match query dtype Float16",
    ),
    # Relations of shapes.
    ("batch", lambda c: c.put_kv((1, KVH, SK, D)), "query/key batch mismatch: 2 != 1"),
    ("head_dim", lambda c: c.put_kv((B, KVH, SK, 9)), "query/key head_dim mismatch: 8 != 9"),
    (
        "key and value",
        lambda c: c.put(2, (B, KVH, SK - 1, D)),
        "key shape (2, 3, 7, 8) and value shape (2, 3, 6, 8) differ",
    ),
    ("group", lambda c: c.put_kv((B, 4, SK, D)), "num_heads 6 is not a multiple of kv_num_heads 4"),
    ("more key heads", lambda c: c.put_kv((B, 12, SK, D)), "num_heads 6 is not a multiple of kv_num_heads 12"),
    ("no heads", lambda c: c.put(0, (B, 0, SQ, D)), "num_heads is 0"),
    ("no key heads", lambda c: c.put_kv((B, 0, SK, D)), "kv_num_heads is 0"),
    ("no head_dim", lambda c: (c.put(0, (B, H, SQ, 0)), c.put_kv((B, KVH, SK, 0))), "head_dim is 0"),
    ("short mask", lambda c: c.put(3, (SQ, SK - 1)), "('attn_mask') shape (4, 6) does not broadcast to (2, 6, 4, 7)"),
    ("mask rows", lambda c: c.put(3, (1, SK)), "('attn_mask') shape (1, 7) does not broadcast to (2, 6, 4, 7)"),
    ("mask planes", lambda c: c.put(3, (3, 1, SQ, SK)), "shape (3, 1, 4, 7) does not broadcast to (2, 6, 4, 7)"),
    ("folded mask", lambda c: c.put(3, (B * H, 1, SQ, SK)), "shape (12, 1, 4, 7) does not broadcast to (2, 6, 4, 7)"),
    ("totals", lambda c: c.put(4, (B + 1,), nx.int32), "('total_lengths') shape (3,) unsupported; expected (2,)"),
    ("pasts", lambda c: c.put(5, (B, 1), nx.int32), "('past_lengths') shape (2, 1) unsupported; expected (2,)"),
    (
        "output shape",
        lambda c: c.outputs.__setitem__(0, c.rt.zeros((B, H, D, SQ), nx.float16)),
        "output 0 ('output') shape (2, 6, 8, 4) unsupported; expected (2, 6, 4, 8) (B, H, Sq, D)",
    ),
    # Strides.
    ("strided query", lambda c: c.stride(0, (H * SQ * D, D, H * D, 1)), "input 0 ('query') must be contiguous; shape"),
    ("strided mask", lambda c: c.stride(3, (0, 0, SK, 1)), "input 3 ('attn_mask') must be contiguous; shape"),
    ("strided lengths", lambda c: c.stride(4, (2,)), "input 4 ('total_lengths') must be contiguous; shape (2,)"),
    ("rows apart", lambda c: c.stride(1, (KVH * SK * 16, SK * 16, 16, 1)), f"input 1 ('key') {NEITHER}; shape"),
    ("heads inside rows", lambda c: c.stride(1, (SK * KVH * D, D, KVH * D, 1)), f"input 1 ('key') {NEITHER}"),
    ("batches apart", lambda c: c.stride(2, (9 * SK * D, SK * D, D, 1)), f"input 2 ('value') {NEITHER}"),
    ("broken plane", lambda c: c.stride(2, (KVH * 61, 61, D, 1)), f"input 2 ('value') {NEITHER}"),
    ("columns apart", lambda c: c.stride(1, (*CACHE[:3], 2)), f"input 1 ('key') {NEITHER}"),
    ("broadcast", lambda c: c.stride(1, (0, 0, D, 1)), "KV capacity 0 of input 1 ('key') is below its 7 keys"),
    (
        "capacity",
        lambda c: c.stride(1, (KVH * 5 * D, 5 * D, D, 1)),
        "KV capacity 5 of input 1 ('key') is below its 7 keys",
    ),
    (
        "capacities",
        lambda c: c.stride(2, (KVH * 9 * D, 9 * D, D, 1)),
        "KV capacity 7 of key and 9 of value differ",
    ),
    (
        "strided output",
        lambda c: c.outputs.__setitem__(0, c.rt.zeros((B, H, SQ + 1, D), nx.float16).narrow(2, 0, SQ)),
        "output 0 ('output') must be contiguous; shape",
    ),
    # Memory.
    ("freed value", lambda c: c.free(2), "input 2 ('value') was freed"),
    ("freed lengths", lambda c: c.free(4), "input 4 ('total_lengths') was freed"),
    (
        "query as output",
        lambda c: c.outputs.__setitem__(0, c.inputs[0]),
        "output 0 ('output') overlaps input 0 ('query')",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), [pytest.param(*row[1:], id=row[0]) for row in BAD_OPERANDS])
def test_operands_are_refused(
    rt: nx.CudaRuntime, case: AttentionCase, spoil: Callable[[Call], object], message: str
) -> None:
    """Nothing is launched, compiled or counted, and the next good call works."""
    refused(rt, case, message, spoil)


def test_operands_of_another_runtime_are_refused(rt: nx.CudaRuntime, case: AttentionCase) -> None:
    """Addresses mean nothing elsewhere."""
    with nx.open_runtime("host") as other:
        foreign = AttentionOperands(other, case)
        refused(
            rt,
            case,
            "input 1 ('key') belongs to another runtime, not to the kernel's",
            lambda call: call.inputs.__setitem__(1, foreign.inputs[1]),
        )
        foreign.inputs.clear()


def refused(
    rt: nx.CudaRuntime,
    case: AttentionCase,
    message: str,
    spoil: Callable[[Call], object] = lambda call: None,
    node: nx.Node | None = None,
) -> None:
    """The call is refused with ``message`` by a warmed and by a fresh kernel, and leaves no trace."""
    warmed = nx.create_kernel(rt, case.node)
    good = AttentionOperands(rt, case)
    warmed.execute(good.inputs, [good.output])
    before = warmed.launch_stats()
    operands = AttentionOperands(rt, case)
    call = Call(rt, operands)
    spoil(call)
    fresh = nx.create_kernel(rt, node or case.node)
    with count(rt) as seen:
        for kernel in (fresh,) if node else (fresh, warmed):
            with pytest.raises(nx.KernelError) as refusal:
                kernel.execute(call.inputs, call.outputs)
            assert str(refusal.value).startswith("cuda_ep Attention: ")
            assert message in str(refusal.value)
    assert (seen.launches, seen.compiles) == (0, 0)
    assert fresh.launch_stats() == AttentionLaunchStats()
    assert warmed.launch_stats() == before
    warmed.execute(good.inputs, [good.output])


# What is well formed, and not served.


@pytest.mark.parametrize("seq_q", [4, 1])
def test_head_sizes_beyond_128_are_not_served(rt: nx.CudaRuntime, seq_q: int) -> None:
    """The message is the support gate's, at a call and from the claim gate."""
    case = random_case(1, F16, seq_q=seq_q, seq_k=5, head_dim=129)
    message = f"fused Attention requires seq_q > 1 and head_dim <= 128; got seq_q={seq_q}, head_dim=129"
    kernel, operands = nx.create_kernel(rt, case.node), AttentionOperands(rt, case)
    with pytest.raises(nx.UnsupportedError) as refusal:
        kernel.execute(operands.inputs, [operands.output])
    assert str(refusal.value) == f"cuda_ep Attention: {message}"
    shapes = [array.shape for array in (case.query, case.key, case.value)]
    assert nx.unsupported_reason(case.node, shapes, [nx.float16] * 3) == f"Attention: {message}"


def test_other_element_types_are_not_served(rt: nx.CudaRuntime) -> None:
    """float64 and integers have no kernel; the message says what has."""
    message = "fused Attention dtype Float64 (supported: Float32, Float16, BFloat16)"
    tensors = [rt.zeros((1, 1, 2, 4), nx.float64) for _ in range(4)]
    kernel = nx.create_kernel(rt, nx.Node("Attention"))
    with pytest.raises(nx.UnsupportedError) as refusal:
        kernel.execute(tensors[:3], tensors[3:])
    assert str(refusal.value) == f"cuda_ep Attention: {message}"
    reason = nx.unsupported_reason(nx.Node("Attention"), [(1, 1, 2, 4)] * 3, [nx.float64] * 3)
    assert reason == f"Attention: {message}"


def test_nan_in_an_operand_is_a_value(rt: nx.CudaRuntime, case: AttentionCase) -> None:
    """Contents are not checked on the host: NaN goes where the arithmetic takes it."""
    query = np.full(case.query.shape, np.nan, np.float16)
    visible = replace(case, query=query, mask=None)
    kernel, operands = nx.create_kernel(rt, visible.node), AttentionOperands(rt, visible)
    kernel.execute(operands.inputs, [operands.output])
    assert np.isnan(operands.result()).all()


# The claim gate.


@pytest.mark.parametrize(
    ("shapes", "dtypes", "reason"),
    [
        ([(B, H, SQ, D), (B, KVH, SK, D), (B, KVH, SK, D)], [nx.float16] * 3, None),
        ([(B, H, SQ, D), (B, KVH, SK, D), (B, KVH, SK, D), None, (B,)], [nx.float16] * 3, None),
        ([(B, H, SQ, D), None, None], [nx.float16], None),
        ([], [], None),
        ([(B, H, SQ, D), (B, 4, SK, D), (B, 4, SK, D)], [], "num_heads 6 is not a multiple of kv_num_heads 4"),
        (
            [(B, H, D), (B, H, SK, D), (B, H, SK, D)],
            [],
            "input 0 ('query') rank 3 unsupported; expected 4 (B, H, Sq, D)",
        ),
        (
            [(B, H, SQ, D), (B, KVH, SK, D), (B, KVH, SK, D)],
            [nx.float16, nx.float32],
            "input 1 ('key') dtype Float32 must match query dtype Float16",
        ),
        (
            [(B, H, SQ, D), (B, KVH, SK, D), (B, KVH, SK, D), None, (B,)],
            [nx.float16, None, None, None, nx.int64],
            "input 4 ('total_lengths') dtype Int64 unsupported; expected Int32",
        ),
    ],
)
def test_the_claim_gate_judges_what_is_known(
    shapes: list[tuple[int, ...] | None], dtypes: list[nx.DataType | None], reason: str | None
) -> None:
    """It needs no runtime, and does not hold the unknown against the node."""
    expected = reason if reason is None else f"Attention: {reason}"
    assert nx.unsupported_reason(nx.Node("Attention", "ai.onnx"), shapes, dtypes) == expected
