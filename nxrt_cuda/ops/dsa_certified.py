"""The certified variant of DsaIndexSelect: tensor-core scores, a bound on their error, exact repair.

``docs/dsa_exactness.md`` proves that it selects what the strict order selects. Per chunk of rows there are
up to four launches: f32 vectors are split into pairs of bf16; what the bias allows; approximate scores and what bounds
their error; and the selection, which scores in strict order the keys whose rank the bound leaves open. Chunks bound the
workspace; they depend on shapes alone.

Tile sizes, thread counts and shared memory are stated here alone; kernels receive them as macros and
assert that they agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from nxrt_cuda.architecture import own_arch
from nxrt_cuda.dtype import DataType, bfloat16, float16, float32
from nxrt_cuda.launch import KernelSpec, LaunchConfig, Param, div_up
from nxrt_cuda.ops.dsa_geometry import Dims

__all__ = [
    "BIAS_ERROR",
    "ELEMENT_TYPES",
    "WORKSPACE_BYTES",
    "Abilities",
    "CertifiedLayout",
    "Chunk",
    "NormWeights",
    "abilities",
    "certified_specs",
    "certify_config",
    "certify_spec",
    "chunk_bytes",
    "chunks",
    "error_scale",
    "kernel_spec",
    "key_box",
    "norm_weights",
    "part_type",
    "parts",
    "prepare_config",
    "prepare_spec",
    "query_box",
    "row_stride",
    "score_config",
    "score_spec",
    "split_config",
    "split_spec",
    "uncertified_reason",
    "uses_prepare",
]

ELEMENT_TYPES = (float32, float16, bfloat16)
_HEADS = (32, 64)
_HEAD_DIMS = (64, 128)
_LEAST_CAPABILITY = (8, 0)


class Abilities(NamedTuple):
    """What the kernels can count on, on devices of one compute capability.

    Attributes:
        arch: such a device's architecture.
        has_wgmma: asynchronous products of matrices in shared memory, which the tensor memory accelerator brings. Else
            mma.sync and cp.async, which all devices have.
        has_clusters: blocks that share a row, and bulk copies.
        has_large_blocks: shared memory for the scores of _LARGE_KEYS keys beside what else the selection keeps there.
        step_error: what a step of 16 products loses at most, in units of 2^-24 of the magnitudes summed so far.
    """

    arch: str
    has_wgmma: bool
    has_clusters: bool
    has_large_blocks: bool
    step_error: float


_STEP_ERRORS = {8: 22.0, 9: 10.5, 10: 10.5, 12: 10.5}
"""By major compute capability, as far as there are models; ``docs/dsa_exactness.md`` derives them."""


def abilities(compute_capability: tuple[int, int]) -> Abilities:
    """Of a device. Where nobody has published how tensor cores sum, they are taken for the coarsest known."""
    major, _ = compute_capability
    return Abilities(
        arch=own_arch(compute_capability),
        has_wgmma=compute_capability == (9, 0),
        has_clusters=major >= 9,
        has_large_blocks=9 <= major < 12,
        step_error=_STEP_ERRORS.get(major, max(_STEP_ERRORS.values())),
    )


WORKSPACE_BYTES = 256 << 20
"""What the workspace is kept below by default, as far as one row allows."""

_ALIGNMENT = 256
_BOUND_BYTES = 16  # what bounds the error of a row

# The score kernel: a block of keys x some (row, head) pairs a tile.
_COLUMNS = 128
_SCORE_THREADS = 384


class _Tiling(NamedTuple):
    """Keys of a tile, and how many buffers of keys and of queries fit shared memory."""

    block_keys: int
    key_stages: int
    query_stages: int


_TILINGS = {
    (1, 64): _Tiling(256, 2, 6),
    (1, 128): _Tiling(256, 2, 3),
    (2, 64): _Tiling(128, 2, 4),
    (2, 128): _Tiling(128, 1, 2),
}
"""By parts of a vector and head size."""

# The score kernel for mma.sync: it takes the same tiles, in slices of columns.
_MMA_SLICE = 64
_MMA_WARPS, _MMA_THREADS = 8, 352
_MMA_STAGES = {(1, 64): 4, (1, 128): 4, (2, 64): 4, (2, 128): 2}
"""Slices of queries in shared memory, by parts of a vector and head size: what fits the smallest, of 99 KB."""

_SPLIT_THREADS = 256
_SPLIT_BLOCKS = 16  # a multiprocessor
_PREPARE_THREADS = 256

# The certify kernel: keys of a row that a block takes, by its threads. Three small blocks share an SM.
_CLUSTERS = (1, 2, 4, 8)
_SMALL_THREADS, _SMALL_KEYS = 256, 8192
_LARGE_THREADS, _LARGE_KEYS = 512, 16384
_FEW_KEYS = 1024  # a block with fewer is not worth its share of the barriers
_CERTIFY_KEYS = 256  # what a block takes is a multiple of
_MAX_KEY_SEQ = _CLUSTERS[-1] * _LARGE_KEYS

# The certify kernel for rows that one block takes alone, by words of 32 keys a thread: one, and the row's scores fit
# shared memory beside the rest, or as many as the longest row needs.
_BLOCK_THREADS = {1: _SMALL_THREADS, 8: 512}
_LONG_ROW_WARPS = 8  # that score keys at a time

_SPLIT_PARAMS = (
    *(Param(name, "ptr") for name in ("query", "key", "query_parts", "key_parts")),
    *(Param(name, "u64") for name in ("query_vectors", "key_vectors")),
)
_PREPARE_PARAMS = (
    *(Param(name, "ptr") for name in ("bias", "allowed", "rows", "tiles")),
    *(Param(name, "u32") for name in ("batch", "q_seq", "key_seq", "top_k")),
)
_SCORE_PARAMS = (
    *(Param(name, "ptr") for name in ("query", "weights", "bias", "accounts", "tiles")),
    *(Param(name, "ptr") for name in ("scores", "key_words", "bounds")),
    *(Param(name, "tensor_map") for name in ("query_map", "key_map")),
    *(Param(name, "u32") for name in ("batch", "q_seq", "key_seq", "row_stride", "top_k")),
    *(Param(name, "f32") for name in ("scale", "weights_scale", "error_scale")),
    *(Param(name, "f32") for name in ("first_weight", "element_weight", "step_weight", "low_weight", "norm_floor")),
)
_MMA_SCORE_PARAMS = tuple(
    Param(name.replace("_map", "_vectors"), "ptr") if kind == "tensor_map" else Param(name, kind)
    for name, kind in _SCORE_PARAMS
)
_CERTIFY_PARAMS = (
    *(
        Param(name, "ptr")
        for name in (
            *("query", "key", "weights", "bias", "scores", "allowed", "accounts", "key_words", "bounds", "out"),
            "counters",
        )
    ),
    *(Param(name, "u32") for name in ("total_rows", "q_seq", "key_seq", "row_stride", "block_keys", "top_k")),
    *(Param(name, "f32") for name in ("scale", "weights_scale", "bias_error")),
)


def uncertified_reason(
    dtype: DataType, dims: Dims, top_k: int, compute_capability: tuple[int, int], *, aligned: bool
) -> str | None:
    """Why a call cannot take the certified variant, or None if it can.

    ``aligned`` says whether query and key begin at multiples of 16 bytes.
    """
    if compute_capability < _LEAST_CAPABILITY:
        return "compute capability {}.{} is below 8.0, which has no tensor cores for all dtypes".format(
            *compute_capability
        )
    if dims.heads not in _HEADS:
        return f"{dims.heads} heads; tensor-core scores take {_HEADS[0]} or {_HEADS[1]}"
    if dims.head_dim not in _HEAD_DIMS:
        return f"head size {dims.head_dim}; tensor-core scores take {_HEAD_DIMS[0]} or {_HEAD_DIMS[1]}"
    if dims.rows == 0:
        return "there are no rows"
    if top_k >= 2**31:
        return f"top_k {top_k} does not fit 31 bits"
    if not 0 < dims.key_seq <= _MAX_KEY_SEQ:
        return f"{dims.key_seq} keys; rows of 1 to {_MAX_KEY_SEQ} are certified"
    if not aligned:
        return "query or key does not begin at a multiple of 16 bytes"
    return None


# The bound on the error.

BIAS_ERROR = 2.0**-23
"""Of adding the bias, on both sides together, relative to the result."""


class NormWeights(NamedTuple):
    """Of the norm whose products bound the error of a dot of D elements: the sum of ``of(d, D) * x_d**2``.

    Attributes:
        first, per_element, per_step: of the roundings that the product of element d passes through.
        low: of the square of the lower part of an element that is scored as two.
        floor: added to the root, for elements below the normal range, or whose squares are.
    """

    first: float
    per_element: float
    per_step: float
    low: float
    floor: float

    def of(self, d: int, head_dim: int) -> float:
        """The weight of element ``d``."""
        return self.first + self.per_element * (head_dim - d) + self.per_step * (head_dim // 16 - d // 16)


def norm_weights(dtype: DataType, heads: int, head_dim: int, per_step: float) -> NormWeights:
    """The norm of ``docs/dsa_exactness.md``, in units of 2^-24; ``per_step`` is a device's ``step_error``."""
    in_hand = 1.1
    per_element = 1.0
    strict = 2 + (heads - 1)
    head_sum = heads / 4 + 3
    split, low = 0.0, 0.0
    if dtype == float32:
        strict += 1
        # What the steps of the two small products lose, whose sums are at most 2^-7 of the whole.
        head_sum += 2 * (head_dim / 16) * per_step * 2**-7
        # Parts of 8 bits: what is left of an element is at most 2^-8 of its lower part.
        split = 128.0
        low = 2.0**32 / split + 2.0**24
    first = in_hand * (strict + head_sum) + split
    weights = NormWeights(_up(first), _up(in_hand * per_element), _up(in_hand * per_step), low, 0.0)
    total = sum(weights.of(d, head_dim) for d in range(head_dim))
    return weights._replace(floor=_up(math.sqrt(total) * (2.0**-14 if dtype == float16 else 2.0**-62)))


