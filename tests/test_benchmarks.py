"""The benchmarks run on the host driver, refuse what would be no measurement, and report what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from benchmarks import attention, dsa, dsa_exactness, launch, report
from benchmarks._bench import Bench, Operands, Peer, WrongResultError, relative_error
from benchmarks._launch_peers import BARE_GRAPH
from benchmarks._stopwatch import BURST, Stopwatch
from benchmarks._table import Table, milliseconds, speedup
from benchmarks._timing import DeviceClock, Subject, time_subjects
from nxrt_cuda.reference import HOST_ENTRIES

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"attention": attention, "dsa": dsa, "dsa_exactness": dsa_exactness, "launch": launch}


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script as the README says, from the root of the checkout."""
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{script}", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module", params=SCRIPTS)
def quick(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, dict[str, Any]]:
    """Name, standard output and results file of one quick run on the host driver."""
    out = tmp_path_factory.mktemp("quick") / "results" / "results.json"
    result = run(request.param, "--quick", "--device", "host", "--out", out)
    assert result.returncode == 0, result.stderr
    return request.param, result.stdout, json.loads(out.read_text())


def test_quick_run_prints_the_table_of_its_results(quick: tuple[str, str, dict[str, Any]]) -> None:
    """The printed table is the one that the JSON gives, and has a row for every result."""
    name, printed, results = quick
    assert results["benchmark"] == name
    table = SCRIPTS[name].tabulate(results["rows"])
    assert len(table.rows) == len(results["rows"]) > 2
    assert printed.endswith(table.text() + "\n")


def test_host_driver_run_claims_no_measurement(quick: tuple[str, str, dict[str, Any]]) -> None:
    """Table and JSON both say so, and no report can be made of it."""
    _, printed, results = quick
    assert "NOTE: host driver, not a measurement" in printed.splitlines()
    assert results["caveat"] == "host driver, not a measurement"
    with pytest.raises(ValueError, match="host driver, not a measurement"):
        report.section(results)


def test_run_says_where_and_when_it_was(quick: tuple[str, str, dict[str, Any]]) -> None:
    """Device, driver, NVRTC, Python, packages and date are in the JSON and above the table."""
    name, printed, results = quick
    where = results["environment"]
    assert printed.startswith(f"{name} on host, {where['date'][:10]}: driver none, {where['nvrtc']}, Python ")
    assert f"numpy {np.__version__}" in printed
    assert where["packages"]["numpy"] == np.__version__
    assert where["nxrt_cuda"] == nx.__version__


def test_absent_peers_are_named_with_the_reason(quick: tuple[str, str, dict[str, Any]]) -> None:
    """A peer that is not installed, or has no GPU, is named as absent in the JSON and above the table."""
    name, printed, results = quick
    if name == "dsa_exactness":
        assert results["absent"] == {}  # it has no peers
        return
    why = "not installed" if find_spec("torch") is None else "the host driver has no GPU"
    assert results["absent"]["PyTorch"] == why
    assert f"PyTorch ({why})" in printed
    if name == "launch":
        assert results["absent"].keys() == {"cuda.bindings", "PyTorch", "Triton", "cuda.core", "CuPy"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_full_sizes_without_a_gpu_are_refused(script: str) -> None:
    """Without --quick the host driver is one clear line and exit status 2."""
    result = run(script, "--device", "host")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        f"python -m benchmarks.{script}: error: without a GPU there is nothing to measure; "
        "--quick shows that everything runs"
    )


def test_unknown_device_is_refused() -> None:
    """A device that cannot be opened is one line and exit status 2."""
    result = run("dsa", "--quick", "--device", "tpu")
    assert result.returncode == 2
    assert "device must be 'cuda', 'cuda:<ordinal>' or 'host', got 'tpu'" in result.stderr


