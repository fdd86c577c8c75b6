"""Kernels that an execution needs are compiled while other threads work: not with the runtime's lock held."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from nxrt_cuda.launch import KernelSpec

if TYPE_CHECKING:
    from nxrt_cuda.modules import LoadedFunction
    from nxrt_cuda.runtime import CudaRuntime

__all__ = ["NotLoaded", "loaded", "loading"]

Result = TypeVar("Result")


class NotLoaded(Exception):
    """A kernel is missing; :func:`loading` loads it."""

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec.label)
        self.spec = spec


def loaded(runtime: CudaRuntime, spec: KernelSpec) -> LoadedFunction:
    """The kernel of a specialisation, for calls within :func:`loading`; leaves the call where it is not loaded."""
    function = runtime.find_function(spec)
    if function is None:
        raise NotLoaded(spec)
    return function


def loading(runtime: CudaRuntime, call: Callable[[], Result]) -> Result:
    """What ``call`` returns, once all kernels that it asks :func:`loaded` for are there.

    It is made again after each one, and must have changed nothing where it does not come to its end.

    Raises:
        CaptureError: a kernel is missing and the runtime is capturing.
        CompileError: one does not compile.
    """
    kept = []  # the module cache alone need not keep what nothing refers to yet
    while True:
        try:
            return call()
        except NotLoaded as missing:
            spec = missing.spec
        kept.append(runtime.function(spec))
