"""Exchange with other libraries: DLPack and ``__cuda_array_interface__``, in and out, and the streams involved.

A host driver that calls itself "cuda" stands in for a GPU here: its addresses cannot be dereferenced, and
its streams run only what they are asked for, so a missing fence shows as stale data.
"""

from __future__ import annotations

import ctypes
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda import dlpack, interop
from nxrt_cuda.driver.host import HostDriver
from tests.small_kernels import ADD_ONE, HOST_ENTRIES, open_on


class PretendGpu(HostDriver):
    name = "cuda"


@pytest.fixture
def driver() -> Iterator[PretendGpu]:
    made = PretendGpu(HOST_ENTRIES)
    yield made
    assert not made.live(), str(made.live())


@pytest.fixture
def gpu(driver: PretendGpu) -> Iterator[nx.CudaRuntime]:
    """The runtime under test."""
    with open_on(driver) as runtime:
        yield runtime


@pytest.fixture
def torchlike(driver: PretendGpu) -> Iterator[nx.CudaRuntime]:
    """Another library on the same GPU, with a stream of its own."""
    with open_on(driver) as runtime:
        yield runtime


class Producer:
    """Another library's array: what it is asked for is kept."""

    def __init__(self, tensor: nx.TensorView, *, old: bool = False, device: tuple[int, int] = (2, 0)) -> None:
        self.tensor = tensor
        self.device = device
        self.requests: list[dict[str, Any]] = []
        self.old = old

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **request: Any) -> Any:
        self.requests.append(request)
        if self.old and "max_version" in request:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.tensor.__dlpack__(**request)


def cuda_array(tensor: nx.TensorView, **changes: Any) -> Any:
    """An object with the older protocol, on the memory of ``tensor``."""
    return SimpleNamespace(__cuda_array_interface__={**tensor.__cuda_array_interface__, **changes})


def consumed(capsule: Any) -> Callable[[], None]:
    """Take a capsule over as a consumer does; returns what the consumer calls when it is done."""
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    name = b"dltensor_versioned" if dlpack._capsule_is(capsule, b"dltensor_versioned") else b"dltensor"
    address = dlpack._capsule_pointer(capsule, name)
    kind = dlpack._ManagedVersioned if name == b"dltensor_versioned" else dlpack._Managed
    managed = ctypes.cast(address, ctypes.POINTER(kind)).contents
    rename(capsule, USED[name])
    return lambda: managed.deleter(address)


USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}
"""The names of consumed capsules; they live as long as the capsules may."""


# Import.


@pytest.mark.parametrize("how", ["dlpack", "interface"])
def test_device_memory_is_used_in_place_and_after_the_producer_s_work(
    gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime, how: str
) -> None:
    theirs = torchlike.zeros((4,), nx.float32)
    torchlike.launch(ADD_ONE.prepare(torchlike, 4, theirs, 4))
    before = gpu.stats()
    mine = gpu.from_array(theirs if how == "dlpack" else cuda_array(theirs))
    assert (mine.ptr, mine.shape, mine.dtype) == (theirs.ptr, (4,), nx.float32)
    assert type(mine) is nx.TensorMut
    assert gpu.stats() == before
    np.testing.assert_array_equal(mine.numpy(), np.ones(4))
    gpu.launch(ADD_ONE.prepare(gpu, 4, mine, 4))
    gpu.synchronize()
    np.testing.assert_array_equal(theirs.numpy(), np.full(4, 2))


def test_importing_does_not_block(gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime, driver: PretendGpu) -> None:
    theirs = torchlike.zeros((4,), nx.float32)
    for array in (theirs, cuda_array(theirs)):
        waits = driver.calls["event_synchronize"] + driver.calls["stream_synchronize"]
        gpu.from_array(array)
        assert driver.calls["event_synchronize"] + driver.calls["stream_synchronize"] == waits


