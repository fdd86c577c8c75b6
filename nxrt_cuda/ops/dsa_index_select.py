"""``pkg.nxrt::DsaIndexSelect`` v1: query-dependent selection of key positions for sparse attention.

For every query row, each key position is scored by its head-weighted, relu'd and scaled dot products plus
an additive bias; the best ``top_k`` allowed positions are emitted in ascending order.

Inputs:
    query: [B, S, H, D] f32, f16 or bf16.
    key: [B, T, D], of the query's dtype.
    weights: [B, S, H], of the query's dtype.
    attention_bias: [B, 1, S, T] f32; a key is allowed where it is ``> -1e30`` (NaN is not).

Output:
    selected_indices: [B, 1, S, top_k] int64, padded on the right with -1.

Attributes:
    top_k: int > 0.
    scale: finite float > 0, of the dot products.
    weights_scale: finite float > 0, of the weights; 1.0 by default.

Scores are bit-equal to :func:`nxrt_cuda.reference.dsa_index_select.dsa_scores`, whose docstring fixes the
order of operations. Selection is by (score descending in IEEE total order, position ascending); a NaN
score of any sign or payload is one value, the greatest. H = 0 or D = 0 is an error, for there is nothing
to score with; B = 0 or S = 0 is a counted execution without launches; T = 0 writes the padding.

There are two variants, which select the same: strict, which computes every score in the definition's order, and
certified, which scores on tensor cores and repairs what their error leaves open (``docs/dsa_exactness.md``); the latter
has kernels for Hopper, one of which does all of a decode step, and ones for every device.
:func:`nxrt_cuda.ops.dsa_plan.choose_variant` decides; the variable ``NXRT_CUDA_DSA=strict``, or :class:`Options` given
to the factory, leaves the strict one alone.

All launches share a workspace that the kernel object owns. It keeps its address from the warm-up through
capture to the last replay, and grows only outside captures. Nothing synchronises or copies to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from nxrt_cuda.capture import DeviceGraphResource
from nxrt_cuda.dtype import DataType, float32, int64, uint8, uint64
from nxrt_cuda.errors import KernelError, UnsupportedError
from nxrt_cuda.kernel import (
    CaptureSupport,
    KernelFactory,
    WorkspaceRequirement,
    register,
)
from nxrt_cuda.launch import KernelSpec
from nxrt_cuda.node import Node
from nxrt_cuda.ops import dsa_certified, dsa_decode, dsa_variants
from nxrt_cuda.ops.dsa_geometry import INPUT_NAMES, OP, Dims, WorkspaceLayout, check_shapes, resolve_dims
from nxrt_cuda.ops.dsa_plan import (
    Attributes,
    CertifiedPlan,
    DecodePlan,
    DsaChoice,
    DsaVariant,
    Options,
    Plan,
    StrictPlan,
    choose_variant,
)
from nxrt_cuda.ops.dsa_variants import ACCESS_BYTES, ELEMENT_TYPES
from nxrt_cuda.ops.launch_ledger import LaunchLedger, Tally
from nxrt_cuda.ops.operands import check_memory, operand_label
from nxrt_cuda.ops.operator_kernel import OperatorKernel
from nxrt_cuda.ops.plan_cache import PlanCache
from nxrt_cuda.stats import StatsTable, WorkspaceLedger, WorkspaceStats
from nxrt_cuda.tensor import TensorMetadata, TensorMut, TensorView
from nxrt_cuda.workspace import Workspace, WorkspaceSlot

if TYPE_CHECKING:
    from nxrt_cuda.runtime import CudaRuntime

__all__ = [
    "DsaIndexSelectFactory",
    "DsaIndexSelectKernel",
    "DsaLaunchStats",
    "DsaRepairStats",
    "Options",
    "dsa_launch_stats",
    "dsa_workspace_stats",
    "kernel_specs",
    "reset_dsa_launch_stats",
    "reset_dsa_workspace_stats",
    "unsupported_reason",
]

_OPERAND_NAMES = (*INPUT_NAMES, "selected_indices")
_OUTPUT = len(INPUT_NAMES)
_LEAST_CAPABILITY = (8, 0)
_DEVICES = ((8, 0), (9, 0), (10, 0), (12, 0))
"""One of each kind that differs in its kernels."""

_I64_MAX = 2**63 - 1


# Statistics.


@dataclass(frozen=True)
class DsaLaunchStats(StatsTable):
    """What DsaIndexSelect kernels have launched.

    Attributes:
        executions: calls of ``execute`` that went through, recorded ones included.
        score_launches, selection_launches: launches that score, and that select; one that does both is either.
        last_score_grid_x, last_selection_grid_x: blocks of the latest launch of either.
    """

    TITLE = OP

    executions: int = 0
    score_launches: int = 0
    selection_launches: int = 0
    last_score_grid_x: int = 0
    last_selection_grid_x: int = 0


@dataclass(frozen=True)
class DsaRepairStats(StatsTable):
    """What the certified variant has scored in strict order, replays included.

    Attributes:
        rows_scored_strictly: rows with irregular numbers, for whose scores there is no bound: every allowed key.
        keys_scored_strictly: keys whose rank the bound left open, those of such rows included.
    """

    TITLE = f"{OP} repairs"

    rows_scored_strictly: int = 0
    keys_scored_strictly: int = 0


_process_launches: LaunchLedger[DsaChoice] = LaunchLedger(kinds=2)
_process_workspaces = WorkspaceLedger()


def dsa_launch_stats() -> DsaLaunchStats:
    """Launches of all DsaIndexSelect kernels of this process."""
    return _stats(_process_launches)


def reset_dsa_launch_stats() -> None:
    """Zero what :func:`dsa_launch_stats` counts."""
    _process_launches.reset()


def _stats(ledger: LaunchLedger[DsaChoice]) -> DsaLaunchStats:
    counts, last_grids, _ = ledger.totals()
    return DsaLaunchStats(*counts, *last_grids)


def dsa_workspace_stats() -> WorkspaceStats:
    """Workspaces of all DsaIndexSelect kernels of this process."""
    return _process_workspaces.stats()


def reset_dsa_workspace_stats() -> bool:
    """Zero what :func:`dsa_workspace_stats` counts; refused, returning False, while bytes are live."""
    return _process_workspaces.reset()


# The kernel object.


def _read_attributes(node: Node) -> Attributes:
    attributes = Attributes(
        top_k=node.positive_int_attr("top_k"),
        scale=node.finite_positive_float_attr("scale"),
        weights_scale=node.finite_positive_float_attr("weights_scale", 1.0),
    )
    if attributes.top_k > _I64_MAX:
        raise KernelError(OP, f"attribute 'top_k' must fit i64, got {attributes.top_k}", operand="top_k")
    node.reject_unknown_attributes(("top_k", "scale", "weights_scale"), "the frozen v1 ABI")
    return attributes


_Layout = tuple[bool, TensorMetadata, TensorMetadata, TensorMetadata, TensorMetadata, TensorMetadata]
"""Whether query and key allow the widest access, and the metadata of inputs and output."""


class DsaIndexSelectKernel(OperatorKernel[DsaChoice]):
    """One DsaIndexSelect node on one runtime; made by :class:`DsaIndexSelectFactory`."""

    def __init__(self, runtime: CudaRuntime, attributes: Attributes, options: Options, max_grid_x: int) -> None:
        super().__init__(runtime, _process_launches)
        self._attributes = attributes
        self._options = options
        self._max_grid_x = max_grid_x
        self._workspace = Workspace(runtime, OP, _process_workspaces)
        self._plans: PlanCache[_Layout, Plan] = PlanCache()
        self._counters: TensorMut | None = None
        self._meetings: TensorMut | None = None
        self._warmed = False

    def _execute(
        self,
        inputs: Sequence[TensorView | None],
        outputs: Sequence[TensorMut],
        operands: list[TensorView | None],
    ) -> Tally[DsaChoice]:
        runtime = self._runtime
        with runtime.exclusive():
            plan, slot = self._bind(operands, len(outputs))
            for launch, touched in plan.steps:
                runtime.launch(launch, operands[touched])
            if runtime.is_capturing():
                runtime.retain(self.device_graph_resources())
            else:
                self._workspace.publish(slot)
                self._warmed = True
            plan.open_short_way()
            if plan.launches:
                self._short_way.remember(operands, plan)
            plan.tally.executions += 1
            return plan.tally

    def _rebind(self, operands: list[TensorView | None]) -> Plan | None:
        query, key, weights, bias, out = _all_present(operands, 1)
        check_memory(OP, self._runtime, _OPERAND_NAMES, operands)
        plan = self._plans.find(_layout(query, key, weights, bias, out))
        if plan is None or not plan.launches:
            return None
        # An execution that went through has left a workspace that is large enough.
        plan.bind(self._workspace.ptr, query.ptr, key.ptr, weights.ptr, bias.ptr, out.ptr)
        return plan

    def _bind(self, operands: list[TensorView | None], outputs: int) -> tuple[Plan, WorkspaceSlot]:
        """The plan for the operands, made if there is none, bound to them and to a workspace."""
        query, key, weights, bias, out = _all_present(operands, outputs)
        check_memory(OP, self._runtime, _OPERAND_NAMES, operands)
        layout = _layout(query, key, weights, bias, out)
        plan = self._plans.find(layout)
        if plan is None:
            aligned, *metadata = layout
            plan = self._plan(self._check_metadata(metadata), query.dtype, aligned)
            slot = self._workspace.candidate(plan.nbytes)
            plan.tally = self._ledger.open(plan.choice, plan.score_grids, plan.selection_grids)
            self._plans.keep(layout, plan)
        else:
            slot = self._workspace.candidate(plan.nbytes)
        self._short_way.forget()
        plan.bind(slot.ptr, query.ptr, key.ptr, weights.ptr, bias.ptr, out.ptr)
        return plan, slot

    def workspace_requirement(self, inputs: Sequence[TensorMetadata]) -> WorkspaceRequirement:
        """None: the kernel owns its workspace.

        Raises:
            KernelError: the shapes do not fit together, or a size overflows.
        """
        if len(inputs) != len(INPUT_NAMES):
            raise KernelError(OP, f"expected 4 input metadata entries, got {len(inputs)}")
        WorkspaceLayout.of(resolve_dims([metadata.shape for metadata in inputs], self._attributes.top_k))
        return WorkspaceRequirement.NONE

    def capture_support(self) -> CaptureSupport:
        """Supported once an eager execution has compiled the kernels and sized the workspace."""
        if self._warmed:
            return CaptureSupport.supported()
        return CaptureSupport.unsupported(
            "requires a warmed fixed-shape eager DsaIndexSelect pass to compile the NVRTC kernel and size the "
            "kernel-owned workspace"
        )

    def device_graph_resources(self) -> tuple[DeviceGraphResource, ...]:
        """The workspace, the counters of what was repaired, and where the blocks of a decode step meet."""
        kept = (tensor for tensor in (self._counters, self._meetings) if tensor is not None)
        own = (DeviceGraphResource(id(tensor), tensor) for tensor in kept)
        return (*self._workspace.device_graph_resources(), *own)

    def launch_stats(self) -> DsaLaunchStats:
        return _stats(self._ledger)

    def workspace_stats(self) -> WorkspaceStats:
        return self._workspace.stats()

    def repair_stats(self) -> DsaRepairStats:
        """What was scored strictly so far; reads counters on the device, so it waits for the work queued before."""
        if self._counters is None:
            return DsaRepairStats()
        rows, keys = self._counters.numpy().tolist()
        return DsaRepairStats(rows, keys)

    @property
    def choice(self) -> DsaChoice | None:
        """The variant that served the last execution, and why; None before the first."""
        return None if self._ledger.last is None else self._ledger.last.choice

    def _check_metadata(self, metadata: Sequence[TensorMetadata]) -> Dims:
        *inputs, output = metadata
        query = inputs[0].dtype
        if query not in ELEMENT_TYPES:
            raise _operand_error(0, f"dtype {query} unsupported; expected Float32, Float16, or BFloat16")
        for index in (1, 2):
            if inputs[index].dtype != query:
                raise _operand_error(index, f"dtype {inputs[index].dtype} must match query dtype {query}")
        if inputs[3].dtype != float32:
            raise _operand_error(3, f"dtype {inputs[3].dtype} unsupported; expected Float32")
        if output.dtype != int64:
            raise _operand_error(_OUTPUT, f"dtype {output.dtype} unsupported; expected Int64")
        for index, tensor in enumerate(inputs):
            if not tensor.is_contiguous:
                raise _operand_error(index, f"must be contiguous, got strides {list(tensor.strides)}")
        if not output.is_contiguous:
            raise _operand_error(_OUTPUT, f"must be contiguous, got strides {list(output.strides)}")
        dims = resolve_dims([tensor.shape for tensor in inputs], self._attributes.top_k)
        expected = (dims.batch, 1, dims.q_seq, self._attributes.top_k)
        if output.shape != expected:
            raise _operand_error(
                _OUTPUT, f"shape {list(output.shape)} unsupported; expected {list(expected)} (B, 1, S, top_k)"
            )
        return dims

    def _plan(self, dims: Dims, dtype: DataType, aligned: bool) -> Plan:
        """Pack the arguments of the kernels but for addresses; an empty tensor makes an empty grid."""
        runtime, attributes, options, limit = self._runtime, self._attributes, self._options, self._max_grid_x
        runtime.require_nvrtc_half_headers(OP)
        capability, processors = runtime.capabilities.compute_capability, runtime.capabilities.multiprocessor_count
        able = dsa_certified.abilities(capability)
        team = dsa_decode.choose_team(
            dtype, dims, attributes.top_k, able, min(processors, limit), options.workspace_bytes
        )
        choice = (
            DsaChoice(DsaVariant.STRICT, "asked for")
            if options.mode == "strict"
            else choose_variant(dtype, dims, attributes.top_k, capability, aligned=aligned, team=team)
        )
        if choice.variant is DsaVariant.STRICT:
            strict = WorkspaceLayout.of(dims)
            return StrictPlan(runtime, dims, dtype, attributes, strict, choice, aligned=aligned, max_grid_x=limit)
        if self._counters is None:
            self._counters = runtime.zeros((2,), uint64)
        if choice.variant is DsaVariant.CERTIFIED_DECODE and team is not None:
            if self._meetings is None:
                self._meetings = runtime.zeros((processors * dsa_decode.MEETINGS_BYTES,), uint8)
            return DecodePlan(
                *(runtime, dims, dtype, attributes, team, choice), counters=self._counters, meetings=self._meetings
            )
        certified = dsa_certified.CertifiedLayout.of(dims, dtype, options.workspace_bytes)
        return CertifiedPlan(
            runtime, dims, dtype, attributes, certified, choice, max_grid_x=limit, counters=self._counters
        )


class DsaIndexSelectFactory(KernelFactory):
    """Makes DsaIndexSelect kernels; by default with the options that the environment names."""

    def __init__(self, runtime: CudaRuntime, options: Options | None = None) -> None:
        """
        Raises:
            UnsupportedError: the device is older than the selection kernel's warp reductions.
        """
        super().__init__(runtime)
        self._options = options or Options.from_environment()
        major, minor = runtime.capabilities.compute_capability
        if (major, minor) < _LEAST_CAPABILITY:
            least = "{}.{}".format(*_LEAST_CAPABILITY)
            raise UnsupportedError(f"{OP} needs compute capability {least} or later; this device has {major}.{minor}")

    def create(self, node: Node, shapes: Sequence[tuple[int, ...] | None]) -> DsaIndexSelectKernel:
        """A kernel for ``node``; it takes any shapes.

        Raises:
            KernelError: an attribute is missing, ill-typed, out of range or outside the v1 ABI.
        """
        limit = self.runtime.capabilities.max_grid_dim_x
        return DsaIndexSelectKernel(self.runtime, _read_attributes(node), self._options, limit)

    @classmethod
    def output_metadata(cls, node: Node, inputs: Sequence[TensorMetadata | None]) -> tuple[TensorMetadata, ...]:
        """``selected_indices``: [B, 1, S, top_k] int64."""
        query = inputs[0]
        assert query is not None
        batch, q_seq = query.shape[:2]
        return (TensorMetadata(int64, (batch, 1, q_seq, _read_attributes(node).top_k)),)

    @classmethod
    def batch_inputs(cls, node: Node, inputs: Sequence[TensorMetadata | None]) -> tuple[int, ...]:
        """All four."""
        return tuple(range(len(inputs)))

    @classmethod
    def kernel_specs(cls, compute_capability: tuple[int, int]) -> tuple[KernelSpec, ...]:
        """All that the operator can launch."""
        able = dsa_certified.abilities(compute_capability)
        return (*dsa_variants.kernel_specs(), *dsa_certified.certified_specs(able), *dsa_decode.decode_specs(able))

    def create_kernel_with_grid_limit(self, node: Node, max_grid_x: int) -> DsaIndexSelectKernel:
        """A kernel that launches no more than ``max_grid_x`` blocks, for tests of the grid stride.

        Raises:
            KernelError: the limit is not positive, or an attribute is wrong.
        """
        if max_grid_x <= 0:
            raise KernelError(OP, "test grid limit must be greater than zero")
        device_limit = self.runtime.capabilities.max_grid_dim_x
        limit = min(max_grid_x, device_limit)
        return DsaIndexSelectKernel(self.runtime, _read_attributes(node), self._options, limit)


def kernel_specs() -> tuple[KernelSpec, ...]:
    """Every specialisation that the operator can launch on any device."""
    return tuple(dict.fromkeys(chain.from_iterable(map(DsaIndexSelectFactory.kernel_specs, _DEVICES))))


def unsupported_reason(
    node: Node, shapes: Sequence[tuple[int, ...] | None], dtypes: Sequence[DataType | None]
) -> str | None:
    """The claim gate. What is not known (None, or beyond the end of ``dtypes``) is not held against the node."""
    known = (*dtypes, *(None,) * (len(INPUT_NAMES) - len(dtypes)))
    query, key, weights, bias = known[: len(INPUT_NAMES)]
    if query not in ELEMENT_TYPES:
        return f"{OP}: query dtype {query or 'Undefined'} unsupported on CUDA (expected f32, f16, or bf16)"
    if any(dtype not in (query, None) for dtype in (key, weights)):
        return f"{OP}: query, key, and weights must use the same floating dtype on CUDA"
    try:
        _read_attributes(node)
        if len(shapes) != len(INPUT_NAMES):
            return f"{OP}: expected 4 inputs, got {len(shapes)}"
        if bias not in (float32, None):
            raise _operand_error(3, f"dtype {bias} unsupported; expected Float32")
        check_shapes(shapes)
    except KernelError as error:
        return str(error).removeprefix("cuda_ep ")
    return None


def _all_present(
    operands: Sequence[TensorView | None], outputs: int
) -> tuple[TensorView, TensorView, TensorView, TensorView, TensorView]:
    """``operands``, so many outputs behind the inputs, if they are what the operator takes."""
    if len(operands) - outputs != len(INPUT_NAMES):
        raise KernelError(OP, f"expected 4 inputs, got {len(operands) - outputs}")
    if outputs != 1:
        raise KernelError(OP, f"expected 1 output, got {outputs}")
    query, key, weights, bias, out = operands
    if query is None or key is None or weights is None or bias is None or out is None:
        position = [view is None for view in operands].index(True)
        raise KernelError(OP, f"required {_label(position)} is absent", operand=_OPERAND_NAMES[position])
    return query, key, weights, bias, out


def _layout(query: TensorView, key: TensorView, weights: TensorView, bias: TensorView, out: TensorView) -> _Layout:
    aligned = (query.ptr | key.ptr) % ACCESS_BYTES == 0
    return aligned, query.metadata, key.metadata, weights.metadata, bias.metadata, out.metadata


def _operand_error(position: int, what: str) -> KernelError:
    return KernelError(OP, f"{_label(position)} {what}", operand=_OPERAND_NAMES[position])


def _label(position: int) -> str:
    return operand_label(_OPERAND_NAMES, _OUTPUT, position)


register("pkg.nxrt", OP, DsaIndexSelectFactory, unsupported_reason)
