"""Compiled programs on disk, shared by the processes of one user, and never load-bearing.

A cache that cannot be used (a read-only home, no space, no home at all, somebody else's directory)
costs one warning and the compile that it would have saved. An entry is believed only after its length
and its digest, which covers the key too, are checked; one that fails is removed, counted and
compiled again. Entries appear whole or not at all: they are written aside and renamed into place.

``cuda.core``'s file cache is not used: it returns truncated and damaged entries as valid, raises
where its directory cannot be made, and wrapping it to mend both took more code than this.

Environment:
    ``NXRT_CUDA_CACHE_DIR``: the directory; otherwise ``$XDG_CACHE_HOME/nxrt_cuda`` or ``~/.cache/nxrt_cuda``.
    ``NXRT_CUDA_CACHE_BYTES``: the most bytes kept, 512 MiB by default; the least recently used go first.
    ``NXRT_CUDA_CACHE=0``: no cache.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

__all__ = ["ProgramCache", "program_key"]

logger = logging.getLogger("nxrt_cuda")

_MAGIC = b"nxrt_cuda program 1\n"
_DEFAULT_BYTES = 512 << 20
_ENTRY, _PARTIAL = ".bin", ".tmp"

# A partial file this old was left by a process that died while it wrote.
_ABANDONED_SECONDS = 3600


def program_key(parts: Iterable[bytes]) -> str:
    """The name under which a program is kept: a digest of ``parts``, each preceded by its length.

    The lengths make it unambiguous: moving a byte from one part to the next gives another key.
    """
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


class ProgramCache:
    """A directory of compiled programs.

    Attributes:
        directory: where the entries are; made, for this user alone, when first needed.
        max_bytes: the bound on the sum of the entries' sizes.
        damaged: entries that were found truncated or altered.

    May be used from any thread, and by any number of processes at once.
    """

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int = _DEFAULT_BYTES) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.max_bytes = max_bytes
        self.damaged = 0
        self._lock = threading.Lock()
        self._warned = False

    @classmethod
    def from_environment(cls) -> ProgramCache | None:
        """The cache that the environment asks for, or None where it asks for none or has no place for one."""
        if os.environ.get("NXRT_CUDA_CACHE") == "0":
            return None
        directory = os.path.expanduser(os.environ.get("NXRT_CUDA_CACHE_DIR", ""))
        if not directory:
            base = os.environ.get("XDG_CACHE_HOME", "")
            if not os.path.isabs(base):  # the XDG rules say to ignore a relative one
                base = os.path.join(os.path.expanduser("~"), ".cache")
            if not os.path.isabs(base):
                logger.warning("there is no home directory for the program cache; set NXRT_CUDA_CACHE_DIR to have one")
                return None
            directory = os.path.join(base, "nxrt_cuda")
        bound = os.environ.get("NXRT_CUDA_CACHE_BYTES")
        if not bound:
            return cls(directory)
        if not bound.isdecimal():
            logger.warning("NXRT_CUDA_CACHE_BYTES=%s is no number of bytes; %d is used", bound, _DEFAULT_BYTES)
            return cls(directory)
        return cls(directory, int(bound))

    def get(self, key: str) -> bytes | None:
        """The payload kept under ``key``, or None."""
        path = self._path(key)
        try:
            self._require_private()
            entry = path.read_bytes()
            with suppress(OSError):  # a program in a read-only image serves as well, and nothing there is evicted
                os.utime(path)  # its time of last use, which eviction goes by
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
            return None
        payload = _unseal(key, entry)
        if payload is None:
            with self._lock:
                self.damaged += 1
            logger.info("program cache: %s is damaged and will be compiled again", path)
            with suppress(OSError):
                path.unlink()
        return payload

    def put(self, key: str, payload: bytes) -> None:
        """Keep ``payload`` under ``key``; does nothing but warn where that cannot be done."""
        entry = _seal(key, payload)
        if len(entry) > self.max_bytes:
            return
        try:
            self._require_directory()
            # mkstemp: a name of this process and thread alone, and mode 0600.
            descriptor, partial = tempfile.mkstemp(suffix=_PARTIAL, dir=self.directory)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(entry)
                os.replace(partial, self._path(key))
            except BaseException:
                with suppress(OSError):
                    os.unlink(partial)
                raise
            self._evict()
        except OSError as error:
            self._warn(error)

    def usage(self) -> tuple[int, int]:
        """How many entries are kept, and how many bytes they take."""
        sizes = []
        for path in self.directory.glob(f"*{_ENTRY}"):
            with suppress(FileNotFoundError):  # another process evicts
                sizes.append(path.stat().st_size)
        return len(sizes), sum(sizes)

    def problem(self) -> str | None:
        """Why nothing can be kept here, found by trying; None where it can."""
        try:
            self._require_directory()
            with tempfile.TemporaryFile(dir=self.directory):
                return None
        except OSError as error:
            return str(error)

    def _path(self, key: str) -> Path:
        return self.directory / (key + _ENTRY)

    def _require_directory(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._require_private()

    def _require_private(self) -> None:
        """Refuse a directory in which somebody else could place code for us to run."""
        status = self.directory.stat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise PermissionError(f"{self.directory} can be written by other users; it must be yours, with mode 0700")

    def _evict(self) -> None:
        entries = []
        with os.scandir(self.directory) as files:
            for file in files:
                with suppress(FileNotFoundError):  # another process evicts too
                    status = file.stat(follow_symlinks=False)
                    if file.name.endswith(_ENTRY):
                        entries.append((status.st_mtime, status.st_size, file.path))
                    elif file.name.endswith(_PARTIAL) and status.st_mtime < time.time() - _ABANDONED_SECONDS:
                        os.unlink(file.path)
        excess = sum(size for _, size, _ in entries) - self.max_bytes
        for _, size, path in sorted(entries):
            if excess <= 0:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            excess -= size

    def _warn(self, error: OSError) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            logger.warning("the program cache %s cannot be used (%s); kernels are compiled anew", self.directory, error)


def _seal(key: str, payload: bytes) -> bytes:
    return _MAGIC + len(payload).to_bytes(8, "little") + _digest(key, payload) + payload


def _unseal(key: str, entry: bytes) -> bytes | None:
    """The payload of ``entry``, or None unless every byte of it is as it was written under ``key``."""
    header = len(_MAGIC) + 8 + sha256().digest_size
    payload = entry[header:]
    return payload if entry == _seal(key, payload) else None


def _digest(key: str, payload: bytes) -> bytes:
    return sha256(key.encode() + payload).digest()
