"""Scratch memory that a kernel object owns: at a fixed address through warm-up, capture and replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxrt_cuda.capture import DeviceGraphResource
from nxrt_cuda.errors import CaptureError
from nxrt_cuda.stats import WorkspaceLedger, WorkspaceStats

if TYPE_CHECKING:
    from nxrt_cuda.memory import Allocation
    from nxrt_cuda.runtime import CudaRuntime

__all__ = ["Workspace", "WorkspaceSlot"]


class WorkspaceSlot:
    """One graph-stable allocation; counted as released when the last kernel or graph lets it go."""

    __slots__ = ("__weakref__", "_ledger", "allocation", "nbytes", "ptr")

    def __init__(self, allocation: Allocation, ledger: WorkspaceLedger) -> None:
        self.allocation = allocation
        self.ptr = allocation.ptr
        self.nbytes = allocation.nbytes
        self._ledger = ledger
        ledger.allocated(self.ptr, self.nbytes)

    def __del__(self) -> None:
        ledger = getattr(self, "_ledger", None)
        if ledger is not None:
            ledger.released(self.nbytes)


class Workspace:
    """Grows outside captures only, and never moves while it is large enough.

    A larger candidate replaces the present slot only when the caller publishes it, after the launches
    that use it were accepted: a failed execution leaves the workspace as it was. The replaced slot
    lives on in the graphs that recorded it, and returns to the driver once an event recorded after its
    last use has completed. To what uses it, that is the same as draining the stream before freeing it,
    and no thread waits.

    Attributes:
        slot: the present one, or None.
    """

    def __init__(self, runtime: CudaRuntime, op: str, process_ledger: WorkspaceLedger) -> None:
        self._runtime = runtime
        self._op = op
        self._ledger = WorkspaceLedger(process_ledger)
        self.slot: WorkspaceSlot | None = None

    def candidate(self, nbytes: int) -> WorkspaceSlot:
        """A slot of at least ``nbytes``: the present one, or a new one that is not installed yet.

        Raises:
            CaptureError: the workspace would have to grow during a capture.
        """
        nbytes = max(nbytes, 1)
        slot = self.slot
        if slot is not None and slot.nbytes >= nbytes:
            self._ledger.handed_out(slot.ptr)
            return slot
        if self._runtime.is_capturing():
            raise CaptureError(
                f"cuda_ep {self._op}: workspace requires {nbytes} bytes during CUDA graph capture; "
                "warm the fixed shape before capture",
                operation="workspace growth",
                state="capturing",
            )
        return WorkspaceSlot(self._runtime.alloc_graph_stable(nbytes), self._ledger)

    def publish(self, slot: WorkspaceSlot) -> None:
        """Keep ``slot`` from now on."""
        self.slot = slot

    def device_graph_resources(self) -> tuple[DeviceGraphResource, ...]:
        """The present slot, for a graph that records its user."""
        return () if self.slot is None else (DeviceGraphResource(id(self.slot), self.slot),)

    @property
    def ptr(self) -> int:
        """The address of the present slot; 0 where there is none."""
        return 0 if self.slot is None else self.slot.ptr

    @property
    def nbytes(self) -> int:
        """The size of the present slot."""
        return 0 if self.slot is None else self.slot.nbytes

    def stats(self) -> WorkspaceStats:
        return self._ledger.stats()
