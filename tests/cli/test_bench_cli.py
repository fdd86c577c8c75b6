"""``bench``: every suite runs, the table, the JSON and the plot hold the same points, and errors come first."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nxrt_cuda.cli import measure
from nxrt_cuda.cli.measure import SUITES, Panel, Point
from nxrt_cuda.cli.plot import draw
from tests.cli.conftest import Call

_ON_THE_HOST = ("--device", "host", "--quick")


def test_every_suite_runs_and_says_where_and_that_it_is_no_measurement(call: Call, tmp_path: Path) -> None:
    """On the host driver with tiny sizes; every point has a positive time of several samples."""
    path = tmp_path / "bench.json"
    status, out, err = call("bench", *_ON_THE_HOST, "--json", path)
    assert (status, err) == (0, "")
    assert "NOTE: host driver, not a measurement" in out
    for title in ("Attention, prefill", "Attention, decode", "DsaIndexSelect, prefill", "DsaIndexSelect, decode"):
        assert f"\n{title}: " in out
    assert "replay of 64 nodes" in out
    written = json.loads(path.read_text())
    assert written["device"] == "host"
    assert written["note"] == "host driver, not a measurement"
    assert len(written["points"]) == 4 * 3 * 2 + 4
    for point in written["points"]:
        assert point["microseconds"] > 0
        assert point["value"] > 0
        assert point["samples"] >= 3
        assert point["unit"]


def test_a_suite_can_be_chosen(call: Call) -> None:
    status, out, _ = call("bench", "launch", *_ON_THE_HOST)
    assert status == 0
    assert "Host time of a call" in out
    assert "Attention, prefill" not in out


def test_rates_follow_from_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """TFLOP/s of the unmasked half of a causal prefill, GB/s of operands that are each moved once."""
    monkeypatch.setattr(measure, "_device_time", lambda *arguments: measure._Timing(100.0, 3))
    points = {(p.panel.title, p.series, p.x): p.value for p in SUITES["attention"](None, False)}
    assert points["Attention, prefill", "float16", 4096] == pytest.approx(4 * 16 * 4096**2 * 128 / 2 / 100e-6 / 1e12)
    query, cache = 8 * 32 * 128 * 2, 8 * 8 * 1024 * 128 * 2
    assert points["Attention, decode", "bfloat16", 1024] == pytest.approx(2 * (query + cache) / 100e-6 / 1e9)


def test_the_plot_is_written(call: Call, tmp_path: Path) -> None:
    """In the format that the suffix names."""
    pytest.importorskip("matplotlib")
    status, _, err = call("bench", "launch", *_ON_THE_HOST, "--plot", tmp_path / "bench.png")
    assert (status, err) == (0, "")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_the_plot_names_what_it_shows(tmp_path: Path) -> None:
    """Titles, settings, axes with units, every series, and the caption: read from an SVG's text."""
    matplotlib = pytest.importorskip("matplotlib")
    lines = Panel("Attention, prefill", "16 heads of 128", "sequence length", "TFLOP/s")
    times = Panel("Selection", "64 heads", "keys", "device time, us", logarithmic=True)
    bars = Panel("Host time of a call", "64 tokens", "", "microseconds")
    points = [
        *(Point(lines, dtype, x, x / 10.0, 1.0, 3) for dtype in ("float32", "float16") for x in (512, 2048)),
        *(Point(times, "bfloat16", x, x / 10.0, 1.0, 3) for x in (4096, 8192)),
        Point(bars, "replay", 0, 1.25, 1.25, 3),
    ]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(points, "NVIDIA H200, 2026-01-01", tmp_path / "bench.svg")
    drawn = (tmp_path / "bench.svg").read_text()
    shown = ["Attention, prefill", "16 heads of 128", "sequence length", "TFLOP/s", "float32", "float16", "512", "2k"]
    shown += ["Selection", "device time, us", "8k", "500", "Host time of a call", "microseconds", "replay", "1.25"]
    for text in (*shown, "NVIDIA H200, 2026-01-01"):
        assert f">{text}<" in drawn or f"> {text}<" in drawn, text


def test_without_matplotlib_the_error_is_the_command_that_installs_it(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("nxrt_cuda.cli.bench.open_device", None)
    status, out, err = call("bench", *_ON_THE_HOST, "--plot", tmp_path / "bench.png")
    assert (status, out) == (1, "")
    assert err == 'nxrt_cuda bench: --plot needs matplotlib, which is not installed: pip install "nxrt_cuda[bench]"\n'


def test_wrong_arguments_are_status_2(call: Call) -> None:
    """An unknown suite, and a host that is to be measured in earnest."""
    assert call("bench", "speed") == (
        2,
        "",
        "nxrt_cuda bench: there is no suite 'speed'; there are attention, dsa, launch\n",
    )
    status, _, err = call("bench", "--device", "host")
    assert status == 2
    assert "without a GPU there is nothing to measure; --quick shows that everything runs" in err


@pytest.mark.parametrize(
    ("option", "file", "message"),
    [
        ("--json", "missing/bench.json", "{tmp}/missing is no directory"),
        ("--plot", "missing/bench.png", "{tmp}/missing is no directory"),
        ("--json", "", "--json {tmp} cannot be written"),
        ("--plot", "bench.docx", "--plot {tmp}/bench.docx: matplotlib writes no 'docx'; it writes "),
    ],
)
def test_a_file_that_could_not_be_written_is_refused_before_anything_is_measured(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, file: str, message: str
) -> None:
    if option == "--plot":
        pytest.importorskip("matplotlib")
    monkeypatch.setattr("nxrt_cuda.cli.bench.open_device", None)
    status, out, err = call("bench", *_ON_THE_HOST, option, tmp_path / file)
    assert (status, out) == (2, "")
    assert message.format(tmp=tmp_path) in err
    assert err.count("\n") == 1


def test_a_disk_that_is_full_at_the_end_is_one_line(call: Call) -> None:
    """After the table, which is not lost."""
    status, out, err = call("bench", "launch", *_ON_THE_HOST, "--json", "/dev/full")
    assert status == 1
    assert "Host time of a call" in out
    assert err.startswith("nxrt_cuda bench: the results cannot be written: ")
    assert err.count("\n") == 1
