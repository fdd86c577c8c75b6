"""Tables of strings, as aligned text for a terminal and as Markdown for the README."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Table", "milliseconds", "speedup"]


@dataclass(frozen=True)
class Table:
    """Cells by column; the first column is words, the others are right-aligned figures."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """Aligned columns, two spaces apart."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def markdown(self) -> str:
        """A GitHub table."""
        rule = ["---", *("--:" for _ in self.columns[1:])]
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.columns, rule, *self.rows))


def speedup(theirs: float, ours: float) -> str:
    """``theirs / ours`` as a factor: above 1, ours is the faster one."""
    ratio = theirs / ours
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def milliseconds(ms: float) -> str:
    """A device time to a microsecond, or to a tenth of one where it is short."""
    return f"{ms:.3f}" if ms >= 1 else f"{ms:.4f}"
