"""The barriers of ``kernels/attention_sm90.cu`` as a model: no order of its warps comes to a halt.

On a GPU warps run nearly in step, and an order that halts is met once in many thousand launches. The model has the
waits and arrivals of the kernel and nothing else: a generator a warp, which yields what it waits for. Whichever can go
on does so at random, one of the warps seldom.

A barrier tells a waiter no more than the parity of its phase. Whoever is two phases behind waits for ever, so that
nobody may be released from a buffer before all have waited for what is in it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import astuple, dataclass, field, replace

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
    """Which of a tile's blocks of keys are partial, and whether values that its rows may not see have spoilt it.

    A spoilt tile is handed out again, carefully: then checkers look at the values of partial blocks. `skips` says of
    each consumer whether its rows see none of the first block in the order of use, and none of the last.
    """

    partial: tuple[bool, ...]
    is_spoilt: bool = False
    is_careful: bool = False
    skips: tuple[tuple[bool, bool], ...] = ((False, False),) * 3

    @property
    def checked(self) -> tuple[bool, ...]:
        return tuple(self.is_careful and is_partial for is_partial in self.partial)


IDLE, END = Tile(()), Tile(())
"""Mailboxes without a tile: another follows, or none."""


def barriers(stages: int, arrivals: int) -> list[Barrier]:
    return [Barrier(arrivals) for _ in range(stages)]


@dataclass
class Kernel:
    """One block of the kernel. ``releasing`` checkers release a block of values: all, in the kernel.

    ``done`` has the tiles that each warp of a consumer has finished and that are not spoilt.
    """

    shape: Sm90Tiles
    tiles: list[Tile]
    releasing: int = CHECKERS
    done: list[list[Tile]] = field(default_factory=list)
    copies: list[Barrier] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.shape
        self.q_full = [barriers(shape.consumers, 1) for _ in range(shape.query_stages)]
        self.q_empty = barriers(shape.query_stages, shape.consumers * WARPS + CHECKERS)
        self.k_full, self.k_empty = barriers(shape.key_stages, 1), barriers(shape.key_stages, shape.consumers * WARPS)
        self.v_full = barriers(shape.value_stages, 1)
        self.v_empty = barriers(shape.value_stages, shape.consumers * WARPS + self.releasing)
        self.checked = barriers(shape.value_stages, CHECKERS)
        self.turns = [Meeting(2 * WARPS) for _ in range(shape.consumers)]
        self.products = [Meeting(WARPS) for _ in range(shape.consumers)]
        self.outputs = [Meeting(WARPS) for _ in range(shape.consumers)]
        self.mailboxes = [IDLE] * shape.query_stages

    def places(self) -> tuple[Place, Place, Place]:
        """At the beginning of the rings of queries, keys and values."""
        return Place(self.shape.query_stages), Place(self.shape.key_stages), Place(self.shape.value_stages)

    def agents(self) -> list[Agent]:
        consumers = [self.consume(consumer, warp) for consumer in range(self.shape.consumers) for warp in range(WARPS)]
        return [self.produce(), *(self.check(warp) for warp in range(CHECKERS)), *consumers]

    def load(self, full: Iterable[Barrier]) -> None:
        for barrier in full:
            barrier.arrive(copies=1)
            self.copies.append(barrier)

    def produce(self) -> Agent:
        q, k, v = self.places()
        tiles = iter(self.tiles)
        is_careful = False
        values_follow = False
        idle = 0
        while True:
            yield self.q_empty[q.stage].passed(q.parity ^ 1)
            old = self.mailboxes[q.stage]
            if old.is_spoilt and not old.is_careful:
                is_careful = True
                tile = old
            else:
                tile = next(tiles, END)
            if tile is END:
                if values_follow:
                    yield self.v_empty[v.stage].passed(v.parity ^ 1)
                    self.load([self.v_full[v.stage]])
                    v = v.next()
                    values_follow = False
                self.mailboxes[q.stage] = IDLE if idle < self.shape.query_stages - 1 else END
                for barrier in self.q_full[q.stage]:
                    barrier.arrive()
                if self.mailboxes[q.stage] is END:
                    return
                idle += 1
                q = q.next()
                continue
            idle = 0
            self.mailboxes[q.stage] = replace(tile, is_careful=is_careful)
            self.load(self.q_full[q.stage])
            q = q.next()
            for _ in tile.partial:
                yield self.k_empty[k.stage].passed(k.parity ^ 1)
                self.load([self.k_full[k.stage]])
                k = k.next()
                if values_follow:  # a block behind
                    yield self.v_empty[v.stage].passed(v.parity ^ 1)
                    self.load([self.v_full[v.stage]])
                    v = v.next()
                values_follow = True

    def check(self, warp: int) -> Agent:
        q, _, v = self.places()
        checked = v
        while True:
            yield self.q_full[q.stage][0].passed(q.parity)
            tile = self.mailboxes[q.stage]
            for is_checked in tile.checked:
                yield self.v_full[v.stage].passed(v.parity)
                if is_checked:
                    self.checked[checked.stage].arrive()
                    checked = checked.next()
                    yield at_once
                if warp < self.releasing:
                    self.v_empty[v.stage].arrive()
                v = v.next()
            self.q_empty[q.stage].arrive()
            if tile is END:
                return
            q = q.next()

    def consume(self, consumer: int, warp: int) -> Agent:
        q, k, v = self.places()
        checked = v
        done: list[Tile] = []
        self.done.append(done)
        next_turn = self.turns[(consumer + 1) % len(self.turns)]
        if consumer == len(self.turns) - 1:
            next_turn.arrive()
        yield self.q_full[q.stage][consumer].passed(q.parity)
        tile = self.mailboxes[q.stage]
        is_under_way = False
        stored = 0
        idle_turns = 0

        def skip_key(place: Place) -> Generator[Condition, None, Place]:
            yield self.k_full[place.stage].passed(place.parity)
            self.k_empty[place.stage].arrive()
            return place.next()

        def skip_value(
            place: Place, checked: Place, is_checked: bool
        ) -> Generator[Condition, None, tuple[Place, Place]]:
            yield self.v_full[place.stage].passed(place.parity)
            if is_checked:
                yield self.checked[checked.stage].passed(checked.parity)
                checked = checked.next()
            self.v_empty[place.stage].arrive()
            return place.next(), checked

        def skip_turns(turns: int) -> Generator[Condition, None, int]:
            for _ in range(turns):
                yield self.turns[consumer].arrive()
                next_turn.arrive()
            return 0

        while True:
            if not is_under_way:
                while tile is IDLE:
                    self.q_empty[q.stage].arrive()
                    q = q.next()
                    yield self.q_full[q.stage][consumer].passed(q.parity)
                    tile = self.mailboxes[q.stage]
                idle_turns = yield from skip_turns(idle_turns)
                if tile is END:
                    return
                if tile.skips[consumer][0]:
                    k = yield from skip_key(k)
                yield self.k_full[k.stage].passed(k.parity)
                yield self.products[consumer].arrive()
                yield at_once
                self.k_empty[k.stage].arrive()
                k = k.next()
            if is_under_way:
                self.q_empty[stored].arrive()
            next_q = q.next()
            skips_first, skips_last = tile.skips[consumer]
            if skips_first:
                v, checked = yield from skip_value(v, checked, tile.checked[0])
                idle_turns += 1
            idle_turns = yield from skip_turns(idle_turns)
            yield self.v_full[v.stage].passed(v.parity)
            own = tile.checked[skips_first : len(tile.partial) - skips_last]
            last = len(own) - 1
            for block, is_checked in enumerate(own):
                if block == last:
                    if skips_last:
                        k = yield from skip_key(k)
                    yield self.q_full[next_q.stage][consumer].passed(next_q.parity)
                    following = self.mailboxes[next_q.stage]
                    if following.partial and following.skips[consumer][0]:
                        k = yield from skip_key(k)
                if block < last or following.partial:
                    yield self.k_full[k.stage].passed(k.parity)
                if is_checked:
                    yield self.checked[checked.stage].passed(checked.parity)
                    checked = checked.next()
                yield self.turns[consumer].arrive()
                next_turn.arrive()
                yield at_once
                if block < last:
                    self.k_empty[k.stage].arrive()
                    k = k.next()
                    yield at_once
                    yield self.v_full[v.next().stage].passed(v.next().parity)
                self.v_empty[v.stage].arrive()
                v = v.next()
            yield self.outputs[consumer].arrive()
            if tile.is_careful or not tile.is_spoilt:
                done.append(replace(tile, is_careful=False))
            stored = q.stage
            if skips_last:
                v, checked = yield from skip_value(v, checked, tile.checked[-1])
                idle_turns += 1
            yield at_once
            is_under_way = len(following.partial) > 0
            if is_under_way:
                self.k_empty[k.stage].arrive()
                k = k.next()
            else:
                self.q_empty[stored].arrive()
            q, tile = next_q, following


def at_once() -> bool:
    """What a warp does between two barriers takes time, in which others go on."""
    return True


def random_tile(rng: random.Random, consumers: int, share: float, spoilt: float) -> Tile:
    """One that no consumer skips whole. Ranges move right: a later consumer has the last keys, which come first."""
    blocks = rng.choice((1, 1, 2, 3, 5))
    lower, upper = rng.randrange(consumers), rng.randrange(consumers)
    skips = tuple(
        (consumer < lower and blocks > 1, consumer > upper and blocks > 1 + (consumer < lower))
        for consumer in range(consumers)
    )
    return Tile(tuple(rng.random() < share for _ in range(blocks)), rng.random() < spoilt, skips=skips)


def halts(shape: Sm90Tiles, seed: int, lag: float, releasing: int = CHECKERS) -> bool:
    """Whether some warps wait for ever in a random order of random tiles, in which one warp lags behind.

    Where none does, every warp of a consumer has done every tile.
    """
    rng = random.Random(seed)
    share, spoilt = rng.choice((0.5, 1.0)), rng.choice((0.0, 0.1, 0.5))
    tiles = [random_tile(rng, shape.consumers, share, spoilt) for _ in range(rng.choice((1, 2, 10)))]
    kernel = Kernel(shape, tiles, releasing=releasing)
    waiting: dict[Agent, Condition] = dict.fromkeys(kernel.agents(), at_once)
    laggard = rng.choice(list(waiting)[1:])
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
    assert all(Counter(done) == Counter(tiles) for done in kernel.done)
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
    """Checkers that did not all release values would not do."""
    assert any(halts(SHAPES[0], seed, 0.9, releasing=1) for seed in range(10))