def test_the_producer_is_told_the_stream_that_will_use_its_memory(
    gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime
) -> None:
    producer = Producer(torchlike.zeros((4,), nx.float32))
    gpu.from_array(producer)
    assert producer.requests == [{"stream": gpu.stream, "max_version": (1, 0)}]


def test_a_producer_from_before_dlpack_1_is_asked_again_in_its_own_words(
    gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime
) -> None:
    producer = Producer(torchlike.zeros((4,), nx.float32), old=True)
    gpu.from_array(producer)
    assert producer.requests[-1] == {"stream": gpu.stream}


def test_a_runtime_on_the_null_stream_calls_it_by_its_unambiguous_name(driver: PretendGpu) -> None:
    """Both protocols refuse 0."""
    with open_on(driver) as torchlike, open_on(driver, stream=0) as gpu:
        producer = Producer(torchlike.zeros((4,), nx.float32))
        gpu.from_array(producer)
        assert producer.requests[0]["stream"] == 1
        assert gpu.zeros((4,), nx.float32).__cuda_array_interface__["stream"] == 1


@pytest.mark.parametrize("stream", [None, 1, 2])
def test_an_interface_s_stream_is_waited_for(
    gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime, driver: PretendGpu, stream: int | None
) -> None:
    theirs = torchlike.zeros((4,), nx.float32)
    before = driver.calls["stream_wait_event"]
    gpu.from_array(cuda_array(theirs, stream=stream))
    assert driver.calls["stream_wait_event"] - before == (stream is not None)


@pytest.mark.parametrize("how", ["dlpack", "interface"])
def test_strides_are_taken_over(gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime, how: str) -> None:
    theirs = torchlike.from_array(np.arange(12, dtype=np.float32).reshape(3, 4)).narrow(1, 1, 2)
    mine = gpu.from_array(theirs if how == "dlpack" else cuda_array(theirs))
    assert (mine.shape, mine.strides) == ((3, 2), (4, 1))
    np.testing.assert_array_equal(mine.numpy(), [[1, 2], [5, 6], [9, 10]])


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
@pytest.mark.parametrize("how", ["dlpack", "interface"])
def test_scalars_and_empty_arrays_are_imported(
    gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime, shape: tuple[int, ...], how: str
) -> None:
    theirs = torchlike.zeros(shape, nx.float32)
    mine = gpu.from_array(theirs if how == "dlpack" else cuda_array(theirs))
    assert mine.shape == shape
    np.testing.assert_array_equal(mine.numpy(), np.zeros(shape))


def test_memory_that_does_not_align_its_elements_is_refused(gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime) -> None:
    """As a library may have it that lets bytes be looked at as anything."""
    theirs = torchlike.zeros((5,), nx.float32)
    begin = theirs.ptr + 2
    with pytest.raises(nx.TensorError, match=f"a Float32 tensor at 0x{begin:x} is misaligned"):
        gpu.from_array(cuda_array(theirs, data=(begin, False), shape=(4,)))


def test_bfloat16_goes_through_dlpack(gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime) -> None:
    theirs = torchlike.zeros((4,), nx.bfloat16)
    assert gpu.from_array(theirs).dtype is nx.bfloat16


def test_what_cannot_be_imported_is_refused(gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime) -> None:
    theirs = torchlike.zeros((4,), nx.float32)
    view = nx.TensorView(theirs.ptr, theirs.metadata, theirs.owner)
    arrays: list[tuple[Any, str]] = [
        (Producer(theirs, device=(2, 1)), "the Producer is on cuda:1, the runtime on cuda:0"),
        (view, "the TensorView is read-only; copy it first"),
        (cuda_array(view), "is read-only; copy it first"),
        (cuda_array(theirs, mask=theirs), "masked arrays have no counterpart here"),
        (cuda_array(theirs, strides=(6,)), "are no multiples of the 4-byte element"),
        (cuda_array(theirs, strides=(-4,)), "reach before the tensor"),
        (cuda_array(theirs, typestr="<c8"), "is not supported"),
        (cuda_array(theirs, typestr=">f4"), "is not supported"),
    ]
    for array, message in arrays:
        with pytest.raises(nx.TensorError, match=message):
            gpu.from_array(array)
    gc.collect()
    theirs.free()


