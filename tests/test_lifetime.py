"""Who keeps whom alive, and half-built objects."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda.driver.host import HostDriver
from nxrt_cuda.memory import Allocation, ForeignMemory
from nxrt_cuda.stats import WorkspaceLedger
from nxrt_cuda.timing import TimingEvent
from nxrt_cuda.transfer import PendingRead
from nxrt_cuda.workspace import Workspace, WorkspaceSlot
from tests.small_kernels import ADD_ONE, HOST_ENTRIES, SLOW, open_on


def opened() -> nx.CudaRuntime:
    return nx.open_runtime("host", host_entries=HOST_ENTRIES)


def test_a_tensor_keeps_its_runtime() -> None:
    x = opened().from_array(np.arange(4, dtype=np.float32))
    gc.collect()
    np.testing.assert_array_equal(x.numpy(), np.arange(4))
    x.runtime.close()


def test_a_pending_read_keeps_what_it_needs() -> None:
    runtime = opened()
    alive = weakref.ref(runtime)
    pending = runtime.read_async(runtime.from_array(np.arange(4, dtype=np.float32)))
    del runtime
    gc.collect()
    np.testing.assert_array_equal(pending.numpy(), np.arange(4))
    if (runtime := alive()) is not None:
        runtime.close()


def test_a_graph_keeps_what_its_replays_need() -> None:
    runtime = opened()
    x = runtime.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(runtime, 4, x, 4)
    with runtime.capture() as graph:
        runtime.launch(launch)
    runtime_of, address = x.runtime, x.ptr
    del runtime, x, launch
    gc.collect()
    graph.replay()
    values = np.empty(4, np.float32)
    runtime_of.dtoh(values, address)
    np.testing.assert_array_equal(values, np.ones(4))
    runtime_of.close()


def test_a_prepared_launch_keeps_its_function_and_operands() -> None:
    runtime = opened()
    launch = ADD_ONE.prepare(runtime, 4, runtime.zeros((4,), nx.float32), 4)
    gc.collect()
    runtime.launch(launch)
    np.testing.assert_array_equal(launch.operands[0].numpy(), np.ones(4))
    runtime.close()


def test_ever_new_kernels_do_not_fill_the_device_though_nothing_is_allocated(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rt._modules, "_kept", deque(maxlen=2))
    for number in range(10):
        rt.nvrtc_function("m", ADD_ONE.source, ADD_ONE.entry, ADD_ONE.params, macros={"NUMBER": number})
        rt.synchronize()
    assert rt._driver.live().modules <= 4


def test_a_module_is_unloaded_once_the_work_of_its_kernel_is_done(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while a launch of it is queued, nor while a graph would launch it."""
    monkeypatch.setattr(rt._modules, "_kept", deque(maxlen=0))

    def modules() -> int:
        return rt._driver.live().modules

    x = rt.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(rt, 4, x, 4)
    with rt.capture() as graph:
        rt.launch(launch)
    slow = SLOW.prepare(rt, 1, 50)
    rt.launch(slow)
    rt.launch(launch)
    del slow, launch
    rt.alloc_raw(1)
    assert modules() == 2
    rt.synchronize()
    for _ in range(2):
        rt.alloc_raw(1)
    assert modules() == 1
    graph.replay()
    assert x.numpy().tolist() == [2] * 4
    graph.close()
    del graph
    for _ in range(3):
        rt.synchronize()
        rt.alloc_raw(1)
    assert modules() == 0


def test_dropping_the_last_reference_to_a_closed_runtime_frees_it() -> None:
    """Nothing of the package holds on to it: not the streams, the context table, nor the exit handler."""
    driver = HostDriver(HOST_ENTRIES)
    runtime = open_on(driver)
    x = runtime.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(runtime, 4, x, 4)
    with runtime.capture() as graph:
        runtime.launch(launch)
    runtime.close()
    alive = [weakref.ref(runtime), weakref.ref(driver), weakref.ref(runtime._session)]
    del runtime, driver, x, launch, graph
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


def test_a_runtime_that_could_not_be_opened_leaves_nothing() -> None:
    driver = HostDriver(total_memory=100)
    with pytest.raises(nx.OutOfMemoryError):
        open_on(driver)
    assert not driver.live()
    alive = weakref.ref(driver)
    del driver
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "kind",
    [Allocation, ForeignMemory, PendingRead, nx.CapturedGraph, WorkspaceSlot, TimingEvent],
    ids=lambda k: k.__name__,
)
def test_the_finaliser_of_a_half_built_object_is_silent(kind: type[Any]) -> None:
    """A constructor that raised has run none of the rest, and __del__ runs all the same."""
    half = object.__new__(kind)
    half.__del__()
    del half


def test_objects_that_outlive_their_runtime_are_finalised_silently(recwarn: pytest.WarningsRecorder) -> None:
    driver = HostDriver(HOST_ENTRIES)
    runtime = open_on(driver)
    x = runtime.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(runtime, 4, x, 4)
    with runtime.capture() as graph:
        runtime.launch(launch)
    held: list[Any] = [x, graph, runtime.read_async(x), runtime.record_event(), runtime.alloc_graph_stable(4)]
    held.append(Workspace(runtime, "Op", WorkspaceLedger()).candidate(4))
    runtime.close()
    calls = driver.calls_total
    del x, launch, graph
    held.clear()
    gc.collect()
    assert driver.calls_total == calls
    assert not driver.live()
    assert not recwarn.list


