"""Every error this package raises, in one tree.

::

    NxrtError
    ├── DriverError              a driver call failed: call, code, name, text
    │   ├── OutOfMemoryError     the driver has no memory left for an allocation
    │   ├── NoDeviceError        there is no driver, or no device, to open
    │   └── DeviceFaultError     the context is lost; the runtime repeats this until the process ends
    ├── CompileError             NVRTC refused a kernel: source, options, log
    ├── UnsupportedError         the claim gate: what is asked for is valid, and not served
    ├── CaptureError             illegal in the present capture state: operation, state
    ├── GraphError               a captured graph cannot do what is asked: graph, reason
    ├── DeviceMemoryError        a dead, foreign or misaddressed allocation
    ├── KernelError              a kernel object was given something it cannot run: op, operand
    ├── LaunchError              a launch is malformed: count, kind, grid or shared memory
    │   └── LaunchOverflowError  an argument does not fit its declared width (an OverflowError too)
    ├── TensorError              an array cannot become, or leave, a device tensor
    ├── EngineError              an engine's nodes do not fit together, or a call does not fit its inputs
    └── RuntimeStateError        the runtime is closed or forked, or cannot be opened or used so
        └── StreamTypeError      what was given as a stream is none (a TypeError too)

A message says what happened, why, and what to do. A call that raises has changed nothing: tensors,
workspaces, graphs and counters are as they were. Two failures of the driver itself cannot keep that: an
upload that breaks off leaves its target undefined, and a replay may have enqueued earlier segments.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "CompileError",
    "DeviceFaultError",
    "DeviceMemoryError",
    "DriverError",
    "EngineError",
    "GraphError",
    "KernelError",
    "LaunchError",
    "LaunchOverflowError",
    "NoDeviceError",
    "NxrtError",
    "OutOfMemoryError",
    "RuntimeStateError",
    "StreamTypeError",
    "TensorError",
    "UnsupportedError",
]


class NxrtError(Exception):
    """Base of every error raised by this package. Can be pickled, so that a worker process can raise it."""

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), self.args, self.__dict__)


class DriverError(NxrtError):
    """A CUDA driver call returned an error status.

    Attributes:
        call: the driver function, e.g. ``"cuMemAlloc"``.
        code: the numeric ``CUresult``.
        name: its symbol, e.g. ``"CUDA_ERROR_INVALID_VALUE"``.
        text: the driver's own description of it.
    """

    def __init__(self, call: str, code: int, name: str, text: str, context: str = "") -> None:
        self.call = call
        self.code = code
        self.name = name
        self.text = text
        self.context = context
        detail = f" ({context})" if context else ""
        super().__init__(f"{call} failed: {name} ({code}): {text}{detail}")


class OutOfMemoryError(DriverError):
    """The driver has no memory left for an allocation; ``context`` says how much was asked for."""


class NoDeviceError(DriverError):
    """There is no CUDA driver or no device; the host driver (``open_runtime("host")``) needs neither."""


class DeviceFaultError(DriverError):
    """A fault that destroys the CUDA context, such as an illegal address.

    Every later call on the runtime raises this same first error, and no data is returned. The
    process has to be restarted: CUDA does not let a context recover.

    Attributes:
        suspects: the launches enqueued since the last successful synchronise, oldest first.
    """

    def __init__(
        self,
        call: str,
        code: int,
        name: str,
        text: str,
        context: str = "",
        suspects: tuple[str, ...] = (),
    ) -> None:
        self.suspects = suspects
        super().__init__(call, code, name, text, context)


class CompileError(NxrtError):
    """NVRTC did not produce code for a kernel.

    Attributes:
        source: the kernel file or module name.
        arch: the target, e.g. ``"sm_90a"``.
        options: the compiler options, in order.
        log: the compiler's log, complete.
    """

    def __init__(self, message: str, *, source: str, arch: str, options: tuple[str, ...] = (), log: str = "") -> None:
        self.source = source
        self.arch = arch
        self.options = options
        self.log = log
        super().__init__(f"{message}\n{log.rstrip()}" if log.strip() else message)


class UnsupportedError(NxrtError):
    """The request is well formed and no kernel serves it; the message is the claim gate's reason."""


class CaptureError(NxrtError):
    """An operation is illegal in the present capture state.

    Attributes:
        operation: what was attempted, e.g. ``"alloc_raw"``.
        state: the capture state it met: ``"idle"`` or ``"capturing"``.
    """

    def __init__(self, message: str, *, operation: str, state: str) -> None:
        self.operation = operation
        self.state = state
        super().__init__(message)


class GraphError(NxrtError):
    """A captured graph cannot do what is asked of it: it is empty, closed, or refers to dead memory."""


class DeviceMemoryError(NxrtError):
    """A device allocation is dead, unknown, owned by another runtime, or still in use by a graph."""


class KernelError(NxrtError):
    """A kernel object was given something that it cannot run.

    Attributes:
        op: the operator type, e.g. ``"DsaIndexSelect"``.
        operand: the input, output or attribute at fault, where there is one.
    """

    def __init__(self, op: str, message: str, *, operand: str | None = None) -> None:
        self.op = op
        self.operand = operand
        super().__init__(f"cuda_ep {op}: {message}")


class LaunchError(NxrtError):
    """A launch is malformed: argument count or kind, grid, block or shared memory."""


class LaunchOverflowError(LaunchError, OverflowError):
    """An argument does not fit the width its kernel declares; it is never cut to fit."""


class TensorError(NxrtError):
    """An array cannot become a device tensor, or a tensor cannot be read as asked."""


class EngineError(NxrtError):
    """An engine's nodes do not fit together, or a call does not fit its declared inputs; nothing has run."""


class RuntimeStateError(NxrtError):
    """The runtime is closed, was inherited through ``fork``, or cannot be opened or used in this way."""


class StreamTypeError(RuntimeStateError, TypeError):
    """What was given as a stream is none."""


def _restore(kind: type[NxrtError], args: tuple[object, ...], state: dict[str, object]) -> NxrtError:
    """The unpickled error; its constructor takes other arguments than ``args``, which is the message."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
