"""Drawing measurements with matplotlib, where that is installed: one panel a set of axes, and where it was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxrt_cuda.cli.errors import CommandError, InputError
from nxrt_cuda.cli.measure import Panel, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MissingPackageError", "check_plot", "draw"]

_STYLES: Mapping[str, Mapping[str, Any]] = {
    "float32": {"color": "#7f7f7f", "marker": "o"},
    "bfloat16": {"color": "#1f77b4", "marker": "s"},
    # Dashed, for it often lies on the line of bfloat16.
    "float16": {"color": "#d95f02", "marker": "^", "linestyle": "--"},
}
_BAR_COLOUR = "#1f77b4"
_PANEL_INCHES = (5.6, 3.7)
_COLUMNS = 2


class MissingPackageError(CommandError):
    """A package that the command needs is not installed; the message has the command that installs it."""


def check_plot(path: Path) -> None:
    """Refuse, before anything is measured, what could not be drawn afterwards.

    Raises:
        MissingPackageError: matplotlib is not installed.
        InputError: it does not write the format that the suffix names.
    """
    _require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    suffix = path.suffix.removeprefix(".").lower()
    if suffix and suffix not in formats:
        raise InputError(f"--plot {path}: matplotlib writes no {suffix!r}; it writes {', '.join(sorted(formats))}")


def _require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise MissingPackageError('--plot needs matplotlib, which is not installed: pip install "nxrt_cuda[bench]"')


def draw(points: Sequence[Point], caption: str, path: Path) -> None:
    """Draw ``points``, a panel for each that they name, with ``caption`` below.

    Raises:
        MissingPackageError: matplotlib is not installed.
        OSError, ValueError: the file cannot be written.
    """
    _require_matplotlib()
    # No pyplot: it would look for a display.
    from matplotlib.figure import Figure

    panels = [(panel, list(members)) for panel, members in groupby(points, key=lambda point: point.panel)]
    across = min(_COLUMNS, len(panels))
    down = math.ceil(len(panels) / across)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * across, height * down + 0.5), dpi=150, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes, (panel, members) in zip(grid.flat, panels, strict=False):
        if panel.x:
            _draw_lines(axes, panel, members)
        else:
            _draw_bars(axes, panel, members)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(caption, fontsize=8, color="#555555", x=0.01, ha="left")
    figure.savefig(path)


def _draw_lines(axes: Axes, panel: Panel, points: Sequence[Point]) -> None:
    from matplotlib.ticker import LogLocator

    for series, members in groupby(points, key=lambda point: point.series):
        line = [(point.x, point.value) for point in members]
        axes.plot(*zip(*line, strict=True), label=series, markersize=4.5, **_STYLES[series])
    sizes = sorted({point.x for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [_short(size) for size in sizes], minor=False)
    axes.minorticks_off()
    if panel.logarithmic:
        axes.set_yscale("log", subs=[])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.12g}")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
    _label(axes, panel, panel.x, panel.y)


def _draw_bars(axes: Axes, panel: Panel, points: Sequence[Point]) -> None:
    rows = range(len(points))
    bars = axes.barh(rows, [point.value for point in points], color=_BAR_COLOUR, height=0.35)
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    for row, point in zip(rows, points, strict=True):
        axes.text(0, row - 0.28, f" {point.series}", fontsize=9)
    axes.set_yticks([])
    axes.set_ylim(-0.7, len(points) - 0.6)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    _label(axes, panel, panel.y, "")


def _label(axes: Axes, panel: Panel, x: str, y: str) -> None:
    axes.set_title(f"{panel.title}\n", loc="left", fontsize=10, fontweight="bold")
    axes.text(0, 1.02, panel.setting, transform=axes.transAxes, fontsize=8, color="#555555")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _short(size: int) -> str:
    """``"512"``, ``"2k"``: sizes are powers of two."""
    return f"{size // 1024}k" if size >= 1024 and size % 1024 == 0 else str(size)
