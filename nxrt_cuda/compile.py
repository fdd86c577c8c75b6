"""From a kernel specialisation to something that a driver can load.

A program is compiled to CUBIN for the device's real architecture: the driver loads that whatever
NVRTC made it, while it refuses PTX of an NVRTC newer than itself. Only for a device that NVRTC does not
know is PTX made, for the newest architecture below it that NVRTC does know.

Compiling needs no driver and no GPU, so a build can fill the program cache, or check every kernel
for every architecture, on any machine (:func:`compile_spec`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from nxrt_cuda.architecture import check_arch, check_runs, device_arch
from nxrt_cuda.driver.host_image import HostImage
from nxrt_cuda.errors import CompileError
from nxrt_cuda.headers import CudaHeaders, find_cuda_headers, included_kernel_headers, warn_of_other_major
from nxrt_cuda.launch import KernelSpec
from nxrt_cuda.nvrtc import load_nvrtc
from nxrt_cuda.program_cache import ProgramCache, program_key
from nxrt_cuda.progress import compiling
from nxrt_cuda.resources import kernel_directory

__all__ = ["Compiler", "HostCompiler", "Image", "NvrtcCompiler", "compile_spec"]

logger = logging.getLogger("nxrt_cuda")

# Part of every program's key: raise it when what is kept under a key changes its form.
_SCHEMA = b"1"

_HALF_HEADERS = ("cuda_fp16.h", "cuda_bf16.h", "vector_types.h", "crt/host_defines.h", "nv/target")
_TENSOR_CORE_HEADERS = (*_HALF_HEADERS, "mma.h", "crt/mma.h")


@dataclass(frozen=True)
class Image:
    """One compiled specialisation.

    Attributes:
        data: what ``Driver.module_load`` takes.
        kind: what that is.
        arch: the target: ``"sm_90a"``, ``"compute_120"`` for PTX, ``"host"``.
        log: what NVRTC and ptxas said; registers, stack and spills of the kernel are in it.
        seconds: how long it took to compile it, or to read it from the program cache.
        cached: whether it came from the program cache.
    """

    data: bytes
    kind: Literal["cubin", "ptx", "host"]
    arch: str
    log: str = ""
    seconds: float = 0.0
    cached: bool = False


class Compiler(Protocol):
    """What makes images for a driver; safe to use from several threads at once."""

    def compile(self, spec: KernelSpec) -> Image:
        """The image of ``spec``.

        Raises:
            CompileError: the source is missing or does not compile; nothing was cached.
        """
        ...

    def require_half_headers(self, op: str) -> None:
        """Refuse ``op`` where the headers of the 16-bit float types are missing.

        Raises:
            UnsupportedError: it names the headers, the places looked at and the wheel to install.
        """
        ...

    def require_tensor_core_headers(self, op: str) -> None:
        """Refuse ``op`` where the headers of the tensor-core fragments are missing; raises as above."""
        ...

    @property
    def damaged_entries(self) -> int:
        """Entries of the program cache that were found truncated or altered, and compiled again."""
        ...

    def __str__(self) -> str:
        """The compiler and its version, for messages."""
        ...


class NvrtcCompiler:
    """Compiles with NVRTC for one target.

    Args:
        target: the compute capability of a device, or an architecture such as ``"sm_90a"``.
        cache: where programs are kept between processes.
        include_directories: searched for CUDA's headers before any other place.
        compute_capability: of the device that an architecture given by name has to run on.

    NVRTC is loaded, and the target checked against what it can compile for, at the first compile.
    """

    def __init__(
        self,
        target: str | tuple[int, int],
        cache: ProgramCache | None = None,
        *,
        include_directories: Sequence[str | os.PathLike[str]] = (),
        compute_capability: tuple[int, int] | None = None,
    ) -> None:
        self.cache = cache
        self._target = target
        self._include_directories = tuple(include_directories)
        self._compute_capability = compute_capability

    def __str__(self) -> str:
        return str(load_nvrtc())

    @cached_property
    def arch(self) -> str:
        """What is compiled for.

        Raises:
            CompileError: NVRTC cannot compile for the target, or the device cannot run it.
        """
        nvrtc = load_nvrtc()
        if isinstance(self._target, tuple):
            return device_arch(self._target, nvrtc)
        check_arch(self._target, nvrtc)
        if self._compute_capability is not None:
            check_runs(self._target, self._compute_capability)
        return self._target

    @cached_property
    def headers(self) -> CudaHeaders:
        """Where CUDA's headers are taken from."""
        return find_cuda_headers(self._include_directories)

    @property
    def damaged_entries(self) -> int:
        return self.cache.damaged if self.cache is not None else 0

    def require_half_headers(self, op: str) -> None:
        self.headers.require(op, _HALF_HEADERS)

    def require_tensor_core_headers(self, op: str) -> None:
        self.headers.require(op, _TENSOR_CORE_HEADERS)

    def compile(self, spec: KernelSpec) -> Image:
        """See :meth:`Compiler.compile`."""
        started = time.perf_counter()
        program = _read_program(spec, self.arch)
        if self.cache is None:
            return self._compile(program, started)
        key = self._key(program)
        kept = self.cache.get(key)
        if kept is not None:
            log, _, data = kept.partition(b"\0")
            return Image(data, self._kind, self.arch, log.decode(), time.perf_counter() - started, cached=True)
        image = self._compile(program, started)
        self.cache.put(key, image.log.encode() + b"\0" + image.data)
        return image

    def is_cached(self, spec: KernelSpec) -> bool:
        """Whether the program cache has the image of ``spec``."""
        return self.cache is not None and self.cache.get(self._key(_read_program(spec, self.arch))) is not None

    @property
    def _kind(self) -> Literal["cubin", "ptx"]:
        return "cubin" if self.arch.startswith("sm_") else "ptx"

    def _key(self, program: _Program) -> str:
        # Include directories are left out: the headers found in them are in, byte for byte, so that two
        # environments with the same headers share their programs.
        headers = [part for name, text in program.headers.items() for part in (name.encode(), text)]
        return program_key(
            (
                _SCHEMA,
                load_nvrtc().build,
                self.arch.encode(),
                program.name.encode(),
                program.source,
                program_key(headers).encode(),
                self.headers.digest(program.cuda_headers),
                program_key(option.encode() for option in program.options).encode(),
            )
        )

    def _compile(self, program: _Program, started: float) -> Image:
        nvrtc = load_nvrtc()
        looked = ""
        if program.cuda_headers:
            warn_of_other_major(self.headers, nvrtc.version[0])
            looked = f"; CUDA headers were looked for at {'; '.join(self.headers.searched)}"
        options = [*program.options, *(f"--include-path={directory}" for directory in self.headers.directories)]
        with compiling(program.entry, self.arch):
            compilation = nvrtc.compile(program.source, program.name, self.arch, options, program.headers)
            if compilation.code is None:
                raise CompileError(
                    f"{program.label} of {program.name} does not compile for {self.arch} with {nvrtc} "
                    f"({compilation.status}){looked}",
                    source=program.name,
                    arch=self.arch,
                    options=program.options,
                    log=compilation.log,
                )
        seconds = time.perf_counter() - started
        logger.info("compiled %s for %s in %.2f s (%s)", program.label, self.arch, seconds, self._kind)
        return Image(compilation.code, self._kind, self.arch, compilation.log, seconds)


