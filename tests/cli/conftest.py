"""The command line in this process, and files for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from nxrt_cuda.__main__ import main


class Call(Protocol):
    """Runs a command in this process and returns (exit status, stdout, stderr)."""

    def __call__(self, *arguments: object) -> tuple[int, str, str]: ...


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exit:
            status = int(exit.code or 0)
        return (status, *capsys.readouterr())

    return run


@pytest.fixture
def npz(tmp_path: Path) -> Callable[..., Path]:
    """Writes an archive and returns its path."""

    def write(**arrays: np.ndarray) -> Path:
        path = tmp_path / "inputs.npz"
        np.savez(path, **arrays)
        return path

    return write
