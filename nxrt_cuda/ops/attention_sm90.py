"""The Hopper variant of fused attention: which calls it serves, and what its launches are made of.

``kernels/attention_sm90.cu`` moves its operands by tensor maps, which state addresses and extents. They are
arguments like others, and so part of what a captured graph holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from nxrt_cuda.dtype import DataType, float16, float32
from nxrt_cuda.launch import Param, div_up
from nxrt_cuda.ops.attention_geometry import AttentionGeometry

__all__ = [
    "ARCH",
    "COMPUTE_CAPABILITY",
    "PARAMS",
    "MapLayout",
    "Sm90Tiles",
    "map_layouts",
    "mask_access",
    "obstacle",
    "planes_per_section",
    "shared_bytes",
    "tile_count",
    "tiles_of",
]

COMPUTE_CAPABILITY = (9, 0)
ARCH = "sm_90a"

PARAMS = tuple(
    Param(name, kind)
    for kind, names in (
        ("ptr", "q key value mask total_lengths past_lengths output capture_error tile_counter"),
        ("tensor_map", "q_map key_map value_map output_map"),
        ("i32", "q_heads group sq sk kv_capacity tiles planes_per_section"),
        ("i64", "mask_batch_stride mask_head_stride"),
        ("i32", "local_window"),
        ("f32", "scale softcap"),
    )
    for name in names.split()
)

ROWS = 64
"""Query rows of a consumer: one warpgroup's matrix product."""

_SLAB_COLUMNS = 64
_MAP_ALIGNMENT = 16
_MIN_COPY, _MAX_COPY = 4, 16
_MAX_SEQUENCE = 2**30
_MAX_TILES = 2**30
_SHORT_SEQUENCE = 768


@dataclass(frozen=True)
class Sm90Tiles:
    """How a call is cut up.

    Attributes:
        consumers: warpgroups that compute, of 64 query rows each.
        keys: keys a block.
        query_stages: tiles of queries in shared memory.
        key_stages, value_stages: blocks of keys, and of values, there.
    """

    consumers: int
    keys: int
    query_stages: int
    key_stages: int
    value_stages: int

    @property
    def queries(self) -> int:
        return ROWS * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)


def obstacle(
    dtype: DataType,
    geometry: AttentionGeometry,
    compute_capability: tuple[int, int],
    alignment: int,
    mask_alignment: int,
) -> str | None:
    """Why this variant, or that for f32 on Hopper, does not serve a call; None if it does.

    ``alignment`` is what the addresses of query, key, value and output are multiples of, in bytes, and
    ``mask_alignment`` what that of the mask is.
    """
    if compute_capability != COMPUTE_CAPABILITY:
        return "there is no tensor-core variant for {} on compute capability {}.{}".format(dtype, *compute_capability)
    if geometry.head_dim % 8 != 0:
        return f"head_dim {geometry.head_dim} is not a multiple of 8"
    if dtype == float32:
        return None  # it reads by ordinary loads, and needs no more
    if alignment < _MAP_ALIGNMENT:
        return f"operands are aligned to {alignment} bytes, not to {_MAP_ALIGNMENT}"
    if geometry.has_mask and mask_access(geometry, mask_alignment) < _MIN_COPY:
        return f"rows of the mask are not aligned to {_MIN_COPY} bytes, which an asynchronous copy moves at least"
    if geometry.seq_k == 0:
        return "there are no keys"
    if geometry.scale <= 0.0:
        return f"scale {geometry.scale} is not positive"
    if max(geometry.seq_q, geometry.seq_k) > _MAX_SEQUENCE:
        return f"seq_q {geometry.seq_q} or seq_k {geometry.seq_k} is beyond {_MAX_SEQUENCE}"
    if tile_count(geometry) > _MAX_TILES:
        return f"{tile_count(geometry)} tiles are more than {_MAX_TILES}"
    return None


def mask_access(geometry: AttentionGeometry, mask_alignment: int) -> int:
    """Bytes of the mask that one copy may move: up to 16 that its address and its rows are aligned to."""
    bits = mask_alignment | geometry.seq_k * float16.itemsize | _MAX_COPY
    return bits & -bits


