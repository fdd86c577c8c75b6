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
    op: str,
    runtime: CudaRuntime,
    names: Sequence[str],
    inputs: Sequence[TensorView | None],
    outputs: Sequence[TensorView],
) -> None:
    """Refuse operands whose memory a launch must not touch. ``names`` are the inputs', then the outputs'.

    Raises:
        KernelError: memory is freed, belongs to another runtime, or does not align the element type; or an
            output is read-only, or overlaps an input.
    """

    def refused(position: int, what: str) -> KernelError:
        label = operand_label(names, len(inputs), position)
        return KernelError(op, f"{label} {what}", operand=names[position])

    for position, view in enumerate((*inputs, *outputs)):
        if view is None:
            continue
        owner = view.owner
        if owner.runtime is not runtime:
            raise refused(position, f"belongs to another runtime, not to the kernel's: {view!r}")
        if owner.is_freed:
            raise refused(position, f"was freed: {view!r}")
        itemsize = view.metadata.dtype.itemsize
        if view.ptr % itemsize:
            raise refused(position, f"at 0x{view.ptr:x} is misaligned; {view.dtype} is aligned to {itemsize} bytes")
    for position, output in enumerate(outputs, len(inputs)):
        if not isinstance(output, TensorMut):
            raise refused(position, f"is read-only; an output is a TensorMut, got {output!r}")
        begin, end = output.ptr, output.ptr + output.nbytes
        for other, view in enumerate(inputs):
            if view is not None and view.ptr < end and begin < view.ptr + view.nbytes:
                label = operand_label(names, len(inputs), other)
                raise refused(position, f"overlaps {label}: {output!r} and {view!r}")
