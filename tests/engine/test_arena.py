"""Placing buffers: what is needed at once never overlaps, and what is not shares memory."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from nxrt_cuda.engine.arena import Lifetime, place


def random_lifetimes(rng: np.random.Generator, count: int, steps: int) -> list[Lifetime]:
    firsts = rng.integers(0, steps, count)
    lengths = rng.geometric(0.4, count)
    sizes = rng.choice([0, 1, 255, 256, 257, 1000, 5000, 70000], count)
    return [
        Lifetime(f"b{index}", int(size), int(first), int(first + length))
        for index, (first, length, size) in enumerate(zip(firsts, lengths, sizes, strict=True))
    ]


def most_live(lifetimes: list[Lifetime]) -> int:
    """No placement can be smaller than what is needed at one step."""
    return max(
        sum(buffer.footprint for buffer in lifetimes if buffer.first <= step <= buffer.last)
        for step in range(max(buffer.last for buffer in lifetimes) + 1)
    )


def smallest(lifetimes: list[Lifetime]) -> int:
    """The best that first-fit reaches in any order, by trying them all."""
    best = sum(buffer.footprint for buffer in lifetimes)
    for order in permutations(lifetimes):
        placed: list[tuple[int, Lifetime]] = []
        for buffer in order:
            offset = 0
            for begin, other in sorted(placed, key=lambda entry: entry[0]):
                if buffer.meets(other) and begin < offset + buffer.footprint and offset < begin + other.footprint:
                    offset = begin + other.footprint
            placed.append((offset, buffer))
        best = min(best, max(offset + buffer.footprint for offset, buffer in placed))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_buffers_that_live_at_once_never_overlap(seed: int) -> None:
    """Checked byte by byte: at every step, each byte of the arena has at most one owner."""
    rng = np.random.default_rng(seed)
    lifetimes = random_lifetimes(rng, int(rng.integers(1, 60)), 20)
    offsets, nbytes = place(lifetimes)
    assert set(offsets) == {buffer.name for buffer in lifetimes}
    assert all(offset % 256 == 0 for offset in offsets.values())
    assert nbytes == max(offsets[buffer.name] + buffer.footprint for buffer in lifetimes)
    for step in range(max(buffer.last for buffer in lifetimes) + 1):
        owners = np.zeros(nbytes, np.int8)
        for buffer in lifetimes:
            if buffer.first <= step <= buffer.last:
                owners[offsets[buffer.name] : offsets[buffer.name] + max(buffer.nbytes, 1)] += 1
        assert owners.max(initial=0) <= 1, f"step {step}"
    assert most_live(lifetimes) <= nbytes <= sum(buffer.footprint for buffer in lifetimes)


@pytest.mark.parametrize("seed", range(10))
def test_the_arena_is_close_to_the_smallest(seed: int) -> None:
    """Within a third of what an exhaustive search finds for six buffers."""
    lifetimes = random_lifetimes(np.random.default_rng(100 + seed), 6, 6)
    _, nbytes = place(lifetimes)
    assert smallest(lifetimes) <= nbytes <= smallest(lifetimes) * 4 // 3


def test_a_chain_needs_two_buffers() -> None:
    """However long: each step reads one and writes the other."""
    lifetimes = [Lifetime(f"t{step}", 1000, step, step + 1) for step in range(50)]
    offsets, nbytes = place(lifetimes)
    assert nbytes == 2 * 1024
    assert set(offsets.values()) == {0, 1024}


def test_a_buffer_is_free_after_its_last_read_and_not_in_that_step() -> None:
    """A kernel's output never lies on its inputs."""
    last_read = Lifetime("a", 256, 0, 3)
    assert place([last_read, Lifetime("b", 256, 3, 4)])[1] == 512
    assert place([last_read, Lifetime("b", 256, 4, 4)])[1] == 256


def test_an_empty_buffer_lies_inside_no_other() -> None:
    offsets, nbytes = place([Lifetime("a", 0, 0, 1), Lifetime("b", 4096, 0, 1)])
    assert offsets == {"b": 0, "a": 4096}
    assert nbytes == 4096 + 256


def test_the_same_buffers_are_placed_alike() -> None:
    lifetimes = random_lifetimes(np.random.default_rng(5), 30, 10)
    assert place(lifetimes) == place(list(lifetimes))
    assert place([]) == ({}, 0)
