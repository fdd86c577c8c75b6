"""The barriers of ``kernels/attention_sm90.cu`` as a model: no order of its warps comes to a halt.

On a GPU warps run nearly in step, and an order that halts is met once in many thousand launches. The model has the
waits and arrivals of the kernel and nothing else: a generator a warp, which yields what it waits for. Whichever can go
on does so at random, one of the consumers' warps seldom.

A barrier tells a waiter no more than the parity of its phase. Whoever is two phases behind waits for ever, so that
nobody may be released from a buffer before all have waited for what is in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable
from dataclasses import astuple, dataclass, field

import pytest

from nxrt_cuda.ops.attention_sm90 import Sm90Tiles

WARPS, CHECKERS = 4, 3  # of a consumer; of a block

Condition = Callable[[], bool]
Agent = Generator[Condition, None, None]


class Barrier:
    """An mbarrier: a phase ends with its last arrival, and with the last copy that an arrival has announced."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.missing = arrivals
        self.copies = self.phase = 0

    def arrive(self, copies: int = 0) -> None:
        self.missing -= 1
        self.copies += copies
        self._end_phase()

    def copied(self) -> None:
        self.copies -= 1
        self._end_phase()

    def passed(self, parity: int) -> Condition:
        return lambda: self.phase % 2 != parity

    def _end_phase(self) -> None:
        assert self.missing >= 0
        if self.missing == self.copies == 0:
            self.phase += 1
            self.missing = self.arrivals


