"""Run a kernel on PyTorch's tensors and PyTorch's stream, without a copy in either direction.

A runtime opened on ``torch.cuda.current_stream()`` queues its work between PyTorch's own, so neither side has
to wait for the other. ``from_array`` takes a CUDA tensor as it lies in memory, ``torch.from_dlpack`` takes the
result back, and both keep the memory alive. The captured graph sees what PyTorch writes into the tensors later.

    python examples/torch_tensors.py

Needs PyTorch and a GPU; says so and succeeds where one is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import nxrt_cuda as nx

if TYPE_CHECKING:
    import torch


def main() -> None:
    try:
        import torch
    except ModuleNotFoundError:
        print("skipped: PyTorch is not installed (pip install torch)")
        return
    if not torch.cuda.is_available():
        print("skipped: PyTorch finds no CUDA device; this example is about device tensors")
        return

    # A stream of its own: CUDA cannot capture the default stream.
    with torch.cuda.stream(torch.cuda.Stream()), nx.open_runtime("cuda:0", stream=torch.cuda.current_stream()) as rt:
        query, key, value = torch.randn(3, 2, 8, 200, 64, device="cuda", dtype=torch.float16)
        inputs = [rt.from_array(tensor) for tensor in (query, key, value)]
        assert inputs[0].ptr == query.data_ptr()

        output = rt.empty(query.shape, nx.float16)
        result = torch.from_dlpack(output)
        assert result.data_ptr() == output.ptr

        node = nx.Node("Attention", attributes={"is_causal": 1})
        kernel = nx.create_kernel(rt, node, [tensor.shape for tensor in inputs])
        kernel.execute(inputs, [output])
        compare("eager", result, query, key, value)

        with rt.capture([kernel]) as graph:
            kernel.execute(inputs, [output])
        query.normal_()
        graph.replay()
        compare("replayed with a new query", result, query, key, value)

        seen = rt.stats()
        print(f"copies to the device {seen.htod_copies}, from it {seen.dtoh_copies}, on it {seen.dtod_copies}")


def compare(what: str, result: torch.Tensor, *inputs: torch.Tensor) -> None:
    """Print the largest difference to PyTorch's attention in float32."""
    from torch.nn.functional import scaled_dot_product_attention

    expected = scaled_dot_product_attention(*(tensor.float() for tensor in inputs), is_causal=True)
    difference = (result.float() - expected).abs().max().item()
    print(f"{what}: largest difference to PyTorch {difference:.1e} ({'ok' if difference < 4e-3 else 'TOO LARGE'})")


if __name__ == "__main__":
    main()
