"""What a device reaches at best, measured beside what is compared with it."""

from __future__ import annotations

from benchmarks._timing import DeviceClock, Subject, time_subjects
from benchmarks._torch import TorchPeer

__all__ = ["measure_tensor_rate"]

_MATRIX = 8192
_CALLS = 8


def measure_tensor_rate(clock: DeviceClock, peer: TorchPeer) -> float:
    """bf16 operations a millisecond in a product of two random matrices of 8192 x 8192, by PyTorch."""
    torch = peer.torch
    left, right = (torch.randn(_MATRIX, _MATRIX, device="cuda").bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    replay = peer.record(lambda _: torch.mm(left, right, out=product), range(_CALLS))
    timing = time_subjects(clock, {"product": Subject(replay, _CALLS)})["product"]
    return 2.0 * _MATRIX**3 / timing.ms
