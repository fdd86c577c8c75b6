"""Fixtures for tests on a GPU: skipped with the reason where there is none, recorded with --record."""

from __future__ import annotations

import datetime
import json
import os
from collections import Counter
from collections.abc import Iterator

import pytest

import nxrt_cuda as nx
from tests.gpu_record import NO_GPU, RECORD, source_digest

_outcomes: dict[str, Counter[str]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def gpu() -> str:
    """The name of the first GPU; skips without one, or fails where NXRT_REQUIRE_CUDA=1 demands one."""
    try:
        with nx.open_runtime("cuda:0") as runtime:
            return runtime.device_name
    except nx.NoDeviceError:
        if os.environ.get("NXRT_REQUIRE_CUDA") == "1":
            raise
        pytest.skip(NO_GPU)


@pytest.fixture
def rt(gpu: str) -> Iterator[nx.CudaRuntime]:
    """A runtime on the first GPU."""
    with nx.open_runtime("cuda:0") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def context_stays(gpu: str) -> Iterator[None]:
    """One runtime stays open, so that the context is not made anew for every test."""
    with nx.open_runtime("cuda:0"):
        yield


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.nodeid.split("::", 1)[0]
    if file.startswith("tests/gpu/") and (report.when == "call" or report.outcome != "passed"):
        _outcomes.setdefault(file, Counter())[report.outcome] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the record of a run without failures; of another, say so and leave the record as it is."""
    if not config.getoption("--record"):
        return
    total = sum(_outcomes.values(), Counter())
    if total["failed"] or not total["passed"]:
        terminalreporter.write_line(f"gpu: not recorded, {dict(total)}")
    else:
        RECORD.write_text(json.dumps(_record(), indent=2) + "\n")


def _record() -> dict[str, object]:
    """This run, file by file, added to what was recorded of the same sources and tests."""
    from nxrt_cuda.driver.cuda import CudaDriver
    from nxrt_cuda.nvrtc import load_nvrtc

    driver = CudaDriver()
    version = driver.driver_version()
    run = {
        "sources": source_digest(),
        "device": driver.device_name(0),
        "driver": f"{version // 1000}.{version % 1000 // 10}",
        "nvrtc": str(load_nvrtc()),
    }
    files = {file: {"passed": seen["passed"], "skipped": seen["skipped"]} for file, seen in _outcomes.items()}
    if RECORD.exists():
        earlier = json.loads(RECORD.read_text())
        if all(earlier[name] == value for name, value in run.items()):
            files = {**earlier["files"], **files}
    return {
        **run,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "passed": sum(file["passed"] for file in files.values()),
        "skipped": sum(file["skipped"] for file in files.values()),
        "files": dict(sorted(files.items())),
    }
