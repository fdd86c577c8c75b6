"""Executions of a layout that was executed before take a short way, shorter with the operands of the one before."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.reference.attention import attention
from tests import attention_cases, dsa_cases


def attention_operands(rt: nx.CudaRuntime) -> tuple[list[np.ndarray], list[nx.TensorMut], nx.TensorMut]:
    rng = np.random.default_rng(5)
    arrays = [rng.standard_normal((1, 2, 3, 8)).astype(np.float32) for _ in range(3)]
    return arrays, [rt.from_array(array) for array in arrays], rt.empty((1, 2, 3, 8), nx.float32)


def execute_twice(kernel: nx.Kernel, inputs: Sequence[nx.TensorView | None], outputs: Sequence[nx.TensorMut]) -> None:
    """From now on, the same operands are known: once an output has come again, all operands are noted."""
    kernel.execute(inputs, outputs)
    kernel.execute(inputs, outputs)


def operands_of(op: str, rt: nx.CudaRuntime) -> tuple[nx.Kernel, list[Any], nx.TensorMut, int]:
    """A kernel, inputs, an output, and how many launches an execution makes."""
    if op == "Attention":
        _, inputs, out = attention_operands(rt)
        return nx.create_kernel(rt, nx.Node("Attention")), list(inputs), out, 1
    case = dsa_cases.random_case(1, np.dtype(np.float32), q_seq=3, heads=2, head_dim=8, key_seq=20, top_k=5)
    operands = dsa_cases.DsaOperands(rt, case)
    return nx.create_kernel(rt, case.node), list(operands.inputs), operands.output, 2


OPS = pytest.mark.parametrize("op", ["Attention", "DsaIndexSelect"])


@OPS
def test_new_tensors_of_a_layout_that_was_executed_launch_what_it_did(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """Every one is computed from its own, without the long way."""
    kernel, inputs, out, launches = operands_of(op, rt)
    kernel.execute(inputs, [out])
    expected = out.numpy()
    monkeypatch.setattr(kernel, "_bind", None)
    before = rt.stats()
    for _ in range(3):
        others = [rt.from_array(view.numpy()) for view in inputs]
        result = rt.zeros(out.shape, out.dtype)
        kernel.execute(others, [result])
        np.testing.assert_array_equal(result.numpy(), expected)
    assert rt.stats().since(before).launches == 3 * launches
    assert kernel.launch_stats().executions == 4
    with pytest.raises(TypeError, match="not callable"):
        kernel.execute(inputs, [rt.empty((9,), out.dtype)])


@OPS
def test_the_short_way_checks_memory_as_the_long_one_does(rt: nx.CudaRuntime, op: str) -> None:
    """Nothing is launched or counted, and what comes next is right."""
    kernel, inputs, out, _ = operands_of(op, rt)
    kernel.execute(inputs, [out])
    expected = out.numpy()
    freed = rt.from_array(inputs[1].numpy())
    freed.free()
    read_only = nx.TensorView(out.ptr, out.metadata, out.owner)
    before = rt.stats()
    with pytest.raises(nx.KernelError, match=r"input 1 \('key'\) was freed"):
        kernel.execute([inputs[0], freed, *inputs[2:]], [out])
    with pytest.raises(nx.KernelError, match=r"output 0 \('\w+'\) is read-only"):
        kernel.execute(inputs, [read_only])  # type: ignore[list-item]
    with nx.open_runtime("host") as elsewhere:
        foreign = elsewhere.from_array(inputs[0].numpy())
        with pytest.raises(nx.KernelError, match=r"input 0 \('query'\) belongs to another runtime"):
            kernel.execute([foreign, *inputs[1:]], [out])
    assert rt.stats().since(before).launches == 0
    assert kernel.launch_stats().executions == 1
    kernel.execute(inputs, [out])
    np.testing.assert_array_equal(out.numpy(), expected)


def test_an_output_that_is_an_input_too_is_refused_on_either_way(rt: nx.CudaRuntime) -> None:
    _, inputs, out = attention_operands(rt)
    kernel = nx.create_kernel(rt, nx.Node("Attention"))
    for _ in range(2):
        with pytest.raises(nx.KernelError, match=r"output 0 \('output'\) overlaps input 1 \('key'\)"):
            kernel.execute(inputs, [inputs[1]])
        kernel.execute(inputs, [out])


@OPS
def test_a_layout_whose_first_launches_failed_takes_the_long_way_again(rt: nx.CudaRuntime, op: str) -> None:
    """Its launches were never all made ready."""
    kernel, inputs, out, launches = operands_of(op, rt)
    for failing in range(1, launches + 1):
        with rt._driver.fail_call(failing, call="launch_kernel"), pytest.raises(nx.DriverError):
            kernel.execute(inputs, [out])
    before = rt.stats()
    kernel.execute(inputs, [out])
    kernel.execute(inputs, [out])
    assert rt.stats().since(before).launches == 2 * launches
    assert kernel.launch_stats().executions == 2


@OPS
def test_the_third_execution_on_the_same_tensors_checks_and_binds_nothing(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """And neither does any later one; it launches, counts and computes as the others did."""
    kernel, inputs, out, launches = operands_of(op, rt)
    execute_twice(kernel, inputs, [out])
    expected = out.numpy()
    rt.fill_zero(out)
    monkeypatch.setattr(kernel, "_rebind", None)
    before = rt.stats()
    for _ in range(3):
        kernel.execute(tuple(inputs), (out,))
    assert rt.stats().since(before).launches == 3 * launches
    assert kernel.launch_stats().executions == 5
    np.testing.assert_array_equal(out.numpy(), expected)
    for others in ([*inputs[:-1], inputs[-1].reshape(inputs[-1].shape)], inputs[:-1]):
        with pytest.raises(TypeError, match="not callable"):
            kernel.execute(others, [out])


def test_a_mask_that_was_dropped_is_not_taken_for_an_absent_one(rt: nx.CudaRuntime) -> None:
    """Its memory is back in the pool; the next call without a mask is unmasked."""
    arrays, tensors, out = attention_operands(rt)
    kernel = nx.create_kernel(rt, nx.Node("Attention"))
    mask = rt.from_array(np.array([[0, -np.inf, 0]] * 3, np.float32))
    execute_twice(kernel, [*tensors, mask], [out])
    masked = out.numpy()
    del mask
    gc.collect()
    kernel.execute([*tensors, None], [out])
    expected = attention(*arrays, scale=8**-0.5)
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-6)
    assert not np.allclose(out.numpy(), masked)


def test_inputs_and_outputs_are_not_taken_for_one_list(rt: nx.CudaRuntime) -> None:
    """The same objects, split elsewhere, are refused as at the first call."""
    _, tensors, out = attention_operands(rt)
    kernel = nx.create_kernel(rt, nx.Node("Attention"))
    execute_twice(kernel, tensors, [out])
    with pytest.raises(nx.KernelError, match="expected 1 output, got 0"):
        kernel.execute([*tensors, out], [])

    selected = rt.empty((1, 1, 2, 3), nx.int64)
    shapes = ((1, 2, 1, 4), (1, 5, 4), (1, 2, 1), (1, 1, 2, 5))
    operands = [rt.zeros(shape, nx.float32) for shape in shapes]
    select = nx.create_kernel(rt, nx.Node("DsaIndexSelect", "pkg.nxrt", {"top_k": 3, "scale": 1.0}))
    execute_twice(select, operands, [selected])
    with pytest.raises(nx.KernelError, match="expected 4 inputs, got 5"):
        select.execute([*operands, selected], [])


def test_memory_freed_since_is_noticed(rt: nx.CudaRuntime) -> None:
    _, tensors, out = attention_operands(rt)
    kernel = nx.create_kernel(rt, nx.Node("Attention"))
    execute_twice(kernel, tensors, [out])
    tensors[1].free()
    with pytest.raises(nx.KernelError, match=r"input 1 \('key'\) was freed"):
        kernel.execute(tensors, [out])
    assert kernel.launch_stats().executions == 2


def test_operands_are_not_kept_alive(rt: nx.CudaRuntime) -> None:
    """Dropping them gives their memory back."""
    _, tensors, out = attention_operands(rt)
    kernel = nx.create_kernel(rt, nx.Node("Attention"))
    execute_twice(kernel, tensors, [out])
    rt.synchronize()
    before = rt.stats().pool_retained_bytes
    del tensors, out
    gc.collect()
    rt.zeros((1,), nx.float32)
    assert rt.stats().pool_retained_bytes > before


@pytest.mark.parametrize("dtype", attention_cases.DTYPES, ids=lambda d: d.name)
def test_attention_after_a_failed_launch_of_other_operands_uses_its_own(rt: nx.CudaRuntime, dtype: np.dtype) -> None:
    """The launch that failed had taken the addresses of the others, in the same layout."""
    case = attention_cases.random_case(1, dtype, heads=2, seq_q=3, seq_k=5, head_dim=16)
    ours, others = (attention_cases.AttentionOperands(rt, case) for _ in range(2))
    kernel = nx.create_kernel(rt, case.node)
    execute_twice(kernel, ours.inputs, [ours.output])
    untouched = others.result()
    ours.clear()
    with rt._driver.fail_call(call="launch_kernel"), pytest.raises(nx.DriverError):
        kernel.execute(others.inputs, [others.output])
    kernel.execute(ours.inputs, [ours.output])
    attention_cases.check_case(ours.result(), case)
    np.testing.assert_array_equal(others.result(), untouched)


@pytest.mark.parametrize("dtype", dsa_cases.DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("failing", [1, 2])
def test_selection_after_a_failed_launch_of_other_operands_uses_its_own(
    rt: nx.CudaRuntime, dtype: np.dtype, failing: int
) -> None:
    """Whichever of the launches of a call failed."""
    case = dsa_cases.random_case(1, dtype, q_seq=3, heads=2, head_dim=8, key_seq=20, top_k=5)
    ours, others = (dsa_cases.DsaOperands(rt, case) for _ in range(2))
    kernel = nx.create_kernel(rt, case.node)
    execute_twice(kernel, ours.inputs, [ours.output])
    untouched = others.selected()
    ours.clear()
    with rt._driver.fail_call(failing, call="launch_kernel"), pytest.raises(nx.DriverError):
        kernel.execute(others.inputs, [others.output])
    kernel.execute(ours.inputs, [ours.output])
    np.testing.assert_array_equal(ours.selected(), case.expected)
    np.testing.assert_array_equal(others.selected(), untouched)
