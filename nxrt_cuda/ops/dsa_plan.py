"""What one DsaIndexSelect call launches: a plan for one layout of its operands, whichever variant serves it.

Plans are made once for a layout and keep their launches prepared; every call renews the addresses.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from nxrt_cuda.dtype import DataType
from nxrt_cuda.errors import KernelError
from nxrt_cuda.launch import KernelSpec, PlacedMap, PreparedLaunch, TensorMap
from nxrt_cuda.ops import dsa_certified as certified
from nxrt_cuda.ops import dsa_decode as decode
from nxrt_cuda.ops import dsa_variants as strict
from nxrt_cuda.ops.dsa_geometry import OP, Dims, WorkspaceLayout
from nxrt_cuda.ops.launch_ledger import Tally
from nxrt_cuda.ops.operator_kernel import loaded
from nxrt_cuda.tensor import TensorMut

if TYPE_CHECKING:
    from nxrt_cuda.runtime import CudaRuntime

__all__ = [
    "Attributes",
    "CertifiedPlan",
    "DecodePlan",
    "DsaChoice",
    "DsaVariant",
    "Options",
    "Plan",
    "Step",
    "StrictPlan",
    "choose_variant",
]

_MODE = "NXRT_CUDA_DSA"
_MODES = ("auto", "strict")


class DsaVariant(StrEnum):
    """How scores are computed; what is selected is the same.

    The certified ones are approximate, and repaired: on Hopper through wgmma, elsewhere through mma.sync. Decode steps
    have a kernel on Hopper that does all of it.
    """

    STRICT = "strict"
    CERTIFIED = "certified"
    CERTIFIED_DECODE = "certified_decode"
    CERTIFIED_MMA = "certified_mma"


class DsaChoice(NamedTuple):
    """A variant, and why it was chosen."""

    variant: DsaVariant
    reason: str


def choose_variant(
    dtype: DataType,
    dims: Dims,
    top_k: int,
    compute_capability: tuple[int, int],
    *,
    aligned: bool,
    team: decode.Team | None = None,
) -> DsaChoice:
    """The variant for a call on a device.

    ``aligned``: query and key begin at multiples of 16 bytes. ``team``: what :func:`dsa_decode.choose_team` says.
    """
    reason = certified.uncertified_reason(dtype, dims, top_k, compute_capability, aligned=aligned)
    if reason is not None:
        return DsaChoice(DsaVariant.STRICT, reason)
    repaired = "repaired where their error leaves a rank open"
    if team is not None:
        return DsaChoice(
            DsaVariant.CERTIFIED_DECODE,
            f"a decode step in one launch, {team.blocks} block(s) a row: tensor-core scores, {repaired}",
        )
    if certified.abilities(compute_capability).has_wgmma:
        return DsaChoice(DsaVariant.CERTIFIED, f"tensor-core scores, {repaired}")
    capability = "{}.{}".format(*compute_capability)
    return DsaChoice(
        DsaVariant.CERTIFIED_MMA, f"tensor-core scores through mma.sync on compute capability {capability}, {repaired}"
    )


@dataclass(frozen=True)
class Options:
    """What may be chosen about a kernel beside its node.

    Attributes:
        mode: ``"auto"``, or ``"strict"`` for the strict variant alone, to audit the other by.
        workspace_bytes: what the certified variant keeps its workspace below, as far as one tile of rows allows.

    Raises:
        KernelError: the mode is neither, or the size is not positive.
    """

    mode: str = "auto"
    workspace_bytes: int = certified.WORKSPACE_BYTES

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise KernelError(OP, f"mode must be {' or '.join(map(repr, _MODES))}, got {self.mode!r}", operand="mode")
        if self.workspace_bytes <= 0:
            raise KernelError(OP, f"workspace_bytes must be > 0, got {self.workspace_bytes}", operand="workspace_bytes")

    @classmethod
    def from_environment(cls) -> Options:
        """The defaults, and the mode that the environment variable ``NXRT_CUDA_DSA`` names.

        Raises:
            KernelError: it names none.
        """
        mode = os.environ.get(_MODE) or "auto"
        if mode not in _MODES:
            raise KernelError(OP, f"{_MODE} must be {' or '.join(_MODES)}, got {mode!r}", operand=_MODE)
        return cls(mode=mode)


class Attributes(NamedTuple):
    """Of the node."""

    top_k: int
    scale: float
    weights_scale: float


class Step(NamedTuple):
    """One launch, and which of the operands (the four inputs, then the output) it touches."""

    launch: PreparedLaunch
    operands: slice


class Plan(ABC):
    """The launches of one call.

    Attributes:
        choice: the variant, and why.
        nbytes: of the workspace.
        steps: what is launched, in order.
        launches: the same for the short way; see :class:`~nxrt_cuda.short_way.PlannedLaunches`.
        score_grids, selection_grids: blocks of each launch of either kind that launches anything.
        tally: counts its executions; given to it by the kernel object that has made it.
    """

    choice: DsaChoice
    nbytes: int
    steps: tuple[Step, ...]
    launches: tuple[PreparedLaunch, ...] = ()
    score_grids: tuple[int, ...]
    selection_grids: tuple[int, ...]
    tally: Tally[DsaChoice]

    def open_short_way(self) -> None:
        """The launches were made: from now on they may be made the short way, if each launches anything."""
        launches = tuple(step.launch for step in self.steps)
        self.launches = () if any(launch.config.is_empty for launch in launches) else launches

    @abstractmethod
    def bind(self, workspace: int, query: int, key: int, weights: int, bias: int, out: int) -> None:
        """Renew the addresses: of the workspace, and of the operands."""


_INPUTS = slice(0, 4)
_QUERY_KEY = slice(0, 2)
_BIAS = slice(3, 4)
_OUTPUT = slice(4, 5)
_ALL = slice(0, 5)


class StrictPlan(Plan):
    """Scores in strict order, then an exact selection among them."""

    def __init__(
        self,
        runtime: CudaRuntime,
        dims: Dims,
        dtype: DataType,
        attributes: Attributes,
        layout: WorkspaceLayout,
        choice: DsaChoice,
        *,
        aligned: bool,
        max_grid_x: int,
    ) -> None:
        self.choice = choice
        self.nbytes = layout.nbytes
        self._scores_offset, self._allowed_offset = layout.scores_offset, layout.allowed_offset
        tile = strict.choose_tile(dims)
        score = loaded(runtime, strict.score_spec(dtype, tile, dims.head_dim, aligned=aligned))
        select = loaded(runtime, strict.select_spec(dims))
        top_k, scale, weights_scale = attributes
        self._score = runtime.prepare(
            score,
            strict.launch_config(score.spec, strict.score_tiles(dims, tile), max_grid_x),
            *_unbound(score.spec),
            *(dims.batch, dims.q_seq, dims.heads, dims.head_dim, dims.key_seq, scale, weights_scale),
            op=OP,
        )
        self._select = runtime.prepare(
            select,
            strict.launch_config(select.spec, dims.rows, max_grid_x),
            *_unbound(select.spec),
            *(dims.rows, dims.key_seq, top_k),
            op=OP,
        )
        self.steps = (Step(self._score, _INPUTS), Step(self._select, _OUTPUT))
        self.score_grids = _grids(self._score)
        self.selection_grids = _grids(self._select)

    def bind(self, workspace: int, query: int, key: int, weights: int, bias: int, out: int) -> None:
        scores, allowed = workspace + self._scores_offset, workspace + self._allowed_offset
        self._score.bind(query, key, weights, bias, scores, allowed)
        self._select.bind(scores, allowed, out)


class CertifiedPlan(Plan):
    """Approximate scores with a bound, and exact repair: see :mod:`nxrt_cuda.ops.dsa_certified`.

    Args:
        counters: u64 [2] on the device: rows whose every allowed key was scored strictly; keys scored strictly.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        dims: Dims,
        dtype: DataType,
        attributes: Attributes,
        layout: certified.CertifiedLayout,
        choice: DsaChoice,
        *,
        max_grid_x: int,
        counters: TensorMut,
    ) -> None:
        self.choice = choice
        self.nbytes = layout.nbytes
        self._chunks = [
            _ChunkLaunches(runtime, dims, dtype, attributes, layout, chunk, max_grid_x, counters)
            for chunk in layout.chunks
        ]
        self.steps = tuple(step for chunk in self._chunks for step in chunk.steps)
        self.score_grids = _grids(*(chunk.score for chunk in self._chunks))
        self.selection_grids = _grids(*(chunk.certify for chunk in self._chunks))

    def bind(self, workspace: int, query: int, key: int, weights: int, bias: int, out: int) -> None:
        for chunk in self._chunks:
            chunk.bind(workspace, (query, key, weights, bias, out))


