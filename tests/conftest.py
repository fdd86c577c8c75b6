"""Fixtures of the whole suite, and the record of the last run on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import nxrt_cuda as nx
from tests.gpu_record import NO_GPU, record_line
from tests.small_kernels import HOST_ENTRIES

pytest_plugins = ["nxrt_cuda.testing"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write tests/gpu/last_run.json after the GPU tests")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.getreports("skipped") if str(report.longrepr[2]).endswith(NO_GPU)]
    terminalreporter.write_line(record_line(len(skipped)))


@pytest.fixture(autouse=True)
def _private_program_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share one program cache, never the user's: a fresh one, or the one that NXRT_TEST_CACHE_DIR names."""
    directory = os.environ.get("NXRT_TEST_CACHE_DIR") or str(tmp_path_factory.getbasetemp() / "program-cache")
    monkeypatch.setenv("NXRT_CUDA_CACHE_DIR", directory)


@pytest.fixture
def rt() -> Iterator[nx.CudaRuntime]:
    """A runtime on the host driver that must give everything back when it is closed."""
    runtime = nx.open_runtime("host", host_entries=HOST_ENTRIES)
    driver = runtime._driver
    yield runtime
    runtime.close()
    if not isinstance(runtime._session.refusal and runtime._session.refusal(), nx.DeviceFaultError):
        assert not driver.live(), f"leaked: {driver.live()}"


@pytest.fixture
def data() -> Path:
    """The directory of recorded inputs."""
    return Path(__file__).parent / "data"