class Meeting:
    """A named barrier, or the warpgroup's own where it issues products together."""

    def __init__(self, warps: int) -> None:
        self.warps = warps
        self.arrived = 0

    def arrive(self) -> Condition:
        self.arrived += 1
        meeting = -(-self.arrived // self.warps)
        return lambda: self.arrived >= meeting * self.warps


@dataclass
class Place:
    """Where one party stands in a ring of stages."""

    stages: int
    step: int = 0

    @property
    def stage(self) -> int:
        return self.step % self.stages

    @property
    def parity(self) -> int:
        return self.step // self.stages % 2

    def next(self) -> Place:
        return Place(self.stages, self.step + 1)


@dataclass(frozen=True)
class Tile:
    """Which of a tile's blocks of keys are partial: checkers look at their values."""

    partial: tuple[bool, ...]


def barriers(stages: int, arrivals: int) -> list[Barrier]:
    return [Barrier(arrivals) for _ in range(stages)]


@dataclass
class Kernel:
    """One block of the kernel. ``releasing`` warps of each consumer release a block of values: all, in the kernel."""

    shape: Sm90Tiles
    tiles: list[Tile]
    releasing: int = WARPS
    copies: list[Barrier] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.shape
        self.q_full = [barriers(shape.consumers, 1) for _ in range(shape.query_stages)]
        self.q_empty = barriers(shape.query_stages, shape.consumers * WARPS + CHECKERS)
        self.k_full, self.k_empty = barriers(shape.key_stages, 1), barriers(shape.key_stages, shape.consumers)
        self.v_full = barriers(shape.value_stages, 1)
        self.v_empty = barriers(shape.value_stages, shape.consumers * self.releasing + CHECKERS)
        self.checked = barriers(shape.value_stages, CHECKERS)
        self.turns = [Meeting(2 * WARPS) for _ in range(shape.consumers)]
        self.products = [Meeting(WARPS) for _ in range(shape.consumers)]
        self.outputs = [Meeting(WARPS) for _ in range(shape.consumers)]
        self.mailboxes: list[Tile | None] = [None] * shape.query_stages

    def places(self) -> tuple[Place, Place, Place]:
        """At the beginning of the rings of queries, keys and values."""
        return Place(self.shape.query_stages), Place(self.shape.key_stages), Place(self.shape.value_stages)

    def agents(self) -> list[Agent]:
        consumers = [self.consume(consumer, warp) for consumer in range(self.shape.consumers) for warp in range(WARPS)]
        return [self.produce(), *(self.check() for _ in range(CHECKERS)), *consumers]

    def load(self, full: Iterable[Barrier]) -> None:
        for barrier in full:
            barrier.arrive(copies=1)
            self.copies.append(barrier)

    def produce(self) -> Agent:
        q, k, v = self.places()
        for tile in self.tiles:
            yield self.q_empty[q.stage].passed(q.parity ^ 1)
            self.mailboxes[q.stage] = tile
            self.load(self.q_full[q.stage])
            q = q.next()
            for _ in tile.partial:
                yield self.k_empty[k.stage].passed(k.parity ^ 1)
                self.load([self.k_full[k.stage]])
                if k.step > 0:  # values follow a block behind
                    yield self.v_empty[v.stage].passed(v.parity ^ 1)
                    self.load([self.v_full[v.stage]])
                    v = v.next()
                k = k.next()
        yield self.v_empty[v.stage].passed(v.parity ^ 1)
        self.load([self.v_full[v.stage]])
        yield self.q_empty[q.stage].passed(q.parity ^ 1)
        self.mailboxes[q.stage] = None
        for barrier in self.q_full[q.stage]:
            barrier.arrive()

    def check(self) -> Agent:
        q, _, v = self.places()
        checked = v
        while True:
            yield self.q_full[q.stage][0].passed(q.parity)
            tile = self.mailboxes[q.stage]
            self.q_empty[q.stage].arrive()
            q = q.next()
            if tile is None:
                return
            for is_partial in tile.partial:
                yield self.v_full[v.stage].passed(v.parity)
                if is_partial:
                    self.checked[checked.stage].arrive()
                    checked = checked.next()
                    yield at_once
                self.v_empty[v.stage].arrive()
                v = v.next()

    def consume(self, consumer: int, warp: int) -> Agent:
        q, k, v = self.places()
        checked = v
        is_elected = warp == 0
        next_turn = self.turns[(consumer + 1) % len(self.turns)]
        yield self.q_full[q.stage][consumer].passed(q.parity)
        tile = self.mailboxes[q.stage]
        yield self.k_full[k.stage].passed(k.parity)
        yield self.products[consumer].arrive()
        if consumer == len(self.turns) - 1:
            next_turn.arrive()
        yield at_once
        if is_elected:
            self.k_empty[k.stage].arrive()
        k = k.next()
        stored: int | None = None
        while tile is not None:
            if stored is not None:
                self.q_empty[stored].arrive()
            next_q = q.next()
            last = len(tile.partial) - 1
            yield self.v_full[v.stage].passed(v.parity)
            for block, is_partial in enumerate(tile.partial):
                if block == last:
                    yield self.q_full[next_q.stage][consumer].passed(next_q.parity)
                    following = self.mailboxes[next_q.stage]
                if block < last or following is not None:
                    yield self.k_full[k.stage].passed(k.parity)
                if is_partial and block > 0:
                    yield self.checked[checked.stage].passed(checked.parity)
                    checked = checked.next()
                yield self.turns[consumer].arrive()
                next_turn.arrive()
                yield at_once
                if block < last:
                    if is_elected:
                        self.k_empty[k.stage].arrive()
                    k = k.next()
                    yield at_once
                    yield self.v_full[v.next().stage].passed(v.next().parity)
                if is_partial and block == 0:  # the first product does not wait
                    yield self.checked[checked.stage].passed(checked.parity)
                    checked = checked.next()
                if warp < self.releasing:
                    self.v_empty[v.stage].arrive()
                v = v.next()
            yield self.outputs[consumer].arrive()
            stored = q.stage
            yield at_once
            if following is not None:
                if is_elected:
                    self.k_empty[k.stage].arrive()
                k = k.next()
            q, tile = next_q, following


def at_once() -> bool:
    """What a warp does between two barriers takes time, in which others go on."""
    return True


def halts(shape: Sm90Tiles, seed: int, lag: float, releasing: int = WARPS) -> bool:
    """Whether some warps wait for ever in a random order of random tiles, in which one warp lags behind."""
    rng = random.Random(seed)
    share = rng.choice((0.5, 1.0))
    tiles = [Tile(tuple(rng.random() < share for _ in range(rng.choice((1, 1, 2, 3, 5))))) for _ in range(10)]
    kernel = Kernel(shape, tiles, releasing)
    waiting: dict[Agent, Condition] = dict.fromkeys(kernel.agents(), at_once)
    laggard = rng.choice(list(waiting)[-shape.consumers * WARPS :])
    while waiting:
        ready: list[Agent | None] = [agent for agent, condition in waiting.items() if condition()]
        if kernel.copies:
            ready.append(None)
        if not ready:
            return True
        agent = rng.choice(ready)
        if agent is None:
            kernel.copies.pop(rng.randrange(len(kernel.copies))).copied()
        elif agent is not laggard or len(ready) == 1 or rng.random() >= lag:
            try:
                waiting[agent] = next(agent)
            except StopIteration:
                del waiting[agent]
    return False


SHAPES = [
    Sm90Tiles(consumers, keys=128, query_stages=query_stages, key_stages=key_stages, value_stages=value_stages)
    for consumers, query_stages, key_stages, value_stages in ((2, 3, 2, 2), (2, 2, 2, 2), (2, 3, 3, 3), (3, 3, 3, 3))
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, astuple(s))))
@pytest.mark.parametrize("lag", [0.0, 0.9, 0.99])
def test_no_order_of_the_warps_comes_to_a_halt(shape: Sm90Tiles, lag: float) -> None:
    assert not [seed for seed in range(30) if halts(shape, seed, lag)]


def test_the_model_notices_a_warp_that_is_two_phases_behind() -> None:
    """One warp alone releasing values for its consumer would not do."""
    assert any(halts(SHAPES[0], seed, 0.9, releasing=1) for seed in range(10))
