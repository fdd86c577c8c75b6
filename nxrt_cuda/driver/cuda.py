"""The CUDA driver through ``cuda.bindings.driver``: every status checked, no state beyond handles.

The bindings take and give handles as small objects, but accept a plain integer wherever they accept
one, so integers are all that crosses this seam; the object they then build costs about 40 ns. The calls
that are made ready for many repetitions hold theirs. They release the GIL around every call into the
driver, waiting calls included.

Nothing is imported from ``cuda`` until a :class:`CudaDriver` is made.
"""

from __future__ import annotations

import ctypes
import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

from nxrt_cuda.driver.base import CaptureMode, CaptureStatus, Dim3, ParamInfo, PointerInfo, ReadyCall
from nxrt_cuda.driver.status import error_class
from nxrt_cuda.errors import DriverError, NoDeviceError

__all__ = ["CudaDriver"]

_INVALID_VALUE = 1
_NOT_READY = 600

_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_MEMORY_TYPE_DEVICE = 2
_DEVICE_ORDINAL = 9

_JIT_LOG_BYTES = 8192
_WITHOUT_GPU = 'open_runtime("host") runs without a GPU'


class _UpdateResult(ctypes.Structure):
    """``CUgraphExecUpdateResultInfo``."""

    _fields_ = (("result", ctypes.c_int), ("node", ctypes.c_void_p), ("from_node", ctypes.c_void_p))


