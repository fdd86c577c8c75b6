"""``run``: a user's own tensors, good and bad."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.reference import HOST_ENTRIES
from nxrt_cuda.reference.attention import attention
from nxrt_cuda.reference.dsa_index_select import dsa_index_select
from tests.cli.commands import ROOT, corrupting, process
from tests.cli.conftest import Call

RNG = np.random.default_rng(11)
QUERY, KEY, VALUE = (RNG.standard_normal((2, 4, 5, 16), np.float32) for _ in range(3))
DSA = {
    "query": RNG.standard_normal((2, 3, 2, 8), np.float32),
    "key": RNG.standard_normal((2, 6, 8), np.float32),
    "weights": RNG.standard_normal((2, 3, 2), np.float32),
    "attention_bias": np.zeros((2, 1, 3, 6), np.float32),
}
ATTENTION = {"query": QUERY, "key": KEY, "value": VALUE}
DSA_ATTRIBUTES = ("--attr", "top_k=4", "--attr", "scale=0.5")


def test_run_writes_what_the_oracle_computes(tmp_path: Path) -> None:
    """On the recorded sentences, in a process of its own: checked, replayed, and the output written."""
    out = tmp_path / "out.npz"
    recorded = ROOT / "tests" / "data" / "sentence_attention.npz"
    done = process(
        *("run", "Attention", "--device", "host", "--inputs", str(recorded), "--ignore", "lengths,meta"),
        *("--attr", "scale=0.17677669529663687", "--check", "--replays", "2", "--out", str(out)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"output written to {out}\n"
    assert "identical bytes" in done.stdout
    assert "of the tolerance" in done.stdout
    with np.load(recorded) as given, np.load(out) as written:
        expected = attention(
            given["query"], given["key"], given["value"], mask=given["attn_mask"], scale=0.17677669529663687
        )
        assert list(written) == ["output"]
        assert written["output"].dtype == np.float16
        np.testing.assert_allclose(written["output"].astype(np.float64), expected, atol=1e-3, rtol=2e-3)


def test_run_takes_an_operator_with_its_domain_and_gives_exact_indices(
    call: Call, npz: Callable[..., Path], tmp_path: Path
) -> None:
    """pkg.nxrt::DsaIndexSelect: int64 [B, 1, S, top_k], equal to the oracle's."""
    out = tmp_path / "out.npz"
    arguments = ("--inputs", npz(**DSA), *DSA_ATTRIBUTES, "--out", out, "--device", "host")
    status, _, _ = call("run", "pkg.nxrt::DsaIndexSelect", *arguments)
    assert status == 0
    with np.load(out) as written:
        assert written["selected_indices"].dtype == np.int64
        np.testing.assert_array_equal(written["selected_indices"], dsa_index_select(**DSA, top_k=4, scale=0.5))


@pytest.mark.parametrize("stored", ["bits", "ml_dtypes"])
def test_run_takes_and_gives_bfloat16_as_bits(
    call: Call, npz: Callable[..., Path], tmp_path: Path, stored: str
) -> None:
    """bfloat16 is stored as uint16, or as np.save writes ml_dtypes' own; it comes back as uint16."""
    out = tmp_path / "out.npz"
    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in ATTENTION.items()}
    path = npz(**(arrays if stored == "ml_dtypes" else {n: a.view(np.uint16) for n, a in arrays.items()}))
    arguments = ("--inputs", path, "--bfloat16", "query,key", "--bfloat16", "value", "--out", out, "--device", "host")
    status, text, _ = call("run", "Attention", *arguments, "--check")
    assert status == 0
    assert "bfloat16" in text
    expected = attention(**arrays, scale=0.25)
    with np.load(out) as written:
        assert written["output"].dtype == np.uint16
        output = written["output"].view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_allclose(output, expected, atol=4e-3, rtol=8e-3)


def test_run_prints_json(call: Call, npz: Callable[..., Path]) -> None:
    """Counters, checks and times in one object; without --check no oracle was asked."""
    arguments = ("--inputs", npz(**DSA), *DSA_ATTRIBUTES, "--replays", 1, "--json", "--device", "host")
    status, out, err = call("run", "DsaIndexSelect", *arguments)
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["device"] == "host"
    assert report["attributes"] == {"top_k": 4, "scale": 0.5}
    assert report["operands"]["selected_indices"] == {"dtype": "int64", "shape": [2, 1, 3, 4]}
    assert report["steps"]["execute, first"]["launches"] == 2
    assert report["steps"]["replay"]["graph_replays"] == 1
    eager, replay = report["checks"]
    assert eager["oracle"] is None
    assert replay["equals_eager"] is True


