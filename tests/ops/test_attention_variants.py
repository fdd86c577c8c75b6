"""The geometry of an attention call, the choice of its kernel, and the limits of its grid."""

from __future__ import annotations

from dataclasses import replace

import pytest

import nxrt_cuda as nx
from nxrt_cuda.launch import LaunchConfig
from nxrt_cuda.ops import attention_sm90 as sm90
from nxrt_cuda.ops.attention_geometry import AttentionAttributes, AttentionGeometry, supported
from nxrt_cuda.ops.attention_variants import (
    AttentionVariant,
    attention_spec,
    choose_variant,
    launch_arguments,
    launch_config,
)

PLAIN = AttentionGeometry(
    batch=2,
    num_heads=6,
    kv_num_heads=3,
    seq_q=100,
    seq_k=7,
    kv_capacity=9,
    head_dim=64,
    causal=True,
    local_window=0,
    softcap=0.0,
    scale=0.125,
)


def resolve(
    *inputs: tuple[int, ...] | nx.TensorMetadata | None, dtype: nx.DataType = nx.float16, **attributes: object
) -> AttentionGeometry:
    """The geometry of contiguous inputs of these shapes."""
    node = nx.Node("Attention", attributes=attributes)
    metadata = [nx.TensorMetadata(dtype, shape) if isinstance(shape, tuple) else shape for shape in inputs]
    return AttentionGeometry.resolve(AttentionAttributes.from_node(node), metadata)


def test_support_gate_targets_prefill_and_common_head_dims() -> None:
    """More than one query row, and head sizes from 1 to 128."""
    assert supported(2, 128)
    assert supported(2048, 64)
    assert supported(2, 1)
    assert not supported(1, 128)
    assert not supported(2, 129)
    assert not supported(2, 0)


@pytest.mark.parametrize(
    ("dtype", "seq_q", "head_dim", "compute_capability", "variant", "reason"),
    [
        (nx.float16, 2, 64, (8, 0), "tensor_core", "Float16, head_dim 64 is a multiple of 8, compute capability 8.0"),
        (nx.bfloat16, 2, 8, (8, 6), "tensor_core", "BFloat16, head_dim 8 is a multiple of 8, compute capability 8.6"),
        (
            nx.bfloat16,
            2,
            64,
            (10, 0),
            "tensor_core",
            "BFloat16, head_dim 64 is a multiple of 8, compute capability 10.0",
        ),
        (nx.float16, 2048, 128, (9, 0), "sm90", "Float16, head_dim 128 is a multiple of 8, compute capability 9.0"),
        (nx.bfloat16, 2, 8, (9, 0), "sm90", "BFloat16, head_dim 8 is a multiple of 8, compute capability 9.0"),
        (nx.float16, 2, 64, (7, 5), "simt", "compute capability 7.5 is below 8.0"),
        (nx.float16, 2, 12, (8, 0), "simt", "head_dim 12 is not a multiple of 8"),
        (nx.bfloat16, 2, 127, (9, 0), "simt", "head_dim 127 is not a multiple of 8"),
        (nx.float32, 2, 64, (8, 0), "tf32x3", "Float32, head_dim 64 is a multiple of 8, compute capability 8.0"),
        (nx.float32, 2, 128, (10, 0), "tf32x3", "Float32, head_dim 128 is a multiple of 8, compute capability 10.0"),
        (nx.float32, 2, 128, (9, 0), "bf16x6", "Float32, head_dim 128 is a multiple of 8, compute capability 9.0"),
        (nx.float32, 2, 64, (7, 5), "simt", "compute capability 7.5 is below 8.0"),
        (nx.float32, 2, 7, (9, 0), "simt", "head_dim 7 is not a multiple of 8"),
        (
            nx.float16,
            1,
            64,
            (9, 0),
            "decode_tensor_core",
            "seq_q is 1, 2 query heads read the same keys, Float16, head_dim 64 is a multiple of 16",
        ),
        (nx.bfloat16, 1, 72, (9, 0), "decode", "seq_q is 1"),
        (nx.bfloat16, 1, 64, (8, 9), "decode", "seq_q is 1"),
        (nx.float32, 1, 64, (9, 0), "decode", "seq_q is 1"),
        (nx.float32, 1, 7, (6, 1), "decode", "seq_q is 1"),
    ],
)
def test_choice_of_variant(
    dtype: nx.DataType,
    seq_q: int,
    head_dim: int,
    compute_capability: tuple[int, int],
    variant: str,
    reason: str,
) -> None:
    """With a head size in eights there are a Hopper kernel and one for other tensor cores, of 16-bit types and of f32;
    one row goes to a decode kernel, and the rest to SIMT."""
    geometry = replace(PLAIN, seq_q=seq_q, head_dim=head_dim)
    choice = choose_variant(dtype, geometry, compute_capability, alignment=16, mask_alignment=16)
    assert (choice.variant.value, choice.reason) == (variant, reason)


