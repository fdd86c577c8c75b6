"""What the host driver loads in place of a CUBIN, and what a kernel entry is given when it runs.

An image names an entry and its signature; the code is a Python function, the :data:`HostEntry`, that
the driver was given under that name. It is called once a launch, for the whole grid.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from nxrt_cuda.driver.base import Dim3, ParamInfo
from nxrt_cuda.driver.host_failure import Failure

if TYPE_CHECKING:
    from nxrt_cuda.driver.host_memory import DeviceMemory
    from nxrt_cuda.dtype import DataType

__all__ = ["HostEntry", "HostImage", "HostLaunch", "read_arguments"]

_MAGIC = b"nxrt-cuda host image 1\n"

# The receiving end of the parameter ABI. It is written apart from the packing end on purpose: were
# they one table, a wrong width would agree with itself.
_KIND_CODES = {
    "ptr": "Q",
    "i32": "i",
    "u32": "I",
    "i64": "q",
    "u64": "Q",
    "f32": "f",
    "f64": "d",
    "tensor_map": "128s",
}
_ALIGNMENTS = {"tensor_map": 64}  # of kinds that are not aligned to their size


@dataclass(frozen=True)
class HostImage:
    """The host driver's counterpart of one compiled kernel.

    Attributes:
        source: the kernel source it stands for; a label.
        entry: the name under which the driver finds the Python function.
        params: (name, kind) of each parameter, in order; kinds as in ``nxrt_cuda.launch.Param``.
        macros: (name, value) of each macro of the specialisation.
        threads: the most threads a block may have.
    """

    source: str
    entry: str
    params: tuple[tuple[str, str], ...]
    macros: tuple[tuple[str, str], ...] = ()
    threads: int = 1024

    def layout(self) -> tuple[ParamInfo, ...]:
        """Offset and size of each parameter in the parameter buffer, each at its alignment."""
        infos = []
        offset = 0
        for _, kind in self.params:
            size = struct.calcsize(_KIND_CODES[kind])
            offset += -offset % _ALIGNMENTS.get(kind, size)
            infos.append(ParamInfo(offset, size))
            offset += size
        return tuple(infos)

    def encode(self) -> bytes:
        """The image as bytes, for ``Driver.module_load``."""
        return _MAGIC + json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> HostImage:
        """The image in ``data``.

        Raises:
            ValueError: ``data`` is something else, or is damaged.
        """
        if not data.startswith(_MAGIC):
            raise ValueError(f"{len(data)} bytes that are no host image; they begin with {data[:8]!r}")
        try:
            fields = json.loads(data[len(_MAGIC) :])
            image = cls(
                source=str(fields["source"]),
                entry=str(fields["entry"]),
                params=tuple((str(name), str(kind)) for name, kind in fields["params"]),
                macros=tuple((str(name), str(value)) for name, value in fields["macros"]),
                threads=int(fields["threads"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a damaged host image: {type(error).__name__}: {error}") from None
        unknown = [kind for _, kind in image.params if kind not in _KIND_CODES]
        if unknown:
            raise ValueError(f"parameter kinds {unknown}; there are {', '.join(_KIND_CODES)}")
        return image


def read_arguments(image: HostImage, params: int) -> dict[str, Any]:
    """The argument values behind ``params``, the address of an array of pointers to them."""
    count = len(image.params)
    if count and params == 0:
        raise Failure("CUDA_ERROR_INVALID_VALUE", f"kernel '{image.entry}' takes {count} arguments, got a null pointer")
    pointers = (ctypes.c_uint64 * count).from_address(params) if count else ()
    arguments = {}
    for (name, kind), pointer in zip(image.params, pointers, strict=True):
        if pointer == 0:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"kernel '{image.entry}': no value for argument '{name}'")
        code = _KIND_CODES[kind]
        (arguments[name],) = struct.unpack(code, ctypes.string_at(pointer, struct.calcsize(code)))
    return arguments


class HostLaunch:
    """One running launch, as a kernel entry sees it.

    Attributes:
        entry: the kernel's name.
        args: argument values by parameter name; pointers are device addresses, tensor maps bytes.
        macros: the specialisation's macros, as strings.
        grid: blocks in x, y, z.
        block: threads of a block in x, y, z.
        shared_bytes: dynamic shared memory of a block.
        fault: the first bad access of this launch. An entry cannot undo it by catching the exception.
    """

    __slots__ = ("_memory", "args", "block", "entry", "fault", "grid", "macros", "shared_bytes")

    def __init__(
        self,
        entry: str,
        args: Mapping[str, Any],
        macros: Mapping[str, str],
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        memory: DeviceMemory,
    ) -> None:
        self.entry = entry
        self.args = args
        self.macros = macros
        self.grid = grid
        self.block = block
        self.shared_bytes = shared_bytes
        self.fault: Failure | None = None
        self._memory = memory

    def view(self, ptr: float, dtype: DataType, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        """A writable window on ``shape`` elements of device memory at ``ptr``, row-major.

        An empty shape may have any ``ptr``. Memory that is unknown, freed, or too small is an illegal
        address, and one that is not a multiple of the element size a misaligned one: both end the context.
        """
        address = int(ptr)
        nbytes = prod(shape) * dtype.itemsize
        if nbytes == 0:
            return np.empty(shape, dtype.numpy)
        names = [f"'{name}'" for name, value in self.args.items() if value == ptr]
        what = f"argument {' or '.join(names)}" if names else "view"
        try:
            if address % dtype.itemsize:
                raise Failure("CUDA_ERROR_MISALIGNED_ADDRESS", f"{what}: 0x{address:x} does not align {dtype}")
            window = self._memory.range(address, nbytes, what, "CUDA_ERROR_ILLEGAL_ADDRESS")
        except Failure as fault:
            self.fault = self.fault or fault
            raise
        return window.array().view(dtype.numpy).reshape(shape)


HostEntry = Callable[[HostLaunch], None]
"""A kernel in Python: reads and writes device memory through the launch, and returns nothing."""
