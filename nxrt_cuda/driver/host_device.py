"""The device that the host driver pretends to be: its attributes, and the launch limits they set."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

from nxrt_cuda.driver.base import Dim3
from nxrt_cuda.driver.host_failure import Failure
from nxrt_cuda.driver.host_work import Function

__all__ = ["ATTRIBUTES", "HostDevice"]

ATTRIBUTES: Mapping[str, int] = MappingProxyType(
    {
        "ASYNC_ENGINE_COUNT": 2,
        "COMPUTE_CAPABILITY_MAJOR": 9,
        "COMPUTE_CAPABILITY_MINOR": 0,
        "CONCURRENT_KERNELS": 1,
        "L2_CACHE_SIZE": 50 << 20,
        "MAX_BLOCK_DIM_X": 1024,
        "MAX_BLOCK_DIM_Y": 1024,
        "MAX_BLOCK_DIM_Z": 64,
        "MAX_GRID_DIM_X": 2**31 - 1,
        "MAX_GRID_DIM_Y": 65535,
        "MAX_GRID_DIM_Z": 65535,
        "MAX_REGISTERS_PER_BLOCK": 65536,
        "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
        "MAX_SHARED_MEMORY_PER_BLOCK": 48 << 10,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10,
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 228 << 10,
        "MAX_THREADS_PER_BLOCK": 1024,
        "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
        "MEMORY_POOLS_SUPPORTED": 1,
        "MULTIPROCESSOR_COUNT": 132,
        "UNIFIED_ADDRESSING": 1,
        "WARP_SIZE": 32,
    }
)
"""What the device says of itself by default: a Hopper (compute capability 9.0)."""


class HostDevice:
    """Device 0.

    Args:
        changes: attributes that differ from :data:`ATTRIBUTES`; None is one that it does not tell.
    """

    def __init__(self, changes: Mapping[str, int | None]) -> None:
        unknown = changes.keys() - ATTRIBUTES.keys()
        if unknown:
            raise ValueError(f"unknown device attributes {sorted(unknown)}; there are {', '.join(ATTRIBUTES)}")
        self._told: dict[str, int | None] = {**ATTRIBUTES, **changes}

    def attribute(self, name: str) -> int:
        value = self._told.get(name)
        if value is None:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"unknown device attribute {name!r}")
        return value

    def limit(self, name: str) -> int:
        """The attribute as a limit; a device has one even where it does not tell."""
        value = self._told[name]
        return ATTRIBUTES[name] if value is None else value

    def require_launchable(self, function: Function, grid: Dim3, block: Dim3, shared_bytes: int) -> None:
        """Refuse a launch outside the limits of the device or of the function."""
        bounds = [
            (f"{name} {axis.lower()}", extent, 1, self.limit(f"MAX_{name.upper()}_DIM_{axis}"))
            for name, extents in (("grid", grid), ("block", block))
            for axis, extent in zip("XYZ", extents, strict=True)
        ]
        threads = min(function.image.threads, self.limit("MAX_THREADS_PER_BLOCK"))
        bounds.append(("threads of a block", prod(block), 1, threads))
        bounds.append(("dynamic shared memory", shared_bytes, 0, function.max_dynamic_shared))
        for what, value, low, high in bounds:
            if not low <= value <= high:
                raise Failure(
                    "CUDA_ERROR_INVALID_VALUE",
                    f"kernel '{function.image.entry}': {what} = {value} is outside [{low}, {high}]",
                )

    def require_resident(self, function: Function, grid: Dim3, block: Dim3, shared_bytes: int) -> None:
        """Refuse a launch whose blocks cannot run at the same time: by threads and dynamic shared memory alone."""
        each = min(
            self.limit("MAX_THREADS_PER_MULTIPROCESSOR") // prod(block),
            self.limit("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR") // max(shared_bytes, 1),
        )
        most = each * self.limit("MULTIPROCESSOR_COUNT")
        if prod(grid) > most:
            raise Failure(
                "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
                f"kernel '{function.image.entry}': {prod(grid)} blocks at the same time; there is room for {most}",
            )
