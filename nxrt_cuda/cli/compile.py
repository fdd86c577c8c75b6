"""``compile``: fill the program cache ahead of the first run."""

from __future__ import annotations

import argparse
import json

from nxrt_cuda.ahead_of_time import PrecompileReport, precompile
from nxrt_cuda.cli.errors import CheckFailedError, InputError
from nxrt_cuda.cli.inputs import count_from
from nxrt_cuda.errors import CompileError, NoDeviceError, RuntimeStateError, TensorError, UnsupportedError

__all__ = ["add_parser"]

_DESCRIPTION = """\
Compile the operators' kernels into the program cache, so that later processes load them instead. No GPU is
needed where an architecture is named. The cache is the one that runtimes use; NXRT_CUDA_CACHE_DIR names another."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = commands.add_parser("compile", help="compile kernels ahead of the first run", description=_DESCRIPTION)
    add = parser.add_argument
    add("--arch", metavar="ARCH", nargs="+", help="such as sm_80 or sm_90a (default: this machine's devices)")
    add("--op", metavar="OP", nargs="+", help="operators, such as Attention (default: all)")
    add("--dtype", metavar="DTYPE", nargs="+", help="element types, such as float16 (default: all)")
    add("--jobs", metavar="N", type=count_from(1), help="compiler processes at a time (default: one a processor)")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; see the parser for ``options``."""
    try:
        report = precompile(options.arch, ops=options.op, dtypes=options.dtype, jobs=options.jobs)
    except (NoDeviceError, RuntimeStateError, TensorError, UnsupportedError) as error:
        raise InputError(str(error)) from None
    except CompileError as error:
        # Of one that the user has named, be it ''; otherwise the compiler is missing.
        if error.arch or error.arch in (options.arch or ()):
            raise InputError(str(error)) from None
        raise
    print(json.dumps(_as_dict(report), indent=2) if options.json else report)
    if report.failures:
        raise CheckFailedError(f"{len(report.failures)} of {len(report.programs)} programs are not in the cache")
    return 0


def _as_dict(report: PrecompileReport) -> dict[str, object]:
    return {
        "cache": report.directory,
        "seconds": report.seconds,
        "compiled": report.compiled,
        "found": report.found,
        "failed": len(report.failures),
        "programs": [
            {
                "program": program.spec.label,
                "arch": program.arch,
                "seconds": program.seconds,
                "was_cached": program.was_cached,
                "error": None if program.error is None else str(program.error),
            }
            for program in report.programs
        ],
    }
