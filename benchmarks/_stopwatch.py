"""Host time of calls, in bursts of eight after a drain: in a long burst the queue fills, and one times the device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
        (us,) = self.us_in_turns(call)
        return us

    def us_of_bursts(self, prepare: Callable[[], Sequence[Call]]) -> float:
        """The same, where every burst has calls of its own, prepared outside the time."""
        (us,) = self._medians([prepare])
        return us

    def us_in_turns(self, *calls: Call) -> list[float]:
        """Median microseconds of each of several calls, whose bursts take turns: what changes with time changes all."""
        return self._medians([partial(_burst_of, call) for call in calls])

    def _medians(self, subjects: Sequence[Callable[[], Sequence[Call]]]) -> list[float]:
        samples: list[list[float]] = [[] for _ in subjects]
        gc.collect()
        gc.disable()
        try:
            for _ in range(self.bursts):
                for prepare, of_this in zip(subjects, samples, strict=True):
                    burst = prepare()
                    self.drain()
                    started = perf_counter_ns()
                    for call in burst:
                        call()
                    of_this.append((perf_counter_ns() - started) / len(burst))
            self.drain()
        finally:
            gc.enable()
        return [median(of_this) / 1000 for of_this in samples]


def _burst_of(call: Call) -> Sequence[Call]:
    return [call] * BURST
