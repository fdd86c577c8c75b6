"""The host driver's memory: device allocations behind made-up addresses, and pinned host blocks.

A device address is a number that no processor can dereference, so code that takes one for a host
pointer crashes at once and does not read something by chance. Addresses are never used twice and lie
far apart: an address past the end, or of memory that was freed, is always recognised as such.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from nxrt_cuda.driver.host_failure import Failure

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CANARY", "Allocation", "DeviceMemory", "DeviceRange", "HostRange", "PinnedBlock", "PinnedMemory", "Release"]

CANARY = 0xFF
"""Fresh memory is filled with this byte: NaN in every float type, -1 in every signed integer."""

# Non-canonical on x86-64 and outside every user address space of AArch64. Each driver has a window
# of its own, so that the memory of one is unknown to another.
_FIRST_ADDRESS = 1 << 60
_WINDOW = 1 << 44
_windows = count()

# Private pages, so that freeing a pinned block gives them back; the flags are POSIX's.
_PAGES = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}

_ALIGNMENT = 256
_GUARD = 1 << 16


class Allocation:
    """One device allocation. Its bytes come into being when they are first touched."""

    __slots__ = ("_bytes", "address", "is_freed", "is_given_up", "nbytes", "serial")

    def __init__(self, serial: int, address: int, nbytes: int) -> None:
        self.serial = serial
        self.address = address
        self.nbytes = nbytes
        self.is_freed = False
        self.is_given_up = False
        self._bytes: NDArray[np.uint8] | None = None

    def bytes(self) -> NDArray[np.uint8]:
        if self._bytes is None:
            self._bytes = np.full(self.nbytes, CANARY, np.uint8)
        return self._bytes

    def free(self) -> None:
        self.is_freed = True
        self._bytes = None

    def __str__(self) -> str:
        return f"allocation #{self.serial} (0x{self.address:x}, {self.nbytes} bytes)"


class DeviceRange:
    """``nbytes`` bytes of an allocation."""

    __slots__ = ("allocation", "nbytes", "offset")

    def __init__(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        self.allocation = allocation
        self.offset = offset
        self.nbytes = nbytes

    @property
    def freed_owner(self) -> Allocation | None:
        """The allocation, if it was freed."""
        return self.allocation if self.allocation.is_freed else None

    def array(self) -> NDArray[np.uint8]:
        """The bytes themselves; a fault where they were freed since the range was formed."""
        if self.allocation.is_freed:
            raise Failure("CUDA_ERROR_ILLEGAL_ADDRESS", f"{self.allocation} was freed before this work ran")
        return self.allocation.bytes()[self.offset : self.offset + self.nbytes]

    def __str__(self) -> str:
        return f"device 0x{self.allocation.address + self.offset:x}"


class DeviceMemory:
    """The address space of the one device.

    Attributes:
        total: bytes that there are.
        used: bytes that cannot be had.
        live: allocations that were not given up, and ``live_bytes`` their bytes.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.live = 0
        self.live_bytes = 0
        self._next = _FIRST_ADDRESS + next(_windows) * _WINDOW
        # Ascending, and freed allocations stay: an address tells for ever what it once was.
        self._starts: list[int] = []
        self._allocations: list[Allocation] = []

    def allocate(self, nbytes: int) -> int:
        if nbytes <= 0:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"an allocation of {nbytes} bytes")
        free = self.total - self.used
        if nbytes > free:
            raise Failure("CUDA_ERROR_OUT_OF_MEMORY", f"asked for {nbytes} bytes; {free} of {self.total} are free")
        address = self._next
        self._next += -(-nbytes // _ALIGNMENT) * _ALIGNMENT + _GUARD
        self._starts.append(address)
        self._allocations.append(Allocation(len(self._allocations), address, nbytes))
        self.used += nbytes
        self.live += 1
        self.live_bytes += nbytes
        return address

    def give_up(self, ptr: int) -> Release:
        """What frees the allocation at ``ptr`` when it runs; nothing else may free it from now on."""
        allocation = self.find(ptr)
        if allocation is None:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"0x{ptr:x} is not a device address")
        if allocation.is_given_up:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"{allocation} was freed before")
        if ptr != allocation.address:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"0x{ptr:x} is not the start of {allocation}")
        allocation.is_given_up = True
        self.live -= 1
        self.live_bytes -= allocation.nbytes
        return Release(self, allocation)

    def reclaim(self, allocation: Allocation) -> None:
        allocation.free()
        self.used -= allocation.nbytes

    def find(self, ptr: int) -> Allocation | None:
        """The allocation, live or freed, that ``ptr`` lies in."""
        index = bisect_right(self._starts, ptr) - 1
        if index < 0 or ptr >= self._starts[index] + self._allocations[index].nbytes:
            return None
        return self._allocations[index]

    def range(self, ptr: int, nbytes: int, what: str, status: str = "CUDA_ERROR_INVALID_VALUE") -> DeviceRange:
        """``nbytes`` live bytes at ``ptr``; otherwise a Failure with ``status`` that says what is wrong."""
        if nbytes < 0:
            raise Failure(status, f"{what}: {nbytes} bytes")
        allocation = self.find(ptr)
        if allocation is None:
            index = bisect_right(self._starts, ptr) - 1
            near = f"; it lies past the end of {self._allocations[index]}" if index >= 0 else ""
            raise Failure(status, f"{what}: {nbytes} bytes at 0x{ptr:x}, which is no device address{near}")
        if allocation.is_freed:
            raise Failure(status, f"{what}: {nbytes} bytes at 0x{ptr:x} lie in {allocation}, which was freed")
        offset = ptr - allocation.address
        excess = offset + nbytes - allocation.nbytes
        if excess > 0:
            raise Failure(
                status, f"{what}: {nbytes} bytes at 0x{ptr:x} reach {excess} bytes past the end of {allocation}"
            )
        return DeviceRange(allocation, offset, nbytes)


