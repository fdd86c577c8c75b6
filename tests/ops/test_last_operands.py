"""Executions with the operands of the one before take a short cut; nothing else may."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.reference.attention import attention


def attention_operands(rt: nx.CudaRuntime) -> tuple[list[np.ndarray], list[nx.TensorMut], nx.TensorMut]:
    rng = np.random.default_rng(5)
    arrays = [rng.standard_normal((1, 2, 3, 8)).astype(np.float32) for _ in range(3)]
    return arrays, [rt.from_array(array) for array in arrays], rt.empty((1, 2, 3, 8), nx.float32)


def test_a_mask_that_was_dropped_is_not_taken_for_an_absent_one(rt: nx.CudaRuntime) -> None:
    """Its memory is back in the pool; the next call without a mask is unmasked."""
    arrays, tensors, out = attention_operands(rt)
    kernel = nx.create_kernel(rt, nx.Node("Attention"))
    mask = rt.from_array(np.array([[0, -np.inf, 0]] * 3, np.float32))
    kernel.execute([*tensors, mask], [out])
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
    kernel.execute(tensors, [out])
    with pytest.raises(nx.KernelError, match="expected 1 output, got 0"):
        kernel.execute([*tensors, out], [])

    selected = rt.empty((1, 1, 2, 3), nx.int64)
    shapes = ((1, 2, 1, 4), (1, 5, 4), (1, 2, 1), (1, 1, 2, 5))
    operands = [rt.zeros(shape, nx.float32) for shape in shapes]
    select = nx.create_kernel(rt, nx.Node("DsaIndexSelect", "pkg.nxrt", {"top_k": 3, "scale": 1.0}))
    select.execute(operands, [selected])
    with pytest.raises(nx.KernelError, match="expected 4 inputs, got 5"):
        select.execute([*operands, selected], [])


def test_memory_freed_since_is_noticed(rt: nx.CudaRuntime) -> None:
    _, tensors, out = attention_operands(rt)
    kernel = nx.create_kernel(rt, nx.Node("Attention"))
    kernel.execute(tensors, [out])
    tensors[1].free()
    with pytest.raises(nx.KernelError, match=r"input 1 \('key'\) was freed"):
        kernel.execute(tensors, [out])
    assert kernel.launch_stats().executions == 1


def test_operands_are_not_kept_alive(rt: nx.CudaRuntime) -> None:
    """Dropping them gives their memory back."""
    _, tensors, out = attention_operands(rt)
    kernel = nx.create_kernel(rt, nx.Node("Attention"))
    kernel.execute(tensors, [out])
    rt.synchronize()
    before = rt.stats().pool_retained_bytes
    del tensors, out
    gc.collect()
    rt.zeros((1,), nx.float32)
    assert rt.stats().pool_retained_bytes > before
