"""Kernel objects meet kernels that are not compiled yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.compile import Image
from nxrt_cuda.testing import count
from tests.small_kernels import ADD_ONE, Background

Execution = Callable[[], None]


def attention(rt: nx.CudaRuntime) -> Execution:
    kernel = nx.create_kernel(rt, nx.Node("Attention"))
    inputs, output = [rt.zeros((1, 2, 3, 16), nx.float16) for _ in range(3)], rt.empty((1, 2, 3, 16), nx.float16)
    return lambda: kernel.execute(inputs, [output])


def dsa(rt: nx.CudaRuntime) -> Execution:
    kernel = nx.create_kernel(rt, nx.Node("DsaIndexSelect", domain="pkg.nxrt", attributes={"top_k": 3, "scale": 1.0}))
    inputs = [rt.zeros(shape, nx.float32) for shape in ((1, 2, 4, 8), (1, 9, 8), (1, 2, 4), (1, 1, 2, 9))]
    output = rt.empty((1, 1, 2, 3), nx.int64)
    return lambda: kernel.execute(inputs, [output])


@pytest.mark.parametrize(("make", "kernels"), [(attention, 1), (dsa, 2)])
def test_other_threads_work_while_a_kernel_is_compiled(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch, make: Callable[[nx.CudaRuntime], Execution], kernels: int
) -> None:
    """The runtime is open to them meanwhile; each kernel is compiled once, and the execution counts once."""
    execute = make(rt)
    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    compiler = rt._modules._compiler
    compile_spec = compiler.compile
    begun, may_end = threading.Event(), threading.Event()

    def slowly(spec: nx.KernelSpec) -> Image:
        begun.set()
        assert may_end.wait(10)
        return compile_spec(spec)

    monkeypatch.setattr(compiler, "compile", slowly)
    with count(rt) as seen:
        with Background(execute) as call:
            assert begun.wait(10)
            rt.launch(launch)
            np.testing.assert_array_equal(x.numpy(), np.ones(4))
            assert not call.done.is_set()
            may_end.set()
        execute()
    assert (seen.compiles, seen.launches) == (kernels, 1 + 2 * kernels)


@pytest.mark.parametrize("make", [attention, dsa])
def test_a_kernel_that_does_not_compile_changes_nothing(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch, make: Callable[[nx.CudaRuntime], Execution]
) -> None:
    """The error is the compiler's, without a trace of the attempts; the next execution is as if it were the first."""
    execute = make(rt)

    def refuse(spec: nx.KernelSpec) -> Image:
        raise nx.CompileError("it does not compile", source=spec.source, arch="host")

    with monkeypatch.context() as patch:
        patch.setattr(rt._modules._compiler, "compile", refuse)
        before = rt.stats()
        with pytest.raises(nx.CompileError, match="does not compile") as caught:
            execute()
        assert caught.value.__context__ is None
        assert rt.stats().since(before).launches == 0
    execute()


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize(
    ("operands", "message"),
    [
        (lambda x, y: ([x, np.zeros((1, 2, 3, 16)), x], [y]), r"input 1 is no tensor of this package, but a numpy\.nd"),
        (
            lambda x, y: ([x, x, x], [np.zeros((1, 2, 3, 16))]),
            r"output 0 is no tensor .* rt\.from_array\(array\) makes",
        ),
        (lambda x, y: (x, [y]), "inputs must be a list of tensors, got TensorMut"),
        (lambda x, y: ([x, x, x], y), "outputs must be a list of tensors, got TensorMut"),
    ],
)
def test_what_is_no_tensor_is_named(
    rt: nx.CudaRuntime, operands: Callable[..., tuple[Any, Any]], message: str, is_warm: bool
) -> None:
    kernel = nx.create_kernel(rt, nx.Node("Attention"))
    x, y = rt.zeros((1, 2, 3, 16), nx.float32), rt.empty((1, 2, 3, 16), nx.float32)
    for _ in range(2 * is_warm):
        kernel.execute([x, x, x], [y])
    before, stats = rt.stats(), kernel.launch_stats()
    with pytest.raises(nx.KernelError, match=message) as caught:
        kernel.execute(*operands(x, y))
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert rt.stats().since(before).launches == 0
    assert kernel.launch_stats() == stats