class HostCompiler:
    """Makes the host driver's images: the same calls and counts as a real compile, and no compiler."""

    damaged_entries = 0

    def __str__(self) -> str:
        return "the host compiler"

    def compile(self, spec: KernelSpec) -> Image:
        """See :meth:`Compiler.compile`; a source under ``kernels/`` must exist here too."""
        started = time.perf_counter()
        name, _ = _read_source(spec, "host")
        params = tuple((param.name, param.kind) for param in spec.params)
        image = HostImage(source=name, entry=spec.entry, params=params, macros=spec.macros, threads=spec.threads)
        return Image(image.encode(), "host", "host", seconds=time.perf_counter() - started)

    def require_half_headers(self, op: str) -> None:
        """The host needs none."""

    def require_tensor_core_headers(self, op: str) -> None:
        """The host needs none."""


def compile_spec(spec: KernelSpec, arch: str) -> Image:
    """``spec`` compiled for ``arch``, without a cache; made for pools of worker processes.

    Raises:
        CompileError: see :meth:`Compiler.compile`.
    """
    return NvrtcCompiler(arch).compile(spec)


@dataclass(frozen=True)
class _Program:
    """What a specialisation is compiled from.

    Attributes:
        label: the specialisation's, for messages.
        entry: the kernel in it.
        name: what the compiler's messages begin with.
        source: its text.
        headers: the kernel headers it includes, directly or not, by name.
        cuda_headers: the names of the other headers that it or they include.
        options: for the compiler, in order, without the target and the include directories.
    """

    label: str
    entry: str
    name: str
    source: bytes
    headers: Mapping[str, bytes]
    cuda_headers: frozenset[str]
    options: tuple[str, ...]


def _read_program(spec: KernelSpec, arch: str) -> _Program:
    name, source = _read_source(spec, arch)
    headers, cuda_headers = included_kernel_headers(source, kernel_directory())
    options = (
        "--std=c++17",
        # Lambdas are device code; NVRTC 13.0 takes generic ones for host code without this.
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
        *(() if spec.contract else ("--fmad=false",)),
        f"-DTHREADS={spec.threads}",
        *(f"-D{macro}={value}" for macro, value in spec.macros),
    )
    return _Program(spec.label, spec.entry, name, source, headers, cuda_headers, options)


def _read_source(spec: KernelSpec, arch: str) -> tuple[str, bytes]:
    """The program's name and text."""
    if spec.code is not None:
        return spec.source, spec.code.encode()
    try:
        return f"kernels/{spec.source}", (kernel_directory() / spec.source).read_bytes()
    except OSError as error:
        raise CompileError(
            f"the source of {spec.label} cannot be read: {error}", source=f"kernels/{spec.source}", arch=arch
        ) from None
