"""The DLPack structures, and capsules made of and read from them.

https://dmlc.github.io/dlpack/latest/c_api.html, versions 0.8 (``dltensor``) and 1.0 (``dltensor_versioned``).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from nxrt_cuda import dtype as dt
from nxrt_cuda.errors import TensorError
from nxrt_cuda.tensor import TensorMetadata

__all__ = ["CPU", "CUDA", "CUDA_MANAGED", "Borrowed", "borrow", "make_capsule", "read_host"]

CPU, CUDA, CUDA_MANAGED = 1, 2, 13

_READ_ONLY = 1
_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"

_CODES = {
    dt.int8: (0, 8),
    dt.int32: (0, 32),
    dt.int64: (0, 64),
    dt.uint8: (1, 8),
    dt.uint32: (1, 32),
    dt.uint64: (1, 64),
    dt.float16: (2, 16),
    dt.float32: (2, 32),
    dt.float64: (2, 64),
    dt.bfloat16: (4, 16),
    dt.bool_: (6, 8),
}
_TYPES = {code: data_type for data_type, code in _CODES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_capsule_is = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is.restype, _capsule_is.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True)
class Borrowed:
    """A tensor read out of a capsule, which has to stay alive with it.

    Attributes:
        ptr: the address of element 0.
        device: (DLPack device type, ordinal).
        metadata: dtype, shape, strides in elements.
        read_only: whether the producer forbids writing.
        capsule: what keeps the memory alive.
    """

    ptr: int
    device: tuple[int, int]
    metadata: TensorMetadata
    read_only: bool
    capsule: Any


def borrow(capsule: Any) -> Borrowed:
    """Read a capsule without consuming it: its own destructor returns the memory to the producer.

    Raises:
        TensorError: the element type or the DLPack version has no counterpart here.
    """
    tensor, read_only = _open(capsule)
    code = (tensor.type_code, tensor.type_bits)
    if tensor.type_lanes != 1 or code not in _TYPES:
        raise TensorError(f"DLPack type code {code[0]} of {code[1]} bits x {tensor.type_lanes} has no counterpart here")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else ()
    return Borrowed(
        ptr=(tensor.data or 0) + tensor.byte_offset,
        device=(tensor.device_type, tensor.device_id),
        metadata=TensorMetadata(_TYPES[code], shape, strides),
        read_only=read_only,
        capsule=capsule,
    )


def make_capsule(
    ptr: int,
    device: tuple[int, int],
    metadata: TensorMetadata,
    *,
    read_only: bool,
    versioned: bool,
    keep: object,
) -> Any:
    """A capsule of a tensor; ``keep`` is referred to until the consumer is done with it, or the capsule is dropped.

    NumPy makes it, of an array that says to be at ``ptr`` and is never looked into. Its destructor and deleter are C,
    as they have to be: they are called by threads without the GIL, while an error is being raised, and when the
    interpreter has nearly ended, where a callback made with ctypes loses the error or crashes.

    Raises:
        BufferError: the tensor is read-only, and an unversioned capsule cannot say so.
    """
    if read_only and not versioned:
        raise BufferError("a read-only tensor needs a consumer of DLPack 1.0 (max_version=(1, 0))")
    capsule = _array_at(ptr, metadata, read_only, keep).__dlpack__(max_version=(1, 0) if versioned else None)
    tensor, _ = _open(capsule)
    tensor.device_type, tensor.device_id = device
    tensor.type_code, tensor.type_bits = _CODES[metadata.dtype]
    return capsule


def read_host(capsule: Any) -> np.ndarray:
    """The array in a capsule of host memory, in place.

    Raises:
        TensorError: as :func:`borrow`.
    """
    borrowed = borrow(capsule)
    metadata = borrowed.metadata
    return _array_at(borrowed.ptr, metadata, borrowed.read_only, capsule).view(metadata.dtype.numpy)


def _array_at(ptr: int, metadata: TensorMetadata, read_only: bool, keep: object) -> np.ndarray:
    """What lies at ``ptr``, as unsigned integers of the elements' size; keeps ``keep``."""
    itemsize = metadata.dtype.itemsize
    interface = {
        "version": 3,
        "data": (ptr, read_only),
        "typestr": f"<u{itemsize}",
        "shape": metadata.shape,
        "strides": tuple(stride * itemsize for stride in metadata.strides),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface, keep=keep))


def _open(capsule: Any) -> tuple[_Tensor, bool]:
    """The tensor in a capsule that nobody has consumed, and whether it is read-only."""
    if _capsule_is(capsule, _NAME_VERSIONED):
        managed = ctypes.cast(_capsule_pointer(capsule, _NAME_VERSIONED), ctypes.POINTER(_ManagedVersioned)).contents
        if managed.major != 1:
            raise TensorError(f"DLPack {managed.major}.{managed.minor} is not read here; version 1 was asked for")
        return managed.tensor, bool(managed.flags & _READ_ONLY)
    if _capsule_is(capsule, _NAME):
        return ctypes.cast(_capsule_pointer(capsule, _NAME), ctypes.POINTER(_Managed)).contents.tensor, False
    raise TensorError("the object's __dlpack__ did not return an unused DLPack capsule")