def test_gpu_memory_is_refused_by_the_host_driver(rt: nx.CudaRuntime, torchlike: nx.CudaRuntime) -> None:
    theirs = torchlike.zeros((4,), nx.float32)
    for array in (theirs, cuda_array(theirs)):
        with pytest.raises(nx.TensorError, match="in GPU memory cannot be used by a runtime on host"):
            rt.from_array(array)


def test_importing_in_a_capture_is_refused_and_asks_the_producer_nothing(
    gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime
) -> None:
    producer = Producer(torchlike.zeros((4,), nx.float32))
    x = gpu.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(gpu, 4, x, 4)
    with gpu.capture():
        gpu.launch(launch)
        for array in (producer, cuda_array(x)):
            with pytest.raises(nx.CaptureError, match=r"^from_array is illegal while this thread captures"):
                gpu.from_array(array)
    assert producer.requests == []


class Owner(SimpleNamespace):
    """An array that can be watched."""


def test_a_foreign_owner_is_held_until_the_work_that_uses_its_memory_is_done(
    gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime
) -> None:
    theirs = torchlike.zeros((4,), nx.float32)
    array = Owner(__cuda_array_interface__=theirs.__cuda_array_interface__)
    alive = weakref.ref(array)
    mine = gpu.from_array(array)
    gpu.launch(ADD_ONE.prepare(gpu, 4, mine, 4))
    del mine, array
    gc.collect()
    gpu.alloc_raw(1)
    gc.collect()
    assert alive() is not None, "the kernel is still queued"
    gpu.synchronize()
    gpu.alloc_raw(1)
    gc.collect()
    assert alive() is None
    np.testing.assert_array_equal(theirs.numpy(), np.ones(4))


def test_a_foreign_owner_is_held_by_the_graph_that_recorded_it(gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime) -> None:
    theirs = torchlike.zeros((4,), nx.float32)
    array = Owner(__cuda_array_interface__=theirs.__cuda_array_interface__)
    alive = weakref.ref(array)
    mine = gpu.from_array(array)
    launch = ADD_ONE.prepare(gpu, 4, mine, 4)
    with gpu.capture(name="decoder") as graph:
        gpu.launch(launch)
    with pytest.raises(nx.DeviceMemoryError, match=r"the imported memory at 0x[0-9a-f]+ is referred to by decoder"):
        mine.free()
    del array, mine, launch
    gc.collect()
    gpu.trim_pool()
    assert alive() is not None
    graph.replay()
    graph.close()
    gc.collect()
    gpu.trim_pool()
    assert alive() is None


def test_a_foreign_owner_is_let_go_by_free_and_by_close(driver: PretendGpu, torchlike: nx.CudaRuntime) -> None:
    theirs = torchlike.zeros((4,), nx.float32)
    interface = theirs.__cuda_array_interface__
    with open_on(driver) as gpu:
        freed, kept = Owner(__cuda_array_interface__=interface), Owner(__cuda_array_interface__=interface)
        alive = [weakref.ref(freed), weakref.ref(kept)]
        imported = [gpu.from_array(freed), gpu.from_array(kept)]
        del freed, kept
        imported[0].free()
        imported[0].free()
        gpu.trim_pool()
        gc.collect()
        assert alive[0]() is None
        with pytest.raises(nx.DeviceMemoryError, match="was freed"):
            imported[0].numpy()
    assert alive[1]() is not None
    imported.clear()
    gc.collect()
    assert alive[1]() is None