@pytest.mark.parametrize("case", [*attention.CASES, *dsa.CASES], ids=lambda case: case.label)
def test_full_size_is_served(case: attention.Case | dsa.Case) -> None:
    """Every case that is measured on a GPU passes the claim gate."""
    dtypes = [case.element] * 3
    if isinstance(case, dsa.Case):
        dtypes.append(nx.float32)
    assert nx.unsupported_reason(case.node, case.shapes, dtypes) is None


def test_cases_have_labels_of_their_own() -> None:
    """No two rows of a table have the same name."""
    for cases in (attention.CASES, dsa.CASES):
        assert len({case.label for case in cases}) == len(cases)


def test_attention_counts_operations_and_bytes() -> None:
    """A causal prefill counts half of 4 B H Sq Sk D operations; a decode step its operands' bytes."""
    prefill = attention.Case("f16", 2, 4, 2, 8, 16, 32, causal=False)
    assert prefill.flops == 4 * 2 * 4 * 8 * 16 * 32
    assert replace(prefill, causal=True).flops == prefill.flops // 2
    assert prefill.rate(2.0) == (pytest.approx(prefill.flops / 2e-3 / 1e12), "TFLOP/s")
    decode = replace(prefill, seq_q=1)
    assert decode.nbytes == 2 * (2 * 2 * 4 * 1 * 32 + 2 * 2 * 2 * 16 * 32)
    assert decode.rate(0.5) == (pytest.approx(decode.nbytes / 0.5e-3 / 1e12), "TB/s")


# Wrong results.


def _altered(entry: str, operand: str, dtype: nx.DataType, change: Callable[[np.ndarray], None]) -> Mapping[str, Any]:
    """Host entries in which ``entry`` computes what it should, and then one element of a result changes."""

    def host_entry(launch: Any) -> None:
        HOST_ENTRIES[entry](launch)
        change(launch.view(launch.args[operand], dtype, (1,)))

    return {entry: host_entry}


def _add_one(element: np.ndarray) -> None:
    element += 1


def _nothing(launch: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("script", "entries", "message"),
    [
        (
            attention,
            _altered("flash_attention_f32_bf16x6", "output", nx.float32, _add_one),
            "relative error .* exceeds 1e-05",
        ),
        (attention, {"flash_attention_f32_bf16x6": _nothing}, "elements that are NaN, or were not written"),
        (
            dsa,
            _altered("dsa_index_select_select", "out", nx.int64, _add_one),
            "row 0 of batch 0 differs from the oracle",
        ),
        (dsa, {"dsa_index_select_select": _nothing}, "elements that were not written, or are no keys"),
    ],
)
def test_wrong_result_ends_the_run(script: Any, entries: Mapping[str, Any], message: str) -> None:
    """A kernel that computes something else, or leaves elements unwritten, is not timed."""
    with nx.open_runtime("host", host_entries=entries) as rt, pytest.raises(WrongResultError, match=message):
        script.measure(Bench(rt, quick=True))


def test_relative_error_sees_nan() -> None:
    """A NaN in a result is no small error."""
    assert not relative_error(np.array([1.0, np.nan]), np.ones(2)) <= 1e9
    assert relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)


class FakeTensor(np.ndarray):
    """What a judge asks of a PyTorch tensor."""

    def double(self) -> FakeTensor:
        return self

    cpu = double

    def numpy(self) -> np.ndarray:
        return np.asarray(self)


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 5), (False, 5), (False, 0)])
def test_operations_are_those_of_the_keys_that_rows_see(causal: bool, window: int) -> None:
    """Of a window, those within it; a plain triangle counts as half the rectangle."""
    case = attention.Case("f16", 3, 2, 1, 20, 32, 8, causal=causal, window=window, is_ragged=not causal)
    limit = np.arange(20)[:, None] - 20
    seen = 0
    for keys in (32, 32, 32) if causal else (10, 21, 32):
        distance = keys + limit - np.arange(keys)  # from a row's limit back to a key
        seen += np.sum(((distance >= 0) | (not causal)) & ((distance < window) | (window == 0)))
    expected = 4 * 2 * 8 * seen if window or not causal else 2 * 3 * 2 * 20 * 32 * 8
    assert case.flops == expected


