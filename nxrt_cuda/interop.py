"""Tensors of other libraries in and out, without copies, and in the order of the streams involved.

DLPack (PyTorch, CuPy, JAX, ...) and ``__cuda_array_interface__`` version 3 (CuPy, Numba, ...). Importing
makes the compute stream wait for the producer's work; exporting makes the consumer's stream wait for
ours. Neither blocks the host.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nxrt_cuda import dlpack
from nxrt_cuda.dtype import bfloat16, data_type
from nxrt_cuda.errors import CaptureError, DeviceFaultError, DriverError, StreamTypeError, TensorError
from nxrt_cuda.memory import DeviceMemory, ForeignMemory
from nxrt_cuda.streams import Streams
from nxrt_cuda.tensor import MemoryOwner, TensorMetadata, TensorMut, TensorView

if TYPE_CHECKING:
    from nxrt_cuda.runtime import CudaRuntime

__all__ = [
    "array_interface",
    "dlpack_device",
    "export_dlpack",
    "export_host_copy",
    "host_array",
    "import_array",
    "is_device_array",
    "stream_handle",
    "strided_copy",
]

logger = logging.getLogger("nxrt_cuda")

_DEFAULT_STREAM = 1
"""What both protocols call the legacy default stream, as the driver's ``CU_STREAM_LEGACY``; they refuse 0."""
_PER_THREAD_STREAM = 2
"""Likewise, as the driver's ``CU_STREAM_PER_THREAD``."""


def stream_handle(stream: Any) -> int | None:
    """The handle of a stream given as an int or as another library's stream object.

    Raises:
        StreamTypeError: it is neither.
    """
    if stream is None or isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        _, handle = stream.__cuda_stream__()
        return int(handle)
    if hasattr(stream, "cuda_stream"):
        return int(stream.cuda_stream)
    # Memory and events have a ``ptr`` as well, which is no stream's handle.
    if hasattr(stream, "ptr") and hasattr(stream, "wait_event"):
        return int(stream.ptr)
    raise StreamTypeError(
        "stream must be a handle (an int), or an object with __cuda_stream__, with cuda_stream (PyTorch), or with ptr "
        f"and wait_event (CuPy); got {stream!r}"
    )


def is_device_array(array: Any) -> bool:
    """Whether ``array`` says that its memory is a CUDA device's."""
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[0]) in (dlpack.CUDA, dlpack.CUDA_MANAGED)
    return hasattr(array, "__cuda_array_interface__")


def host_array(values: Any) -> np.ndarray:
    """What NumPy makes of ``values``, or DLPack where they know a type that NumPy does not: PyTorch's bfloat16.

    Raises:
        TensorError: neither makes an array of them, or some are masked.
    """
    if isinstance(values, np.ndarray) and hasattr(values, "mask"):  # numpy.ma, which is not imported for this
        raise TensorError("masked arrays have no counterpart here; fill the array first")
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        if hasattr(values, "__dlpack_device__") and int(values.__dlpack_device__()[0]) == dlpack.CPU:
            return dlpack.read_host(values.__dlpack__())
        raise TensorError(f"NumPy makes no array of what was given, a {type(values).__name__}: {error}") from None


def import_array(runtime: CudaRuntime, memory: DeviceMemory, array: Any) -> TensorMut:
    """A tensor in the memory of another library's device array.

    Raises:
        TensorError: the array is on another device, is read-only, or has an element type unknown here.
    """
    kind, ordinal = runtime.dlpack_device()
    if kind != dlpack.CUDA:
        raise TensorError(f"a {type(array).__name__} in GPU memory cannot be used by a runtime on {runtime.device}")
    if hasattr(array, "__dlpack_device__"):
        if (device := int(array.__dlpack_device__()[1])) != ordinal:
            raise TensorError(f"the {type(array).__name__} is on cuda:{device}, the runtime on {runtime.device}")
        try:
            capsule = array.__dlpack__(stream=runtime.stream or _DEFAULT_STREAM, max_version=(1, 0))
        except TypeError:
            # Producers from before DLPack 1.0 do not know max_version.
            capsule = array.__dlpack__(stream=runtime.stream or _DEFAULT_STREAM)
        borrowed = dlpack.borrow(capsule)
        ptr, metadata, read_only, keep = borrowed.ptr, borrowed.metadata, borrowed.read_only, borrowed.capsule
    else:
        interface = array.__cuda_array_interface__
        ptr, read_only = interface["data"]
        metadata = _interface_metadata(interface)
        keep = array
        if (producer := interface.get("stream")) is not None:
            runtime.wait_for_stream(producer)
    if read_only:
        raise TensorError(f"the {type(array).__name__} is read-only; copy it first")
    return TensorMut(ptr, metadata, ForeignMemory(memory, ptr, metadata.span_bytes, keep))