def test_a_step_that_imports_and_exports_and_never_allocates_leaves_nothing_behind(
    gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime
) -> None:
    """The arrays of earlier steps are let go, and the ends of earlier exports are not noted for ever."""
    interface = torchlike.zeros((4,), nx.float32).__cuda_array_interface__
    fixed = gpu.zeros((4,), nx.float32)
    alive = []
    for _ in range(10):
        array = Owner(__cuda_array_interface__=interface)
        alive.append(weakref.ref(array))
        gpu.copy(fixed, gpu.from_array(array))
        del array
        consumed(fixed.__dlpack__(stream=torchlike.stream))()
        gpu.synchronize()
        gc.collect()
        assert len(gpu._session.dropped) <= 2
    assert sum(reference() is not None for reference in alive) <= 2


# Export to a GPU consumer.


class Ordering:
    """Which stream was made to wait for which."""

    def __init__(self, driver: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[tuple[int, int]] = []
        recorded: dict[int, int] = {}
        record, wait = driver.event_record, driver.stream_wait_event

        def spy_record(event: int, stream: int) -> None:
            record(event, stream)
            recorded[event] = stream

        def spy_wait(stream: int, event: int) -> None:
            wait(stream, event)
            self.waits.append((recorded[event], stream))

        monkeypatch.setattr(driver, "event_record", spy_record)
        monkeypatch.setattr(driver, "stream_wait_event", spy_wait)


@pytest.mark.parametrize("consumer", [None, 1, 2, "handle", "own", -1])
def test_the_consumer_s_stream_waits_for_the_compute_stream(
    gpu: nx.CudaRuntime,
    torchlike: nx.CudaRuntime,
    driver: PretendGpu,
    monkeypatch: pytest.MonkeyPatch,
    consumer: Any,
) -> None:
    """None and 1 are the legacy default stream, 2 the per-thread one, -1 asks for no order, our own needs none."""
    x = gpu.zeros((4,), nx.float32)
    stream = {"handle": torchlike.stream, "own": gpu.stream}.get(consumer, consumer)
    ordering = Ordering(driver, monkeypatch)
    blocked = driver.calls["event_synchronize"]
    capsule = x.__dlpack__(stream=stream)
    expected = {None: 1, 1: 1, 2: 2, torchlike.stream: torchlike.stream}
    assert ordering.waits == ([(gpu.stream, expected[stream])] if stream in expected else [])
    assert driver.calls["event_synchronize"] == blocked
    del capsule


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"stream": 0}, "stream=0 is ambiguous in DLPack"),
        ({"dl_device": (1, 0)}, r"the tensor is on DLPack device \(2, 0\); \(1, 0\) would need a copy"),
        ({"copy": True}, "copy=True is not offered"),
    ],
)
def test_a_request_that_cannot_be_met_is_a_buffer_error(
    gpu: nx.CudaRuntime, request_: dict[str, Any], message: str
) -> None:
    """The exception that the protocol asks for."""
    x = gpu.zeros((4,), nx.float32)
    with pytest.raises(BufferError, match=message):
        x.__dlpack__(**request_)
    x.free()


def test_requests_that_are_met_already_are_accepted(gpu: nx.CudaRuntime) -> None:
    x = gpu.zeros((4,), nx.float32)
    assert x.__dlpack_device__() == (2, 0)
    x.__dlpack__(stream=-1, dl_device=(2, 0), copy=False, max_version=(1, 1))


@pytest.mark.parametrize("consumer", [None, 1, 2, "handle"])
def test_in_a_capture_another_stream_cannot_be_ordered(
    gpu: nx.CudaRuntime, torchlike: nx.CudaRuntime, driver: PretendGpu, consumer: Any
) -> None:
    x = gpu.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(gpu, 4, x, 4)
    stream = torchlike.stream if consumer == "handle" else consumer
    with gpu.capture() as graph:
        gpu.launch(launch)
        before = driver.calls["event_record"] + driver.calls["stream_wait_event"]
        with pytest.raises(
            nx.CaptureError, match=r"__dlpack__ for stream .* export before the capture, or with stream=-1"
        ):
            x.__dlpack__(stream=stream)
        assert driver.calls["event_record"] + driver.calls["stream_wait_event"] == before
    assert graph.node_count == 1
    graph.close()
    x.free()


