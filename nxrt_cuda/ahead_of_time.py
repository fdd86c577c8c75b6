"""Compiling before the first call needs it: on a build machine, with a GPU or without one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from nxrt_cuda.architecture import check_arch, device_arch
from nxrt_cuda.compile import NvrtcCompiler
from nxrt_cuda.compile_worker import CompileJob, CompileWorker
from nxrt_cuda.dtype import DataType, data_type
from nxrt_cuda.errors import CompileError, NoDeviceError, NxrtError, RuntimeStateError, UnsupportedError
from nxrt_cuda.kernel import operator_factories
from nxrt_cuda.launch import KernelSpec
from nxrt_cuda.nvrtc import load_nvrtc
from nxrt_cuda.program_cache import ProgramCache
from nxrt_cuda.progress import compiling

__all__ = ["PrecompileReport", "Precompiled", "precompile"]


@dataclass(frozen=True)
class Precompiled:
    """One specialisation for one architecture.

    Attributes:
        spec: the specialisation.
        arch: what it was compiled for, e.g. ``"sm_90a"``.
        seconds: how long that took; 0 where the cache had it.
        was_cached: whether the cache had it already.
        error: why it is not in the cache; None where it is.
    """

    spec: KernelSpec
    arch: str
    seconds: float = 0.0
    was_cached: bool = False
    error: NxrtError | None = None


@dataclass(frozen=True)
class PrecompileReport:
    """What :func:`precompile` did; prints as text.

    Attributes:
        programs: every specialisation for every architecture.
        directory: of the program cache.
        seconds: how long it took in all.
    """

    programs: tuple[Precompiled, ...]
    directory: str
    seconds: float

    @property
    def compiled(self) -> int:
        """Programs that were compiled now."""
        return sum(not program.was_cached and program.error is None for program in self.programs)

    @property
    def found(self) -> int:
        """Programs that the cache had already."""
        return sum(program.was_cached for program in self.programs)

    @property
    def failures(self) -> tuple[Precompiled, ...]:
        """Programs that are not in the cache."""
        return tuple(program for program in self.programs if program.error is not None)

    def __str__(self) -> str:
        archs = ", ".join(dict.fromkeys(program.arch for program in self.programs))
        failed = f", {len(self.failures)} failed" if self.failures else ""
        lines = [
            f"{len(self.programs)} programs for {archs}: {self.compiled} compiled in {self.seconds:.1f} s, "
            f"{self.found} in the cache already{failed}",
            f"program cache: {self.directory}",
            *(f"failed: {program.spec.label} for {program.arch}\n{program.error}" for program in self.failures),
        ]
        return "\n".join(lines)


def precompile(
    arch: str | Sequence[str] | None = None,
    *,
    ops: Sequence[str] | None = None,
    dtypes: Sequence[Any] | None = None,
    specs: Iterable[KernelSpec] | None = None,
    cache: ProgramCache | str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    on_done: Callable[[Precompiled], None] | None = None,
) -> PrecompileReport:
    """Fill the program cache, so that later processes load kernels instead of compiling them.

    Programs are compiled in processes of their own; no GPU is needed where ``arch`` is given. A runtime on a
    device of that architecture finds them as long as NVRTC, the CUDA headers and the kernel sources stay
    the same. What does not compile is in the report's ``failures``, and the others are kept.

    Args:
        arch: one or several, e.g. ``"sm_90a"``; by default those of this machine's devices. A device's own
            spelling is used: ``"sm_90"`` is taken for ``"sm_90a"``, which is what a Hopper device loads.
        ops: operators, e.g. ``["Attention"]``; by default all. An operator may have more specialisations
            than are compiled ahead: attention has one for every head size.
        dtypes: of the elements, e.g. ``[nx.float16]`` or ``["bfloat16"]``; by default all that the operators serve.
        specs: these specialisations instead of those of ``ops``.
        cache: a program cache or its directory; by default the one that runtimes use.
        jobs: compiler processes at a time; by default one a processor.
        on_done: called, on this thread, with every program once it is in the cache or has failed.

    Raises:
        CompileError: NVRTC is missing, or cannot compile for an architecture; the message lists those it knows.
        NoDeviceError: ``arch`` is not given and there is no GPU.
        UnsupportedError: there is no such operator, or none that takes such a dtype.
        RuntimeStateError: nothing can be kept in the cache, or there is none.
    """
    started = perf_counter()
    store = _open_cache(cache)
    archs = _device_archs() if arch is None else [arch] if isinstance(arch, str) else arch
    targets = tuple(dict.fromkeys(map(_as_a_device_says, archs)))
    given = None if specs is None else tuple(specs)
    wanted = None if dtypes is None else [data_type(dtype) for dtype in dtypes]
    chosen = {target: _choose(_specs_of(ops, target) if given is None else given, wanted) for target in targets}
    programs: list[Precompiled] = []

    def note(program: Precompiled) -> None:
        programs.append(program)
        if on_done is not None:
            on_done(program)

    compilers = {target: NvrtcCompiler(target, store) for target in targets}
    missing = []
    for target, compiler in compilers.items():
        for spec in chosen[target]:
            if compiler.is_cached(spec):
                note(Precompiled(spec, target, was_cached=True))
            else:
                missing.append(CompileJob(spec, target, str(store.directory), store.max_bytes))
    if missing:
        workers = jobs or len(os.sched_getaffinity(0))
        for program in _compile(missing, min(workers, len(missing))):
            kept = program.error is not None or compilers[program.arch].is_cached(program.spec)
            note(program if kept else _lost(program, store))
    return PrecompileReport(tuple(programs), str(store.directory), perf_counter() - started)


def _open_cache(cache: ProgramCache | str | os.PathLike[str] | None) -> ProgramCache:
    if cache is None:
        cache = ProgramCache.from_environment()
    elif not isinstance(cache, ProgramCache):
        cache = ProgramCache(cache)
    if cache is None:
        raise RuntimeStateError("there is no program cache to fill; unset NXRT_CUDA_CACHE or set NXRT_CUDA_CACHE_DIR")
    problem = cache.problem()
    if problem is not None:
        raise RuntimeStateError(f"nothing can be kept in the program cache {cache.directory}: {problem}")
    return cache


def _device_archs() -> list[str]:
    from nxrt_cuda.driver.cuda import CudaDriver

    try:
        driver = CudaDriver()
        devices = range(driver.device_count())
    except NoDeviceError as error:
        raise NoDeviceError(
            error.call,
            error.code,
            error.name,
            error.text,
            "there is no device to compile for; name an architecture, such as sm_90a",
        ) from None
    return [
        device_arch(
            (
                driver.device_attribute(device, "COMPUTE_CAPABILITY_MAJOR"),
                driver.device_attribute(device, "COMPUTE_CAPABILITY_MINOR"),
            ),
            load_nvrtc(),
        )
        for device in devices
    ]


def _as_a_device_says(arch: str) -> str:
    """The architecture that a device of ``arch`` compiles for by itself."""
    nvrtc = load_nvrtc()
    check_arch(arch, nvrtc)
    return device_arch(_capability(arch), nvrtc) if arch.startswith("sm_") else arch


def _capability(arch: str) -> tuple[int, int]:
    return divmod(int(arch.partition("_")[2].rstrip("af")), 10)


def _specs_of(ops: Sequence[str] | None, arch: str) -> list[KernelSpec]:
    factories = operator_factories()
    capability = _capability(arch)
    if ops is None:
        return [spec for factory in factories.values() for spec in factory.kernel_specs(capability)]
    named = {
        name: factory
        for (domain, op_type), factory in factories.items()
        for name in (op_type, f"{domain or 'ai.onnx'}::{op_type}")
    }
    for op in ops:
        if op not in named:
            served = ", ".join(f"{domain or 'ai.onnx'}::{op_type}" for domain, op_type in factories)
            raise UnsupportedError(f"there is no operator {op!r}; there are {served}")
    return [spec for op in ops for spec in named[op].kernel_specs(capability)]


def _choose(specs: Sequence[KernelSpec], dtypes: Sequence[DataType] | None) -> tuple[KernelSpec, ...]:
    """Each of ``specs`` once; given ``dtypes``, those for such elements, and those that are for any."""
    if dtypes is None:
        return tuple(dict.fromkeys(specs))
    elements = {spec: dict(spec.macros).get("ELEMENT") for spec in specs}
    for dtype in dtypes:
        if dtype.cuda not in elements.values():
            raise UnsupportedError(f"no kernel among these takes {dtype}")
    wanted = {None, *(dtype.cuda for dtype in dtypes)}
    return tuple(spec for spec, element in elements.items() if element in wanted)


def _lost(program: Precompiled, store: ProgramCache) -> Precompiled:
    spec, arch = program.spec, program.arch
    message = (
        f"{spec.label} was compiled for {arch} and is not in {store.directory}, which keeps {store.max_bytes} bytes"
    )
    return replace(program, error=CompileError(message, source=spec.source, arch=arch))


def _compile(tasks: Sequence[CompileJob], processes: int) -> Iterator[Precompiled]:
    """Compile in so many processes; yields programs as they are done."""
    workers = [CompileWorker() for _ in range(processes)]
    idle: SimpleQueue[CompileWorker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def compile_one(job: CompileJob) -> Precompiled:
        worker = idle.get()
        started = perf_counter()
        try:
            with compiling(job.spec.entry, job.arch):
                worker.compile(job)
        except NxrtError as error:
            return Precompiled(job.spec, job.arch, error=error)
        finally:
            idle.put(worker)
        return Precompiled(job.spec, job.arch, perf_counter() - started)

    with ExitStack() as stack, ThreadPoolExecutor(processes) as pool:
        for worker in workers:
            stack.callback(worker.close)
        futures = [pool.submit(compile_one, job) for job in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            # After an interrupt nobody waits for what is under way.
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.kill()
