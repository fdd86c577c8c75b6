"""The record of the last run on a GPU: what makes it stale, and that every run tells of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import gpu_record
from tests.gpu_record import ROOT, digest_of, record_line, source_digest

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    "path",
    [
        "kernels/common/element.cuh",
        "nxrt_cuda/runtime.py",
        "tests/conftest.py",
        "tests/gpu/test_runtime_gpu.py",
        "tests/test_graph.py",
        "tests/attention_cases.py",
        "tests/dsa_cases.py",
        "tests/small_kernels.py",
    ],
)
def test_sources_and_the_tests_that_were_run_are_in_the_digest(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the GPU tests import from included."""
    covered: set[Path] = set()
    monkeypatch.setattr(gpu_record, "digest_of", covered.update)
    source_digest()
    assert ROOT / path in covered


def test_what_no_gpu_test_uses_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    covered: set[Path] = set()
    monkeypatch.setattr(gpu_record, "digest_of", covered.update)
    source_digest()
    assert ROOT / "tests" / "test_program_cache.py" not in covered


def test_a_digest_is_of_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_record, "ROOT", tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    before = digest_of([one, two])
    assert digest_of([two, one]) == before
    two.write_bytes(b"3")
    assert digest_of([one, two]) != before
    two.write_bytes(b"2")
    assert digest_of([one, two]) == before
    assert digest_of([one, two.rename(tmp_path / "three")]) != before


def test_a_record_is_current_or_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_record, "RECORD", tmp_path / "last_run.json")
    assert record_line(0) == "gpu: record: none"
    record = {"sources": source_digest(), "passed": 700, "device": "NVIDIA Test", "date": "2026-01-02"}
    gpu_record.RECORD.write_text(json.dumps(record))
    assert record_line(0) == "gpu: record: 700 passed on NVIDIA Test, 2026-01-02, of these sources and tests"
    gpu_record.RECORD.write_text(json.dumps({**record, "sources": "another digest"}))
    assert record_line(3) == "gpu: 3 tests skipped, no GPU; record: 700 passed on NVIDIA Test, 2026-01-02, STALE"


def test_a_quiet_run_says_so_too(pytester: pytest.Pytester) -> None:
    """One line at its end, which counts the tests that were skipped for want of a GPU and no others."""
    pytester.makeconftest("from tests.conftest import pytest_terminal_summary")
    pytester.makepyfile(
        """
        import pytest
        from tests.gpu_record import NO_GPU

        @pytest.mark.parametrize("number", range(3))
        def test_on_a_gpu(number): pytest.skip(NO_GPU)

        def test_of_something_else(): pytest.skip("needs something else")
        """
    )
    result = pytester.runpytest("--quiet", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["gpu: 3 tests skipped, no GPU; record: *"])
