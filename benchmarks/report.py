"""Write the tables of README.md from results/*.json, so that no figure in it is typed by hand.

python -m benchmarks.report            # rewrite them
python -m benchmarks.report --check    # exit status 1 where they are not those of the results
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import attention, dsa, dsa_exactness, launch
from benchmarks._environment import header

__all__ = ["main", "render", "section"]

_HERE = Path(__file__).parent
_SCRIPTS = {"attention": attention, "dsa": dsa, "dsa_exactness": dsa_exactness, "launch": launch}
_BEGIN, _END = "<!-- results -->\n", "<!-- end of results -->\n"


def section(results: dict[str, Any]) -> str:
    """One results file as Markdown.

    Raises:
        ValueError: it is no measurement.
    """
    if results["caveat"]:
        raise ValueError(results["caveat"])
    name = results["benchmark"]
    table = _SCRIPTS[name].tabulate(results["rows"])
    return "\n\n".join([f"### {name}", *header(results).splitlines(), table.markdown()]) + "\n"


def render(readme: str, results: Path) -> str:
    """``readme`` with the tables of every file in the directory ``results``."""
    sections = []
    for path in sorted(results.glob("*.json")):
        try:
            sections.append(section(json.loads(path.read_text())))
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
    before, _, rest = readme.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return before + _BEGIN + "".join(f"\n{text}" for text in sections) + "\n" + _END + after


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report")
    parser.add_argument("--check", action="store_true", help="change nothing; say whether the tables are current")
    options = parser.parse_args(arguments)
    path = _HERE / "README.md"
    readme = path.read_text()
    try:
        rendered = render(readme, _HERE / "results")
    except ValueError as error:
        parser.error(str(error))
    if options.check:
        sys.exit(0 if rendered == readme else "README.md has other tables than results/*.json; run benchmarks.report")
    path.write_text(rendered)


if __name__ == "__main__":
    main()
