"""Which device a runtime opens on: a GPU where there is one, else the host driver."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nxrt_cuda.context import PrimaryContext
from nxrt_cuda.driver.base import Driver
from nxrt_cuda.errors import NoDeviceError, RuntimeStateError
from nxrt_cuda.runtime import CudaRuntime

if TYPE_CHECKING:
    from nxrt_cuda.compile import Compiler
    from nxrt_cuda.driver.host import HostEntry

__all__ = ["open_runtime"]

logger = logging.getLogger("nxrt_cuda")


def open_runtime(
    device: str | None = None,
    *,
    stream: Any = None,
    eager_sync: bool = False,
    pool_limit: int | None = None,
    host_entries: Mapping[str, HostEntry] | None = None,
) -> CudaRuntime:
    """Open a runtime.

    Args:
        device: ``"cuda"``, ``"cuda:1"`` or ``"host"``; by default ``"cuda:0"`` where a driver and a device
            are found, else ``"host"``.
        stream: run on this stream instead of an own one: a handle, or an object with ``__cuda_stream__``,
            ``cuda_stream`` (PyTorch) or ``ptr`` (CuPy), which is kept alive.
        eager_sync: wait after every launch, so that a fault names the launch that caused it.
        pool_limit: bytes of free memory kept for reuse; by default the environment's
            ``NXRT_CUDA_POOL_BYTES``, or 256 MiB.
        host_entries: further kernels for the host driver, by entry name; unused on a GPU.

    Raises:
        NoDeviceError: a CUDA device was named, and there is no driver or no such device.
        RuntimeStateError: ``device`` is not of these forms, ``pool_limit`` is negative, ``stream`` is no stream, is
            the per-thread default stream, or does not go with ``device``; or this process was forked from one that
            has used CUDA.
        DriverError: the driver refuses, for example because the device is in use exclusively.
        DeviceFaultError: this process has lost the device's context to an earlier fault.
    """
    if pool_limit is not None and not (isinstance(pool_limit, int) and pool_limit >= 0):
        raise RuntimeStateError(f"pool_limit must be a whole number of bytes >= 0, got {pool_limit!r}")
    if device is None:
        device = "cuda:0" if _has_gpu() else "host"
    if not isinstance(device, str):
        raise RuntimeStateError(f"device must be 'cuda', 'cuda:<ordinal>' or 'host', got {device!r}")
    kind, _, ordinal = device.partition(":")
    if device != "host" and (kind != "cuda" or not (device == "cuda" or (ordinal.isascii() and ordinal.isdigit()))):
        raise RuntimeStateError(f"device must be 'cuda', 'cuda:<ordinal>' or 'host', got {device!r}")
    if device == "host":
        if stream is not None:
            raise RuntimeStateError("the host driver has streams of its own only; leave out stream")
        primary = _host_context(host_entries or {})
    else:
        primary = _cuda_context(int(ordinal or 0))
    try:
        return CudaRuntime(primary, _compiler(primary), stream=stream, eager_sync=eager_sync, pool_limit=pool_limit)
    except BaseException:
        primary.release()
        raise


@lru_cache(maxsize=1)
def _load_cuda_driver() -> tuple[Driver, int]:
    from nxrt_cuda.driver.cuda import CudaDriver

    return CudaDriver(), os.getpid()


def _cuda_driver() -> Driver:
    driver, process = _load_cuda_driver()
    if process != os.getpid():
        raise RuntimeStateError(
            "the process that this one was forked from has used CUDA, which does not survive a fork; "
            "start workers with multiprocessing's 'spawn' method and open the runtime there"
        )
    return driver


def _has_gpu() -> bool:
    try:
        return _cuda_driver().device_count() > 0
    except NoDeviceError as error:
        logger.info("no CUDA device, using the host driver: %s", error)
        return False


def _cuda_context(ordinal: int) -> PrimaryContext:
    driver = _cuda_driver()
    devices = driver.device_count()
    if ordinal >= devices:
        raise NoDeviceError(
            "cuDeviceGet", 101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal", f"cuda:{ordinal} of {devices}"
        )
    return PrimaryContext.acquire(driver, ordinal)


def _host_context(entries: Mapping[str, HostEntry]) -> PrimaryContext:
    from nxrt_cuda.driver.host import HostDriver
    from nxrt_cuda.reference import HOST_ENTRIES

    return PrimaryContext.acquire(HostDriver({**HOST_ENTRIES, **entries}), 0)


def _compiler(primary: PrimaryContext) -> Compiler:
    from nxrt_cuda.compile import HostCompiler, NvrtcCompiler
    from nxrt_cuda.program_cache import ProgramCache

    if primary.driver.name == "host":
        return HostCompiler()
    return NvrtcCompiler(primary.capabilities.compute_capability, cache=ProgramCache.from_environment())