def test_peer_with_nan_is_judged_wrong() -> None:
    """A NaN in any of the compared rows counts, not in the first only."""
    case = attention.Case("f32", 1, 1, 1, 8, 8, 4, causal=True)
    arrays = [np.random.default_rng(3).standard_normal((1, 1, 8, 4)) for _ in range(3)]
    spots = [attention._Spot.compute(case, arrays, 0, 0, first) for first in (0, 4)]
    output = np.concatenate([spot.expected for spot in spots])[None, None].view(FakeTensor)
    assert attention._judge(output, spots) == 0.0
    output[0, 0, 7] = np.nan
    with pytest.raises(WrongResultError, match="computes something else: relative error nan"):
        attention._judge(output, spots)


# Timing.


class FakeClock(DeviceClock):
    """A clock on which every replay takes what its subject's table says."""

    def __init__(self, ms: Mapping[Any, list[float]]) -> None:
        self.ms = {work: list(times) for work, times in ms.items()}
        self.order: list[Any] = []

    def intervals(self, work: Callable[[], object], repeats: int) -> list[float]:
        self.order.append(work)
        return [self.ms[work].pop(0) for _ in range(repeats)]


def test_time_of_a_call_is_the_median_replay_over_its_calls() -> None:
    """The first round does not count, and one slow replay changes nothing."""
    ours, theirs = (lambda: None), (lambda: None)
    clock = FakeClock(
        {
            ours: [500.0, 600.0, 80.0, 80.0, 80.0, 800.0],
            theirs: [30.0, 1.0, 2.0, 40.0, 41.0, 41.0, 42.0, 43.0, 44.0, 44.0, 45.0],
        }
    )
    timings = time_subjects(clock, {"ours": Subject(ours, 4), "theirs": Subject(theirs, 2)})
    assert timings["ours"].ms == 20.0
    assert timings["theirs"].ms == 21.25
    assert (timings["ours"].samples, timings["theirs"].samples) == (4, 8)
    assert timings["theirs"].spread == pytest.approx((44 - 41) / 42.5)


def test_subjects_take_turns() -> None:
    """After the first look each round times every subject once, forwards and backwards."""
    ours, other, theirs = (lambda: None), (lambda: None), (lambda: None)
    clock = FakeClock({ours: [1e3] * 6, other: [1e3] * 6, theirs: [1e3] * 6})
    time_subjects(clock, {"ours": Subject(ours, 1), "other": Subject(other, 1), "theirs": Subject(theirs, 1)})
    assert clock.order == [ours, other, theirs] * 2 + [theirs, other, ours, ours, other, theirs] * 2


def test_bursts_of_calls_that_are_compared_take_turns() -> None:
    order: list[str] = []
    stopwatch = Stopwatch(lambda: order.append("drain"), 3)
    us = stopwatch.us_in_turns(lambda: order.append("ours"), lambda: order.append("bare"))
    assert len(us) == 2
    assert order == (["drain", *["ours"] * BURST, "drain", *["bare"] * BURST] * 3) + ["drain"]


def test_clock_times_every_call_but_the_first(rt: nx.CudaRuntime) -> None:
    """``repeats`` intervals are of as many calls, with one ahead of them; its events are used again."""
    calls: list[int] = []
    clock = DeviceClock(rt)
    clock.intervals(lambda: None, 5)
    live = rt._driver.live()
    intervals = clock.intervals(lambda: calls.append(1), 5)
    assert len(intervals) == 5
    assert len(calls) == 6
    assert all(ms >= 0 for ms in intervals)
    assert rt._driver.live() == live


def test_sets_of_operands_exceed_the_l2_cache(rt: nx.CudaRuntime) -> None:
    """Small operands come in several sets, large ones in one."""
    bench = Bench(rt, quick=True)
    l2 = rt.capabilities.l2_cache_bytes
    assert bench.operand_sets(l2) == 2
    assert bench.operand_sets(3 * l2) == 1
    assert bench.operand_sets(1) == 8