@pytest.mark.parametrize(
    ("alignment", "changes", "reason"),
    [
        (8, {}, "operands are aligned to 8 bytes, not to 16"),
        (16, {"seq_k": 0}, "there are no keys"),
        (16, {"scale": -0.5}, "scale -0.5 is not positive"),
        (16, {"seq_q": 2**30 + 1}, f"seq_q {2**30 + 1} or seq_k 7 is beyond {2**30}"),
        (16, {"batch": 2**29}, f"{2**29 * 6} tiles are more than {2**30}"),
    ],
)
def test_what_the_hopper_kernel_does_not_serve(alignment: int, changes: dict[str, int | float], reason: str) -> None:
    """The other tensor-core kernel does, and the reason names what stood in the way. For f32 it has no such limits."""
    geometry = replace(PLAIN, **changes)
    single = choose_variant(nx.float32, geometry, (9, 0), alignment=alignment, mask_alignment=16)
    assert single.variant is AttentionVariant.BF16X6
    for dtype in (nx.float16, nx.bfloat16):
        choice = choose_variant(dtype, geometry, (9, 0), alignment=alignment, mask_alignment=16)
        assert (choice.variant.value, choice.reason) == ("tensor_core", reason)


@pytest.mark.parametrize(
    ("changes", "alignment"), [({"kv_num_heads": 6}, 16), ({"has_mask": True}, 16), ({}, 8)], ids=str
)
def test_single_rows_that_tensor_cores_do_not_serve(changes: dict[str, int | bool], alignment: int) -> None:
    """One query head has nothing to share, a mask may hide a NaN from one head and not from another, and rows are
    copied 16 bytes at a time."""
    geometry = replace(PLAIN, seq_q=1, **changes)
    choice = choose_variant(nx.float16, geometry, (9, 0), alignment=alignment, mask_alignment=16)
    assert choice.variant is AttentionVariant.DECODE


def test_rows_of_a_mask_that_cannot_be_copied_in_words() -> None:
    """An odd number of keys, or an odd address, go to the other tensor-core kernel."""
    for seq_k, mask_alignment, is_served in ((7, 16, False), (8, 2, False), (8, 4, True), (6, 16, True), (6, 4, True)):
        geometry = replace(PLAIN, seq_k=seq_k, has_mask=True)
        choice = choose_variant(nx.float16, geometry, (9, 0), alignment=16, mask_alignment=mask_alignment)
        assert choice.variant is (AttentionVariant.SM90 if is_served else AttentionVariant.TENSOR_CORE)
        assert ("rows of the mask are not aligned to 4 bytes" in choice.reason) is not is_served


def test_every_shape_that_the_gate_passes_has_a_prefill_variant() -> None:
    """The gate and the choice agree."""
    for head_dim in range(1, 129):
        for dtype in (nx.float32, nx.float16, nx.bfloat16):
            for seq_q in (1, 2, 4096):
                geometry = replace(PLAIN, seq_q=seq_q, head_dim=head_dim)
                chosen = choose_variant(dtype, geometry, (9, 0), alignment=16, mask_alignment=16).variant
                assert supported(seq_q, head_dim) == ("decode" not in chosen)


# Geometry.


def test_geometry_of_contiguous_operands() -> None:
    """Extents, group and defaults."""
    geometry = resolve((2, 6, 4, 16), (2, 3, 7, 16), (2, 3, 7, 16), num_heads=6, kv_num_heads=3)
    assert (geometry.batch, geometry.num_heads, geometry.kv_num_heads, geometry.group) == (2, 6, 3, 2)
    assert (geometry.seq_q, geometry.seq_k, geometry.kv_capacity, geometry.head_dim) == (4, 7, 7, 16)
    assert (geometry.scale, geometry.softcap, geometry.local_window, geometry.causal) == (0.25, 0.0, 0, False)
    assert not geometry.has_mask


