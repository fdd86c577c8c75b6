"""Decode with sparse attention over a growing context, in one graph that is never recorded again.

At every step a decoder appends a key and a value to its caches, asks DsaIndexSelect which positions the new
token should attend to, and attends to those. The context grows, but no shape does: the caches have room for
all positions from the start, and a bias of minus infinity hides those that are not written yet. So the three
nodes of a step are planned, warmed and captured once, and each step is a replay.

The caches are *bound*: the engine reads them where they are, and the loop appends to them in place. The node
between selection and attention is an operator of this file's own: one kernel, for a GPU and for the host
driver, and the few methods that an engine asks an operator for.

    python examples/decode_loop.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import nxrt_cuda as nx
from nxrt_cuda.reference.dsa_index_select import dsa_index_select

CAPACITY, TOP_K = 96, 16  # positions of the caches; positions that a token attends to
HEADS, HEAD_DIM = 8, 64  # of the attention, all heads sharing one key and value head
INDEX_HEADS, INDEX_DIM = 4, 32  # of the selection

CUDA_SOURCE = """
extern "C" __global__ void selected_mask(float* mask, const long long* selected, int keys, int top_k) {
  const int position = blockIdx.x * blockDim.x + threadIdx.x;
  if (position >= keys) return;
  bool found = false;
  for (int i = 0; i < top_k; ++i) found |= selected[i] == position;
  mask[position] = found ? 0.0f : __int_as_float(0xff800000);
}
"""


def selected_mask_on_the_host(launch: nx.HostLaunch) -> None:
    """What the CUDA source does, for the host driver."""
    keys, top_k = int(launch.args["keys"]), int(launch.args["top_k"])
    selected = launch.view(launch.args["selected"], nx.int64, (top_k,))
    launch.view(launch.args["mask"], nx.float32, (keys,))[:] = np.where(np.isin(np.arange(keys), selected), 0, -np.inf)


class SelectedMaskKernel(nx.Kernel):
    """An additive mask [1, 1, 1, keys]: 0 at the selected positions, minus infinity elsewhere."""

    def __init__(self, runtime: nx.CudaRuntime, node: nx.Node) -> None:
        self.runtime = runtime
        self.keys = node.positive_int_attr("keys")
        self.function = runtime.nvrtc_function(
            "selected_mask.cu",
            CUDA_SOURCE,
            "selected_mask",
            [("mask", "ptr"), ("selected", "ptr"), ("keys", "i32"), ("top_k", "i32")],
            threads=128,
        )
        self.launches = 0

    def execute(self, inputs: Sequence[nx.TensorView | None], outputs: Sequence[nx.TensorMut]) -> None:
        (selected,), (mask,) = inputs, outputs
        assert selected is not None
        config = nx.LaunchConfig((-(-self.keys // 128), 1, 1), (128, 1, 1))
        launch = self.runtime.prepare(self.function, config, mask, selected, self.keys, selected.metadata.elements)
        self.runtime.launch(launch)
        self.launches += 1

    def capture_support(self) -> nx.CaptureSupport:
        return nx.CaptureSupport.supported()

    def launch_stats(self) -> int:
        return self.launches

    def workspace_stats(self) -> nx.WorkspaceStats:
        return nx.WorkspaceStats()


class SelectedMaskFactory(nx.KernelFactory):
    def create(self, node: nx.Node, shapes: Sequence[tuple[int, ...] | None]) -> SelectedMaskKernel:
        return SelectedMaskKernel(self.runtime, node)

    @classmethod
    def output_metadata(
        cls, node: nx.Node, inputs: Sequence[nx.TensorMetadata | None]
    ) -> tuple[nx.TensorMetadata, ...]:
        return (nx.TensorMetadata(nx.float32, (1, 1, 1, node.positive_int_attr("keys"))),)


nx.register("examples", "SelectedMask", SelectedMaskFactory, lambda node, shapes, dtypes: None)


def expected_context(query: np.ndarray, keys: np.ndarray, values: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """Attention to the selected positions only, in float64."""
    positions = selected[selected >= 0]
    scores = query[0, :, 0].astype(np.float64) @ keys[0, 0, positions].T * HEAD_DIM**-0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    context: np.ndarray = weights / weights.sum(axis=-1, keepdims=True) @ values[0, 0, positions]
    return context[None, :, None]


def main() -> None:
    rng = np.random.default_rng(11)
    rt = nx.open_runtime(host_entries={"selected_mask": selected_mask_on_the_host})

    index_keys = rt.zeros((1, CAPACITY, INDEX_DIM), nx.float32)
    keys, values = (rt.zeros((1, 1, CAPACITY, HEAD_DIM), nx.float32) for _ in range(2))
    bias = rt.from_array(np.full((1, 1, 1, CAPACITY), -np.inf, np.float32))

    select = nx.Node("DsaIndexSelect", "pkg.nxrt", {"top_k": TOP_K, "scale": INDEX_DIM**-0.5}, name="select")
    engine = nx.Engine(
        rt,
        nodes=[
            (select, ["index_query", "index_keys", "index_weights", "bias"], ["selected"]),
            (nx.Node("SelectedMask", "examples", {"keys": CAPACITY}, name="mask"), ["selected"], ["mask"]),
            (nx.Node("Attention", name="attend"), ["query", "keys", "values", "mask"], ["context"]),
        ],
        inputs={
            "index_query": (nx.float32, (1, 1, INDEX_HEADS, INDEX_DIM)),
            "index_weights": (nx.float32, (1, 1, INDEX_HEADS)),
            "query": (nx.float32, (1, HEADS, 1, HEAD_DIM)),
        },
        outputs=["context", "selected"],
        bound={"index_keys": index_keys, "keys": keys, "values": values, "bias": bias},
        name="decode",
    )
    engine.prepare()
    prepared = rt.stats()

    print(f"{rt.device}\n\ncontext   selected   largest error against float64")
    steps = []
    for position in range(CAPACITY):
        index_keys.narrow(1, position, 1).copy_from(rng.standard_normal((1, 1, INDEX_DIM), np.float32))
        keys.narrow(2, position, 1).copy_from(rng.standard_normal((1, 1, 1, HEAD_DIM), np.float32))
        values.narrow(2, position, 1).copy_from(rng.standard_normal((1, 1, 1, HEAD_DIM), np.float32))
        bias.narrow(3, position, 1).copy_from(np.zeros((1, 1, 1, 1), np.float32))
        step = {
            "index_query": rng.standard_normal((1, 1, INDEX_HEADS, INDEX_DIM), np.float32),
            "index_weights": rng.random((1, 1, INDEX_HEADS), np.float32),
            "query": rng.standard_normal((1, HEADS, 1, HEAD_DIM), np.float32),
        }
        # The next step overwrites the outputs; these are compared after the loop.
        steps.append((step, engine.run(step, copy_outputs=True)))
    decoded = rt.stats().since(prepared)

    cache = [tensor.numpy() for tensor in (index_keys, keys, values)]
    for position, (step, outputs) in enumerate(steps):
        length = position + 1
        visible = np.where(np.arange(CAPACITY) < length, 0, -np.inf).astype(np.float32).reshape(bias.shape)
        selected = outputs["selected"].numpy()
        same = np.array_equal(
            selected,
            dsa_index_select(
                step["index_query"], cache[0], step["index_weights"], visible, top_k=TOP_K, scale=INDEX_DIM**-0.5
            ),
        )
        error = np.abs(outputs["context"].numpy() - expected_context(step["query"], *cache[1:], selected)).max()
        if length in (1, 8, 16) or length % 32 == 0 or not same or error > 1e-5:
            verdict = "" if same and error <= 1e-5 else "   DIFFERS FROM THE REFERENCE"
            print(f"{length:7}   {(selected >= 0).sum():8}   {error:.1e}{verdict}")
    print(
        f"\n{len(steps)} steps: {decoded.graphs_captured} captures, {decoded.graph_replays} replays, "
        f"{decoded.launches} launches, {decoded.modules_compiled} compiles\n\n{engine.report()}"
    )


if __name__ == "__main__":
    main()
