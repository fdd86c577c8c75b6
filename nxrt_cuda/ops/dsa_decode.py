"""The certified DsaIndexSelect for decode steps on Hopper: scores, bounds and selection in one cooperative launch.

Where every batch has one query row, blocks that run at the same time share each row and keep its scores to themselves:
see ``kernels/dsa_index_select_decode_sm90.cu``. Which calls are served is a function of shapes and device alone.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from nxrt_cuda.dtype import DataType, bfloat16, float16
from nxrt_cuda.launch import KernelSpec, LaunchConfig, Param, div_up
from nxrt_cuda.ops.dsa_certified import Abilities, kernel_spec
from nxrt_cuda.ops.dsa_geometry import Dims

__all__ = ["MEETINGS_BYTES", "Team", "choose_team", "decode_config", "decode_key_box", "decode_spec", "decode_specs"]

_TILE_KEYS = 64  # that a warpgroup multiplies at once

_ELEMENT_TYPES = (float16, bfloat16)
_HEADS = (32, 64)
_KEY_STAGES = {64: 4, 128: 3}
"""Buffers of a tile that each warpgroup has, by head size."""

_THREADS = 512
_BLOCK_KEYS = 4 * _TILE_KEYS  # what a block takes is a multiple of: a tile a warpgroup
_MOST_BLOCK_KEYS = 1024  # a lane keeps account of 32 keys
_MOST_BLOCKS = 160  # of a row; no Hopper has as many multiprocessors
_RANKED = _THREADS
_SHORT_BAND = 256
_BINS = 4096

_TEAM_BYTES = 2 * 4 * _BINS + 8 * _SHORT_BAND

MEETINGS_BYTES = 4 * _BINS + 128 + 4 * 16 * _MOST_BLOCKS
"""What the blocks of a row leave for the next launch: a histogram, which is zero again, how often they have met, and
four slots a block to meet at. All zero before the first one."""

_PARAMS = (
    *(Param(name, "ptr") for name in ("key", "weights", "bias", "teams", "meetings", "out", "counters")),
    *(Param(name, "tensor_map") for name in ("query_map", "key_map")),
    *(Param(name, "u32") for name in ("key_seq", "blocks", "block_keys", "top_k")),
    *(Param(name, "f32") for name in ("scale", "weights_scale", "error_scale", "bias_error")),
    *(Param(name, "f32") for name in ("first_weight", "element_weight", "step_weight", "low_weight", "norm_floor")),
)


class Team(NamedTuple):
    """How the blocks of a launch divide its rows.

    Attributes:
        rows: as many teams.
        blocks: of a team.
        block_keys: keys of a block, but for the last one of a team.
    """

    rows: int
    blocks: int
    block_keys: int

    @property
    def nbytes(self) -> int:
        """What the teams have in common, of the workspace."""
        return self.rows * _TEAM_BYTES


def choose_team(
    dtype: DataType, dims: Dims, top_k: int, able: Abilities, blocks: int, workspace_bytes: int
) -> Team | None:
    """The division of a call that the certified variant serves, or None where it takes several launches.

    Args:
        blocks: how many can run at the same time: one a multiprocessor.
        workspace_bytes: what the workspace is kept below.
    """
    rows = dims.rows
    if not able.has_wgmma or dtype not in _ELEMENT_TYPES or dims.q_seq != 1 or dims.key_seq <= top_k or rows > blocks:
        return None
    each = min(blocks // rows, _MOST_BLOCKS)
    block_keys = div_up(dims.key_seq, each * _BLOCK_KEYS) * _BLOCK_KEYS
    team = Team(rows, div_up(dims.key_seq, block_keys), block_keys)
    return team if block_keys <= _MOST_BLOCK_KEYS and team.nbytes <= workspace_bytes else None


def _shared_bytes(heads: int, head_dim: int) -> int:
    """Of the kernel's struct."""
    warps, groups = _THREADS // 32, _THREADS // 128
    stages = _KEY_STAGES[head_dim]
    keys = groups * stages * _TILE_KEYS * head_dim * 2
    query = heads * head_dim * 2
    values = 4 * _MOST_BLOCK_KEYS
    tiles, lists = 4 * 3 * 2 * _TILE_KEYS * groups, 8 * _RANKED + 2 * 1024
    words = 3 * 4 * _THREADS
    small = 4 * heads + 4 * 32 + 16 * warps + 4 * 3
    barriers = 8 * (4 + groups * stages) + 4 * _MOST_BLOCKS // 32 * 8
    scan = 4 * warps * (1 + 2 * 4) + 4 * (3 + 4 + 4)
    return div_up(keys + query + values + max(tiles, lists) + words + small + barriers + scan, 1024) * 1024


def decode_spec(dtype: DataType, heads: int, head_dim: int) -> KernelSpec:
    """Of the kernel."""
    macros = {
        "ELEMENT": dtype.cuda,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "BLOCK_KEYS": _BLOCK_KEYS,
        "KEY_STAGES": _KEY_STAGES[head_dim],
        "MAX_BLOCKS": _MOST_BLOCKS,
        "TEAM_BYTES": _TEAM_BYTES,
        "MEETINGS_BYTES": MEETINGS_BYTES,
        "SHARED_BYTES": _shared_bytes(heads, head_dim),
    }
    return kernel_spec("decode_sm90", _PARAMS, _THREADS, macros, arch="sm_90a")


def decode_key_box() -> tuple[int, int, int]:
    """What one copy brings to shared memory: 64 columns of the keys of a tile."""
    return (64, _TILE_KEYS, 1)


def decode_config(spec: KernelSpec, team: Team) -> LaunchConfig:
    """All blocks at once."""
    shared_bytes = int(dict(spec.macros)["SHARED_BYTES"])
    return LaunchConfig((team.rows * team.blocks, 1, 1), (spec.threads, 1, 1), shared_bytes, cooperative=True)


def decode_specs(able: Abilities) -> tuple[KernelSpec, ...]:
    """Every specialisation for a device."""
    shapes = product(_ELEMENT_TYPES, _HEADS, _KEY_STAGES) if able.has_wgmma else ()
    return tuple(decode_spec(*shape) for shape in shapes)
