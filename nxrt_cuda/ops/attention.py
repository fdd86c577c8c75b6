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
- Sums are f32 for every dtype, and weights count down to 2**-39 of the row's largest even where they pass
  through f16. A result is a weighted mean of values and finite where they are; only within a factor of Sk
  of the greatest f32 can the sum before the division overflow.
- The same inputs give the same bits, whatever else is in the batch.

One query row (Sq = 1) has a kernel of its own; :func:`~nxrt_cuda.ops.attention_variants.choose_variant`
says which kernel serves a call, and the launch statistics say which one did.

Calls are stream-ordered and safe from any thread. There is no workspace.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nxrt_cuda.dtype import DataType, float32, int32
from nxrt_cuda.errors import KernelError, UnsupportedError
from nxrt_cuda.kernel import CaptureSupport, Kernel, KernelFactory, WorkspaceRequirement, register
from nxrt_cuda.launch import KernelSpec, LaunchConfig, PreparedLaunch
from nxrt_cuda.node import Node
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
    lowest_bit,
)
from nxrt_cuda.ops.operands import LastOperands, check_memory
from nxrt_cuda.stats import StatsTable, WorkspaceStats
from nxrt_cuda.tensor import TensorMetadata, TensorMut, TensorView

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

_OPERAND_NAMES = (*INPUT_NAMES, "output")

_PLAN_LIMIT = 64
"""Layouts whose launches are kept prepared; decoding meets a new one with every token."""


@dataclass(frozen=True)
class AttentionLaunchStats(StatsTable):
    """What attention has done, per kernel object or in the whole process.

    Attributes:
        executions: calls of ``execute`` that were accepted, empty ones included.
        launches: kernels launched or recorded.
        last_grid_x: blocks of the last launch.
        variant: the kernel that served the last execution: ``"simt"``, ``"tensor_core"``, ``"decode"``.
        reason: why that one.
    """

    TITLE = "attention"

    executions: int = 0
    launches: int = 0
    last_grid_x: int = 0
    variant: str = ""
    reason: str = ""


class _LaunchLedger:
    """Counts executions; what a child counts, its parent counts too."""

    def __init__(self, parent: _LaunchLedger | None = None) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._executions = self._launches = self._last_grid_x = 0
        self._choice: VariantChoice | None = None

    def executed(self, choice: VariantChoice, grid_x: int) -> None:
        with self._lock:
            self._executions += 1
            self._choice = choice
            if grid_x:
                self._launches += 1
                self._last_grid_x = grid_x
        if self._parent is not None:
            self._parent.executed(choice, grid_x)

    def stats(self) -> AttentionLaunchStats:
        with self._lock:
            stats = AttentionLaunchStats(self._executions, self._launches, self._last_grid_x)
            choice = self._choice
        return stats if choice is None else replace(stats, variant=choice.variant.value, reason=choice.reason)

    def reset(self) -> None:
        with self._lock:
            self._executions = self._launches = self._last_grid_x = 0
            self._choice = None


_process_ledger = _LaunchLedger()


def attention_launch_stats() -> AttentionLaunchStats:
    """The counters of all attention kernels of this process."""
    return _process_ledger.stats()


def reset_attention_launch_stats() -> None:
    """Zero the process-wide counters; those of kernel objects stay."""
    _process_ledger.reset()


@dataclass(frozen=True)
class _Plan:
    """What is settled for operands of one layout: the variant, and the launch but for its addresses."""

    choice: VariantChoice
    config: LaunchConfig
    prepared: PreparedLaunch | None


