"""The driver seam: every call that differs between a GPU and no GPU, flat and without policy.

Handles (devices, contexts, streams, events, modules, functions, graphs) and device addresses are
plain integers. A call either returns its value or raises :class:`~nxrt_cuda.errors.DriverError`; no
status code leaves this layer, but for that of a :class:`ReadyCall`. Ownership, lifetimes, counters and capture
rules belong to the rooms above. Names are the CUDA driver's own, without the ``cu`` prefix and in snake case.

A context must be current on the calling thread for every call but those under "Device and context".
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from nxrt_cuda.errors import DriverError

__all__ = ["CaptureMode", "CaptureStatus", "Dim3", "Driver", "ParamInfo", "PointerInfo", "ReadyCall"]

Dim3 = tuple[int, int, int]


class CaptureMode(IntEnum):
    """``CUstreamCaptureMode``."""

    GLOBAL = 0
    THREAD_LOCAL = 1
    RELAXED = 2


class CaptureStatus(IntEnum):
    """``CUstreamCaptureStatus``."""

    NONE = 0
    ACTIVE = 1
    INVALIDATED = 2


class ParamInfo(NamedTuple):
    """Where one kernel parameter lies in the parameter buffer, in bytes."""

    offset: int
    size: int


class PointerInfo(NamedTuple):
    """What the driver knows of an address: the ordinal of its device, and whether it is device memory."""

    device: int
    is_device: bool


class ReadyCall:
    """A driver call with its arguments, which are converted once and not with every call.

    Calling it makes the call, or raises. Where a function more would show, its status is looked at in place::

        (status,) = ready.call()
        if status:
            raise ready.error(status)

    Attributes:
        call: makes the call; its status alone in a tuple, false if it has succeeded. It may raise as well.
        error: the error for any other status.
    """

    __slots__ = ("call", "error")

    def __init__(self, call: Callable[[], tuple[object]], error: Callable[[Any], DriverError]) -> None:
        self.call = call
        self.error = error

    def __call__(self) -> None:
        (status,) = self.call()
        if status:
            raise self.error(status)


class Driver(Protocol):
    """What a runtime needs of a driver.

    Attributes:
        name: ``"cuda"`` or ``"host"``; the device string is ``f"{name}:{ordinal}"`` (plain ``"host"``).
    """

    name: str

    # Device and context. The primary context only.
    def driver_version(self) -> int: ...
    def device_count(self) -> int: ...
    def device_name(self, device: int) -> str: ...
    def device_attribute(self, device: int, attribute: str) -> int:
        """A ``CU_DEVICE_ATTRIBUTE_*`` value by its name without the prefix, e.g. ``"MULTIPROCESSOR_COUNT"``."""
        ...

    def primary_ctx_retain(self, device: int) -> int: ...
    def primary_ctx_release(self, device: int) -> None: ...
    def ctx_get_current(self) -> int: ...
    def ctx_push_current(self, context: int) -> None: ...
    def ctx_pop_current(self) -> int: ...

    # Streams. stream_create makes a non-blocking stream.
    def stream_create(self) -> int: ...
    def stream_destroy(self, stream: int) -> None: ...
    def stream_synchronize(self, stream: int) -> None: ...
    def stream_query(self, stream: int) -> bool: ...
    def stream_wait_event(self, stream: int, event: int) -> None: ...

    # Events.
    def event_create(self, timing: bool) -> int: ...
    def event_destroy(self, event: int) -> None: ...
    def event_record(self, event: int, stream: int) -> None: ...
    def event_query(self, event: int) -> bool: ...
    def event_synchronize(self, event: int) -> None: ...
    def event_elapsed_time(self, start: int, end: int) -> float:
        """Milliseconds between two recorded, completed timing events."""
        ...

    # Memory. Host addresses are integers too; the caller keeps the memory behind them alive.
    def mem_alloc(self, nbytes: int) -> int: ...
    def mem_free(self, ptr: int) -> None:
        """Gives memory back at once; on a GPU it waits until the whole device has nothing left to do."""
        ...

    def mem_free_async(self, ptr: int, stream: int) -> None:
        """Gives memory of :meth:`mem_alloc` back once the work queued on ``stream`` is done; waits for nothing."""
        ...

    def mem_get_info(self) -> tuple[int, int]:
        """(free, total) bytes of device memory."""
        ...

    def mem_host_alloc(self, nbytes: int) -> int: ...
    def mem_host_free(self, address: int) -> None: ...
    def memcpy_htod_async(self, dst: int, src: int, nbytes: int, stream: int) -> None: ...
    def memcpy_dtoh_async(self, dst: int, src: int, nbytes: int, stream: int) -> None: ...
    def memcpy_dtod_async(self, dst: int, src: int, nbytes: int, stream: int) -> None: ...
    def memset_d8_async(self, dst: int, value: int, nbytes: int, stream: int) -> None: ...
    def pointer_info(self, ptr: int) -> PointerInfo | None:
        """None where the driver does not know the address."""
        ...

    def tensor_map_encode_tiled(
        self,
        data_type: str,
        address: int,
        extents: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
    ) -> bytes:
        """The 128 bytes of a ``CUtensorMap`` with the 128-byte swizzle; what lies outside the tensor reads as zero.

        ``data_type`` is a ``CU_TENSOR_MAP_DATA_TYPE_*`` name without the prefix. Dimensions run from the innermost
        outwards; ``strides`` are bytes, of all dimensions but the innermost.
        """
        ...

    def tensor_map_replace_address(self, tensor_map: int, address: int) -> None:
        """Let a ``CUtensorMap``, at a host address that is a multiple of 64, describe memory at ``address``."""
        ...

    def ready_tensor_map_replace_address(self, tensor_map: int) -> Callable[[int], None]:
        """:meth:`tensor_map_replace_address` of this map, for any address; makes no driver call."""
        ...

    # Modules and functions.
    def module_load(self, image: bytes) -> int: ...
    def module_unload(self, module: int) -> None: ...
    def module_get_function(self, module: int, entry: str) -> int: ...
    def func_attribute(self, function: int, attribute: str) -> int:
        """A ``CU_FUNC_ATTRIBUTE_*`` value by its name without the prefix, e.g. ``"NUM_REGS"``."""
        ...

    def func_set_max_dynamic_shared(self, function: int, nbytes: int) -> None: ...
    def func_param_info(self, function: int) -> tuple[ParamInfo, ...] | None:
        """Offset and size of each parameter; None where the driver (before 12.4) cannot say."""
        ...

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
        """``params`` is the address of an array of pointers, one to each argument's value.

        The blocks of a ``cooperative`` launch run at the same time, or it is refused.
        """
        ...

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
        """:meth:`launch_kernel`, to be made many times; makes no driver call."""
        ...

    # Capture and graphs.
    def stream_begin_capture(self, stream: int, mode: CaptureMode) -> None: ...
    def stream_end_capture(self, stream: int) -> int:
        """The captured graph; raises, with no graph left to destroy, where the capture was invalidated."""
        ...

    def stream_capture_status(self, stream: int) -> CaptureStatus: ...
    def stream_capture_dependencies(self, stream: int) -> tuple[int, ...]:
        """The nodes that the next work captured on ``stream`` will come after: right after work was, its own node."""
        ...

    def thread_exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode: ...
    def graph_node_types(self, graph: int) -> tuple[str, ...]:
        """``CUgraphNodeType`` names without the prefix, in the driver's order: ``("KERNEL", "MEMSET")``."""
        ...

    def graph_edges(self, graph: int) -> tuple[tuple[int, int], ...]:
        """The dependencies between nodes, as (before, after) pairs."""
        ...

    def graph_kernel_node_set_params(
        self, node: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int, params: int
    ) -> None:
        """As :meth:`launch_kernel`, of a node that a launch was captured as; the argument values are copied.

        A cooperative launch remains one.
        """
        ...

    def graph_memcpy_node_set_params(self, node: int, dst: int, src: int, nbytes: int, context: int) -> None:
        """A device-to-device copy."""
        ...

    def graph_memset_node_set_params(self, node: int, dst: int, value: int, nbytes: int, context: int) -> None: ...
    def graph_instantiate(self, graph: int) -> int: ...
    def graph_destroy(self, graph: int) -> None: ...
    def graph_exec_destroy(self, graph_exec: int) -> None: ...
    def graph_exec_kernel_node_set_params(
        self, graph_exec: int, node: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int, params: int
    ) -> None:
        """Change ``node`` for launches of the executable from now on; ``node`` belongs to the graph it was made from.

        The other ``graph_exec_*_set_params`` do the same to copies and fills. None waits for launches under way.
        """
        ...

    def graph_exec_memcpy_node_set_params(
        self, graph_exec: int, node: int, dst: int, src: int, nbytes: int, context: int
    ) -> None: ...
    def graph_exec_memset_node_set_params(
        self, graph_exec: int, node: int, dst: int, value: int, nbytes: int, context: int
    ) -> None: ...
    def graph_exec_update(self, graph_exec: int, graph: int) -> None:
        """Give every node the parameters that it has in ``graph``; refused, with the reason, if the two differ else."""
        ...

    def graph_upload(self, graph_exec: int, stream: int) -> None: ...
    def graph_launch(self, graph_exec: int, stream: int) -> None: ...
    def ready_graph_launch(self, graph_exec: int, stream: int) -> ReadyCall:
        """:meth:`graph_launch`, to be made many times; makes no driver call."""
        ...