@pytest.mark.parametrize("consumer", [-1, "own"])
def test_in_a_capture_an_export_that_needs_no_order_is_given(
    gpu: nx.CudaRuntime, driver: PretendGpu, consumer: Any
) -> None:
    x = gpu.zeros((4,), nx.float32)
    launch = ADD_ONE.prepare(gpu, 4, x, 4)
    with gpu.capture() as graph:
        gpu.launch(launch)
        before = driver.calls["event_record"] + driver.calls["stream_wait_event"]
        capsule = x.__dlpack__(stream=gpu.stream if consumer == "own" else consumer)
        assert driver.calls["event_record"] + driver.calls["stream_wait_event"] == before
    assert dlpack.borrow(capsule).ptr == x.ptr
    assert graph.node_count == 1


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_exported_memory_cannot_be_freed_until_the_consumer_is_done(
    gpu: nx.CudaRuntime, version: tuple[int, int] | None
) -> None:
    x = gpu.zeros((4,), nx.float32)
    owner = weakref.ref(x.owner)
    done = consumed(x.__dlpack__(max_version=version))
    gc.collect()
    with pytest.raises(nx.DeviceMemoryError, match="is referred to by a DLPack export; let go of that"):
        x.free()
    del x
    gc.collect()
    assert owner() is not None
    done()
    gc.collect()
    assert owner() is None


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_that_nobody_consumes_lets_go(gpu: nx.CudaRuntime, version: tuple[int, int] | None) -> None:
    x = gpu.zeros((4,), nx.float32)
    capsule = x.__dlpack__(max_version=version)
    assert x.owner.pins == ["a DLPack export"]
    del capsule
    assert x.owner.pins == []
    x.free()


def test_a_consumer_that_refuses_is_heard_and_lets_go(gpu: nx.CudaRuntime) -> None:
    """It drops the capsule while its error is being raised; NumPy does, for it reads host memory only."""
    x = gpu.zeros((4,), nx.float32)

    class OfNoKnownDevice:
        def __dlpack__(self, **request: Any) -> Any:
            return x.__dlpack__(max_version=(1, 0))

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    with pytest.raises((RuntimeError, BufferError), match="Unsupported device"):
        np.from_dlpack(OfNoKnownDevice())
    assert x.owner.pins == []
    x.free()


@pytest.mark.parametrize(
    ("consumer", "ordered"), [(None, 1), ("handle", "handle"), (-1, None), (2, None), ("own", None)]
)
def test_memory_is_reused_only_after_the_consumer_s_stream(
    gpu: nx.CudaRuntime,
    torchlike: nx.CudaRuntime,
    driver: PretendGpu,
    monkeypatch: pytest.MonkeyPatch,
    consumer: Any,
    ordered: Any,
) -> None:
    """Whoever gets the memory next waits for what the consumer queued on the stream that it named."""
    streams = {"handle": torchlike.stream, "own": gpu.stream}
    x = gpu.zeros((4,), nx.float32)
    address = x.ptr
    done = consumed(x.__dlpack__(stream=streams.get(consumer, consumer)))
    ordering = Ordering(driver, monkeypatch)
    del x
    calls = driver.calls_total
    done()
    gc.collect()
    assert driver.calls_total == calls, "a finaliser may run in a capture, and calls no driver"
    assert gpu.empty((4,), nx.float32).ptr == address
    assert ordering.waits == ([] if ordered is None else [(streams.get(ordered, ordered), gpu.stream)])


