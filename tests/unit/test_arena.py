"""The arena hands out whole runs of pages and loses none."""

from __future__ import annotations

import ctypes
import random

import pytest

from expertide.memory.arena import PAGE_BYTES, Arena, RunAllocator


def test_random_use_keeps_the_books_whole() -> None:
    rng = random.Random(7)
    runs = RunAllocator(500)
    taken: dict[int, int] = {}
    for _ in range(5000):
        if rng.random() < 0.55:
            length = rng.choice((1, 3, 7, 7, 7, 40))
            start = runs.try_allocate(length)
            if start is None:
                assert runs.largest_free_run < length
            else:
                assert all(start + length <= s or s + n <= start for s, n in taken.items())
                taken[start] = length
        elif taken:
            start = rng.choice(list(taken))
            assert runs.free(start) == taken.pop(start)
        runs.check()
        assert runs.num_free_pages == 500 - sum(taken.values())
    for start in list(taken):
        runs.free(start)
    runs.check()
    assert runs.largest_free_run == 500


def test_best_fit_reuses_a_hole_of_the_right_size() -> None:
    runs = RunAllocator(100)
    starts = [runs.try_allocate(n) for n in (10, 1, 5, 1)]
    runs.free(starts[0])
    runs.free(starts[2])
    assert runs.try_allocate(5) == starts[2]


def test_freeing_twice_is_noticed() -> None:
    runs = RunAllocator(10)
    start = runs.try_allocate(4)
    assert start is not None
    runs.free(start)
    with pytest.raises(KeyError):
        runs.free(start)


def test_arena_is_page_aligned_and_poison_stays_inside_the_run() -> None:
    arena = Arena(10 * PAGE_BYTES + 17)
    try:
        assert arena.address % PAGE_BYTES == 0
        assert arena.capacity_bytes == 10 * PAGE_BYTES
        first, second, third = (arena.runs.try_allocate(2) for _ in range(3))
        assert first is not None and second is not None and third is not None
        arena.poison(second)
        assert ctypes.string_at(arena.address_of(second), 2 * PAGE_BYTES) == b"\xff" * (2 * PAGE_BYTES)
        assert ctypes.string_at(arena.address_of(first), 2 * PAGE_BYTES) == bytes(2 * PAGE_BYTES)
        assert ctypes.string_at(arena.address_of(third), 2 * PAGE_BYTES) == bytes(2 * PAGE_BYTES)
    finally:
        arena.close()
        arena.close()
