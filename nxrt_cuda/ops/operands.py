"""What every kernel object asks of the memory behind its operands, whatever the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nxrt_cuda.errors import KernelError
from nxrt_cuda.tensor import TensorMut, TensorView

if TYPE_CHECKING:
    from nxrt_cuda.runtime import CudaRuntime

__all__ = ["check_memory", "operand_label"]


def operand_label(names: Sequence[str], inputs: int, position: int) -> str:
    """``input 1 ('key')``: how messages call the operand at ``position`` of the inputs, then the outputs."""
    kind, index = ("input", position) if position < inputs else ("output", position - inputs)
    return f"{kind} {index} ('{names[position]}')"


def check_memory(op: str, runtime: CudaRuntime, names: Sequence[str], operands: Sequence[TensorView | None]) -> None:
    """Refuse operands whose memory a launch must not touch: the last one is written, the others are read.

    Raises:
        KernelError: memory is freed, or belongs to another runtime; or the output is read-only, or overlaps an input.
    """
    output = operands[-1]
    if not isinstance(output, TensorMut):
        raise _refused(op, names, len(names) - 1, f"is read-only; an output is a TensorMut, got {output!r}")
    begin, end = output.ptr, output.end
    # Every execution goes through here, so that each operand is looked at once.
    meetings = 0
    for view in operands:
        if view is None:
            continue
        if view.owner.usable_in is not runtime:
            raise _refused(op, names, _position(view, operands), _why_not(view, runtime))
        if view.ptr < end and begin < view.end:
            meetings += 1
    if meetings > 1 and begin < end:  # the output meets itself, and if it is empty, nobody
        position = next(
            position
            for position, view in enumerate(operands)
            if view is not None and view.ptr < end and begin < view.end
        )
        label = operand_label(names, len(names) - 1, position)
        raise _refused(op, names, len(names) - 1, f"overlaps {label}: {output!r} and {operands[position]!r}")


def _why_not(view: TensorView, runtime: CudaRuntime) -> str:
    """What is wrong with the memory of one operand by itself."""
    if view.owner.runtime is not runtime:
        return f"belongs to another runtime, not to the kernel's: {view!r}"
    return f"was {view.owner.fate}: {view!r}"


def _refused(op: str, names: Sequence[str], position: int, what: str) -> KernelError:
    return KernelError(op, f"{operand_label(names, len(names) - 1, position)} {what}", operand=names[position])


def _position(view: TensorView, operands: Sequence[TensorView | None]) -> int:
    """The first place of the object ``view``. A message needs it, no check does."""
    return next(position for position, operand in enumerate(operands) if operand is view)