def test_run_without_replays_captures_nothing(call: Call, npz: Callable[..., Path]) -> None:
    """--replays 0 executes eagerly only."""
    arguments = ("--inputs", npz(**ATTENTION), "--replays", 0, "--json", "--device", "host")
    status, out, _ = call("run", "Attention", *arguments)
    assert status == 0
    report = json.loads(out)
    assert "capture" not in report["steps"]
    assert list(report["times"]) == ["eager"]


def test_run_of_an_empty_batch_launches_nothing(call: Call, npz: Callable[..., Path]) -> None:
    """With B = 0 the output is empty, nothing is launched, and the report says so."""
    arguments = ("--inputs", npz(**{name: array[:0] for name, array in ATTENTION.items()}), "--check")
    status, out, _ = call("run", "Attention", *arguments, "--device", "host")
    assert status == 0
    assert "the output is empty: nothing was launched" in out


def test_run_reports_lengths_that_were_clamped(call: Call, npz: Callable[..., Path]) -> None:
    """A total length beyond the keys is clamped on the device, and the report says so."""
    lengths = {"total_lengths": np.array([5, 99], np.int32)}
    arguments = ("--inputs", npz(**ATTENTION, **lengths), "--check", "--device", "host")
    status, out, _ = call("run", "Attention", *arguments)
    assert status == 0
    assert "lengths outside their range were clamped: TOTAL_LENGTH" in out


