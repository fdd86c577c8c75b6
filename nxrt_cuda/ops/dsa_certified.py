"""The certified variant of DsaIndexSelect: tensor-core scores, a bound on their error, exact repair.

``docs/dsa_exactness.md`` proves that it selects what the strict order selects. Per chunk of rows there are
three launches: what the bias allows, approximate scores, and the selection, which scores in strict order
the keys whose rank the bound leaves open. Chunks bound the workspace; they depend on shapes alone.

Tile sizes, thread counts and shared memory are stated here alone; kernels receive them as macros and
assert that they agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from nxrt_cuda.dtype import DataType, bfloat16, float16
from nxrt_cuda.launch import KernelSpec, LaunchConfig, Param, div_up
from nxrt_cuda.ops.dsa_geometry import Dims

__all__ = [
    "BIAS_ERROR",
    "COMPUTE_CAPABILITY",
    "ELEMENT_TYPES",
    "KEY_BOX",
    "QUERY_BOX",
    "WORKSPACE_BYTES",
    "CertifiedLayout",
    "Chunk",
    "certified_specs",
    "certify_config",
    "certify_spec",
    "chunks",
    "error_scale",
    "error_units",
    "norm_floor",
    "prepare_config",
    "prepare_spec",
    "row_stride",
    "score_config",
    "score_spec",
    "uncertified_reason",
    "uses_prepare",
]

ELEMENT_TYPES = (float16, bfloat16)
_HEADS = (32, 64)
_HEAD_DIMS = (64, 128)
COMPUTE_CAPABILITY = (9, 0)
_ARCH = "sm_90a"

WORKSPACE_BYTES = 256 << 20
"""What the workspace is kept below by default, as far as one row allows."""

_ALIGNMENT = 256

# The score kernel: 256 keys x 128 (row, head) pairs a tile.
_BLOCK_KEYS = 256
_BLOCK_WORDS = _BLOCK_KEYS // 32
_COLUMNS = 128
_SCORE_THREADS = 384
_KEY_STAGES = 2
_QUERY_STAGES = {64: 6, 128: 3}  # what fits beside the keys

QUERY_BOX = (64, _COLUMNS, 1)
KEY_BOX = (64, _BLOCK_KEYS, 1)
"""What one copy brings to shared memory: 64 columns of 128 query vectors or 256 keys."""

_PREPARE_THREADS = 256

# The certify kernel: keys of a row that a block takes, by its threads. Three small blocks share an SM.
_CLUSTERS = (1, 2, 4, 8)
_SMALL_THREADS, _SMALL_KEYS = 256, 8192
_LARGE_THREADS, _LARGE_KEYS = 512, 16384
_FEW_KEYS = 1024  # a block with fewer is not worth its share of the barriers
_MAX_KEY_SEQ = _CLUSTERS[-1] * _LARGE_KEYS

_PREPARE_PARAMS = (
    *(Param(name, "ptr") for name in ("bias", "allowed", "rows", "tiles")),
    *(Param(name, "u32") for name in ("batch", "q_seq", "key_seq", "top_k")),
)
_SCORE_PARAMS = (
    *(Param(name, "ptr") for name in ("weights", "tiles", "scores", "key_words")),
    *(Param(name, "tensor_map") for name in ("query_map", "key_map")),
    *(Param(name, "u32") for name in ("batch", "q_seq", "key_seq", "row_stride")),
    *(Param(name, "f32") for name in ("scale", "weights_scale", "norm_floor")),
)
_CERTIFY_PARAMS = (
    *(
        Param(name, "ptr")
        for name in (
            *("query", "key", "weights", "bias", "scores", "allowed", "accounts", "key_words", "out", "counters"),
        )
    ),
    *(Param(name, "u32") for name in ("total_rows", "q_seq", "key_seq", "row_stride", "block_keys", "top_k")),
    *(Param(name, "f32") for name in ("scale", "weights_scale", "error_scale", "bias_error", "norm_floor")),
)


def uncertified_reason(
    dtype: DataType, dims: Dims, top_k: int, compute_capability: tuple[int, int], *, aligned: bool
) -> str | None:
    """Why a call cannot take the certified variant, or None if it can.

    ``aligned`` says whether query and key begin at multiples of 16 bytes.
    """
    if compute_capability != COMPUTE_CAPABILITY:
        return "tensor-core scores are for compute capability 9.0, this device has {}.{}".format(*compute_capability)
    if dtype not in ELEMENT_TYPES:
        return f"{dtype} products are not exact in the tensor cores' formats"
    if dims.heads not in _HEADS:
        return f"{dims.heads} heads; tensor-core scores take {_HEADS[0]} or {_HEADS[1]}"
    if dims.head_dim not in _HEAD_DIMS:
        return f"head size {dims.head_dim}; tensor-core scores take {_HEAD_DIMS[0]} or {_HEAD_DIMS[1]}"
    if dims.rows == 0:
        return "there are no rows"
    if top_k >= 2**31:
        return f"top_k {top_k} does not fit 31 bits"
    if not 0 < dims.key_seq <= _MAX_KEY_SEQ:
        return f"{dims.key_seq} keys; a cluster holds rows of 1 to {_MAX_KEY_SEQ}"
    if not aligned:
        return "query or key does not begin at a multiple of 16 bytes"
    return None


# The bound on the error.

BIAS_ERROR = 2.0**-23
"""Of adding the bias, on both sides together, relative to the result."""


def error_units(heads: int, head_dim: int) -> int:
    """The bound in units of 2^-24 times the sum of absolute products; see ``docs/dsa_exactness.md``."""
    strict = head_dim + heads
    tensor_cores = 10.5 * head_dim / 16
    head_sum = heads / 4 + 3
    in_hand = 1.1
    return math.ceil(in_hand * (strict + tensor_cores + head_sum))


def error_scale(heads: int, head_dim: int, scale: float) -> float:
    """What the norms and weights are multiplied by to bound the error, rounded up to f32."""
    exact = error_units(heads, head_dim) * 2.0**-24 * float(np.float32(scale))
    return float(np.nextafter(np.float32(exact), np.float32(np.inf)))


def norm_floor(dtype: DataType, head_dim: int) -> float:
    """What is added to every norm for elements below the normal range, or whose squares are."""
    return math.sqrt(head_dim) * (2.0**-14 if dtype == float16 else 2.0**-62)


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


def _key_words(dims: Dims) -> int:
    """Words of 32 keys a row, whole blocks of keys."""
    return div_up(dims.key_seq, _BLOCK_KEYS) * _BLOCK_WORDS


def _row_bytes(dims: Dims) -> int:
    return 4 * (row_stride(dims) + _key_words(dims) + 1)


def chunks(dims: Dims, workspace_bytes: int) -> Iterator[Chunk]:
    """The rows of a call in chunks whose scores stay below ``workspace_bytes``, but for single tiles of rows."""
    limit = max(1, workspace_bytes // _row_bytes(dims))
    if limit >= dims.q_seq:
        step = limit // dims.q_seq
        for b in range(0, dims.batch, step):
            yield Chunk(b * dims.q_seq, b, min(step, dims.batch - b), dims.q_seq)
        return
    tile_rows = _COLUMNS // dims.heads
    step = max(tile_rows, limit // tile_rows * tile_rows)
    for b in range(dims.batch):
        for s in range(0, dims.q_seq, step):
            yield Chunk(b * dims.q_seq + s, b, 1, min(step, dims.q_seq - s))


@dataclass(frozen=True)
class CertifiedLayout:
    """Byte offsets of the segments within the workspace, each aligned to 256, and its size. All chunks share it.

    Attributes:
        scores_offset: f32 [rows, row_stride], approximate and without the bias.
        allowed_offset: u32 [rows, words], a bit a key.
        rows_offset: u32 [rows], what each allows.
        tiles_offset: u8 [batch, key blocks, row tiles], whether a tile needs scores.
        key_words_offset: (u32, f32) [batch, words], irregular keys and greatest norm.
        nbytes: the whole, a multiple of 256.
        chunks: the rows that are launched together, in order.
    """

    scores_offset: int
    allowed_offset: int
    rows_offset: int
    tiles_offset: int
    key_words_offset: int
    nbytes: int
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, dims: Dims, workspace_bytes: int) -> CertifiedLayout:
        """The layout for ``dims``: enough for each of its chunks."""
        shapes = tuple(chunks(dims, workspace_bytes))
        rows = max(chunk.rows for chunk in shapes)
        batch = max(chunk.batch for chunk in shapes)
        words = _key_words(dims)
        tiles = max(_tiles(dims, chunk) for chunk in shapes)
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
            nbytes=end,
            chunks=shapes,
        )


def _row_tiles(dims: Dims, chunk: Chunk) -> int:
    return chunk.batch * div_up(chunk.q_seq, _COLUMNS // dims.heads)


def _tiles(dims: Dims, chunk: Chunk) -> int:
    return _row_tiles(dims, chunk) * div_up(dims.key_seq, _BLOCK_KEYS)


# Specialisations and launches.


def uses_prepare(dims: Dims, chunk: Chunk, multiprocessors: int) -> bool:
    """Whether the bias is looked through before scoring, a tile of rows a block: too slow where there are few."""
    return _row_tiles(dims, chunk) >= multiprocessors


def prepare_spec(heads: int) -> KernelSpec:
    """Of the kernel that reads the bias."""
    return KernelSpec(
        source="dsa_index_select_prepare.cu",
        entry="dsa_index_select_prepare",
        params=_PREPARE_PARAMS,
        threads=_PREPARE_THREADS,
        macros=(("ELEMENT", float16.cuda), ("TILE_ROWS", str(_COLUMNS // heads))),
        changeable=(),
    )


def prepare_config(spec: KernelSpec, dims: Dims, chunk: Chunk, max_grid_x: int) -> LaunchConfig:
    """A block a tile of rows, in strides."""
    return LaunchConfig((min(_row_tiles(dims, chunk), max_grid_x), 1, 1), (spec.threads, 1, 1))


def _score_shared_bytes(head_dim: int) -> int:
    stages, slabs = _QUERY_STAGES[head_dim], head_dim // 64
    slab_bytes = 128  # a row of it
    operands = slabs * slab_bytes * (_KEY_STAGES * _BLOCK_KEYS + stages * _COLUMNS)
    weights, tiles = 4 * 4 * (_COLUMNS // 4 + 4) * stages, 16 * stages
    barriers = 8 * 2 * (stages + _KEY_STAGES)
    scan = 4 * (_SCORE_THREADS // 32)
    return div_up(operands + weights + tiles + barriers + scan + 8, 1024) * 1024


def score_spec(dtype: DataType, heads: int, head_dim: int) -> KernelSpec:
    """Of the tensor-core score kernel."""
    macros = {
        "ELEMENT": dtype.cuda,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "QUERY_STAGES": _QUERY_STAGES[head_dim],
        "SHARED_BYTES": _score_shared_bytes(head_dim),
    }
    return KernelSpec(
        source="dsa_index_select_score_sm90.cu",
        entry="dsa_index_select_score_sm90",
        params=_SCORE_PARAMS,
        threads=_SCORE_THREADS,
        macros=_text(macros),
        arch=_ARCH,
        changeable=(),
    )


def score_config(spec: KernelSpec, dims: Dims, chunk: Chunk, multiprocessors: int, max_grid_x: int) -> LaunchConfig:
    """A block an SM, each a run of tiles; none where every allowed key is selected anyway."""
    blocks = min(multiprocessors, _tiles(dims, chunk), max_grid_x)
    return LaunchConfig((blocks, 1, 1), (spec.threads, 1, 1), _score_shared_bytes(dims.head_dim))


def _cluster(dims: Dims, rows: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks that share a row, and threads of each."""
    cluster = next((c for c in _CLUSTERS if dims.key_seq <= c * _SMALL_KEYS), _CLUSTERS[-1])
    while cluster < _CLUSTERS[-1] and rows * cluster < multiprocessors and dims.key_seq > cluster * _FEW_KEYS:
        cluster *= 2
    return cluster, _SMALL_THREADS if dims.key_seq <= cluster * _SMALL_KEYS else _LARGE_THREADS


