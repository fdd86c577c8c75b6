"""The oracle of fused attention: float64 softmax attention, vectorised in NumPy.

Row i of batch b attends to the keys ``begin <= j < end``::

    keys  = total_lengths[b], else Sk                    a count, clamped to [0, Sk]
    limit = past_lengths[b] + i, else keys - Sq + i      negative past lengths count as 0
    end   = min(keys, limit + 1) if causal else keys
    begin = max(0, limit + 1 - local_window) if local_window > 0 else 0

less those whose additive mask is ``-inf``. A score is ``softcap * tanh(scale * q.k / softcap) + mask``,
where a softcap of 0 means none. A row without a key is 0. What is stored at a key that a row does not
attend to, NaN included, has no part in that row; a NaN score makes its own row NaN and no other.

:data:`HOST_ENTRIES` are the kernels for the host driver: they read the launch as the device would,
compute with this oracle and round once to the element type.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nxrt_cuda.capture import CaptureErrorCode
from nxrt_cuda.driver.host_tensor_map import HostTensorMap
from nxrt_cuda.dtype import DataType, bfloat16, float16, float32, int32, uint32

if TYPE_CHECKING:
    from nxrt_cuda.driver.host_image import HostEntry, HostLaunch

__all__ = ["HOST_ENTRIES", "attention", "clamp_lengths"]

_BLOCK_SCORES = 1 << 20
"""Scores computed at once: 8 MiB of float64."""


def attention(
    query: NDArray,
    key: NDArray,
    value: NDArray,
    *,
    mask: NDArray | None = None,
    total_lengths: NDArray | None = None,
    past_lengths: NDArray | None = None,
    scale: float,
    causal: bool = False,
    softcap: float = 0.0,
    local_window: int = 0,
) -> NDArray[np.float64]:
    """Attention outputs [B, H, Sq, D] in float64.

    Args:
        query: [B, H, Sq, D] of any float type.
        key, value: [B, KVH, Sk, D]; query head h reads head ``h // (H / KVH)``.
        mask: added to the scores; anything that broadcasts to [B, H, Sq, Sk].
        total_lengths: int [B], how many keys are in use.
        past_lengths: int [B], how many keys precede query row 0.
        scale: of the dot products.
        causal: whether row i sees no key beyond its limit.
        softcap: bound of a score before the mask is added; 0 for none.
        local_window: how many keys up to the limit a row sees; 0 or less for all.
    """
    batch, heads, seq_q, head_dim = query.shape
    kv_heads, seq_k = key.shape[1:3]
    group = heads // kv_heads
    total, past, _ = clamp_lengths(total_lengths, past_lengths, batch=batch, seq_k=seq_k)
    origin = total - seq_q if past is None else past
    bias = None if mask is None else np.broadcast_to(mask, (batch, heads, seq_q, seq_k))

    output = np.zeros((batch, heads, seq_q, head_dim))
    # Blocks of whole batches while they are small, else of rows of one batch.
    row_step = max(1, min(seq_q, _BLOCK_SCORES // max(heads * seq_k, 1)))
    batch_step = max(1, _BLOCK_SCORES // max(heads * row_step * seq_k, 1))
    for b in range(0, batch, batch_step):
        batches = slice(b, b + batch_step)
        for i in range(0, seq_q, row_step):
            rows = slice(i, i + row_step)
            block = (batches, slice(None), rows)
            limit = origin[batches, None] + np.arange(seq_q)[rows]
            allowed = _allowed(limit, total[batches], seq_k, causal=causal, local_window=local_window)
            output[block] = _attend(
                query[block].astype(np.float64).reshape(-1, kv_heads, group, limit.shape[1], head_dim),
                key[batches, :, None].astype(np.float64),
                value[batches, :, None].astype(np.float64),
                allowed[:, None, None],
                None if bias is None else bias[block].reshape(-1, kv_heads, group, limit.shape[1], seq_k),
                scale=scale,
                softcap=softcap,
            ).reshape(-1, heads, limit.shape[1], head_dim)
    return output


def clamp_lengths(
    total_lengths: NDArray | None, past_lengths: NDArray | None, *, batch: int, seq_k: int
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, CaptureErrorCode]:
    """Total and past lengths as kernels use them, and the code that says which had to be clamped."""
    code = CaptureErrorCode.NONE
    total = np.full(batch, seq_k, np.int64)
    if total_lengths is not None:
        total = np.clip(total_lengths.astype(np.int64), 0, seq_k)
        if (total != total_lengths).any():
            code |= CaptureErrorCode.TOTAL_LENGTH
    past = None
    if past_lengths is not None:
        past = np.maximum(past_lengths.astype(np.int64), 0)
        if (past != past_lengths).any():
            code |= CaptureErrorCode.PAST_LENGTH
    return total, past, code


def _allowed(
    limit: NDArray[np.int64], total: NDArray[np.int64], seq_k: int, *, causal: bool, local_window: int
) -> NDArray[np.bool_]:
    """Which keys the rows may see before the mask: limit [B, R], total [B] -> [B, R, Sk]."""
    keys = np.arange(seq_k)
    allowed = np.broadcast_to(keys < total[:, None, None], (*limit.shape, seq_k))
    if causal:
        allowed = allowed & (keys <= limit[..., None])
    if local_window > 0:
        allowed = allowed & (keys > limit[..., None] - local_window)
    return allowed


def _attend(
    query: NDArray[np.float64],
    key: NDArray[np.float64],
    value: NDArray[np.float64],
    allowed: NDArray[np.bool_],
    mask: NDArray | None,
    *,
    scale: float,
    softcap: float,
) -> NDArray[np.float64]:
    """One block: query [..., R, D], key and value [..., Sk, D], allowed and mask [..., R, Sk] -> [..., R, D]."""
    with np.errstate(all="ignore"):
        scores = query @ key.swapaxes(-1, -2) * scale
        if softcap > 0.0:
            scores = softcap * np.tanh(scores / softcap)
        if mask is not None:
            allowed = allowed & (mask != -np.inf)
            scores += mask.astype(np.float64)
        allowed = np.broadcast_to(allowed, scores.shape)
        row_max = np.max(scores, axis=-1, keepdims=True, initial=-np.inf, where=allowed)
        weights = np.where(allowed, np.exp(scores - row_max), 0.0)
        sums = _weighted_values(weights, value, allowed)
        return np.where(allowed.any(axis=-1, keepdims=True), sums / weights.sum(axis=-1, keepdims=True), 0.0)


def _weighted_values(
    weights: NDArray[np.float64], value: NDArray[np.float64], allowed: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """``weights @ value`` in which a value counts only where its key is allowed: 0 * NaN is not computed there."""
    finite = np.isfinite(value)
    sums = weights @ np.where(finite, value, 0.0)
    spoilt = ~finite.all(axis=(*range(value.ndim - 2), -1)) & allowed.any(axis=tuple(range(allowed.ndim - 1)))
    for j in np.flatnonzero(spoilt):
        products = weights[..., j, None] * np.where(finite, 0.0, value)[..., None, j, :]
        sums += np.where(allowed[..., j, None] & ~finite[..., None, j, :], products, 0.0)
    return sums


_ELEMENTS = {dtype.cuda: dtype for dtype in (float32, float16, bfloat16)}


def _attention_entry(launch: HostLaunch) -> None:
    heads, seq_q = int(launch.args["q_heads"]), int(launch.args["sq"])
    query_tiles = -(-seq_q // int(launch.macros["BLOCK_QUERIES"]))
    _run(launch, _batch_of(launch.grid[0], heads, query_tiles))


def _decode_entry(launch: HostLaunch) -> None:
    """As :func:`_attention_entry`, for one row: a cluster for as many query heads of a group as share keys."""
    heads, group = int(launch.args["q_heads"]), int(launch.args["group"])
    head_blocks = heads // group * -(-group // int(launch.macros["HEADS"]))
    _run(launch, _batch_of(launch.grid[0], head_blocks, int(launch.macros["CLUSTER"])))


def _sm90_entry(launch: HostLaunch) -> None:
    """As :func:`_attention_entry`, with the grid cut loose from the tiles, and with what the maps must say."""
    args, macros = launch.args, launch.macros
    element = _ELEMENTS[macros["ELEMENT"]]
    head_dim, rows = int(macros["HEAD_DIM"]), 64
    heads, group, seq_q, seq_k = (int(args[name]) for name in ("q_heads", "group", "sq", "sk"))
    batch = _batch_of(args["tiles"], heads, -(-seq_q // (rows * int(macros["CONSUMERS"]))))
    row = head_dim * element.itemsize
    queries = ((head_dim, seq_q, batch * heads), (row, row * seq_q), (64, rows, 1))
    keys = (
        (head_dim, seq_k, batch * heads // group),
        (row, row * args["kv_capacity"]),
        (64, int(macros["BLOCK_KEYS"]), 1),
    )
    for name, (extents, strides, box) in (("q", queries), ("key", keys), ("value", keys), ("output", queries)):
        actual = HostTensorMap.decode(args[f"{name}_map"])
        expected = HostTensorMap(element.name.upper(), args[name], extents, strides, box)
        if actual != expected:
            raise ValueError(f"{name}_map is {actual}, and {expected} is what the other arguments say")
    if launch.view(args["tile_counter"], uint32, (1,))[0] != 0:
        raise ValueError("the tile counter is not zero")
    _run(launch, batch)


def _batch_of(tiles: int, heads: int, query_tiles: int) -> int:
    batch, uncovered = divmod(tiles, heads * query_tiles)
    if uncovered:
        raise ValueError(f"{tiles} tiles are not a whole number of {heads} heads x {query_tiles} tiles")
    return batch


def _run(launch: HostLaunch, batch: int) -> None:
    args, macros = launch.args, launch.macros
    element = _ELEMENTS[macros["ELEMENT"]]
    head_dim = int(macros["HEAD_DIM"])
    heads, group, seq_q, seq_k, kv_capacity, mask_batch_stride, mask_head_stride = (
        int(args[name])
        for name in (
            "q_heads",
            "group",
            "sq",
            "sk",
            "kv_capacity",
            "mask_batch_stride",
            "mask_head_stride",
        )
    )

    def lengths(name: str) -> NDArray | None:
        return launch.view(args[name], int32, (batch,)) if args[name] else None

    kv_shape = (batch, heads // group, seq_k, head_dim)
    kv_strides = (heads // group * kv_capacity * head_dim, kv_capacity * head_dim, head_dim, 1)
    mask = None
    if macros["HAS_MASK"] == "1":
        mask_strides = (mask_batch_stride, mask_head_stride, seq_k, 1)
        mask = _strided(launch, args["mask"], element, (batch, heads, seq_q, seq_k), mask_strides)
    total_lengths, past_lengths = lengths("total_lengths"), lengths("past_lengths")
    _, _, code = clamp_lengths(total_lengths, past_lengths, batch=batch, seq_k=seq_k)
    if code:
        launch.view(args["capture_error"], uint32, (1,))[0] |= code
    result = attention(
        launch.view(args["q"], element, (batch, heads, seq_q, head_dim)),
        _strided(launch, args["key"], element, kv_shape, kv_strides),
        _strided(launch, args["value"], element, kv_shape, kv_strides),
        mask=mask,
        total_lengths=total_lengths,
        past_lengths=past_lengths,
        scale=args["scale"],
        causal=macros["CAUSAL"] == "1",
        softcap=args["softcap"] if macros["HAS_SOFTCAP"] == "1" else 0.0,
        local_window=int(args["local_window"]) if macros["HAS_WINDOW"] == "1" else 0,
    )
    with np.errstate(all="ignore"):
        launch.view(args["output"], element, result.shape)[...] = result.astype(element.numpy)


def _strided(
    launch: HostLaunch, ptr: float, dtype: DataType, shape: tuple[int, ...], strides: tuple[int, ...]
) -> NDArray[Any]:
    """A window with strides in elements, which demands no memory beyond its last element."""
    if prod(shape) == 0:
        return np.empty(shape, dtype.numpy)
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    flat = launch.view(ptr, dtype, (last + 1,))
    return np.lib.stride_tricks.as_strided(flat, shape, [stride * dtype.itemsize for stride in strides])


HOST_ENTRIES: dict[str, HostEntry] = {
    "flash_attention_f32": _attention_entry,
    "flash_attention_f16": _attention_entry,
    "flash_attention_bf16": _attention_entry,
    "flash_attention_f16_tc": _attention_entry,
    "flash_attention_bf16_tc": _attention_entry,
    "flash_attention_f32_tf32x3": _attention_entry,
    "flash_attention_f32_bf16x6": _attention_entry,
    "flash_attention_f16_sm90": _sm90_entry,
    "flash_attention_bf16_sm90": _sm90_entry,
    "attention_decode_f32": _decode_entry,
    "attention_decode_f16": _decode_entry,
    "attention_decode_bf16": _decode_entry,
    "attention_decode_f16_tc": _decode_entry,
    "attention_decode_bf16_tc": _decode_entry,
}
