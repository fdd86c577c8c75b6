"""The architectures that code is compiled for: which one a device gets, which exist, and what runs where.

``sm_90a`` names the CUBIN of one architecture, ``compute_90`` the PTX of one. The suffix ``a`` opens the
instructions that no other architecture has, and ``f`` those of its family.
"""

from __future__ import annotations

import logging
import re

from nxrt_cuda.errors import CompileError
from nxrt_cuda.nvrtc import Nvrtc

__all__ = ["check_arch", "check_runs", "device_arch", "own_arch"]

logger = logging.getLogger("nxrt_cuda")

_ARCH = re.compile(r"(sm|compute)_(\d+)([af]?)")


def own_arch(compute_capability: tuple[int, int]) -> str:
    """The architecture of a device, with all of its instructions."""
    major, minor = compute_capability
    # wgmma and setmaxnreg are in Hopper's own instruction set, which only the suffix opens.
    return "sm_90a" if compute_capability == (9, 0) else f"sm_{major}{minor}"


def device_arch(compute_capability: tuple[int, int], nvrtc: Nvrtc) -> str:
    """What to compile for, for a device: its own architecture, or the newest below it that NVRTC knows, as PTX.

    Raises:
        CompileError: NVRTC knows nothing that the device can run.
    """
    major, minor = compute_capability
    number = 10 * major + minor
    if number in nvrtc.archs:
        return own_arch(compute_capability)
    older = [arch for arch in nvrtc.archs if arch < number]
    if not older:
        raise _unknown_arch(f"sm_{number}", nvrtc)
    arch = f"compute_{older[-1]}"
    logger.info("%s does not know compute capability %d.%d: PTX for %s is made instead", nvrtc, major, minor, arch)
    return arch


def check_arch(arch: str, nvrtc: Nvrtc) -> None:
    """Refuse an architecture that NVRTC does not know, before it is asked to compile for it.

    Raises:
        CompileError: it names the architecture, NVRTC, what that knows, and what to do.
    """
    match = _ARCH.fullmatch(arch)
    # Only these generations have an instruction set of their own, or one of their family.
    least = {"": 0, "a": 90, "f": 100}
    if match is None or int(match[2]) not in nvrtc.archs or int(match[2]) < least[match[3]]:
        raise _unknown_arch(arch, nvrtc)


def _unknown_arch(arch: str, nvrtc: Nvrtc) -> CompileError:
    known = ", ".join(f"sm_{number}" for number in nvrtc.archs)
    return CompileError(
        f"{nvrtc} ({nvrtc.path}) cannot compile for {arch!r}; it knows {known}, "
        "with the suffix a from sm_90 and f from sm_100. Name one of these, or install an NVRTC that knows yours: "
        "newer devices need a newer nvidia-cuda-nvrtc, and those before sm_75 nvidia-cuda-nvrtc-cu12",
        source="NVRTC",
        arch=arch,
    )


def check_runs(arch: str, compute_capability: tuple[int, int]) -> None:
    """Refuse an architecture whose code a device cannot run.

    CUBIN runs on later devices of its generation, PTX on all later ones, and code with the suffix ``a`` on
    exactly its own.

    Raises:
        CompileError: it is so.
    """
    match = _ARCH.fullmatch(arch)
    assert match is not None
    form, number, suffix = match[1], int(match[2]), match[3]
    device = 10 * compute_capability[0] + compute_capability[1]
    if suffix == "a":
        runs = number == device
    elif form == "compute" and not suffix:
        runs = number <= device
    else:
        runs = number // 10 == device // 10 and number <= device
    if not runs:
        raise CompileError(
            f"code for {arch} does not run on a device of compute capability "
            f"{compute_capability[0]}.{compute_capability[1]}; leave the architecture out to have the right one chosen",
            source="NVRTC",
            arch=arch,
        )