def error_scale(scale: float) -> float:
    """What norms and weights are multiplied by to bound the error: a unit times the scale, rounded up to f32."""
    return _up(2.0**-24 * float(np.float32(scale)))


def _up(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


# Vectors as the tensor cores take them.


def parts(dtype: DataType) -> int:
    """How many vectors a query or key is scored as."""
    return 2 if dtype == float32 else 1


def part_type(dtype: DataType) -> DataType:
    """The type of their elements."""
    return bfloat16 if dtype == float32 else dtype


def query_box(dims: Dims) -> tuple[int, int, int]:
    """What one copy brings to shared memory: 64 columns of the query vectors of a tile."""
    return (64, _columns(dims.heads, dims.q_seq), 1)


def key_box(dtype: DataType, head_dim: int) -> tuple[int, int, int]:
    """What one copy brings to shared memory: 64 columns of the keys of a tile."""
    return (64, _tiling(dtype, head_dim).block_keys, 1)


def _tiling(dtype: DataType, head_dim: int) -> _Tiling:
    return _TILINGS[parts(dtype), head_dim]


def _columns(heads: int, q_seq: int) -> int:
    """(Row, head) pairs of a tile, which are of one batch: a decode step has one row."""
    return heads if q_seq == 1 else _COLUMNS


# The workspace.


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows that are launched together: whole batches, or a part of one.

    Attributes:
        first_row: counted over all batches.
        first_batch: of the first row.
        batch: how many batches.
        q_seq: rows of each.
    """

    first_row: int
    first_batch: int
    batch: int
    q_seq: int

    @property
    def rows(self) -> int:
        return self.batch * self.q_seq


def row_stride(dims: Dims) -> int:
    """Elements from one row of scores to the next: rows begin at multiples of 16 bytes."""
    return div_up(dims.key_seq, 4) * 4


def _key_blocks(dims: Dims, dtype: DataType) -> int:
    return div_up(dims.key_seq, _tiling(dtype, dims.head_dim).block_keys)


def _key_words(dims: Dims, dtype: DataType) -> int:
    """Words of 32 keys a row, whole blocks of keys."""
    return _key_blocks(dims, dtype) * _tiling(dtype, dims.head_dim).block_keys // 32


def _part_bytes(dims: Dims, dtype: DataType) -> int:
    """Of the parts of one vector; none where vectors are taken as they are."""
    return parts(dtype) * dims.head_dim * part_type(dtype).itemsize if parts(dtype) > 1 else 0


def chunk_bytes(dims: Dims, dtype: DataType, batch: int, rows: int) -> int:
    """What ``rows`` rows of ``batch`` batches take of the workspace, but for flags of tiles and alignment."""
    words = _key_words(dims, dtype)
    row = 4 * (row_stride(dims) + words + 1) + _BOUND_BYTES + dims.heads * _part_bytes(dims, dtype)
    return rows * row + batch * (8 * words + dims.key_seq * _part_bytes(dims, dtype))


def chunks(dims: Dims, dtype: DataType, workspace_bytes: int) -> Iterator[Chunk]:
    """The rows of a call in chunks that take at most ``workspace_bytes``, but for single tiles of rows."""
    step = workspace_bytes // chunk_bytes(dims, dtype, 1, dims.q_seq)
    if step > 0:
        for b in range(0, dims.batch, step):
            yield Chunk(b * dims.q_seq, b, min(step, dims.batch - b), dims.q_seq)
        return
    limit = (workspace_bytes - chunk_bytes(dims, dtype, 1, 0)) // chunk_bytes(dims, dtype, 0, 1)
    tile_rows = _COLUMNS // dims.heads
    step = max(tile_rows, limit // tile_rows * tile_rows)
    for b in range(dims.batch):
        for s in range(0, dims.q_seq, step):
            yield Chunk(b * dims.q_seq + s, b, 1, min(step, dims.q_seq - s))


@dataclass(frozen=True)
class CertifiedLayout:
    """Byte offsets of the segments within the workspace, each aligned to 256, and its size. All chunks share it.

    Attributes:
        scores_offset: f32 [rows, row_stride], approximate; without the bias if the bias was looked through first.
        allowed_offset: u32 [rows, words], a bit a key.
        rows_offset: u32 [rows], what each allows.
        tiles_offset: u8 [batch, key blocks, row tiles], whether a tile needs scores.
        key_words_offset: (u32, f32) [batch, words], irregular keys and greatest norm.
        bounds_offset: (f32, f32, f32, u32) [rows], what else bounds their error.
        query_parts_offset, key_parts_offset: bf16 [rows, heads, 2 D] and [batch, T, 2 D], of f32 vectors.
        nbytes: the whole, a multiple of 256.
        chunks: the rows that are launched together, in order.
    """

    scores_offset: int
    allowed_offset: int
    rows_offset: int
    tiles_offset: int
    key_words_offset: int
    bounds_offset: int
    query_parts_offset: int
    key_parts_offset: int
    nbytes: int
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, dims: Dims, dtype: DataType, workspace_bytes: int) -> CertifiedLayout:
        """The layout for ``dims``: enough for each of its chunks."""
        shapes = tuple(chunks(dims, dtype, workspace_bytes))
        rows = max(chunk.rows for chunk in shapes)
        batch = max(chunk.batch for chunk in shapes)
        words = _key_words(dims, dtype)
        part_bytes = _part_bytes(dims, dtype)
        tiles = max(_tiles(dims, dtype, chunk) for chunk in shapes)
        end = 0

        def segment(nbytes: int) -> int:
            nonlocal end
            begin, end = end, end + div_up(nbytes, _ALIGNMENT) * _ALIGNMENT
            return begin

        return cls(
            scores_offset=segment(4 * rows * row_stride(dims)),
            allowed_offset=segment(4 * rows * words),
            rows_offset=segment(4 * rows),
            tiles_offset=segment(div_up(tiles, 16) * 16),
            key_words_offset=segment(8 * batch * words),
            bounds_offset=segment(_BOUND_BYTES * rows),
            query_parts_offset=segment(rows * dims.heads * part_bytes),
            key_parts_offset=segment(batch * dims.key_seq * part_bytes),
            nbytes=end,
            chunks=shapes,
        )


def _row_tiles(dims: Dims, chunk: Chunk) -> int:
    return chunk.batch * div_up(chunk.q_seq, _columns(dims.heads, dims.q_seq) // dims.heads)


def _tiles(dims: Dims, dtype: DataType, chunk: Chunk) -> int:
    return _row_tiles(dims, chunk) * _key_blocks(dims, dtype)


# Specialisations and launches.


def uses_prepare(dims: Dims, chunk: Chunk, multiprocessors: int) -> bool:
    """Whether the bias is looked through before scoring, a tile of rows a block: too slow where there are few."""
    return _row_tiles(dims, chunk) >= multiprocessors


def split_spec(head_dim: int) -> KernelSpec:
    """Of the kernel that splits f32 vectors."""
    return kernel_spec("split", _SPLIT_PARAMS, _SPLIT_THREADS, {"HEAD_DIM": head_dim})


def split_config(spec: KernelSpec, dims: Dims, chunk: Chunk, multiprocessors: int, max_grid_x: int) -> LaunchConfig:
    """Four elements a thread, in strides."""
    vectors = chunk.rows * dims.heads + chunk.batch * dims.key_seq
    blocks = div_up(vectors * dims.head_dim // 4, spec.threads)
    return LaunchConfig((min(blocks, multiprocessors * _SPLIT_BLOCKS, max_grid_x), 1, 1), (spec.threads, 1, 1))


def prepare_spec(dtype: DataType, dims: Dims) -> KernelSpec:
    """Of the kernel that reads the bias."""
    return _prepare_spec(_columns(dims.heads, dims.q_seq) // dims.heads, _tiling(dtype, dims.head_dim).block_keys)


def _prepare_spec(tile_rows: int, block_keys: int) -> KernelSpec:
    macros = {"ELEMENT": float32.cuda, "TILE_ROWS": tile_rows, "BLOCK_KEYS": block_keys}
    return kernel_spec("prepare", _PREPARE_PARAMS, _PREPARE_THREADS, macros, contract=True)


def prepare_config(spec: KernelSpec, dims: Dims, chunk: Chunk, max_grid_x: int) -> LaunchConfig:
    """A block a tile of rows, in strides."""
    return LaunchConfig((min(_row_tiles(dims, chunk), max_grid_x), 1, 1), (spec.threads, 1, 1))


def _score_shared_bytes(dtype: DataType, columns: int, head_dim: int) -> int:
    block_keys, key_stages, query_stages = _tiling(dtype, head_dim)
    slab_bytes = 128  # a row of it
    operands = parts(dtype) * head_dim // 64 * slab_bytes * (key_stages * block_keys + query_stages * columns)
    weights, tiles = 4 * 4 * (columns // 4 + 4) * query_stages, 16 * query_stages
    barriers = 8 * 2 * (query_stages + key_stages)
    scan = 4 * (_SCORE_THREADS // 32)
    return div_up(operands + weights + tiles + barriers + scan + 8, 1024) * 1024


def _mma_shared_bytes(dtype: DataType, head_dim: int) -> int:
    stages = _MMA_STAGES[parts(dtype), head_dim]
    row_bytes = head_dim * part_type(dtype).itemsize
    queries, keys = stages * parts(dtype) * _MMA_SLICE * row_bytes, _MMA_WARPS * 16 * row_bytes
    weights, slices = 4 * _MMA_SLICE * stages, 28 * stages
    barriers, half_words = 8 * 2 * stages, 8 * _MMA_WARPS
    scan = 4 * (_MMA_THREADS // 32)
    return div_up(queries + keys + weights + div_up(slices, 8) * 8 + barriers + half_words + scan + 8, 256) * 256


def score_spec(dtype: DataType, dims: Dims, able: Abilities) -> KernelSpec:
    """Of the tensor-core score kernel."""
    make = _score_spec if able.has_wgmma else _mma_score_spec
    return make(dtype, dims.heads, dims.head_dim, _columns(dims.heads, dims.q_seq))


def _mma_score_spec(dtype: DataType, heads: int, head_dim: int, columns: int) -> KernelSpec:
    macros = {
        "ELEMENT": dtype.cuda,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "COLUMNS": columns,
        "BLOCK_KEYS": _tiling(dtype, head_dim).block_keys,
        "QUERY_STAGES": _MMA_STAGES[parts(dtype), head_dim],
        "SHARED_BYTES": _mma_shared_bytes(dtype, head_dim),
    }
    return kernel_spec("score_mma", _MMA_SCORE_PARAMS, _MMA_THREADS, macros)


def _score_spec(dtype: DataType, heads: int, head_dim: int, columns: int) -> KernelSpec:
    block_keys, key_stages, query_stages = _tiling(dtype, head_dim)
    macros = {
        "ELEMENT": dtype.cuda,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "COLUMNS": columns,
        "BLOCK_KEYS": block_keys,
        "KEY_STAGES": key_stages,
        "QUERY_STAGES": query_stages,
        "SHARED_BYTES": _score_shared_bytes(dtype, columns, head_dim),
    }
    return kernel_spec("score_sm90", _SCORE_PARAMS, _SCORE_THREADS, macros, arch="sm_90a")


def score_config(
    spec: KernelSpec, dims: Dims, dtype: DataType, chunk: Chunk, multiprocessors: int, max_grid_x: int
) -> LaunchConfig:
    """A block an SM, each a run of tiles."""
    blocks = min(multiprocessors, _tiles(dims, dtype, chunk), max_grid_x)
    return LaunchConfig((blocks, 1, 1), (spec.threads, 1, 1), int(dict(spec.macros)["SHARED_BYTES"]))


def _cluster(dims: Dims, rows: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks that share a row, and threads of each."""
    cluster = next((c for c in _CLUSTERS if dims.key_seq <= c * _SMALL_KEYS), _CLUSTERS[-1])
    while cluster < _CLUSTERS[-1] and rows * cluster < multiprocessors and dims.key_seq > cluster * _FEW_KEYS:
        cluster *= 2
    return cluster, _SMALL_THREADS if dims.key_seq <= cluster * _SMALL_KEYS else _LARGE_THREADS


def _certify_shared_bytes(dtype: DataType, heads: int, head_dim: int, cluster: int, threads: int) -> int:
    """Of the kernel's struct; the scores of the block's keys follow it."""
    warps = threads // 32
    query = heads * (head_dim * dtype.itemsize + 16)
    staged = warps * 4 * max(head_dim, heads + 4) * 4
    words = 5 * 4 * threads
    scan = 4 * warps * (1 + 2 * 4) + 4 * 2 * 4 * cluster + 4 * (3 + 4 + 2 + 6)
    groups = 4 * 32 * cluster
    return div_up(query + max(4 * 4096, staged) + 4 * heads + groups + words + 2 * 1024 + 8 + scan, 16) * 16


def _certify_block_shared_bytes(dtype: DataType, heads: int, head_dim: int, thread_words: int) -> int:
    """The same of the kernel for one block a row."""
    threads = _BLOCK_THREADS[thread_words]
    warps, words, in_shared = threads // 32, threads * thread_words, thread_words == 1
    query = heads * (head_dim * dtype.itemsize + 16)
    staged = (warps if in_shared else _LONG_ROW_WARPS) * 4 * max(head_dim, heads + 4) * 4
    kept = 4 * (3 * words if in_shared else 2 * words + 4)
    listed = (2 if in_shared else 4) * 1024
    scan = 4 * warps * (1 + 2 * 3) + 4 * 3
    return div_up(query + max(4 * 4096, staged) + 4 * heads + 4 * 32 + kept + listed + scan, 16) * 16


def certify_spec(dtype: DataType, dims: Dims, rows: int, multiprocessors: int, able: Abilities) -> KernelSpec:
    """Of the selection; few rows are spread over more blocks, if they can share one."""
    if able.has_clusters:
        cluster, threads = _cluster(dims, rows, multiprocessors)
        if threads == _SMALL_THREADS or able.has_large_blocks:
            return _certify_spec(dtype, dims.heads, dims.head_dim, cluster, threads, able.arch)
    return _certify_block_spec(dtype, dims.heads, dims.head_dim, 1 if dims.key_seq <= _SMALL_KEYS else 8)


def _certify_block_spec(dtype: DataType, heads: int, head_dim: int, thread_words: int) -> KernelSpec:
    macros = {
        "ELEMENT": dtype.cuda,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "BLOCK_KEYS": _tiling(dtype, head_dim).block_keys,
        "THREAD_WORDS": thread_words,
        "SHARED_BYTES": _certify_block_shared_bytes(dtype, heads, head_dim, thread_words),
    }
    return kernel_spec(
        "certify_block",
        tuple(param for param in _CERTIFY_PARAMS if param.name != "block_keys"),
        _BLOCK_THREADS[thread_words],
        macros,
    )


def _certify_spec(dtype: DataType, heads: int, head_dim: int, cluster: int, threads: int, arch: str) -> KernelSpec:
    macros = {
        "ELEMENT": dtype.cuda,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "BLOCK_KEYS": _tiling(dtype, head_dim).block_keys,
        "CLUSTER": cluster,
        "SHARED_BYTES": _certify_shared_bytes(dtype, heads, head_dim, cluster, threads),
    }
    return kernel_spec("certify", _CERTIFY_PARAMS, threads, macros, arch=arch)


def certify_config(spec: KernelSpec, dims: Dims, rows: int, max_grid_x: int) -> tuple[LaunchConfig, tuple[int, ...]]:
    """A block or a cluster a row, in strides; and how many keys each block takes, where they share a row."""
    macros = dict(spec.macros)
    cluster = int(macros.get("CLUSTER", 1))
    block_keys = div_up(div_up(dims.key_seq, cluster), _CERTIFY_KEYS) * _CERTIFY_KEYS
    blocks = max(1, min(rows, max_grid_x // cluster)) * cluster if rows else 0
    score_bytes = 4 * block_keys if macros.get("THREAD_WORDS", "1") == "1" else 0
    config = LaunchConfig((blocks, 1, 1), (spec.threads, 1, 1), int(macros["SHARED_BYTES"]) + score_bytes)
    return config, (block_keys,) if "CLUSTER" in macros else ()


def certified_specs(able: Abilities) -> tuple[KernelSpec, ...]:
    """Every specialisation of the variant for a device."""
    shapes = list(product(ELEMENT_TYPES, _HEADS, _HEAD_DIMS))
    tile_rows = (1, *(_COLUMNS // heads for heads in _HEADS))
    score = _score_spec if able.has_wgmma else _mma_score_spec
    blocks = [(cluster, _SMALL_THREADS) for cluster in _CLUSTERS] if able.has_clusters else []
    if able.has_large_blocks:
        blocks.append((_CLUSTERS[-1], _LARGE_THREADS))
    thread_words = () if able.has_large_blocks else (8,) if able.has_clusters else tuple(_BLOCK_THREADS)
    return (
        *(split_spec(head_dim) for head_dim in _HEAD_DIMS),
        *(
            _prepare_spec(rows, keys)
            for rows in tile_rows
            for keys in sorted({t.block_keys for t in _TILINGS.values()})
        ),
        *(score(*shape, columns) for shape in shapes for columns in (shape[1], _COLUMNS)),
        *(_certify_spec(*shape, *block, able.arch) for shape in shapes for block in blocks),
        *(_certify_block_spec(*shape, words) for shape in shapes for words in thread_words),
    )


def kernel_spec(
    name: str,
    params: tuple[Param, ...],
    threads: int,
    macros: dict[str, object],
    *,
    contract: bool = False,
    arch: str | None = None,
) -> KernelSpec:
    """Of the kernel dsa_index_select_``name``, in the file of that name; a graph may change none of its numbers."""
    return KernelSpec(
        source=f"dsa_index_select_{name}.cu",
        entry=f"dsa_index_select_{name}",
        params=params,
        threads=threads,
        macros=tuple((macro, str(value)) for macro, value in macros.items()),
        contract=contract,
        arch=arch,
        changeable=(),
    )