def _certify_shared_bytes(heads: int, head_dim: int, threads: int) -> int:
    """Of the kernel's struct; the scores of the block's keys follow it."""
    warps = threads // 32
    query = heads * (head_dim + 8) * 2
    staged = warps * 4 * max(head_dim, heads + 4) * 4
    words = 4 * 4 * threads
    scan = 4 * warps * (1 + 2 * 4) + 4 * 2 * 4 + 4 * 3
    return div_up(query + max(4 * 4096, staged) + 4 * heads + 4 * 32 + words + 2 * 1024 + 8 + scan, 16) * 16


def certify_spec(dtype: DataType, dims: Dims, rows: int, multiprocessors: int) -> KernelSpec:
    """Of the selection; few rows are spread over more blocks."""
    return _certify_spec(dtype, dims.heads, dims.head_dim, *_cluster(dims, rows, multiprocessors))


def _certify_spec(dtype: DataType, heads: int, head_dim: int, cluster: int, threads: int) -> KernelSpec:
    macros = {
        "ELEMENT": dtype.cuda,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "CLUSTER": cluster,
        "SHARED_BYTES": _certify_shared_bytes(heads, head_dim, threads),
    }
    return KernelSpec(
        source="dsa_index_select_certify.cu",
        entry="dsa_index_select_certify",
        params=_CERTIFY_PARAMS,
        threads=threads,
        macros=_text(macros),
        contract=False,
        arch=_ARCH,
        changeable=(),
    )


