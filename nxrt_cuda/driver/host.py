"""The host driver: the calls of :class:`~nxrt_cuda.driver.base.Driver`, in this process, without a GPU.

It makes a program that is wrong on a GPU fail here, at the same call or an earlier one, and every time:

- **Memory** (``host_memory.py``). Addresses are made up, never reused, and known for ever. Fresh memory holds
  0xFF (NaN). A copy that is out of bounds is refused when it is queued; a kernel that is, ends the context.
  The bounds are those of the driver's allocations, which the runtime rounds up to the size classes of its pool: an
  access just past a tensor may still lie in its block, here as on a GPU.
  Work whose memory was freed between queueing and running ends it too: ``mem_free`` waits for nothing, where
  a GPU's waits for the whole device.
- **Streams are lazy** (``host_stream.py``). Work runs when the host waits for it. A missing fence shows as
  stale data; a host source recycled before the copy ran shows as the new bytes. A query waits for
  nothing, but lets its stream take one step, so that a polling loop ends.
- **Capture** (``host_graph.py``). What CUDA calls "potentially unsafe" during a capture is refused and invalidates
  it, under the rules of the three capture modes.
- **A fault is final.** After one, every call that needs the context fails with it, releases included.

What a call answers in a capture of each mode, on its thread and on others, and whether the capture survives it,
was compared call by call with CUDA's driver 13.0 on an H200; so were the answers to misused events, contexts,
images and sizes. Stricter than a GPU, on purpose:

- addresses and sizes are checked when work is queued or recorded; a GPU may accept them there and fault later;
- a replay is refused once memory or code that its graph refers to is gone;
- the two sides of a device copy must not overlap;
- a node's new parameters are checked at once, and are of the function that it was recorded with;
- loading or unloading a module, and releasing the context, count as unsafe.

Any call can be told to fail (:meth:`HostDriver.fail_call`), and :meth:`HostDriver.live` says what was not given
back. Handles and addresses of one driver mean nothing to another.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Generic, TypeVar

from nxrt_cuda.driver.base import CaptureMode, CaptureStatus, Dim3, ParamInfo, PointerInfo, ReadyCall
from nxrt_cuda.driver.host_call import HostCalls, InjectedFailure, driver_call
from nxrt_cuda.driver.host_device import HostDevice
from nxrt_cuda.driver.host_failure import Failure
from nxrt_cuda.driver.host_graph import CapturedMark, Graph, GraphExec, GraphNode, GraphRun
from nxrt_cuda.driver.host_image import HostEntry, HostImage, HostLaunch, read_arguments
from nxrt_cuda.driver.host_memory import DeviceMemory, PinnedMemory
from nxrt_cuda.driver.host_stream import Event, Mark, Stream, Wait
from nxrt_cuda.driver.host_tensor_map import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES, HostTensorMap
from nxrt_cuda.driver.host_work import Copy, Fill, Function, KernelCall, Module, Operation
from nxrt_cuda.errors import DriverError

__all__ = ["HostDriver", "HostEntry", "HostImage", "HostLaunch", "InjectedFailure", "LiveObjects"]

_DRIVER_VERSION = 13000
_LEGACY_STREAMS = (0, 1)
_PER_THREAD_STREAM = 2

T = TypeVar("T")


@dataclass(frozen=True)
class LiveObjects:
    """What was created and not yet given back; falsy where that is nothing.

    ``contexts`` counts retains of the primary context.
    """

    allocations: int = 0
    device_bytes: int = 0
    pinned: int = 0
    pinned_bytes: int = 0
    streams: int = 0
    events: int = 0
    modules: int = 0
    graphs: int = 0
    graph_execs: int = 0
    contexts: int = 0

    def __bool__(self) -> bool:
        return self != LiveObjects()

    def __str__(self) -> str:
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{value} {name}" for name, value in counts.items() if value) or "nothing"


class _Table(dict[int, T], Generic[T]):
    """The live objects of one kind, by handle."""

    def __init__(self, kind: str, handles: Iterator[int]) -> None:
        self._kind = kind
        self._handles = handles

    def add(self, item: T) -> int:
        handle = next(self._handles)
        self[handle] = item
        return handle

    def __missing__(self, handle: int) -> T:
        raise Failure("CUDA_ERROR_INVALID_HANDLE", f"0x{handle:x} is no live {self._kind}")

    def remove(self, handle: int) -> T:
        item = self[handle]
        del self[handle]
        return item


def _ready(call: Callable[[], None]) -> ReadyCall:
    """``call``, which raises what goes wrong."""

    def made() -> tuple[None]:
        call()
        return (None,)

    return ReadyCall(made, _no_status)


def _no_status(status: object) -> DriverError:
    raise AssertionError(f"calls of the host driver raise; none has returned {status!r}")


class _ThreadStream(threading.local):
    def __init__(self) -> None:
        self.stream = Stream(_PER_THREAD_STREAM)


class HostDriver(HostCalls):
    """A CUDA driver without a device. Thread safe; kernel entries run one at a time, on a thread that waits for them.

    Args:
        entries: the kernels, by entry name.
        total_memory: bytes of device memory; past it an allocation fails.
        attributes: device attributes that differ from ``host_device.ATTRIBUTES``, to test what depends on
            them; None is one that the driver does not tell.
    """

    name = "host"

    def __init__(
        self,
        entries: Mapping[str, HostEntry] = MappingProxyType({}),
        *,
        total_memory: int = 8 << 30,
        attributes: Mapping[str, int | None] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self._entries = dict(entries)
        self._device = HostDevice(attributes)
        self._memory = DeviceMemory(total_memory)
        self._pinned = PinnedMemory()
        self._legacy_stream = Stream(_LEGACY_STREAMS[0])
        self._per_thread = _ThreadStream()
        self._streams = _Table[Stream]("stream", self._handles)
        self._events = _Table[Event]("event", self._handles)
        self._modules = _Table[Module]("module", self._handles)
        self._functions = _Table[Function]("function", self._handles)
        self._graphs = _Table[Graph]("graph", self._handles)
        self._graph_execs = _Table[GraphExec]("executable graph", self._handles)

    def live(self) -> LiveObjects:
        """What was not given back. A GPU reclaims it with the context; here it stays visible."""
        with self._lock:
            pinned, pinned_bytes = self._pinned.live
            return LiveObjects(
                allocations=self._memory.live,
                device_bytes=self._memory.live_bytes,
                pinned=pinned,
                pinned_bytes=pinned_bytes,
                streams=len(self._streams),
                events=len(self._events),
                modules=len(self._modules),
                graphs=len(self._graphs),
                graph_execs=len(self._graph_execs),
                contexts=self._contexts.retained,
            )

    def foreign_context(self) -> int:
        """A context as another library may have made current: a live one, and not the primary."""
        with self._lock:
            return self._contexts.add_foreign()

    # Device and context

    @driver_call("cuDriverGetVersion", context=False)
    def driver_version(self) -> int:
        return _DRIVER_VERSION

    @driver_call("cuDeviceGetCount", context=False)
    def device_count(self) -> int:
        return 1

    @driver_call("cuDeviceGetName", context=False)
    def device_name(self, device: int) -> str:
        self._require_device(device)
        return "host"

    @driver_call("cuDeviceGetAttribute", context=False)
    def device_attribute(self, device: int, attribute: str) -> int:
        self._require_device(device)
        return self._device.attribute(attribute)

    @driver_call("cuDevicePrimaryCtxRetain", context=False)
    def primary_ctx_retain(self, device: int) -> int:
        self._require_device(device)
        self._executor.check()
        return self._contexts.retain()

    @driver_call("cuDevicePrimaryCtxRelease", context=False, unsafe=True)
    def primary_ctx_release(self, device: int) -> None:
        self._require_device(device)
        self._executor.check()
        self._contexts.release()

    # The stack belongs to the thread and not to a context: after a fault it still works.

    @driver_call("cuCtxGetCurrent", context=False)
    def ctx_get_current(self) -> int:
        return self._contexts.current

    @driver_call("cuCtxPushCurrent", context=False)
    def ctx_push_current(self, context: int) -> None:
        self._contexts.push(context)

    @driver_call("cuCtxPopCurrent", context=False)
    def ctx_pop_current(self) -> int:
        return self._contexts.pop()

    # Streams

    @driver_call("cuStreamCreate")
    def stream_create(self) -> int:
        stream = Stream()
        stream.handle = self._streams.add(stream)
        return stream.handle

    @driver_call("cuStreamDestroy", waits=True)
    def stream_destroy(self, stream: int) -> None:
        """Work already queued still completes, here before the call returns."""
        with self._lock:
            target = self._not_capturing(self._streams[stream], "cuStreamDestroy")
            self._streams.remove(stream)
        self._executor.run_until(target, target.issued)

    @driver_call("cuStreamSynchronize", unsafe=True, waits=True)
    def stream_synchronize(self, stream: int) -> None:
        with self._lock:
            target = self._not_capturing(self._stream(stream), "cuStreamSynchronize")
            position = target.issued
        self._executor.run_until(target, position)

    @driver_call("cuStreamQuery", unsafe=True, waits=True)
    def stream_query(self, stream: int) -> bool:
        with self._lock:
            target = self._not_capturing(self._stream(stream), "cuStreamQuery")
            done = target.done
            if done == target.issued:
                return True
        self._executor.run_until(target, done + 1)
        return False

    @driver_call("cuStreamWaitEvent")
    def stream_wait_event(self, stream: int, event: int) -> None:
        target, mark = self._stream(stream), self._events[event].mark
        if mark is None:
            return
        if isinstance(mark, CapturedMark):
            self._captures.join(target, mark)
        elif target.capture is not None:
            target.capture.refuse(
                "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
                f"cuStreamWaitEvent on capturing {target} for event 0x{event:x}, recorded outside the capture",
            )
        else:
            self._executor.push(target, Wait(mark, self._executor))

    # Events

    @driver_call("cuEventCreate")
    def event_create(self, timing: bool) -> int:
        return self._events.add(Event(timing))

    @driver_call("cuEventDestroy")
    def event_destroy(self, event: int) -> None:
        """Waits already queued for it still hold."""
        self._events.remove(event)

    @driver_call("cuEventRecord")
    def event_record(self, event: int, stream: int) -> None:
        target, recorded = self._stream(stream), self._events[event]
        if target.capture is not None:
            recorded.mark = target.capture.mark(target)
        else:
            recorded.mark = Mark(target)
            self._executor.push(target, recorded.mark)

    @driver_call("cuEventQuery", waits=True)
    def event_query(self, event: int) -> bool:
        with self._lock:
            mark = self._reachable_mark(event, "cuEventQuery")
            self._captures.refuse_unsafe("cuEventQuery")
            if mark is None or mark.time is not None:
                return True
            done = mark.stream.done
        self._executor.run_until(mark.stream, done + 1)
        return False

    @driver_call("cuEventSynchronize", waits=True)
    def event_synchronize(self, event: int) -> None:
        with self._lock:
            mark = self._reachable_mark(event, "cuEventSynchronize")
            self._captures.refuse_unsafe("cuEventSynchronize")
        if mark is not None:
            self._executor.run_until(mark.stream, mark.position)

    @driver_call("cuEventElapsedTime")
    def event_elapsed_time(self, start: int, end: int) -> float:
        times = []
        for event in (start, end):
            if not self._events[event].timing:
                raise Failure("CUDA_ERROR_INVALID_HANDLE", f"event 0x{event:x} was created without timing")
            mark = self._events[event].mark
            if isinstance(mark, CapturedMark):
                self._captures.in_progress(mark, "cuEventElapsedTime")
                raise Failure("CUDA_ERROR_CAPTURED_EVENT", f"event 0x{event:x} was last recorded in a capture")
            if mark is None:
                raise Failure("CUDA_ERROR_INVALID_HANDLE", f"event 0x{event:x} was never recorded")
            if mark.time is None:
                raise Failure("CUDA_ERROR_NOT_READY", f"event 0x{event:x} has not completed")
            times.append(mark.time)
        return (times[1] - times[0]) * 1e3

    # Memory

    @driver_call("cuMemAlloc", unsafe=True)
    def mem_alloc(self, nbytes: int) -> int:
        return self._memory.allocate(nbytes)

    @driver_call("cuMemFree", unsafe=True)
    def mem_free(self, ptr: int) -> None:
        self._memory.give_up(ptr).run()

    @driver_call("cuMemFreeAsync", unsafe=True)
    def mem_free_async(self, ptr: int, stream: int) -> None:
        """Work on other streams must not use the memory any more once it has come to that."""
        target = self._not_capturing(self._stream(stream), "cuMemFreeAsync")
        self._executor.push(target, self._memory.give_up(ptr))

    @driver_call("cuMemGetInfo")
    def mem_get_info(self) -> tuple[int, int]:
        return self._memory.total - self._memory.used, self._memory.total

    @driver_call("cuMemHostAlloc", unsafe=True)
    def mem_host_alloc(self, nbytes: int) -> int:
        return self._pinned.allocate(nbytes)

    @driver_call("cuMemFreeHost", unsafe=True)
    def mem_host_free(self, address: int) -> None:
        self._pinned.free(address)

    @driver_call("cuMemcpyHtoDAsync")
    def memcpy_htod_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        target = self._stream(stream)
        if nbytes != 0:
            destination = self._memory.range(dst, nbytes, "destination")
            self._submit(target, Copy(destination, self._pinned.range(src, nbytes, "source")))

    @driver_call("cuMemcpyDtoHAsync")
    def memcpy_dtoh_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        target = self._stream(stream)
        if nbytes != 0:
            destination = self._pinned.range(dst, nbytes, "destination")
            self._submit(target, Copy(destination, self._memory.range(src, nbytes, "source")))

    @driver_call("cuMemcpyDtoDAsync")
    def memcpy_dtod_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        target = self._stream(stream)
        if nbytes != 0:
            self._submit(target, self._device_copy(dst, src, nbytes))

    @driver_call("cuMemsetD8Async")
    def memset_d8_async(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        target = self._stream(stream)
        if nbytes != 0:
            self._submit(target, self._fill(dst, value, nbytes))

    @driver_call("cuPointerGetAttribute")
    def pointer_info(self, ptr: int) -> PointerInfo | None:
        allocation, block = self._memory.find(ptr), self._pinned.find(ptr)
        if allocation is not None and not allocation.is_freed:
            return PointerInfo(device=0, is_device=True)
        if block is not None and not block.is_freed:
            return PointerInfo(device=0, is_device=False)
        return None

    @driver_call("cuTensorMapEncodeTiled", context=False)
    def tensor_map_encode_tiled(
        self,
        data_type: str,
        address: int,
        extents: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
    ) -> bytes:
        tensor_map = HostTensorMap(data_type, address, extents, strides, box)
        tensor_map.check()
        return tensor_map.encode()

    @driver_call("cuTensorMapReplaceAddress", context=False)
    def tensor_map_replace_address(self, tensor_map: int, address: int) -> None:
        if tensor_map % TENSOR_MAP_ALIGNMENT:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"0x{tensor_map:x} is not a multiple of {TENSOR_MAP_ALIGNMENT}")
        moved = replace(HostTensorMap.decode(ctypes.string_at(tensor_map, TENSOR_MAP_BYTES)), address=address)
        moved.check()
        ctypes.memmove(tensor_map, moved.encode(), TENSOR_MAP_BYTES)

    def ready_tensor_map_replace_address(self, tensor_map: int) -> Callable[[int], None]:
        return lambda address: self.tensor_map_replace_address(tensor_map, address)

    # Modules and functions

    @driver_call("cuModuleLoadDataEx", unsafe=True)
    def module_load(self, image: bytes) -> int:
        try:
            decoded = HostImage.decode(image)
        except ValueError as error:
            raise Failure("CUDA_ERROR_INVALID_IMAGE", str(error)) from None
        return self._modules.add(Module(decoded))

    @driver_call("cuModuleUnload", unsafe=True)
    def module_unload(self, module: int) -> None:
        unloaded = self._modules.remove(module)
        unloaded.is_loaded = False
        for handle in [handle for handle, function in self._functions.items() if function.module is unloaded]:
            del self._functions[handle]

    @driver_call("cuModuleGetFunction")
    def module_get_function(self, module: int, entry: str) -> int:
        loaded = self._modules[module]
        if entry != loaded.image.entry:
            raise Failure(
                "CUDA_ERROR_NOT_FOUND", f"'{entry}'; the module of {loaded.image.source} has '{loaded.image.entry}'"
            )
        if entry not in self._entries:
            known = ", ".join(sorted(self._entries)) or "none"
            raise Failure("CUDA_ERROR_NOT_FOUND", f"'{entry}'; the host driver was given the entries: {known}")
        default_shared = self._device.limit("MAX_SHARED_MEMORY_PER_BLOCK")
        return self._functions.add(Function(loaded, self._entries[entry], default_shared))

    @driver_call("cuFuncGetAttribute")
    def func_attribute(self, function: int, attribute: str) -> int:
        loaded = self._functions[function]
        values = {
            "MAX_THREADS_PER_BLOCK": loaded.image.threads,
            "SHARED_SIZE_BYTES": 0,
            "CONST_SIZE_BYTES": 0,
            "LOCAL_SIZE_BYTES": 0,
            "NUM_REGS": 0,
            "MAX_DYNAMIC_SHARED_SIZE_BYTES": loaded.max_dynamic_shared,
        }
        if attribute not in values:
            raise Failure(
                "CUDA_ERROR_INVALID_VALUE", f"unknown function attribute {attribute!r}; there are {', '.join(values)}"
            )
        return values[attribute]

    @driver_call("cuFuncSetAttribute")
    def func_set_max_dynamic_shared(self, function: int, nbytes: int) -> None:
        loaded, limit = self._functions[function], self._device.limit("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        if not 0 <= nbytes <= limit:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"{nbytes} bytes of dynamic shared memory; the limit is {limit}")
        loaded.max_dynamic_shared = nbytes

    @driver_call("cuFuncGetParamInfo")
    def func_param_info(self, function: int) -> tuple[ParamInfo, ...] | None:
        return self._functions[function].image.layout()

    @driver_call("cuLaunchKernel")
    def launch_kernel(
        self,
        function: int,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        stream: int,
        params: int,
        cooperative: bool = False,
    ) -> None:
        target = self._stream(stream)
        self._submit(target, self._kernel_call(function, grid, block, shared_bytes, params, cooperative))

    def ready_launch_kernel(
        self,
        function: int,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        stream: int,
        params: int,
        cooperative: bool = False,
    ) -> ReadyCall:
        return _ready(lambda: self.launch_kernel(function, grid, block, shared_bytes, stream, params, cooperative))

    # Capture and graphs

    @driver_call("cuStreamBeginCapture")
    def stream_begin_capture(self, stream: int, mode: CaptureMode) -> None:
        target = self._stream(stream)
        if target is self._legacy_stream:
            raise Failure("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "the legacy default stream cannot be captured")
        self._captures.begin(target, CaptureMode(mode))

    @driver_call("cuStreamEndCapture")
    def stream_end_capture(self, stream: int) -> int:
        return self._graphs.add(self._captures.end(self._stream(stream)))

    @driver_call("cuStreamIsCapturing")
    def stream_capture_status(self, stream: int) -> CaptureStatus:
        capture = self._stream(stream).capture
        if capture is None:
            return CaptureStatus.NONE
        return CaptureStatus.ACTIVE if capture.invalidated_by is None else CaptureStatus.INVALIDATED

    @driver_call("cuStreamGetCaptureInfo")
    def stream_capture_dependencies(self, stream: int) -> tuple[int, ...]:
        target = self._stream(stream)
        return () if target.capture is None else target.capture.dependencies(target)

    @driver_call("cuThreadExchangeStreamCaptureMode", context=False)
    def thread_exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        return self._captures.exchange_mode(CaptureMode(mode))

    @driver_call("cuGraphGetNodes")
    def graph_node_types(self, graph: int) -> tuple[str, ...]:
        return tuple(node.work.node_type for node in self._graphs[graph].nodes)

    @driver_call("cuGraphGetEdges")
    def graph_edges(self, graph: int) -> tuple[tuple[int, int], ...]:
        nodes = self._graphs[graph].nodes
        return tuple((nodes[before].handle, node.handle) for node in nodes for before in sorted(node.dependencies))

    @driver_call("cuGraphKernelNodeSetParams")
    def graph_kernel_node_set_params(
        self, node: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int, params: int
    ) -> None:
        present = self._node(node)
        present.replace(self._kernel_call(function, grid, block, shared_bytes, params, present.is_cooperative))

    @driver_call("cuGraphMemcpyNodeSetParams")
    def graph_memcpy_node_set_params(self, node: int, dst: int, src: int, nbytes: int, context: int) -> None:
        self._contexts.require_same(context)
        self._node(node).replace(self._device_copy(dst, src, nbytes))

    @driver_call("cuGraphMemsetNodeSetParams")
    def graph_memset_node_set_params(self, node: int, dst: int, value: int, nbytes: int, context: int) -> None:
        self._contexts.require_same(context)
        self._node(node).replace(self._fill(dst, value, nbytes))

    @driver_call("cuGraphInstantiate", unsafe=True)
    def graph_instantiate(self, graph: int) -> int:
        return self._graph_execs.add(GraphExec(self._graphs[graph]))

    @driver_call("cuGraphDestroy")
    def graph_destroy(self, graph: int) -> None:
        self._graphs.remove(graph)

    @driver_call("cuGraphExecDestroy", unsafe=True)
    def graph_exec_destroy(self, graph_exec: int) -> None:
        """Replays already queued still run."""
        self._graph_execs.remove(graph_exec)

    @driver_call("cuGraphExecKernelNodeSetParams")
    def graph_exec_kernel_node_set_params(
        self, graph_exec: int, node: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int, params: int
    ) -> None:
        cooperative = self._node(node).is_cooperative
        self._replace(graph_exec, node, self._kernel_call(function, grid, block, shared_bytes, params, cooperative))

    @driver_call("cuGraphExecMemcpyNodeSetParams")
    def graph_exec_memcpy_node_set_params(
        self, graph_exec: int, node: int, dst: int, src: int, nbytes: int, context: int
    ) -> None:
        self._contexts.require_same(context)
        self._replace(graph_exec, node, self._device_copy(dst, src, nbytes))

    @driver_call("cuGraphExecMemsetNodeSetParams")
    def graph_exec_memset_node_set_params(
        self, graph_exec: int, node: int, dst: int, value: int, nbytes: int, context: int
    ) -> None:
        self._contexts.require_same(context)
        self._replace(graph_exec, node, self._fill(dst, value, nbytes))

    @driver_call("cuGraphExecUpdate", unsafe=True)
    def graph_exec_update(self, graph_exec: int, graph: int) -> None:
        self._graph_execs[graph_exec].update(self._graphs[graph])

    @driver_call("cuGraphUpload")
    def graph_upload(self, graph_exec: int, stream: int) -> None:
        """A replay's checks, ahead of it; there is nothing to upload."""
        self._not_capturing(self._stream(stream), "cuGraphUpload")
        self._graph_execs[graph_exec].check()

    @driver_call("cuGraphLaunch")
    def graph_launch(self, graph_exec: int, stream: int) -> None:
        """A graph cannot be recorded into another: a capturing stream refuses it."""
        target = self._not_capturing(self._stream(stream), "cuGraphLaunch")
        replayed = self._graph_execs[graph_exec]
        replayed.check()
        self._executor.push(target, GraphRun(replayed.nodes))

    def ready_graph_launch(self, graph_exec: int, stream: int) -> ReadyCall:
        return _ready(lambda: self.graph_launch(graph_exec, stream))

    # What several calls share

    def _require_device(self, device: int) -> None:
        if device != 0:
            raise Failure("CUDA_ERROR_INVALID_DEVICE", f"device {device}; the host driver has device 0")

    def _stream(self, handle: int) -> Stream:
        if handle in _LEGACY_STREAMS:
            return self._legacy_stream
        if handle == _PER_THREAD_STREAM:
            return self._per_thread.stream
        return self._streams[handle]

    def _not_capturing(self, stream: Stream, function: str) -> Stream:
        """``stream``, unless it is capturing: what ``function`` does cannot be recorded."""
        if stream.capture is not None:
            stream.capture.refuse("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", f"{function} on capturing {stream}")
        return stream

    def _reachable_mark(self, event: int, function: str) -> Mark | None:
        """The event's record, unless it was made in a capture: no host can wait for such a one."""
        mark = self._events[event].mark
        if isinstance(mark, CapturedMark):
            capture = self._captures.in_progress(mark, function)
            capture.refuse("CUDA_ERROR_CAPTURED_EVENT", f"{function} of event 0x{event:x}, last recorded in a capture")
        return mark

    def _node(self, handle: int) -> GraphNode:
        for graph in self._graphs.values():
            index = graph.index(handle)
            if index is not None:
                return graph.nodes[index]
        raise Failure("CUDA_ERROR_INVALID_VALUE", f"0x{handle:x} is no node of a live graph")

    def _replace(self, graph_exec: int, node: int, work: Operation) -> None:
        """New parameters for a node of an executable; the graph that it was made from must be alive."""
        changed = self._graph_execs[graph_exec]
        index = changed.graph.index(node)
        if index is None or changed.graph not in self._graphs.values():
            raise Failure(
                "CUDA_ERROR_INVALID_VALUE",
                f"0x{node:x} is no node of the live graph that executable 0x{graph_exec:x} was made from",
            )
        changed.replace(index, work)

    def _kernel_call(
        self, function: int, grid: Dim3, block: Dim3, shared_bytes: int, params: int, cooperative: bool
    ) -> KernelCall:
        loaded = self._functions[function]
        self._device.require_launchable(loaded, grid, block, shared_bytes)
        if cooperative:
            self._device.require_resident(loaded, grid, block, shared_bytes)
        arguments = read_arguments(loaded.image, params)
        return KernelCall(loaded, arguments, grid, block, shared_bytes, self._memory, cooperative)

    def _device_copy(self, dst: int, src: int, nbytes: int) -> Copy:
        if abs(dst - src) < nbytes:
            raise Failure(
                "CUDA_ERROR_INVALID_VALUE",
                f"{nbytes} bytes at 0x{src:x} and at 0x{dst:x} overlap, which leaves the result undefined",
            )
        return Copy(self._memory.range(dst, nbytes, "destination"), self._memory.range(src, nbytes, "source"))

    def _fill(self, dst: int, value: int, nbytes: int) -> Fill:
        if not 0 <= value <= 0xFF:
            raise Failure("CUDA_ERROR_INVALID_VALUE", f"memset value {value} is no byte")
        return Fill(self._memory.range(dst, nbytes, "destination"), value)

    def _submit(self, stream: Stream, work: Operation) -> None:
        """Record ``work`` where ``stream`` is capturing, and queue it where it is not."""
        if stream.capture is not None:
            stream.capture.record(stream, work)
        else:
            self._executor.push(stream, work)
