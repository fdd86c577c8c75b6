"""PyTorch as a peer: on the runtime's own stream and memory, recorded into CUDA graphs as we are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import nxrt_cuda as nx

__all__ = ["TorchPeer"]


class TorchPeer:
    """PyTorch, with the runtime's compute stream as its current stream.

    Attributes:
        torch: the module.
    """

    def __init__(self, torch: Any, runtime: nx.CudaRuntime) -> None:
        self.torch = torch
        torch.cuda.init()
        self._stream = torch.cuda.ExternalStream(runtime.stream, device=runtime.device)
        torch.cuda.set_stream(self._stream)

    @classmethod
    def find(cls, runtime: nx.CudaRuntime) -> TorchPeer | None:
        """PyTorch beside ``runtime``, if it is built for CUDA and finds a GPU."""
        import torch

        return cls(torch, runtime) if torch.cuda.is_available() else None

    def view(self, tensor: nx.TensorView | None) -> Any:
        """A ``torch.Tensor`` on the memory of ``tensor``; None for an input that is left off."""
        return None if tensor is None else self.torch.from_dlpack(tensor)

    def record(self, call: Callable[[int], Any], arguments: Iterable[int]) -> Callable[[], None]:
        """Record ``call(argument)`` for every argument into one CUDA graph; returns its replay."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self._stream):
            for argument in arguments:
                call(argument)
        replay: Callable[[], None] = graph.replay
        return replay
