"""The examples on a GPU: as without one, and on the tensors and streams of PyTorch and CuPy."""

from __future__ import annotations

import pytest

# Collected here, they find the GPU by themselves, as the examples do.
from tests.test_examples import (  # noqa: F401
    EXAMPLES,
    encoder_importable,
    output_of,
    test_count_launches_passes_under_pytest,
    test_record_and_replay_selects_as_eager_does,
    test_sentence_encoder_matches_float64_on_a_tiny_model,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.parametrize(
    ("script", "library", "result"),
    [
        ("torch_tensors.py", "torch", "replayed with a new query: largest difference to PyTorch"),
        ("cupy_tensors.py", "cupy", "as CuPy sorts"),
    ],
)
def test_framework_tensors_are_used_where_they_lie(script: str, library: str, result: str) -> None:
    """Nothing is copied, and the framework computes the same."""
    pytest.importorskip(library)
    text = output_of(EXAMPLES / script)
    assert result in text
    assert "copies to the device 0, from it 0, on it 0" in text
    assert "TOO LARGE" not in text
    assert "DIFFERS" not in text
