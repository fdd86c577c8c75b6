"""Tensor maps of the host driver: the 128 bytes that stand for a ``CUtensorMap``.

They hold what the map was made from, so that a kernel entry can look whether it fits the launch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from nxrt_cuda.driver.host_failure import Failure

__all__ = ["TENSOR_MAP_ALIGNMENT", "TENSOR_MAP_BYTES", "HostTensorMap"]

_MAGIC = b"nxrt map"
_FORMAT = struct.Struct("<8s16sQB5Q4Q5H")
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
_ITEM_BYTES = {"UINT8": 1, "FLOAT16": 2, "BFLOAT16": 2, "FLOAT32": 4}
_MAX_RANK = 5
_ACCESS_BYTES = 16
_SWIZZLED_BYTES = 128


@dataclass(frozen=True)
class HostTensorMap:
    """A tensor in device memory and the box that one copy moves; dimensions run from the innermost outwards.

    Attributes:
        data_type: the ``CUtensorMapDataType`` name without the prefix: ``"FLOAT16"``.
        address: of element 0.
        extents: elements along each dimension.
        strides: bytes from one element to the next along each dimension but the innermost.
        box: elements along each dimension of the box.
    """

    data_type: str
    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    def check(self) -> None:
        """Refuse what ``cuTensorMapEncodeTiled`` refuses, with the 128-byte swizzle."""
        if self.data_type not in _ITEM_BYTES:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"data type {self.data_type!r}; known: {', '.join(_ITEM_BYTES)}")
        rank = len(self.extents)
        row = _ITEM_BYTES[self.data_type] * (self.box[0] if self.box else 0)
        conditions = (
            (1 <= rank <= _MAX_RANK, f"rank {rank} is outside [1, {_MAX_RANK}]"),
            (
                len(self.strides) == rank - 1 and len(self.box) == rank,
                f"{len(self.strides)} strides and {len(self.box)} box extents for rank {rank}",
            ),
            (
                self.address > 0 and self.address % _ACCESS_BYTES == 0,
                f"address 0x{self.address:x} is null or not a multiple of {_ACCESS_BYTES}",
            ),
            (all(0 < extent <= 2**32 for extent in self.extents), f"extents {self.extents} are outside [1, 2**32]"),
            (
                all(0 <= stride < 2**40 and stride % _ACCESS_BYTES == 0 for stride in self.strides),
                f"strides {self.strides} are not multiples of {_ACCESS_BYTES} in [0, 2**40)",
            ),
            (all(0 < extent <= 256 for extent in self.box), f"box {self.box} is outside [1, 256]"),
            (
                row % _ACCESS_BYTES == 0 and row <= _SWIZZLED_BYTES,
                f"box rows of {row} bytes are no multiple of {_ACCESS_BYTES} up to {_SWIZZLED_BYTES}",
            ),
        )
        for holds, complaint in conditions:
            if not holds:
                raise Failure("CUDA_ERROR_INVALID_VALUE", complaint)

    def encode(self) -> bytes:
        """The map as 128 bytes."""

        def padded(values: tuple[int, ...], count: int) -> tuple[int, ...]:
            return (*values, *(0,) * (count - len(values)))

        rank = len(self.extents)
        packed = _FORMAT.pack(
            _MAGIC,
            self.data_type.encode(),
            self.address,
            rank,
            *padded(self.extents, _MAX_RANK),
            *padded(self.strides, _MAX_RANK - 1),
            *padded(self.box, _MAX_RANK),
        )
        return packed.ljust(TENSOR_MAP_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> HostTensorMap:
        """The map in ``data``.

        Raises:
            ValueError: ``data`` is something else.
        """
        if len(data) != TENSOR_MAP_BYTES or not data.startswith(_MAGIC):
            raise ValueError(f"{len(data)} bytes that are no tensor map of the host driver")
        _, data_type, address, rank, *numbers = _FORMAT.unpack_from(data)
        extents, strides, box = numbers[:5], numbers[5:9], numbers[9:]
        return cls(
            data_type=data_type.rstrip(b"\0").decode(),
            address=address,
            extents=tuple(extents[:rank]),
            strides=tuple(strides[: rank - 1]),
            box=tuple(box[:rank]),
        )
