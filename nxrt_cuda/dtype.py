"""Element types: the ONNX name, the NumPy dtype and the CUDA C++ name of each, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from nxrt_cuda.errors import TensorError

__all__ = [
    "DataType",
    "bfloat16",
    "bool_",
    "data_type",
    "float16",
    "float32",
    "float64",
    "int8",
    "int32",
    "int64",
    "uint8",
    "uint32",
    "uint64",
]


@dataclass(frozen=True)
class DataType:
    """One element type.

    Attributes:
        name: the ONNX name, as error messages print it (``"Float32"``).
        numpy: the NumPy dtype; bfloat16 is that of ``ml_dtypes``.
        cuda: the CUDA C++ spelling that a kernel is compiled with.
        suffix: the short form used in entry names (``"f32"``).
        itemsize: bytes an element; asked for with every execution, and so kept.
    """

    name: str
    numpy: np.dtype = field(compare=False)
    cuda: str = field(compare=False)
    suffix: str = field(compare=False)
    itemsize: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "itemsize", self.numpy.itemsize)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return "nxrt_cuda.bool_" if self.numpy == np.bool_ else f"nxrt_cuda.{self.numpy.name}"


float32 = DataType("Float32", np.dtype(np.float32), "float", "f32")
float16 = DataType("Float16", np.dtype(np.float16), "__half", "f16")
bfloat16 = DataType("BFloat16", np.dtype(ml_dtypes.bfloat16), "__nv_bfloat16", "bf16")
float64 = DataType("Float64", np.dtype(np.float64), "double", "f64")
int64 = DataType("Int64", np.dtype(np.int64), "long long", "i64")
int32 = DataType("Int32", np.dtype(np.int32), "int", "i32")
int8 = DataType("Int8", np.dtype(np.int8), "signed char", "i8")
uint64 = DataType("Uint64", np.dtype(np.uint64), "unsigned long long", "u64")
uint32 = DataType("Uint32", np.dtype(np.uint32), "unsigned int", "u32")
uint8 = DataType("Uint8", np.dtype(np.uint8), "unsigned char", "u8")
bool_ = DataType("Bool", np.dtype(np.bool_), "bool", "b8")

_BY_NUMPY = {
    d.numpy: d for d in (float32, float16, bfloat16, float64, int64, int32, int8, uint64, uint32, uint8, bool_)
}


def data_type(dtype: object) -> DataType:
    """The :class:`DataType` of a DataType, NumPy dtype, scalar type or dtype name.

    Raises:
        TensorError: there is no such element type here.
    """
    if isinstance(dtype, DataType):
        return dtype
    try:
        # NumPy takes None for float64; a dtype that was forgotten is an error here.
        found = None if dtype is None else _BY_NUMPY.get(np.dtype(dtype))  # type: ignore[call-overload]
    except TypeError:
        found = None
    if found is None:
        supported = ", ".join(d.numpy.name for d in _BY_NUMPY.values())
        shown = f"'{dtype}'" if isinstance(dtype, np.dtype) else repr(dtype)
        raise TensorError(f"dtype {shown} is not supported; use one of {supported}")
    return found
