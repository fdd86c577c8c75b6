"""Which attention kernel serves a call, and how that kernel is compiled and launched.

The choice is one pure function of dtype, geometry, alignment and compute capability. Tile sizes, thread counts and
shared memory are stated here and in ``attention_sm90`` alone; kernels receive them as macros and assert that they
agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from nxrt_cuda.architecture import own_arch
from nxrt_cuda.capture import CaptureErrorCode
from nxrt_cuda.dtype import DataType, bfloat16, float16, float32
from nxrt_cuda.errors import KernelError
from nxrt_cuda.launch import KernelSpec, LaunchConfig, Param, div_up
from nxrt_cuda.ops import attention_sm90 as sm90
from nxrt_cuda.ops.attention_geometry import DTYPES, AttentionGeometry

__all__ = [
    "ACCESS_BYTES",
    "AttentionVariant",
    "VariantChoice",
    "attention_spec",
    "choose_variant",
    "kernel_specs",
    "launch_arguments",
    "launch_config",
    "lowest_bit",
]


class AttentionVariant(StrEnum):
    """The kernels there are."""

    SIMT = "simt"
    TENSOR_CORE = "tensor_core"
    TF32X3 = "tf32x3"
    BF16X6 = "bf16x6"
    DECODE = "decode"
    DECODE_TENSOR_CORE = "decode_tensor_core"
    SM90 = "sm90"


@dataclass(frozen=True)
class VariantChoice:
    """A variant, and why it was chosen."""

    variant: AttentionVariant
    reason: str


@dataclass(frozen=True)
class _Tiles:
    """How a variant cuts up the work.

    Attributes:
        queries, keys: query rows a block of threads, and keys that it takes at a time.
        threads: of a block.
        stages: blocks of keys or values in its shared memory, where they are loaded ahead.
        blocks: how many blocks of threads a multiprocessor should have registers for.
    """

    queries: int
    keys: int
    threads: int
    stages: int = 1
    blocks: int = 1


_TILES = {
    AttentionVariant.SIMT: _Tiles(queries=64, keys=64, threads=128),
    AttentionVariant.TENSOR_CORE: _Tiles(queries=128, keys=64, threads=128, stages=4),
    AttentionVariant.TF32X3: _Tiles(queries=64, keys=32, threads=128, stages=2),
    AttentionVariant.BF16X6: _Tiles(queries=128, keys=64, threads=384, stages=1),
}

_SOURCES = {
    AttentionVariant.SIMT: "attention_simt.cu",
    AttentionVariant.TENSOR_CORE: "attention_mma.cu",
    AttentionVariant.TF32X3: "attention_tf32.cu",
    AttentionVariant.BF16X6: "attention_bf16x6_sm90.cu",
    AttentionVariant.DECODE: "attention_decode.cu",
    AttentionVariant.DECODE_TENSOR_CORE: "attention_decode_mma.cu",
    AttentionVariant.SM90: "attention_sm90.cu",
}

_ENTRIES = {
    AttentionVariant.SIMT: "flash_attention_{}",
    AttentionVariant.TENSOR_CORE: "flash_attention_{}_tc",
    AttentionVariant.TF32X3: "flash_attention_{}_tf32x3",
    AttentionVariant.BF16X6: "flash_attention_{}_bf16x6",
    AttentionVariant.DECODE: "attention_decode_{}",
    AttentionVariant.DECODE_TENSOR_CORE: "attention_decode_{}_tc",
    AttentionVariant.SM90: "flash_attention_{}_sm90",
}

_PARAMS = tuple(
    Param(name, kind)
    for kind, names in (
        ("ptr", "q key value mask total_lengths past_lengths output capture_error"),
        ("i32", "q_heads group sq sk kv_capacity"),
        ("i64", "mask_batch_stride mask_head_stride"),
        ("i32", "local_window"),
        ("f32", "scale softcap"),
    )
    for name in names.split()
)

_HOPPER = (AttentionVariant.BF16X6, AttentionVariant.SM90)
"""They run on no other architecture."""

_DECODE = (AttentionVariant.DECODE, AttentionVariant.DECODE_TENSOR_CORE)
"""They serve a single query row."""

_CLUSTER_CAPABILITIES = ((9, 0), (10, 0), (12, 0))
"""Those that the decode kernel is compiled for ahead of time with blocks in clusters."""

ACCESS_BYTES = 16
"""The widest access of a thread to memory."""

_MMA_CAPABILITY = (8, 0)
"""From where on there are the matrix products and asynchronous copies of the portable tensor-core kernels."""

_TILE_BYTES = 88
"""What the portable tensor-core kernels keep beside their tiles in shared memory."""

# The decode kernel: query heads that a block reads keys and values for, and blocks that share them.
_MAX_HEADS = 8
_MAX_CLUSTER = 8
_CLUSTER_CAPABILITY = (9, 0)
_BATCH_BLOCKS = 128
"""That a batch element is divided among at most: what fills a device. The size of the batch changes no sum."""
_RUN_KEYS = 32
_WARP_RUNS = 2
"""Runs of keys a warp, at least: fewer are not worth a share of the merging."""
_RUN_BYTES = 18432
"""Keys and values of a run up to which a block has four warps; of longer rows it has two."""


def lowest_bit(bits: int) -> int:
    """The greatest power of two that divides ``bits``."""
    return bits & -bits


def choose_variant(
    dtype: DataType,
    geometry: AttentionGeometry,
    compute_capability: tuple[int, int],
    *,
    alignment: int,
    mask_alignment: int,
) -> VariantChoice:
    """The variant for a call on a device.

    ``alignment`` is what the addresses of query, key, value and output are multiples of, in bytes, and
    ``mask_alignment`` what that of the mask is.
    """
    if geometry.seq_q == 1:
        return _choose_decode(dtype, geometry, compute_capability, alignment)
    if geometry.head_dim % 8 != 0:
        return VariantChoice(AttentionVariant.SIMT, f"head_dim {geometry.head_dim} is not a multiple of 8")
    major, minor = compute_capability
    if compute_capability < _MMA_CAPABILITY:
        return VariantChoice(AttentionVariant.SIMT, f"compute capability {major}.{minor} is below 8.0")
    reason = f"{dtype}, head_dim {geometry.head_dim} is a multiple of 8, compute capability {major}.{minor}"
    is_single = dtype == float32
    portable = AttentionVariant.TF32X3 if is_single else AttentionVariant.TENSOR_CORE
    if compute_capability != sm90.COMPUTE_CAPABILITY:
        return VariantChoice(portable, reason)
    obstacle = sm90.obstacle(dtype, geometry, compute_capability, alignment, mask_alignment)
    if obstacle is not None:
        return VariantChoice(portable, obstacle)
    return VariantChoice(AttentionVariant.BF16X6 if is_single else AttentionVariant.SM90, reason)


@dataclass(frozen=True)
class _DecodeTiles:
    """How the decode kernel cuts up a batch element: what its source calls HEADS, CLUSTER, THREADS, SHARED_BYTES."""

    heads: int
    cluster: int
    threads: int
    shared_bytes: int

    @classmethod
    def of(
        cls, variant: AttentionVariant, geometry: AttentionGeometry, access: int, itemsize: int, *, has_clusters: bool
    ) -> _DecodeTiles:
        """For accesses of ``access`` bytes.

        Without clusters nobody shares the keys of a head, and blocks of one query head are the most there can be.
        """
        if variant is AttentionVariant.DECODE_TENSOR_CORE:
            heads = _MAX_HEADS
            run_bytes = 2 * _RUN_KEYS * (geometry.head_dim * itemsize + ACCESS_BYTES)
        else:
            heads = min(_MAX_HEADS, 1 << (geometry.group - 1).bit_length()) if has_clusters else 1
            packs = geometry.head_dim * itemsize // access
            row_lanes = min(32, 1 << (packs - 1).bit_length())
            run_bytes = 2 * row_lanes * div_up(packs, row_lanes) * 32 * access
        warps = 4 if run_bytes <= _RUN_BYTES else 2
        cluster = _MAX_CLUSTER if has_clusters else 1
        units = geometry.kv_num_heads * div_up(geometry.group, heads)
        while cluster > 1 and (
            units * cluster > _BATCH_BLOCKS or geometry.seq_k < cluster * warps * _WARP_RUNS * _RUN_KEYS
        ):
            cluster //= 2
        states = 4 * heads * div_up(geometry.head_dim, 4) * 4 + 3 * div_up(4 * heads, 16) * 16
        return cls(heads, cluster, 32 * warps, warps * max(run_bytes, states) + states)

    @property
    def macros(self) -> dict[str, object]:
        return {"HEADS": self.heads, "CLUSTER": self.cluster, "SHARED_BYTES": self.shared_bytes}


def _choose_decode(
    dtype: DataType, geometry: AttentionGeometry, compute_capability: tuple[int, int], alignment: int
) -> VariantChoice:
    """Tensor cores multiply the query heads of a group together, in blocks that only clusters make enough of."""
    is_shared = geometry.group > 1 and compute_capability >= _CLUSTER_CAPABILITY
    is_half = dtype != float32 and geometry.head_dim % 16 == 0 and alignment >= ACCESS_BYTES
    if is_shared and is_half and not geometry.has_mask:
        return VariantChoice(
            AttentionVariant.DECODE_TENSOR_CORE,
            f"seq_q is 1, {geometry.group} query heads read the same keys, {dtype}, "
            f"head_dim {geometry.head_dim} is a multiple of 16",
        )
    return VariantChoice(AttentionVariant.DECODE, "seq_q is 1")


def attention_spec(
    variant: AttentionVariant,
    dtype: DataType,
    geometry: AttentionGeometry,
    compute_capability: tuple[int, int],
    *,
    alignment: int,
    mask_alignment: int,
) -> KernelSpec:
    """The specialisation of a variant for a call on a device.

    ``alignment`` is a power of two, at least the element size, that the addresses of query, key, value and
    output are multiples of, and ``mask_alignment`` one for the mask. They and the length of a row decide how
    much one access may move.
    """
    entry = _ENTRIES[variant].format(dtype.suffix)
    access = lowest_bit(alignment | geometry.head_dim * dtype.itemsize | ACCESS_BYTES)
    macros: dict[str, object] = {
        "ENTRY": entry,
        "ELEMENT": dtype.cuda,
        "HEAD_DIM": geometry.head_dim,
        "LOAD_WIDTH": access // dtype.itemsize,
        "CAUSAL": int(geometry.causal),
        "HAS_MASK": int(geometry.has_mask),
        "HAS_WINDOW": int(geometry.local_window > 0),
        "HAS_SOFTCAP": int(geometry.softcap > 0.0),
        "TOTAL_LENGTH_ERROR": int(CaptureErrorCode.TOTAL_LENGTH),
        "PAST_LENGTH_ERROR": int(CaptureErrorCode.PAST_LENGTH),
    }
    if variant is AttentionVariant.TENSOR_CORE:
        pair = lowest_bit(mask_alignment | geometry.seq_k * dtype.itemsize | 2 * dtype.itemsize)
        macros["MASK_WIDTH"] = pair // dtype.itemsize if geometry.has_mask else 1
    cluster = 1
    if variant in _DECODE:
        has_clusters = compute_capability >= _CLUSTER_CAPABILITY
        decode_tiles = _DecodeTiles.of(variant, geometry, access, dtype.itemsize, has_clusters=has_clusters)
        macros |= decode_tiles.macros
        cluster, threads = decode_tiles.cluster, decode_tiles.threads
    elif variant is AttentionVariant.SM90:
        sm90_tiles = sm90.tiles_of(geometry)
        macros |= {
            "CONSUMERS": sm90_tiles.consumers,
            "BLOCK_KEYS": sm90_tiles.keys,
            "QUERY_STAGES": sm90_tiles.query_stages,
            "KEY_STAGES": sm90_tiles.key_stages,
            "VALUE_STAGES": sm90_tiles.value_stages,
            "MASK_WIDTH": sm90.mask_access(geometry, mask_alignment) // dtype.itemsize if geometry.has_mask else 8,
            "SHARED_BYTES": sm90.shared_bytes(geometry.head_dim, sm90_tiles, has_mask=geometry.has_mask),
        }
        threads = sm90_tiles.threads
    else:
        tiles = _tiles(variant, geometry)
        macros |= {"BLOCK_QUERIES": tiles.queries, "BLOCK_KEYS": tiles.keys}
        if variant is not AttentionVariant.SIMT:
            macros["STAGES"] = tiles.stages
        if variant is AttentionVariant.TF32X3:
            macros["BLOCKS"] = tiles.blocks
        macros["SHARED_BYTES"] = _shared_bytes(variant, geometry.head_dim, tiles)
        threads = tiles.threads
    return KernelSpec(
        source=_SOURCES[variant],
        entry=entry,
        params=_params(variant),
        threads=threads,
        macros=tuple((name, str(value)) for name, value in macros.items()),
        arch=own_arch(compute_capability) if cluster > 1 else sm90.ARCH if variant in _HOPPER else None,
        # The 16-bit Hopper kernel was chosen because the scale is positive.
        changeable=() if variant is AttentionVariant.SM90 else ("scale",),
    )


def launch_arguments(
    variant: AttentionVariant, geometry: AttentionGeometry, *, l2_cache_bytes: int
) -> tuple[int | float | bytes, ...]:
    """The arguments of a launch, with zeros in place of the addresses and tensor maps."""
    arguments: dict[str, int | float | bytes] = {
        "q_heads": geometry.num_heads,
        "group": geometry.group,
        "sq": geometry.seq_q,
        "sk": geometry.seq_k,
        "kv_capacity": geometry.kv_capacity,
        "mask_batch_stride": geometry.mask_batch_stride,
        "mask_head_stride": geometry.mask_head_stride,
        "local_window": geometry.local_window,
        "scale": geometry.scale,
        "softcap": geometry.softcap,
    }
    if variant is AttentionVariant.SM90:
        arguments["tiles"] = sm90.tile_count(geometry)
        arguments["planes_per_section"] = sm90.planes_per_section(geometry, l2_cache_bytes)
    unbound: dict[str, int | bytes] = {"ptr": 0, "tensor_map": bytes(128)}
    return tuple(arguments[name] if name in arguments else unbound[kind] for name, kind in _params(variant))


def launch_config(
    op: str,
    variant: AttentionVariant,
    spec: KernelSpec,
    geometry: AttentionGeometry,
    *,
    max_grid_dim_x: int,
    multiprocessor_count: int,
) -> LaunchConfig:
    """Grid, block and shared memory of a call of a specialisation. An empty batch or query gives an empty grid.

    Raises:
        KernelError: the grid is larger than the device allows.
    """
    macros = dict(spec.macros)
    if variant is AttentionVariant.SM90:
        blocks = min(sm90.tile_count(geometry), multiprocessor_count)
    elif variant in _DECODE:
        head_blocks = div_up(geometry.group, int(macros["HEADS"]))
        blocks = geometry.batch * geometry.seq_q * geometry.kv_num_heads * head_blocks * int(macros["CLUSTER"])
    else:
        blocks = geometry.batch * geometry.num_heads * div_up(geometry.seq_q, int(macros["BLOCK_QUERIES"]))
    if blocks >= 2**64:
        raise KernelError(op, f"fused Attention grid overflow: {blocks} blocks")
    if blocks > max_grid_dim_x:
        raise KernelError(
            op, f"fused Attention requires {blocks} blocks, exceeding CUDA grid.x ({max_grid_dim_x} on this device)"
        )
    return LaunchConfig((blocks, 1, 1), (spec.threads, 1, 1), int(macros["SHARED_BYTES"]))


def kernel_specs() -> tuple[KernelSpec, ...]:
    """A sample of the specialisations that this operator can launch: every variant and dtype, at the head sizes
    and access widths that press hardest on registers, with every feature on and off."""
    plain = AttentionGeometry(
        batch=1,
        num_heads=1,
        kv_num_heads=1,
        seq_q=1,
        seq_k=1,
        kv_capacity=1,
        head_dim=128,
        causal=True,
        local_window=0,
        softcap=0.0,
        scale=1.0,
    )
    full = replace(plain, seq_k=2, local_window=1, softcap=1.0, has_mask=True)
    simt, decode = AttentionVariant.SIMT, AttentionVariant.DECODE
    tensor_core, tf32x3, hopper = AttentionVariant.TENSOR_CORE, AttentionVariant.TF32X3, AttentionVariant.SM90
    bf16x6 = AttentionVariant.BF16X6
    features = (plain, replace(plain, causal=False), replace(full, has_mask=False), full)
    sample = [
        *((simt, dtype, geometry) for dtype in DTYPES for geometry in (plain, full)),
        *(
            (variant, dtype, replace(geometry, head_dim=head_dim))
            for variant, dtype in (
                (tensor_core, float16),
                (tensor_core, bfloat16),
                (tf32x3, float32),
                (bf16x6, float32),
            )
            for geometry in features
            for head_dim in (128, 64)
        ),
        *(
            (variant, dtype, replace(plain, head_dim=head_dim))
            for variant, dtype in ((tensor_core, float16), (tf32x3, float32), (bf16x6, float32))
            for head_dim in (8, 32, 72, 96, 120)
        ),
        *(
            (simt, dtype, replace(plain, head_dim=head_dim))
            for dtype in (float32, float16)
            for head_dim in (1, 65, 127)
        ),
        *(
            (hopper, dtype, replace(geometry, head_dim=head_dim, seq_q=seq_q))
            for dtype in (float16, bfloat16)
            for geometry in (plain, replace(plain, causal=False), full, replace(full, has_mask=False))
            for head_dim, seq_q in ((128, 4096), (64, 4096), (64, 512))
        ),
        *(
            (hopper, bfloat16, replace(plain, causal=causal, head_dim=head_dim, seq_q=4096, **feature))
            for causal in (True, False)
            for feature in ({"softcap": 1.0}, {"has_mask": True, "seq_k": 8})
            for head_dim in (128, 64)
        ),
        *((hopper, float16, replace(plain, head_dim=head_dim, seq_q=4096)) for head_dim in (8, 32, 72, 96, 120)),
    ]
    rows = [
        (decode, dtype, replace(geometry, num_heads=heads, seq_k=8192, head_dim=head_dim))
        for geometry in (plain, full)
        for dtype, head_dim, heads in (
            *((dtype, 128, heads) for dtype in DTYPES for heads in (4, 8)),
            *((float16, head_dim, 8) for head_dim in (1, 7, 80, 127)),
        )
    ]
    rows_on_tensor_cores = [
        (AttentionVariant.DECODE_TENSOR_CORE, dtype, replace(geometry, num_heads=4, seq_k=seq_k, head_dim=head_dim))
        for geometry in (plain, replace(full, has_mask=False))
        for dtype, head_dim in ((bfloat16, 128), (float16, 128), (float16, 64), (float16, 16))
        for seq_k in (1, 8192)
    ]
    aligned = partial(attention_spec, alignment=ACCESS_BYTES, mask_alignment=ACCESS_BYTES)
    by_element = partial(attention_spec, alignment=float16.itemsize, mask_alignment=float16.itemsize)
    by_word = partial(attention_spec, alignment=float32.itemsize, mask_alignment=float32.itemsize)
    long = replace(full, seq_q=4096, seq_k=4096)
    specs = (
        *(aligned(*call, sm90.COMPUTE_CAPABILITY) for call in sample),
        *(aligned(*call, capability) for capability in (_MMA_CAPABILITY, *_CLUSTER_CAPABILITIES) for call in rows),
        *(aligned(*call, capability) for capability in _CLUSTER_CAPABILITIES for call in rows_on_tensor_cores),
        *(by_element(tensor_core, float16, geometry, _MMA_CAPABILITY) for geometry in (plain, full)),
        *(by_word(variant, float32, plain, sm90.COMPUTE_CAPABILITY) for variant in (tf32x3, bf16x6)),
        attention_spec(hopper, float16, long, sm90.COMPUTE_CAPABILITY, alignment=ACCESS_BYTES, mask_alignment=4),
    )
    return tuple(dict.fromkeys(specs))


def _params(variant: AttentionVariant) -> tuple[Param, ...]:
    return sm90.PARAMS if variant is AttentionVariant.SM90 else _PARAMS


def _tiles(variant: AttentionVariant, geometry: AttentionGeometry) -> _Tiles:
    """How a variant but that for one row and the 16-bit one of Hopper cuts up a call.

    On tensor cores registers are short beyond head_dim 64, where what takes more of them leaves smaller blocks. Up to
    there three blocks of threads of the plain f32 kernel fit a multiprocessor, and three warpgroups of 64 query rows a
    block of Hopper's. ``benchmarks/attention_log.md`` says what else was tried.
    """
    tiles = _TILES[variant]
    is_wide = geometry.head_dim > 64
    if variant is AttentionVariant.BF16X6 and not is_wide:
        return replace(tiles, queries=192, threads=512, stages=2)
    takes_registers = (
        geometry.has_mask
        or (geometry.local_window > 0 and geometry.softcap > 0.0)
        or (is_wide and geometry.head_dim % 16 != 0)
    )
    if variant is AttentionVariant.TENSOR_CORE and is_wide and takes_registers:
        return replace(tiles, keys=32)
    if variant is AttentionVariant.TF32X3 and is_wide and takes_registers:
        return replace(tiles, keys=16, stages=4)
    if variant is AttentionVariant.TF32X3 and not is_wide and not takes_registers:
        return replace(tiles, blocks=3)
    return tiles


def _shared_bytes(variant: AttentionVariant, head_dim: int, tiles: _Tiles) -> int:
    """Dynamic shared memory of a block: ``sizeof(Smem)`` in the variant's source."""
    if variant is AttentionVariant.SIMT:
        row = div_up(head_dim, 16) * 16 + 4
        return 4 * ((tiles.queries + tiles.keys) * row + tiles.queries * (tiles.keys + 4))
    if variant is AttentionVariant.TENSOR_CORE:
        return 2 * (64 if head_dim <= 64 else 128) * (tiles.queries + tiles.stages * tiles.keys) + _TILE_BYTES
    if variant is AttentionVariant.TF32X3:
        return 4 * (div_up(head_dim, 16) * 16 + 4) * (tiles.queries + tiles.stages * tiles.keys) + _TILE_BYTES
    parts = 6 * div_up(head_dim, 64) * 64 * (tiles.queries + 2 * tiles.stages * tiles.keys)
    return parts + 96 + tiles.stages * (4 * 4 + 4 * 8)
