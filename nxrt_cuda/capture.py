"""What a graph needs of the kernels that it records: what it has to keep alive, and how they report from replays."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import Any

__all__ = ["CaptureErrorCode", "DeviceGraphResource"]


class CaptureErrorCode(IntFlag):
    """What kernels latch into the capture-error word: a device value that they had to clamp.

    Kernels receive the values as macros, so that this is their only definition.
    """

    NONE = 0
    TOTAL_LENGTH = 1
    PAST_LENGTH = 2


@dataclass(frozen=True)
class DeviceGraphResource:
    """Something that a captured graph must keep alive for its replays.

    Attributes:
        key: identity; two resources with one key are the same.
        resource: the object to hold.
    """

    key: int
    resource: Any
