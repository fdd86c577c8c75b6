"""The runtime: the one object that a user works with, composed of the rooms around it.

Work is enqueued on one compute stream, in order, and nothing blocks but what reads results: ``numpy()``,
``dtoh``, ``check_capture_error``, ``synchronize`` and ``drain_for_unmap``. Any thread may call; one at a
time is let in, and while a capture is open only the capturing thread is.
"""

from __future__ import annotations

import atexit
import logging
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import count
from math import prod
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np

from nxrt_cuda import interop
from nxrt_cuda.capture import CaptureErrorCode, DeviceGraphResource
from nxrt_cuda.context import Capabilities, PrimaryContext, Session
from nxrt_cuda.driver.base import CaptureMode, CaptureStatus
from nxrt_cuda.dtype import DataType, uint8
from nxrt_cuda.errors import (
    CaptureError,
    DeviceMemoryError,
    DriverError,
    GraphError,
    LaunchError,
    NxrtError,
    StreamTypeError,
    TensorError,
)
from nxrt_cuda.fork import Fork, open_fork
from nxrt_cuda.graph import CapturedGraph, GraphRecorder, GraphSlot
from nxrt_cuda.launch import KernelSpec, LaunchConfig, Param, PreparedLaunch, TensorMap
from nxrt_cuda.memory import Allocation, DeviceMemory, pool_limit_from_environment
from nxrt_cuda.modules import LoadedFunction, ModuleCache
from nxrt_cuda.process_bound import ProcessBound
from nxrt_cuda.segment import CopyWork, FillWork, LaunchWork
from nxrt_cuda.short_way import ShortWay
from nxrt_cuda.stats import RuntimeCounters, RuntimeStats
from nxrt_cuda.streams import Streams
from nxrt_cuda.tensor import TensorMetadata, TensorMut, TensorView, as_metadata
from nxrt_cuda.timing import TimingEvent
from nxrt_cuda.trace import MAX_SPANS, Trace
from nxrt_cuda.transfer import PendingRead, Transfers

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from nxrt_cuda.compile import Compiler
    from nxrt_cuda.kernel import Kernel

__all__ = ["CudaRuntime"]

logger = logging.getLogger("nxrt_cuda")


