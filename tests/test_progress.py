"""Progress of compiles on a terminal: a pseudo-terminal stands in for one."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
from nxrt_cuda import KernelSpec
from nxrt_cuda.compile import NvrtcCompiler
from nxrt_cuda.errors import CompileError
body = 'extern "C" __global__ void f() {'
compiler = NvrtcCompiler("sm_90a")
compiler.compile(KernelSpec("a.cu", "f", (), 32, code=body + "}"))
try:
    compiler.compile(KernelSpec("a.cu", "g", (), 32, code=body))
except CompileError:
    pass
"""


def stderr_of(program: str, *, terminal: bool, **environment: str) -> str:
    """What a program writes to stderr, a terminal or a pipe."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    if not terminal:
        done = subprocess.run([sys.executable, "-c", program], env=env, stderr=subprocess.PIPE, timeout=60, check=True)
        return done.stderr.decode()
    ours, its = pty.openpty()
    try:
        with subprocess.Popen([sys.executable, "-c", program], env=env, stderr=its) as process:
            os.close(its)
            written = b""
            while True:
                try:
                    part = os.read(ours, 4096)
                except OSError:  # the other end is closed
                    break
                written += part
        assert process.returncode == 0, written
        return written.decode()
    finally:
        os.close(ours)


def test_a_terminal_sees_a_line_for_every_compile() -> None:
    """Open while it compiles; then with the seconds it took, or that it failed."""
    seen = stderr_of(_PROGRAM, terminal=True)
    lines = [line.split("\r")[-1].removeprefix("\x1b[K") for line in seen.split("\r\n")]
    assert seen.startswith("\r\x1b[Kcompiling f for sm_90a ...\r")
    assert re.fullmatch(r"compiling f for sm_90a \.\.\. \d+\.\d s", lines[0])
    assert lines[1:] == ["compiling g for sm_90a ... failed", ""]


@pytest.mark.parametrize(("terminal", "environment"), [(False, {}), (True, {"NXRT_CUDA_PROGRESS": "0"})])
def test_nothing_is_written_elsewhere(terminal: bool, environment: dict[str, str]) -> None:
    """Neither to a pipe, nor where the environment objects."""
    assert stderr_of(_PROGRAM, terminal=terminal, **environment) == ""
