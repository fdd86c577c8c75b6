"""What every kernel object asks of the memory behind its operands, whatever the operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import call
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nxrt_cuda.errors import KernelError
from nxrt_cuda.tensor import TensorMut, TensorView

if TYPE_CHECKING:
    from nxrt_cuda.runtime import CudaRuntime

__all__ = ["LastOperands", "check_memory", "operand_label"]


Bound = TypeVar("Bound")


class LastOperands(Generic[Bound]):
    """Recognises the operands of the latest execution, so that they need not be checked and bound again.

    Views are immutable: the same objects have the same addresses and layouts, and only their memory may
    have been freed since. They are not kept alive.
    """

    __slots__ = ("_absent", "_bound", "_frees", "_references", "_runtime")

    _absent: int
    _bound: Bound | None
    _frees: int
    _references: tuple[Callable[[], Any], ...]

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self.forget()

    def find(self, operands: tuple[TensorView | None, ...]) -> Bound | None:
        """What was bound to these very objects, unless memory was freed since."""
        if self._frees != self._runtime.explicit_frees:
            return None
        known = tuple(map(call, self._references))
        # The reference of an operand that is gone gives None too, as an absent one does.
        return self._bound if known == operands and known.count(None) == self._absent else None

    def remember(self, operands: tuple[TensorView | None, ...], bound: Bound) -> None:
        """``operands`` were checked, and ``bound`` has their addresses."""
        self._references = tuple([_nothing if view is None else weakref.ref(view) for view in operands])
        self._absent = operands.count(None)
        self._frees = self._runtime.explicit_frees
        self._bound = bound

    def forget(self) -> None:
        """Nothing is bound until the next :meth:`remember`."""
        self._references = ()
        self._absent = 0
        self._frees = -1
        self._bound = None


def _nothing() -> None:
    return None


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

    for position, view in enumerate((*inputs, *outputs)):
        if view is None:
            continue
        owner = view.owner
        if owner.runtime is not runtime:
            raise _refused(
                op, names, len(inputs), position, f"belongs to another runtime, not to the kernel's: {view!r}"
            )
        if owner.is_freed:
            raise _refused(op, names, len(inputs), position, f"was freed: {view!r}")
        itemsize = view.metadata.dtype.itemsize
        if view.ptr % itemsize:
            raise _refused(
                op,
                names,
                len(inputs),
                position,
                f"at 0x{view.ptr:x} is misaligned; {view.dtype} is aligned to {itemsize} bytes",
            )
    for position, output in enumerate(outputs, len(inputs)):
        if not isinstance(output, TensorMut):
            raise _refused(op, names, len(inputs), position, f"is read-only; an output is a TensorMut, got {output!r}")
        begin, end = output.ptr, output.ptr + output.nbytes
        for other, view in enumerate(inputs):
            if view is not None and view.ptr < end and begin < view.ptr + view.metadata.span_bytes:
                label = operand_label(names, len(inputs), other)
                raise _refused(op, names, len(inputs), position, f"overlaps {label}: {output!r} and {view!r}")


def _refused(op: str, names: Sequence[str], inputs: int, position: int, what: str) -> KernelError:
    return KernelError(op, f"{operand_label(names, inputs, position)} {what}", operand=names[position])
