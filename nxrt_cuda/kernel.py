"""The contract between the runtime and kernel objects, and the registry of operators.

A kernel object is made once for a node (:func:`create_kernel`), executed many times, and may be
recorded into a graph when :meth:`Kernel.capture_support` says so. ``execute`` is stream-ordered: it
enqueues work on the runtime's compute stream and returns; no kernel object ever waits for the
device. The first execution compiles and sizes the workspace, so it must happen before a capture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nxrt_cuda.capture import DeviceGraphResource
from nxrt_cuda.dtype import DataType
from nxrt_cuda.errors import KernelError, UnsupportedError
from nxrt_cuda.node import Node
from nxrt_cuda.process_bound import ProcessBound
from nxrt_cuda.tensor import TensorMetadata, TensorMut, TensorView

if TYPE_CHECKING:
    from nxrt_cuda.launch import KernelSpec
    from nxrt_cuda.runtime import CudaRuntime

__all__ = [
    "CaptureSupport",
    "Kernel",
    "KernelFactory",
    "WorkspaceRequirement",
    "create_kernel",
    "kernel_factory",
    "operator_factories",
    "register",
    "registered_ops",
    "unsupported_reason",
]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class CaptureSupport:
    """Whether a kernel may be recorded into a graph now, and if not, why. Truthy when supported."""

    reason: str | None = None

    @property
    def is_supported(self) -> bool:
        return self.reason is None

    def __bool__(self) -> bool:
        return self.is_supported

    def __str__(self) -> str:
        return "Supported" if self.reason is None else f"Unsupported: {self.reason}"

    @classmethod
    def supported(cls) -> CaptureSupport:
        return cls()

    @classmethod
    def unsupported(cls, reason: str) -> CaptureSupport:
        return cls(reason)


@dataclass(frozen=True)
class WorkspaceRequirement:
    """Scratch that the *caller* has to provide; a kernel that owns its scratch asks for none.

    Attributes:
        nbytes: how much.
        alignment: of its first byte, a power of two.
    """

    nbytes: int = 0
    alignment: int = 256

    NONE: ClassVar[WorkspaceRequirement]


WorkspaceRequirement.NONE = WorkspaceRequirement()


class Kernel(ProcessBound, ABC):
    """One operator instance that can run on a runtime."""

    INSTEAD = "a Node can; create_kernel() makes a kernel of it"

    @abstractmethod
    def execute(self, inputs: Sequence[TensorView | None], outputs: Sequence[TensorMut]) -> None:
        """Enqueue the operator on the compute stream; ``None`` is an absent input.

        Raises:
            KernelError: an operand is not what the operator takes; nothing was launched.
        """

    def workspace_requirement(self, inputs: Sequence[TensorMetadata]) -> WorkspaceRequirement:
        """Scratch that the caller must provide for these inputs; also validates their shapes."""
        return WorkspaceRequirement.NONE

    def capture_support(self) -> CaptureSupport:
        """Whether :meth:`execute` may be recorded now."""
        return CaptureSupport.unsupported("the kernel does not declare capture support")

    def device_graph_resources(self) -> tuple[DeviceGraphResource, ...]:
        """What a graph that records this kernel has to keep alive."""
        return ()

    def supports_strided_input(self, index: int) -> bool:
        """Whether input ``index`` may be other than contiguous."""
        return False

    @abstractmethod
    def launch_stats(self) -> Any:
        """A frozen snapshot of this kernel's launch counters."""

    @abstractmethod
    def workspace_stats(self) -> Any:
        """A frozen snapshot of this kernel's workspace counters."""


class KernelFactory(ABC):
    """Makes kernel objects of one operator on one runtime."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime

    @abstractmethod
    def create(self, node: Node, shapes: Sequence[Shape | None]) -> Kernel:
        """A kernel for ``node``; ``shapes`` are those of its inputs, None where unknown or absent.

        Raises:
            KernelError: an attribute is missing, ill-typed, out of range or unknown.
        """

    @classmethod
    def output_metadata(cls, node: Node, inputs: Sequence[TensorMetadata | None]) -> tuple[TensorMetadata, ...]:
        """The outputs that ``node`` has for ``inputs``, None where absent. An engine allocates them by it.

        Called with inputs that the claim gate has passed.

        Raises:
            UnsupportedError: the operator does not say, so that no engine can run it.
        """
        raise UnsupportedError(f"{cls.__name__} does not say what outputs {node.op_type} has")

    @classmethod
    def kernel_specs(cls, compute_capability: tuple[int, int]) -> tuple[KernelSpec, ...]:
        """What :func:`~nxrt_cuda.precompile` compiles ahead for the operator on such a device."""
        return ()

    @classmethod
    def batch_inputs(cls, node: Node, inputs: Sequence[TensorMetadata | None]) -> tuple[int, ...]:
        """Positions of the inputs whose axis 0 is a batch.

        Element i of it reaches element i of axis 0 of the outputs and nothing else, and zeros are valid
        contents; so a caller may pad the batch and ignore what comes out for the padding.
        """
        return ()


UnsupportedReason = Callable[[Node, Sequence[Shape | None], Sequence[DataType | None]], str | None]

_registry: dict[tuple[str, str], tuple[type[KernelFactory], UnsupportedReason]] = {}


def _key(domain: str, op_type: str) -> tuple[str, str]:
    return ("" if domain == "ai.onnx" else domain, op_type)


def register(domain: str, op_type: str, factory: type[KernelFactory], reason: UnsupportedReason) -> None:
    """Serve ``op_type`` of ``domain`` by ``factory``; ``reason`` is its claim gate."""
    _registry[_key(domain, op_type)] = (factory, reason)


def registered_ops() -> tuple[tuple[str, str], ...]:
    """The (domain, op_type) pairs that have a kernel."""
    return tuple(sorted(_registry))


def operator_factories() -> Mapping[tuple[str, str], type[KernelFactory]]:
    """The factories by (domain, op_type)."""
    return {key: factory for key, (factory, _) in sorted(_registry.items())}


def _lookup(node: Node) -> tuple[type[KernelFactory], UnsupportedReason]:
    if not isinstance(node, Node):
        raise KernelError(str(node), f"a kernel is made of a Node, such as Node('Attention'), not of {node!r}")
    try:
        return _registry[_key(node.domain, node.op_type)]
    except KeyError:
        served = ", ".join(f"{d or 'ai.onnx'}::{op}" for d, op in registered_ops())
        raise UnsupportedError(
            f"no kernel for {node.domain or 'ai.onnx'}::{node.op_type}; there are kernels for {served}"
        ) from None


def kernel_factory(node: Node) -> type[KernelFactory]:
    """The factory that serves ``node``'s operator.

    Raises:
        UnsupportedError: there is none.
        KernelError: ``node`` is no node.
    """
    return _lookup(node)[0]


def unsupported_reason(node: Node, shapes: Sequence[Shape | None], dtypes: Sequence[DataType | None]) -> str | None:
    """The claim gate: why ``node`` cannot be served with these inputs, or None if it can.

    Answers before anything is created, compiled or allocated.
    """
    try:
        _, reason = _lookup(node)
    except UnsupportedError as error:
        return str(error)
    return reason(node, shapes, dtypes)


def create_kernel(runtime: CudaRuntime, node: Node, shapes: Sequence[Shape | None] = ()) -> Kernel:
    """A kernel object for ``node`` on ``runtime``.

    Raises:
        UnsupportedError: no kernel is registered for the node's operator.
        KernelError: an attribute is wrong, or ``node`` is no node.
    """
    return kernel_factory(node)(runtime).create(node, shapes)
