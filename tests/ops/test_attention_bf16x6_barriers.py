"""The barriers of ``kernels/attention_bf16x6_sm90.cu`` as a model: no order of its warps comes to a halt.

As the model of the 16-bit kernel's, which says how: the waits and arrivals of the kernel, a generator a warp. It also
keeps a log of what is in the rings, so that a warp which read a block other than its own would be noticed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from tests.ops.test_attention_sm90_barriers import WARPS, Agent, Condition, Meeting, Place, at_once, barriers

KEYS, VALUES = 0, 1


@dataclass
class Kernel:
    """One block of threads with ``blocks`` blocks of keys, computed once more, guarded, if ``is_spoilt``.

    ``releasing`` warps of each consumer release a block: all, in the kernel.
    """

    consumers: int
    stages: int
    blocks: int
    is_spoilt: bool
    releasing: int = WARPS

    def __post_init__(self) -> None:
        self.full = [barriers(self.stages, WARPS) for _ in (KEYS, VALUES)]
        self.empty = [barriers(self.stages, self.consumers * self.releasing) for _ in (KEYS, VALUES)]
        self.turns = [Meeting(2 * WARPS) for _ in range(self.consumers)]
        self.products = [Meeting(WARPS) for _ in range(self.consumers)]
        self.queries = [Meeting(WARPS) for _ in range(self.consumers)]
        self.vote = Meeting((self.consumers + 1) * WARPS)
        self.ring = [[[None] * WARPS for _ in range(self.stages)] for _ in (KEYS, VALUES)]

    def agents(self) -> list[Agent]:
        consumers = [self.consume(consumer, warp) for consumer in range(self.consumers) for warp in range(WARPS)]
        return [*(self.convert(warp) for warp in range(WARPS)), *consumers]

    def items(self, is_guarded: bool) -> list[tuple[int, int]]:
        """What comes into the rings for a block, in order: a ring, and which of the block's items it is."""
        return [(KEYS, 0), (KEYS, 1), (VALUES, 2)] if is_guarded else [(KEYS, 0), (VALUES, 2)]

    def convert(self, warp: int) -> Agent:
        places = [Place(self.stages), Place(self.stages)]
        for is_guarded in (False, True)[: 1 + self.is_spoilt]:
            for block in range(self.blocks):
                for ring, item in self.items(is_guarded):
                    place = places[ring]
                    yield self.empty[ring][place.stage].passed(place.parity ^ 1)
                    self.ring[ring][place.stage][warp] = (is_guarded, block, item)
                    yield at_once
                    self.full[ring][place.stage].arrive()
                    places[ring] = place.next()
            yield self.vote.arrive()

    def consume(self, consumer: int, warp: int) -> Agent:
        places = [Place(self.stages), Place(self.stages)]
        next_turn = self.turns[(consumer + 1) % self.consumers]
        if consumer == self.consumers - 1:
            next_turn.arrive()
        for is_guarded in (False, True)[: 1 + self.is_spoilt]:
            yield self.queries[consumer].arrive()
            for block in range(self.blocks):
                for ring, item in self.items(is_guarded):
                    place = places[ring]
                    yield self.full[ring][place.stage].passed(place.parity)
                    yield self.turns[consumer].arrive()
                    next_turn.arrive()
                    yield self.products[consumer].arrive()
                    yield at_once
                    assert self.ring[ring][place.stage] == [(is_guarded, block, item)] * WARPS, "another block"
                    if warp < self.releasing:
                        self.empty[ring][place.stage].arrive()
                    places[ring] = place.next()
            yield self.vote.arrive()


def halts(kernel: Kernel, seed: int, lag: float) -> bool:
    """Whether some warps wait for ever in a random order, in which one warp lags behind."""
    rng = random.Random(seed)
    waiting: dict[Agent, Condition] = dict.fromkeys(kernel.agents(), at_once)
    laggard = rng.choice(list(waiting))
    while waiting:
        ready = [agent for agent, condition in waiting.items() if condition()]
        if not ready:
            return True
        agent = rng.choice(ready)
        if agent is not laggard or len(ready) == 1 or rng.random() >= lag:
            try:
                waiting[agent] = next(agent)
            except StopIteration:
                del waiting[agent]
    return False


@pytest.mark.parametrize(("consumers", "stages"), [(2, 1), (2, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("blocks", [0, 1, 2, 7])
@pytest.mark.parametrize("is_spoilt", [False, True], ids=["finite", "guarded"])
def test_no_order_of_the_warps_comes_to_a_halt(consumers: int, stages: int, blocks: int, is_spoilt: bool) -> None:
    for lag in (0.0, 0.9, 0.99):
        for seed in range(8):
            assert not halts(Kernel(consumers, stages, blocks, is_spoilt), seed, lag)


def test_the_model_notices_a_buffer_that_is_released_too_early() -> None:
    """A consumer's warps are done with a block at times of their own, so one alone may not release it."""
    kernels = (Kernel(2, 1, 7, False, releasing=1) for _ in range(20))
    with pytest.raises(AssertionError, match="another block"):
        any(halts(kernel, seed, 0.99) for seed, kernel in enumerate(kernels))