def test_defaults_of_group_query_attention() -> None:
    """It is causal unless it says otherwise."""
    for attributes, causal in (({}, True), ({"is_causal": 0}, False)):
        node = nx.Node("GroupQueryAttention", "com.microsoft", {"num_heads": 2, "kv_num_heads": 1, **attributes})
        assert AttentionAttributes.from_node(node).causal == causal
    assert not AttentionAttributes.from_node(nx.Node("Attention")).causal


@pytest.mark.parametrize(
    ("shape", "strides", "capacity"),
    [
        ((2, 3, 7, 8), (3 * 32 * 8, 32 * 8, 8, 1), 32),
        ((2, 3, 1, 8), (3 * 32 * 8, 32 * 8, 8, 1), 32),
        ((2, 3, 0, 8), (3 * 32 * 8, 32 * 8, 8, 1), 0),  # without elements every stride is contiguous
        ((2, 1, 7, 8), (32 * 8, 32 * 8, 8, 1), 32),
        ((2, 1, 7, 8), (32 * 8, 999, 8, 1), 32),  # the stride of one head does not matter
        ((1, 3, 7, 8), (999, 32 * 8, 8, 1), 32),  # nor that of one batch
        ((1, 1, 7, 8), (999, 999, 8, 1), 7),
        ((2, 3, 7, 1), (3 * 32, 32, 1, 999), 32),
    ],
)
def test_capacity_is_read_off_the_strides(shape: tuple[int, ...], strides: tuple[int, ...], capacity: int) -> None:
    """What narrow() makes of a cache says how far its planes are apart."""
    cache = nx.TensorMetadata(nx.float16, shape, strides)
    assert resolve((shape[0], shape[1], 4, shape[3]), cache, cache).kv_capacity == capacity


@pytest.mark.parametrize(
    ("planes", "strides"),
    [
        ((), (0, 0)),
        ((1, 1), (0, 0)),
        ((2, 1), (28, 0)),
        ((1, 6), (0, 28)),
        ((2, 6), (168, 28)),
    ],
)
def test_the_rank_of_the_mask_says_its_planes(planes: tuple[int, ...], strides: tuple[int, int]) -> None:
    """Strides of 0 repeat a plane."""
    geometry = resolve((2, 6, 4, 8), (2, 3, 7, 8), (2, 3, 7, 8), (*planes, 4, 7))
    assert geometry.has_mask
    assert (geometry.mask_batch_stride, geometry.mask_head_stride) == strides


# Limits.


@pytest.mark.parametrize(
    ("query", "key", "name", "value"),
    [
        ((2**31, 1, 2, 1), (2**31, 1, 2, 1), "batch", 2**31),
        ((1, 2**31, 2, 1), (1, 1, 2, 1), "num_heads", 2**31),
        ((1, 1, 2**31, 1), (1, 1, 2, 1), "seq_q", 2**31),
        ((1, 1, 2, 1), (1, 1, 2**31, 1), "seq_k", 2**31),
    ],
)
def test_extents_fit_i32(query: tuple[int, ...], key: tuple[int, ...], name: str, value: int) -> None:
    """An extent beyond 32 bits is refused by name."""
    with pytest.raises(nx.KernelError, match=f"fused Attention: {name} {value} exceeds i32"):
        resolve(query, key, key)


def test_a_capacity_beyond_i32_is_refused() -> None:
    """The plane stride of a cache may be larger than its rows can be counted."""
    cache = nx.TensorMetadata(nx.float16, (2, 1, 7, 1), (2**31, 2**31, 1, 1))
    with pytest.raises(nx.KernelError, match=f"fused Attention: KV capacity {2**31} exceeds i32"):
        resolve((2, 1, 2, 1), cache, cache)