def test_a_consumer_s_stream_that_is_gone_holds_nothing_up(
    gpu: nx.CudaRuntime, driver: PretendGpu, caplog: pytest.LogCaptureFixture
) -> None:
    with open_on(driver) as torchlike:
        x = gpu.zeros((4,), nx.float32)
        done = consumed(x.__dlpack__(stream=torchlike.stream))
    address = x.ptr
    del x
    done()
    gc.collect()
    assert gpu.empty((4,), nx.float32).ptr == address
    assert "exported to with DLPack is gone" in caplog.text


def test_a_tensor_of_the_same_runtime_is_not_shared_by_from_array(gpu: nx.CudaRuntime) -> None:
    x = gpu.zeros((4,), nx.float32)
    with pytest.raises(nx.TensorError, match="which is a tensor already; copy it with copy"):
        gpu.from_array(x)
    assert x.owner.pins == []


def test_a_capsule_carries_version_flags_shape_and_strides(gpu: nx.CudaRuntime) -> None:
    x = gpu.from_array(np.arange(12, dtype=np.float16).reshape(3, 4))
    part = x.narrow(1, 1, 2)
    view = nx.TensorView(part.ptr, part.metadata, part.owner)
    for tensor, read_only in ((part, False), (view, True)):
        borrowed = dlpack.borrow(tensor.__dlpack__(max_version=(1, 0)))
        assert (borrowed.ptr, borrowed.device, borrowed.read_only) == (part.ptr, (2, 0), read_only)
        assert borrowed.metadata == part.metadata
    assert dlpack._capsule_is(part.__dlpack__(), b"dltensor")
    assert dlpack._capsule_is(part.__dlpack__(max_version=(0, 8)), b"dltensor")
    assert dlpack._capsule_is(part.__dlpack__(max_version=(1, 0)), b"dltensor_versioned")


def test_a_read_only_view_needs_a_consumer_that_can_be_told(gpu: nx.CudaRuntime) -> None:
    x = gpu.zeros((4,), nx.float32)
    view = nx.TensorView(x.ptr, x.metadata, x.owner)
    with pytest.raises(BufferError, match=r"a read-only tensor needs a consumer of DLPack 1.0"):
        view.__dlpack__()
    assert x.owner.pins == []


def test_the_cuda_array_interface_is_version_3(gpu: nx.CudaRuntime) -> None:
    x = gpu.from_array(np.arange(12, dtype=np.float32).reshape(3, 4))
    assert x.__cuda_array_interface__ == {
        "shape": (3, 4), "typestr": "<f4", "data": (x.ptr, False), "strides": None, "stream": gpu.stream, "version": 3,
    }  # fmt: skip
    part = x.narrow(1, 1, 2)
    assert part.__cuda_array_interface__["strides"] == (16, 4)
    assert nx.TensorView(x.ptr, x.metadata, x.owner).__cuda_array_interface__["data"] == (x.ptr, True)


def test_bfloat16_has_no_array_interface(gpu: nx.CudaRuntime) -> None:
    x = gpu.zeros((4,), nx.bfloat16)
    assert not hasattr(x, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="no bfloat16; use DLPack"):
        _ = x.__cuda_array_interface__


# Export of the host driver's tensors: copies in host memory.


NUMPY_TYPES = [
    nx.float32,
    nx.float16,
    nx.float64,
    nx.int64,
    nx.int32,
    nx.int8,
    nx.uint64,
    nx.uint32,
    nx.uint8,
    nx.bool_,
]


@pytest.mark.parametrize("dtype", NUMPY_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)])
def test_numpy_reads_host_tensors(rt: nx.CudaRuntime, dtype: nx.DataType, shape: tuple[int, ...]) -> None:
    source = (np.arange(int(np.prod(shape))) % 2).astype(dtype.numpy).reshape(shape)
    tensor = rt.from_array(source)
    array = np.from_dlpack(tensor)
    assert (array.dtype, array.shape) == (source.dtype, source.shape)
    np.testing.assert_array_equal(array, source)


