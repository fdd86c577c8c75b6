"""A process that compiles what another one sends it.

NVRTC compiles one program at a time in a process, so that threads gain nothing. ``multiprocessing`` is not
used because its workers import the caller's main module, which a script would have to guard against.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from contextlib import suppress
from typing import NamedTuple

from nxrt_cuda.compile import NvrtcCompiler
from nxrt_cuda.errors import CompileError, NxrtError
from nxrt_cuda.launch import KernelSpec
from nxrt_cuda.program_cache import ProgramCache

__all__ = ["CompileJob", "CompileWorker", "serve"]


class CompileJob(NamedTuple):
    """One specialisation to compile for one architecture, into one program cache."""

    spec: KernelSpec
    arch: str
    directory: str
    max_bytes: int


class CompileWorker:
    """The other process, started when it is first needed, and anew when it has died. One caller at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._starting = threading.Lock()

    def compile(self, job: CompileJob) -> None:
        """Compile ``job`` into its cache.

        Raises:
            CompileError: it does not compile, or the process has died of it or was killed.
        """
        try:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            pickle.dump(job, process.stdin)
            process.stdin.flush()
            error = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            status = None if self._process is None else self._process.wait()
            raise CompileError(
                f"{job.spec.label} for {job.arch}: the process that was to compile it has ended, status {status}",
                source=job.spec.source,
                arch=job.arch,
            ) from None
        if error is not None:
            raise error

    def kill(self) -> None:
        """End the process, whatever it does, for good. Any thread may call it."""
        with self._starting:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """End the process, and give its pipes back; no compile may be under way."""
        self.kill()
        if self._process is not None:
            _reap(self._process)

    def _running(self) -> subprocess.Popen[bytes]:
        with self._starting:
            process = self._process
            if self._killed:
                raise EOFError
            if process is not None:
                if process.poll() is None:
                    return process
                _reap(process)
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                "NXRT_CUDA_PROGRESS": "0",
            }
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from nxrt_cuda.compile_worker import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            return self._process


def _reap(process: subprocess.Popen[bytes]) -> None:
    # Leaving the block closes the pipes and waits; what was never sent does not matter.
    with suppress(BrokenPipeError), process:
        pass


def serve() -> None:
    """Compile what comes on stdin, until it ends; an answer for each goes to stdout."""
    # The pipe is for answers alone; what libraries print goes to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while True:
        try:
            job: CompileJob = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        cache = ProgramCache(job.directory, job.max_bytes)
        error: NxrtError | None = None
        try:
            NvrtcCompiler(job.arch, cache).compile(job.spec)
        except NxrtError as refusal:
            error = refusal
        pickle.dump(error, answers)
        answers.flush()
