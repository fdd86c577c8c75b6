"""Images loaded into a context: one load a specialisation and runtime, found again by one dictionary look-up.

A module is loaded as long as a function of it is referred to, by a prepared launch, a graph, a plan or the user; the
last ones loaded are kept beyond that, so that a program that makes ever new kernels does not fill the device.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nxrt_cuda.driver.base import Driver, ParamInfo
from nxrt_cuda.errors import DriverError, LaunchError
from nxrt_cuda.launch import KernelSpec
from nxrt_cuda.stats import StatsTable

if TYPE_CHECKING:
    from nxrt_cuda.compile import Compiler, Image

__all__ = ["LoadedFunction", "LoadedModule", "ModuleCache", "ModuleStats"]

Guard = Callable[[str], AbstractContextManager[object]]
Later = Callable[[Callable[[], None]], None]
Traced = Callable[[str, str, Mapping[str, object]], AbstractContextManager[object]]

# What a block has of shared memory on any device without asking for more.
_DEFAULT_SHARED_BYTES = 48 * 1024

_KEPT = 512
"""Modules that stay loaded although nothing but the cache refers to them, at most."""


def _untraced(kind: str, name: str, details: Mapping[str, object]) -> AbstractContextManager[object]:
    return nullcontext()


def _at_once(call: Callable[[], None]) -> None:
    call()


@dataclass(frozen=True)
class ModuleStats(StatsTable):
    """What a module cache has done.

    Attributes:
        modules_compiled: specialisations compiled by NVRTC, or prepared for the host driver.
        cache_hits: specialisations found in the program cache on disk.
        loaded: modules loaded into the context.
        unloaded: modules unloaded again.
        compile_seconds: time spent compiling.
        cubin_images, ptx_images: loaded modules by what they were loaded from.
        damaged_entries: entries of the program cache that were found damaged, and compiled again.
    """

    TITLE = "modules"

    modules_compiled: int = 0
    cache_hits: int = 0
    loaded: int = 0
    unloaded: int = 0
    compile_seconds: float = 0.0
    cubin_images: int = 0
    ptx_images: int = 0
    damaged_entries: int = 0


class LoadedModule:
    """A module in the driver, unloaded once nothing refers to it; unloading it kills its functions.

    Attributes:
        cache: where it was loaded, which says whose runtime it is.
        handle: the driver's module; 0 once it is unloaded.
    """

    __slots__ = ("arch", "cache", "driver", "guard", "handle", "kind")

    def __init__(self, cache: ModuleCache, driver: Driver, guard: Guard, handle: int, image: Image) -> None:
        self.cache = cache
        self.driver = driver
        self.guard = guard
        self.handle = handle
        self.kind = image.kind
        self.arch = image.arch

    def __del__(self) -> None:
        if self.handle != 0:
            self.cache.forget(self.handle)


class LoadedFunction:
    """A kernel ready to launch.

    Attributes:
        spec: what it was compiled from.
        handle: the driver's function; 0 once the module is unloaded, which the driver refuses to launch.
        module: the module it lives in, kept alive.
        num_regs: registers a thread.
        static_shared_bytes: shared memory of a block that the kernel declares itself.
        local_bytes: local memory of a thread, spills included.
        max_threads: the most threads a block that the kernel's resources allow.
    """

    __slots__ = (
        "__weakref__",
        "_dynamic_shared_bytes",
        "handle",
        "local_bytes",
        "max_threads",
        "module",
        "num_regs",
        "spec",
        "static_shared_bytes",
    )

    def __init__(self, spec: KernelSpec, handle: int, module: LoadedModule) -> None:
        attribute = module.driver.func_attribute
        self.spec = spec
        self.handle = handle
        self.module = module
        self.num_regs = attribute(handle, "NUM_REGS")
        self.static_shared_bytes = attribute(handle, "SHARED_SIZE_BYTES")
        self.local_bytes = attribute(handle, "LOCAL_SIZE_BYTES")
        self.max_threads = attribute(handle, "MAX_THREADS_PER_BLOCK")
        self._dynamic_shared_bytes = max(0, _DEFAULT_SHARED_BYTES - self.static_shared_bytes)

    def require_dynamic_shared(self, nbytes: int, limit: int) -> None:
        """Make launches with ``nbytes`` of dynamic shared memory legal; opts in above the 48 KiB default.

        Args:
            nbytes: dynamic shared memory of a block.
            limit: what a block can have in all on this device, after opting in.

        Raises:
            LaunchError: the device cannot give a block that much.
            CaptureError: an opt-in is needed and the runtime is capturing.
        """
        if nbytes <= self._dynamic_shared_bytes:
            return
        if self.static_shared_bytes + nbytes > limit:
            raise LaunchError(
                f"{self.spec.label} needs {nbytes} bytes of dynamic shared memory beside {self.static_shared_bytes} "
                f"static ones; this device gives a block {limit} bytes"
            )
        with self.module.guard(f"the shared memory opt-in of {self.spec.entry}"):
            # Asked again: another thread may have opted in to more meanwhile.
            if nbytes > self._dynamic_shared_bytes:
                self.module.driver.func_set_max_dynamic_shared(self.handle, nbytes)
                self._dynamic_shared_bytes = nbytes

    def __repr__(self) -> str:
        return f"LoadedFunction({self.spec.label}, {self.module.arch}, {self.num_regs} registers)"


class ModuleCache:
    """The loaded kernels of one runtime.

    Args:
        driver: where modules are loaded.
        compiler: where images come from.
        guard: entered, with a word on what for, around driver calls; a runtime passes the context
            manager that takes its lock, makes its context current and refuses what is illegal in a
            capture. Nothing is compiled inside it.
        traced: entered around compiles and loads, with their kind, name and details.
        later: makes the call that it is given once the work queued until then is done, within the guard. It is
            itself called by finalisers, at any instruction.

    Threads that ask for one specialisation at once share one compile; different ones compile at the
    same time.
    """

    def __init__(
        self,
        driver: Driver,
        compiler: Compiler,
        guard: Guard = nullcontext,
        traced: Traced = _untraced,
        later: Later = _at_once,
    ) -> None:
        self._driver = driver
        self._compiler = compiler
        self._guard = guard
        self._traced = traced
        self._later = later
        # Taken inside the guard, never around it.
        self._lock = threading.Lock()
        self._functions: weakref.WeakValueDictionary[KernelSpec, LoadedFunction] = weakref.WeakValueDictionary()
        self._kept: deque[LoadedFunction] = deque(maxlen=_KEPT)
        self._loaded: set[int] = set()
        self._compiling: dict[KernelSpec, Future[Image]] = {}
        self._counts: Counter[str] = Counter()
        self._compile_seconds = 0.0

    def find(self, spec: KernelSpec) -> LoadedFunction | None:
        """The kernel if it is loaded; compiles nothing and calls no driver."""
        return self._functions.get(spec)

    def load(self, spec: KernelSpec) -> LoadedFunction:
        """The kernel, compiled and loaded if need be.

        Raises:
            CompileError: it does not compile; each thread that waited for it gets this error.
            DriverError: the driver refuses the image, or the entry is not in it.
            LaunchError: the compiled kernel does not have the parameters that ``spec`` declares.
        """
        operation = f"loading {spec.entry}"
        with self._guard(operation):
            pass  # refused now rather than after a compile
        with self._lock:
            found = self._functions.get(spec)
            if found is not None:
                return found
            compiling = self._compiling.get(spec)
            first = compiling is None
            if compiling is None:
                compiling = self._compiling[spec] = Future()
        try:
            # What others wait for is the compile alone, which needs no guard: a thread that waits
            # inside it keeps nobody from finishing.
            image = self._compile(spec, compiling) if first else compiling.result()
            with self._guard(operation), self._lock:
                function = self._functions.get(spec)
                if function is None:
                    with self._traced("load", f"load {spec.entry}", {"kind": image.kind, "bytes": len(image.data)}):
                        function = self._functions[spec] = self._load(spec, image)
                    self._kept.append(function)
                return function
        finally:
            if first:
                with self._lock:
                    del self._compiling[spec]

    def unload_all(self) -> None:
        """Unload every module. Nothing may use them any more; a launch of one of their kernels is refused.

        After a failure, goes on where it stopped.
        """
        with self._guard("unloading modules"), self._lock:
            for function in self._functions.values():
                function.handle = function.module.handle = 0
            self._functions.clear()
            self._kept.clear()
            while self._loaded:
                self._unload(next(iter(self._loaded)))

    def forget(self, handle: int) -> None:
        """Unload a module, if it still is loaded, after the work that is queued now."""
        self._later(partial(self._unload, handle))

    def _unload(self, handle: int) -> None:
        if handle in self._loaded:
            self._driver.module_unload(handle)
            self._loaded.discard(handle)
            self._counts["unloaded"] += 1

    def stats(self) -> ModuleStats:
        """A snapshot of the counts."""
        with self._lock:
            return ModuleStats(
                **self._counts,
                compile_seconds=self._compile_seconds,
                damaged_entries=self._compiler.damaged_entries,
            )

    def _compile(self, spec: KernelSpec, result: Future[Image]) -> Image:
        details: dict[str, object] = {"specialisation": spec.label}
        try:
            with self._traced("compile", f"compile {spec.entry}", details):
                image = self._compiler.compile(spec)
                details |= {"arch": image.arch, "from_cache": image.cached}
        except BaseException as error:
            result.set_exception(error)
            raise
        with self._lock:
            if image.cached:
                self._counts["cache_hits"] += 1
            else:
                self._counts["modules_compiled"] += 1
                self._compile_seconds += image.seconds
        result.set_result(image)
        return image

    def _load(self, spec: KernelSpec, image: Image) -> LoadedFunction:
        driver = self._driver
        try:
            handle = driver.module_load(image.data)
        except DriverError as error:
            version = driver.driver_version()
            origin = (
                f"{image.kind} of {spec.label} for {image.arch}, made by {self._compiler}; "
                f"the driver is {version // 1000}.{version % 1000 // 10}"
            )
            context = f"{origin}; {error.context}" if error.context else origin
            raise type(error)(error.call, error.code, error.name, error.text, context) from error
        module = LoadedModule(self, driver, self._guard, handle, image)
        try:
            function = LoadedFunction(spec, driver.module_get_function(handle, spec.entry), module)
            _check_params(spec, driver.func_param_info(function.handle))
        except BaseException:
            module.handle = 0
            driver.module_unload(handle)
            raise
        self._loaded.add(handle)
        self._counts["loaded"] += 1
        if image.kind != "host":
            self._counts[f"{image.kind}_images"] += 1
        return function


def _check_params(spec: KernelSpec, compiled: tuple[ParamInfo, ...] | None) -> None:
    """Compare the declared parameters with the driver's own account of the compiled ones, where it has one.

    Sizes are the kernel's; offsets are only compared where no parameter is an opaque structure, because the
    compiler aligns those by their absolute address in the constant bank. Launches pass a pointer to each.
    """
    if compiled is None:
        return
    if len(compiled) != len(spec.params):
        names = ", ".join(param.name for param in spec.params)
        raise LaunchError(
            f"{spec.label} is declared with {len(spec.params)} parameters ({names}) and compiled with {len(compiled)}"
        )
    has_fixed_offsets = all(param.kind != "tensor_map" for param in spec.params)
    for param, here, there in zip(spec.params, spec.layout, compiled, strict=True):
        if here.size != there.size or (has_fixed_offsets and here.offset != there.offset):
            raise LaunchError(
                f"{spec.label}: parameter '{param.name}' is declared as {param.kind}, {here.size} bytes at offset "
                f"{here.offset}, and compiled as {there.size} bytes at offset {there.offset}"
            )
