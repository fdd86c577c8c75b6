"""Tensor maps on the host driver: what they hold, and what is refused as the CUDA driver refuses it."""

from __future__ import annotations

import ctypes

import pytest

from nxrt_cuda.driver.host_tensor_map import HostTensorMap
from nxrt_cuda.errors import DriverError
from tests.driver.host_rig import Rig

GOOD = {
    "data_type": "BFLOAT16",
    "address": 0x7000,
    "extents": (96, 700, 12),
    "strides": (192, 192 * 800),
    "box": (64, 128, 1),
}


def test_a_map_holds_what_it_was_made_from(rig: Rig) -> None:
    """128 bytes, which an entry can read."""
    encoded = rig.driver.tensor_map_encode_tiled(**GOOD)
    assert len(encoded) == 128
    assert HostTensorMap.decode(encoded) == HostTensorMap(**GOOD)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_type": "FLOAT17"}, "data type 'FLOAT17'"),
        ({"address": 0}, "address 0x0 is null or not a multiple of 16"),
        ({"address": 0x7008}, "address 0x7008 is null or not a multiple of 16"),
        ({"extents": (96, 0, 12)}, r"extents \(96, 0, 12\) are outside \[1, 2\*\*32\]"),
        ({"strides": (200, 192 * 800)}, "are not multiples of 16"),
        ({"strides": (192, 2**40)}, r"in \[0, 2\*\*40\)"),
        ({"strides": (192,)}, "1 strides and 3 box extents for rank 3"),
        ({"box": (64, 257, 1)}, r"box \(64, 257, 1\) is outside \[1, 256\]"),
        ({"box": (72, 128, 1)}, "box rows of 144 bytes"),
        ({"box": (4, 128, 1)}, "box rows of 8 bytes"),
        ({"extents": (), "strides": (), "box": ()}, r"rank 0 is outside \[1, 5\]"),
    ],
)
def test_bad_maps_are_refused(rig: Rig, changes: dict[str, object], message: str) -> None:
    """The message names the value and the limit."""
    with pytest.raises(DriverError, match=message) as refusal:
        rig.driver.tensor_map_encode_tiled(**{**GOOD, **changes})
    assert refusal.value.name == "CUDA_ERROR_INVALID_VALUE"


def test_another_address_is_all_that_changes(rig: Rig) -> None:
    """In place; what the driver refuses leaves the map as it was."""
    buffer = ctypes.create_string_buffer(192)
    place = -(-ctypes.addressof(buffer) // 64) * 64
    ctypes.memmove(place, rig.driver.tensor_map_encode_tiled(**GOOD), 128)
    rig.driver.tensor_map_replace_address(place, 0x9000)
    moved = ctypes.string_at(place, 128)
    assert moved == rig.driver.tensor_map_encode_tiled(**{**GOOD, "address": 0x9000})
    with pytest.raises(DriverError, match="address 0x9008 is null or not a multiple of 16"):
        rig.driver.tensor_map_replace_address(place, 0x9008)
    with pytest.raises(DriverError, match="is not a multiple of 64"):
        rig.driver.tensor_map_replace_address(place + 16, 0x9000)
    assert ctypes.string_at(place, 128) == moved


@pytest.mark.parametrize("data", [b"", bytes(128), b"nxrt map"])
def test_other_bytes_are_no_map(data: bytes) -> None:
    """A kernel entry that was given something else hears of it."""
    with pytest.raises(ValueError, match="that are no tensor map"):
        HostTensorMap.decode(data)