def test_freeing_after_the_runtime_was_closed_does_nothing() -> None:
    runtime = opened()
    x = runtime.zeros((4,), nx.float32)
    stable = runtime.alloc_graph_stable(4)
    with pytest.warns(RuntimeWarning, match="recorded nothing"), runtime.capture() as graph:
        pass
    runtime.close()
    x.free()
    stable.free()
    graph.close()
    assert x.owner.is_freed


def test_a_tensor_in_a_cycle_is_released_by_the_collector(rt: nx.CudaRuntime) -> None:
    cycle: list[Any] = [rt.zeros((1000,), nx.float32)]
    cycle.append(cycle)
    address = cycle[0].ptr
    del cycle
    gc.collect()
    assert rt.zeros((1000,), nx.float32).ptr == address


@pytest.mark.filterwarnings("ignore:unclosed CudaRuntime:ResourceWarning")
def test_a_runtime_that_is_dropped_unclosed_may_be_collected_while_another_opens() -> None:
    """The collector closes it in the middle of the opening, on the same thread."""
    dropped = [opened()]
    old, new = dropped[0]._driver, HostDriver(HOST_ENTRIES)
    ask = new.device_attribute

    def collect_and_ask(device: int, attribute: str) -> int:
        dropped.clear()
        gc.collect()
        return ask(device, attribute)

    new.device_attribute = collect_and_ask  # type: ignore[method-assign]
    opening = threading.Thread(target=lambda: open_on(new).close(), daemon=True)
    opening.start()
    opening.join(timeout=20)
    assert not opening.is_alive(), "it waits for a lock that it holds itself"
    assert not old.live()
    assert not new.live()


def test_a_runtime_that_is_dropped_unclosed_says_so_and_gives_everything_back() -> None:
    dropped = [nx.open_runtime("host")]
    driver = dropped[0]._driver
    dropped[0].zeros((4,), nx.float32)
    dropped.clear()
    with pytest.warns(ResourceWarning, match="unclosed CudaRuntime"):
        gc.collect()
    assert not driver.live(), driver.live()


def test_a_runtime_that_closed_half_way_launches_nothing_that_is_unloaded() -> None:
    """Also what was launched often before, and is ready to be launched again."""
    driver = HostDriver(HOST_ENTRIES)
    runtime = open_on(driver)
    x = runtime.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(runtime, 4, x, 4)
    runtime.launch(launch, [x])
    runtime.launch(launch, [x])
    with driver.fail_call(call="stream_destroy"), pytest.raises(nx.DriverError, match="injected"):
        runtime.close()
    handles: list[int] = []
    reach_driver = driver.launch_kernel
    driver.launch_kernel = lambda function, *rest: (handles.append(function), reach_driver(function, *rest))  # type: ignore[method-assign]
    with pytest.raises(nx.DriverError, match="CUDA_ERROR_INVALID_HANDLE"):
        runtime.launch(launch, [x])
    assert set(handles) == {0}
    runtime.close()


# Copies.


def attention_engine(rt: nx.CudaRuntime) -> nx.Engine:
    inputs = dict.fromkeys("qkv", (nx.float32, ("B", 1, 2, 8)))
    return nx.Engine(rt, [(nx.Node("Attention"), ["q", "k", "v"], ["y"])], inputs, ["y"], name="decoder")


def filling_graph(rt: nx.CudaRuntime) -> nx.CapturedGraph:
    x = rt.empty((3,), nx.float32)
    with rt.capture(name="step") as graph:
        rt.fill_zero(x)
    return graph


HANDLES: dict[str, tuple[Callable[[nx.CudaRuntime], object], str, str]] = {
    "runtime": (lambda rt: rt, r"CudaRuntime\('host', 'host'\)", r"open_runtime\(\)"),
    "tensor": (lambda rt: rt.empty((3,), nx.int64), r"TensorMut\(Int64, shape=\(3,\)", r"numpy\(\) gives the values"),
    "graph": (filling_graph, r"CapturedGraph\('step', 1 segment", "capture another"),
    "kernel": (
        lambda rt: nx.create_kernel(rt, nx.Node("Attention")),
        r"AttentionKernel\('host', 0 execution\(s\)\)",
        r"create_kernel\(\) makes a kernel of it",
    ),
    "engine": (attention_engine, r"Engine\('decoder', 1 node\(s\), 0 bucket\(s\)\)", "make another"),
}


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("kind", HANDLES)
def test_what_belongs_to_the_process_is_neither_pickled_nor_copied(
    rt: nx.CudaRuntime, kind: str, duplicate: Callable[[object], object]
) -> None:
    """A second owner would give back what the first still uses."""
    make, name, instead = HANDLES[kind]
    with pytest.raises(TypeError, match=rf"{name}.* cannot be pickled or copied, .*{instead}"):
        duplicate(make(rt))
    assert not rt.is_closed


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda node: pickle.loads(pickle.dumps(node))])
def test_a_node_can_be_sent_to_a_worker(duplicate: Callable[[nx.Node], nx.Node]) -> None:
    node = nx.Node("DsaIndexSelect", domain="pkg.nxrt", attributes={"top_k": 3, "scale": 0.5}, name="select")
    assert duplicate(node) == node
