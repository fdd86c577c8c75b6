"""What all calls of the host driver share: the protocol, contexts, counts, injected failures, the leak report."""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from nxrt_cuda.driver.base import CaptureMode, Driver
from nxrt_cuda.driver.host import HostDriver, LiveObjects
from nxrt_cuda.driver.host_device import ATTRIBUTES
from nxrt_cuda.driver.status import STATUSES, error_class, is_fault
from nxrt_cuda.errors import DeviceFaultError, DriverError, NoDeviceError, OutOfMemoryError
from tests.driver.host_rig import AXPY, Rig, image, in_thread, packed, refused

METHODS = sorted(name for name, value in vars(Driver).items() if callable(value) and not name.startswith("_"))
CALLS = [name for name in METHODS if not name.startswith("ready_")]
"""What reaches the driver; a ``ready_`` method only makes such a call ready."""


_placed: list[ctypes.Array[ctypes.c_char]] = []


def placed_map(driver: HostDriver) -> int:
    """The host address, a multiple of 64, of a tensor map that stays where it is."""
    encoded = driver.tensor_map_encode_tiled("FLOAT32", 0x1000, (8, 8), (32,), (8, 8))
    _placed.append(ctypes.create_string_buffer(len(encoded) + 64))
    place = -(-ctypes.addressof(_placed[-1]) // 64) * 64
    ctypes.memmove(place, encoded, len(encoded))
    return place


def everything(rig: Rig) -> dict[str, Callable[[], object]]:
    """Every call of the protocol, with arguments that are valid now."""
    driver, stream = rig.driver, rig.stream
    ptr, other = driver.mem_alloc(64), driver.mem_alloc(64)
    pinned = driver.mem_host_alloc(64)
    module = driver.module_load(AXPY.encode())
    function = driver.module_get_function(module, "axpy")
    event, spare, recording = driver.event_create(timing=True), driver.stream_create(), driver.stream_create()
    host = np.zeros(64, np.uint8)
    address = host.ctypes.data
    driver.event_record(event, stream)
    driver.event_synchronize(event)
    driver.stream_begin_capture(stream, CaptureMode.THREAD_LOCAL)
    nodes: list[int] = []
    for work in (
        lambda: rig.launch(function, AXPY, ptr, other, 1, 0.0),
        lambda: driver.memcpy_dtod_async(other, ptr, 64, stream),
        lambda: driver.memset_d8_async(ptr, 0, 64, stream),
    ):
        work()
        nodes += driver.stream_capture_dependencies(stream)
    kernel, copy, fill = nodes
    graph = driver.stream_end_capture(stream)
    arguments, params = packed(AXPY, ptr, other, 1, 0.0)
    as_launched = (function, (1, 1, 1), (32, 1, 1), 0, params)
    as_copied, as_filled = (other, ptr, 64, rig.context), (ptr, 1, 64, rig.context)
    graph_exec = driver.graph_instantiate(graph)
    tensor_map = placed_map(driver)
    driver.stream_begin_capture(recording, CaptureMode.RELAXED)
    return {
        "driver_version": driver.driver_version,
        "device_count": driver.device_count,
        "device_name": lambda: driver.device_name(0),
        "device_attribute": lambda: driver.device_attribute(0, "WARP_SIZE"),
        "primary_ctx_retain": lambda: driver.primary_ctx_retain(0),
        "primary_ctx_release": lambda: driver.primary_ctx_release(0),
        "ctx_get_current": driver.ctx_get_current,
        "ctx_push_current": lambda: driver.ctx_push_current(rig.context),
        "ctx_pop_current": driver.ctx_pop_current,
        "stream_create": driver.stream_create,
        "stream_destroy": lambda: driver.stream_destroy(spare),
        "stream_synchronize": lambda: driver.stream_synchronize(stream),
        "stream_query": lambda: driver.stream_query(stream),
        "stream_wait_event": lambda: driver.stream_wait_event(stream, event),
        "event_create": lambda: driver.event_create(timing=False),
        "event_destroy": lambda: driver.event_destroy(event),
        "event_record": lambda: driver.event_record(event, stream),
        "event_query": lambda: driver.event_query(event),
        "event_synchronize": lambda: driver.event_synchronize(event),
        "event_elapsed_time": lambda: driver.event_elapsed_time(event, event),
        "mem_alloc": lambda: driver.mem_alloc(64),
        "mem_free": lambda: driver.mem_free(ptr),
        "mem_free_async": lambda: driver.mem_free_async(ptr, stream),
        "mem_get_info": driver.mem_get_info,
        "mem_host_alloc": lambda: driver.mem_host_alloc(64),
        "mem_host_free": lambda: driver.mem_host_free(pinned),
        "memcpy_htod_async": lambda: driver.memcpy_htod_async(ptr, address, 64, stream),
        "memcpy_dtoh_async": lambda: driver.memcpy_dtoh_async(address, ptr, 64, stream),
        "memcpy_dtod_async": lambda: driver.memcpy_dtod_async(other, ptr, 64, stream),
        "memset_d8_async": lambda: driver.memset_d8_async(ptr, 0, 64, stream),
        "pointer_info": lambda: driver.pointer_info(ptr),
        "tensor_map_encode_tiled": lambda: driver.tensor_map_encode_tiled("FLOAT32", 0x1000, (8, 8), (32,), (8, 8)),
        "tensor_map_replace_address": lambda: driver.tensor_map_replace_address(tensor_map, 0x2000),
        "module_load": lambda: driver.module_load(AXPY.encode()),
        "module_unload": lambda: driver.module_unload(module),
        "module_get_function": lambda: driver.module_get_function(module, "axpy"),
        "func_attribute": lambda: driver.func_attribute(function, "NUM_REGS"),
        "func_set_max_dynamic_shared": lambda: driver.func_set_max_dynamic_shared(function, 1024),
        "func_param_info": lambda: driver.func_param_info(function),
        "launch_kernel": lambda: rig.launch(function, AXPY, ptr, other, 1, 0.0),
        "stream_begin_capture": lambda: driver.stream_begin_capture(spare, CaptureMode.THREAD_LOCAL),
        "stream_end_capture": lambda: driver.stream_end_capture(recording),
        "stream_capture_status": lambda: driver.stream_capture_status(stream),
        "stream_capture_dependencies": lambda: driver.stream_capture_dependencies(recording),
        "thread_exchange_capture_mode": lambda: driver.thread_exchange_capture_mode(CaptureMode.GLOBAL),
        "graph_node_types": lambda: driver.graph_node_types(graph),
        "graph_edges": lambda: driver.graph_edges(graph),
        # "arguments" is what keeps the memory behind "params" alive.
        "graph_kernel_node_set_params": lambda: arguments and driver.graph_kernel_node_set_params(kernel, *as_launched),
        "graph_memcpy_node_set_params": lambda: driver.graph_memcpy_node_set_params(copy, *as_copied),
        "graph_memset_node_set_params": lambda: driver.graph_memset_node_set_params(fill, *as_filled),
        "graph_exec_kernel_node_set_params": lambda: (
            arguments and driver.graph_exec_kernel_node_set_params(graph_exec, kernel, *as_launched)
        ),
        "graph_exec_memcpy_node_set_params": lambda: driver.graph_exec_memcpy_node_set_params(
            graph_exec, copy, *as_copied
        ),
        "graph_exec_memset_node_set_params": lambda: driver.graph_exec_memset_node_set_params(
            graph_exec, fill, *as_filled
        ),
        "graph_exec_update": lambda: driver.graph_exec_update(graph_exec, graph),
        "graph_instantiate": lambda: driver.graph_instantiate(graph),
        "graph_destroy": lambda: driver.graph_destroy(graph),
        "graph_exec_destroy": lambda: driver.graph_exec_destroy(graph_exec),
        "graph_upload": lambda: driver.graph_upload(graph_exec, stream),
        "graph_launch": lambda: driver.graph_launch(graph_exec, stream),
    }


def test_the_driver_has_every_call_of_the_protocol_with_its_parameters() -> None:
    """The same names in the same order, so that the two drivers can stand in for each other."""
    assert len(CALLS) >= 45
    for name in METHODS:
        expected = [*inspect.signature(getattr(Driver, name)).parameters]
        assert [*inspect.signature(getattr(HostDriver, name)).parameters] == expected, name


@pytest.mark.parametrize("name", CALLS)
def test_every_call_works_is_counted_and_can_be_made_to_fail(rig: Rig, name: str) -> None:
    """The failing call has done nothing; the same call then succeeds."""
    call = everything(rig)[name]
    before, counted = rig.driver.live(), rig.driver.calls[name]
    failure = rig.driver.fail_call(call=name, error="CUDA_ERROR_NOT_PERMITTED")
    with refused("CUDA_ERROR_NOT_PERMITTED", "(800): operation not permitted (injected)"):
        call()
    assert failure.fired
    assert rig.driver.live() == before
    assert rig.driver.calls[name] == counted + 1
    call()
    assert rig.driver.calls[name] == counted + 2


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(CALLS)))
def test_a_call_made_ready_is_the_call_itself(rig: Rig, name: str) -> None:
    """Making it ready is no driver call; every use of it is one, counted and failed as such."""
    driver, call = rig.driver, name.removeprefix("ready_")
    function = driver.module_get_function(driver.module_load(AXPY.encode()), "axpy")
    arguments, params = packed(AXPY, driver.mem_alloc(64), driver.mem_alloc(64), 1, 0.0)
    driver.stream_begin_capture(rig.stream, CaptureMode.THREAD_LOCAL)
    graph_exec = driver.graph_instantiate(driver.stream_end_capture(rig.stream))
    before = driver.calls_total
    ready = {
        "ready_launch_kernel": lambda: driver.ready_launch_kernel(
            function, (1, 1, 1), (32, 1, 1), 0, rig.stream, params
        ),
        "ready_graph_launch": lambda: driver.ready_graph_launch(graph_exec, rig.stream),
        "ready_tensor_map_replace_address": lambda: partial(
            driver.ready_tensor_map_replace_address(placed_map(HostDriver())), 0x3000
        ),
    }[name]()
    assert arguments
    assert driver.calls_total == before
    with driver.fail_call(call=call, error="CUDA_ERROR_NOT_PERMITTED"), refused("CUDA_ERROR_NOT_PERMITTED", "injected"):
        ready()
    ready()
    ready()
    assert driver.calls_total == before + 3
    assert driver.calls[call] == 3


