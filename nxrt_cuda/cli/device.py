"""Opening the device that a command was asked to use."""

from __future__ import annotations

from nxrt_cuda.cli.errors import InputError
from nxrt_cuda.devices import open_runtime
from nxrt_cuda.errors import NoDeviceError, RuntimeStateError
from nxrt_cuda.runtime import CudaRuntime

__all__ = ["device_line", "open_device"]


def open_device(name: str | None) -> CudaRuntime:
    """The runtime on ``name``, or on the default device.

    Raises:
        InputError: there is no such device, or the environment asks for what no runtime opens with.
    """
    try:
        return open_runtime(name)
    except (NoDeviceError, RuntimeStateError) as error:
        raise InputError(str(error) if name is None else f"--device {name}: {error}") from None


def device_line(runtime: CudaRuntime) -> str:
    """Which device this is, in words."""
    if runtime.device == "host":
        return "host driver: kernels run on this CPU, in NumPy; no GPU is used"
    major, minor = runtime.capabilities.compute_capability
    return f"{runtime.device}: {runtime.device_name}, compute capability {major}.{minor}"
