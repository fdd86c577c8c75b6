"""Host time of calls, in bursts of eight after a drain: in a long burst the queue fills, and one times the device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

__all__ = ["BURST", "Call", "Row", "Stopwatch"]

BURST = 8

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: what was called.
        us: host microseconds of one call.
        launches: kernels that it starts, or nodes that it replays; None where there are none.
        bare: the line that it is measured against.
        target_us: what it may cost.
        target_ratio: how many times what it is measured against it may cost.
        note: what else was seen.
    """

    what: str
    us: float
    launches: int | None = 1
    bare: str | None = None
    target_us: float | None = None
    target_ratio: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Stopwatch:
    """Host time of calls: ``drain`` waits for the stream that they go to."""

    drain: Callable[[], object]
    bursts: int

    def us(self, call: Call) -> float:
        """Median microseconds of one call."""
        return self.us_of_bursts(lambda: [call] * BURST)

    def us_of_bursts(self, prepare: Callable[[], Sequence[Call]]) -> float:
        """The same, where every burst has calls of its own, prepared outside the time."""
        samples = []
        gc.collect()
        gc.disable()
        try:
            for _ in range(self.bursts):
                burst = prepare()
                self.drain()
                started = perf_counter_ns()
                for call in burst:
                    call()
                samples.append((perf_counter_ns() - started) / len(burst))
            self.drain()
        finally:
            gc.enable()
        return median(samples) / 1000