class _ChunkLaunches:
    """The launches for one chunk of rows. What it does not need is None."""

    def __init__(
        self,
        runtime: CudaRuntime,
        dims: Dims,
        dtype: DataType,
        attributes: Attributes,
        layout: certified.CertifiedLayout,
        chunk: certified.Chunk,
        max_grid_x: int,
        counters: TensorMut,
    ) -> None:
        self._runtime = runtime
        self._dims = dims
        self._dtype = dtype
        self._chunk = chunk
        self._counted = counters.ptr
        self._maps: tuple[PlacedMap, PlacedMap] | None = None
        row, itemsize = chunk.first_row, dtype.itemsize
        # Bytes before the chunk in query, key, weights, bias and output.
        self._begins = (
            row * dims.heads * dims.head_dim * itemsize,
            chunk.first_batch * dims.key_seq * dims.head_dim * itemsize,
            row * dims.heads * itemsize,
            row * dims.key_seq * 4,
            row * attributes.top_k * 8,
        )
        processors = runtime.capabilities.multiprocessor_count
        able = certified.abilities(runtime.capabilities.compute_capability)
        self._has_maps = able.has_wgmma
        extents = (chunk.batch, chunk.q_seq, dims.key_seq)
        stride = certified.row_stride(dims)
        scales = (attributes.scale, attributes.weights_scale)

        self.split: PreparedLaunch | None = None
        self.prepare: PreparedLaunch | None = None
        self.score: PreparedLaunch | None = None
        if dims.key_seq > attributes.top_k:
            if certified.parts(dtype) > 1:
                function = loaded(runtime, certified.split_spec(dims.head_dim))
                config = certified.split_config(function.spec, dims, chunk, processors, max_grid_x)
                vectors = (chunk.rows * dims.heads, chunk.batch * dims.key_seq)
                self.split = runtime.prepare(function, config, *_unbound(function.spec), *vectors, op=OP)
            function = loaded(runtime, certified.score_spec(dtype, dims, able))
            config = certified.score_config(function.spec, dims, dtype, chunk, processors, max_grid_x)
            maps = (bytes(128), bytes(128)) if self._has_maps else ()
            norms = certified.norm_weights(dtype, dims.heads, dims.head_dim, able.step_error)
            error_scale = certified.error_scale(attributes.scale)
            self.score = runtime.prepare(
                function,
                config,
                *_unbound(function.spec),
                *(*maps, *extents, stride, attributes.top_k, *scales, error_scale, *norms),
                op=OP,
            )
        if certified.uses_prepare(dims, chunk, processors):
            function = loaded(runtime, certified.prepare_spec(dtype, dims))
            config = certified.prepare_config(function.spec, dims, chunk, max_grid_x)
            top_k = attributes.top_k
            self.prepare = runtime.prepare(function, config, *_unbound(function.spec), *extents, top_k, op=OP)
        # Bytes before what it has of the workspace; None where the launch that would write there is left out.
        self._parts = (
            *(layout.scores_offset, layout.key_words_offset, layout.bounds_offset),
            *_if(self.prepare, layout.allowed_offset, layout.rows_offset, layout.tiles_offset),
            *_if(self.split, layout.query_parts_offset, layout.key_parts_offset),
        )
        function = loaded(runtime, certified.certify_spec(dtype, dims, chunk.rows, processors, able))
        config, shares = certified.certify_config(function.spec, dims, chunk.rows, max_grid_x)
        self.certify = runtime.prepare(
            function,
            config,
            *_unbound(function.spec),
            *(chunk.rows, chunk.q_seq, dims.key_seq, stride, *shares, attributes.top_k),
            *(*scales, certified.BIAS_ERROR),
            op=OP,
        )
        self.steps = tuple(
            Step(launch, operands)
            for launch, operands in (
                (self.split, _QUERY_KEY),
                (self.prepare, _BIAS),
                (self.score, _INPUTS),
                (self.certify, _ALL),
            )
            if launch is not None
        )

    def bind(self, workspace: int, operands: tuple[int, ...]) -> None:
        query, key, weights, bias, out = map(add, operands, self._begins)
        scores, key_words, bounds, allowed, rows, tiles, query_parts, key_parts = [
            0 if part is None else workspace + part for part in self._parts
        ]
        added_bias = bias
        if self.prepare is not None:
            added_bias = 0
            self.prepare.bind(bias, allowed, rows, tiles)
        if self.split is None:
            query_parts, key_parts = query, key
        else:
            self.split.bind(query, key, query_parts, key_parts)
        if self.score is not None:
            vectors = () if self._has_maps else (query_parts, key_parts)
            self.score.bind(query, weights, added_bias, rows, tiles, scores, key_words, bounds, *vectors)
        if self.score is not None and self._has_maps:
            query_map, key_map = self._maps or self._encode_maps(self.score, query_parts, key_parts)
            query_map.move(query_parts)
            key_map.move(key_parts)
        self.certify.bind(query, key, weights, bias, scores, allowed, rows, key_words, bounds, out, self._counted)

    def _encode_maps(self, score: PreparedLaunch, query: int, key: int) -> tuple[PlacedMap, PlacedMap]:
        """The tensor maps among the arguments of ``score``, which lack until the first addresses are known."""
        dims, chunk = self._dims, self._chunk
        key_box = certified.key_box(self._dtype, dims.head_dim)
        self._maps = _place_maps(self._runtime, score, dims, self._dtype, chunk.rows, chunk.batch, key_box, query, key)
        return self._maps


