"""Tensors as kernels see them: an address, an element type, a shape, strides, and who owns the memory.

A :class:`TensorView` is an input and a :class:`TensorMut` an output (or an input too). Both are
immutable descriptions; the bytes belong to ``owner``, which a view keeps alive. An absent optional
input is ``None`` in an argument list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from operator import index as as_index
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

from nxrt_cuda.dtype import DataType, data_type
from nxrt_cuda.errors import TensorError
from nxrt_cuda.process_bound import ProcessBound

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

__all__ = ["MemoryOwner", "TensorMetadata", "TensorMut", "TensorView", "as_metadata", "contiguous_strides"]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of ``shape``, in elements."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class MemoryOwner(Protocol):
    """What a view needs of the memory behind it.

    Attributes:
        runtime: the runtime whose driver knows the memory.
        ptr: the device address of the first byte.
        nbytes: how many bytes may be addressed from there.
        is_freed: whether the memory is gone.
        usable_in: the runtime until the memory is freed, then None.
        fate: what has become of memory that is gone, as in "was freed".
        pins: names of what else refers to it and must let go before it may be freed: graphs, exports.
    """

    pins: list[str]

    @property
    def runtime(self) -> Any: ...
    @property
    def ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_freed(self) -> bool: ...
    @property
    def usable_in(self) -> Any: ...
    @property
    def fate(self) -> str: ...
    def free(self) -> None: ...


@dataclass(frozen=True)
class TensorMetadata:
    """Element type, shape and element strides, without memory.

    ``strides`` default to row-major contiguous ones. What is derived from them is computed once: kernels
    look their plans up by metadata at every execution.
    """

    dtype: DataType
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Lists compare and hash otherwise than tuples.
        for name in ("shape", "strides"):
            if type(getattr(self, name)) is not tuple:
                object.__setattr__(self, name, _whole(getattr(self, name), name))
        if any(extent < 0 for extent in self.shape):
            raise TensorError(f"shape {self.shape} has a negative extent")
        if not self.strides and self.shape:
            object.__setattr__(self, "strides", contiguous_strides(self.shape))
        if len(self.strides) != len(self.shape):
            raise TensorError(f"strides {self.strides} and shape {self.shape} differ in rank")

    @cached_property
    def _hash(self) -> int:
        return hash((self.dtype, self.shape, self.strides))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def elements(self) -> int:
        return prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the elements themselves; a strided tensor spans more."""
        return self.elements * self.dtype.itemsize

    @cached_property
    def reach(self) -> tuple[int, int]:
        """The lowest, and one past the highest, element offset that is addressed; (0, 0) when empty."""
        if self.elements == 0:
            return 0, 0
        offsets = [(extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)]
        return sum(o for o in offsets if o < 0), sum(o for o in offsets if o > 0) + 1

    @cached_property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last, gaps included."""
        return self.reach[1] * self.dtype.itemsize

    @cached_property
    def is_contiguous(self) -> bool:
        """Row-major without gaps. The stride of an extent of one does not matter, nor any of an empty tensor."""
        step = 1
        if self.elements == 0:
            return True
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != step:
                return False
            step *= extent
        return True


class TensorView(ProcessBound):
    """A typed window on device memory.

    Attributes:
        ptr: the device address of element 0 (0 for an empty tensor without memory).
        metadata: element type, shape and strides in elements.
        owner: keeps the memory alive.
        end: one past the last byte that an element has.
    """

    __slots__ = ("__weakref__", "end", "metadata", "owner", "ptr")

    # Leaves operators to this class, which has none: a comparison with an array is of identity, as between tensors.
    __array_ufunc__ = None

    INSTEAD = "numpy() gives the values, and the runtime's copy(target, source) copies on the device"

    def __init__(self, ptr: int, metadata: TensorMetadata, owner: MemoryOwner) -> None:
        self.ptr = ptr
        self.metadata = metadata
        self.owner = owner
        self.end = ptr + metadata.span_bytes
        if metadata.reach[0] < 0:
            raise TensorError(f"strides {metadata.strides} of shape {metadata.shape} reach before the tensor")
        if metadata.elements and ptr % metadata.dtype.itemsize:
            raise TensorError(
                f"a {metadata.dtype} tensor at 0x{ptr:x} is misaligned; its elements begin at multiples of "
                f"{metadata.dtype.itemsize} bytes"
            )
        if metadata.elements and ptr < owner.ptr:
            raise TensorError(f"a tensor at 0x{ptr:x} begins before its memory at 0x{owner.ptr:x}")
        if metadata.elements and self.end > owner.ptr + owner.nbytes:
            raise TensorError(
                f"a {metadata.dtype} tensor of shape {metadata.shape} at 0x{ptr:x} reaches past its memory, "
                f"which ends at 0x{owner.ptr + owner.nbytes:x}"
            )

    @property
    def dtype(self) -> DataType:
        return self.metadata.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.metadata.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.metadata.strides

    @property
    def ndim(self) -> int:
        return len(self.metadata.shape)

    @property
    def nbytes(self) -> int:
        return self.metadata.nbytes

    @property
    def is_contiguous(self) -> bool:
        return self.metadata.is_contiguous

    @property
    def runtime(self) -> Any:
        return self.owner.runtime

    def narrow(self, dim: int, start: int, length: int) -> Self:
        """The sub-tensor of ``length`` elements from ``start`` along ``dim``, sharing this memory.

        Raises:
            TensorError: ``dim`` or the range lies outside the tensor, or one of the three is no whole number.
        """
        try:
            dim, start, length = as_index(dim), as_index(start), as_index(length)
        except TypeError:
            given = f"dim {dim!r}, start {start!r}, length {length!r}"
            raise TensorError(f"narrow: {given}: each must be a whole number") from None
        axis = dim + self.ndim if dim < 0 else dim
        if not 0 <= axis < self.ndim:
            raise TensorError(f"narrow: dim {dim} of a tensor of rank {self.ndim}")
        if start < 0 or length < 0 or start + length > self.shape[axis]:
            raise TensorError(
                f"narrow: [{start}, {start + length}) lies outside extent {self.shape[axis]} of dim {dim}"
            )
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        strides = self.strides
        ptr = self.ptr + start * strides[axis] * self.dtype.itemsize
        return type(self)(ptr, TensorMetadata(self.dtype, shape, strides), self.owner)

    def reshape(self, shape: Sequence[int]) -> Self:
        """The same elements under another shape; the tensor must be contiguous.

        Raises:
            TensorError: the tensor is strided, an extent is no whole number, or the element counts differ.
        """
        shape = _whole(shape, "shape")
        if not self.is_contiguous:
            raise TensorError(f"reshape of a strided tensor: shape {self.shape}, strides {self.strides}")
        if prod(shape) != self.metadata.elements:
            raise TensorError(f"reshape of {self.metadata.elements} elements to {shape}")
        return type(self)(self.ptr, TensorMetadata(self.dtype, shape), self.owner)

    def numpy(self) -> np.ndarray:
        """A host copy, once all work queued on the runtime's streams before this call is done.

        Raises:
            CaptureError: the stream is capturing.
            DeviceMemoryError: the memory was freed.
        """
        array: np.ndarray = self.runtime.read(self)
        return array

    def __array__(self, *request: Any, **options: Any) -> NoReturn:
        """NumPy would copy, and wait, where nobody sees it; without this refusal, it makes an array of one object."""
        raise TensorError(f"{self!r} is no array in host memory; numpy() copies it there")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.runtime.array_interface(self))

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        return self.runtime.to_dlpack(self, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.runtime.dlpack_device()
        return device

    def __repr__(self) -> str:
        layout = "" if self.is_contiguous else f", strides={self.strides}"
        state = f", {self.owner.fate}" if self.owner.is_freed else ""
        return f"{type(self).__name__}({self.dtype}, shape={self.shape}{layout}, ptr=0x{self.ptr:x}{state})"


class TensorMut(TensorView):
    """A view whose memory may be written: an output, or an input that the caller refills."""

    __slots__ = ()

    def copy_from(self, array: ArrayLike) -> None:
        """Overwrite the elements with ``array``, in stream order.

        The values are copied out of ``array`` before the call returns. Shapes must be equal; values
        are cast to the tensor's dtype if NumPy calls that cast one of the same kind.

        Raises:
            TensorError: the shape differs, the cast is of another kind, or the tensor is strided.
            DeviceMemoryError: the memory was freed.
            CaptureError: the runtime is capturing.
        """
        self.runtime.write(self, array)

    def free(self) -> None:
        """Release the memory now; a second call does nothing.

        Raises:
            DeviceMemoryError: a live graph or an export still refers to it.
            CaptureError: the runtime is capturing.
        """
        self.owner.free()


def as_metadata(shape: Sequence[int], dtype: object) -> TensorMetadata:
    """Contiguous metadata from loose arguments; of equal ones the same object, which is quick to compare.

    Raises:
        TensorError: an extent is negative or no whole number, or the dtype is unknown here.
    """
    return _contiguous(data_type(dtype), _whole(shape, "shape"))


def _whole(values: Sequence[int], name: str) -> tuple[int, ...]:
    try:
        return tuple(as_index(value) for value in values)
    except TypeError:
        raise TensorError(f"the extents of {name} {values!r} must be whole numbers") from None


_contiguous = lru_cache(maxsize=1024)(TensorMetadata)
