"""The ``CUresult`` values that this package knows by name: code, text, and the error class that reports each.

One table for both drivers. The CUDA driver, which gets code and text with the status, asks it for the class
alone; to the host driver it is everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from nxrt_cuda.errors import DeviceFaultError, DriverError, NoDeviceError, OutOfMemoryError

__all__ = ["STATUSES", "Status", "error_class", "is_fault"]


class Status(NamedTuple):
    """One ``CUresult``; ``error`` is plain ``DriverError`` for what needs no class of its own."""

    code: int
    text: str
    error: type[DriverError] = DriverError


STATUSES: Mapping[str, Status] = MappingProxyType(
    {
        "CUDA_ERROR_INVALID_VALUE": Status(1, "invalid argument"),
        "CUDA_ERROR_OUT_OF_MEMORY": Status(2, "out of memory", OutOfMemoryError),
        "CUDA_ERROR_NOT_INITIALIZED": Status(3, "initialization error"),
        "CUDA_ERROR_STUB_LIBRARY": Status(34, "CUDA driver is a stub library", NoDeviceError),
        "CUDA_ERROR_NO_DEVICE": Status(100, "no CUDA-capable device is detected", NoDeviceError),
        "CUDA_ERROR_INVALID_DEVICE": Status(101, "invalid device ordinal"),
        "CUDA_ERROR_INVALID_IMAGE": Status(200, "device kernel image is invalid"),
        "CUDA_ERROR_INVALID_CONTEXT": Status(201, "invalid device context"),
        "CUDA_ERROR_NO_BINARY_FOR_GPU": Status(209, "no kernel image is available for execution on the device"),
        "CUDA_ERROR_ECC_UNCORRECTABLE": Status(214, "uncorrectable ECC error encountered", DeviceFaultError),
        "CUDA_ERROR_INVALID_PTX": Status(218, "a PTX JIT compilation failed"),
        "CUDA_ERROR_NVLINK_UNCORRECTABLE": Status(
            220, "uncorrectable NVLink error detected during the execution", DeviceFaultError
        ),
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": Status(
            222, "the provided PTX was compiled with an unsupported toolchain."
        ),
        "CUDA_ERROR_CONTAINED": Status(
            226, "Invalid access of peer GPU memory over nvlink or a hardware error", DeviceFaultError
        ),
        "CUDA_ERROR_INVALID_HANDLE": Status(400, "invalid resource handle"),
        "CUDA_ERROR_ILLEGAL_STATE": Status(401, "the operation cannot be performed in the present state"),
        "CUDA_ERROR_NOT_FOUND": Status(500, "named symbol not found"),
        "CUDA_ERROR_NOT_READY": Status(600, "device not ready"),
        "CUDA_ERROR_ILLEGAL_ADDRESS": Status(700, "an illegal memory access was encountered", DeviceFaultError),
        "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": Status(701, "too many resources requested for launch"),
        "CUDA_ERROR_LAUNCH_TIMEOUT": Status(702, "the launch timed out and was terminated", DeviceFaultError),
        "CUDA_ERROR_CONTEXT_IS_DESTROYED": Status(709, "context is destroyed"),
        "CUDA_ERROR_ASSERT": Status(710, "device-side assert triggered", DeviceFaultError),
        "CUDA_ERROR_HARDWARE_STACK_ERROR": Status(714, "hardware stack error", DeviceFaultError),
        "CUDA_ERROR_ILLEGAL_INSTRUCTION": Status(715, "an illegal instruction was encountered", DeviceFaultError),
        "CUDA_ERROR_MISALIGNED_ADDRESS": Status(716, "misaligned address", DeviceFaultError),
        "CUDA_ERROR_INVALID_ADDRESS_SPACE": Status(
            717, "operation not supported on global/shared address space", DeviceFaultError
        ),
        "CUDA_ERROR_INVALID_PC": Status(718, "invalid program counter", DeviceFaultError),
        "CUDA_ERROR_LAUNCH_FAILED": Status(719, "unspecified launch failure", DeviceFaultError),
        "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": Status(720, "too many blocks in cooperative launch"),
        "CUDA_ERROR_TENSOR_MEMORY_LEAK": Status(721, "tensor memory not completely freed", DeviceFaultError),
        "CUDA_ERROR_NOT_PERMITTED": Status(800, "operation not permitted"),
        "CUDA_ERROR_NOT_SUPPORTED": Status(801, "operation not supported"),
        "CUDA_ERROR_MPS_RPC_FAILURE": Status(
            806, "the remote procedural call between the MPS server and the MPS client failed", DeviceFaultError
        ),
        "CUDA_ERROR_MPS_CLIENT_TERMINATED": Status(
            810, "the MPS client has been terminated by the server", DeviceFaultError
        ),
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": Status(900, "operation not permitted when stream is capturing"),
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": Status(901, "operation failed due to a previous error during capture"),
        "CUDA_ERROR_STREAM_CAPTURE_MERGE": Status(
            902, "operation would result in a merge of separate capture sequences"
        ),
        "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED": Status(903, "capture was not ended in the same stream as it began"),
        "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": Status(904, "capturing stream has unjoined work"),
        "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": Status(905, "dependency created on uncaptured work in another stream"),
        "CUDA_ERROR_CAPTURED_EVENT": Status(
            907, "operation not permitted on an event last recorded in a capturing stream"
        ),
        "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD": Status(
            908, "attempt to terminate a thread-local capture sequence from another thread"
        ),
        "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE": Status(
            910, "the graph update was not performed because it included changes which violated constraints"
        ),
        "CUDA_ERROR_EXTERNAL_DEVICE": Status(
            911, "an async error has occurred in external entity outside of CUDA", DeviceFaultError
        ),
        "CUDA_ERROR_UNKNOWN": Status(999, "unknown error", DeviceFaultError),
    }
)
"""Every known result by its symbol, in the order of the codes."""


def error_class(name: str) -> type[DriverError]:
    """The error class that reports the result ``name``, which need not be in the table."""
    status = STATUSES.get(name)
    return DriverError if status is None else status.error


def is_fault(name: str) -> bool:
    """Whether the result ``name`` destroys the context: every later call that needs it fails with the same one."""
    return error_class(name) is DeviceFaultError
