"""Where kernels and the headers they include are found, and exactly which bytes a program is made of.

Kernel sources and the headers beside them live in one directory, and include each other by their
path in it (``#include "common/element.cuh"``). They are handed to NVRTC from memory, so that the bytes
which the program cache hashed are the bytes that get compiled, and no ``kernels/`` folder in the
user's working directory can step in between.

CUDA's own headers are looked for in this order: directories given by the caller, then one toolkit:
the first of cuda.pathfinder's (the NVIDIA wheels, a conda environment, the system), ``$CUDA_HOME``
and ``$CUDA_PATH`` that is complete. Taking a single toolkit keeps headers of two versions from mixing;
completeness matters because PyTorch's wheels bring ``cuda_fp16.h`` without the headers that it includes.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from nxrt_cuda.errors import UnsupportedError
from nxrt_cuda.nvrtc import INSTALL_COMMAND

__all__ = [
    "CudaHeaders",
    "find_cuda_headers",
    "included_kernel_headers",
    "warn_of_other_major",
]

logger = logging.getLogger("nxrt_cuda")

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)
_VERSION = re.compile(rb"^#define\s+CUDA_VERSION\s+(\d+)", re.MULTILINE)

# What a toolkit has that can compile kernels: one header of each package that they come in.
_LANDMARKS = ("cuda_fp16.h", "crt/host_defines.h", "nv/target")


def included_kernel_headers(source: bytes, directory: Path) -> tuple[dict[str, bytes], frozenset[str]]:
    """The headers under ``directory`` that ``source`` includes, through others too.

    Conditional includes count as taken: a header too many costs nothing, one too few would serve
    stale code.

    Returns:
        Header text by the name it is included under, and the names that ``directory`` does not have.
    """
    headers: dict[str, bytes] = {}
    foreign = set()
    pending = list(_includes(source))
    while pending:
        name = pending.pop()
        if name in headers or name in foreign:
            continue
        try:
            headers[name] = (directory / name).read_bytes()
        except OSError:
            foreign.add(name)
        else:
            pending.extend(_includes(headers[name]))
    return dict(sorted(headers.items())), frozenset(foreign)


@dataclass(frozen=True)
class CudaHeaders:
    """The directories that CUDA's headers are taken from.

    Attributes:
        directories: what the compiler is given, in order.
        searched: each place that was looked at and what was found there, for messages.
    """

    directories: tuple[str, ...]
    searched: tuple[str, ...]

    def require(self, op: str, names: Sequence[str]) -> None:
        """Refuse ``op`` unless every header of ``names`` is there.

        Raises:
            UnsupportedError: one is not; the message names where it was looked for, and what to install.
        """
        missing = [name for name in names if _find(self.directories, name) is None]
        if missing:
            raise UnsupportedError(
                f"{op} needs the CUDA headers {', '.join(missing)}, which were not found; "
                f"looked at {'; '.join(self.searched)}. Install them with {INSTALL_COMMAND}"
            )

    def digest(self, names: Iterable[str]) -> bytes:
        """A digest of the CUDA headers ``names`` and of every header that they include in turn.

        Toolkit headers are read once a process: the first compile after an edit to one of them must
        be in a new process.
        """
        digest = sha256()
        for name in sorted(names):
            digest.update(_closure_digest(self.directories, name))
        return digest.digest()


def find_cuda_headers(explicit: Sequence[str | os.PathLike[str]] = ()) -> CudaHeaders:
    """Look for CUDA's headers; ``explicit`` directories come first (see the module's text)."""
    return _find_cuda_headers(
        tuple(os.fspath(directory) for directory in explicit),
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
    )


@cache
def _find_cuda_headers(explicit: tuple[str, ...], cuda_home: str | None, cuda_path: str | None) -> CudaHeaders:
    searched = [f"include_directories {', '.join(explicit)}"] if explicit else []
    if not _missing(explicit):
        return CudaHeaders(explicit, tuple(searched))
    for place, directories in _toolkits(cuda_home, cuda_path):
        missing = _missing(directories)
        if not missing:
            return CudaHeaders((*explicit, *directories), (*searched, f"{place}: {directories[0]}"))
        lacking = f"no {', '.join(missing)} in {directories[0]}" if directories else "nothing"
        searched.append(f"{place}: {lacking}")
    return CudaHeaders(explicit, tuple(searched))


def _missing(directories: Sequence[str]) -> list[str]:
    return [name for name in _LANDMARKS if _find(directories, name) is None]


def _toolkits(cuda_home: str | None, cuda_path: str | None) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "cuda.pathfinder", _pathfinder_directories()
    for variable, root in (("CUDA_HOME", cuda_home), ("CUDA_PATH", cuda_path)):
        if root:
            include = os.path.join(root, "include")
            yield variable, (include, os.path.join(include, "cccl"))
        else:
            yield f"{variable} (not set)", ()


def _pathfinder_directories() -> tuple[str, ...]:
    try:
        from cuda.pathfinder import locate_nvidia_header_directory
    except ImportError:
        return ()
    directories = []
    for library in ("cudart", "cccl"):
        located = locate_nvidia_header_directory(library)
        # pathfinder reads CUDA_PATH and CUDA_HOME too, but CUDA_PATH first.
        if located is not None and located.abs_path and located.found_via not in ("CUDA_HOME", "CUDA_PATH"):
            directories.append(located.abs_path)
    return tuple(directories)


@cache
def warn_of_other_major(headers: CudaHeaders, nvrtc_major: int) -> None:
    """Log, once, that the headers are of another major version than the compiler."""
    path = _find(headers.directories, "cuda.h")
    version = _VERSION.search(path.read_bytes()) if path is not None else None
    if version is not None and int(version[1]) // 1000 != nvrtc_major:
        logger.warning(
            "the headers in %s are of CUDA %d and NVRTC is of CUDA %d; compiles may fail, matching ones come with %s",
            headers.directories[0],
            int(version[1]) // 1000,
            nvrtc_major,
            INSTALL_COMMAND,
        )


def _includes(source: bytes) -> Iterator[str]:
    return (name.decode(errors="replace") for name in _INCLUDE.findall(source))


def _find(directories: Iterable[str], name: str) -> Path | None:
    paths = (Path(directory, name) for directory in directories)
    return next((path for path in paths if path.is_file()), None)


@cache
def _closure_digest(directories: tuple[str, ...], name: str) -> bytes:
    digest = sha256()
    seen: set[Path] = set()
    pending = [(directories, name)]
    while pending:
        places, header = pending.pop()
        path = _find(places, header)
        if path is None:
            # Provided by NVRTC itself, or absent; which of the two its build decides.
            digest.update(f"absent {header}\n".encode())
        elif (path := path.resolve()) not in seen:
            seen.add(path)
            text = path.read_bytes()
            digest.update(f"{header} {len(text)}\n".encode() + text)
            beside = (str(path.parent), *directories)
            pending.extend((beside, included) for included in _includes(text))
    return digest.digest()
