"""The certified DsaIndexSelect for the host driver: its three kernels, made of the oracle's own parts.

Scores are the strict ones, which are within any bound of themselves; so what is left to go wrong is what the
launches hand to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from nxrt_cuda.driver.host_tensor_map import HostTensorMap
from nxrt_cuda.dtype import DataType, bfloat16, float16, float32, int64, uint8, uint32
from nxrt_cuda.reference.dsa_index_select import dsa_scores, dsa_select

if TYPE_CHECKING:
    from nxrt_cuda.driver.host_image import HostEntry, HostLaunch

__all__ = ["HOST_ENTRIES"]

_ELEMENTS: Mapping[str, DataType] = {dtype.cuda: dtype for dtype in (float16, bfloat16)}
_BLOCK_KEYS = 256
_WORD_KEYS = 32
_COLUMNS = 128
_MASK_THRESHOLD = np.float32(-1e30)
_BIASED = 1 << 31


def _extents(launch: HostLaunch) -> tuple[int, int, int, int]:
    """Batch, rows of a batch, keys, and blocks of keys."""
    batch, q_seq, key_seq = (int(launch.args[name]) for name in ("batch", "q_seq", "key_seq"))
    return batch, q_seq, key_seq, -(-key_seq // _BLOCK_KEYS)


def _prepare_entry(launch: HostLaunch) -> None:
    args = launch.args
    batch, q_seq, key_seq, blocks = _extents(launch)
    tile_rows = int(launch.macros["TILE_ROWS"])
    bias = launch.view(args["bias"], float32, (batch, q_seq, key_seq))
    allowed = np.zeros((batch, q_seq, blocks * _BLOCK_KEYS), np.bool_)
    allowed[..., :key_seq] = bias > _MASK_THRESHOLD
    counts = allowed.sum(-1, dtype=np.uint32)
    is_biased = (allowed[..., :key_seq] & (bias != 0)).any(-1)
    launch.view(args["rows"], uint32, (batch, q_seq))[...] = counts | np.where(is_biased, np.uint32(_BIASED), 0)
    words = np.packbits(allowed, axis=-1, bitorder="little").view(np.uint32)
    launch.view(args["allowed"], uint32, words.shape)[...] = words

    row_tiles = -(-q_seq // tile_rows)
    wanted = allowed & (counts > int(args["top_k"]))[..., None]
    padded = np.zeros((batch, row_tiles * tile_rows, blocks, _BLOCK_KEYS), np.bool_)
    padded[:, :q_seq] = wanted.reshape(batch, q_seq, blocks, _BLOCK_KEYS)
    by_tile = padded.reshape(batch, row_tiles, tile_rows, blocks, _BLOCK_KEYS)
    tiles = np.moveaxis(np.any(by_tile, axis=(2, 4)), 1, 2)
    flags = launch.view(args["tiles"], uint8, (-(-tiles.size // 16) * 16,))
    flags[: tiles.size] = tiles.ravel()
    flags[tiles.size :] = 0


def _score_entry(launch: HostLaunch) -> None:
    args = launch.args
    batch, q_seq, key_seq, blocks = _extents(launch)
    heads, depth = int(launch.macros["HEADS"]), int(launch.macros["HEAD_DIM"])
    element = _ELEMENTS[launch.macros["ELEMENT"]]
    query_map, key_map = (HostTensorMap.decode(args[name]) for name in ("query_map", "key_map"))
    if query_map.extents != (depth, batch * q_seq * heads, 1) or query_map.box != (64, _COLUMNS, 1):
        raise ValueError(f"{query_map} does not describe {batch} x {q_seq} rows of {heads} heads of {depth}")
    if key_map.extents != (depth, key_seq, batch) or key_map.box != (64, _BLOCK_KEYS, 1):
        raise ValueError(f"{key_map} does not describe {batch} x {key_seq} keys of {depth}")
    key = launch.view(key_map.address, element, (batch, key_seq, depth))
    stride = int(args["row_stride"])
    scores, _ = dsa_scores(
        launch.view(query_map.address, element, (batch, q_seq, heads, depth)),
        key,
        launch.view(args["weights"], element, (batch, q_seq, heads)),
        np.zeros((batch, 1, q_seq, key_seq), np.float32),
        scale=args["scale"],
        weights_scale=args["weights_scale"],
    )
    wanted = np.ones((batch, q_seq, key_seq), np.bool_)
    if args["tiles"]:
        row_tiles = -(-q_seq * heads // _COLUMNS)
        tiles = launch.view(args["tiles"], uint8, (batch, blocks, row_tiles)).transpose(0, 2, 1)
        rows = tiles.repeat(_COLUMNS // heads, axis=1)[:, :q_seq]
        wanted = rows.repeat(_BLOCK_KEYS, axis=2)[..., :key_seq] != 0
    out = launch.view(args["scores"], float32, (batch, q_seq, stride))
    np.copyto(out[..., :key_seq], scores, where=wanted)

    with np.errstate(all="ignore"):
        norms = np.zeros((batch, blocks * _BLOCK_KEYS), np.float32)
        norms[:, :key_seq] = np.sqrt(np.square(key.astype(np.float32)).sum(-1)) + np.float32(args["norm_floor"])
    is_regular = np.isfinite(norms)
    words = launch.view(args["key_words"], uint32, (batch, norms.shape[1] // _WORD_KEYS, 2))
    words[..., 0] = np.packbits(~is_regular, axis=-1, bitorder="little").view(np.uint32)
    greatest = np.where(is_regular, norms, 0).reshape(*words.shape[:2], _WORD_KEYS).max(-1)
    words[..., 1] = greatest.view(np.uint32)


def _certify_entry(launch: HostLaunch) -> None:
    args = launch.args
    rows, key_seq, stride, top_k = (int(args[name]) for name in ("total_rows", "key_seq", "row_stride", "top_k"))
    bias = launch.view(args["bias"], float32, (rows, key_seq))
    allowed = bias > _MASK_THRESHOLD
    if args["allowed"]:
        words = launch.view(args["allowed"], uint32, (rows, -(-key_seq // _BLOCK_KEYS) * _BLOCK_KEYS // _WORD_KEYS))
        allowed = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")[:, :key_seq] != 0
    with np.errstate(all="ignore"):
        scores = launch.view(args["scores"], float32, (rows, stride))[:, :key_seq] + bias
    scores[np.isnan(scores)] = np.uint32(0x7FC00000).view(np.float32)
    launch.view(args["out"], int64, (rows, top_k))[...] = dsa_select(scores, allowed, top_k)


HOST_ENTRIES: dict[str, HostEntry] = {
    "dsa_index_select_prepare": _prepare_entry,
    "dsa_index_select_score_sm90": _score_entry,
    "dsa_index_select_certify": _certify_entry,
}
