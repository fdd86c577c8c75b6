"""A driver-level CUDA runtime: kernels, memory, and graphs recorded and replayed from Python.

Importing this package makes no driver call and imports no CUDA library. The engine and the compiles ahead of time,
which many a program does without, are imported when they are first named.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from nxrt_cuda.capture import CaptureErrorCode, DeviceGraphResource
from nxrt_cuda.context import Capabilities
from nxrt_cuda.devices import open_runtime
from nxrt_cuda.driver.base import CaptureMode, CaptureStatus
from nxrt_cuda.driver.host_image import HostLaunch
from nxrt_cuda.dtype import (
    DataType,
    bfloat16,
    bool_,
    float16,
    float32,
    float64,
    int8,
    int32,
    int64,
    uint8,
    uint32,
    uint64,
)
from nxrt_cuda.errors import (
    CaptureError,
    CompileError,
    DeviceFaultError,
    DeviceMemoryError,
    DriverError,
    EngineError,
    GraphError,
    KernelError,
    LaunchError,
    LaunchOverflowError,
    NoDeviceError,
    NxrtError,
    OutOfMemoryError,
    RuntimeStateError,
    StreamTypeError,
    TensorError,
    UnsupportedError,
)
from nxrt_cuda.fork import Fork
from nxrt_cuda.graph import CapturedGraph, GraphSlot
from nxrt_cuda.kernel import (
    CaptureSupport,
    Kernel,
    KernelFactory,
    WorkspaceRequirement,
    create_kernel,
    register,
    registered_ops,
    unsupported_reason,
)
from nxrt_cuda.launch import KernelSpec, LaunchConfig, Param, PreparedLaunch
from nxrt_cuda.modules import LoadedFunction
from nxrt_cuda.node import Node
from nxrt_cuda.ops import attention as _attention
from nxrt_cuda.ops import dsa_index_select as _dsa_index_select
from nxrt_cuda.runtime import CudaRuntime
from nxrt_cuda.stats import RuntimeStats, WorkspaceStats
from nxrt_cuda.tensor import TensorMetadata, TensorMut, TensorView
from nxrt_cuda.timing import TimingEvent
from nxrt_cuda.trace import Trace
from nxrt_cuda.transfer import PendingRead

if TYPE_CHECKING:
    from nxrt_cuda.ahead_of_time import Precompiled, PrecompileReport, precompile
    from nxrt_cuda.engine import BucketReport, Engine, EngineReport, NodeReport

__all__ = [
    "BucketReport",
    "Capabilities",
    "CaptureError",
    "CaptureErrorCode",
    "CaptureMode",
    "CaptureStatus",
    "CaptureSupport",
    "CapturedGraph",
    "CompileError",
    "CudaRuntime",
    "DataType",
    "DeviceFaultError",
    "DeviceGraphResource",
    "DeviceMemoryError",
    "DriverError",
    "Engine",
    "EngineError",
    "EngineReport",
    "Fork",
    "GraphError",
    "GraphSlot",
    "HostLaunch",
    "Kernel",
    "KernelError",
    "KernelFactory",
    "KernelSpec",
    "LaunchConfig",
    "LaunchError",
    "LaunchOverflowError",
    "LoadedFunction",
    "NoDeviceError",
    "Node",
    "NodeReport",
    "NxrtError",
    "OutOfMemoryError",
    "Param",
    "PendingRead",
    "PrecompileReport",
    "Precompiled",
    "PreparedLaunch",
    "RuntimeStateError",
    "RuntimeStats",
    "StreamTypeError",
    "TensorError",
    "TensorMetadata",
    "TensorMut",
    "TensorView",
    "TimingEvent",
    "Trace",
    "UnsupportedError",
    "WorkspaceRequirement",
    "WorkspaceStats",
    "bfloat16",
    "bool_",
    "create_kernel",
    "float16",
    "float32",
    "float64",
    "int8",
    "int32",
    "int64",
    "open_runtime",
    "precompile",
    "register",
    "registered_ops",
    "uint8",
    "uint32",
    "uint64",
    "unsupported_reason",
]

__version__ = "0.1.0"

_LATER = {
    "BucketReport": "nxrt_cuda.engine",
    "Engine": "nxrt_cuda.engine",
    "EngineReport": "nxrt_cuda.engine",
    "NodeReport": "nxrt_cuda.engine",
    "PrecompileReport": "nxrt_cuda.ahead_of_time",
    "Precompiled": "nxrt_cuda.ahead_of_time",
    "precompile": "nxrt_cuda.ahead_of_time",
}
"""Where the names are that are imported when they are first asked for."""


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
