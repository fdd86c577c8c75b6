"""Device time: of calls on a runtime's stream, and of graphs that take turns on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import quantiles

import nxrt_cuda as nx

__all__ = ["DeviceClock", "Subject", "Timing", "time_subjects"]

_ROUNDS = 4
_REPLAYS = (1, 10)
_ROUND_MS = 60.0
"""How long a subject is replayed in one round."""


class DeviceClock:
    """Time on a runtime's compute stream, by timing events of its driver."""

    def __init__(self, runtime: nx.CudaRuntime) -> None:
        self._runtime = runtime

    def intervals(self, work: Callable[[], object], repeats: int) -> list[float]:
        """Milliseconds of each of ``repeats`` calls of ``work``, which are enqueued back to back.

        One more goes before them untimed, so that the host is ahead of the device when timing starts.
        """
        marks = []
        for _ in range(repeats + 1):
            work()
            marks.append(self._runtime.record_event())
        return [before.elapsed_time(after) for before, after in pairwise(marks)]


@dataclass(frozen=True)
class Subject:
    """Something to time: ``replay()`` enqueues ``calls`` calls on the compute stream."""

    replay: Callable[[], object]
    calls: int


@dataclass(frozen=True)
class Timing:
    """Device time of one call.

    Attributes:
        ms: the median.
        spread: the distance between the quartiles, relative to the median.
        samples: replays timed.
    """

    ms: float
    spread: float
    samples: int


def time_subjects(clock: DeviceClock, subjects: Mapping[str, Subject]) -> dict[str, Timing]:
    """Time the subjects in turns, the order of one round turned round in the next; the first only warms the device up.

    What a device at its power limit gives to one subject depends on what the one before it has drawn: this way the
    first and the last come equally often after themselves and after each neighbour.
    """
    low, high = _REPLAYS
    repeats = {}
    for name, subject in subjects.items():
        (warm,) = clock.intervals(subject.replay, 1)
        repeats[name] = min(max(low, int(_ROUND_MS / warm)), high)
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    order = list(subjects.items())
    for turn in range(1 + _ROUNDS):
        for name, subject in order:
            intervals = clock.intervals(subject.replay, repeats[name])
            if turn > 0:
                samples[name] += intervals
        order.reverse()
    return {name: _timing(samples[name], subject.calls) for name, subject in subjects.items()}


def _timing(samples: Sequence[float], calls: int) -> Timing:
    lower, middle, upper = quantiles(samples, n=4, method="inclusive")
    return Timing(middle / calls, (upper - lower) / middle, len(samples))
