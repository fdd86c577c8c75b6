"""The decode loop of the examples: growing lengths in one graph, with no recapture."""

from __future__ import annotations

import re

from tests.test_examples import EXAMPLES, output_of


def test_the_context_grows_in_one_graph() -> None:
    """Selections equal the oracle's, attention is within rounding of float64, and every step is one replay."""
    text = output_of(EXAMPLES / "decode_loop.py")
    rows = re.findall(r"^ +(\d+) +(\d+)   (\d\.\de[+-]\d+)$", text, re.MULTILINE)
    assert [(int(length), int(selected)) for length, selected, _ in rows] == [
        (1, 1),
        (8, 8),
        (16, 16),
        (32, 16),
        (64, 16),
        (96, 16),
    ]
    assert all(float(error) <= 1e-5 for *_, error in rows)
    assert "DIFFERS" not in text
    assert "96 steps: 0 captures, 96 replays, 0 launches, 0 compiles" in text
    assert re.search(r"^  captures +1$", text, re.MULTILINE)
    assert len(re.findall(r"^  \w+ +[\w.]+::\w+ +captured$", text, re.MULTILINE)) == 3
