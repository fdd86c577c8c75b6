"""The benchmarks' command line: measure, print the header and the table, write the results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nxrt_cuda as nx
from benchmarks._bench import Bench, WrongResultError
from benchmarks._environment import environment, header
from benchmarks._table import Table

__all__ = ["run"]


def run(
    name: str,
    measure: Callable[[Bench], list[dict[str, Any]]],
    tabulate: Callable[[Sequence[Mapping[str, Any]]], Table],
    **runtime_options: Any,
) -> None:
    """Parse the command line, measure, print the header and the table, and write the results."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--device", help="'cuda:0' or 'host'; by default the GPU where there is one")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the results here")
    options = parser.parse_args()
    try:
        runtime = nx.open_runtime(options.device, **runtime_options)
    except (nx.NoDeviceError, nx.RuntimeStateError) as error:
        parser.error(str(error))
    with runtime:
        if runtime.device == "host" and not options.quick:
            parser.error("without a GPU there is nothing to measure; --quick shows that everything runs")
        bench = Bench(runtime, options.quick)
        try:
            rows = measure(bench)
        except WrongResultError as error:
            sys.exit(f"benchmarks.{name}: {error}")
        results = {
            "benchmark": name,
            "caveat": _caveat(runtime, options.quick),
            "environment": environment(runtime),
            "absent": bench.absent,
            "rows": rows,
        }
    print(header(results))
    print(tabulate(rows).text(), flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def _caveat(runtime: nx.CudaRuntime, quick: bool) -> str | None:
    if runtime.device == "host":
        return "host driver, not a measurement"
    return "--quick sizes, not a measurement" if quick else None
