"""What an engine has planned and done; prints as a table."""

from __future__ import annotations

from dataclasses import dataclass

from nxrt_cuda.stats import format_table
from nxrt_cuda.text import as_bytes, columns, indented

__all__ = ["BucketReport", "EngineReport", "NodeReport"]


@dataclass(frozen=True)
class NodeReport:
    """One node of one bucket.

    Attributes:
        name: its label.
        op: ``domain::op_type``.
        is_captured: whether it is in the graph; otherwise every run executes it between replays.
        reason: why it is not; empty where it is.
    """

    name: str
    op: str
    is_captured: bool
    reason: str = ""


@dataclass(frozen=True)
class BucketReport:
    """One combination of symbol sizes.

    Attributes:
        name: the engine's name and the sizes.
        nodes: in the order of their execution.
        segments: of its graph, each one replay a run.
        graph_nodes: of all segments.
        buffers: inputs, intermediates and outputs in the bucket's arena.
        buffer_nbytes: of the arena; ``buffer_nbytes_without_reuse`` if every buffer had memory of its own.
        workspace_nbytes: that the bucket's kernels hold.
        runs: how often it has run.
    """

    name: str
    nodes: tuple[NodeReport, ...]
    segments: int
    graph_nodes: int
    buffers: int
    buffer_nbytes: int
    buffer_nbytes_without_reuse: int
    workspace_nbytes: int
    runs: int

    @property
    def nbytes(self) -> int:
        """Device memory of the arena and the workspaces."""
        return self.buffer_nbytes + self.workspace_nbytes

    def __str__(self) -> str:
        rows = [(n.name, n.op, "captured" if n.is_captured else "eager", n.reason) for n in self.nodes]
        summary = {
            "runs": self.runs,
            "graph": f"{self.segments} segment(s), {self.graph_nodes} node(s)",
            "buffers": f"{self.buffers} in {as_bytes(self.buffer_nbytes)}, "
            f"{as_bytes(self.buffer_nbytes_without_reuse)} without reuse",
            "workspaces": as_bytes(self.workspace_nbytes),
        }
        return f"{format_table(self.name, summary)}\n{indented(columns(('node', 'op', 'how', 'reason'), rows))}"


@dataclass(frozen=True)
class EngineReport:
    """What an engine has done since it was made.

    Attributes:
        name: the engine's.
        nodes: how many it has.
        buckets: those that are ready, the least recently used first.
        captures: segments recorded.
        replays: segments replayed.
        eager_runs: executions of nodes that are not captured; warm-ups are not counted.
        evictions: buckets given up to keep within ``max_bytes``.
        max_bytes: the bound on device memory of all buckets; None for none.
    """

    name: str
    nodes: int
    buckets: tuple[BucketReport, ...]
    captures: int
    replays: int
    eager_runs: int
    evictions: int
    max_bytes: int | None

    @property
    def nbytes(self) -> int:
        """Device memory of all buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def __str__(self) -> str:
        bound = "" if self.max_bytes is None else f" of {as_bytes(self.max_bytes)}"
        summary = {
            "nodes": self.nodes,
            "buckets": f"{len(self.buckets)}, {as_bytes(self.nbytes)}{bound}",
            "captures": self.captures,
            "replays": self.replays,
            "eager runs": self.eager_runs,
            "evictions": self.evictions,
        }
        return "\n\n".join([format_table(self.name, summary), *map(str, self.buckets)])
