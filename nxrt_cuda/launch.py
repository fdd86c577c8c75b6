"""What a launch is made of: the kernel's declared signature, packed arguments, grid and block.

Arguments are packed once into one block of bytes, each at its natural alignment, beside an array of
pointers to them, which is what the driver takes. Renewing an argument writes into that block; a
steady-state launch creates no objects.
"""

from __future__ import annotations

import ctypes
import math
import re
import struct
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from operator import index as as_index
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from nxrt_cuda.activity import Activity
from nxrt_cuda.driver.base import Dim3, ParamInfo, ReadyCall
from nxrt_cuda.errors import LaunchError, LaunchOverflowError
from nxrt_cuda.tensor import TensorView

if TYPE_CHECKING:
    from nxrt_cuda.context import Session
    from nxrt_cuda.modules import LoadedFunction

__all__ = ["KernelSpec", "LaunchConfig", "Param", "PlacedMap", "PreparedLaunch", "TensorMap", "div_up"]


class _Kind(NamedTuple):
    """How a parameter kind is packed; integers have bounds, and what is no scalar has an alignment of its own."""

    code: str
    cuda: str
    bounds: range | None = None
    opaque_alignment: int | None = None

    @property
    def size(self) -> int:
        return struct.calcsize(self.code)

    @property
    def alignment(self) -> int:
        return self.opaque_alignment or self.size

    def pack(self, value: Any) -> bytes:
        """``value`` in the declared width; TypeError for another type, OverflowError where it does not fit."""
        if self.opaque_alignment is not None:
            if not isinstance(value, bytes) or len(value) != self.size:
                raise TypeError
            return value
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
    "tensor_map": _Kind("<128s", "TensorMap", opaque_alignment=64),
}

_MACRO = re.compile(r"[A-Za-z_]\w*(\([^()]*\))?", re.ASCII)
_ALIGNMENT = 64
_MAX_THREADS = 1024
"""Of a block, on every device."""


