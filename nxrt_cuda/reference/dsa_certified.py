"""The certified DsaIndexSelect for the host driver: its kernels, made of the oracle's own parts.

Scores are strict ones of what is multiplied, and the selection goes by those of the operands once it has seen that they
lie within the bound; so what is left to go wrong is what the launches hand to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nxrt_cuda.driver.host_tensor_map import HostTensorMap
from nxrt_cuda.dtype import DataType, bfloat16, float16, float32, int64, uint8, uint32, uint64
from nxrt_cuda.reference.dsa_index_select import dsa_scores, dsa_select

if TYPE_CHECKING:
    from nxrt_cuda.driver.host_image import HostEntry, HostLaunch

__all__ = ["HOST_ENTRIES"]

_ELEMENTS: Mapping[str, DataType] = {dtype.cuda: dtype for dtype in (float32, float16, bfloat16)}
_WORD_KEYS = 32
_MASK_THRESHOLD = np.float32(-1e30)
_BIASED = 1 << 31
_MASKED_SCORE = 0xFFFFFFFF
_REGULAR_ROW, _EXACT_ROW = 1, 2


def _split_entry(launch: HostLaunch) -> None:
    args, depth = launch.args, int(launch.macros["HEAD_DIM"])
    for name in ("query", "key"):
        vectors = int(args[f"{name}_vectors"])
        values = launch.view(args[name], float32, (vectors, depth))
        split = launch.view(args[f"{name}_parts"], bfloat16, (vectors, 2, depth))
        with np.errstate(all="ignore"):
            split[:, 0] = values
            split[:, 1] = values - split[:, 0].astype(np.float32)


def _extents(launch: HostLaunch) -> tuple[int, int, int, int, int]:
    """Batch, rows of a batch, keys, keys of a block, and blocks."""
    batch, q_seq, key_seq = (int(launch.args[name]) for name in ("batch", "q_seq", "key_seq"))
    block_keys = int(launch.macros["BLOCK_KEYS"])
    return batch, q_seq, key_seq, block_keys, -(-key_seq // block_keys)


def _prepare_entry(launch: HostLaunch) -> None:
    args = launch.args
    batch, q_seq, key_seq, block_keys, blocks = _extents(launch)
    tile_rows = int(launch.macros["TILE_ROWS"])
    bias = launch.view(args["bias"], float32, (batch, q_seq, key_seq))
    allowed = np.zeros((batch, q_seq, blocks * block_keys), np.bool_)
    allowed[..., :key_seq] = bias > _MASK_THRESHOLD
    counts = allowed.sum(-1, dtype=np.uint32)
    is_biased = (allowed[..., :key_seq] & (bias != 0)).any(-1)
    launch.view(args["rows"], uint32, (batch, q_seq))[...] = counts | np.where(is_biased, np.uint32(_BIASED), 0)
    words = np.packbits(allowed, axis=-1, bitorder="little").view(np.uint32)
    launch.view(args["allowed"], uint32, words.shape)[...] = words

    row_tiles = -(-q_seq // tile_rows)
    wanted = allowed & (counts > int(args["top_k"]))[..., None]
    padded = np.zeros((batch, row_tiles * tile_rows, blocks, block_keys), np.bool_)
    padded[:, :q_seq] = wanted.reshape(batch, q_seq, blocks, block_keys)
    by_tile = padded.reshape(batch, row_tiles, tile_rows, blocks, block_keys)
    tiles = np.moveaxis(np.any(by_tile, axis=(2, 4)), 1, 2)
    flags = launch.view(args["tiles"], uint8, (-(-tiles.size // 16) * 16,))
    flags[: tiles.size] = tiles.ravel()
    flags[tiles.size :] = 0


def _score_sm90_entry(launch: HostLaunch) -> None:
    """Vectors by tensor maps."""
    args = launch.args
    batch, q_seq, key_seq, block_keys, _ = _extents(launch)
    depth = _part(launch)[1] * int(launch.macros["HEAD_DIM"])
    heads, columns = int(launch.macros["HEADS"]), int(launch.macros["COLUMNS"])
    query_map, key_map = (HostTensorMap.decode(args[name]) for name in ("query_map", "key_map"))
    if query_map.extents != (depth, batch * q_seq * heads, 1) or query_map.box != (64, columns, 1):
        raise ValueError(f"{query_map} does not describe {batch} x {q_seq} rows of {heads} heads of {depth}")
    if key_map.extents != (depth, key_seq, batch) or key_map.box != (64, block_keys, 1):
        raise ValueError(f"{key_map} does not describe {batch} x {key_seq} keys of {depth}")
    _score(launch, query_map.address, key_map.address)


def _score_mma_entry(launch: HostLaunch) -> None:
    """Vectors by addresses."""
    _score(launch, int(launch.args["query_vectors"]), int(launch.args["key_vectors"]))


def _part(launch: HostLaunch) -> tuple[DataType, int]:
    """What is multiplied, and how many of it stand for an element."""
    element = _ELEMENTS[launch.macros["ELEMENT"]]
    return (bfloat16, 2) if element == float32 else (element, 1)


def _score(launch: HostLaunch, query_address: int, key_address: int) -> None:
    args = launch.args
    batch, q_seq, key_seq, block_keys, blocks = _extents(launch)
    heads, depth = int(launch.macros["HEADS"]), int(launch.macros["HEAD_DIM"])
    columns = int(launch.macros["COLUMNS"])
    element = _ELEMENTS[launch.macros["ELEMENT"]]
    part, parts = _part(launch)
    key_parts = launch.view(key_address, part, (batch, key_seq, parts, depth))
    query_parts = launch.view(query_address, part, (batch, q_seq, heads, parts, depth))
    weights = launch.view(args["weights"], element, (batch, q_seq, heads))
    with np.errstate(all="ignore"):
        key, query = (vectors.astype(np.float32).sum(-2) for vectors in (key_parts, query_parts))
    scores, _ = dsa_scores(
        query,
        key,
        weights,
        np.zeros((batch, 1, q_seq, key_seq), np.float32),
        scale=args["scale"],
        weights_scale=args["weights_scale"],
    )
    out = launch.view(args["scores"], float32, (batch, q_seq, int(args["row_stride"])))[..., :key_seq]
    if args["tiles"]:
        row_tiles = -(-q_seq * heads // columns)
        tiles = launch.view(args["tiles"], uint8, (batch, blocks, row_tiles)).transpose(0, 2, 1)
        rows = tiles.repeat(columns // heads, axis=1)[:, :q_seq]
        np.copyto(out, scores, where=rows.repeat(block_keys, axis=2)[..., :key_seq] != 0)
    else:
        bias = launch.view(args["bias"], float32, (batch, q_seq, key_seq))
        with np.errstate(all="ignore"):
            biased = scores + bias
        out[...] = np.where(bias > _MASK_THRESHOLD, biased, np.uint32(_MASKED_SCORE).view(np.float32))

    with np.errstate(all="ignore"):
        norms = np.zeros((batch, blocks * block_keys), np.float32)
        norms[:, :key_seq] = _norms(args, key, key_parts)
        query_norms = _norms(args, query, query_parts)
        head_weights = np.abs(weights.astype(np.float32) * np.float32(args["weights_scale"]))
        per_norm = (head_weights * np.float32(args["error_scale"]) * query_norms).sum(-1)
    is_regular = np.isfinite(norms)
    words = launch.view(args["key_words"], uint32, (batch, norms.shape[1] // _WORD_KEYS, 2))
    words[..., 0] = np.packbits(~is_regular, axis=-1, bitorder="little").view(np.uint32)
    greatest = np.where(is_regular, norms, 0).reshape(*words.shape[:2], _WORD_KEYS).max(-1)
    words[..., 1] = greatest.view(np.uint32)
    is_exact = ~((query != 0).any(-1) & (head_weights != 0)).any(-1)
    bounds = launch.view(args["bounds"], float32, (batch, q_seq, 4))
    bounds[..., 0] = np.where(is_exact, 0, per_norm)
    bounds[..., 1:3] = np.float32(2.0**-100), np.float32(2.0**100)
    flags = np.isfinite(per_norm) * _REGULAR_ROW | is_exact * _EXACT_ROW
    bounds.view(np.uint32)[..., 3] = flags


def _norms(args: Mapping[str, float], vectors: NDArray[np.float32], parts: NDArray) -> NDArray[np.float32]:
    """Of vectors along the last axis, and of their parts along the one before it."""
    d = np.arange(vectors.shape[-1])
    weights = (
        args["first_weight"] + args["element_weight"] * (len(d) - d) + args["step_weight"] * (len(d) // 16 - d // 16)
    )
    squares = (weights * np.square(vectors.astype(np.float64))).sum(-1)
    if parts.shape[-2] > 1:
        squares += args["low_weight"] * np.square(parts[..., 1, :].astype(np.float64)).sum(-1)
    norms: NDArray[np.float32] = (np.sqrt(squares) + args["norm_floor"]).astype(np.float32)
    return norms


def _certify_entry(launch: HostLaunch) -> None:
    args = launch.args
    rows, q_seq, key_seq, stride, top_k = (
        int(args[name]) for name in ("total_rows", "q_seq", "key_seq", "row_stride", "top_k")
    )
    heads, depth = int(launch.macros["HEADS"]), int(launch.macros["HEAD_DIM"])
    block_keys = int(launch.macros["BLOCK_KEYS"])
    words = -(-key_seq // block_keys) * block_keys // _WORD_KEYS
    element, batch = _ELEMENTS[launch.macros["ELEMENT"]], rows // q_seq
    bias = launch.view(args["bias"], float32, (batch, 1, q_seq, key_seq))
    scores, allowed = dsa_scores(
        launch.view(args["query"], element, (batch, q_seq, heads, depth)),
        launch.view(args["key"], element, (batch, key_seq, depth)),
        launch.view(args["weights"], element, (batch, q_seq, heads)),
        bias,
        scale=args["scale"],
        weights_scale=args["weights_scale"],
    )
    scores, allowed = scores.reshape(rows, key_seq), allowed.reshape(rows, key_seq)
    if key_seq > top_k:
        approximate = launch.view(args["scores"], float32, (rows, stride))[:, :key_seq]
        if args["allowed"]:
            bits = launch.view(args["allowed"], uint32, (rows, words)).view(np.uint8)
            marked = np.unpackbits(bits, axis=-1, bitorder="little")[:, :key_seq] != 0
            with np.errstate(all="ignore"):
                approximate = approximate + bias.reshape(rows, key_seq)
        else:
            marked = approximate.view(np.uint32) != _MASKED_SCORE
        if (marked != allowed).any():
            raise ValueError("the launches before do not agree on which keys are allowed")
        key_words = launch.view(args["key_words"], uint32, (batch, words, 2)).repeat(_WORD_KEYS, axis=1)[:, :key_seq]
        bounds = launch.view(args["bounds"], float32, (rows, 4))
        norms = key_words[..., 1].copy().view(np.float32).repeat(q_seq, axis=0)
        with np.errstate(all="ignore"):
            error = bounds[:, :1] * norms + bounds[:, 1:2] + np.float32(args["bias_error"]) * np.abs(approximate)
            is_off = np.abs(approximate - scores) > error
        is_off &= (bounds.view(np.uint32)[:, 3:] & _REGULAR_ROW != 0) & np.isfinite(approximate)
        if (is_off & allowed)[allowed.sum(-1) > top_k].any():
            raise ValueError("approximate scores lie outside of their bounds")
    launch.view(args["out"], int64, (rows, top_k))[...] = dsa_select(scores, allowed, top_k)


def _decode_entry(launch: HostLaunch) -> None:
    """Strict scores, for there is nobody to hand others to. What the teams share is all written, and left so."""
    args = launch.args
    key_seq, blocks, block_keys, top_k = (int(args[name]) for name in ("key_seq", "blocks", "block_keys", "top_k"))
    heads, depth = int(launch.macros["HEADS"]), int(launch.macros["HEAD_DIM"])
    element, rows = _ELEMENTS[launch.macros["ELEMENT"]], launch.grid[0] // blocks
    if launch.grid[0] != rows * blocks or not (blocks - 1) * block_keys < key_seq <= blocks * block_keys:
        raise ValueError(f"{launch.grid[0]} blocks, {blocks} a row, each with {block_keys} of {key_seq} keys")
    if block_keys % int(launch.macros["BLOCK_KEYS"]) or launch.shared_bytes != int(launch.macros["SHARED_BYTES"]):
        raise ValueError(f"{block_keys} keys a block, and {launch.shared_bytes} bytes of shared memory")
    query_map, key_map = (HostTensorMap.decode(args[name]) for name in ("query_map", "key_map"))
    if query_map.extents != (depth, rows * heads, 1) or query_map.box != (64, heads, 1):
        raise ValueError(f"{query_map} does not describe {rows} rows of {heads} heads of {depth}")
    if key_map.extents != (depth, key_seq, rows) or key_map.box != (64, 64, 1) or key_map.address != args["key"]:
        raise ValueError(f"{key_map} does not describe {rows} x {key_seq} keys of {depth} at 0x{args['key']:x}")
    meetings = launch.view(args["meetings"], uint64, (rows, int(launch.macros["MEETINGS_BYTES"]) // 8))
    histogram, held, slots = meetings[:, :2048], meetings[:, 2048:2049], meetings[:, 2064:]
    if histogram.any() or meetings[:, 2049:2064].any() or (slots[:, 1::2] > held).any():
        raise ValueError("a launch before has not come to its end, or has written beyond its words")
    launch.view(args["teams"], uint8, (rows, int(launch.macros["TEAM_BYTES"])))[...] = 0xA5
    scores, allowed = dsa_scores(
        launch.view(query_map.address, element, (rows, 1, heads, depth)),
        launch.view(key_map.address, element, (rows, key_seq, depth)),
        launch.view(args["weights"], element, (rows, 1, heads)),
        launch.view(args["bias"], float32, (rows, 1, 1, key_seq)),
        scale=args["scale"],
        weights_scale=args["weights_scale"],
    )
    selected = dsa_select(scores.reshape(rows, key_seq), allowed.reshape(rows, key_seq), top_k)
    launch.view(args["out"], int64, (rows, top_k))[...] = selected
    held += np.uint64(3)
    slots[:, 1 : 2 * blocks : 2] = held


HOST_ENTRIES: dict[str, HostEntry] = {
    "dsa_index_select_split": _split_entry,
    "dsa_index_select_prepare": _prepare_entry,
    "dsa_index_select_score_sm90": _score_sm90_entry,
    "dsa_index_select_score_mma": _score_mma_entry,
    "dsa_index_select_certify": _certify_entry,
    "dsa_index_select_certify_block": _certify_entry,
    "dsa_index_select_decode_sm90": _decode_entry,
}
