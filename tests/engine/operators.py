"""An operator for the engine's tests, made of one small kernel, and random sequences of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import nxrt_cuda as nx
from nxrt_cuda import kernel as registry
from nxrt_cuda.driver.host import HostEntry, HostLaunch
from tests.small_kernels import SmallKernel

__all__ = ["HOST_ENTRIES", "Nodes", "combine", "evaluate", "random_nodes", "registered_combine"]

Nodes = list[tuple[nx.Node, list[str], list[str]]]

COMBINE = SmallKernel(
    "combine",
    (("out", "ptr"), ("a", "ptr"), ("b", "ptr"), ("factor", "f32"), ("n", "i32")),
    """
    extern "C" __global__ void combine(float* out, const float* a, const float* b, float factor, int n) {
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) out[i] = factor * a[i] + (b ? b[i] : 0.0f);
    }
    """,
)


def _combine(launch: HostLaunch) -> None:
    shape = (int(launch.args["n"]),)
    a = launch.view(launch.args["a"], nx.float32, shape)
    b = launch.view(launch.args["b"], nx.float32, shape) if launch.args["b"] else np.float32(0)
    launch.view(launch.args["out"], nx.float32, shape)[:] = np.float32(launch.args["factor"]) * a + b


HOST_ENTRIES: dict[str, HostEntry] = {"combine": _combine}


class CombineKernel(nx.Kernel):
    """``out = factor * a + b``; declines capture where the attribute ``decline`` gives a reason."""

    def __init__(self, runtime: nx.CudaRuntime, node: nx.Node) -> None:
        self._runtime = runtime
        self._factor = node.float_attr("factor", 0.5)
        self._decline = node.attributes.get("decline")
        self._executions = 0

    def execute(self, inputs: Sequence[nx.TensorView | None], outputs: Sequence[nx.TensorMut]) -> None:
        pointers = [0 if view is None else view for view in (*inputs, *(None,) * (2 - len(inputs)))]
        elements = outputs[0].metadata.elements
        launch = COMBINE.prepare(self._runtime, elements, outputs[0], *pointers, self._factor, elements)
        self._runtime.launch(launch)
        self._executions += 1

    def capture_support(self) -> nx.CaptureSupport:
        return nx.CaptureSupport(self._decline)

    def launch_stats(self) -> int:
        return self._executions

    def workspace_stats(self) -> nx.WorkspaceStats:
        return nx.WorkspaceStats()


class CombineFactory(nx.KernelFactory):
    def create(self, node: nx.Node, shapes: Sequence[tuple[int, ...] | None]) -> CombineKernel:
        return CombineKernel(self.runtime, node)

    @classmethod
    def output_metadata(
        cls, node: nx.Node, inputs: Sequence[nx.TensorMetadata | None]
    ) -> tuple[nx.TensorMetadata, ...]:
        assert inputs[0] is not None
        return (nx.TensorMetadata(nx.float32, inputs[0].shape),)

    @classmethod
    def batch_inputs(cls, node: nx.Node, inputs: Sequence[nx.TensorMetadata | None]) -> tuple[int, ...]:
        return () if "mixes rows" in node.attributes else (0, 1)


class SilentFactory(nx.KernelFactory):
    """Does not say what its outputs are."""

    def create(self, node: nx.Node, shapes: Sequence[tuple[int, ...] | None]) -> nx.Kernel:
        raise AssertionError("an engine must not get here")


def _unsupported_reason(node: nx.Node, shapes: Sequence[Any], dtypes: Sequence[Any]) -> str | None:
    present = {shape for shape in shapes if shape is not None}
    return None if len(present) == 1 else f"Combine: shapes {' and '.join(map(str, shapes))} differ"


@contextmanager
def registered_combine() -> Iterator[None]:
    """``test::Combine`` and ``test::Silent`` are operators, for the length of a test."""
    before = dict(registry._registry)
    nx.register("test", "Combine", CombineFactory, _unsupported_reason)
    nx.register("test", "Silent", SilentFactory, lambda node, shapes, dtypes: None)
    try:
        yield
    finally:
        registry._registry.clear()
        registry._registry.update(before)


def combine(inputs: Sequence[str], output: str, **attributes: Any) -> tuple[nx.Node, list[str], list[str]]:
    """One node of it, named after its output."""
    return nx.Node("Combine", "test", attributes, name=f"make {output}"), list(inputs), [output]


def random_nodes(rng: np.random.Generator, count: int, *, declined: float = 0.0) -> tuple[Nodes, list[str]]:
    """``count`` nodes that start from "x" and "y", in an order that runs, and the names that nobody reads."""
    names, nodes, unread = ["x", "y"], [], {"x", "y"}
    for index in range(count):
        # The first reads both inputs. Recent tensors are read more often, as in a network.
        picked = ["x", "y"] if index == 0 else [names[-1 - int(rng.geometric(0.5)) % len(names)] for _ in range(2)]
        picked = picked[: 1 + int(rng.integers(2))] if index else picked
        attributes: dict[str, Any] = {"factor": float(rng.choice([0.5, -0.25, 0.125]))}
        if rng.random() < declined:
            attributes["decline"] = f"reason {index}"
        nodes.append(combine(picked, f"t{index}", **attributes))
        unread = (unread - set(picked)) | {f"t{index}"}
        names.append(f"t{index}")
    return nodes, sorted(unread)


def evaluate(nodes: Nodes, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What ``nodes``, in an order that runs, make of ``values``."""
    known = dict(values)
    for node, inputs, (output,) in nodes:
        a, b = known[inputs[0]], known[inputs[1]] if len(inputs) > 1 and inputs[1] else np.float32(0)
        known[output] = np.float32(node.attributes.get("factor", 0.5)) * a + b
    return known
