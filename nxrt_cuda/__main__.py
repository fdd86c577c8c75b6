"""``python -m nxrt_cuda doctor | demo | run | compile | bench``.

Exit status: 0; 1 where a check or the device fails; 2 where what the user gave is at fault; 130 after an
interrupt. An error is one line on stderr.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import nxrt_cuda
from nxrt_cuda.cli import bench, compile, demo, doctor, run
from nxrt_cuda.cli.errors import CommandError
from nxrt_cuda.errors import NxrtError

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m nxrt_cuda",
        description="A driver-level CUDA runtime: what this machine can run, and both kernel systems at work.",
    )
    parser.add_argument("--version", action="version", version=f"nxrt_cuda {nxrt_cuda.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (doctor, demo, run, compile, bench):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser().parse_args(argv)
    name = f"nxrt_cuda {options.command.__module__.rpartition('.')[2]}"
    try:
        status: int = options.command(options)
        sys.stdout.flush()
    except CommandError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.status
    except (NxrtError, MemoryError) as error:
        print(f"{name}: {error or 'out of memory'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Nobody reads any more; keep the interpreter from flushing into the pipe once again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


if __name__ == "__main__":
    sys.exit(main())