def test_the_host_export_is_a_copy_that_outlives_its_tensor(rt: nx.CudaRuntime) -> None:
    tensor = rt.from_array(np.arange(1000, dtype=np.float32))
    array = np.from_dlpack(tensor)
    array[:] = -1
    np.testing.assert_array_equal(tensor.numpy(), np.arange(1000))
    again = np.from_dlpack(tensor)
    tensor.free()
    del tensor
    gc.collect()
    np.testing.assert_array_equal(again, np.arange(1000))


def test_what_the_host_export_copied_goes_with_its_consumer(
    rt: nx.CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    monkeypatch.setattr(rt, "read", lambda view: copies.append(weakref.ref(copy := np.zeros(4, np.float32))) or copy)
    array = np.from_dlpack(rt.zeros((4,), nx.float32))
    assert copies[0]() is not None
    del array
    assert copies[0]() is None


def test_the_host_export_has_the_work_queued_before_it(rt: nx.CudaRuntime) -> None:
    x = rt.zeros((4,), nx.float32)
    rt.launch(ADD_ONE.prepare(rt, 4, x, 4))
    np.testing.assert_array_equal(np.from_dlpack(x), np.ones(4))


def test_strided_host_tensors_are_exported_as_contiguous_copies(rt: nx.CudaRuntime) -> None:
    part = rt.from_array(np.arange(12, dtype=np.float32).reshape(3, 4)).narrow(1, 1, 2)
    np.testing.assert_array_equal(np.from_dlpack(part), [[1, 2], [5, 6], [9, 10]])


def test_bfloat16_host_tensors_carry_their_type(rt: nx.CudaRuntime) -> None:
    """NumPy's reader has no bfloat16, and says so; PyTorch's has."""
    source = np.arange(4).astype(nx.bfloat16.numpy)
    with pytest.raises((RuntimeError, BufferError), match="Unsupported dtype"):
        np.from_dlpack(rt.from_array(source))
    borrowed = dlpack.borrow(rt.from_array(source).__dlpack__(max_version=(1, 0)))
    assert (borrowed.device, borrowed.metadata.dtype, borrowed.metadata.shape) == ((1, 0), nx.bfloat16, (4,))
    raw = np.frombuffer(ctypes.string_at(borrowed.ptr, 8), nx.bfloat16.numpy)
    np.testing.assert_array_equal(raw, source)


class UnknownToNumpy(Producer):
    """As PyTorch's bfloat16."""

    def __array__(self, *request: Any, **options: Any) -> Any:
        raise TypeError("Got unsupported ScalarType BFloat16")


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)])
@pytest.mark.parametrize("dtype", [nx.bfloat16, nx.bool_, nx.int64], ids=str)
def test_host_memory_of_a_type_unknown_to_numpy_comes_in_through_dlpack(
    rt: nx.CudaRuntime, dtype: nx.DataType, shape: tuple[int, ...]
) -> None:
    source = (np.arange(math.prod(shape)) % 2).astype(dtype.numpy).reshape(shape)
    theirs = UnknownToNumpy(rt.from_array(source), device=(1, 0))
    mine = rt.from_array(theirs)
    again = rt.zeros(shape, dtype)
    again.copy_from(theirs)
    for tensor in (mine, again):
        assert tensor.dtype == dtype
        np.testing.assert_array_equal(tensor.numpy(), source)


def test_a_view_in_host_memory_is_read_by_its_strides() -> None:
    source = np.arange(12, dtype=np.int32).reshape(3, 4)[1:, ::2]
    np.testing.assert_array_equal(dlpack.read_host(source.__dlpack__()), source)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"stream": 1}, "host memory has no streams; stream must be None, got 1"),
        ({"dl_device": (2, 0)}, r"exports host memory, not DLPack device \(2, 0\)"),
        ({"copy": False}, "exports copies only; copy=False cannot be met"),
    ],
)
def test_a_host_request_that_cannot_be_met_is_a_buffer_error(
    rt: nx.CudaRuntime, request_: dict[str, Any], message: str
) -> None:
    with pytest.raises(BufferError, match=message):
        rt.zeros((4,), nx.float32).__dlpack__(**request_)