class DecodePlan(Plan):
    """All of a decode step in one launch: see :mod:`nxrt_cuda.ops.dsa_decode`.

    Args:
        counters: as those of :class:`CertifiedPlan`.
        meetings: on the device, where the blocks of each row meet.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        dims: Dims,
        dtype: DataType,
        attributes: Attributes,
        team: decode.Team,
        choice: DsaChoice,
        *,
        counters: TensorMut,
        meetings: TensorMut,
    ) -> None:
        self.choice = choice
        self.nbytes = team.nbytes
        self._runtime = runtime
        self._dims = dims
        self._dtype = dtype
        self._meetings = meetings.ptr
        self._counted = counters.ptr
        self._maps: tuple[PlacedMap, PlacedMap] | None = None
        able = certified.abilities(runtime.capabilities.compute_capability)
        function = loaded(runtime, decode.decode_spec(dtype, dims.heads, dims.head_dim))
        self._launch = runtime.prepare(
            function,
            decode.decode_config(function.spec, team),
            *_unbound(function.spec),
            *(bytes(128), bytes(128), dims.key_seq, team.blocks, team.block_keys, attributes.top_k),
            *(attributes.scale, attributes.weights_scale, certified.error_scale(attributes.scale)),
            certified.BIAS_ERROR,
            *certified.norm_weights(dtype, dims.heads, dims.head_dim, able.step_error),
            op=OP,
        )
        self.steps = (Step(self._launch, _ALL),)
        self.score_grids = self.selection_grids = _grids(self._launch)

    def bind(self, workspace: int, query: int, key: int, weights: int, bias: int, out: int) -> None:
        self._launch.bind(key, weights, bias, workspace, self._meetings, out, self._counted)
        if self._maps is None:
            rows = self._dims.rows
            self._maps = _place_maps(
                *(self._runtime, self._launch, self._dims, self._dtype, rows, rows, decode.decode_key_box(), query, key)
            )
        query_map, key_map = self._maps
        query_map.move(query)
        key_map.move(key)


def _place_maps(
    runtime: CudaRuntime,
    launch: PreparedLaunch,
    dims: Dims,
    dtype: DataType,
    rows: int,
    batch: int,
    key_box: tuple[int, int, int],
    query: int,
    key: int,
) -> tuple[PlacedMap, PlacedMap]:
    """Encode the tensor maps among the arguments of ``launch``: of queries, and of keys."""
    element = certified.part_type(dtype)
    depth = certified.parts(dtype) * dims.head_dim
    vector_bytes = depth * element.itemsize

    def encode(address: int, vectors: int, batches: int, box: tuple[int, ...]) -> TensorMap:
        strides = (vector_bytes, vectors * vector_bytes)
        return runtime.tensor_map(element, address, (depth, vectors, batches), strides, box)

    params = launch.function.spec.params
    query_map, key_map = (position for position, param in enumerate(params) if param.kind == "tensor_map")
    launch.set(query_map, encode(query, rows * dims.heads, 1, certified.query_box(dims)))
    launch.set(key_map, encode(key, dims.key_seq, batch, key_box))
    return launch.tensor_maps[query_map], launch.tensor_maps[key_map]


def _grids(*launches: PreparedLaunch | None) -> tuple[int, ...]:
    """Blocks of each launch that is there and launches anything."""
    return tuple(launch.config.grid[0] for launch in launches if launch is not None and not launch.config.is_empty)


def _if(launch: PreparedLaunch | None, *offsets: int) -> tuple[int | None, ...]:
    """``offsets`` if the launch is there, else as many None."""
    return offsets if launch is not None else (None,) * len(offsets)


def _unbound(spec: KernelSpec) -> Sequence[int]:
    """Null pointers in place of those that every call binds."""
    return (0,) * sum(param.kind == "ptr" for param in spec.params)
