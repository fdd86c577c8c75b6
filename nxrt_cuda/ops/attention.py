"""Fused attention: ``Attention`` of ai.onnx and ``GroupQueryAttention`` of com.microsoft.

``output = softmax(softcap(scale * query @ key^T) + attn_mask) @ value``, without ever holding the
[Sq, Sk] scores in memory.

Both operators take these inputs, of which the last three are optional (``None`` or left off):

===============  ======================  ==================================================================
query            [B, H, Sq, D]           f32, f16 or bf16; contiguous
key, value       [B, KVH, Sk, D]         as query; query head h reads head ``h // (H / KVH)``. They may be
                                         ``cache.narrow(2, 0, Sk)`` of a [B, KVH, capacity, D] cache
attn_mask        [Sq, Sk],               as query; added to the scores. Its rank says its planes: one for
                 [1|B, 1|H, Sq, Sk]      all, or one a batch and/or a head
total_lengths    [B] int32               how many keys are in use; Sk without it
past_lengths     [B] int32               how many keys precede query row 0; ``total - Sq`` without it
===============  ======================  ==================================================================

The output is [B, H, Sq, D] of the query's dtype. Attributes: ``num_heads`` (or ``q_num_heads``),
``kv_num_heads``, ``is_causal``, ``scale``, ``softcap``, ``local_window_size``.

What it guarantees:

- Causal masking is aligned to the end of the keys (or to ``past_lengths``), so row Sq - 1 sees all. A
  window of W covers the W keys up to a row's causal limit, itself included, causal or not.
- Nothing stored at a key that a row may not see changes that row: NaN and infinities in the unused part
  of a cache, beyond a length, or under a mask of -inf are as good as zeros. ``finfo.min`` in a mask is a
  number, and hides nothing.
- A row without a key is written as exactly 0, and so is everything where Sk = 0. B = 0 and Sq = 0 are
  counted and launch nothing. H = 0 and D = 0 are errors.
- A NaN score makes its own row NaN, and no other.
- Lengths are read on the device, at each replay too. One outside [0, Sk], or a negative past, is clamped
  and reported by ``runtime.check_capture_error()``; no value can cause an access outside a buffer.
- Sums are f32 for every dtype. The tensor-core kernels round weights to the element type before they meet the
  values; f16 weights count down to 2**-36 of the row's largest even so. A result is a weighted mean of values
  and finite where they are; only within a factor of 2**8 * Sk of the greatest f32 can the sum before the
  division overflow.
- The same inputs give the same bits, whatever else is in the batch, and however large it is.

One query row (Sq = 1) has kernels of its own, which divide the keys of a head among as many blocks whatever the
batch; :func:`~nxrt_cuda.ops.attention_variants.choose_variant`
says which kernel serves a call, and the launch statistics say which one did.

Calls are stream-ordered and safe from any thread. The only workspace is of the 16-bit Hopper kernel: counters of
tiles, which every launch leaves at zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nxrt_cuda.architecture import own_arch
from nxrt_cuda.capture import DeviceGraphResource
from nxrt_cuda.dtype import DataType, float32, int32, uint32
from nxrt_cuda.errors import KernelError, UnsupportedError
from nxrt_cuda.kernel import (
    CaptureSupport,
    KernelFactory,
    WorkspaceRequirement,
    register,
)
from nxrt_cuda.launch import KernelSpec, PlacedMap, PreparedLaunch
from nxrt_cuda.node import Node
from nxrt_cuda.ops import attention_sm90 as sm90
from nxrt_cuda.ops.attention_geometry import INPUT_NAMES, AttentionAttributes, AttentionGeometry
from nxrt_cuda.ops.attention_variants import (
    ACCESS_BYTES,
    AttentionVariant,
    VariantChoice,
    attention_spec,
    choose_variant,
    kernel_specs,
    launch_arguments,
    launch_config,
)
from nxrt_cuda.ops.launch_ledger import LaunchLedger, Tally
from nxrt_cuda.ops.operands import check_memory
from nxrt_cuda.ops.operator_kernel import OperatorKernel, loaded
from nxrt_cuda.ops.plan_cache import PlanCache
from nxrt_cuda.stats import StatsTable, WorkspaceLedger, WorkspaceStats
from nxrt_cuda.tensor import TensorMetadata, TensorMut, TensorView
from nxrt_cuda.workspace import Workspace, WorkspaceSlot

if TYPE_CHECKING:
    from nxrt_cuda.runtime import CudaRuntime

__all__ = [
    "AttentionFactory",
    "AttentionKernel",
    "AttentionLaunchStats",
    "attention_launch_stats",
    "kernel_specs",
    "reset_attention_launch_stats",
    "unsupported_reason",
]

_OPERAND_NAMES = tuple((*INPUT_NAMES[:given], "output") for given in range(len(INPUT_NAMES) + 1))
"""By how many inputs are given."""

_ABSENT = (None,) * len(INPUT_NAMES)
_NO_ADDRESSES = (0,) * len(INPUT_NAMES)

_COUNTERS = 64
"""Tile counters of a kernel object. Bindings take turns, so that launches in branches that run side by side do not
draw their tiles from one counter."""

_COUNTERS_METADATA = TensorMetadata(uint32, (_COUNTERS,))


@dataclass(frozen=True)
class AttentionLaunchStats(StatsTable):
    """What attention has done, per kernel object or in the whole process.

    Attributes:
        executions: calls of ``execute`` that were accepted, empty ones included.
        launches: kernels launched or recorded.
        last_grid_x: blocks of the last launch.
        variant: the kernel that served the last execution: ``"simt"``, ``"tensor_core"``, ``"tf32x3"``,
            ``"bf16x6"``, ``"decode"``, ``"decode_tensor_core"``, ``"sm90"``.
        reason: why that one.
    """

    TITLE = "attention"

    executions: int = 0
    launches: int = 0
    last_grid_x: int = 0
    variant: str = ""
    reason: str = ""


_process_ledger: LaunchLedger[VariantChoice] = LaunchLedger(kinds=1)
_process_workspaces = WorkspaceLedger()


def attention_launch_stats() -> AttentionLaunchStats:
    """The counters of all attention kernels of this process."""
    return _stats(_process_ledger)


def reset_attention_launch_stats() -> None:
    """Zero the process-wide counters; those of kernel objects stay."""
    _process_ledger.reset()


def _stats(ledger: LaunchLedger[VariantChoice]) -> AttentionLaunchStats:
    (executions, launches), (last_grid_x,), choice = ledger.totals()
    stats = AttentionLaunchStats(executions, launches, last_grid_x)
    return stats if choice is None else replace(stats, variant=choice.variant.value, reason=choice.reason)


@dataclass
class _Plan:
    """What is settled for operands of one layout: the launch but for its addresses, and how often it was made.

    ``maps`` are the tensor maps among its arguments, each with the position of the operand that it describes;
    ``launches`` are as :class:`~nxrt_cuda.short_way.PlannedLaunches` has them.
    """

    tally: Tally[VariantChoice]
    prepared: PreparedLaunch | None
    maps: tuple[tuple[PlacedMap, int], ...] = ()
    launches: tuple[PreparedLaunch, ...] = ()


class AttentionKernel(OperatorKernel[VariantChoice]):
    """One attention node on one runtime; made by :class:`AttentionFactory`."""

    def __init__(self, runtime: CudaRuntime, attributes: AttentionAttributes) -> None:
        super().__init__(runtime, _process_ledger)
        self._attributes = attributes
        self._plans: PlanCache[tuple[object, ...], _Plan] = PlanCache()
        self._workspace = Workspace(runtime, attributes.op, _process_workspaces)
        self._capture_error_ptr = runtime.capture_error_ptr
        self._counter = 0
        self._warmed = False

    def _execute(
        self,
        inputs: Sequence[TensorView | None],
        outputs: Sequence[TensorMut],
        operands: list[TensorView | None],
    ) -> Tally[VariantChoice]:
        runtime = self._runtime
        with runtime.exclusive():
            plan, counters = self._bind(operands, len(outputs))
            if plan.prepared is not None:
                runtime.launch(plan.prepared, operands)
                if not runtime.is_capturing():
                    self._warmed = True
                    if counters is not None:
                        self._workspace.publish(counters)
                elif counters is not None:
                    runtime.retain(self._workspace.device_graph_resources())
                plan.launches = (plan.prepared,)
                self._short_way.remember(operands, plan)
            plan.tally.executions += 1
            return plan.tally

    def _rebind(self, operands: list[TensorView | None]) -> _Plan | None:
        given = len(operands) - 1
        layout, addresses = _layout(operands, given)
        plan = self._plans.find(layout)
        if plan is None or not plan.launches:
            return None
        check_memory(self._attributes.op, self._runtime, _OPERAND_NAMES[given], operands)
        # An execution that went through has left the counters.
        self._write(plan, addresses, self._workspace.ptr)
        return plan

    def _bind(self, operands: list[TensorView | None], outputs: int) -> tuple[_Plan, WorkspaceSlot | None]:
        """The plan for the operands, made if there is none, bound to them and to the counters if it draws tiles."""
        op = self._attributes.op
        if outputs != 1:
            raise KernelError(op, f"expected 1 output, got {outputs}")
        given = len(operands) - 1
        layout, addresses = _layout(operands, given)
        plan = self._plans.find(layout)
        if plan is None:
            alignment, mask_alignment, *metadata = layout
            all_inputs = [*metadata[:given], *_ABSENT[given:]]
            geometry = AttentionGeometry.resolve(self._attributes, all_inputs, metadata[-1])
        check_memory(op, self._runtime, _OPERAND_NAMES[given], operands)
        if plan is None:
            plan = self._plan(metadata[-1].dtype, geometry, alignment, mask_alignment, addresses)
            self._plans.keep(layout, plan)
        counters = self._counters() if plan.maps else None
        self._short_way.forget()
        self._write(plan, addresses, 0 if counters is None else counters.ptr)
        return plan, counters

    def _write(self, plan: _Plan, addresses: list[int], counters: int) -> None:
        """Renew the addresses in the launch of ``plan``, if it has one: of the operands, and of a tile counter."""
        if plan.prepared is None:
            return
        addresses.append(self._capture_error_ptr)
        if plan.maps:
            self._counter = (self._counter + 1) % _COUNTERS
            addresses.append(counters + self._counter * uint32.itemsize)
        plan.prepared.bind(*addresses)
        for tensor_map, operand in plan.maps:
            tensor_map.move(addresses[operand])

    def _counters(self) -> WorkspaceSlot:
        """The tile counters: zero before the first launch, and after every one."""
        slot = self._workspace.slot
        if slot is None:
            slot = self._workspace.candidate(_COUNTERS_METADATA.nbytes)
            self._runtime.fill_zero(TensorMut(slot.ptr, _COUNTERS_METADATA, slot.allocation))
        return slot

    def _plan(
        self,
        dtype: DataType,
        geometry: AttentionGeometry,
        alignment: int,
        mask_alignment: int,
        addresses: Sequence[int],
    ) -> _Plan:
        runtime, op = self._runtime, self._attributes.op
        capabilities = runtime.capabilities
        choice = choose_variant(
            dtype, geometry, capabilities.compute_capability, alignment=alignment, mask_alignment=mask_alignment
        )
        variant = choice.variant
        spec = attention_spec(
            variant,
            dtype,
            geometry,
            capabilities.compute_capability,
            alignment=alignment,
            mask_alignment=mask_alignment,
        )
        config = launch_config(
            op,
            variant,
            spec,
            geometry,
            max_grid_dim_x=capabilities.max_grid_dim_x,
            multiprocessor_count=capabilities.multiprocessor_count,
        )
        if config.is_empty:
            return _Plan(self._ledger.open(choice, ()), None)
        runtime.require_nvrtc_half_headers(op)
        function = loaded(runtime, spec)
        arguments = launch_arguments(variant, geometry, l2_cache_bytes=capabilities.l2_cache_bytes)
        prepared = runtime.prepare(function, config, *arguments, op=op)
        layouts = sm90.map_layouts(geometry) if variant is AttentionVariant.SM90 else ()
        for layout in layouts:
            address = addresses[layout.operand]
            prepared.set(
                layout.parameter, runtime.tensor_map(dtype, address, layout.extents, layout.strides, layout.box)
            )
        maps = tuple((prepared.tensor_maps[layout.parameter], layout.operand) for layout in layouts)
        return _Plan(self._ledger.open(choice, (config.grid[0],)), prepared, maps)

    def workspace_requirement(self, inputs: Sequence[TensorMetadata]) -> WorkspaceRequirement:
        """None; raises as :meth:`execute` does where the inputs do not fit."""
        AttentionGeometry.resolve(self._attributes, inputs)
        return WorkspaceRequirement.NONE

    def capture_support(self) -> CaptureSupport:
        """Supported once an eager call has compiled the kernel."""
        if self._warmed:
            return CaptureSupport.supported()
        return CaptureSupport.unsupported(
            f"requires a warmed fixed-shape eager {self._attributes.op} pass to compile the NVRTC kernel"
        )

    def supports_strided_input(self, index: int) -> bool:
        """Key and value may be the front of a larger cache, ``narrow()``-ed along dim 2; the others may not."""
        return INPUT_NAMES[index] in ("key", "value")

    def launch_stats(self) -> AttentionLaunchStats:
        return _stats(self._ledger)

    def device_graph_resources(self) -> tuple[DeviceGraphResource, ...]:
        """The tile counters, where there are any."""
        return self._workspace.device_graph_resources()

    def workspace_stats(self) -> WorkspaceStats:
        return self._workspace.stats()


class AttentionFactory(KernelFactory):
    """Makes attention kernels on one runtime."""

    def create(self, node: Node, shapes: Sequence[tuple[int, ...] | None]) -> AttentionKernel:
        return AttentionKernel(self.runtime, AttentionAttributes.from_node(node))

    @classmethod
    def kernel_specs(cls, compute_capability: tuple[int, int]) -> tuple[KernelSpec, ...]:
        """Every variant and dtype at common and at extreme head sizes; a specialisation is of one head size."""
        archs = (None, own_arch(compute_capability))
        return tuple(spec for spec in kernel_specs() if spec.arch in archs)

    @classmethod
    def output_metadata(cls, node: Node, inputs: Sequence[TensorMetadata | None]) -> tuple[TensorMetadata, ...]:
        """As the query, contiguous."""
        query = inputs[0]
        assert query is not None
        return (TensorMetadata(query.dtype, query.shape),)

    @classmethod
    def batch_inputs(cls, node: Node, inputs: Sequence[TensorMetadata | None]) -> tuple[int, ...]:
        """All that are there, but for a mask of rank 2, whose axis 0 is the query's positions."""
        return tuple(
            position
            for position, (name, metadata) in enumerate(zip(INPUT_NAMES, inputs, strict=False))
            if metadata is not None and (name != "attn_mask" or len(metadata.shape) == 4)
        )