class CudaRuntime(ProcessBound):
    """Kernels, memory, copies and graphs of one device. Made by ``open_runtime``.

    Attributes:
        device: ``"cuda:0"`` or ``"host"``.
        capabilities: what the device allows.
    """

    INSTEAD = "open another with open_runtime()"

    def __init__(
        self,
        primary: PrimaryContext,
        compiler: Compiler,
        *,
        stream: Any = None,
        eager_sync: bool = False,
        pool_limit: int | None = None,
    ) -> None:
        driver = primary.driver
        self.capabilities: Capabilities = primary.capabilities
        self.device = driver.name if driver.name == "host" else f"{driver.name}:{primary.device}"
        self._driver = driver
        self._primary = primary
        self._session = Session(primary, eager_sync=eager_sync)
        self._counters = RuntimeCounters()
        self._compiler = compiler
        # The object that a foreign stream belongs to: the stream lives as long as this runtime uses it.
        self._stream_owner = stream
        self._raw: dict[int, Allocation] = {}
        self._graphs: weakref.WeakSet[CapturedGraph] = weakref.WeakSet()
        self._graph_numbers = count(1)
        self._slots: dict[GraphSlot, CapturedGraph] = {}
        limit = pool_limit_from_environment() if pool_limit is None else pool_limit
        with self._session.current():
            self._streams = Streams(self._session, interop.stream_handle(stream))
            self._memory = DeviceMemory(self, self._session, self._streams, self._counters, limit)
            self._transfers = Transfers(self._session, self._streams, self._counters)
            self._modules = ModuleCache(
                driver, compiler, self._session.driving, self._session.traced, self._once_queued_work_is_done
            )
            self._recorder = GraphRecorder(self._session, self._streams, self._counters)
            try:
                self._capture_error = self._memory.alloc(4, pooled=False)
                self._transfers.fill(self._capture_error.ptr, 0, 4)
            except BaseException:
                self._memory.close()
                self._streams.close()
                raise
        self._counters.reset()
        self._closed = False
        self._to_close: deque[Callable[[], None]] = deque(
            (
                self._close_trace,
                self.drain_for_unmap,
                self._close_graphs,
                self._session.end_outside,
                self._transfers.close,
                self._memory.close,
                self._modules.unload_all,
                self._streams.close,
            )
        )
        _open_runtimes.add(self)

    # Life.

    def __enter__(self) -> CudaRuntime:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Wait for queued work and give everything back; tensors and graphs are dead afterwards.

        A second call does nothing, and so does closing what a fork inherited. If a driver call fails, the
        next call goes on where this one stopped. After a device fault the driver takes nothing back, so
        that only this process's own state is dropped. An open trace is ended; that its file cannot be written is
        logged, and its ``save()`` may write another.
        """
        session = self._session
        with session.lock:
            if session.captures_here:
                self._recorder.abort()
            # Launches that are ready know nothing of what is unloaded below, even where a call fails half-way.
            session.lock.close_short_way("close")
            while self._to_close and session.refusal is None:
                with session.driving("close"):
                    self._to_close[0]()
                self._to_close.popleft()
            if session.refusal is None:
                self._primary.release()
                session.refuse(f"the runtime on {self.device} is closed; open another with open_runtime()")
            elif not self._closed:
                self._primary.abandon()
            self._closed = self._memory.is_closed = True
        _open_runtimes.discard(self)

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
        # In a capture, or after a fault, closing is refused; the memory then stays until the process ends.
        with suppress(NxrtError):
            self.close()

    def _close_trace(self) -> None:
        trace = self._session.tracer
        if trace is None:
            return
        try:
            trace.close()
        except OSError as error:  # a full disk does not keep the device's memory from being given back
            logger.warning("the trace that was open when %s closed cannot be written: %s", self.device, error)

    def _once_queued_work_is_done(self, call: Callable[[], None]) -> None:
        """Make ``call`` then; may be asked for by a finaliser, at any instruction."""
        self._session.dropped.append(partial(self._memory.when_done, call))

    def _close_graphs(self) -> None:
        for graph in list(self._graphs):
            graph.close()
        self._session.collect()

    def synchronize(self) -> None:
        """Block until all work enqueued so far is done.

        Raises:
            CaptureError: this thread is capturing.
            DeviceFaultError: the work faulted; the error names the launches since the last good call.
        """
        # Work on the transfer stream is fenced into the others, and that of branches that were joined into the compute
        # stream.
        for stream in (*self._streams.branches, self._streams.compute):
            self._streams.wait(stream, "synchronize")
        with self._session.lock:
            self._counters.synchronizations += 1

    def drain_for_unmap(self) -> None:
        """Block until neither stream has work left, so that memory may be unmapped."""
        self.synchronize()
        self._streams.wait(self._streams.transfer, "drain_for_unmap")

    def wait_for_stream(self, stream: Any) -> None:
        """Make compute work enqueued from now on wait for what is queued on another library's stream.

        Args:
            stream: a handle, or an object with ``__cuda_stream__``, ``cuda_stream`` (PyTorch) or ``ptr`` (CuPy).

        Raises:
            StreamTypeError: ``stream`` is no stream.
            CaptureError: the runtime is capturing.
            DriverError: the driver does not know the handle.
        """
        handle = interop.stream_handle(stream)
        if handle is None:
            raise StreamTypeError("wait_for_stream needs a stream, got None")
        with self._session.driving("wait_for_stream"):
            self._streams.fence(handle, self._streams.current)

    def record_event(self) -> TimingEvent:
        """A mark behind the work enqueued so far; ``start.elapsed_time(end)`` is the time between two.

        Raises:
            CaptureError: this thread is capturing.
        """
        return TimingEvent(self._session, self._streams)

    def trace(self, path: str | os.PathLike[str] | None = None, *, max_spans: int = MAX_SPANS) -> Trace:
        """Trace what the runtime does from now on, until the trace is closed; waits for the work queued before.

        ``with rt.trace("trace.json"):`` writes the file when the body ends; otherwise ``close()`` or
        ``save(path)`` of what is returned do. A capture and its replays may lie inside. While no trace is
        open, it costs nothing.

        Args:
            path: write the trace here when it is closed, in Chrome's format, for https://ui.perfetto.dev.
            max_spans: calls that are kept; later ones are counted and dropped.

        Raises:
            CaptureError: this thread is capturing.
            RuntimeStateError: a trace of this runtime is open already.
            OSError: the file cannot be written.
        """
        about = {"device": self.device_name, "driver": self.driver_version, "runtime": repr(self)}
        return Trace(self._session, self._streams, path, max_spans, about)

    @property
    def eager_sync(self) -> bool:
        """Whether every launch and replay is waited for, so that a fault names the one that caused it."""
        return self._session.eager_sync

    # Handles, for other libraries.

    @property
    def stream(self) -> int:
        """The compute stream's handle, to enqueue other libraries' work in order with this runtime's.

        Within a branch of a fork it is the branch's.
        """
        return self._streams.current

    def __cuda_stream__(self) -> tuple[int, int]:
        """The CUDA stream protocol of cuda.core: (version, handle)."""
        return (0, self._streams.current)

    @property
    def context(self) -> int:
        """The primary context's handle."""
        return self._session.context

    @property
    def device_name(self) -> str:
        return self._primary.device_name

    @property
    def driver_version(self) -> str:
        """The CUDA version that the driver serves, e.g. ``"13.0"``."""
        version = self._driver.driver_version()
        return f"{version // 1000}.{version % 1000 // 10}"

    # Tensors.

    def empty(self, shape: Sequence[int], dtype: Any) -> TensorMut:
        """An uninitialised contiguous tensor.

        Raises:
            TensorError: an extent is negative or no whole number, or the dtype is not supported.
            OutOfMemoryError: the driver has no room for it.
            CaptureError: the runtime is capturing.
        """
        metadata = as_metadata(shape, dtype)
        return self._tensor(metadata, "empty")

    def zeros(self, shape: Sequence[int], dtype: Any) -> TensorMut:
        """A contiguous tensor of zeros, filled in stream order.

        Raises:
            TensorError, OutOfMemoryError, CaptureError: as :meth:`empty`.
        """
        tensor = self.empty(shape, dtype)
        self._transfers.fill(tensor.ptr, 0, tensor.nbytes)
        return tensor

    def from_array(self, array: Any) -> TensorMut:
        """A tensor of an array's values.

        Device memory of this runtime's device (an object with ``__dlpack__`` or
        ``__cuda_array_interface__``: PyTorch, CuPy, Numba) is used in place, without a copy: the producer's
        stream is made to wait for nothing, the compute stream waits for the producer's. Everything else goes
        through NumPy, or DLPack, and is copied in stream order, its bytes taken before the call returns.

        Raises:
            TensorError: NumPy makes no array of it, it is masked, the dtype is not supported, device memory is on
                another device or does not align the dtype, or ``array`` is a tensor of this package that needs a copy
                to be used here, which is never made unasked.
            CaptureError: the runtime is capturing.
        """
        if isinstance(array, TensorView) and (array.runtime is self or not interop.is_device_array(array)):
            raise TensorError(
                f"from_array of {array!r}, which is a tensor already; copy it with copy(), or from another runtime "
                "with from_array(x.numpy())"
            )
        if interop.is_device_array(array):
            with self._session.driving("from_array"):
                # A step may import and drop tensors and never allocate, which is where this is done otherwise.
                self._memory.collect()
                return interop.import_array(self, self._memory, array)
        values = interop.host_array(array)
        source = np.ascontiguousarray(values).reshape(values.shape)  # which has at least one dimension before
        tensor = self._tensor(as_metadata(source.shape, source.dtype), "from_array")
        self._transfers.upload(tensor.ptr, source, operation="from_array")
        return tensor

    def read(self, view: TensorView) -> np.ndarray:
        """A host copy of a view; blocks until the work queued before is done. ``view.numpy()`` calls this.

        Raises:
            DeviceMemoryError: the memory was freed, or belongs to another runtime.
            CaptureError: the runtime is capturing.
            DeviceFaultError: the work faulted.
        """
        self.check_operand(view)
        raw = np.empty(view.metadata.span_bytes, np.uint8)
        self._transfers.download(raw, view.ptr, operation="numpy")
        return interop.strided_copy(raw, view.metadata)

    def read_async(self, view: TensorView) -> PendingRead:
        """Start a host copy of a contiguous view on the transfer stream.

        Raises:
            TensorError: the view is strided.
            DeviceMemoryError: the memory was freed, or belongs to another runtime.
            CaptureError: the runtime is capturing.
        """
        self.check_operand(view)
        if not view.is_contiguous:
            raise TensorError(f"read_async of a strided tensor: shape {view.shape}, strides {view.strides}")
        return self._transfers.download_async(view.ptr, view.metadata, operation="read_async")

    def write(self, view: TensorMut, array: ArrayLike, *, asynchronous: bool = False) -> None:
        """Overwrite a contiguous tensor in stream order; ``view.copy_from(array)`` calls this.

        ``asynchronous`` copies on the transfer stream, beside compute work that is already running.

        Raises:
            TensorError: NumPy makes no array of ``array``, the shape differs, the cast is not of NumPy's "same kind",
                ``view`` is strided or read-only, or ``array`` is a tensor, which :meth:`copy` takes.
        """
        self._check_target(view, "copy_from")
        if isinstance(array, TensorView):
            raise TensorError(f"copy_from of {array!r}, which is on the device already; use copy(target, source)")
        source = interop.host_array(array)
        if source.shape != view.shape:
            raise TensorError(f"cannot copy an array of shape {source.shape} into a tensor of shape {view.shape}")
        if not np.can_cast(source.dtype, view.dtype.numpy, "same_kind"):
            raise TensorError(f"cannot cast {source.dtype} to {view.dtype}; convert the array first")
        source = np.ascontiguousarray(source, view.dtype.numpy)
        self._transfers.upload(view.ptr, source, asynchronous=asynchronous, operation="copy_from")

    def copy(self, target: TensorMut, source: TensorView) -> None:
        """Copy between contiguous tensors of one shape and dtype, in stream order; legal in a capture.

        Raises:
            TensorError: shape or dtype differ, the two overlap, one is strided, or ``target`` is read-only.
            DeviceMemoryError: the memory was freed, or belongs to another runtime.
        """
        self._check_target(target, "copy")
        self.check_operand(source)
        if not source.is_contiguous:
            raise TensorError(f"copy of a strided tensor: shape {source.shape}, strides {source.strides}")
        if (target.shape, target.dtype) != (source.shape, source.dtype):
            raise TensorError(f"copy of {source.dtype} {source.shape} into {target.dtype} {target.shape}")
        if _overlap(target.ptr, source.ptr, source.nbytes):
            raise TensorError(f"copy of {source!r} into {target!r}, which overlap")
        with self._recorded("copy", CopyWork(target.ptr, source.ptr, source.nbytes), (target, source)):
            self._transfers.copy(target.ptr, source.ptr, source.nbytes)

    def fill_zero(self, tensor: TensorMut) -> None:
        """Zero a contiguous tensor in stream order; legal in a capture.

        Raises:
            TensorError: the tensor is strided or read-only.
            DeviceMemoryError: the memory was freed, or belongs to another runtime.
        """
        self._check_target(tensor, "fill_zero")
        with self._recorded("memset", FillWork(tensor.ptr, 0, tensor.nbytes), (tensor,)):
            self._transfers.fill(tensor.ptr, 0, tensor.nbytes)

    def check_operand(self, view: TensorView) -> None:
        """Refuse a view whose memory is gone or belongs to another runtime.

        Raises:
            DeviceMemoryError: either is so.
            TensorError: it is no tensor.
        """
        try:
            owner = view.owner
        except AttributeError:
            raise TensorError(f"expected a tensor of this package, got {type(view).__name__}") from None
        if owner.runtime is not self:
            raise DeviceMemoryError(f"{view!r} belongs to another runtime, not to this one on {self.device}")
        if owner.is_freed:
            raise DeviceMemoryError(f"{view!r} was {owner.fate}")

    def _check_target(self, view: TensorView, operation: str) -> None:
        """As :meth:`check_operand`, for a view that is to be overwritten from its first byte to its last."""
        self.check_operand(view)
        if not isinstance(view, TensorMut):
            raise TensorError(f"{operation} into {view!r}, which is read-only")
        if not view.is_contiguous:
            raise TensorError(f"{operation} into a strided tensor: shape {view.shape}, strides {view.strides}")

    def _tensor(self, metadata: TensorMetadata, operation: str) -> TensorMut:
        owner = self._memory.alloc(metadata.nbytes, operation=operation)
        return TensorMut(owner.ptr, metadata, owner)

    # Exchange with other libraries; called by the tensors' protocol methods.

    def array_interface(self, view: TensorView) -> dict[str, Any]:
        self.check_operand(view)
        return interop.array_interface(view, self._driver.name, self._streams.current)

    def to_dlpack(self, view: TensorView, **request: Any) -> Any:
        self.check_operand(view)
        if self._driver.name == "host":
            return interop.export_host_copy(self.read(view), view.metadata, **request)
        with self._session.driving("__dlpack__", in_capture=True):
            session = self._session
            if not session.capturing:
                self._memory.collect()  # what the exports of earlier steps have left, as in from_array
            return interop.export_dlpack(
                view,
                self._streams,
                self.dlpack_device(),
                capturing=session.capturing,
                later=session.dropped.append,
                **request,
            )

    def dlpack_device(self) -> tuple[int, int]:
        return interop.dlpack_device(self._driver.name, self._primary.device)

    # Raw memory, by address.

    def alloc_raw(self, nbytes: int) -> int:
        """The address of ``nbytes`` (at least one) of device memory, until :meth:`free_raw`.

        Raises:
            DeviceMemoryError: ``nbytes`` is no whole number, negative, or beyond any address space.
            OutOfMemoryError: the driver has no room for it.
            CaptureError: the runtime is capturing.
        """
        with self._session.lock:
            allocation = self._memory.alloc(nbytes)
            self._raw[allocation.ptr] = allocation
            return allocation.ptr

    def free_raw(self, ptr: int) -> None:
        """Give back what :meth:`alloc_raw` returned.

        Raises:
            DeviceMemoryError: the address is not one, or was freed, or a live graph refers to it.
        """
        with self._session.lock:
            allocation = self._raw.get(ptr)
            if allocation is None:
                address = hex(ptr) if isinstance(ptr, int) else repr(ptr)
                raise DeviceMemoryError(f"free_raw of {address}, which alloc_raw did not return or which was freed")
            allocation.free()
            del self._raw[ptr]

    def _raw_memory(self, addresses: Sequence[int]) -> list[Allocation]:
        """What :meth:`alloc_raw` returned that any of ``addresses`` lies in."""
        return [
            allocation
            for start, allocation in self._raw.items()
            if any(start <= address < start + max(allocation.nbytes, 1) for address in addresses)
        ]

    def alloc_graph_stable(self, nbytes: int) -> Allocation:
        """Memory outside the pool: its address is nobody else's until the last owner has let it go.

        It returns to the driver once the work queued until then is done.

        Raises:
            DeviceMemoryError, OutOfMemoryError, CaptureError: as :meth:`alloc_raw`.
        """
        return self._memory.alloc(nbytes, pooled=False, operation="alloc_graph_stable")

    def trim_pool(self) -> None:
        """Return the pool's free memory to the driver, and host buffers that no copy uses; waits for queued work."""
        with self._session.driving("trim_pool"):
            self._memory.trim()
            self._transfers.staging.trim()

    def htod(self, array: ArrayLike, dst: int) -> None:
        """Copy an array's bytes to a device address, in stream order; they are taken before the call returns.

        Raises:
            TensorError: the array holds Python objects.
            CaptureError: the runtime is capturing.
            DriverError: the driver does not know the address.
        """
        self._transfers.upload(dst, _plain(array, "htod"), operation="htod")

    def dtoh(self, array: np.ndarray, src: int) -> None:
        """Fill a contiguous, writable array from a device address; blocks until it is there.

        Raises:
            TensorError: it is no array, not contiguous, read-only, or holds Python objects.
            CaptureError: the runtime is capturing.
            DriverError: the driver does not know the address.
            DeviceFaultError: the work queued before faulted.
        """
        _plain(array, "dtoh")
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or not array.flags.writeable:
            raise TensorError("dtoh needs a C-contiguous, writable array")
        self._transfers.download(array, src, operation="dtoh")

    def dtod(self, dst: int, src: int, nbytes: int) -> None:
        """Copy between device addresses in stream order; legal in a capture.

        Raises:
            DeviceMemoryError: ``nbytes`` is negative, or the two ranges overlap.
        """
        _check_ranges("dtod", dst, src, nbytes)
        with self._recorded("dtod", CopyWork(dst, src, nbytes)):
            self._transfers.copy(dst, src, nbytes)

    def htod_async(self, array: ArrayLike, dst: int) -> None:
        """:meth:`htod` on the transfer stream, between fences to the compute stream."""
        self._transfers.upload(dst, _plain(array, "htod_async"), asynchronous=True, operation="htod_async")

    def dtoh_async(self, src: int, nbytes: int) -> PendingRead:
        """Start copying ``nbytes`` to the host on the transfer stream; ``.numpy()`` of it waits."""
        return self._transfers.download_async(src, TensorMetadata(uint8, (nbytes,)), operation="dtoh_async")

    def dtod_async(self, dst: int, src: int, nbytes: int) -> None:
        """:meth:`dtod` on the transfer stream, between fences to the compute stream; not legal in a capture.

        Raises:
            DeviceMemoryError: ``nbytes`` is negative, or the two ranges overlap.
            CaptureError: the runtime is capturing.
        """
        _check_ranges("dtod_async", dst, src, nbytes)
        self._transfers.copy(dst, src, nbytes, asynchronous=True)

    # Kernels.

    def function(self, spec: KernelSpec) -> LoadedFunction:
        """The loaded kernel of a specialisation; compiled and loaded the first time.

        Raises:
            CaptureError: it is not loaded yet and the runtime is capturing.
            CompileError: it does not compile.
        """
        found = self._modules.find(spec)
        if found is not None:
            return found
        with self._session.driving(f"loading {spec.entry}"):
            self._memory.collect()  # modules that nothing uses make room, though the program allocates nothing
        return self._modules.load(spec)

    def find_function(self, spec: KernelSpec) -> LoadedFunction | None:
        """The kernel of a specialisation if it is loaded; compiles and loads nothing."""
        return self._modules.find(spec)

    def nvrtc_function(
        self,
        module: str,
        source: str,
        entry: str,
        params: Sequence[Param | tuple[str, str]],
        *,
        threads: int = 256,
        macros: Mapping[str, object] | None = None,
        contract: bool = True,
    ) -> LoadedFunction:
        """Compile CUDA C++ text and load one ``extern "C"`` kernel of it.

        ``params`` declares the kernel's parameters as (name, kind) pairs in order, with kinds
        ``ptr i32 u32 i64 u64 f32 f64``; ``macros`` are ``-D`` definitions, a bool as 1 or 0. On the host driver,
        ``entry`` must be one of the host entries that the runtime was opened with.
        """
        spec = KernelSpec(
            source=module,
            entry=entry,
            params=tuple(Param(*param) for param in params),
            threads=threads,
            macros=tuple((name, _macro_text(value)) for name, value in (macros or {}).items()),
            contract=contract,
            code=source,
        )
        return self.function(spec)

    def require_nvrtc_half_headers(self, op: str) -> None:
        """Refuse ``op`` where NVRTC would not find ``cuda_fp16.h`` and ``cuda_bf16.h``, saying how to get them."""
        self._compiler.require_half_headers(op)

    def require_nvrtc_tensor_core_headers(self, op: str) -> None:
        """Refuse ``op`` where NVRTC would not find ``mma.h`` either, saying how to get it.

        For kernels of your own that use its fragments; those of this package use none.
        """
        self._compiler.require_tensor_core_headers(op)

    def tensor_map(
        self,
        dtype: DataType,
        address: int,
        extents: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
    ) -> TensorMap:
        """A tensor map for a parameter of the kind ``tensor_map``: copies of boxes, with the 128-byte swizzle.

        Args:
            dtype: of the elements.
            address: of element 0, a multiple of 16.
            extents: elements along each of 1 to 5 dimensions, the innermost first.
            strides: bytes between elements along each dimension but the innermost, multiples of 16.
            box: elements along each dimension of a box, at most 256, and at most 128 bytes innermost.

        Raises:
            DriverError: the driver does not take such a map.
        """
        encoded = self._driver.tensor_map_encode_tiled(dtype.name.upper(), address, extents, strides, box)
        return TensorMap.of(encoded, address, self._driver.ready_tensor_map_replace_address)

    def prepare(self, function: LoadedFunction, config: LaunchConfig, *arguments: Any, op: str = "") -> PreparedLaunch:
        """Check and pack one launch; a tensor stands for its address.

        ``op`` names the operator that it serves, for traces and pictures of graphs.

        Raises:
            LaunchError: the count or a kind is wrong, the device cannot give the grid or shared memory or the kernel
                a block of that size, or the function is another runtime's.
            DeviceMemoryError: a tensor is dead or another runtime's.
        """
        self._check_function(function)
        for argument in arguments:
            if isinstance(argument, TensorView):
                self.check_operand(argument)
        limits = self.capabilities
        if config.grid[0] > limits.max_grid_dim_x:
            raise LaunchError(f"{function.spec.entry}: grid.x = {config.grid[0]} exceeds {limits.max_grid_dim_x}")
        threads = prod(config.block)
        if threads > function.max_threads:
            raise LaunchError(
                f"{function.spec.entry}: block {config.block} has {threads} threads; "
                f"the kernel's registers and shared memory allow {function.max_threads}"
            )
        if config.shared_bytes:
            function.require_dynamic_shared(config.shared_bytes, limits.shared_memory_per_block_optin)
        return PreparedLaunch(function, config, arguments, op=op)

    def _check_function(self, function: LoadedFunction) -> None:
        if function.module.cache is not self._modules:
            raise LaunchError(
                f"{function.spec.entry} was loaded by another runtime, not by this one on {self.device}; load it here"
            )

    def launch(self, prepared: PreparedLaunch, operands: Sequence[TensorView | None] | None = None) -> None:
        """Enqueue a prepared launch on the compute stream: the one place where a kernel starts.

        ``operands`` are the tensors it touches (None is an absent one), which a graph being recorded keeps
        alive; by default those given to :meth:`prepare`, which are checked again. A zero grid launches
        nothing and is counted.

        Raises:
            DeviceMemoryError: a tensor was freed since it was given to :meth:`prepare`.
            LaunchError: it was prepared by another runtime.
        """
        session = self._session
        gate = session.lock
        turn = gate.turn
        if turn.owner == get_ident():
            turn.passing = True
            try:
                if (
                    prepared.home is session
                    and gate.turn is turn
                    and (operands is not None or prepared.checked == session.frees)
                ):
                    start = prepared.start
                    try:
                        (status,) = start.call()
                        if status:
                            raise start.error(status)
                    except DriverError as error:
                        session.retry(error, start)
                    self._counters.launches += 1
                    session.suspects.append(prepared.label)
                    return
            finally:
                turn.passing = False
        self._launch(prepared, operands)

    def _launch(self, prepared: PreparedLaunch, operands: Sequence[TensorView | None] | None) -> None:
        """:meth:`launch` where something has to be checked or recorded."""
        self._check_function(prepared.function)
        session, config = self._session, prepared.config
        with session.lock:
            session.check_usable()
            if operands is None:
                operands = prepared.operands
                for view in operands:
                    self.check_operand(view)
                prepared.checked = session.frees
            if config.is_empty:
                self._counters.empty_launches += 1
                return
            work = (prepared.function.handle, config.grid, config.block, config.shared_bytes)
            if prepared.home is not session:
                prepared.start = self._driver.ready_launch_kernel(
                    *work, self._streams.compute, prepared.params, config.cooperative
                )
                prepared.home = session
            enqueue: Callable[..., None] = session.enqueue
            if session.tracer is not None:
                enqueue = partial(session.tracer.run, prepared.activity, self._streams.current, enqueue)
            try:
                enqueue(self._driver.launch_kernel, *work, self._streams.current, prepared.params, config.cooperative)
            except DriverError as error:
                self._recorder.failed(prepared.label, error)
                raise
            self._counters.launches += 1
            if session.capturing:
                recorded = LaunchWork(prepared)
                self._recorder.record(prepared.label, operands, recorded, self._raw_memory(recorded.addresses))
            else:
                session.suspects.append(prepared.label)
                if session.eager_sync:
                    self.synchronize()

    @contextmanager
    def _recorded(self, label: str, work: CopyWork | FillWork, operands: Sequence[TensorView] = ()) -> Iterator[None]:
        """Around one copy or fill: what :meth:`launch` does around a kernel."""
        with self._session.lock:
            try:
                yield
            except DriverError as error:
                self._recorder.failed(label, error)
                raise
            if self._session.capturing:
                raw = self._raw_memory(work.addresses)
                self._recorder.record(label, operands, work if work.nbytes else None, raw)
            else:
                self._session.suspects.append(label)

    def exclusive(self) -> AbstractContextManager[None]:
        """The runtime's lock, for a ``with`` that has to see several calls undisturbed by other threads.

        A thread that holds two runtimes, by this or by a fork, takes them in the order that all threads take them in:
        two that take them in opposite orders wait for each other for ever.

        Raises:
            CaptureError: on entry: this thread captures on another runtime, or a thread has ended in a capture.
        """
        return self._session.lock

    def short_way(self) -> ShortWay[Any]:
        """How a kernel object makes launches that it has made before, at less cost than by :meth:`launch`."""
        return ShortWay(self._session, self._counters)

    def check_again(self) -> None:
        """Memory is not to be used any more: who found its views usable asks anew. The caller holds the runtime."""
        self._session.frees += 1

    def retain(self, resources: Iterable[DeviceGraphResource]) -> None:
        """Keep ``resources`` alive with the graph that is being recorded; nothing to do outside a capture."""
        self._recorder.retain(resources)

    # Streams side by side.

    def fork(self) -> AbstractContextManager[Fork]:
        """Work side by side, in a capture or out of it::

            with rt.fork() as fork:
                with fork.branch():
                    rt.launch(a)
                with fork.branch():
                    rt.launch(b)
                rt.launch(c)  # beside both
            rt.launch(d)  # after all three

        Every branch begins after the work queued before the fork; the end of the body joins them all. Between
        the two nothing orders one branch after another, so that none may use what another writes, and a kernel
        object, which has one workspace, is executed in one of them only. Everything that works in stream order
        follows the branch that is entered: launches, copies, fills, reads, replays, and ``rt.stream``.

        Other threads' calls wait until the fork has ended; of two runtimes at once, see :meth:`exclusive`.

        Raises:
            RuntimeStateError: the runtime is closed.
        """
        return open_fork(self._session, self._streams, self._memory, self._counters, self._recorder.failed)

    # Graphs.

    @contextmanager
    def capture(
        self,
        kernels: Iterable[Kernel] = (),
        *,
        into: CapturedGraph | None = None,
        name: str | None = None,
        mode: CaptureMode = CaptureMode.THREAD_LOCAL,
    ) -> Iterator[CapturedGraph]:
        """Record the launches of the ``with`` body into a graph.

        Every kernel in ``kernels`` is asked for its capture support before anything is recorded. ``into``
        adds a segment to a graph that exists. ``mode`` says whose unsafe driver calls spoil the capture: by
        default this thread's only. If the body raises, the capture is aborted and the error goes
        on; the runtime is idle again either way.

        Raises:
            CaptureError: a kernel declines, a capture is open, or a fork of the body's is still open at its end.
            GraphError: the driver could not end or instantiate the capture.
        """
        graph = self._new_graph(name) if into is None else into
        self._recorder.begin(graph, kernels, mode)
        try:
            yield graph
            self._recorder.end(stacklevel=4)
        except BaseException:
            try:
                if self.is_capturing():  # one that failed at its end is over
                    self._recorder.abort()
            except NxrtError:
                logger.exception("could not abort the capture of %s after an error in its body", graph.name)
            raise

    def begin_graph_capture(
        self,
        kernels: Iterable[Kernel] = (),
        slot: GraphSlot = GraphSlot.PRIMARY,
        *,
        mode: CaptureMode = CaptureMode.THREAD_LOCAL,
    ) -> None:
        """Open a capture of the slot's next segment, after every kernel was asked for its support.

        Raises:
            CaptureError: a kernel declines, or a capture is open.
        """
        slot = GraphSlot(slot)
        with self._session.lock:
            graph = self._slots.get(slot)
            if graph is None or graph.is_closed:
                graph = self._new_graph(f"the {slot.value} graph")
            self._recorder.begin(graph, kernels, mode)
            self._slots[slot] = graph

    def end_graph_capture(self) -> CapturedGraph:
        """Close the capture and install its segment."""
        return self._recorder.end()

    def abort_graph_capture(self) -> None:
        """Leave capture mode and discard what was recorded; does nothing when idle."""
        self._recorder.abort()

    def replay_graph(self, slot: GraphSlot = GraphSlot.PRIMARY) -> None:
        """Enqueue every segment of the slot's graph in capture order.

        Raises:
            GraphError: no executable is installed.
        """
        self._slot(slot).replay()

    def replay_graph_segment(self, index: int, slot: GraphSlot = GraphSlot.PRIMARY) -> None:
        """Enqueue one segment of the slot's graph."""
        self._slot(slot).replay_segment(index)

    def graph_segment_count(self, slot: GraphSlot = GraphSlot.PRIMARY) -> int:
        """How many segments the slot's graph has."""
        graph = self._slots.get(GraphSlot(slot))
        return 0 if graph is None else graph.segment_count

    def has_graph_executable(self, slot: GraphSlot = GraphSlot.PRIMARY) -> bool:
        """Whether the slot's graph has a segment to replay.

        Raises:
            GraphError: there is no such slot.
        """
        return self.graph_segment_count(slot) > 0

    def reset_graph(self, slot: GraphSlot = GraphSlot.PRIMARY) -> bool:
        """Destroy the slot's graph; returns whether there was one.

        Raises:
            CaptureError: a capture is open.
        """
        if self.is_capturing():
            raise CaptureError(
                "cannot reset CUDA graph while stream capture is active; end capture first",
                operation="reset_graph",
                state="capturing",
            )
        with self._session.lock:
            had_graph = self.has_graph_executable(slot)
            graph = self._slots.pop(GraphSlot(slot), None)
            if graph is not None:
                graph.close()
        return had_graph

    def is_capturing(self) -> bool:
        """Whether the calling thread has a capture open on this runtime; waits for no other thread."""
        return self._session.captures_here

    def capture_status(self) -> CaptureStatus:
        """The driver's own word on the compute stream: none, active or invalidated."""
        with self._session.driving("capture_status", in_capture=True) as driver:
            return driver.stream_capture_status(self._streams.compute)

    def _new_graph(self, name: str | None) -> CapturedGraph:
        name = name or f"graph {next(self._graph_numbers)}"
        graph = CapturedGraph(name, self._session, self._streams, self._counters)
        self._graphs.add(graph)
        return graph

    def _slot(self, slot: GraphSlot) -> CapturedGraph:
        slot = GraphSlot(slot)
        graph = self._slots.get(slot)
        if graph is None:
            raise GraphError(f"cannot replay CUDA graph because no executable is installed in the {slot.value} slot")
        return graph

    # The capture-error word.

    @property
    def capture_error_ptr(self) -> int:
        """The address of the u32 that kernels latch a :class:`CaptureErrorCode` into."""
        return self._capture_error.ptr

    def check_capture_error(self) -> CaptureErrorCode:
        """What kernels have latched since the last reset; blocks until queued work is done."""
        word = np.zeros(1, np.uint32)
        self._transfers.download(word, self._capture_error.ptr, operation="check_capture_error")
        return CaptureErrorCode(int(word[0]))

    def reset_capture_error(self) -> None:
        """Clear the word, in stream order."""
        with self._session.driving("reset_capture_error"):
            self._transfers.fill(self._capture_error.ptr, 0, 4)

    # Statistics.

    def stats(self) -> RuntimeStats:
        """A snapshot of the runtime's counters."""
        with self._session.lock:
            counters = {name: getattr(self._counters, name) for name in RuntimeCounters.__slots__}
        modules = self._modules.stats()
        counters.update(
            modules_compiled=modules.modules_compiled,
            program_cache_hits=modules.cache_hits,
            compile_seconds=modules.compile_seconds,
        )
        return RuntimeStats(**counters)

    def __repr__(self) -> str:
        return f"CudaRuntime({self.device!r}, {self.device_name!r}{', closed' if self.is_closed else ''})"