class CudaDriver:
    """:class:`~nxrt_cuda.driver.base.Driver` on a GPU.

    Raises:
        NoDeviceError: the driver library or a device is missing; ``open_runtime("host")`` needs neither.
        DriverError: the driver is there and does not start.
    """

    name = "cuda"

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise _no_driver(f"cuda.bindings cannot be imported ({error}); pip install cuda-bindings") from None
        self._cuda: Any = driver
        # Bound once: these run in every launch or replay.
        self._ctx_get_current = driver.cuCtxGetCurrent
        self._launch_kernel = driver.cuLaunchKernel
        self._launch_cooperative_kernel = driver.cuLaunchCooperativeKernel
        self._graph_launch = driver.cuGraphLaunch
        self._graph_exec_kernel_node_set_params = driver.cuGraphExecKernelNodeSetParams
        self._stream_is_capturing = driver.cuStreamIsCapturing
        self._event_record = driver.cuEventRecord
        self._stream_wait_event = driver.cuStreamWaitEvent
        self._memcpy_htod_async = driver.cuMemcpyHtoDAsync
        self._memcpy_dtoh_async = driver.cuMemcpyDtoHAsync
        self._memcpy_dtod_async = driver.cuMemcpyDtoDAsync
        self._memset_d8_async = driver.cuMemsetD8Async
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:
            # The bindings find the library on the first call, and so raise this again on the next attempt.
            raise _no_driver(f"the driver library libcuda.so.1 cannot be loaded ({error})") from None
        if self.device_count() == 0:
            raise NoDeviceError("cuDeviceGetCount", 100, "CUDA_ERROR_NO_DEVICE", "there are 0 devices", _WITHOUT_GPU)

    # Device and context.

    def driver_version(self) -> int:
        return int(self._call("cuDriverGetVersion"))

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def device_name(self, device: int) -> str:
        name: bytes = self._call("cuDeviceGetName", 256, device)
        return name.split(b"\0", 1)[0].decode()

    def device_attribute(self, device: int, attribute: str) -> int:
        constant = self._enumerator("cuDeviceGetAttribute", "CUdevice_attribute", "CU_DEVICE_ATTRIBUTE_", attribute)
        return int(self._call("cuDeviceGetAttribute", constant, device))

    def primary_ctx_retain(self, device: int) -> int:
        return int(self._call("cuDevicePrimaryCtxRetain", device))

    def primary_ctx_release(self, device: int) -> None:
        self._call("cuDevicePrimaryCtxRelease", device)

    def ctx_get_current(self) -> int:
        status, context = self._ctx_get_current()
        if status:
            raise self._error("cuCtxGetCurrent", status)
        return int(context)

    def ctx_push_current(self, context: int) -> None:
        self._call("cuCtxPushCurrent", context)

    def ctx_pop_current(self) -> int:
        return int(self._call("cuCtxPopCurrent"))

    # Streams.

    def stream_create(self) -> int:
        return int(self._call("cuStreamCreate", _STREAM_NON_BLOCKING))

    def stream_destroy(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def stream_synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def stream_query(self, stream: int) -> bool:
        return self._is_ready("cuStreamQuery", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        (status,) = self._stream_wait_event(stream, event, 0)
        if status:
            raise self._error("cuStreamWaitEvent", status)

    # Events.

    def event_create(self, timing: bool) -> int:
        return int(self._call("cuEventCreate", 0 if timing else _EVENT_DISABLE_TIMING))

    def event_destroy(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def event_record(self, event: int, stream: int) -> None:
        (status,) = self._event_record(event, stream)
        if status:
            raise self._error("cuEventRecord", status)

    def event_query(self, event: int) -> bool:
        return self._is_ready("cuEventQuery", event)

    def event_synchronize(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def event_elapsed_time(self, start: int, end: int) -> float:
        return float(self._call("cuEventElapsedTime", start, end))

    # Memory.

    def mem_alloc(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes, context=f"{nbytes} bytes were asked for"))

    def mem_free(self, ptr: int) -> None:
        self._call("cuMemFree", ptr)

    def mem_free_async(self, ptr: int, stream: int) -> None:
        self._call("cuMemFreeAsync", ptr, stream)

    def mem_get_info(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def mem_host_alloc(self, nbytes: int) -> int:
        return int(self._call("cuMemHostAlloc", nbytes, 0, context=f"{nbytes} bytes were asked for"))

    def mem_host_free(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def memcpy_htod_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        (status,) = self._memcpy_htod_async(dst, src, nbytes, stream)
        if status:
            raise self._error("cuMemcpyHtoDAsync", status)

    def memcpy_dtoh_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        (status,) = self._memcpy_dtoh_async(dst, src, nbytes, stream)
        if status:
            raise self._error("cuMemcpyDtoHAsync", status)

    def memcpy_dtod_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        (status,) = self._memcpy_dtod_async(dst, src, nbytes, stream)
        if status:
            raise self._error("cuMemcpyDtoDAsync", status)

    def memset_d8_async(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        (status,) = self._memset_d8_async(dst, value, nbytes, stream)
        if status:
            raise self._error("cuMemsetD8Async", status)

    def pointer_info(self, ptr: int) -> PointerInfo | None:
        memory_type = self._cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        status, kind = self._cuda.cuPointerGetAttribute(memory_type, ptr)
        if status == _INVALID_VALUE:
            return None
        if status:
            raise self._error("cuPointerGetAttribute", status)
        # cuda-bindings 13.1 to 13.3 answer 0 for the ordinal of any device (NVIDIA/cuda-python#2928),
        # so this one attribute is asked of the library itself, which they have already loaded.
        ordinal = ctypes.c_int()
        result = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(
            ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_uint64(ptr)
        )
        if result:
            raise self._error("cuPointerGetAttribute", self._cuda.CUresult(result))
        return PointerInfo(ordinal.value, int(kind) == _MEMORY_TYPE_DEVICE)

    def tensor_map_encode_tiled(
        self,
        data_type: str,
        address: int,
        extents: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
    ) -> bytes:
        cuda = self._cuda
        kind = self._enumerator("cuTensorMapEncodeTiled", "CUtensorMapDataType", "CU_TENSOR_MAP_DATA_TYPE_", data_type)
        encoded = self._call(
            "cuTensorMapEncodeTiled",
            kind,
            len(extents),
            address,
            [cuda.cuuint64_t(extent) for extent in extents],
            [cuda.cuuint64_t(stride) for stride in strides],
            [cuda.cuuint32_t(extent) for extent in box],
            [cuda.cuuint32_t(1) for _ in box],
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            context=f"address 0x{address:x}, extents {extents}, strides {strides}, box {box}",
        )
        return ctypes.string_at(encoded.getPtr(), 128)

    def tensor_map_replace_address(self, tensor_map: int, address: int) -> None:
        self.ready_tensor_map_replace_address(tensor_map)(address)

    def ready_tensor_map_replace_address(self, tensor_map: int) -> Callable[[int], None]:
        call, place = self._cuda.cuTensorMapReplaceAddress, self._cuda.CUtensorMap(tensor_map)

        def replace(address: int) -> None:
            (status,) = call(place, address)
            if status:
                raise self._error("cuTensorMapReplaceAddress", status, f"address 0x{address:x}")

        return replace

    # Modules and functions.

    def module_load(self, image: bytes) -> int:
        option = self._cuda.CUjit_option
        log = bytearray(_JIT_LOG_BYTES)
        status, module = self._cuda.cuModuleLoadDataEx(
            image,
            2,
            [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES],
            [log, len(log)],
        )
        if status:
            raise self._error("cuModuleLoadDataEx", status, log.split(b"\0", 1)[0].decode(errors="replace").strip())
        return int(module)

    def module_unload(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def module_get_function(self, module: int, entry: str) -> int:
        status, function = self._cuda.cuModuleGetFunction(module, entry.encode())
        if status:
            raise self._error("cuModuleGetFunction", status, f"'{entry}'; {self._describe_entries(module)}")
        return int(function)

    def func_attribute(self, function: int, attribute: str) -> int:
        constant = self._enumerator("cuFuncGetAttribute", "CUfunction_attribute", "CU_FUNC_ATTRIBUTE_", attribute)
        return int(self._call("cuFuncGetAttribute", constant, function))

    def func_set_max_dynamic_shared(self, function: int, nbytes: int) -> None:
        attribute = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call(
            "cuFuncSetAttribute", function, attribute, nbytes, context=f"{nbytes} bytes of dynamic shared memory"
        )

    def func_param_info(self, function: int) -> tuple[ParamInfo, ...] | None:
        infos: list[ParamInfo] = []
        while True:
            try:
                status, offset, size = self._cuda.cuFuncGetParamInfo(function, len(infos))
            except RuntimeError:  # the driver has no such function
                return None
            if status == _INVALID_VALUE:  # one past the last parameter
                return tuple(infos)
            if status:
                raise self._error("cuFuncGetParamInfo", status)
            infos.append(ParamInfo(int(offset), int(size)))

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
        if cooperative:
            (status,) = self._launch_cooperative_kernel(function, *grid, *block, shared_bytes, stream, params)
        else:
            (status,) = self._launch_kernel(function, *grid, *block, shared_bytes, stream, params, 0)
        if status:
            raise self._launch_error(status, grid, block, shared_bytes, cooperative)

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
        cuda = self._cuda
        arguments = (cuda.CUfunction(function), *grid, *block, shared_bytes, cuda.CUstream(stream), params)
        return ReadyCall(
            partial(self._launch_cooperative_kernel, *arguments)
            if cooperative
            else partial(self._launch_kernel, *arguments, 0),
            lambda status: self._launch_error(status, grid, block, shared_bytes, cooperative),
        )

    def _launch_error(self, status: Any, grid: Dim3, block: Dim3, shared_bytes: int, cooperative: bool) -> DriverError:
        call = "cuLaunchCooperativeKernel" if cooperative else "cuLaunchKernel"
        return self._error(call, status, f"grid {grid}, block {block}, {shared_bytes} shared bytes")

    # Capture and graphs.

    def stream_begin_capture(self, stream: int, mode: CaptureMode) -> None:
        self._call("cuStreamBeginCapture", stream, self._cuda.CUstreamCaptureMode(mode))

    def stream_end_capture(self, stream: int) -> int:
        # Where the capture was invalidated the driver frees what was recorded and hands out no graph.
        return int(self._call("cuStreamEndCapture", stream))

    def stream_capture_status(self, stream: int) -> CaptureStatus:
        status, capture = self._stream_is_capturing(stream)
        if status:
            raise self._error("cuStreamIsCapturing", status)
        return CaptureStatus(int(capture))

    def stream_capture_dependencies(self, stream: int) -> tuple[int, ...]:
        _, _, _, nodes, _, count = self._call("cuStreamGetCaptureInfo", stream)
        return tuple(int(node) for node in nodes[:count])

    def thread_exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        previous = self._call("cuThreadExchangeStreamCaptureMode", self._cuda.CUstreamCaptureMode(mode))
        return CaptureMode(int(previous))

    def graph_node_types(self, graph: int) -> tuple[str, ...]:
        _, count = self._call("cuGraphGetNodes", graph)
        nodes, _ = self._call("cuGraphGetNodes", graph, count)
        types = [self._call("cuGraphNodeGetType", node) for node in nodes]
        return tuple(kind.name.removeprefix("CU_GRAPH_NODE_TYPE_") for kind in types)

    def graph_edges(self, graph: int) -> tuple[tuple[int, int], ...]:
        *_, count = self._call("cuGraphGetEdges", graph)
        before, after, *_ = self._call("cuGraphGetEdges", graph, count)
        return tuple((int(first), int(second)) for first, second in zip(before, after, strict=True))

    def graph_kernel_node_set_params(
        self, node: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int, params: int
    ) -> None:
        self._call("cuGraphKernelNodeSetParams", node, self._kernel_node(function, grid, block, shared_bytes, params))

    def graph_memcpy_node_set_params(self, node: int, dst: int, src: int, nbytes: int, context: int) -> None:
        self._call("cuGraphMemcpyNodeSetParams", node, self._memcpy_node(dst, src, nbytes))

    def graph_memset_node_set_params(self, node: int, dst: int, value: int, nbytes: int, context: int) -> None:
        self._call("cuGraphMemsetNodeSetParams", node, self._memset_node(dst, value, nbytes))

    def graph_instantiate(self, graph: int) -> int:
        return int(self._call("cuGraphInstantiate", graph, 0))

    def graph_destroy(self, graph: int) -> None:
        self._call("cuGraphDestroy", graph)

    def graph_exec_destroy(self, graph_exec: int) -> None:
        self._call("cuGraphExecDestroy", graph_exec)

    def graph_exec_kernel_node_set_params(
        self, graph_exec: int, node: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int, params: int
    ) -> None:
        (status,) = self._graph_exec_kernel_node_set_params(
            graph_exec, node, self._kernel_node(function, grid, block, shared_bytes, params)
        )
        if status:
            raise self._error("cuGraphExecKernelNodeSetParams", status)

    def graph_exec_memcpy_node_set_params(
        self, graph_exec: int, node: int, dst: int, src: int, nbytes: int, context: int
    ) -> None:
        self._call("cuGraphExecMemcpyNodeSetParams", graph_exec, node, self._memcpy_node(dst, src, nbytes), context)

    def graph_exec_memset_node_set_params(
        self, graph_exec: int, node: int, dst: int, value: int, nbytes: int, context: int
    ) -> None:
        self._call("cuGraphExecMemsetNodeSetParams", graph_exec, node, self._memset_node(dst, value, nbytes), context)

    def graph_exec_update(self, graph_exec: int, graph: int) -> None:
        # The bindings drop the reason where the driver refuses, so the library itself is asked.
        info = _UpdateResult()
        result = ctypes.CDLL("libcuda.so.1").cuGraphExecUpdate_v2(
            ctypes.c_void_p(graph_exec), ctypes.c_void_p(graph), ctypes.byref(info)
        )
        if result:
            reason = self._cuda.CUgraphExecUpdateResult(info.result).name
            raise self._error("cuGraphExecUpdate", self._cuda.CUresult(result), reason)

    def graph_upload(self, graph_exec: int, stream: int) -> None:
        self._call("cuGraphUpload", graph_exec, stream)

    def graph_launch(self, graph_exec: int, stream: int) -> None:
        (status,) = self._graph_launch(graph_exec, stream)
        if status:
            raise self._error("cuGraphLaunch", status)

    def ready_graph_launch(self, graph_exec: int, stream: int) -> ReadyCall:
        executable, on = self._cuda.CUgraphExec(graph_exec), self._cuda.CUstream(stream)
        return ReadyCall(partial(self._graph_launch, executable, on), partial(self._error, "cuGraphLaunch"))

    def _kernel_node(self, function: int, grid: Dim3, block: Dim3, shared_bytes: int, params: int) -> Any:
        node = self._cuda.CUDA_KERNEL_NODE_PARAMS()
        node.func = function
        node.gridDimX, node.gridDimY, node.gridDimZ = grid
        node.blockDimX, node.blockDimY, node.blockDimZ = block
        node.sharedMemBytes = shared_bytes
        node.kernelParams = params
        return node

    def _memcpy_node(self, dst: int, src: int, nbytes: int) -> Any:
        copy = self._cuda.CUDA_MEMCPY3D()
        copy.srcMemoryType = copy.dstMemoryType = self._cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.dstDevice, copy.srcDevice = dst, src
        copy.WidthInBytes, copy.Height, copy.Depth = nbytes, 1, 1
        return copy

    def _memset_node(self, dst: int, value: int, nbytes: int) -> Any:
        fill = self._cuda.CUDA_MEMSET_NODE_PARAMS()
        fill.dst, fill.value, fill.elementSize, fill.width, fill.height = dst, value, 1, nbytes, 1
        return fill

    # Statuses.

    def _call(self, function: str, *arguments: Any, context: str = "") -> Any:
        """What a driver function returns beside its status: nothing, one value or a list of them."""
        status, *values = getattr(self._cuda, function)(*arguments)
        if status:
            raise self._error(function, status, context)
        return values[0] if len(values) == 1 else values

    def _is_ready(self, function: str, handle: int) -> bool:
        (status,) = getattr(self._cuda, function)(handle)
        if status and status != _NOT_READY:
            raise self._error(function, status)
        return not status

    def _error(self, call: str, status: Any, context: str = "") -> DriverError:
        """The typed error for a status other than success."""
        name: str = status.name
        _, text = self._cuda.cuGetErrorString(status)
        kind = error_class(name)
        if kind is NoDeviceError:
            context = context or _WITHOUT_GPU
        return kind(call, int(status), name, text.decode() if text else "no description", context)

    def _enumerator(self, call: str, enum: str, prefix: str, name: str) -> Any:
        """The enumerator ``prefix + name``, or an error that suggests the nearest names."""
        members = getattr(self._cuda, enum)
        try:
            return getattr(members, prefix + name)
        except AttributeError:
            known = [member.name.removeprefix(prefix) for member in members]
            near = difflib.get_close_matches(name, known)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise DriverError(
                call,
                _INVALID_VALUE,
                "CUDA_ERROR_INVALID_VALUE",
                "invalid argument",
                f"the bindings know no {enum} '{prefix}{name}'{hint}",
            ) from None

    def _describe_entries(self, module: int) -> str:
        """The kernels of a module, for the error about one that it has not."""
        try:
            count = self._call("cuModuleGetFunctionCount", module)
            functions = self._call("cuModuleEnumerateFunctions", count, module)
            names = sorted(self._call("cuFuncGetName", function).decode() for function in functions)
        except (DriverError, RuntimeError):  # a driver before 12.4 cannot say
            return 'is it declared extern "C"?'
        return f'the module has {", ".join(names) or "no kernels"}; is it declared extern "C"?'


def _no_driver(reason: str) -> NoDeviceError:
    return NoDeviceError("cuInit", 100, "CUDA_ERROR_NO_DEVICE", reason, f"install the NVIDIA driver; {_WITHOUT_GPU}")