def _layout(operands: Sequence[TensorView | None], given: int) -> tuple[tuple[Any, ...], list[int]]:
    """What the plan for ``operands``, so many inputs and one output, depends on; and where all of them begin.

    The former is the alignment of what a kernel reads and writes by wide accesses, that of the mask, and the metadata
    of every operand. The latter has 0 for inputs that are absent or not given.
    """
    addresses = [0 if view is None else view.ptr for view in operands]
    addresses[given:given] = _NO_ADDRESSES[given:]
    bits = ACCESS_BYTES | addresses[0] | addresses[1] | addresses[2] | addresses[-1]
    mask_bits = ACCESS_BYTES | addresses[3]
    metadata = [None if view is None else view.metadata for view in operands]
    return (bits & -bits, mask_bits & -mask_bits, *metadata), addresses


def unsupported_reason(
    node: Node, shapes: Sequence[tuple[int, ...] | None], dtypes: Sequence[DataType | None]
) -> str | None:
    """Why attention cannot serve ``node`` with inputs of these shapes and dtypes; None if it can.

    An unknown dtype passes as the one that the input ought to have. Without the shapes of query, key and
    value only the attributes are judged.
    """
    try:
        attributes = AttentionAttributes.from_node(node)
        if len(shapes) < 3 or any(shape is None for shape in shapes[:3]):
            return None
        known = [*dtypes, *(None,) * (len(shapes) - len(dtypes))]
        query_dtype = known[0] or float32
        AttentionGeometry.resolve(
            attributes,
            [
                None
                if shape is None
                else TensorMetadata(dtype or (int32 if name.endswith("_lengths") else query_dtype), shape)
                for name, shape, dtype in zip(INPUT_NAMES, shapes, known, strict=False)
            ],
        )
    except (KernelError, UnsupportedError) as error:
        return str(error).removeprefix("cuda_ep ")
    return None


register("", "Attention", AttentionFactory, unsupported_reason)
register("com.microsoft", "GroupQueryAttention", AttentionFactory, unsupported_reason)
