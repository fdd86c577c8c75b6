"""For the tests of programs that use this package: count what a runtime does, and a pytest fixture.

.. code-block:: python

    # conftest.py
    pytest_plugins = ["nxrt_cuda.testing"]

    # test_mine.py
    def test_step_launches_twice_and_allocates_nothing(nxrt_runtime):
        step = make_step(nxrt_runtime)
        step()
        with count(nxrt_runtime) as seen:
            step()
        assert (seen.launches, seen.allocations, seen.compiles) == (2, 0, 0)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nxrt_cuda.devices import open_runtime
from nxrt_cuda.runtime import CudaRuntime
from nxrt_cuda.stats import RuntimeStats

__all__ = ["Counts", "count", "nxrt_runtime"]


class Counts:
    """What a runtime has done since :func:`count` began; frozen when its ``with`` ends."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._before = runtime.stats()
        self._after: RuntimeStats | None = None

    @property
    def stats(self) -> RuntimeStats:
        """All counters, as differences."""
        return (self._after or self._runtime.stats()).since(self._before)

    @property
    def launches(self) -> int:
        """Kernels handed to the driver; launches inside a replayed graph are not among them."""
        return self.stats.launches

    @property
    def allocations(self) -> int:
        """Device memory handed out, by the driver or from the pool."""
        return self.stats.driver_allocations + self.stats.pool_hits

    @property
    def htod_copies(self) -> int:
        """Copies to the device."""
        return self.stats.htod_copies

    @property
    def dtoh_copies(self) -> int:
        """Copies to the host."""
        return self.stats.dtoh_copies

    @property
    def compiles(self) -> int:
        """Specialisations compiled, not found in the disk cache."""
        return self.stats.modules_compiled

    @property
    def replays(self) -> int:
        """Graph segments replayed."""
        return self.stats.graph_replays

    def freeze(self) -> None:
        """Stop counting."""
        self._after = self._after or self._runtime.stats()

    def __repr__(self) -> str:
        changed = {name: value for name, value in vars(self.stats).items() if value}
        return f"Counts({changed})"


@contextmanager
def count(runtime: CudaRuntime) -> Iterator[Counts]:
    """Count what ``runtime`` does in a ``with`` block; the counts stay readable after it."""
    counts = Counts(runtime)
    try:
        yield counts
    finally:
        counts.freeze()


@pytest.fixture
def nxrt_runtime() -> Iterator[CudaRuntime]:
    """A runtime on the GPU where there is one, else on the host driver; closed after the test."""
    with open_runtime() as runtime:
        yield runtime
