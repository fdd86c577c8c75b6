"""Assert in a pytest test how often your code launches, allocates, copies and compiles.

``count(rt)`` snapshots the runtime's counters around a block; the fixture ``nxrt_runtime`` opens a runtime on
a GPU if there is one, and on the host driver if not, so the same test runs in both places.

    python examples/count_launches.py

A project of its own names the plugin in its conftest.py: ``pytest_plugins = ["nxrt_cuda.testing"]``.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

import nxrt_cuda as nx
from nxrt_cuda import testing
from nxrt_cuda.testing import count


class Retriever:
    """The code under test: keeps keys on the device, and selects the best of them for a query."""

    def __init__(self, rt: nx.CudaRuntime, keys: np.ndarray, top_k: int) -> None:
        rows, dim = keys.shape
        self._rt = rt
        self._inputs = [
            rt.empty((1, 1, 1, dim), nx.float32),
            rt.from_array(keys[None]),
            rt.from_array(np.ones((1, 1, 1), np.float32)),
            rt.from_array(np.zeros((1, 1, 1, rows), np.float32)),
        ]
        self._selected = rt.empty((1, 1, 1, top_k), nx.int64)
        node = nx.Node("DsaIndexSelect", domain="pkg.nxrt", attributes={"top_k": top_k, "scale": 1.0})
        self._kernel = nx.create_kernel(rt, node, [tensor.shape for tensor in self._inputs])

    def search(self, query: np.ndarray) -> list[int]:
        self._inputs[0].copy_from(query.reshape(self._inputs[0].shape))
        self._kernel.execute(self._inputs, [self._selected])
        return self._selected.numpy().ravel().tolist()

    def record(self) -> nx.CapturedGraph:
        with self._rt.capture([self._kernel]) as graph:
            self._kernel.execute(self._inputs, [self._selected])
        return graph


def test_a_warm_search_is_two_launches_and_nothing_else(nxrt_runtime: nx.CudaRuntime) -> None:
    """Once warm, a search uploads the query, scores, selects and reads back: no allocation, no compile."""
    retriever = Retriever(nxrt_runtime, np.eye(32, dtype=np.float32), top_k=2)
    retriever.search(np.zeros(32, np.float32))

    with count(nxrt_runtime) as seen:
        found = retriever.search(np.arange(32, dtype=np.float32))

    assert found == [30, 31]
    assert seen.launches == 2
    assert seen.htod_copies == seen.dtoh_copies == 1
    assert seen.allocations == 0
    assert seen.compiles == 0


def test_a_replayed_search_launches_nothing(nxrt_runtime: nx.CudaRuntime) -> None:
    """A captured search is one graph replay: the kernel object launches nothing itself."""
    retriever = Retriever(nxrt_runtime, np.eye(32, dtype=np.float32), top_k=2)
    retriever.search(np.zeros(32, np.float32))
    graph = retriever.record()

    with count(nxrt_runtime) as seen:
        graph.replay()

    assert seen.replays == 1
    assert seen.launches == seen.allocations == seen.compiles == 0


if __name__ == "__main__":
    sys.exit(pytest.main(["--quiet", "-p", "no:cacheprovider", __file__], plugins=[testing]))
