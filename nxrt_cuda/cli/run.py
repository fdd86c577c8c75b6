"""``run``: one operator on a user's own tensors."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from nxrt_cuda.cli.device import device_line, open_device
from nxrt_cuda.cli.errors import CheckFailedError, InputError
from nxrt_cuda.cli.inputs import check_writable, count_from, parse_attributes, read_inputs, split_names, write_outputs
from nxrt_cuda.cli.operators import OPERATORS, Operator, find_operator
from nxrt_cuda.cli.report import trial_text
from nxrt_cuda.cli.trial import Contents, Trial
from nxrt_cuda.dtype import data_type
from nxrt_cuda.errors import KernelError, TensorError, UnsupportedError
from nxrt_cuda.kernel import unsupported_reason
from nxrt_cuda.node import Node

__all__ = ["add_parser"]

_DESCRIPTION = """\
Run one operator on the tensors of a file: eagerly, captured into a graph, and replayed. Every replay is
compared with an eager execution, byte for byte. Prints counters and times."""

_EPILOG = """\
operators and their inputs, in the file under these names:
{operators}

attributes: a value without a point is an integer, one with a point or an exponent is a float, so
scale=1.0 and top_k=16.

bfloat16: NumPy has no such dtype. Store the bits as uint16 and name the arrays in --bfloat16. Outputs of
bfloat16 are written the same way.

exit status: 0; 1 where a comparison or the device fails; 2 where an input is at fault.

example:
  python -m nxrt_cuda run DsaIndexSelect --inputs tensors.npz --attr top_k=2048 --attr scale=0.0884 --out picked.npz"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = commands.add_parser(
        "run",
        help="run an operator on your own tensors",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(operators="\n".join(_signature(operator) for operator in OPERATORS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("op", metavar="OP", help="the operator, with or without its domain: DsaIndexSelect, pkg.nxrt::DsaIndexSelect")
    add("--inputs", metavar="FILE.npz", type=Path, required=True, help="an archive of the operator's inputs by name")
    add("--attr", metavar="NAME=VALUE", action="append", default=[], help="an attribute; repeat for more")
    add("--bfloat16", metavar="NAMES", action="append", default=[], help="arrays that hold bfloat16 as uint16 bits")
    add("--ignore", metavar="NAMES", action="append", default=[], help="arrays of the file that are no inputs")
    add("--replays", metavar="N", type=count_from(0), default=3, help="replays of the captured graph (default: 3)")
    add("--check", action="store_true", help="compare with the NumPy oracle too, which is slow for large tensors")
    add("--device", metavar="DEVICE", help='"cuda:0" or "host" (default: a GPU if there is one)')
    add("--out", metavar="OUT.npz", type=Path, help="where to write the output")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; see the parser for ``options``."""
    operator = find_operator(options.op)
    node = Node(operator.op_type, operator.domain, parse_attributes(options.attr))
    arrays = read_inputs(
        options.inputs,
        operator,
        bfloat16=split_names(options.bfloat16),
        ignored=split_names(options.ignore),
    )
    if options.out is not None:
        check_writable("--out", options.out)
        if options.out.exists() and options.out.samefile(options.inputs):
            raise InputError(f"--out {options.out} is the file of the inputs")
    contents = Contents("as given", arrays)
    try:
        _claim(operator, node, contents)
        with open_device(options.device) as runtime:
            report = Trial(runtime, operator, node, contents).run([contents] * options.replays, check=options.check)
            heading, device = device_line(runtime), runtime.device
    except (KernelError, TensorError, UnsupportedError) as error:
        raise InputError(str(error)) from error
    if options.json:
        print(json.dumps({"device": device, **report.as_dict()}, indent=2))
    else:
        print(f"{heading}\n\n{trial_text(report, device)}")
    if report.failures:
        raise CheckFailedError("; ".join(report.failures))
    if options.out is not None:
        write_outputs(options.out, {operator.output: report.result})
        print(f"{operator.output} written to {options.out}", file=sys.stderr)
    return 0


def _claim(operator: Operator, node: Node, contents: Contents) -> None:
    """Ask the claim gate before anything is opened.

    Raises:
        UnsupportedError: the operator does not serve these inputs.
        TensorError: a dtype is not a tensor's.
    """
    given = [contents.arrays.get(name) for name in operator.given(contents.arrays)]
    reason = unsupported_reason(
        node,
        [None if array is None else array.shape for array in given],
        [None if array is None else data_type(array.dtype) for array in given],
    )
    if reason is not None:
        raise UnsupportedError(reason)


def _signature(operator: Operator) -> str:
    required = ", ".join(operator.inputs[: operator.required])
    optional = ", ".join(operator.inputs[operator.required :])
    return f"  {operator.qualified_name}: {required}" + (f" [, {optional}]" if optional else "")
