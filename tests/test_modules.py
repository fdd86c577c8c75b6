"""Loading images: once each, in parallel, checked against their declaration, and given back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import FrozenInstanceError

import pytest

from nxrt_cuda.compile import HostCompiler, Image
from nxrt_cuda.driver.base import ParamInfo
from nxrt_cuda.driver.host import HostDriver
from nxrt_cuda.errors import CaptureError, CompileError, DriverError, LaunchError, OutOfMemoryError
from nxrt_cuda.launch import KernelSpec, Param
from nxrt_cuda.modules import LoadedFunction, ModuleCache, ModuleStats


def spec(entry: str = "store", *kinds: str) -> KernelSpec:
    params = tuple(Param(f"p{i}", kind) for i, kind in enumerate(kinds))
    return KernelSpec("store.cu", entry, params, 64, macros=(("TILE", "8"),), code="…")


class PretendDriver:
    """The calls that loading takes; keeps what was loaded and answers with what a test sets."""

    def __init__(self) -> None:
        self.loaded: dict[int, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.params: tuple[ParamInfo, ...] | None = None
        self.static_shared_bytes = 0
        self.refusal: DriverError | None = None
        self.max_dynamic_shared = 0

    def driver_version(self) -> int:
        return 12040

    def module_load(self, image: bytes) -> int:
        self.calls["module_load"] += 1
        if self.refusal is not None:
            raise self.refusal
        handle = self.calls["module_load"]
        self.loaded[handle] = image
        return handle

    def module_unload(self, module: int) -> None:
        if self.refusal is not None:
            raise self.refusal
        del self.loaded[module]

    def module_get_function(self, module: int, entry: str) -> int:
        if entry == "absent":
            raise DriverError("cuModuleGetFunction", 500, "CUDA_ERROR_NOT_FOUND", "named symbol not found", "'absent'")
        return 1000 + module

    def func_attribute(self, function: int, attribute: str) -> int:
        values = {"NUM_REGS": 40, "SHARED_SIZE_BYTES": self.static_shared_bytes, "LOCAL_SIZE_BYTES": 16}
        return values.get(attribute, 1024)

    def func_param_info(self, function: int) -> tuple[ParamInfo, ...] | None:
        return self.params

    def func_set_max_dynamic_shared(self, function: int, nbytes: int) -> None:
        self.calls["func_set_max_dynamic_shared"] += 1
        self.max_dynamic_shared = nbytes


class PretendCompiler:
    """Counts compiles; ``body`` runs inside each and may wait or raise."""

    damaged_entries = 0

    def __init__(self, body: Callable[[KernelSpec], None] = lambda spec: None) -> None:
        self.body = body
        self.compiled: list[str] = []
        self.kind, self.cached = "cubin", False

    def __str__(self) -> str:
        return "NVRTC 13.5"

    def compile(self, spec: KernelSpec) -> Image:
        self.compiled.append(spec.entry)
        self.body(spec)
        return Image(spec.entry.encode(), self.kind, "sm_90a", seconds=0.25, cached=self.cached)


@pytest.fixture
def driver() -> PretendDriver:
    return PretendDriver()


def test_a_kernel_is_loaded_once(driver: PretendDriver) -> None:
    """It is not there before it is loaded, and afterwards a look-up calls neither compiler nor driver."""
    compiler = PretendCompiler()
    modules = ModuleCache(driver, compiler)
    assert modules.find(spec()) is None
    function = modules.load(spec())
    assert modules.find(spec()) is function
    assert modules.load(spec()) is function
    assert compiler.compiled == ["store"]
    assert driver.loaded == {1: b"store"}


def test_a_loaded_kernel_knows_what_it_takes(driver: PretendDriver) -> None:
    """Its declaration, handle, registers, static shared and local memory, and threads."""
    driver.static_shared_bytes = 2048
    function = ModuleCache(driver, PretendCompiler()).load(spec())
    assert (function.spec, function.handle) == (spec(), 1001)
    assert (function.num_regs, function.static_shared_bytes, function.local_bytes) == (40, 2048, 16)
    assert function.max_threads == 1024
    assert (function.module.handle, function.module.arch, function.module.kind) == (1, "sm_90a", "cubin")


def test_specialisations_are_told_apart(driver: PretendDriver) -> None:
    """Macros, parameters and text are part of what a kernel is."""
    modules = ModuleCache(driver, PretendCompiler())
    one, other = spec("store", "ptr"), spec("store", "u64")
    assert modules.load(one) is not modules.load(other)
    assert modules.stats().loaded == 2


# Threads.


def test_eight_threads_share_one_compile(driver: PretendDriver) -> None:
    """One compiles and loads, seven wait, and all get the same kernel."""
    barrier = threading.Barrier(8)
    release = threading.Event()
    compiler = PretendCompiler(lambda spec: release.wait(10))
    modules = ModuleCache(driver, compiler)

    def load() -> LoadedFunction:
        barrier.wait(10)
        return modules.load(spec())

    with ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(load) for _ in range(8)]
        threading.Timer(0.1, release.set).start()
        functions = {load.result(10) for load in loads}
    assert len(functions) == 1
    assert compiler.compiled == ["store"]
    assert driver.calls["module_load"] == 1
    assert (modules.stats().modules_compiled, modules.stats().compile_seconds) == (1, 0.25)


def test_different_kernels_compile_at_the_same_time(driver: PretendDriver) -> None:
    """Each compile here waits until the other has begun."""
    both = threading.Barrier(2)
    modules = ModuleCache(driver, PretendCompiler(lambda spec: both.wait(10)))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(modules.load, (spec("store"), spec("load")))
    assert first is not second


def test_a_failed_compile_reaches_every_thread_that_waited(driver: PretendDriver) -> None:
    """Nothing is kept of it: the next load compiles again."""
    release = threading.Event()

    def fail(spec: KernelSpec) -> None:
        release.wait(10)
        raise CompileError("no", source="store.cu", arch="sm_90a", log="store.cu(1): error")

    compiler = PretendCompiler(fail)
    modules = ModuleCache(driver, compiler)
    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(modules.load, spec()) for _ in range(4)]
        threading.Timer(0.1, release.set).start()
        errors = [load.exception(10) for load in loads]
    assert all(isinstance(error, CompileError) and "store.cu(1): error" in str(error) for error in errors)
    assert compiler.compiled == ["store"]
    assert modules.find(spec()) is None
    assert modules.stats() == ModuleStats()
    compiler.body = lambda spec: None
    assert modules.load(spec()).handle == 1001


class Gate:
    """A guard like a runtime's: a lock that a caller may hold, and a switch for what a capture refuses."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.capturing = False

    @contextmanager
    def __call__(self, operation: str) -> Iterator[None]:
        with self.lock:
            if self.capturing:
                raise CaptureError(operation, operation=operation, state="capturing")
            yield