@pytest.mark.parametrize(
    ("query", "key", "mask", "name"),
    [
        ((2**30, 2**30, 8, 1), (2**30, 1, 1, 1), None, "query"),
        ((2**30, 2**20, 1, 1), (2**30, 2**20, 2**13, 1), None, "key"),
        ((2**30, 2**20, 2**6, 1), (2**30, 1, 2**7, 1), (2**30, 2**20, 2**6, 2**7), "attn_mask"),
    ],
)
def test_offsets_fit_i64(query: tuple[int, ...], key: tuple[int, ...], mask: tuple[int, ...] | None, name: str) -> None:
    """A tensor whose last offset does not fit 64 bits is refused by name."""
    with pytest.raises(nx.KernelError, match=f"'{name}'.* element count overflow"):
        resolve(query, key, key, mask)


def spec_of(
    variant: AttentionVariant,
    dtype: nx.DataType,
    geometry: AttentionGeometry,
    compute_capability: tuple[int, int] = (9, 0),
    *,
    alignment: int = 16,
    mask_alignment: int = 16,
) -> nx.KernelSpec:
    """The specialisation for operands that are aligned to 16 bytes, on Hopper."""
    return attention_spec(
        variant, dtype, geometry, compute_capability, alignment=alignment, mask_alignment=mask_alignment
    )


def config_of(
    variant: AttentionVariant,
    geometry: AttentionGeometry,
    max_grid_dim_x: int = 2**31 - 1,
    *,
    dtype: nx.DataType = nx.float16,
    compute_capability: tuple[int, int] = (9, 0),
) -> LaunchConfig:
    """The launch on a device of 132 multiprocessors."""
    return launch_config(
        "Attention",
        variant,
        spec_of(variant, dtype, geometry, compute_capability),
        geometry,
        max_grid_dim_x=max_grid_dim_x,
        multiprocessor_count=132,
    )


def test_grid_covers_every_plane_and_tile() -> None:
    """64 to 192 query rows a block in prefill, one plane a block in decode; at 16 bits on Hopper a block a
    multiprocessor."""
    for variant in (AttentionVariant.SIMT, AttentionVariant.TF32X3):
        assert config_of(variant, PLAIN).grid == (2 * 6 * 2, 1, 1)
    assert config_of(AttentionVariant.TENSOR_CORE, PLAIN).grid == (2 * 6, 1, 1)
    for head_dim, rows in ((64, 192), (72, 128)):
        for seq_q, tiles in ((rows, 1), (rows + 1, 2)):
            geometry = replace(PLAIN, head_dim=head_dim, seq_q=seq_q)
            assert config_of(AttentionVariant.BF16X6, geometry).grid == (2 * 6 * tiles, 1, 1)
    assert config_of(AttentionVariant.SM90, PLAIN).grid == (2 * 6, 1, 1)
    assert config_of(AttentionVariant.SM90, replace(PLAIN, batch=100)).grid == (132, 1, 1)
    assert config_of(AttentionVariant.DECODE, replace(PLAIN, seq_q=1), compute_capability=(8, 0)).grid == (12, 1, 1)
    for variant in AttentionVariant:
        for empty in ({"batch": 0}, {"seq_q": 0}):
            assert config_of(variant, replace(PLAIN, **empty)).is_empty


@pytest.mark.parametrize(
    ("heads", "kv_heads", "seq_k", "heads_a_block", "units", "cluster"),
    [
        (32, 8, 8192, 4, 8, 8),
        (32, 32, 8192, 1, 32, 4),
        (64, 64, 8192, 1, 64, 2),
        (128, 128, 8192, 1, 128, 1),
        (5, 1, 8192, 8, 1, 8),
        (40, 2, 8192, 8, 6, 8),
        (32, 8, 2048, 4, 8, 8),
        (32, 8, 2047, 4, 8, 4),
        (32, 8, 256, 4, 8, 1),
        (32, 8, 0, 4, 8, 1),
    ],
)
def test_decode_shares_keys_within_a_group_and_divides_them_within_a_cluster(
    heads: int, kv_heads: int, seq_k: int, heads_a_block: int, units: int, cluster: int
) -> None:
    """Up to 8 query heads a block; up to 8 blocks for the keys of a head, as far as these are long and blocks few.

    The size of the batch has no say: it must not change a bit of a row.
    """
    for batch in (1, 3):
        geometry = replace(
            PLAIN,
            batch=batch,
            num_heads=heads,
            kv_num_heads=kv_heads,
            seq_q=1,
            seq_k=seq_k,
            kv_capacity=seq_k,
            head_dim=128,
        )
        spec = spec_of(AttentionVariant.DECODE, nx.bfloat16, geometry)
        macros = dict(spec.macros)
        assert (macros["HEADS"], macros["CLUSTER"]) == (str(heads_a_block), str(cluster))
        assert spec.arch == ("sm_90a" if cluster > 1 else None)
        assert config_of(AttentionVariant.DECODE, geometry).grid == (batch * units * cluster, 1, 1)
        spec = spec_of(AttentionVariant.DECODE, nx.bfloat16, geometry, (8, 9))
        macros = dict(spec.macros)
        assert (macros["HEADS"], macros["CLUSTER"], spec.arch) == ("1", "1", None)


