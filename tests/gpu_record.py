"""What a GPU run was a run of: a digest of every source that decides its outcome."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "gpu" / "last_run.json"


def source_digest() -> str:
    """sha256 over the paths and bytes of kernels/ and nxrt_cuda/."""
    digest = hashlib.sha256()
    files = [p for d in ("kernels", "nxrt_cuda") for p in (ROOT / d).rglob("*") if p.suffix in (".py", ".cu", ".cuh")]
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
