"""A driver-level CUDA runtime: kernels, memory, and graphs recorded and replayed from Python.

Importing this package makes no driver call and imports no CUDA library.
"""

from nxrt_cuda.devices import open_runtime
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
    GraphError,
    KernelError,
    LaunchError,
    LaunchOverflowError,
    NoDeviceError,
    NxrtError,
    OutOfMemoryError,
    RuntimeStateError,
    TensorError,
    UnsupportedError,
)
from nxrt_cuda.graph import CapturedGraph, GraphSlot
from nxrt_cuda.kernel import (
    CaptureErrorCode,
    CaptureSupport,
    DeviceGraphResource,
    Kernel,
    KernelFactory,
    WorkspaceRequirement,
    create_kernel,
    register,
    registered_ops,
    unsupported_reason,
)
from nxrt_cuda.launch import KernelSpec, LaunchConfig, Param, PreparedLaunch
from nxrt_cuda.node import Node
from nxrt_cuda.ops import attention as _attention
from nxrt_cuda.ops import dsa_index_select as _dsa_index_select
from nxrt_cuda.runtime import CudaRuntime
from nxrt_cuda.stats import RuntimeStats, WorkspaceStats
from nxrt_cuda.tensor import TensorMetadata, TensorMut, TensorView

__all__ = [
    "CaptureError",
    "CaptureErrorCode",
    "CaptureSupport",
    "CapturedGraph",
    "CompileError",
    "CudaRuntime",
    "DataType",
    "DeviceFaultError",
    "DeviceGraphResource",
    "DeviceMemoryError",
    "DriverError",
    "GraphError",
    "GraphSlot",
    "Kernel",
    "KernelError",
    "KernelFactory",
    "KernelSpec",
    "LaunchConfig",
    "LaunchError",
    "LaunchOverflowError",
    "NoDeviceError",
    "Node",
    "NxrtError",
    "OutOfMemoryError",
    "Param",
    "PreparedLaunch",
    "RuntimeStateError",
    "RuntimeStats",
    "TensorError",
    "TensorMetadata",
    "TensorMut",
    "TensorView",
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
    "register",
    "registered_ops",
    "uint8",
    "uint32",
    "uint64",
    "unsupported_reason",
]

__version__ = "0.1.0"
