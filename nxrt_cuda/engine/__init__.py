"""Fixed sequences of kernels, planned once and replayed: see :class:`Engine`."""

from nxrt_cuda.engine.engine import Engine
from nxrt_cuda.engine.report import BucketReport, EngineReport, NodeReport

__all__ = ["BucketReport", "Engine", "EngineReport", "NodeReport"]
