"""What an execution is around the launches of its operator: repeated, compiled for, and counted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from nxrt_cuda.errors import KernelError
from nxrt_cuda.kernel import Kernel
from nxrt_cuda.launch import KernelSpec
from nxrt_cuda.ops.launch_ledger import LaunchLedger, Tally
from nxrt_cuda.tensor import TensorMut, TensorView

if TYPE_CHECKING:
    from nxrt_cuda.modules import LoadedFunction
    from nxrt_cuda.runtime import CudaRuntime
    from nxrt_cuda.short_way import PlannedLaunches, ShortWay

__all__ = ["OperatorKernel", "loaded"]

Choice = TypeVar("Choice")


class _NotLoaded(Exception):
    """A kernel is missing."""

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec.label)
        self.spec = spec


def loaded(runtime: CudaRuntime, spec: KernelSpec) -> LoadedFunction:
    """The kernel of a specialisation, within an execution; one that is not loaded ends this attempt at it."""
    function = runtime.find_function(spec)
    if function is None:
        raise _NotLoaded(spec)
    return function


class OperatorKernel(Kernel, Generic[Choice]):
    """A node of one of this package's operators on one runtime.

    Any thread may execute it; executions of one object are ordered by the runtime's lock.

    Args:
        runtime: where to run.
        process_ledger: counts the executions of all of the operator's objects.
    """

    def __init__(self, runtime: CudaRuntime, process_ledger: LaunchLedger[Choice]) -> None:
        self._runtime = runtime
        self._process_ledger = process_ledger
        self._ledger = LaunchLedger(process_ledger.kinds, process_ledger)
        self._short_way: ShortWay[Tally[Choice]] = runtime.short_way()

    def __repr__(self) -> str:
        executions = self._ledger.totals()[0][0]
        return f"{type(self).__name__}({self._runtime.device!r}, {executions} execution(s))"

    def execute(self, inputs: Sequence[TensorView | None], outputs: Sequence[TensorMut]) -> None:
        """Enqueue the operator on the compute stream; the docstring of its module describes the operands.

        Raises:
            KernelError: an operand is not what the operator takes; nothing was launched, counted or grown.
            UnsupportedError: no kernel serves the operands, or the headers that theirs needs are missing.
            CaptureError: a capture is open, and the shape was not warmed before it.
            CompileError: a kernel does not compile.
        """
        try:
            operands = [*inputs, *outputs]
            tally = self._short_way.execute(operands, self._rebind) if len(outputs) == 1 else None
            if tally is None:
                tally = self._execute_anew(inputs, outputs, operands)
        except (AttributeError, TypeError, ValueError):
            # What is no tensor shows in what it cannot do. To look first would cost every execution.
            self._refuse_other_than_tensors(inputs=inputs, outputs=outputs)
            raise
        if self._ledger.last is not tally or self._process_ledger.last is not tally:
            self._ledger.executed(tally)

    def _execute_anew(
        self,
        inputs: Sequence[TensorView | None],
        outputs: Sequence[TensorMut],
        operands: list[TensorView | None],
    ) -> Tally[Choice]:
        """:meth:`_execute`, with the kernels that it misses loaded between its attempts."""
        functions = []  # the module cache alone need not keep what nothing refers to yet
        while True:
            try:
                return self._execute(inputs, outputs, operands)
            except _NotLoaded as missing:
                spec = missing.spec
            # A compile takes seconds; other threads work meanwhile.
            functions.append(self._runtime.function(spec))

    def _refuse_other_than_tensors(self, **lists: Sequence[object]) -> None:
        op = type(self).__name__.removesuffix("Kernel")
        for name, operands in lists.items():
            if not isinstance(operands, Sequence):
                raise KernelError(op, f"{name} must be a list of tensors, got {type(operands).__name__}") from None
            for index, operand in enumerate(operands):
                if not isinstance(operand, TensorView | None):
                    what = f"{name.removesuffix('s')} {index} is no tensor of this package"
                    kind = type(operand)
                    raise KernelError(
                        op, f"{what}, but a {kind.__module__}.{kind.__qualname__}; rt.from_array(array) makes one"
                    ) from None

    @abstractmethod
    def _rebind(self, operands: list[TensorView | None]) -> PlannedLaunches[Tally[Choice]] | None:
        """Check ``operands``, one output behind the inputs, and write their addresses into the launches for them.

        None where there are none of an earlier execution. Called on the short way: it takes no lock, and allocates
        and launches nothing.
        """

    @abstractmethod
    def _execute(
        self,
        inputs: Sequence[TensorView | None],
        outputs: Sequence[TensorMut],
        operands: list[TensorView | None],
    ) -> Tally[Choice]:
        """:meth:`execute` the long way; ``operands`` are the inputs, then the outputs.

        It asks :func:`loaded` for its kernels before it launches, counts or takes a workspace: where one is missing,
        all is done again.
        """