def test_decode_on_tensor_cores_takes_eight_heads_a_block() -> None:
    """Those that are not there cost a product nothing."""
    for heads, units in ((4, 2), (16, 2), (20, 4)):
        geometry = replace(PLAIN, num_heads=heads, kv_num_heads=2, seq_q=1, seq_k=8192, kv_capacity=8192)
        macros = dict(spec_of(AttentionVariant.DECODE_TENSOR_CORE, nx.bfloat16, geometry).macros)
        assert (macros["HEADS"], macros["CLUSTER"]) == ("8", "8")
        assert config_of(AttentionVariant.DECODE_TENSOR_CORE, geometry).grid == (2 * units * 8, 1, 1)


@pytest.mark.parametrize("dtype", [nx.float32, nx.float16, nx.bfloat16], ids=str)
def test_decode_fits_the_smallest_shared_memory(dtype: nx.DataType) -> None:
    """Of 99 KiB, whatever the head size and the group."""
    for head_dim in range(1, 129):
        for heads in (1, 3, 8):
            geometry = replace(PLAIN, num_heads=heads, kv_num_heads=1, seq_q=1, seq_k=8192, head_dim=head_dim)
            for variant in (AttentionVariant.DECODE, AttentionVariant.DECODE_TENSOR_CORE):
                for alignment in (16, dtype.itemsize):
                    spec = spec_of(variant, dtype, geometry, (12, 0), alignment=alignment)
                    assert int(dict(spec.macros)["SHARED_BYTES"]) <= 99 << 10


def test_grids_beyond_the_device_are_refused() -> None:
    """The message says how many blocks there would be."""
    wide = replace(PLAIN, batch=2**20, num_heads=2**12, kv_num_heads=2**12, seq_q=2)
    with pytest.raises(nx.KernelError, match=f"fused Attention requires {2**32} blocks, exceeding CUDA grid.x"):
        config_of(AttentionVariant.SIMT, wide)
    huge = replace(wide, batch=2**31 - 1, num_heads=2**31 - 1, kv_num_heads=1, seq_q=2**31 - 1)
    with pytest.raises(nx.KernelError, match="fused Attention grid overflow"):
        config_of(AttentionVariant.SIMT, huge)


def test_a_grid_within_the_limit_of_a_small_device() -> None:
    """The limit is the device's own."""
    config_of(AttentionVariant.SIMT, PLAIN, 24)
    with pytest.raises(nx.KernelError, match=r"requires 24 blocks, exceeding CUDA grid\.x"):
        config_of(AttentionVariant.SIMT, PLAIN, 23)


# Specialisations.


@pytest.mark.parametrize(
    ("dtype", "head_dim", "alignment", "width"),
    [
        (nx.float32, 128, 16, 4),
        (nx.float32, 128, 4, 1),
        (nx.float32, 6, 16, 2),
        (nx.float32, 127, 16, 1),
        (nx.float16, 128, 16, 8),
        (nx.float16, 128, 2, 1),
        (nx.bfloat16, 20, 16, 4),
    ],
)
def test_accesses_are_as_wide_as_rows_and_addresses_allow(
    dtype: nx.DataType, head_dim: int, alignment: int, width: int
) -> None:
    """16 bytes at best."""
    spec = spec_of(AttentionVariant.SIMT, dtype, replace(PLAIN, head_dim=head_dim), alignment=alignment)
    assert dict(spec.macros)["LOAD_WIDTH"] == str(width)


