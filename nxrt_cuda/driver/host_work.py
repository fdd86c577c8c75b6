"""What the host driver's streams and graphs do: copies, fills and kernel calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol

from nxrt_cuda.driver.base import Dim3
from nxrt_cuda.driver.host_failure import Failure
from nxrt_cuda.driver.host_image import HostEntry, HostImage, HostLaunch

if TYPE_CHECKING:
    from nxrt_cuda.driver.host_memory import Allocation, DeviceMemory, DeviceRange, HostRange

__all__ = ["Copy", "Fill", "Function", "KernelCall", "Module", "Operation", "Work"]


class Work(Protocol):
    """Anything that can stand in a stream."""

    def run(self) -> None: ...


class Operation(Work, Protocol):
    """Work on memory, which a graph can record as a node."""

    node_type: ClassVar[str]

    def dead_operand(self) -> str | None:
        """The operand whose memory is gone, in words; None while all are alive."""
        ...


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes from one range to another. The source is read when the copy runs, not when it is queued."""

    node_type: ClassVar[str] = "MEMCPY"
    destination: DeviceRange | HostRange
    source: DeviceRange | HostRange

    def run(self) -> None:
        self.destination.array()[:] = self.source.array()

    def dead_operand(self) -> str | None:
        for what, operand in (("destination", self.destination), ("source", self.source)):
            if operand.freed_owner is not None:
                return f"{what} in {operand.freed_owner}"
        return None

    def __str__(self) -> str:
        return f"copy of {self.source.nbytes} bytes from {self.source} to {self.destination}"


@dataclass(frozen=True, slots=True)
class Fill:
    """One byte value over a range."""

    node_type: ClassVar[str] = "MEMSET"
    destination: DeviceRange
    value: int

    def run(self) -> None:
        self.destination.array()[:] = self.value

    def dead_operand(self) -> str | None:
        owner = self.destination.freed_owner
        return None if owner is None else f"destination in {owner}"

    def __str__(self) -> str:
        return f"memset of {self.destination.nbytes} bytes at {self.destination}"


class Module:
    """A loaded image."""

    __slots__ = ("image", "is_loaded")

    def __init__(self, image: HostImage) -> None:
        self.image = image
        self.is_loaded = True


class Function:
    """A kernel of a module, and the launch limits that can be set on it."""

    __slots__ = ("entry", "max_dynamic_shared", "module")

    def __init__(self, module: Module, entry: HostEntry, max_dynamic_shared: int) -> None:
        self.module = module
        self.entry = entry
        self.max_dynamic_shared = max_dynamic_shared

    @property
    def image(self) -> HostImage:
        return self.module.image


class KernelCall:
    """One launch, with the argument values it had when it was made."""

    node_type: ClassVar[str] = "KERNEL"
    __slots__ = ("arguments", "block", "cooperative", "function", "grid", "memory", "pointees", "shared_bytes")

    def __init__(
        self,
        function: Function,
        arguments: Mapping[str, int | float],
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        memory: DeviceMemory,
        cooperative: bool,
    ) -> None:
        self.function = function
        self.arguments = MappingProxyType(arguments)
        self.grid = grid
        self.block = block
        self.shared_bytes = shared_bytes
        self.memory = memory
        self.cooperative = cooperative
        self.pointees: dict[str, Allocation] = {}
        for name, kind in function.image.params:
            allocation = memory.find(int(arguments[name])) if kind == "ptr" else None
            if allocation is not None:
                self.pointees[name] = allocation

    def run(self) -> None:
        image = self.function.image
        if not self.function.module.is_loaded:
            raise Failure("CUDA_ERROR_ILLEGAL_ADDRESS", "its module was unloaded before it ran")
        launch = HostLaunch(
            image.entry,
            self.arguments,
            MappingProxyType(dict(image.macros)),
            self.grid,
            self.block,
            self.shared_bytes,
            self.memory,
        )
        try:
            self.function.entry(launch)
        except Exception:
            if launch.fault is None:
                raise
        if launch.fault is not None:
            raise launch.fault

    def dead_operand(self) -> str | None:
        if not self.function.module.is_loaded:
            return "the code of an unloaded module"
        for name, allocation in self.pointees.items():
            if allocation.is_freed:
                return f"argument '{name}' = 0x{self.arguments[name]:x} in {allocation}"
        return None

    def __str__(self) -> str:
        return f"kernel '{self.function.image.entry}' <<<{self.grid}, {self.block}>>>"