def test_a_failure_can_be_set_for_the_nth_call_of_any_kind(rig: Rig) -> None:
    total = rig.driver.calls_total
    rig.driver.fail_call(3)
    rig.driver.mem_get_info()
    rig.driver.mem_alloc(4)
    with pytest.raises(OutOfMemoryError, match="cuStreamQuery"):
        rig.driver.stream_query(rig.stream)
    rig.driver.stream_query(rig.stream)
    assert rig.driver.calls_total == total + 4


def test_failures_of_several_calls_wait_side_by_side(rig: Rig) -> None:
    rig.driver.fail_call(2, call="mem_alloc")
    rig.driver.fail_call(1, call="event_create")
    rig.driver.mem_alloc(4)
    with refused("CUDA_ERROR_OUT_OF_MEMORY", "cuEventCreate"):
        rig.driver.event_create(timing=False)
    with refused("CUDA_ERROR_OUT_OF_MEMORY", "cuMemAlloc"):
        rig.driver.mem_alloc(4)


def test_a_failure_that_has_not_come_is_cancelled_by_its_block(rig: Rig) -> None:
    with rig.driver.fail_call(call="mem_alloc") as failure:
        pass
    rig.driver.mem_alloc(4)
    assert not failure.fired


def test_an_injected_fault_ends_the_context(rig: Rig) -> None:
    rig.driver.fail_call(error="CUDA_ERROR_ILLEGAL_ADDRESS", call="stream_synchronize")
    for _ in range(2):
        with pytest.raises(DeviceFaultError, match=r"cuStreamSynchronize.*injected"):
            rig.driver.stream_synchronize(rig.stream)
    with pytest.raises(DeviceFaultError, match=r"cuMemAlloc failed.*injected"):
        rig.driver.mem_alloc(4)


