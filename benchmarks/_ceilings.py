"""What a device reaches at best, measured beside what is compared with it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks._timing import DeviceClock, Subject, time_subjects
from benchmarks._torch import TorchPeer

__all__ = ["Ceilings", "Floor"]

_MATRIX = 8192
_COPY_BYTES = 1 << 30
_CALLS = 8


@dataclass(frozen=True)
class Floor:
    """The least time that some work can take.

    Attributes:
        ms: milliseconds.
        bound: ``"tensor"`` or ``"memory"``: which of the two takes that long.
    """

    ms: float
    bound: str


@dataclass(frozen=True)
class Ceilings:
    """Of one device.

    Attributes:
        tensor: bf16 operations a millisecond in a product of two random matrices of 8192 x 8192, by PyTorch.
        memory: bytes a millisecond, read or written, of a copy of a GiB.
    """

    tensor: float
    memory: float

    @classmethod
    def measure(cls, clock: DeviceClock, peer: TorchPeer) -> Ceilings:
        """Time the product and the copy, in graphs and in turns."""
        torch = peer.torch
        left, right, product = (torch.randn(_MATRIX, _MATRIX, device="cuda").bfloat16() for _ in range(3))
        source, target = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
        calls = {
            "tensor": lambda _: torch.mm(left, right, out=product),
            "memory": lambda _: target.copy_(source),
        }
        subjects = {name: Subject(peer.record(call, range(_CALLS)), _CALLS) for name, call in calls.items()}
        ms = {name: timing.ms for name, timing in time_subjects(clock, subjects).items()}
        return cls(2 * _MATRIX**3 / ms["tensor"], 2 * _COPY_BYTES / ms["memory"])

    def floor(self, operations: float, nbytes: float) -> Floor:
        """Of work that takes so many bf16 operations and touches so many bytes."""
        tensor, memory = operations / self.tensor, nbytes / self.memory
        return Floor(tensor, "tensor") if tensor > memory else Floor(memory, "memory")
