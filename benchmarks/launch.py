"""What launches, executions and replays cost the host, beside the bare driver calls and other libraries.

    python -m benchmarks.launch --out benchmarks/results/h200-launch.json

Host time, in bursts of eight after a drain: in a long burst the queue fills up, and what is measured is the
device. The probe is an empty kernel with twenty parameters. Every library launches it on a stream of its own
and drains that one. Then what a graph is for: the device time of a long sequence, a hundred thousand replays on
changing tensors, and a decode loop in one graph.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import nxrt_cuda as nx
from benchmarks._bench import Bench, first_line, progress
from benchmarks._endurance import measure_decode, measure_rebinding
from benchmarks._environment import missing
from benchmarks._harness import run
from benchmarks._launch_ops import Op
from benchmarks._launch_peers import BARE_LAUNCH, ENTRY, PEERS, probe
from benchmarks._stopwatch import BURST, Row, Stopwatch
from benchmarks._table import Table

__all__ = ["measure", "tabulate"]

_BURSTS = 300
_QUICK_BURSTS = 20
_IMPORTS = 7

_EXECUTE_RATIO = 1.7
_NEW_TENSORS_US = 12.0
_IMPORT_US = 0.3e6


def measure(bench: Bench) -> list[dict[str, Any]]:
    """All rows of the table."""
    bursts = _QUICK_BURSTS if bench.quick else _BURSTS
    runtime = bench.runtime
    # Ours first: no other library has made the context current on this thread yet.
    rows = list(_measure_ours(runtime, bursts))
    for name, (module, peer) in PEERS.items():
        if why := missing(module, runtime):
            bench.absent[name] = why
            continue
        progress(name)
        try:
            rows += peer(runtime, bursts)
        except Exception as error:  # a peer may fail in any way; ours stand without it
            bench.absent[name] = first_line(error)
    rows += measure_rebinding(bench)
    rows += measure_decode(bench)
    rows += _measure_imports()
    return [asdict(row) for row in rows]


# Ours.


def _measure_ours(runtime: nx.CudaRuntime, bursts: int) -> Iterator[Row]:
    stopwatch = Stopwatch(runtime.synchronize, bursts)
    prepared = probe(runtime)
    launch = partial(runtime.launch, prepared)
    stopwatch.us(launch)  # for nothing: host and device get up to speed, as they are when the bare calls' turn comes
    yield Row("rt.launch(prepared), 20 arguments", stopwatch.us(launch), bare=BARE_LAUNCH)
    for op in Op.attention(runtime), Op.dsa(runtime):
        yield from _measure_executions(op, stopwatch)


def _measure_executions(op: Op, stopwatch: Stopwatch) -> Iterator[Row]:
    progress(f"execute {op.name}")
    execute = op.call()
    execute()
    us = stopwatch.us(execute)
    yield Row(f"execute(), {op.name}", us, launches=op.launches, bare=BARE_LAUNCH, target_ratio=_EXECUTE_RATIO)
    us = stopwatch.us_of_bursts(partial(op.calls, BURST))
    what = f"execute(), {op.name}, new tensors"
    yield Row(what, us, launches=op.launches, bare=BARE_LAUNCH, target_us=_NEW_TENSORS_US)


def _measure_imports() -> Iterator[Row]:
    """New processes that import and end; with no GPU in sight, and none of CUDA's packages imported."""
    for module, target in (("nxrt_cuda", _IMPORT_US), ("numpy", None)):
        progress(f"import {module}")
        yield Row(f"import {module}", median(_import_us(module) for _ in range(_IMPORTS)), None, target_us=target)


def _import_us(module: str) -> float:
    code = (
        "import sys, time; before = set(sys.modules); started = time.perf_counter(); "
        f"import {module}; took = time.perf_counter() - started; "
        "print(took, any(name.split('.')[0] == 'cuda' for name in set(sys.modules) - before))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(nx.__file__).parents[1],
        # The first leaves bytecode for the others, as an installed package has it, whatever the environment says.
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, with_cuda = result.stdout.split()
    if with_cuda == "True":
        raise RuntimeError(f"import {module} imports a package of CUDA's")
    return float(seconds) * 1e6


# The table.


def tabulate(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table of measured rows."""
    times = {row["what"]: row["us"] for row in rows}
    return Table(
        ("call", "kernels", "time", "of bare calls", "target", "beside"),
        [
            (
                row["what"],
                "-" if row["launches"] is None else str(row["launches"]),
                _time(row["us"]),
                _of_bare(row, times),
                _target(row),
                row["note"] or "-",
            )
            for row in rows
        ],
    )


def _of_bare(row: Mapping[str, Any], times: Mapping[str, float]) -> str:
    """A launch is compared with as many bare launches, a replay with one bare launch of as large a graph."""
    if row["bare"] not in times:
        return "-"
    bare = times[row["bare"]] * (row["launches"] if row["bare"] == BARE_LAUNCH else 1)
    return f"{row['us'] / bare:.2f}x"


def _target(row: Mapping[str, Any]) -> str:
    if row["target_ratio"] is not None:
        return f"≤ {row['target_ratio']:.2f}x"
    return "-" if row["target_us"] is None else f"≤ {_time(row['target_us'])}"


def _time(us: float) -> str:
    return f"{us:.1f} µs" if us < 1000 else f"{us / 1000:.0f} ms"


if __name__ == "__main__":
    run("launch", measure, tabulate, host_entries={ENTRY: lambda launch: None})
