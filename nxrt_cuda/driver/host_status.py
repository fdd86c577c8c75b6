"""The ``CUresult`` values that the host driver returns, and how one travels to the edge of a call."""

from __future__ import annotations

from nxrt_cuda.errors import DeviceFaultError, DriverError, NoDeviceError, OutOfMemoryError

__all__ = ["RESULTS", "STICKY", "Failure", "driver_error"]

RESULTS: dict[str, tuple[int, str]] = {
    "CUDA_ERROR_INVALID_VALUE": (1, "invalid argument"),
    "CUDA_ERROR_OUT_OF_MEMORY": (2, "out of memory"),
    "CUDA_ERROR_NOT_INITIALIZED": (3, "initialization error"),
    "CUDA_ERROR_NO_DEVICE": (100, "no CUDA-capable device is detected"),
    "CUDA_ERROR_INVALID_DEVICE": (101, "invalid device ordinal"),
    "CUDA_ERROR_INVALID_IMAGE": (200, "device kernel image is invalid"),
    "CUDA_ERROR_INVALID_CONTEXT": (201, "invalid device context"),
    "CUDA_ERROR_NO_BINARY_FOR_GPU": (209, "no kernel image is available for execution on the device"),
    "CUDA_ERROR_INVALID_PTX": (218, "a PTX JIT compilation failed"),
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": (222, "the provided PTX was compiled with an unsupported toolchain"),
    "CUDA_ERROR_INVALID_HANDLE": (400, "invalid resource handle"),
    "CUDA_ERROR_ILLEGAL_STATE": (401, "the operation cannot be performed in the present state"),
    "CUDA_ERROR_NOT_FOUND": (500, "named symbol not found"),
    "CUDA_ERROR_NOT_READY": (600, "device not ready"),
    "CUDA_ERROR_ILLEGAL_ADDRESS": (700, "an illegal memory access was encountered"),
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": (701, "too many resources requested for launch"),
    "CUDA_ERROR_LAUNCH_TIMEOUT": (702, "the launch timed out and was terminated"),
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": (709, "context is destroyed"),
    "CUDA_ERROR_ASSERT": (710, "device-side assert triggered"),
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": (715, "an illegal instruction was encountered"),
    "CUDA_ERROR_MISALIGNED_ADDRESS": (716, "misaligned address"),
    "CUDA_ERROR_LAUNCH_FAILED": (719, "unspecified launch failure"),
    "CUDA_ERROR_NOT_PERMITTED": (800, "operation not permitted"),
    "CUDA_ERROR_NOT_SUPPORTED": (801, "operation not supported"),
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": (900, "operation not permitted when stream is capturing"),
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": (901, "operation failed due to a previous error during capture"),
    "CUDA_ERROR_STREAM_CAPTURE_MERGE": (902, "operation would result in a merge of separate capture sequences"),
    "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED": (903, "capture was not ended in the same stream as it began"),
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": (904, "capturing stream has unjoined work"),
    "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": (905, "dependency created on uncaptured work in another stream"),
    "CUDA_ERROR_CAPTURED_EVENT": (907, "operation not permitted on an event last recorded in a capturing stream"),
    "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD": (
        908,
        "attempt to terminate a thread-local capture sequence from another thread",
    ),
    "CUDA_ERROR_UNKNOWN": (999, "unknown error"),
}
"""Symbol to (code, text)."""

STICKY = frozenset(
    {
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_UNKNOWN",
    }
)
"""The results that destroy a context: from then on every call that needs it returns the same one."""


class Failure(Exception):
    """A ``CUresult`` on its way out, before the name of the failing call is added to it."""

    def __init__(self, name: str, context: str) -> None:
        self.name = name
        self.context = context
        super().__init__(context)


def driver_error(call: str, failure: Failure) -> DriverError:
    """The typed error that ``call`` raises for ``failure``."""
    code, text = RESULTS[failure.name]
    kind: type[DriverError] = DriverError
    if failure.name in STICKY:
        kind = DeviceFaultError
    elif failure.name == "CUDA_ERROR_OUT_OF_MEMORY":
        kind = OutOfMemoryError
    elif failure.name == "CUDA_ERROR_NO_DEVICE":
        kind = NoDeviceError
    return kind(call, code, failure.name, text, failure.context)
