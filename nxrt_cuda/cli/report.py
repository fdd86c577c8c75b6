"""A trial's report as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nxrt_cuda.cli.trial import Check, Step, Timing, TrialReport
from nxrt_cuda.text import as_bytes, as_shape, columns, indented

__all__ = ["trial_text"]

_COUNTERS: Mapping[str, tuple[str, ...]] = {
    "launches": ("launches",),
    "replays": ("graph_replays",),
    "compiles": ("modules_compiled",),
    "cached": ("program_cache_hits",),
    "allocations": ("driver_allocations", "pool_hits"),
    "copies in": ("htod_copies",),
    "copies out": ("dtoh_copies",),
}
"""Column by column, the runtime's counters that it adds up."""


def trial_text(report: TrialReport, device: str) -> str:
    """The checks, counters and times of one trial, as tables."""
    name = f"{report.node.domain or 'ai.onnx'}::{report.node.op_type}"
    attributes = ", ".join(f"{key} = {_short(value)}" for key, value in report.node.attributes.items())
    operands = [
        [label, operand.dtype.numpy.name, as_shape(operand.shape), as_bytes(operand.nbytes)]
        for label, operand in report.operands.items()
    ]
    parts = [
        f"{name}  {attributes}".rstrip(),
        columns(["operand", "dtype", "shape", "size"], operands),
        _checks(report.checks),
        _counters(report.steps),
        _times(report.timings, device),
        _kernel(report),
    ]
    if report.result.size == 0:
        parts.append("the output is empty: nothing was launched, and there is no graph to replay")
    if report.clamped:
        parts.append(f"lengths outside their range were clamped: {report.clamped.name}")
    return "\n\n".join([parts[0], *(indented(part) for part in parts[1:])])


def _checks(checks: Sequence[Check]) -> str:
    with_oracle = checks[0].oracle is not None
    header = ["check", "contents", *(["against the oracle"] if with_oracle else []), "against eager", ""]
    rows = []
    for check in checks:
        row = [check.name, check.contents]
        if check.oracle is not None:
            row.append(check.oracle.text)
        row.append({None: "-", True: "identical bytes", False: "DIFFERENT BYTES"}[check.equals_eager])
        row.append("ok" if check.passed else "FAILED")
        rows.append(row)
    return columns(header, rows)


def _counters(steps: Sequence[Step]) -> str:
    rows = [
        [step.name, step.times, *(sum(getattr(step.counters, name) for name in names) for names in _COUNTERS.values())]
        for step in steps
    ]
    return columns(["step", "times", *_COUNTERS], rows)


def _times(timings: Mapping[str, Timing], device: str) -> str:
    clock = "host driver ms" if device == "host" else "device ms"
    rows = [
        [name, f"{timing.stream_ms:.4f}", f"{timing.call_us:.1f}", f"median of {timing.repetitions}"]
        for name, timing in timings.items()
    ]
    return columns(["time", clock, "us to call it", ""], rows)


def _kernel(report: TrialReport) -> str:
    numbers = [f"{name} {value}" for name, value in report.kernel_stats.items() if not isinstance(value, str)]
    texts = [[name, value] for name, value in report.kernel_stats.items() if isinstance(value, str)]
    stats = report.workspace_stats
    workspace = (
        f"{as_bytes(stats['live_bytes'])}; {stats['allocations']} allocation(s), {stats['releases']} release(s)"
        if stats["allocations"]
        else "none"
    )
    return columns(["kernel", ", ".join(numbers)], [*texts, ["workspace", workspace]])


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