def certify_config(spec: KernelSpec, dims: Dims, rows: int, max_grid_x: int) -> tuple[LaunchConfig, int]:
    """A cluster a row, in strides; and how many keys each of its blocks takes."""
    macros = dict(spec.macros)
    cluster = int(macros["CLUSTER"])
    block_keys = div_up(div_up(dims.key_seq, cluster), _BLOCK_KEYS) * _BLOCK_KEYS
    blocks = max(1, min(rows, max_grid_x // cluster)) * cluster if rows else 0
    shared_bytes = int(macros["SHARED_BYTES"]) + 4 * block_keys
    return LaunchConfig((blocks, 1, 1), (spec.threads, 1, 1), shared_bytes), block_keys


def certified_specs() -> tuple[KernelSpec, ...]:
    """Every specialisation of the variant."""
    shapes = list(product(ELEMENT_TYPES, _HEADS, _HEAD_DIMS))
    blocks = [*((cluster, _SMALL_THREADS) for cluster in _CLUSTERS), (_CLUSTERS[-1], _LARGE_THREADS)]
    return (
        *(prepare_spec(heads) for heads in _HEADS),
        *(score_spec(*shape) for shape in shapes),
        *(_certify_spec(*shape, *block) for shape in shapes for block in blocks),
    )


def _text(macros: dict[str, object]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in macros.items())
