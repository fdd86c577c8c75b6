"""``bench``: how fast this package's kernels and calls are on this machine, as a table and as a plot."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import nxrt_cuda
from nxrt_cuda.cli.device import open_device
from nxrt_cuda.cli.errors import CommandError, InputError
from nxrt_cuda.cli.inputs import check_writable
from nxrt_cuda.cli.measure import SUITES, Point
from nxrt_cuda.cli.plot import check_plot, draw
from nxrt_cuda.errors import CompileError
from nxrt_cuda.nvrtc import load_nvrtc
from nxrt_cuda.runtime import CudaRuntime
from nxrt_cuda.text import columns, indented

__all__ = ["add_parser"]

_DESCRIPTION = """\
Time attention and DsaIndexSelect on the device, in captured graphs, and what calls and replays cost the host.
Comparisons with other libraries are in the benchmarks/ of the source tree."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = commands.add_parser("bench", help="time the kernels and the calls", description=_DESCRIPTION)
    add = parser.add_argument
    add("suite", nargs="*", metavar="SUITE", help=f"what to time: {', '.join(SUITES)} (default: all)")
    add("--device", metavar="DEVICE", help='"cuda:0", or "host" with --quick (default: a GPU if there is one)')
    add("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    add("--plot", metavar="FILE.png", type=Path, help="draw the results; the suffix says the format")
    add("--json", metavar="FILE.json", type=Path, help="write the results")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; see the parser for ``options``."""
    for suite in options.suite:
        if suite not in SUITES:
            raise InputError(f"there is no suite {suite!r}; there are {', '.join(SUITES)}")
    if options.json is not None:
        check_writable("--json", options.json)
    if options.plot is not None:
        check_plot(options.plot)
        check_writable("--plot", options.plot)
    with open_device(options.device) as runtime:
        if runtime.device == "host" and not options.quick:
            raise InputError("without a GPU there is nothing to measure; --quick shows that everything runs")
        about = _about(runtime, options.quick)
        points: list[Point] = []
        for name in dict.fromkeys(options.suite or SUITES):
            if sys.stderr.isatty():
                print(f"timing {name} ...", file=sys.stderr)
            points += SUITES[name](runtime, options.quick)
    print(_text(points, about))
    try:
        if options.json is not None:
            rows = [{**asdict(point), "panel": point.panel.title, "unit": point.panel.y} for point in points]
            options.json.write_text(json.dumps({**about, "points": rows}, indent=1) + "\n")
        if options.plot is not None:
            draw(points, _caption(about), options.plot)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib knows, and lacks a part for
        raise CommandError(f"the results cannot be written: {error}") from None
    return 0


def _about(runtime: CudaRuntime, quick: bool) -> dict[str, Any]:
    try:
        nvrtc = str(load_nvrtc())
    except CompileError:
        nvrtc = "no NVRTC"
    note = ""
    if runtime.device == "host":
        note = "host driver, not a measurement"
    elif quick:
        note = "--quick sizes, not a measurement"
    return {
        "device": runtime.device_name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "driver": "none" if runtime.device == "host" else runtime.driver_version,
        "nvrtc": nvrtc,
        "python": platform.python_version(),
        "nxrt_cuda": nxrt_cuda.__version__,
        "note": note,
    }


def _caption(about: dict[str, Any]) -> str:
    note = f"\nNOTE: {about['note']}" if about["note"] else ""
    return (
        f"{about['device']}, {about['date'][:10]}: driver {about['driver']}, {about['nvrtc']}, "
        f"Python {about['python']}, nxrt_cuda {about['nxrt_cuda']}{note}"
    )


def _text(points: Iterable[Point], about: dict[str, Any]) -> str:
    blocks = [_caption(about)]
    for panel, members in groupby(points, key=lambda point: point.panel):
        blocks.append(f"{panel.title}: {panel.setting}\n{indented(_table(list(members)))}")
    return "\n\n".join(blocks)


def _table(points: Sequence[Point]) -> str:
    panel = points[0].panel
    if not panel.x:
        return columns(["call", panel.y], [[point.series, f"{point.value:.2f}"] for point in points])
    series = list(dict.fromkeys(point.series for point in points))
    values = {(point.series, point.x): point.value for point in points}
    rows = [[x, *(f"{values[name, x]:.4g}" for name in series)] for x in dict.fromkeys(point.x for point in points)]
    return f"{panel.y}\n{columns([panel.x, *series], rows)}"
