"""What a GPU run was a run of: a digest of the sources and the tests that decide its outcome."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "gpu" / "last_run.json"

NO_GPU = "no GPU"
"""Why a test of tests/gpu is skipped."""


def source_digest() -> str:
    """sha256 over the paths and bytes of kernels/, nxrt_cuda/, the GPU tests and the test modules these use."""
    return digest_of({*_sources(), *_with_imports((ROOT / "tests" / "gpu").glob("*.py"))})


def digest_of(files: Iterable[Path]) -> str:
    """sha256 over the paths, below the repository's root, and the bytes of ``files``, in whatever order they come."""
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def record_line(skipped: int) -> str:
    """What a run says of the GPU tests: how many it skipped, and what the last recorded run was."""
    missing = f"{skipped} tests skipped, {NO_GPU}; " if skipped else ""
    return f"gpu: {missing}record: {_last_run()}"


def _last_run() -> str:
    if not RECORD.exists():
        return "none"
    record = json.loads(RECORD.read_text())
    age = "of these sources and tests" if record["sources"] == source_digest() else "STALE"
    return f"{record['passed']} passed on {record['device']}, {record['date']}, {age}"


def _sources() -> Iterator[Path]:
    for directory in ("kernels", "nxrt_cuda"):
        yield from (p for p in (ROOT / directory).rglob("*") if p.suffix in (".py", ".cu", ".cuh"))


def _with_imports(files: Iterable[Path]) -> set[Path]:
    """``files``, and the modules of tests/ that they import, directly or not."""
    found: set[Path] = set()
    waiting = [ROOT / "tests" / "conftest.py", *files]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imports(path)
    return found


def _imports(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("tests"):
            module = ROOT.joinpath(*node.module.split("."))
            candidates = [module.with_suffix(".py"), *(module / f"{alias.name}.py" for alias in node.names)]
            yield from (candidate for candidate in candidates if candidate.is_file())