def tiles_of(geometry: AttentionGeometry) -> Sm90Tiles:
    """The tiles that were fastest on an H200; ``benchmarks/attention_log.md`` says what else was tried.

    A mask takes the shared memory of a third tile of queries. Up to head_dim 64 three consumers fit, which hide the
    exponentials best, unless two of window, softcap and mask take their registers; where a tile of 192 rows would
    mostly lie beyond the triangle, two waste less.
    """
    if geometry.head_dim > _SLAB_COLUMNS:
        if geometry.has_mask:
            return Sm90Tiles(consumers=2, keys=128, query_stages=2, key_stages=2, value_stages=2)
        return Sm90Tiles(consumers=2, keys=128, query_stages=3, key_stages=2, value_stages=2)
    is_short = geometry.causal and geometry.seq_q <= _SHORT_SEQUENCE
    is_full = sum((geometry.local_window > 0, geometry.softcap > 0.0, geometry.has_mask)) > 1
    return Sm90Tiles(consumers=2 if is_short or is_full else 3, keys=128, query_stages=3, key_stages=3, value_stages=3)


def tile_count(geometry: AttentionGeometry) -> int:
    """Tiles of query rows in all planes."""
    return geometry.batch * geometry.num_heads * div_up(geometry.seq_q, tiles_of(geometry).queries)


def planes_per_section(geometry: AttentionGeometry, l2_cache_bytes: int) -> int:
    """How many query planes are worked on at once, so that their keys and values stay in the L2 cache.

    Half of it where tiles differ in weight and many planes even out the load, or a quarter for short rows, which
    wait for memory more than for each other; else an eighth, for every multiprocessor then reads the same blocks at
    about the same time. What does not fill a section of its own is spread over the others.
    """
    if geometry.causal or geometry.local_window > 0:
        budget = l2_cache_bytes // (4 if geometry.seq_k <= _SHORT_SEQUENCE else 2)
    else:
        budget = l2_cache_bytes // 8
    planes = geometry.batch * geometry.num_heads
    kv_planes = planes // geometry.group
    plane = 2 * geometry.seq_k * geometry.head_dim * float16.itemsize
    sections = max(kv_planes // max(budget // plane, 1), 1)
    return kv_planes // sections * geometry.group


def shared_bytes(head_dim: int, tiles: Sm90Tiles, *, has_mask: bool) -> int:
    """Dynamic shared memory of a block: ``sizeof(Smem)`` in the kernel. A row of the mask is padded by 16 bytes."""
    slab_row = div_up(head_dim, _SLAB_COLUMNS) * _SLAB_COLUMNS * float16.itemsize
    blocks = tiles.key_stages + tiles.value_stages
    buffers = slab_row * (tiles.query_stages * tiles.queries + blocks * tiles.keys)
    mask = (tiles.queries if has_mask else 1) * (tiles.keys + 8) * float16.itemsize
    mailboxes = (56 + 16 * tiles.consumers) * tiles.query_stages
    shares = 3 * 4 * tiles.consumers * tiles.query_stages
    words = div_up(shares + 8 * 4 + tiles.value_stages * 3 * 4, 8) * 8
    barriers = 8 * (tiles.query_stages * (tiles.consumers + 1) + 2 * blocks + tiles.value_stages)
    return div_up(buffers + mask + mailboxes + words + barriers, 16) * 16


@dataclass(frozen=True)
class MapLayout:
    """A tensor map but for its address; dimensions are head_dim, sequence, planes.

    Attributes:
        parameter: its place among the parameters.
        operand: the place of the operand that it describes.
        extents, strides, box: as ``runtime.tensor_map`` takes them.
    """

    parameter: int
    operand: int
    extents: tuple[int, int, int]
    strides: tuple[int, int]
    box: tuple[int, int, int]


def map_layouts(geometry: AttentionGeometry) -> tuple[MapLayout, ...]:
    """The maps of query, key, value and output."""
    tiles = tiles_of(geometry)
    row = geometry.head_dim * float16.itemsize
    queries = (
        (geometry.head_dim, geometry.seq_q, geometry.batch * geometry.num_heads),
        (row, row * geometry.seq_q),
        (_SLAB_COLUMNS, ROWS, 1),
    )
    keys = (
        (geometry.head_dim, geometry.seq_k, geometry.batch * geometry.kv_num_heads),
        (row, row * geometry.kv_capacity),
        (_SLAB_COLUMNS, tiles.keys, 1),
    )
    names = [name for name, _ in PARAMS]
    return tuple(
        MapLayout(names.index(f"{name}_map"), names.index(name), *layout)
        for name, layout in (("q", queries), ("key", keys), ("value", keys), ("output", queries))
    )