# PyTorch's part, with a stand-in for PyTorch.


class FakeTorch:
    """Records calls as they are made, in place of a CUDA graph."""

    def record(self, call: Callable[[int], Any], arguments: list[int]) -> Callable[[], None]:
        def replay() -> None:
            for argument in arguments:
                call(argument)

        return replay


def test_peers_are_timed_judged_and_refused(rt: nx.CudaRuntime) -> None:
    """A peer has a time and an error; one that raises, or computes something else, has a reason instead."""

    def refuse(i: int) -> None:
        raise RuntimeError("No available kernel.\nAborting execution.")

    def reject(result: Any) -> float:
        raise WrongResultError("computes something else")

    case = attention.Case("f32", 1, 1, 1, 2, 2, 4, causal=True)
    zeros = np.zeros(case.shapes[0], np.float32)
    bench = Bench(rt, quick=True)
    warmed = bench.warm(case.node, rt.capabilities.l2_cache_bytes, lambda: Operands.upload(rt, [zeros] * 3, zeros))
    assert len(warmed.sets) == 2
    vars(bench)["torch"] = FakeTorch()
    seen: list[int] = []
    peers = {
        "works": Peer(seen.append, lambda result: 0.25),
        "raises": Peer(refuse, lambda result: 0.0),
        "wrong": Peer(seen.append, reject),
    }
    compared = bench.compare(warmed, peers)
    assert compared.ours.ms > 0
    assert compared.peers.keys() == {"works"}
    assert compared.peers["works"]["error"] == 0.25
    assert compared.refused == {"raises": "No available kernel.", "wrong": "computes something else"}
    assert {0, 1} == set(seen)


def test_share_of_missed_keys() -> None:
    """Padding is no key, neither ours nor theirs; a peer that misses most computes something else."""
    ours = np.arange(40).reshape(2, 20)
    ours[1, 10:] = -1
    theirs = ours.copy()
    theirs[0, 3] = 99
    theirs[0, 4] = -1
    assert dsa._missed_share(theirs, ours) == pytest.approx(2 / 30)
    with pytest.raises(WrongResultError, match="100% of the keys are missing"):
        dsa._missed_share(theirs + 1000, ours)


# The report.


