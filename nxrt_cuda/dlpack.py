"""The DLPack structures, and capsules made of and read from them.

https://dmlc.github.io/dlpack/latest/c_api.html, versions 0.8 (``dltensor``) and 1.0 (``dltensor_versioned``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nxrt_cuda import dtype as dt
from nxrt_cuda.errors import TensorError
from nxrt_cuda.tensor import TensorMetadata

__all__ = ["CPU", "CUDA", "CUDA_MANAGED", "Borrowed", "borrow", "make_capsule"]

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
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


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


_capsule_new = ctypes.pythonapi.PyCapsule_New
_capsule_new.restype, _capsule_new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, _Destructor]
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
    if _capsule_is(capsule, _NAME_VERSIONED):
        managed = ctypes.cast(_capsule_pointer(capsule, _NAME_VERSIONED), ctypes.POINTER(_ManagedVersioned)).contents
        if managed.major != 1:
            raise TensorError(f"DLPack {managed.major}.{managed.minor} is not read here; version 1 was asked for")
        tensor, read_only = managed.tensor, bool(managed.flags & _READ_ONLY)
    elif _capsule_is(capsule, _NAME):
        tensor = ctypes.cast(_capsule_pointer(capsule, _NAME), ctypes.POINTER(_Managed)).contents.tensor
        read_only = False
    else:
        raise TensorError("the object's __dlpack__ did not return an unused DLPack capsule")
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


_exports: dict[int, tuple[Any, Callable[[], None]]] = {}
"""What exported tensors need until their consumers are done, by the address of the managed tensor."""


@_Deleter
def _release(address: int) -> None:
    _, on_release = _exports.pop(address)
    on_release()


def _destructor(name: bytes) -> Any:
    @_Destructor
    def destroy(capsule: int) -> None:
        # A consumer renames the capsule that it takes over and calls the deleter itself.
        borrowed = ctypes.cast(capsule, ctypes.py_object)
        if _capsule_is(borrowed, name):
            _release(_capsule_pointer(borrowed, name))

    return destroy


_DESTRUCTORS = {name: _destructor(name) for name in (_NAME, _NAME_VERSIONED)}


def make_capsule(
    ptr: int,
    device: tuple[int, int],
    metadata: TensorMetadata,
    *,
    read_only: bool,
    versioned: bool,
    on_release: Callable[[], None],
) -> Any:
    """A capsule of a tensor; ``on_release`` is called once, when the consumer is done with it.

    Raises:
        BufferError: the tensor is read-only, and an unversioned capsule cannot say so.
    """
    if read_only and not versioned:
        raise BufferError("a read-only tensor needs a consumer of DLPack 1.0 (max_version=(1, 0))")
    shape, strides = _int64s(metadata.shape), _int64s(metadata.strides)
    code, bits = _CODES[metadata.dtype]
    tensor = _Tensor(ptr, *device, len(metadata.shape), code, bits, 1, shape, strides, 0)
    managed: Any
    if versioned:
        managed = _ManagedVersioned(1, 0, None, _release, _READ_ONLY if read_only else 0, tensor)
    else:
        managed = _Managed(tensor, None, _release)
    address = ctypes.addressof(managed)
    name = _NAME_VERSIONED if versioned else _NAME
    _exports[address] = ((managed, shape, strides), on_release)
    return _capsule_new(address, name, _DESTRUCTORS[name])


def _int64s(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * max(len(values), 1))(*values)
