"""The command line on a GPU: the same commands as without one, measured and checked on the device."""

from __future__ import annotations

import json

from tests.cli.commands import process


def test_demo_passes_with_times_of_the_device(gpu: str) -> None:
    """Both systems agree with the oracle, eager and replayed; the times are the device's."""
    done = process("demo", "--device", "cuda:0")
    assert done.returncode == 0, done.stderr
    assert f"cuda:0: {gpu}, compute capability " in done.stdout
    assert "device ms" in done.stdout
    assert "host driver" not in done.stdout


def test_demo_uses_the_gpu_unasked(gpu: str) -> None:
    """Without --device the demo runs on the first GPU, and its replays are one driver call each."""
    done = process("demo", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["device"] == "cuda:0"
    for system in report["systems"]:
        replay = {name: value for name, value in system["steps"]["replay"].items() if value}
        assert replay == {"times": 4, "graph_replays": 4}


def test_doctor_finds_the_gpu(gpu: str) -> None:
    """Driver, memory, compiler and headers are found, and nothing is missing."""
    done = process("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["runs_on"] == "cuda:0"
    assert report["missing"] == {}
    (first, *_) = report["devices"]["devices"]
    assert first["name"] == gpu
    assert 0 < first["memory_free"] <= first["memory_total"]