def _interface_metadata(interface: dict[str, Any]) -> TensorMetadata:
    if interface.get("mask") is not None:
        raise TensorError("masked arrays have no counterpart here")
    dtype = data_type(np.dtype(interface["typestr"]))
    strides = interface.get("strides") or ()
    if any(stride % dtype.itemsize for stride in strides):
        raise TensorError(f"byte strides {strides} are no multiples of the {dtype.itemsize}-byte element")
    return TensorMetadata(dtype, tuple(interface["shape"]), tuple(stride // dtype.itemsize for stride in strides))


def array_interface(view: TensorView, driver: str, stream: int) -> dict[str, Any]:
    """``__cuda_array_interface__`` version 3; AttributeError where the memory or the dtype has none."""
    if driver != "cuda":
        raise AttributeError("the host driver's memory is not a GPU's; use numpy() or DLPack")
    if view.dtype == bfloat16:
        raise AttributeError("__cuda_array_interface__ has no bfloat16; use DLPack")
    return {
        "shape": view.shape,
        "typestr": view.dtype.numpy.str,
        "data": (view.ptr, not isinstance(view, TensorMut)),
        "strides": None if view.is_contiguous else tuple(s * view.dtype.itemsize for s in view.strides),
        "stream": stream or _DEFAULT_STREAM,
        "version": 3,
    }


def dlpack_device(driver: str, ordinal: int) -> tuple[int, int]:
    """Where a consumer finds the tensors: the device, or the host for copies of the host driver's."""
    return (dlpack.CUDA, ordinal) if driver == "cuda" else (dlpack.CPU, 0)


def export_dlpack(
    view: TensorView,
    streams: Streams,
    device: tuple[int, int],
    *,
    capturing: bool,
    later: Callable[[Callable[[], None]], None],
    stream: int | None = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """A DLPack capsule of ``view``'s own memory, once the consumer's ``stream`` waits for ours.

    ``stream``: None or 1 is the legacy default stream, 2 the per-thread one, -1 asks for no ordering;
    otherwise a handle. In a capture only -1 and the compute stream itself are accepted.

    ``later`` takes calls to make before anything dropped after them is given back.

    When the consumer lets go, memory given back after that is reused only after what is queued on ``stream`` until
    then. A consumer that asked for no ordering, gave the per-thread stream, or works on further streams, has to let go
    after its last use is done, or ordered before ``stream``'s work.

    Raises:
        BufferError: a copy or another device is asked for, or ``stream`` is 0, which is ambiguous.
        CaptureError: ordering another stream would leave the capture.
    """
    if dl_device is not None and tuple(dl_device) != device:
        raise BufferError(f"the tensor is on DLPack device {device}; {tuple(dl_device)} would need a copy")
    if copy:
        raise BufferError("copy=True is not offered; copy the imported tensor")
    if stream == 0:
        raise BufferError("stream=0 is ambiguous in DLPack; use 1 for the legacy default stream or 2 per thread")
    consumer = _DEFAULT_STREAM if stream is None else stream
    if consumer not in (-1, streams.current):
        if capturing:
            raise CaptureError(
                f"__dlpack__ for stream {consumer} would order it after the captured stream; "
                "export before the capture, or with stream=-1",
                operation="__dlpack__",
                state="capturing",
            )
        streams.fence(streams.current, consumer)
    return dlpack.make_capsule(
        view.ptr,
        device,
        view.metadata,
        read_only=not isinstance(view, TensorMut),
        versioned=max_version is not None and max_version[0] >= 1,
        keep=_Export(view.owner, streams, consumer, later),
    )


class _Export:
    """Keeps memory from being freed while a consumer has it."""

    PIN = "a DLPack export"

    def __init__(
        self, owner: MemoryOwner, streams: Streams, consumer: int, later: Callable[[Callable[[], None]], None]
    ) -> None:
        self._owner, self._streams, self._consumer, self._later = owner, streams, consumer, later
        owner.pins.append(self.PIN)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """A finaliser may not call the driver: the fence is made later, before the memory is given back."""
        if is_finalizing():
            return  # the runtime is closed by then, and what is called below may be gone
        if self._consumer not in (-1, _PER_THREAD_STREAM, self._streams.compute):
            self._later(partial(_follow, self._streams, self._consumer))
        self._owner.pins.remove(self.PIN)


def _follow(streams: Streams, consumer: int) -> None:
    try:
        streams.fence(consumer, streams.compute)
    except DeviceFaultError:
        raise
    except DriverError:
        # The consumer has destroyed its stream, which leaves nothing to name its work by.
        logger.warning("a stream that a tensor was exported to with DLPack is gone; its last work cannot be waited for")


def export_host_copy(
    array: np.ndarray,
    metadata: TensorMetadata,
    *,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
    stream: int | None = None,
) -> Any:
    """A DLPack capsule of a host copy: what the host driver's tensors export. ``stream`` must be None.

    Raises:
        BufferError: another device is asked for, or no copy is allowed.
    """
    if dl_device is not None and tuple(dl_device) != (dlpack.CPU, 0):
        raise BufferError(f"the host driver exports host memory, not DLPack device {tuple(dl_device)}")
    if copy is False:
        raise BufferError("the host driver exports copies only; copy=False cannot be met")
    if stream is not None:
        raise BufferError(f"host memory has no streams; stream must be None, got {stream}")
    return dlpack.make_capsule(
        array.ctypes.data,
        (dlpack.CPU, 0),
        TensorMetadata(metadata.dtype, metadata.shape),
        read_only=False,
        versioned=max_version is not None and max_version[0] >= 1,
        keep=array,
    )


def strided_copy(raw: np.ndarray, metadata: TensorMetadata) -> np.ndarray:
    """The elements that ``metadata`` addresses in ``raw`` bytes, as a contiguous array."""
    itemsize = metadata.dtype.itemsize
    if metadata.is_contiguous:
        return raw.view(metadata.dtype.numpy).reshape(metadata.shape)
    strides = tuple(stride * itemsize for stride in metadata.strides)
    view = np.ndarray(metadata.shape, metadata.dtype.numpy, raw.data, strides=strides)
    return view.copy()