def test_nothing_is_compiled_inside_the_guard(driver: PretendDriver) -> None:
    """A compile leaves the runtime's lock to others."""
    gate = Gate()
    taken = []

    def take_lock() -> None:
        with gate.lock:
            taken.append(True)

    def have_another_thread_take_the_lock(spec: KernelSpec) -> None:
        thread = threading.Thread(target=take_lock, daemon=True)
        thread.start()
        thread.join(10)

    ModuleCache(driver, PretendCompiler(have_another_thread_take_the_lock), gate).load(spec())
    assert taken == [True]


def test_waiting_inside_the_guard_is_no_deadlock(driver: PretendDriver) -> None:
    """A thread that holds the runtime's lock may wait for a compile of a thread that will need that lock."""
    gate, compiling, holding = Gate(), threading.Event(), threading.Event()

    def compile_body(spec: KernelSpec) -> None:
        compiling.set()
        holding.wait(10)

    modules = ModuleCache(driver, PretendCompiler(compile_body), gate)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(modules.load, spec())
        compiling.wait(10)
        with gate.lock:
            holding.set()
            function = modules.load(spec())
        assert other.result(10) is function
    assert driver.calls["module_load"] == 1


def test_a_capture_refuses_to_load_before_anything_is_compiled(driver: PretendDriver) -> None:
    """The first use of a kernel belongs before a capture; one that is loaded is found in it."""
    gate, compiler = Gate(), PretendCompiler()
    modules = ModuleCache(driver, compiler, gate)
    function = modules.load(spec("warm"))
    gate.capturing = True
    with pytest.raises(CaptureError, match="loading cold"):
        modules.load(spec("cold"))
    assert compiler.compiled == ["warm"]
    assert modules.find(spec("warm")) is function


# What the driver refuses.


