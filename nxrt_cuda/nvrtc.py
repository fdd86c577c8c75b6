"""NVRTC through ``cuda.bindings.nvrtc``: one call that compiles, and what there is to know of the library.

The bindings are used directly rather than ``cuda.core.Program``: a program can then be named by its
path, take its headers from memory, keep its log when it succeeds (``ptxas -v`` reports there), and
nothing can reach for a device. NVRTC needs no driver and no GPU, may be called from several threads,
and runs without the GIL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from nxrt_cuda.errors import CompileError

__all__ = ["INSTALL_COMMAND", "Compilation", "Nvrtc", "load_nvrtc"]

INSTALL_COMMAND = 'pip install "nxrt_cuda[nvrtc]"'
"""Installs NVRTC and the headers that kernels include."""


@dataclass(frozen=True)
class Compilation:
    """What one compile gave.

    Attributes:
        code: CUBIN or NUL-terminated PTX; None where the compile failed.
        log: the complete log of NVRTC and ptxas, warnings and resource usage included.
        status: NVRTC's name of the outcome, e.g. ``"NVRTC_ERROR_COMPILATION"``.
    """

    code: bytes | None
    log: str
    status: str


class Nvrtc:
    """The NVRTC library of this process.

    Attributes:
        version: (major, minor).
        path: the library file.
        archs: the architectures that it compiles for, ascending: ``(75, 80, ...)``.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import nvrtc
            from cuda.pathfinder import load_nvidia_dynamic_lib

            self.path = str(load_nvidia_dynamic_lib("nvrtc").abs_path)
        except (ImportError, RuntimeError) as error:
            raise CompileError(
                f"NVRTC cannot be loaded ({error}); {INSTALL_COMMAND}", source="NVRTC", arch=""
            ) from None
        self._nvrtc: Any = nvrtc
        self.version: tuple[int, int] = tuple(self._call("nvrtcVersion"))
        self.archs: tuple[int, ...] = tuple(sorted(self._call("nvrtcGetSupportedArchs")))

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]}"

    @cached_property
    def build(self) -> bytes:
        """Text that differs between any two builds of the compiler.

        It is the PTX of an empty program: its header names the release, the build and the NVVM and
        PTX versions, of which ``nvrtcVersion`` gives the release alone.
        """
        compilation = self.compile(b"", "build.cu", f"compute_{self.archs[0]}", [], {})
        assert compilation.code is not None
        return compilation.code

    def compile(
        self, source: bytes, name: str, arch: str, options: Sequence[str], headers: Mapping[str, bytes]
    ) -> Compilation:
        """Compile one program.

        Args:
            source: CUDA C++ text.
            name: what the compiler's messages call it.
            arch: ``"sm_…"`` for CUBIN, ``"compute_…"`` for PTX.
            options: further options, in order.
            headers: text by what follows ``#include``; these win over files.
        """
        nvrtc = self._nvrtc
        program = self._call(
            "nvrtcCreateProgram",
            source,
            name.encode(),
            len(headers),
            list(headers.values()),
            [header.encode() for header in headers],
        )
        try:
            arguments = [option.encode() for option in (f"--gpu-architecture={arch}", *options)]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
            log = self._read("nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace")
            code = None
            if not status:
                code = self._read("nvrtcGetCUBIN" if arch.startswith("sm_") else "nvrtcGetPTX", program)
            return Compilation(code, log, status.name)
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def _read(self, getter: str, program: Any) -> bytes:
        # A bytearray: filling a bytes object in place, as is customary here, corrupts the interpreter's
        # shared b" " where the size is 1.
        buffer = bytearray(self._call(f"{getter}Size", program))
        self._call(getter, program, buffer)
        return bytes(buffer)

    def _call(self, function: str, *arguments: Any) -> Any:
        status, *values = getattr(self._nvrtc, function)(*arguments)
        if status:
            raise CompileError(f"{function} failed: {status.name} ({int(status)})", source="NVRTC", arch="")
        return values[0] if len(values) == 1 else values


@cache
def load_nvrtc() -> Nvrtc:
    """The library, loaded once.

    Raises:
        CompileError: it is not installed; the message says what to install.
    """
    return Nvrtc()
