"""One line on a terminal for every compile, so that the first call of a program does not seem to hang.

::

    compiling flash_attention_bf16 for sm_90a ... 0.8 s

Nothing is written where stderr is no terminal, nor where the environment says ``NXRT_CUDA_PROGRESS=0``.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

__all__ = ["compiling", "is_shown"]

_ERASE = "\r\x1b[K"

_lock = threading.Lock()
_under_way: list[str] = []
"""The compiles that are not done; the latest one's line is open on the terminal."""


def is_shown() -> bool:
    """Whether progress is shown: stderr is a terminal, and the environment does not object."""
    if os.environ.get("NXRT_CUDA_PROGRESS") == "0":
        return False
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


@contextmanager
def compiling(kernel: str, arch: str) -> Iterator[None]:
    """Show a line while the body compiles, and how long that took when it has."""
    if not is_shown():
        yield
        return
    line = f"compiling {kernel} for {arch} ..."
    started = perf_counter()
    with _lock:
        _under_way.append(line)
        _write(_ERASE + line)
    outcome = "failed"
    try:
        yield
        outcome = f"{perf_counter() - started:.1f} s"
    finally:
        with _lock:
            _under_way.remove(line)
            # Of several at once, one that is still under way takes the open line over.
            following = _under_way[-1] if _under_way else ""
            _write(f"{_ERASE}{line} {outcome}\n{following}")


def _write(text: str) -> None:
    with suppress(OSError):  # a terminal that is gone must not stop a compile
        sys.stderr.write(text)
        sys.stderr.flush()