def test_an_injected_lack_of_a_device_is_typed(rig: Rig) -> None:
    rig.driver.fail_call(error="CUDA_ERROR_NO_DEVICE", call="device_count")
    with pytest.raises(NoDeviceError):
        rig.driver.device_count()


def test_a_failure_that_cannot_be_is_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="n = 0; the next call is 1"):
        rig.driver.fail_call(0)
    with pytest.raises(ValueError, match="unknown error 'OUT_OF_MEMORY'"):
        rig.driver.fail_call(error="OUT_OF_MEMORY")
    with pytest.raises(ValueError, match="'malloc' is no driver call"):
        rig.driver.fail_call(call="malloc")


def test_the_leak_report_counts_every_kind_until_it_is_given_back(rig: Rig) -> None:
    driver = rig.driver
    ptrs, pinned = [driver.mem_alloc(100), driver.mem_alloc(28)], driver.mem_host_alloc(64)
    event, module = driver.event_create(timing=False), driver.module_load(AXPY.encode())
    driver.stream_begin_capture(rig.stream, CaptureMode.THREAD_LOCAL)
    graph = driver.stream_end_capture(rig.stream)
    graph_exec = driver.graph_instantiate(graph)
    assert driver.live() == LiveObjects(
        allocations=2,
        device_bytes=128,
        pinned=1,
        pinned_bytes=64,
        streams=1,
        events=1,
        modules=1,
        graphs=1,
        graph_execs=1,
        contexts=1,
    )
    driver.graph_exec_destroy(graph_exec)
    driver.graph_destroy(graph)
    driver.module_unload(module)
    driver.event_destroy(event)
    driver.mem_host_free(pinned)
    driver.mem_free(ptrs[0])
    assert str(driver.live()) == "1 allocations, 28 device_bytes, 1 streams, 1 contexts"
    driver.mem_free(ptrs[1])
    driver.stream_destroy(rig.stream)
    driver.primary_ctx_release(0)
    assert not driver.live()
    assert str(driver.live()) == "nothing"