def test_features_are_macros() -> None:
    """A specialisation contains what the call needs, and no more."""
    features = ("CAUSAL", "HAS_MASK", "HAS_WINDOW", "HAS_SOFTCAP")
    for changes, expected in (
        ({}, "1000"),
        ({"causal": False}, "0000"),
        ({"has_mask": True}, "1100"),
        ({"local_window": 5}, "1010"),
        ({"softcap": 30.0}, "1001"),
    ):
        spec = spec_of(AttentionVariant.SIMT, nx.float32, replace(PLAIN, **changes))
        assert "".join(dict(spec.macros)[name] for name in features) == expected


def test_shapes_share_a_specialisation() -> None:
    """Batch, heads, lengths, strides and scale are arguments: changing them compiles nothing."""
    spec = spec_of(AttentionVariant.SIMT, nx.float32, PLAIN)
    other = replace(PLAIN, batch=5, num_heads=8, seq_q=3, seq_k=1000, kv_capacity=2000, scale=0.5)
    assert spec_of(AttentionVariant.SIMT, nx.float32, other) == spec


@pytest.mark.parametrize(
    ("variant", "dtype", "entry"),
    [
        (AttentionVariant.SIMT, nx.float32, "flash_attention_f32"),
        (AttentionVariant.SIMT, nx.float16, "flash_attention_f16"),
        (AttentionVariant.SIMT, nx.bfloat16, "flash_attention_bf16"),
        (AttentionVariant.TENSOR_CORE, nx.float16, "flash_attention_f16_tc"),
        (AttentionVariant.TENSOR_CORE, nx.bfloat16, "flash_attention_bf16_tc"),
        (AttentionVariant.TF32X3, nx.float32, "flash_attention_f32_tf32x3"),
        (AttentionVariant.BF16X6, nx.float32, "flash_attention_f32_bf16x6"),
        (AttentionVariant.SM90, nx.bfloat16, "flash_attention_bf16_sm90"),
        (AttentionVariant.DECODE, nx.bfloat16, "attention_decode_bf16"),
        (AttentionVariant.DECODE_TENSOR_CORE, nx.bfloat16, "attention_decode_bf16_tc"),
    ],
)
def test_entries(variant: AttentionVariant, dtype: nx.DataType, entry: str) -> None:
    """Each dtype and variant has an entry of its own name."""
    assert spec_of(variant, dtype, PLAIN).entry == entry


def test_an_access_of_the_mask_is_as_wide_as_its_alignment() -> None:
    """Of rows and address. The portable kernel reads pairs at most, the Hopper kernel copies 4 to 16 bytes."""
    portable, hopper = AttentionVariant.TENSOR_CORE, AttentionVariant.SM90
    for variant, seq_k, mask_alignment, width in (
        (portable, 8, 16, "2"),
        (portable, 8, 4, "2"),
        (portable, 8, 2, "1"),
        (portable, 7, 16, "1"),
        (hopper, 8, 16, "8"),
        (hopper, 12, 16, "4"),
        (hopper, 8, 8, "4"),
        (hopper, 6, 16, "2"),
    ):
        geometry = replace(PLAIN, has_mask=True, seq_k=seq_k)
        spec = spec_of(variant, nx.float16, geometry, mask_alignment=mask_alignment)
        assert dict(spec.macros)["MASK_WIDTH"] == width


@pytest.mark.parametrize(
    ("changes", "half", "single"),
    [
        ({"head_dim": 64}, "64", ("32", "3")),
        ({"head_dim": 64, "has_mask": True}, "64", ("32", "1")),
        ({"head_dim": 128}, "64", ("32", "1")),
        ({"head_dim": 128, "local_window": 9}, "64", ("32", "1")),
        ({"head_dim": 128, "has_mask": True}, "32", ("16", "1")),
        ({"head_dim": 128, "local_window": 9, "softcap": 2.0}, "32", ("16", "1")),
        ({"head_dim": 120}, "32", ("16", "1")),
    ],
)
def test_what_takes_registers_gets_smaller_blocks(
    changes: dict[str, int | float], half: str, single: tuple[str, str]
) -> None:
    """Of keys, and for f32 fewer blocks a multiprocessor; shared memory follows, within the 99 KB of sm_86."""
    geometry = replace(PLAIN, **changes)
    for variant, dtype in ((AttentionVariant.TENSOR_CORE, nx.float16), (AttentionVariant.TF32X3, nx.float32)):
        spec = spec_of(variant, dtype, geometry)
        macros = dict(spec.macros)
        if variant is AttentionVariant.TENSOR_CORE:
            assert macros["BLOCK_KEYS"] == half
        else:
            assert (macros["BLOCK_KEYS"], macros["BLOCKS"]) == single
        assert int(macros["SHARED_BYTES"]) == config_of(variant, geometry).shared_bytes <= 99 << 10