@pytest.fixture
def measured(quick: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """Results as a GPU would give them."""
    _, _, results = quick
    return {**results, "caveat": None}


def test_readme_has_the_tables_of_the_committed_results() -> None:
    """Nobody has typed a figure, and nobody has forgotten to run the report."""
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    assert report.render(readme, ROOT / "benchmarks" / "results") == readme


def test_report_puts_results_between_the_marks(tmp_path: Path, measured: dict[str, Any]) -> None:
    """What was between the marks is replaced, what is around them stays, and rendering again changes nothing."""
    (tmp_path / "gpu.json").write_text(json.dumps(measured))
    readme = "Before.\n<!-- results -->\nold\n<!-- end of results -->\nAfter.\n"
    rendered = report.render(readme, tmp_path)
    assert rendered.startswith("Before.\n<!-- results -->\n\n### ")
    assert rendered.endswith("|\n\n<!-- end of results -->\nAfter.\n")
    assert "old" not in rendered
    table = SCRIPTS[measured["benchmark"]].tabulate(measured["rows"])
    assert table.markdown() in rendered
    assert report.render(rendered, tmp_path) == rendered


def test_report_refuses_results_that_are_no_measurement(tmp_path: Path, measured: dict[str, Any]) -> None:
    """The file at fault is named."""
    (tmp_path / "quick.json").write_text(json.dumps({**measured, "caveat": "--quick sizes, not a measurement"}))
    with pytest.raises(ValueError, match=r"quick\.json: --quick sizes, not a measurement"):
        report.render("", tmp_path)


def test_tables_show_peers() -> None:
    """A peer's time stands with how much faster ours is; a refusing peer is a dash."""
    row = {"case": "a", "variant": "simt", "ms": 2.0, "spread": 0.01, "rate": 13.0, "unit": "TFLOP/s", "error": 1e-7}
    peer = {"ms": 1.0, "spread": 0.0, "samples": 3, "error": 0.002}
    rows = [
        {**row, "peers": {"torch flash": peer}, "refused": {}},
        {**row, "peers": {}, "refused": {"torch flash": "No available kernel."}},
    ]
    table = attention.tabulate(rows)
    assert table.columns[-1] == "torch flash, ms"
    assert [cells[-1] for cells in table.rows] == ["1.000 (0.5x)", "-"]
    rows = [{**row, "peers": {"torch composite": peer}, "refused": {}, "floor_ms": 1.5}]
    assert dsa.tabulate(rows).rows[0][-3:] == ("75%", "1.000 (0.5x)", "0.20%")


def test_operations_are_of_rows_that_choose() -> None:
    """A causal row that sees at most top_k keys has nothing to score; an f32 product takes three of bf16."""
    case = dsa.Case("bf16", 2, 4, 6, heads=3, head_dim=5, top_k=4)
    seen = (case.key_seq - case.q_seq + 1 + s for s in range(case.q_seq))
    assert case.operations == 2 * sum(2 * 3 * 5 * keys for keys in seen if keys > 4)
    assert replace(case, dtype="f32").operations == 3 * case.operations


def test_launch_table_compares_with_as_many_bare_launches() -> None:
    """Two launches are compared with two bare ones, a replay with one bare launch of its graph, whatever its nodes."""
    row = {"launches": 1, "bare": None, "target_us": None, "target_ratio": None, "note": ""}
    rows = [
        {**row, "what": launch.BARE_LAUNCH, "us": 4.0},
        {**row, "what": BARE_GRAPH, "us": 2.0},
        {**row, "what": "execute", "us": 12.0, "launches": 2, "bare": launch.BARE_LAUNCH, "target_us": 25.0},
        {**row, "what": "replay", "us": 3.0, "launches": 2, "bare": BARE_GRAPH, "target_ratio": 1.15},
        {**row, "what": "import", "us": 250e3, "launches": None, "target_us": 300e3},
        {**row, "what": "loop", "us": 50.0, "note": "0 captures"},
    ]
    assert [cells[1:] for cells in launch.tabulate(rows).rows] == [
        ("1", "4.0 µs", "-", "-", "-"),
        ("1", "2.0 µs", "-", "-", "-"),
        ("2", "12.0 µs", "1.50x", "≤ 25.0 µs", "-"),
        ("2", "3.0 µs", "1.50x", "≤ 1.15x", "-"),
        ("-", "250 ms", "-", "≤ 300 ms", "-"),
        ("1", "50.0 µs", "-", "-", "0 captures"),
    ]


def test_table_formats() -> None:
    """Text is aligned, words left and figures right; Markdown has the same cells."""
    table = Table(("case", "ms"), [("a", "1.5"), ("longer", "10.25")])
    assert table.text() == "case       ms\na         1.5\nlonger  10.25"
    assert table.markdown() == "| case | ms |\n| --- | --: |\n| a | 1.5 |\n| longer | 10.25 |"


@pytest.mark.parametrize(
    ("theirs", "text"), [(0.012, "0.006x"), (1.9, "0.95x"), (3.0, "1.5x"), (19.94, "10x"), (300.0, "150x")]
)
def test_speedup_is_written_as_a_factor(theirs: float, text: str) -> None:
    """Above 1x ours is the faster one."""
    assert speedup(theirs, 2.0) == text


def test_milliseconds_keep_short_times_readable() -> None:
    """A decode step of some 20 microseconds keeps three digits."""
    assert milliseconds(0.02214) == "0.0221"
    assert milliseconds(27.4567) == "27.457"
