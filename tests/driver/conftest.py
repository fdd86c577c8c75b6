"""Fixtures of the driver tests."""

from __future__ import annotations

import pytest

from tests.driver.host_rig import Rig


@pytest.fixture
def rig() -> Rig:
    """A fresh host driver with its context current and one stream."""
    return Rig()
