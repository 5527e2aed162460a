"""The thread pool hands out every index once, whoever calls."""

from __future__ import annotations

import threading

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