@pytest.mark.parametrize(("head_dim", "consumers", "stages"), [(8, 3, "2"), (64, 3, "2"), (72, 2, "1"), (128, 2, "1")])
def test_parts_of_f32_fit_the_shared_memory_of_hopper(head_dim: int, consumers: int, stages: str) -> None:
    """Three parts of two bytes an element: of all queries of a block, and of its blocks of keys and values."""
    geometry = replace(PLAIN, head_dim=head_dim)
    macros = dict(spec_of(AttentionVariant.BF16X6, nx.float32, geometry).macros)
    assert (macros["BLOCK_QUERIES"], macros["STAGES"]) == (str(64 * consumers), stages)
    config = config_of(AttentionVariant.BF16X6, geometry)
    assert int(macros["SHARED_BYTES"]) == config.shared_bytes <= 227 << 10
    assert config.block == (128 * (consumers + 1), 1, 1)


def test_arguments_follow_the_declared_parameters() -> None:
    """Every field of the geometry reaches the parameter of its name."""
    geometry = replace(
        PLAIN, has_mask=True, mask_batch_stride=11, mask_head_stride=12, local_window=13, softcap=14.0, scale=0.5
    )
    expected = {
        **dict.fromkeys(("q", "key", "value", "mask", "total_lengths", "past_lengths", "output", "capture_error"), 0),
        "q_heads": 6,
        "group": 2,
        "sq": 100,
        "sk": 7,
        "kv_capacity": 9,
        "mask_batch_stride": 11,
        "mask_head_stride": 12,
        "local_window": 13,
        "scale": 0.5,
        "softcap": 14.0,
    }
    hopper = {
        **expected,
        "tile_counter": 0,
        **dict.fromkeys(("q_map", "key_map", "value_map", "output_map"), bytes(128)),
        "tiles": 2 * 6,
        "planes_per_section": 2 * 6,
    }
    for variant in AttentionVariant:
        spec = spec_of(variant, nx.float16, geometry)
        arguments = launch_arguments(variant, geometry, l2_cache_bytes=50 << 20)
        named = dict(zip((param.name for param in spec.params), arguments, strict=True))
        assert named == (hopper if variant is AttentionVariant.SM90 else expected)


def test_a_section_of_planes_fits_the_cache() -> None:
    """Half of it for work of uneven weight, a quarter where rows are short, an eighth for even work; whole groups."""
    long = replace(PLAIN, batch=6, seq_k=2**13, num_heads=8, kv_num_heads=4, head_dim=128)  # 4 MiB of keys and values
    for changes, heads in (
        ({"causal": False}, 1),
        ({"causal": False, "local_window": 9}, 6),  # 5 would fit, and leave 4 of 24 for a section of their own
        ({"causal": True}, 6),
        ({"causal": True, "seq_k": 512, "batch": 30}, 40),
    ):
        geometry = replace(long, **changes)
        assert sm90.planes_per_section(geometry, 40 << 20) == heads * 2
    assert sm90.planes_per_section(long, 0) == 2
    assert sm90.planes_per_section(long, 1 << 40) == 6 * 8


def test_maps_describe_the_operands() -> None:
    """Extents are the rows in use, and strides the capacity."""
    geometry = replace(PLAIN, num_heads=6, kv_num_heads=3)
    names = [name for name, _ in sm90.PARAMS]
    maps = {names[layout.operand]: layout for layout in sm90.map_layouts(geometry)}
    assert all(names[layout.parameter] == f"{name}_map" for name, layout in maps.items())
    for name in ("q", "output"):
        assert (maps[name].extents, maps[name].strides) == ((64, 100, 12), (128, 128 * 100))
    for name in ("key", "value"):
        assert (maps[name].extents, maps[name].strides) == ((64, 7, 6), (128, 128 * 9))
