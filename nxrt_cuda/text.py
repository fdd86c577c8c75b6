"""Text for people: aligned columns, sizes and short floats."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["as_bytes", "as_shape", "columns", "indented"]

_NUMBER = re.compile(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?")


def columns(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """``rows`` under ``header``: columns of numbers to the right, all others to the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(header, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    align = [str.rjust if all(map(_NUMBER.fullmatch, column[1:])) else str.ljust for column in columns]
    return "\n".join(
        "  ".join(pad(cell, width) for cell, width, pad in zip(line, widths, align, strict=True)).rstrip()
        for line in [header, *cells]
    )


def indented(text: str, by: int = 2) -> str:
    """``text`` with every line moved right."""
    return "\n".join(" " * by + line if line else line for line in text.splitlines())


def as_bytes(nbytes: int) -> str:
    """A size as people say it: ``"512 B"``, ``"1.5 KiB"``, ``"139 GiB"``."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def as_shape(shape: Sequence[int]) -> str:
    """``"[4, 12, 21, 32]"``."""
    return f"[{', '.join(str(extent) for extent in shape)}]"