# Contexts and the device


@pytest.mark.parametrize(
    "name",
    [name for name in CALLS if name.split("_")[0] not in ("driver", "device", "primary", "ctx", "thread", "tensor")],
)
def test_a_thread_needs_a_current_context(rig: Rig, name: str) -> None:
    calls = everything(rig)

    def elsewhere() -> None:
        assert rig.driver.ctx_get_current() == 0
        with refused("CUDA_ERROR_INVALID_CONTEXT", "no context is current on other"):
            calls[name]()
        rig.driver.ctx_push_current(rig.context)
        calls[name]()
        assert rig.driver.ctx_pop_current() == rig.context

    in_thread(elsewhere)


def test_a_foreign_context_does_not_serve(rig: Rig) -> None:
    """Another library's context on top of the stack hides ours until it is popped."""
    foreign = rig.driver.foreign_context()
    rig.driver.ctx_push_current(foreign)
    assert rig.driver.ctx_get_current() == foreign
    with refused("CUDA_ERROR_INVALID_CONTEXT", f"context 0x{foreign:x} is current, and not the primary one"):
        rig.driver.mem_alloc(4)
    assert rig.driver.ctx_pop_current() == foreign
    rig.driver.mem_alloc(4)


def test_the_primary_context_lives_from_first_retain_to_last_release(rig: Rig) -> None:
    driver = rig.driver
    assert driver.primary_ctx_retain(0) == rig.context
    driver.primary_ctx_release(0)
    driver.mem_alloc(4)
    driver.primary_ctx_release(0)
    with refused("CUDA_ERROR_CONTEXT_IS_DESTROYED", f"0x{rig.context:x} was released for the last time"):
        driver.mem_alloc(4)
    with refused("CUDA_ERROR_INVALID_CONTEXT", "is not retained"):
        driver.primary_ctx_release(0)
    assert driver.primary_ctx_retain(0) != rig.context