@dataclass(frozen=True, slots=True)
class Release:
    """Gives one allocation back."""

    memory: DeviceMemory
    allocation: Allocation

    def run(self) -> None:
        self.memory.reclaim(self.allocation)

    def __str__(self) -> str:
        return f"release of {self.allocation}"


class PinnedBlock:
    """One page-locked host allocation."""

    __slots__ = ("_pages", "address", "is_freed", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self._pages = mmap.mmap(-1, nbytes, **_PAGES)
        view = np.frombuffer(self._pages, np.uint8)
        view.fill(CANARY)
        self.address: int = view.ctypes.data
        self.nbytes = nbytes
        self.is_freed = False

    def free(self) -> None:
        # The pages go back, the address range stays taken: a copy that still names it is recognised,
        # and cannot hit what the process has since put there.
        self.is_freed = True
        if hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED)

    def __str__(self) -> str:
        return f"pinned memory (0x{self.address:x}, {self.nbytes} bytes)"


class HostRange:
    """``nbytes`` bytes of host memory; ``block`` is the pinned block they lie in, if any."""

    __slots__ = ("address", "block", "nbytes")

    def __init__(self, address: int, nbytes: int, block: PinnedBlock | None) -> None:
        self.address = address
        self.nbytes = nbytes
        self.block = block

    @property
    def freed_owner(self) -> PinnedBlock | None:
        """The pinned block, if it was freed. Of pageable memory nothing is known."""
        return self.block if self.block is not None and self.block.is_freed else None

    def array(self) -> NDArray[np.uint8]:
        if self.freed_owner is not None:
            raise Failure("CUDA_ERROR_ILLEGAL_ADDRESS", f"{self.freed_owner} was freed before this work ran")
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))

    def __str__(self) -> str:
        return f"host 0x{self.address:x}"


class PinnedMemory:
    """The page-locked host allocations."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: list[PinnedBlock] = []

    def allocate(self, nbytes: int) -> int:
        if nbytes <= 0:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"an allocation of {nbytes} bytes")
        block = PinnedBlock(nbytes)
        index = bisect_right(self._starts, block.address)
        self._starts.insert(index, block.address)
        self._blocks.insert(index, block)
        return block.address

    def free(self, address: int) -> None:
        block = self.find(address)
        if block is None or block.address != address:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"0x{address:x} is not the start of pinned memory")
        if block.is_freed:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"{block} was freed before")
        block.free()

    def find(self, address: int) -> PinnedBlock | None:
        """The block, live or freed, that ``address`` lies in."""
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._starts[index] + self._blocks[index].nbytes:
            return None
        return self._blocks[index]

    def range(self, address: int, nbytes: int, what: str) -> HostRange:
        """``nbytes`` bytes of host memory at ``address``, as far as can be known from outside."""
        if nbytes < 0:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"{what}: {nbytes} bytes")
        if address == 0:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"{what}: {nbytes} bytes at a null host pointer")
        if address >= _FIRST_ADDRESS:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"{what}: 0x{address:x} is a device address, not a host one")
        block = self.find(address)
        if block is not None:
            if block.is_freed:
                raise Failure("CUDA_ERROR_INVALID_VALUE", f"{what}: 0x{address:x} lies in {block}, which was freed")
            excess = address + nbytes - block.address - block.nbytes
            if excess > 0:
                raise Failure(
                    "CUDA_ERROR_INVALID_VALUE",
                    f"{what}: {nbytes} bytes at 0x{address:x} reach {excess} bytes past the end of {block}",
                )
        return HostRange(address, nbytes, block)

    @property
    def live(self) -> tuple[int, int]:
        """How many blocks are live, and their bytes."""
        sizes = [block.nbytes for block in self._blocks if not block.is_freed]
        return len(sizes), sum(sizes)
