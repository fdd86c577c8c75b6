"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import nxrt_cuda as nx
from tests import small_kernels
from tests.engine.operators import HOST_ENTRIES, registered_combine


@pytest.fixture(autouse=True)
def _combine_is_registered() -> Iterator[None]:
    with registered_combine():
        yield


@pytest.fixture
def rt() -> Iterator[nx.CudaRuntime]:
    """A runtime on the host driver that must give everything back when it is closed."""
    runtime = nx.open_runtime("host", host_entries={**small_kernels.HOST_ENTRIES, **HOST_ENTRIES})
    driver = runtime._driver
    yield runtime
    runtime.close()
    assert not driver.live(), f"leaked: {driver.live()}"
