"""Where the files that are no Python are: packed into the wheel, or in the checkout that this package is part of."""

from __future__ import annotations

from pathlib import Path

__all__ = ["data_directory", "kernel_directory"]

_PACKAGE = Path(__file__).parent


def kernel_directory() -> Path:
    """The kernel sources: ``nxrt_cuda/kernels`` of the wheel, else the checkout's ``kernels/``."""
    return _packed_or("kernels", _PACKAGE.parent / "kernels")


def data_directory() -> Path:
    """The recorded tensors of the demo: ``nxrt_cuda/data`` of the wheel, else the checkout's ``tests/data/``."""
    return _packed_or("data", _PACKAGE.parent / "tests" / "data")


def _packed_or(name: str, checkout: Path) -> Path:
    packed = _PACKAGE / name
    return packed if packed.is_dir() else checkout
