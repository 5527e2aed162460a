"""The thread pool hands out every index once, whoever calls."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from expertide._native import ThreadPool


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_index_is_handed_out_exactly_once(num_threads: int) -> None:
    pool = ThreadPool(num_threads)
    for n in (0, 1, 2, 7, 1000, 4096):
        for grain in (1, 3, 64, 5000):
            assert pool.sum_for_test(n, grain) == n * (n - 1) // 2
    pool.close()
    pool.close()
    assert pool.sum_for_test(10, 1) == 45, "after close the caller does the work"


def test_many_short_loops_from_two_threads_all_end() -> None:
    pool = ThreadPool(3)
    wrong: list[int] = []

    def loop() -> None:
        wrong.extend(n for n in range(2000) if pool.sum_for_test(n % 50, 1) != (n % 50) * (n % 50 - 1) // 2)

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    pool.close()


def test_a_pool_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="1 to 1024"):
        ThreadPool(0)


def affinities() -> list[frozenset[int]]:
    return [frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no threads can be bound here")
def test_bound_workers_stay_on_their_cpus_and_the_caller_is_free() -> None:
    mine = frozenset(os.sched_getaffinity(0))
    cpu = max(mine)
    bound = affinities().count(frozenset({cpu}))
    pool = ThreadPool(3, [min(mine), cpu, cpu])
    try:
        assert pool.sum_for_test(4096, 1) == 4096 * 4095 // 2
        assert frozenset(os.sched_getaffinity(0)) == mine
        if len(mine) > 1:
            # Each binds itself as it starts, which may be after the loop that the others have finished.
            deadline = time.monotonic() + 10
            while affinities().count(frozenset({cpu})) < bound + 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            assert affinities().count(frozenset({cpu})) == bound + 2
    finally:
        pool.close()
    with pytest.raises(ValueError, match="a CPU per thread"):
        ThreadPool(3, [0, 0])
    # A CPU that does not exist binds nobody and breaks nothing.
    pool = ThreadPool(2, [0, 100_000])
    assert pool.sum_for_test(100, 1) == 4950
    pool.close()