def test_a_refused_image_names_compiler_driver_and_target(driver: PretendDriver) -> None:
    """A PTX of a newer NVRTC, say: kind, architecture and both versions are in the message."""
    driver.refusal = DriverError("cuModuleLoadDataEx", 222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "too new", "a log")
    compiler = PretendCompiler()
    compiler.kind = "ptx"
    modules = ModuleCache(driver, compiler)
    with pytest.raises(DriverError) as caught:
        modules.load(spec())
    message = str(caught.value)
    assert "CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222)" in message
    assert "ptx of store [TILE=8] for sm_90a, made by NVRTC 13.5; the driver is 12.4; a log" in message
    assert modules.find(spec()) is None
    assert modules.stats().loaded == 0


def test_a_refused_image_keeps_its_type(driver: PretendDriver) -> None:
    """Out of memory while loading is still out of memory."""
    driver.refusal = OutOfMemoryError("cuModuleLoadDataEx", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
    with pytest.raises(OutOfMemoryError, match=r"cubin of store .* for sm_90a"):
        ModuleCache(driver, PretendCompiler()).load(spec())


def test_a_missing_entry_unloads_the_module(driver: PretendDriver) -> None:
    """The error is the driver's, and nothing stays loaded."""
    modules = ModuleCache(driver, PretendCompiler())
    with pytest.raises(DriverError, match="CUDA_ERROR_NOT_FOUND"):
        modules.load(spec("absent"))
    assert driver.loaded == {}
    assert modules.find(spec("absent")) is None


@pytest.mark.parametrize(
    ("compiled", "message"),
    [
        ([(0, 8), (8, 4)], r"is declared with 3 parameters \(p0, p1, p2\) and compiled with 2"),
        (
            [(0, 8), (8, 4), (12, 4)],
            "parameter 'p2' is declared as f64, 8 bytes at offset 16, and compiled as 4 bytes at offset 12",
        ),
        (
            [(0, 8), (8, 8), (16, 8)],
            "parameter 'p1' is declared as i32, 4 bytes at offset 8, and compiled as 8 bytes at offset 8",
        ),
    ],
)
def test_parameters_must_be_as_declared(driver: PretendDriver, compiled: list[tuple[int, int]], message: str) -> None:
    """A kernel whose real parameters differ would read past the arguments; it is not let in."""
    driver.params = tuple(ParamInfo(*info) for info in compiled)
    modules = ModuleCache(driver, PretendCompiler())
    declared = spec("store", "ptr", "i32", "f64")
    with pytest.raises(LaunchError, match=message):
        modules.load(declared)
    assert driver.loaded == {}
    driver.params = declared.layout
    assert modules.load(declared)
    driver.params = None  # a driver before 12.4
    assert modules.load(spec("load", "ptr"))


# Dynamic shared memory.


def test_shared_memory_above_the_default_is_opted_into_once(driver: PretendDriver) -> None:
    """48 KiB, static memory counted, need no call; more needs one, and less after that needs none."""
    driver.static_shared_bytes = 1024
    function = ModuleCache(driver, PretendCompiler()).load(spec())
    limit = 227 * 1024
    function.require_dynamic_shared(47 * 1024, limit)
    assert driver.calls["func_set_max_dynamic_shared"] == 0
    function.require_dynamic_shared(47 * 1024 + 1, limit)
    assert driver.max_dynamic_shared == 47 * 1024 + 1
    function.require_dynamic_shared(226 * 1024, limit)
    assert driver.max_dynamic_shared == 226 * 1024
    function.require_dynamic_shared(100 * 1024, limit)
    assert driver.calls["func_set_max_dynamic_shared"] == 2


def test_more_shared_memory_than_the_device_has_is_refused(driver: PretendDriver) -> None:
    """With what is needed and what there is, before any driver call."""
    driver.static_shared_bytes = 1024
    function = ModuleCache(driver, PretendCompiler()).load(spec())
    with pytest.raises(LaunchError) as caught:
        function.require_dynamic_shared(99 * 1024, 99 * 1024)
    assert str(caught.value) == (
        "store [TILE=8] needs 101376 bytes of dynamic shared memory beside 1024 static ones; "
        "this device gives a block 101376 bytes"
    )
    assert driver.calls["func_set_max_dynamic_shared"] == 0


def test_an_opt_in_goes_through_the_guard(driver: PretendDriver) -> None:
    """It is a driver call, which a capture refuses; one made before serves in the capture."""
    gate = Gate()
    function = ModuleCache(driver, PretendCompiler(), gate).load(spec())
    function.require_dynamic_shared(64 * 1024, 99 * 1024)
    gate.capturing = True
    function.require_dynamic_shared(64 * 1024, 99 * 1024)
    with pytest.raises(CaptureError, match="shared memory opt-in of store"):
        function.require_dynamic_shared(65 * 1024, 99 * 1024)
    assert driver.max_dynamic_shared == 64 * 1024


# The end, and the counts.


def test_unloading_kills_the_kernels(driver: PretendDriver) -> None:
    """Every module goes back, and a kernel that somebody still holds has a handle that no driver takes."""
    modules = ModuleCache(driver, PretendCompiler())
    functions = [modules.load(spec(entry)) for entry in ("store", "load")]
    modules.unload_all()
    assert driver.loaded == {}
    assert [function.handle for function in functions] == [0, 0]
    assert modules.find(spec()) is None
    modules.unload_all()


def test_modules_that_nothing_refers_to_are_unloaded_beyond_a_bound(
    driver: PretendDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last ones loaded stay, and so does whatever somebody holds; what is gone is loaded again when asked for."""
    monkeypatch.setattr("nxrt_cuda.modules._KEPT", 3)
    modules = ModuleCache(driver, PretendCompiler())
    held = modules.load(spec("held"))
    for number in range(10):
        modules.load(spec(f"store{number}"))
    assert len(driver.loaded) == 4
    assert modules.find(spec("held")) is held
    assert modules.find(spec("store9")) is not None
    assert modules.find(spec("store0")) is None
    assert modules.load(spec("store0")).handle != 0
    stats = modules.stats()
    assert (stats.loaded, stats.unloaded) == (12, 8)
    del held
    assert modules.find(spec("held")) is None
    assert len(driver.loaded) == 3


def test_a_module_that_could_not_be_unloaded_is_tried_again_at_the_end(driver: PretendDriver) -> None:
    modules = ModuleCache(driver, PretendCompiler())
    for entry in ("store", "load"):
        modules.load(spec(entry))
    driver.refusal = DriverError("cuModuleUnload", 999, "CUDA_ERROR_UNKNOWN", "unknown error")
    with pytest.raises(DriverError, match="cuModuleUnload"):
        modules.unload_all()
    driver.refusal = None
    modules.unload_all()
    assert driver.loaded == {}


def test_counts_tell_compiles_from_cache_hits(driver: PretendDriver) -> None:
    """And CUBIN from PTX; a snapshot does not change afterwards."""
    compiler = PretendCompiler()
    modules = ModuleCache(driver, compiler)
    modules.load(spec("store"))
    before = modules.stats()
    compiler.cached = True
    modules.load(spec("load"))
    compiler.kind, compiler.cached, compiler.damaged_entries = "ptx", False, 3
    modules.load(spec("copy"))
    assert before == ModuleStats(modules_compiled=1, loaded=1, compile_seconds=0.25, cubin_images=1)
    assert modules.stats() == ModuleStats(
        modules_compiled=2,
        cache_hits=1,
        loaded=3,
        compile_seconds=0.5,
        cubin_images=2,
        ptx_images=1,
        damaged_entries=3,
    )
    with pytest.raises(FrozenInstanceError):
        before.loaded = 0


def test_the_host_loads_and_counts_alike() -> None:
    """The host driver's own images go the same way, parameters checked, and are given back."""
    driver = HostDriver({"store": lambda launch: None})
    driver.ctx_push_current(driver.primary_ctx_retain(0))
    modules = ModuleCache(driver, HostCompiler())
    function = modules.load(spec("store", "ptr", "i32", "f64"))
    assert driver.func_param_info(function.handle) == function.spec.layout
    assert function.max_threads == 64
    stats = modules.stats()
    assert (stats.modules_compiled, stats.loaded, stats.cubin_images, stats.ptx_images) == (1, 1, 0, 0)
    with pytest.raises(DriverError, match="absent"):
        modules.load(spec("absent"))
    modules.unload_all()
    assert function.handle == 0


def test_an_opt_in_is_not_lowered_by_a_slower_thread(driver: PretendDriver) -> None:
    """Both have found the default too small; the one that asks for less comes second."""
    first = threading.Event()

    @contextmanager
    def guard(operation: str) -> Iterator[None]:
        if threading.current_thread().name == "less" and "opt-in" in operation:
            assert first.wait(10)
        yield

    function = ModuleCache(driver, PretendCompiler(), guard).load(spec("k"))
    less = threading.Thread(target=function.require_dynamic_shared, args=(60 << 10, 200 << 10), name="less")
    less.start()
    function.require_dynamic_shared(100 << 10, 200 << 10)
    first.set()
    less.join(10)
    assert not less.is_alive()
    assert (driver.max_dynamic_shared, driver.calls["func_set_max_dynamic_shared"]) == (100 << 10, 1)