def test_context_stack_misuse_is_refused(rig: Rig) -> None:
    rig.driver.ctx_pop_current()
    with refused("CUDA_ERROR_INVALID_CONTEXT", "no context is current on"):
        rig.driver.ctx_pop_current()
    with refused("CUDA_ERROR_INVALID_VALUE", "context 0 cannot be made current"):
        rig.driver.ctx_push_current(0)
    with refused("CUDA_ERROR_INVALID_CONTEXT", "0x77 is no live context"):
        rig.driver.ctx_push_current(0x77)


def test_there_is_one_device(rig: Rig) -> None:
    driver = rig.driver
    assert (driver.device_count(), driver.device_name(0), driver.driver_version()) == (1, "host", 13000)
    for call in (driver.device_name, driver.primary_ctx_retain, driver.primary_ctx_release):
        with refused("CUDA_ERROR_INVALID_DEVICE", "device 1; the host driver has device 0"):
            call(1)


def test_device_attributes_can_be_changed_and_withheld() -> None:
    driver = HostDriver(attributes={"COMPUTE_CAPABILITY_MAJOR": 7, "L2_CACHE_SIZE": None})
    assert driver.device_attribute(0, "COMPUTE_CAPABILITY_MAJOR") == 7
    assert driver.device_attribute(0, "MAX_GRID_DIM_X") == ATTRIBUTES["MAX_GRID_DIM_X"] == 2**31 - 1
    for name in ("L2_CACHE_SIZE", "SM_COUNT"):
        with refused("CUDA_ERROR_INVALID_VALUE", f"unknown device attribute '{name}'"):
            driver.device_attribute(0, name)
    with pytest.raises(ValueError, match=r"unknown device attributes \['SM_COUNT'\]"):
        HostDriver(attributes={"SM_COUNT": 1})


def test_a_changed_attribute_is_a_changed_launch_limit() -> None:
    rig = Rig({"bare": lambda launch: None}, attributes={"MAX_GRID_DIM_X": 8, "MAX_GRID_DIM_Y": None})
    bare = image("bare")
    function = rig.function(bare)
    rig.launch(function, bare, grid=(8, 65535, 1))
    with refused("CUDA_ERROR_INVALID_VALUE", "grid x = 9 is outside [1, 8]"):
        rig.launch(function, bare, grid=(9, 1, 1))


def test_two_drivers_know_nothing_of_each_other() -> None:
    ours, theirs = Rig(), Rig()
    ptr = theirs.driver.mem_alloc(4)
    assert ours.driver.pointer_info(ptr) is None
    with refused("CUDA_ERROR_INVALID_VALUE", "no device address"):
        ours.driver.memset_d8_async(ptr, 0, 4, ours.stream)


def test_calls_are_counted_across_threads(rig: Rig) -> None:
    def work() -> None:
        rig.driver.ctx_push_current(rig.context)
        for _ in range(500):
            rig.driver.mem_get_info()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rig.driver.calls["mem_get_info"] == 2000


def test_codes_and_names_are_those_of_cuda() -> None:
    """Checked against the bindings, which need no GPU for it."""
    driver = pytest.importorskip("cuda.bindings.driver")
    for name, status in STATUSES.items():
        assert int(getattr(driver.CUresult, name)) == status.code, name


def test_results_have_the_error_class_that_both_drivers_raise() -> None:
    assert error_class("CUDA_ERROR_OUT_OF_MEMORY") is OutOfMemoryError
    assert error_class("CUDA_ERROR_STUB_LIBRARY") is NoDeviceError
    assert error_class("CUDA_ERROR_INVALID_VALUE") is error_class("CUDA_ERROR_OF_THE_FUTURE") is DriverError
    assert is_fault("CUDA_ERROR_ECC_UNCORRECTABLE")
    assert not is_fault("CUDA_ERROR_OUT_OF_MEMORY")


def test_every_error_names_the_call_the_code_and_the_cause(rig: Rig) -> None:
    with pytest.raises(DriverError) as caught:
        rig.driver.mem_free(0x40)
    error = caught.value
    assert (error.call, error.code, error.name) == ("cuMemFree", 1, "CUDA_ERROR_INVALID_VALUE")
    assert str(error) == (
        "cuMemFree failed: CUDA_ERROR_INVALID_VALUE (1): invalid argument (0x40 is not a device address)"
    )
