"""The two operators that the launch benchmark executes and replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import nxrt_cuda as nx
from benchmarks._stopwatch import Call

__all__ = ["Op"]

_Operand = tuple[tuple[int, ...], nx.DataType]


@dataclass(frozen=True)
class Op:
    """An operator, and the shapes and dtypes of its operands."""

    name: str
    runtime: nx.CudaRuntime
    kernel: nx.Kernel
    launches: int
    inputs: Sequence[_Operand]
    output: _Operand

    @classmethod
    def attention(cls, runtime: nx.CudaRuntime) -> Op:
        kernel = nx.create_kernel(runtime, nx.Node("Attention", attributes={"is_causal": 1}))
        operand = ((1, 8, 64, 64), nx.float16)
        return cls("Attention", runtime, kernel, 1, [operand] * 3, operand)

    @classmethod
    def dsa(cls, runtime: nx.CudaRuntime) -> Op:
        heads, head_dim, key_seq, top_k = 8, 64, 1024, 64
        node = nx.Node("DsaIndexSelect", domain="pkg.nxrt", attributes={"top_k": top_k, "scale": head_dim**-0.5})
        inputs = [
            ((1, 1, heads, head_dim), nx.bfloat16),
            ((1, key_seq, head_dim), nx.bfloat16),
            ((1, 1, heads), nx.bfloat16),
            ((1, 1, 1, key_seq), nx.float32),
        ]
        output = ((1, 1, 1, top_k), nx.int64)
        return cls("DsaIndexSelect", runtime, nx.create_kernel(runtime, node), 2, inputs, output)

    def call(self) -> Call:
        """``kernel.execute`` on tensors that no call has seen."""
        inputs = [self.runtime.zeros(*operand) for operand in self.inputs]
        return partial(self.kernel.execute, inputs, [self.runtime.empty(*self.output)])

    def calls(self, count: int) -> list[Call]:
        return [self.call() for _ in range(count)]
