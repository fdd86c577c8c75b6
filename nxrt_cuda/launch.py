"""What a launch is made of: the kernel's declared signature, packed arguments, grid and block.

Arguments are packed once into one block of bytes, each at its natural alignment, beside an array of
pointers to them, which is what the driver takes. Renewing an argument writes into that block; a
steady-state launch creates no objects.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from operator import index as as_index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nxrt_cuda.activity import Activity
from nxrt_cuda.driver.base import Dim3, ParamInfo
from nxrt_cuda.errors import LaunchError, LaunchOverflowError
from nxrt_cuda.tensor import TensorView

if TYPE_CHECKING:
    from nxrt_cuda.modules import LoadedFunction

__all__ = ["KernelSpec", "LaunchConfig", "Param", "PreparedLaunch", "div_up"]


class _Kind(NamedTuple):
    """How a parameter kind is packed; integers have bounds."""

    code: str
    cuda: str
    bounds: range | None = None

    @property
    def size(self) -> int:
        return struct.calcsize(self.code)

    def pack(self, value: Any) -> bytes:
        """``value`` in the declared width; TypeError for another type, OverflowError where it does not fit."""
        if self.bounds is None:
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError
            return struct.pack(self.code, float(value))
        number = as_index(value)
        if number not in self.bounds:
            raise OverflowError
        return struct.pack(self.code, number)


# "<": in struct's native mode "f" turns what is too large into infinity; in this one it refuses.
_KINDS = {
    "ptr": _Kind("<Q", "T*", range(2**64)),
    "i32": _Kind("<i", "int", range(-(2**31), 2**31)),
    "u32": _Kind("<I", "unsigned int", range(2**32)),
    "i64": _Kind("<q", "long long", range(-(2**63), 2**63)),
    "u64": _Kind("<Q", "unsigned long long", range(2**64)),
    "f32": _Kind("<f", "float"),
    "f64": _Kind("<d", "double"),
}

_ALIGNMENT = 64


def div_up(value: int, divisor: int) -> int:
    """The least integer not below ``value / divisor``."""
    return -(-value // divisor)


class Param(NamedTuple):
    """One kernel parameter: its name in the source, and its kind (``ptr i32 u32 i64 u64 f32 f64``)."""

    name: str
    kind: str


@dataclass(frozen=True)
class KernelSpec:
    """One specialisation of one kernel: what to compile, and how it is called.

    Attributes:
        source: the file under ``kernels/``, or the module's name where ``code`` is given.
        entry: the ``extern "C"`` kernel in it.
        params: the declared signature, in order.
        macros: ``-D`` definitions, in order: tile sizes, element type, features.
        threads: threads a block; passed to the kernel as the macro ``THREADS``.
        contract: whether the compiler may fuse ``a * b + c``.
        code: CUDA C++ text that is not a file of this package.

    Raises:
        LaunchError: a parameter's kind is unknown.
    """

    source: str
    entry: str
    params: tuple[Param, ...]
    threads: int
    macros: tuple[tuple[str, str], ...] = ()
    contract: bool = True
    code: str | None = None

    def __post_init__(self) -> None:
        for name, kind in self.params:
            if kind not in _KINDS:
                raise LaunchError(
                    f"{self.entry}: parameter '{name}' is of the unknown kind {kind!r}; there are {', '.join(_KINDS)}"
                )

    @cached_property
    def layout(self) -> tuple[ParamInfo, ...]:
        """Offset and size of each parameter in the packed block (natural alignment, as CUDA's ABI)."""
        infos = []
        offset = 0
        for param in self.params:
            size = _KINDS[param.kind].size
            offset = div_up(offset, size) * size
            infos.append(ParamInfo(offset, size))
            offset += size
        return tuple(infos)

    @property
    def label(self) -> str:
        """``entry [MACRO=value ...]``, for error messages and traces."""
        return f"{self.entry} [{' '.join(f'{k}={v}' for k, v in self.macros)}]" if self.macros else self.entry


@dataclass(frozen=True)
class LaunchConfig:
    """Grid and block extents and dynamic shared memory of one launch, in blocks, threads and bytes.

    Raises:
        LaunchError: an extent is no int, or outside what CUDA allows on every device (x up to 2**31-1
            blocks, y and z up to 65535; up to 1024 threads a block, z up to 64). A zero grid is legal
            and launches nothing.
    """

    grid: Dim3
    block: Dim3
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        for name, extents, lows, highs in (
            ("grid", self.grid, (0, 0, 0), (2**31 - 1, 65535, 65535)),
            ("block", self.block, (1, 1, 1), (1024, 1024, 64)),
        ):
            if len(extents) != 3 or not all(isinstance(extent, int) for extent in extents):
                raise LaunchError(f"{name} must be three whole numbers, got {extents!r}")
            for axis, extent, low, high in zip("xyz", extents, lows, highs, strict=True):
                if not low <= extent <= high:
                    raise LaunchError(f"{name}.{axis} = {extent} is outside [{low}, {high}]")
        if math.prod(self.block) > 1024:
            raise LaunchError(f"block {self.block} has {math.prod(self.block)} threads; CUDA allows 1024")
        if self.shared_bytes < 0:
            raise LaunchError(f"shared_bytes = {self.shared_bytes} is negative")

    @property
    def is_empty(self) -> bool:
        return 0 in self.grid


class PreparedLaunch:
    """A function, a grid and one packed argument block, ready for ``CudaRuntime.launch``.

    Attributes:
        function: the loaded kernel.
        config: grid, block, shared memory.
        params: the address of the pointer array that the driver reads.
        operands: the tensors given as arguments; they stay alive with the launch.
        label: ``entry grid=... block=...``, for fault reports.
        op: the operator that it serves; empty where it serves none.
        checked: how many explicit frees the runtime had seen when the operands were last found alive.

    Not safe to change from two threads at once; whoever owns the launch serialises that.
    """

    __slots__ = (
        "_activity",
        "_block",
        "_pointers",
        "checked",
        "config",
        "function",
        "label",
        "op",
        "operands",
        "params",
    )

    def __init__(
        self, function: LoadedFunction, config: LaunchConfig, arguments: Sequence[Any], *, op: str = ""
    ) -> None:
        spec = function.spec
        if len(arguments) != len(spec.params):
            raise LaunchError(f"{spec.entry} takes {len(spec.params)} arguments, got {len(arguments)}")
        size = spec.layout[-1].offset + spec.layout[-1].size if spec.layout else 0
        # NumPy owns the bytes so that the address is stable; over-allocated to align it.
        storage = np.zeros(size + _ALIGNMENT, np.uint8)
        start = -storage.ctypes.data % _ALIGNMENT
        block = storage[start : start + size]
        address = block.ctypes.data
        self._block = block.data
        self._pointers = np.array([address + info.offset for info in spec.layout], np.uint64)
        self.function = function
        self.config = config
        self.label = f"{spec.entry} grid={config.grid} block={config.block}"
        self.op = op
        self.checked = -1
        self._activity: Activity | None = None
        self.params: int = self._pointers.ctypes.data
        self.operands = tuple(value for value in arguments if isinstance(value, TensorView))
        for position, (value, param) in enumerate(zip(arguments, spec.params, strict=True)):
            self.set(position, value.ptr if isinstance(value, TensorView) and param.kind == "ptr" else value)

    def set(self, position: int, value: Any) -> None:
        """Renew argument ``position`` with a number or an address.

        Raises:
            LaunchError: the value is not of the declared kind.
            LaunchOverflowError: it does not fit; nothing was written.
        """
        spec = self.function.spec
        name, kind_name = spec.params[position]
        kind = _KINDS[kind_name]
        offset, size = spec.layout[position]
        try:
            self._block[offset : offset + size] = kind.pack(value)
        except TypeError:
            raise LaunchError(f"{spec.entry}: argument '{name}' ({kind.cuda}) got {value!r}") from None
        except OverflowError:
            raise LaunchOverflowError(f"{spec.entry}: argument '{name}' = {value!r} does not fit {kind.cuda}") from None

    def bind(self, *pointers: int) -> None:
        """Renew the leading arguments, which must all be pointers, without further checks."""
        struct.pack_into(f"{len(pointers)}Q", self._block, 0, *pointers)

    @property
    def activity(self) -> Activity:
        """The launch in traces and pictures: operator, kernel, specialisation, extents. Made when first asked for."""
        if self._activity is None:
            spec, config = self.function.spec, self.config
            self._activity = Activity(
                "kernel",
                f"{self.op}: {spec.entry}" if self.op else spec.entry,
                {
                    "op": self.op,
                    "entry": spec.entry,
                    "variant": " ".join(f"{name}={value}" for name, value in spec.macros),
                    "grid": config.grid,
                    "block": config.block,
                    "dynamic_shared_bytes": config.shared_bytes,
                    "static_shared_bytes": self.function.static_shared_bytes,
                    "registers": self.function.num_regs,
                },
            )
        return self._activity

    def addresses(self) -> list[int]:
        """The values of the pointer arguments, as the kernel will read them."""
        values = self.arguments()
        return [int(values[name]) for name, kind in self.function.spec.params if kind == "ptr"]

    def arguments(self) -> dict[str, int | float]:
        """The argument values by name, as the kernel will read them."""
        spec = self.function.spec
        return {
            param.name: struct.unpack_from(_KINDS[param.kind].code, self._block, info.offset)[0]
            for param, info in zip(spec.params, spec.layout, strict=True)
        }