def div_up(value: int, divisor: int) -> int:
    """The least integer not below ``value / divisor``."""
    return -(-value // divisor)


class Param(NamedTuple):
    """One kernel parameter: its name in the source, and its kind.

    ``ptr i32 u32 i64 u64 f32 f64``, or ``tensor_map``: the 128 bytes of a ``CUtensorMap``, which a kernel takes as
    ``const __grid_constant__ TensorMap``.
    """

    name: str
    kind: str

    @property
    def is_address(self) -> bool:
        """Whether the argument says where in memory something is."""
        return self.kind in ("ptr", "tensor_map")


_Mover = Callable[[int], Callable[[int], None]]
"""For the host address of a tensor map, the driver's call that gives this map the address of other memory."""


class TensorMap(bytes):
    """The 128 bytes of a ``CUtensorMap``, which remember what they were made for; by ``CudaRuntime.tensor_map``.

    Attributes:
        address: of element 0.
        mover: of copies of these bytes.
    """

    address: int
    mover: _Mover

    @classmethod
    def of(cls, encoded: bytes, address: int, mover: _Mover) -> TensorMap:
        """``encoded``, which the driver made for ``address``."""
        tensor_map = cls(encoded)
        tensor_map.address = address
        tensor_map.mover = mover
        return tensor_map


_KNOWN_MAPS = 64
"""Addresses for which a placed map remembers its bytes: writing them costs half of what the driver's call does."""


class PlacedMap:
    """A tensor map in an argument block, which can be moved to other memory.

    Attributes:
        address: of element 0.
    """

    __slots__ = ("_known", "_mover", "_place", "_replace_address", "address")

    def __init__(self, place: memoryview, host_address: int, address: int, mover: _Mover) -> None:
        # ctypes copies such bytes in half of the time that a memoryview takes.
        self._place = (ctypes.c_char * len(place)).from_buffer(place)
        self.address = address
        self._mover = mover
        self._replace_address = mover(host_address)
        self._known: dict[int, bytes] = {}

    def move(self, address: int) -> None:
        """Let it describe memory at ``address``.

        Raises:
            DriverError: the driver makes no such map.
        """
        if address == self.address:
            return
        known = self._known.get(address)
        if known is not None:
            self._place.raw = known
        else:
            self._replace_address(address)
            if len(self._known) == _KNOWN_MAPS:
                self._known.clear()
            self._known[address] = self._place.raw
        self.address = address

    def copy(self, place: memoryview, host_address: int) -> PlacedMap:
        """The same map in another block, to which its bytes have been copied."""
        return PlacedMap(place, host_address, self.address, self._mover)


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
        arch: the one architecture it can be compiled for, e.g. ``"sm_90a"``; None for any.
        changeable: the numbers that a recorded graph may change; None for all. An operator that checked its
            sizes, or folded a number into another launch, leaves them out.

    Raises:
        LaunchError: a parameter's kind is unknown, two parameters or two macros have one name, a macro's name is not
            one that C++ takes, or no block has so many threads.
    """

    source: str
    entry: str
    params: tuple[Param, ...]
    threads: int
    macros: tuple[tuple[str, str], ...] = ()
    contract: bool = True
    code: str | None = None
    arch: str | None = None
    changeable: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, kind in self.params:
            if kind not in _KINDS:
                raise LaunchError(
                    f"{self.entry}: parameter '{name}' is of the unknown kind {kind!r}; there are {', '.join(_KINDS)}"
                )
        for what, pairs in (("parameter", self.params), ("macro", self.macros)):
            names = [name for name, _ in pairs]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise LaunchError(f"{self.entry}: two {what}s are named {twice!r}")
        for name, _ in self.macros:
            if not _MACRO.fullmatch(name):
                raise LaunchError(f"{self.entry}: a macro cannot be named {name!r}")
        if not 1 <= self.threads <= _MAX_THREADS:
            raise LaunchError(f"{self.entry}: threads must be in [1, {_MAX_THREADS}], got {self.threads}")

    @cached_property
    def layout(self) -> tuple[ParamInfo, ...]:
        """Offset and size of each parameter in the packed block (aligned as CUDA's ABI has it)."""
        infos = []
        offset = 0
        for param in self.params:
            kind = _KINDS[param.kind]
            offset = div_up(offset, kind.alignment) * kind.alignment
            infos.append(ParamInfo(offset, kind.size))
            offset += kind.size
        return tuple(infos)

    @property
    def label(self) -> str:
        """``entry [MACRO=value ...]``, for error messages and traces."""
        return f"{self.entry} [{' '.join(f'{k}={v}' for k, v in self.macros)}]" if self.macros else self.entry


@dataclass(frozen=True)
class LaunchConfig:
    """Grid and block extents and dynamic shared memory of one launch, in blocks, threads and bytes.

    The blocks of a ``cooperative`` launch run at the same time, so that they may wait for each other; the driver
    refuses one that the device has no room for.

    Kept as tuples of int, from whatever sequences of whole numbers they are given as, NumPy's included.

    Raises:
        LaunchError: a number is not whole, or an extent outside what CUDA allows on every device (x up to 2**31-1
            blocks, y and z up to 65535; up to 1024 threads a block, z up to 64). A zero grid is legal
            and launches nothing.
    """

    grid: Dim3
    block: Dim3
    shared_bytes: int = 0
    cooperative: bool = False

    def __post_init__(self) -> None:
        for name, given, lows, highs in (
            ("grid", self.grid, (0, 0, 0), (2**31 - 1, 65535, 65535)),
            ("block", self.block, (1, 1, 1), (1024, 1024, 64)),
        ):
            try:
                extents = tuple(map(as_index, given))
            except TypeError:
                extents = ()
            if len(extents) != 3:
                raise LaunchError(f"{name} must be three whole numbers, got {given!r}")
            object.__setattr__(self, name, extents)
            for axis, extent, low, high in zip("xyz", extents, lows, highs, strict=True):
                if not low <= extent <= high:
                    raise LaunchError(f"{name}.{axis} = {extent} is outside [{low}, {high}]")
        if math.prod(self.block) > _MAX_THREADS:
            raise LaunchError(f"block {self.block} has {math.prod(self.block)} threads; CUDA allows {_MAX_THREADS}")
        try:
            object.__setattr__(self, "shared_bytes", as_index(self.shared_bytes))
        except TypeError:
            raise LaunchError(f"shared_bytes must be a whole number, got {self.shared_bytes!r}") from None
        if self.shared_bytes < 0:
            raise LaunchError(f"shared_bytes = {self.shared_bytes} is negative")

    @property
    def is_empty(self) -> bool:
        return 0 in self.grid


def _argument_block(layout: Sequence[ParamInfo]) -> tuple[memoryview, int, np.ndarray]:
    """Zeroed bytes for the arguments, their address, and the array of pointers into them that the driver reads."""
    size = layout[-1].offset + layout[-1].size if layout else 0
    # NumPy owns the bytes so that the address is stable; over-allocated to align it.
    storage = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -storage.ctypes.data % _ALIGNMENT
    block = storage[start : start + size]
    address = block.ctypes.data
    return block.data, address, np.array([address + info.offset for info in layout], np.uint64)


def _leading_pointers(spec: KernelSpec, block: memoryview) -> MutableSequence[int]:
    """Those before any other argument, to be written together: by ctypes in 0.6 of the time that struct takes."""
    count = next((index for index, param in enumerate(spec.params) if param.kind != "ptr"), len(spec.params))
    return cast(MutableSequence[int], (ctypes.c_uint64 * count).from_buffer(block)) if count else []


class PreparedLaunch:
    """A function, a grid and one packed argument block, ready for ``CudaRuntime.launch``.

    Attributes:
        function: the loaded kernel.
        config: grid, block, shared memory.
        params: the address of the pointer array that the driver reads.
        operands: the tensors given as arguments and not replaced since; they stay alive with the launch.
        label: ``entry grid=... block=...``, for fault reports.
        op: the operator that it serves; empty where it serves none.
        home: the session of the runtime that has made ``start`` ready; None before its first launch.
        start: launches it on the compute stream, as it is packed then. Only for ``home``, which has set it.
        tensor_maps: those among the arguments, by position.
        checked: how many frees the session had seen when the operands were last found alive.

    Not safe to change from two threads at once; whoever owns the launch serialises that.
    """

    __slots__ = (
        "_activity",
        "_base",
        "_block",
        "_leading",
        "_pointers",
        "_tensors",
        "checked",
        "config",
        "function",
        "home",
        "label",
        "op",
        "operands",
        "params",
        "start",
        "tensor_maps",
    )

    start: ReadyCall

    def __init__(
        self, function: LoadedFunction, config: LaunchConfig, arguments: Sequence[Any], *, op: str = ""
    ) -> None:
        spec = function.spec
        if len(arguments) != len(spec.params):
            raise LaunchError(f"{spec.entry} takes {len(spec.params)} arguments, got {len(arguments)}")
        self._block, self._base, self._pointers = _argument_block(spec.layout)
        self.tensor_maps: dict[int, PlacedMap] = {}
        self.function = function
        self.config = config
        self.label = f"{spec.entry} grid={config.grid} block={config.block}"
        self.op = op
        self.home: Session | None = None
        self.checked = -1
        self._activity: Activity | None = None
        self._leading = _leading_pointers(spec, self._block)
        self.params: int = self._pointers.ctypes.data
        self._tensors: dict[int, TensorView] = {}
        self.operands: tuple[TensorView, ...] = ()
        for position, value in enumerate(arguments):
            self.set(position, value)

    def set(self, position: int, value: Any) -> None:
        """Renew argument ``position`` with a number, an address, a tensor or the bytes of a tensor map.

        A tensor stands for its address, and is kept alive and checked as those given at first. With a plain address
        the memory behind it is the caller's business.

        Raises:
            LaunchError: the value is not of the declared kind.
            LaunchOverflowError: it does not fit; nothing was written.
        """
        spec = self.function.spec
        name, kind_name = spec.params[position]
        kind = _KINDS[kind_name]
        offset, size = spec.layout[position]
        try:
            is_tensor = kind_name == "ptr" and isinstance(value, TensorView)
            self._block[offset : offset + size] = kind.pack(value.ptr if is_tensor else value)
        except TypeError:
            raise LaunchError(f"{spec.entry}: argument '{name}' ({kind.cuda}) got {value!r}") from None
        except OverflowError:
            raise LaunchOverflowError(f"{spec.entry}: argument '{name}' = {value!r} does not fit {kind.cuda}") from None
        if kind_name == "tensor_map":
            self.tensor_maps.pop(position, None)
            if isinstance(value, TensorMap):
                place = self._block[offset : offset + size]
                self.tensor_maps[position] = PlacedMap(place, self._base + offset, value.address, value.mover)
        if is_tensor or position in self._tensors:
            self._tensors.pop(position, None)
            if is_tensor:
                self._tensors[position] = value
            self.operands = tuple(self._tensors.values())
            self.checked = -1

    def copy(self) -> PreparedLaunch:
        """The same launch with a block of its own, which later changes of this one do not reach."""
        twin = PreparedLaunch.__new__(PreparedLaunch)
        for name in PreparedLaunch.__slots__:
            if name != "start":
                setattr(twin, name, getattr(self, name))
        twin._block, twin._base, twin._pointers = _argument_block(self.function.spec.layout)
        twin._block[:] = self._block
        twin._leading = _leading_pointers(twin.function.spec, twin._block)
        twin.tensor_maps = {}
        for position, tensor_map in self.tensor_maps.items():
            offset, size = self.function.spec.layout[position]
            place = twin._block[offset : offset + size]
            twin.tensor_maps[position] = tensor_map.copy(place, twin._base + offset)
        twin._tensors = dict(self._tensors)
        twin.params = twin._pointers.ctypes.data
        twin.home = None
        return twin

    @property
    def packed(self) -> tuple[bytes, dict[int, int]]:
        """The arguments as they are packed now, and what tensor maps are of; :meth:`restore` brings them back."""
        return self._block.tobytes(), {position: placed.address for position, placed in self.tensor_maps.items()}

    def restore(self, packed: tuple[bytes, dict[int, int]]) -> None:
        """Undo what was set and moved since ``packed`` was read."""
        self._block[:], addresses = packed
        for position, address in addresses.items():
            self.tensor_maps[position].address = address

    def __repr__(self) -> str:
        return f"PreparedLaunch({self.label})"

    def bind(self, *pointers: int) -> None:
        """Renew the pointers that come before any other argument, all of them, without further checks.

        ``operands`` stay as they are: whoever binds gives the tensors to ``CudaRuntime.launch``.
        """
        self._leading[:] = pointers

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

    def addresses(self) -> dict[int, int]:
        """Where the kernel will be told that its tensors are, by position: pointers, and what tensor maps are of."""
        spec = self.function.spec
        pointers = {
            position: int(struct.unpack_from("<Q", self._block, info.offset)[0])
            for position, (param, info) in enumerate(zip(spec.params, spec.layout, strict=True))
            if param.kind == "ptr"
        }
        return pointers | {position: placed.address for position, placed in self.tensor_maps.items()}

    def move(self, position: int, address: int) -> None:
        """Renew the pointer, or the tensor map, at ``position`` for another address.

        Raises:
            DriverError: the driver makes no tensor map for that address.
        """
        placed = self.tensor_maps.get(position)
        if placed is None:
            self.set(position, address)
        else:
            placed.move(address)

    def arguments(self) -> dict[str, Any]:
        """The argument values by name, as the kernel will read them."""
        spec = self.function.spec
        return {
            param.name: struct.unpack_from(_KINDS[param.kind].code, self._block, info.offset)[0]
            for param, info in zip(spec.params, spec.layout, strict=True)
        }