def test_run_writes_no_output_that_failed_its_check(
    call: Call, npz: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay that differs from an eager execution: status 1, the reason, and no file."""
    entry = corrupting(HOST_ENTRIES["flash_attention_f32_bf16x6"], "output", nx.float32, on_call=2)
    monkeypatch.setitem(HOST_ENTRIES, "flash_attention_f32_bf16x6", entry)
    out = tmp_path / "out.npz"
    status, text, err = call("run", "Attention", "--inputs", npz(**ATTENTION), "--out", out, "--device", "host")
    assert status == 1
    assert err == "nxrt_cuda run: replay 1 (as given) does not give the bytes of an eager execution\n"
    assert "DIFFERENT BYTES" in text
    assert not out.exists()


def test_run_out_of_device_memory_is_one_line(call: Call, npz: Callable[..., Path]) -> None:
    """An output that no device has memory for ends with the driver's error and status 1."""
    arguments = ("--inputs", npz(**DSA), "--attr", "top_k=1000000000000", "--attr", "scale=1.0", "--device", "host")
    status, out, err = call("run", "DsaIndexSelect", *arguments)
    assert (status, out) == (1, "")
    assert err.startswith("nxrt_cuda run: cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2)")
    assert err.count("\n") == 1


BAD_ARGUMENTS = [
    ("Softmax --inputs {attention}", "there is no operator 'Softmax'; there are ai.onnx::Attention, "),
    ("Attention", "the following arguments are required: --inputs; see python -m nxrt_cuda run --help"),
    ("Attention --inputs {attention} --replays -1", "--replays: '-1' is not a whole number from 0 on"),
    ("Attention --inputs {attention} --replays many", "--replays: 'many' is not a whole number from 0 on"),
    ("Attention --inputs {attention} --attr scale", "--attr 'scale' is not of the form NAME=VALUE"),
    ("Attention --inputs {attention} --attr =1", "--attr '=1' is not of the form NAME=VALUE"),
    ("Attention --inputs {attention} --attr scale=1.0 --attr scale=2.0", "--attr scale is given twice"),
    ("Attention --inputs {attention} --attr scale=1", "attribute 'scale' must be a float, got 1"),
    ("Attention --inputs {attention} --attr scale=nan", "attribute 'scale' must be finite, got nan"),
    ("Attention --inputs {attention} --attr is_causal=yes", "attribute 'is_causal' must be an integer, got 'yes'"),
    ("Attention --inputs {attention} --attr flash=1", "attribute 'flash' is not part of Attention"),
    ("GroupQueryAttention --inputs {attention}", "missing required integer attribute 'num_heads'"),
    ("DsaIndexSelect --inputs {dsa} --attr scale=1.0", "missing required integer attribute 'top_k'"),
    ("DsaIndexSelect --inputs {dsa} --attr scale=1.0 --attr top_k=0", "attribute 'top_k' must be > 0, got 0"),
    ("DsaIndexSelect --inputs {attention} --attr scale=1.0 --attr top_k=1", "'value' is no input of DsaIndexSelect"),
    ("Attention --inputs {attention} --device gpu", "--device gpu: device must be 'cuda', 'cuda:<ordinal>' or 'host'"),
    ("Attention --inputs {attention} --device cuda:77", "--device cuda:77: cu"),
    ("Attention --inputs {attention} --out {tmp}/none/out.npz", "/none is no directory"),
    ("Attention --inputs {attention} --out {tmp}", " cannot be written"),
    ("Attention --inputs {attention} --out {attention}", "is the file of the inputs"),
    (
        "Attention --inputs {attention} --bfloat16 mask",
        "--bfloat16 mask: {attention} has no such array; it holds query",
    ),
    ("Attention --inputs {attention} --bfloat16 query", "'query': dtype float32 does not hold bfloat16"),
    ("Attention --inputs {attention} --ignore mask", "--ignore mask: {attention} has no such array; it holds query"),
    ("Attention --inputs {attention} --ignore key", "the required input 'key' is missing; it holds query, value"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_bad_arguments_get_one_line_and_status_2(call: Call, tmp_path: Path, arguments: str, message: str) -> None:
    """Nothing on stdout, one line on stderr that names the argument, exit status 2."""
    names = {"attention": tmp_path / "attention.npz", "dsa": tmp_path / "dsa.npz", "tmp": tmp_path}
    np.savez(names["attention"], **ATTENTION)
    np.savez(names["dsa"], **DSA)
    status, out, err = call("run", *arguments.format(**names).split())
    assert (status, out) == (2, "")
    assert err.startswith("nxrt_cuda run: ")
    assert message.format(**names) in err
    assert err.count("\n") == 1


def archive(**arrays: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def attention_with(**arrays: np.ndarray) -> bytes:
    return archive(**{**ATTENTION, **arrays})


def single(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]


BAD_FILES = {
    "empty": (b"", "holds no .npz archive, or a part of one"),
    "text": (b"not an archive", "holds no .npz archive, or a part of one"),
    "cut short": (attention_with()[:300], "holds no .npz archive, or a part of one"),
    "bare array": (single(QUERY), "holds one array without a name"),
    "damaged": (flipped(attention_with(), 200), "'query' cannot be read: Bad CRC-32"),
    "no arrays": (archive(), "the required input 'query' is missing; it holds no arrays"),
    "objects": (attention_with(key=np.array([{}], object)), "'key' cannot be read: Object arrays"),
    "a missing input": (archive(query=QUERY, key=KEY), "the required input 'value' is missing; it holds query, key"),
    "a misspelt input": (
        attention_with(attn_maks=KEY),
        "'attn_maks' is no input of Attention, whose inputs are query, key, value, attn_mask, total_lengths, "
        "past_lengths; to leave it out, add --ignore attn_maks",
    ),
    "text in an input": (attention_with(key=np.array("k")), "'key': dtype '<U1' is not supported"),
    "bits not named": (
        attention_with(key=KEY.astype(np.float16).view(np.uint16)),
        "if it holds bfloat16, add --bfloat16 key",
    ),
    "float64": (archive(**{name: array.astype(float) for name, array in ATTENTION.items()}), "dtype Float64"),
    "two dtypes": (
        attention_with(key=KEY.astype(np.float16)),
        "input 1 ('key') dtype Float16 must match query dtype Float32",
    ),
    "wrong rank": (attention_with(query=QUERY[0]), "input 0 ('query') rank 3 unsupported"),
    "wrong head size": (attention_with(query=QUERY[..., :8]), "query/key head_dim mismatch: 8 != 16"),
    "int64 lengths": (
        attention_with(total_lengths=np.array([5, 5])),
        "input 4 ('total_lengths') dtype Int64 unsupported; expected Int32",
    ),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_files_get_one_line_and_status_2(call: Call, tmp_path: Path, content: bytes, message: str) -> None:
    """A file, or an array in it, that cannot be used is named in one line."""
    path = tmp_path / "inputs.npz"
    path.write_bytes(content)
    status, out, err = call("run", "Attention", "--inputs", path, "--device", "host")
    assert (status, out) == (2, "")
    assert err.startswith("nxrt_cuda run: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("name", "reason"), [("none.npz", "No such file or directory"), (".", "Is a directory")])
def test_a_file_that_cannot_be_opened_is_named(call: Call, tmp_path: Path, name: str, reason: str) -> None:
    """The path and the system's reason, in one line."""
    path = tmp_path / name
    status, out, err = call("run", "Attention", "--inputs", path)
    assert (status, out, err) == (2, "", f"nxrt_cuda run: {path} cannot be read: {reason}\n")
