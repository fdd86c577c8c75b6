"""How the two DsaIndexSelect kernels are specialised and launched.

Tile sizes and thread counts are stated here alone; the kernels receive them as macros and assert that they
fit together.
"""

from __future__ import annotations

from typing import NamedTuple

from nxrt_cuda.dtype import DataType, bfloat16, float16, float32
from nxrt_cuda.launch import KernelSpec, LaunchConfig, Param, div_up
from nxrt_cuda.ops.dsa_geometry import Dims

__all__ = [
    "ACCESS_BYTES",
    "ELEMENT_TYPES",
    "ScoreTile",
    "choose_tile",
    "kernel_specs",
    "launch_config",
    "score_spec",
    "score_tiles",
    "select_spec",
]

ELEMENT_TYPES = (float32, float16, bfloat16)

ACCESS_BYTES = 16
"""The widest access of a thread to query and key; legal where rows and addresses are aligned to it."""


class ScoreTile(NamedTuple):
    """What a block of the score kernel computes at a time, by the names of its macros."""

    TILE_ROWS: int
    KEYS_PER_THREAD: int
    HEADS_PER_THREAD: int
    TILE_DEPTH: int = 16

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return _SCORE_THREADS // self.TILE_ROWS * self.KEYS_PER_THREAD


_SCORE_THREADS = 128
_PREFILL_TILE = ScoreTile(TILE_ROWS=8, KEYS_PER_THREAD=8, HEADS_PER_THREAD=8)
_DECODE_TILE = ScoreTile(TILE_ROWS=1, KEYS_PER_THREAD=4, HEADS_PER_THREAD=16)

_SELECT_THREADS = 256
_LONG_ROW_SELECT_THREADS = 1024
_LONG_ROW = 16384

_SCORE_PARAMS = (
    *(Param(name, "ptr") for name in ("query", "key", "weights", "bias", "scores", "allowed")),
    *(Param(name, "u64") for name in ("batch", "q_seq", "heads", "head_dim", "key_seq")),
    *(Param(name, "f32") for name in ("scale", "weights_scale")),
)
_SELECT_PARAMS = (
    *(Param(name, "ptr") for name in ("scores", "allowed", "out")),
    *(Param(name, "u64") for name in ("total_rows", "key_seq", "top_k")),
)


def choose_tile(dims: Dims) -> ScoreTile:
    """Query rows of a tile share the keys read for it, which pays from half a tile of rows on."""
    return _PREFILL_TILE if dims.q_seq >= _PREFILL_TILE.TILE_ROWS // 2 else _DECODE_TILE


def score_tiles(dims: Dims, tile: ScoreTile) -> int:
    """Tiles of the whole problem; a tile holds rows of one batch."""
    return dims.batch * div_up(dims.q_seq, tile.TILE_ROWS) * div_up(dims.key_seq, tile.keys)


def score_spec(dtype: DataType, tile: ScoreTile, head_dim: int, *, aligned: bool) -> KernelSpec:
    """``aligned`` says whether query and key begin at multiples of :data:`ACCESS_BYTES`."""
    is_wide = aligned and head_dim * dtype.itemsize % ACCESS_BYTES == 0
    macros = {
        "ELEMENT": dtype.cuda,
        **tile._asdict(),
        "LOAD_WIDTH": ACCESS_BYTES // dtype.itemsize if is_wide else 1,
    }
    return KernelSpec(
        source="dsa_index_select_score.cu",
        entry="dsa_index_select_score",
        params=_SCORE_PARAMS,
        threads=_SCORE_THREADS,
        macros=tuple((name, str(value)) for name, value in macros.items()),
        contract=False,
        changeable=("scale", "weights_scale"),
    )


def select_spec(dims: Dims) -> KernelSpec:
    """A row is one block's work alone: a long one gets all the threads that a block can have."""
    return _select_spec(_LONG_ROW_SELECT_THREADS if dims.key_seq > _LONG_ROW else _SELECT_THREADS)


def _select_spec(threads: int) -> KernelSpec:
    return KernelSpec(
        source="dsa_index_select_select.cu",
        entry="dsa_index_select_select",
        params=_SELECT_PARAMS,
        threads=threads,
        contract=False,
        changeable=(),
    )


def kernel_specs() -> tuple[KernelSpec, ...]:
    """Every specialisation that the operator can launch."""
    scores = (
        score_spec(dtype, tile, ACCESS_BYTES, aligned=aligned)
        for dtype in ELEMENT_TYPES
        for tile in (_PREFILL_TILE, _DECODE_TILE)
        for aligned in (True, False)
    )
    return (*scores, _select_spec(_SELECT_THREADS), _select_spec(_LONG_ROW_SELECT_THREADS))


def launch_config(spec: KernelSpec, blocks: int, max_grid_x: int) -> LaunchConfig:
    """The kernels stride over their grid, so that any number of blocks does all the work."""
    return LaunchConfig((min(blocks, max_grid_x), 1, 1), (spec.threads, 1, 1))
