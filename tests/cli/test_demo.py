"""``demo``: both systems pass on the recorded tensors, and nothing wrong passes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.cli import demo
from nxrt_cuda.cli.operators import find_operator
from nxrt_cuda.reference import HOST_ENTRIES
from tests.cli.commands import corrupting, process
from tests.cli.conftest import Call


def test_demo_runs_both_systems_and_says_what_it_found() -> None:
    """The demo passes in a process of its own, names the host driver, and prints checks, counters and times."""
    done = process("demo", "--device", "host")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "host driver: kernels run on this CPU" in done.stdout
    for system in ("ai.onnx::Attention", "pkg.nxrt::DsaIndexSelect"):
        assert system in done.stdout
    assert "passed: both systems give the oracle's results" in done.stdout
    assert "kernel is the oracle's own code" in done.stdout
    assert "host driver ms" in done.stdout
    assert "device ms" not in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert sum(row[:1] == ["replay"] and row[-1:] == ["ok"] for row in rows) == 8
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_demo_replays_launch_allocate_compile_and_copy_nothing(call: Call) -> None:
    """In the JSON form every counter of the replay step but graph_replays is zero, and every check passed."""
    status, out, err = call("demo", "--device", "host", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["device"] == "host"
    assert report["passed"] is True
    assert [system["op"] for system in report["systems"]] == ["Attention", "DsaIndexSelect"]
    for system in report["systems"]:
        replay = system["steps"]["replay"]
        assert {name: value for name, value in replay.items() if value} == {"times": 4, "graph_replays": 4}
        assert system["steps"]["execute, first"]["modules_compiled"] > 0
        assert system["steps"]["execute, again"]["modules_compiled"] == 0
        assert [check["name"] for check in system["checks"]] == ["eager", *(f"replay {i}" for i in (1, 2, 3, 4))]
        assert all(check["passed"] and check["oracle"]["passed"] for check in system["checks"])
        assert all(check["equals_eager"] for check in system["checks"][1:])
        assert system["times"]["replay"]["stream_ms"] > 0
    assert report["systems"][0]["kernel"]["executions"] == 3
    assert report["systems"][1]["workspace"]["allocations"] == 1


def test_demo_changes_the_contents_before_every_replay() -> None:
    """Each replay's inputs have another result than the ones before it, so a stale replay cannot pass."""
    for recording in demo.recordings():
        operator = find_operator(recording.node.op_type)
        contents = recording.replayed(4)
        with nx.open_runtime("host") as rt:
            results = [replace(recording, arrays=c.arrays).trial(rt).run([], check=False).result for c in contents]
        assert operator.compare(recording.node, contents[0].arrays, results[0]).passed
        for earlier, later in pairwise(results):
            assert not np.array_equal(earlier, later)


@pytest.mark.parametrize(
    ("entry", "output", "dtype", "on_call", "failure"),
    [
        pytest.param(
            "dsa_index_select_select",
            "out",
            nx.int64,
            0,
            "DsaIndexSelect eager (as recorded) against the oracle: 1 of 2272 indices differ, the first at "
            "[0, 0, 0, 0]: 1, expected 0",
            id="an index is wrong",
        ),
        pytest.param(
            "flash_attention_f16_tc",
            "output",
            nx.float16,
            3,
            "Attention replay 2 (queries negated) does not give the bytes of an eager execution",
            id="a replay rounds otherwise",
        ),
    ],
)
def test_demo_fails_where_a_result_is_wrong(
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    entry: str,
    output: str,
    dtype: nx.DataType,
    on_call: int,
    failure: str,
) -> None:
    """One wrong bit in one execution ends the demo with status 1 and a line that says where."""
    monkeypatch.setitem(HOST_ENTRIES, entry, corrupting(HOST_ENTRIES[entry], output, dtype, on_call))
    status, out, err = call("demo", "--device", "host")
    assert status == 1
    assert err == f"nxrt_cuda demo: {failure}\n"
    assert "FAILED" in out
    assert "passed:" not in out


def test_demo_without_its_recordings_says_so(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installation without the recorded tensors ends with one line."""
    monkeypatch.setattr(demo, "data_directory", lambda: tmp_path)
    status, out, err = call("demo", "--device", "host")
    assert (status, out) == (1, "")
    assert err.startswith("nxrt_cuda demo: the recorded tensors are not part of this installation: ")
    assert str(tmp_path) in err


@pytest.mark.parametrize(("device", "prefix"), [((), ""), (("--device", "host"), "--device host: ")])
def test_a_runtime_that_does_not_open_is_blamed_on_the_device_only_if_one_was_named(
    call: Call, monkeypatch: pytest.MonkeyPatch, device: tuple[str, ...], prefix: str
) -> None:
    monkeypatch.setenv("NXRT_CUDA_POOL_BYTES", "abc")
    message = "NXRT_CUDA_POOL_BYTES must be a whole number of bytes >= 0, got 'abc'"
    assert call("demo", *device) == (2, "", f"nxrt_cuda demo: {prefix}{message}\n")
