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


def check_memory(
    op: str, runtime: CudaRuntime, names: Sequence[str], operands: Sequence[TensorView | None], inputs: int
) -> None:
    """Refuse operands whose memory a launch must not touch: the first ``inputs`` are read, the others written.

    Raises:
        KernelError: memory is freed, belongs to another runtime, or does not align the element type; or an
            output is read-only, or overlaps an input.
    """
    for view in operands:
        if view is None:
            continue
        if view.owner.usable_in is not runtime or view.ptr % view.metadata.dtype.itemsize:
            raise _refused(op, names, inputs, _position(view, operands), _why_not(view, runtime))
    for output in operands[inputs:]:
        if not isinstance(output, TensorMut):
            what = f"is read-only; an output is a TensorMut, got {output!r}"
            raise _refused(op, names, inputs, _position(output, operands, inputs), what)
        begin, end = output.ptr, output.end
        for view in operands[:inputs]:
            if view is not None and view.ptr < end and begin < view.end:
                what = f"overlaps {operand_label(names, inputs, _position(view, operands))}: {output!r} and {view!r}"
                raise _refused(op, names, inputs, _position(output, operands, inputs), what)


def _why_not(view: TensorView, runtime: CudaRuntime) -> str:
    """What is wrong with the memory of one operand by itself."""
    if view.owner.runtime is not runtime:
        return f"belongs to another runtime, not to the kernel's: {view!r}"
    if view.owner.is_freed:
        return f"was {view.owner.fate}: {view!r}"
    return f"at 0x{view.ptr:x} is misaligned; {view.dtype} is aligned to {view.dtype.itemsize} bytes"


def _refused(op: str, names: Sequence[str], inputs: int, position: int, what: str) -> KernelError:
    return KernelError(op, f"{operand_label(names, inputs, position)} {what}", operand=names[position])


def _position(view: TensorView | None, operands: Sequence[TensorView | None], start: int = 0) -> int:
    """The first place of the object ``view``, from ``start`` on. A message needs it, no check does."""
    return next(position for position in range(start, len(operands)) if operands[position] is view)