class AttentionKernel(Kernel):
    """One attention node on one runtime.

    Any thread may execute it; executions of one object are ordered by the runtime's lock.
    """

    def __init__(self, runtime: CudaRuntime, attributes: AttentionAttributes) -> None:
        self._runtime = runtime
        self._attributes = attributes
        self._plans: dict[tuple[object, ...], _Plan] = {}
        self._ledger = _LaunchLedger(_process_ledger)
        self._last: LastOperands[_Plan] = LastOperands(runtime)
        self._warmed = False

    def execute(self, inputs: Sequence[TensorView | None], outputs: Sequence[TensorMut]) -> None:
        """Enqueue attention on the compute stream; see the module's docstring for the operands.

        Raises:
            KernelError: an operand is not what the operator takes; nothing was launched or counted.
            UnsupportedError: the dtype or head_dim is not served.
            CaptureError: the kernel for these operands is not compiled yet, and a capture is open.
        """
        runtime = self._runtime
        operands = (*inputs, *outputs)
        with runtime.exclusive():
            bound = self._last.find(operands)
            plan = bound or self._bind(inputs, outputs)
            if plan.prepared is not None:
                runtime.launch(plan.prepared, operands)
                self._warmed = self._warmed or not runtime.is_capturing()
            self._ledger.executed(plan.choice, plan.config.grid[0])
            if bound is None:
                self._last.remember(operands, plan)

    def _bind(self, inputs: Sequence[TensorView | None], outputs: Sequence[TensorMut]) -> _Plan:
        """Check the operands, and write their addresses into the launch for their layout."""
        op = self._attributes.op
        if len(outputs) != 1:
            raise KernelError(op, f"expected 1 output, got {len(outputs)}")
        inputs = (*inputs, *(None,) * (len(INPUT_NAMES) - len(inputs)))
        operands = (*inputs, *outputs)
        metadata = [None if view is None else view.metadata for view in operands]
        alignment = _common_alignment(operands)
        key = (alignment, *metadata)
        plan = self._plans.get(key)
        if plan is None:
            geometry = AttentionGeometry.resolve(self._attributes, metadata[:-1], metadata[-1])
        check_memory(op, self._runtime, _OPERAND_NAMES, inputs, outputs)
        if plan is None:
            plan = self._plan(outputs[0].dtype, geometry, alignment)
            self._remember(key, plan)
        if plan.prepared is not None:
            self._last.forget()
            addresses = [0 if view is None else view.ptr for view in operands]
            plan.prepared.bind(*addresses, self._runtime.capture_error_ptr)
        return plan

    def _plan(self, dtype: DataType, geometry: AttentionGeometry, alignment: int) -> _Plan:
        runtime, op = self._runtime, self._attributes.op
        capabilities = runtime.capabilities
        choice = choose_variant(dtype, geometry, capabilities.compute_capability)
        config = launch_config(op, choice.variant, geometry, capabilities.max_grid_dim_x)
        if config.is_empty:
            return _Plan(choice, config, None)
        runtime.require_nvrtc_half_headers(op)
        if choice.variant is AttentionVariant.TENSOR_CORE:
            runtime.require_nvrtc_tensor_core_headers(op)
        function = runtime.function(attention_spec(choice.variant, dtype, geometry, alignment=alignment))
        return _Plan(choice, config, runtime.prepare(function, config, *launch_arguments(geometry), op=op))

    def _remember(self, key: tuple[object, ...], plan: _Plan) -> None:
        if len(self._plans) >= _PLAN_LIMIT:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = plan

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
        return self._ledger.stats()

    def workspace_stats(self) -> WorkspaceStats:
        """Zeros: attention needs no scratch memory."""
        return WorkspaceStats()


class AttentionFactory(KernelFactory):
    """Makes attention kernels on one runtime."""

    def create(self, node: Node, shapes: Sequence[tuple[int, ...] | None]) -> AttentionKernel:
        return AttentionKernel(self.runtime, AttentionAttributes.from_node(node))

    @classmethod
    def kernel_specs(cls, compute_capability: tuple[int, int]) -> tuple[KernelSpec, ...]:
        """Every variant and dtype at common and at extreme head sizes; a specialisation is of one head size."""
        return kernel_specs()

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


def _common_alignment(operands: Sequence[TensorView | None]) -> int:
    """The greatest power of two, up to a full access, that query, key, value and output are aligned to."""
    bits = ACCESS_BYTES
    for view in (*operands[:3], operands[-1]):
        if view is not None:
            bits |= view.ptr
    return lowest_bit(bits)


register("", "Attention", AttentionFactory, unsupported_reason)
register("com.microsoft", "GroupQueryAttention", AttentionFactory, unsupported_reason)