def test_host_tensors_have_no_cuda_array_interface(rt: nx.CudaRuntime) -> None:
    assert not hasattr(rt.zeros((4,), nx.float32), "__cuda_array_interface__")


# Reading capsules.


@pytest.mark.parametrize("version", [None, (1, 0)])
@pytest.mark.parametrize(
    "array", [np.arange(12, dtype=np.int32).reshape(3, 4)[1:, ::2], np.array(5.0), np.zeros((0, 3), np.uint8)],
    ids=["strided", "scalar", "empty"],
)  # fmt: skip
def test_numpy_s_capsules_are_read(array: np.ndarray, version: tuple[int, int] | None) -> None:
    borrowed = dlpack.borrow(array.__dlpack__(max_version=version))
    assert borrowed.device == (1, 0)
    assert borrowed.metadata.shape == array.shape
    assert borrowed.metadata.dtype.numpy == array.dtype
    if array.size:
        assert borrowed.ptr == array.ctypes.data
        assert borrowed.metadata.strides == tuple(stride // array.itemsize for stride in array.strides)


def test_a_read_only_array_says_so() -> None:
    array = np.arange(4)
    array.flags.writeable = False
    assert dlpack.borrow(array.__dlpack__(max_version=(1, 0))).read_only


def test_what_is_no_capsule_or_has_an_unknown_type_is_refused(gpu: nx.CudaRuntime) -> None:
    with pytest.raises(nx.TensorError, match="did not return an unused DLPack capsule"):
        dlpack.borrow("capsule")
    capsule = gpu.zeros((4,), nx.float32).__dlpack__()
    done = consumed(capsule)
    with pytest.raises(nx.TensorError, match="did not return an unused DLPack capsule"):
        dlpack.borrow(capsule)
    done()
    with pytest.raises(nx.TensorError, match="DLPack type code 5 of 64 bits x 1 has no counterpart here"):
        dlpack.borrow(np.zeros(2, np.complex64).__dlpack__())


def test_a_capsule_of_a_later_major_version_is_refused(gpu: nx.CudaRuntime) -> None:
    capsule = gpu.zeros((4,), nx.float32).__dlpack__(max_version=(1, 0))
    address = dlpack._capsule_pointer(capsule, b"dltensor_versioned")
    ctypes.cast(address, ctypes.POINTER(dlpack._ManagedVersioned)).contents.major = 2
    with pytest.raises(nx.TensorError, match=r"DLPack 2\.0 is not read here"):
        dlpack.borrow(capsule)


# Streams of other libraries.


class CudaStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 77


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, None),
        (0, 0),
        (77, 77),
        (CudaStream(), 77),
        (SimpleNamespace(cuda_stream=77), 77),
        (SimpleNamespace(ptr=77, wait_event=None), 77),
    ],
)
def test_streams_come_in_several_forms(stream: Any, handle: int | None) -> None:
    assert interop.stream_handle(stream) == handle


@pytest.mark.parametrize("stream", ["77", 7.0, object(), SimpleNamespace(ptr=77)])
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    with pytest.raises(TypeError, match=r"stream must be a handle \(an int\), or an object with __cuda_stream__, "):
        interop.stream_handle(stream)


def test_the_address_of_a_tensor_is_no_stream(rt: nx.CudaRuntime) -> None:
    """Both have a ``ptr``, tensors and CuPy's streams, and so does memory itself."""
    x = rt.zeros((4,), nx.float32)
    for memory in (x, x.owner):
        with pytest.raises(nx.StreamTypeError, match=r"stream must be a handle .*; got "):
            rt.wait_for_stream(memory)