def _plain(array: ArrayLike, operation: str) -> np.ndarray:
    """``array`` as contiguous bytes that mean the same on the device."""
    plain = np.ascontiguousarray(interop.host_array(array))
    if plain.dtype.hasobject:
        raise TensorError(f"{operation} of an array of dtype {plain.dtype}, which holds Python objects")
    return plain


def _macro_text(value: object) -> str:
    """``value`` as CUDA C++ spells it: to its preprocessor the word ``True`` is an unknown name, and so 0."""
    return str(int(value) if isinstance(value, bool | np.bool_) else value)


def _overlap(one: int, other: int, nbytes: int) -> bool:
    return one < other + nbytes and other < one + nbytes


def _check_ranges(operation: str, dst: int, src: int, nbytes: int) -> None:
    if nbytes < 0:
        raise DeviceMemoryError(f"{operation} of {nbytes} bytes: a size is at least 0")
    if _overlap(dst, src, nbytes):
        raise DeviceMemoryError(f"{operation} of {nbytes} bytes from 0x{src:x} to 0x{dst:x}, which overlap")


_open_runtimes: weakref.WeakSet[CudaRuntime] = weakref.WeakSet()

_EXIT_PATIENCE = 1.0
"""Seconds that the end of the process waits for a runtime that another thread is using."""


@atexit.register
def _close_all() -> None:
    for runtime in list(_open_runtimes):
        lock = runtime._session.lock
        # A daemon thread may never give it back; what is open then ends with the process.
        if not lock.acquire_within(_EXIT_PATIENCE):
            continue
        try:
            runtime.close()
        except NxrtError as error:
            logger.warning("closing the runtime on %s at exit: %s", runtime.device, error)
        finally:
            lock.release()
