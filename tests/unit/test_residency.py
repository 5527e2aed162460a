"""The residency table: states, leases, waiting, and what threads may see."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from expertide._native import ReadFailed, Residency

FREE, LOADING, RESIDENT, FAILED = range(4)


def acquire(residency: Residency, layer: int, ids: list[int]) -> tuple[list[int], list[int]]:
    array = np.array(ids, np.int32)
    return residency.acquire(layer, array.ctypes.data, array.size)


def test_acquire_names_distinct_experts_in_order_and_leases_hits_once() -> None:
    residency = Residency(2, 8, 1, 4)
    for slot, expert in enumerate((5, 1)):
        residency.reserve(slot, 1, expert, [64], 0, False)
        residency.release(1, expert)
    hits, misses = acquire(residency, 1, [5, 7, 5, 1, 0, 7])
    assert (hits, misses) == ([1, 5], [0, 7])
    assert list(residency.num_leases[:2]) == [1, 1]
    assert residency.counters(0)[:3] == (4, 2, 2)


def test_a_loading_expert_is_a_hit_and_its_wait_ends_with_the_last_read() -> None:
    residency = Residency(1, 4, 3, 2)
    residency.reserve(0, 0, 3, [1, 2, 3], 3, False)
    assert acquire(residency, 0, [3]) == ([3], [])
    ended = threading.Event()

    def wait() -> None:
        residency.wait(0, 3)
        ended.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    residency.complete(0)
    residency.complete(0)
    assert not ended.wait(0.05)
    assert residency.state[0] == LOADING
    residency.complete(0)
    assert ended.wait(5)
    waiter.join()
    assert residency.state[0] == RESIDENT
    assert list(residency.pointers[0]) == [1, 2, 3]


def test_leased_and_loading_slots_cannot_be_evicted() -> None:
    residency = Residency(1, 4, 1, 2)
    residency.reserve(0, 0, 2, [64], 1, False)
    assert not residency.evict(0)
    residency.release(0, 2)
    assert not residency.evict(0), "still loading"
    residency.complete(0)
    assert acquire(residency, 0, [2]) == ([2], [])
    assert not residency.evict(0), "leased"
    residency.release(0, 2)
    assert residency.evict(0)
    assert residency.slot_of(0, 2) == -1 and residency.state[0] == FREE


def test_a_failed_slot_waits_for_its_other_reads_and_becomes_absent_with_its_last_lease() -> None:
    residency = Residency(1, 4, 2, 2)
    residency.reserve(0, 0, 1, [64, 128], 2, False)
    acquire(residency, 0, [1])
    residency.fail(0, 5, 7, 4096, 100, 10)
    assert residency.state[0] == LOADING, "the other read may still be writing"
    residency.complete(0)
    assert residency.state[0] == FAILED
    with pytest.raises(ReadFailed) as caught:
        residency.wait(0, 1)
    error = caught.value
    assert (error.errno, error.file_id, error.offset, error.wanted, error.got) == (5, 7, 4096, 100, 10)
    residency.release(0, 1)
    assert residency.collect_failed() == [] and residency.slot_of(0, 1) == 0
    residency.release(0, 1)
    assert residency.slot_of(0, 1) == -1
    assert residency.collect_failed() == [0]
    assert residency.state[0] == FREE


def test_a_load_that_fails_when_nobody_waits_any_more_leaves_no_name_behind() -> None:
    residency = Residency(1, 4, 1, 2)
    residency.reserve(0, 0, 1, [64], 1, False)
    residency.release(0, 1)
    residency.fail(0, 5, 0, 0, 1, 0)
    assert residency.slot_of(0, 1) == -1
    # The same expert may be read again into another slot before the failed one is collected.
    residency.reserve(1, 0, 1, [128], 0, False)
    assert residency.collect_failed() == [0]
    assert residency.slot_of(0, 1) == 1


def test_misuse_is_refused() -> None:
    residency = Residency(2, 4, 1, 2)
    with pytest.raises(IndexError):
        acquire(residency, 0, [1, 4])
    with pytest.raises(IndexError):
        acquire(residency, 2, [0])
    assert residency.total_leases() == 0
    with pytest.raises(RuntimeError, match="not leased"):
        residency.release(0, 0)
    with pytest.raises(RuntimeError, match="absent"):
        residency.wait(0, 0)
    residency.reserve(0, 0, 0, [64], 1, False)
    with pytest.raises(RuntimeError, match="already has a slot"):
        residency.reserve(1, 0, 0, [64], 1, False)
    with pytest.raises(RuntimeError, match="not free"):
        residency.reserve(0, 0, 1, [64], 1, False)
    residency.complete(0)
    with pytest.raises(RuntimeError, match="not loading"):
        residency.complete(0)
    with pytest.raises(ValueError, match="one address per part"):
        residency.reserve(1, 0, 1, [64, 64], 1, False)


def test_a_decode_hit_makes_a_transient_slot_lasting_and_a_prefill_hit_does_not() -> None:
    residency = Residency(1, 4, 1, 2)
    residency.reserve(0, 0, 1, [64], 0, True)
    acquire(residency, 0, [1])
    assert residency.transient[0] == 1
    residency.set_phase(1)
    acquire(residency, 0, [1])
    assert residency.transient[0] == 0


def test_frequency_decays_by_the_clock_and_counters_sum_the_needed_bytes() -> None:
    residency = Residency(2, 4, 1, 2)
    residency.set_decay(0.5)
    residency.set_expert_nbytes(1, 100)
    residency.set_phase(1)
    acquire(residency, 1, [3])
    acquire(residency, 1, [2])
    acquire(residency, 1, [3])
    assert residency.clock == 3
    assert residency.frequency[1, 3] == 1.25
    assert list(residency.last_use[1]) == [-1, -1, 2, 3]
    assert residency.counters(1) == (3, 0, 3, 300)


def test_no_wake_up_is_lost_and_no_byte_is_seen_early() -> None:
    """Loads by other threads, with their bytes written just before `complete`: each waiter finds them."""
    residency = Residency(1, 32, 1, 8)
    memory = np.zeros((8, 512), np.int64)
    rng = random.Random(3)
    work: list[tuple[int, int]] = []
    condition = threading.Condition()
    is_done = False

    def load() -> None:
        while True:
            with condition:
                while not work and not is_done:
                    condition.wait()
                if not work:
                    return
                slot, value = work.pop(rng.randrange(len(work)))
            if value % 3 == 0:
                time.sleep(0.0002)
            memory[slot] = value
            residency.complete(slot)

    loaders = [threading.Thread(target=load) for _ in range(3)]
    for loader in loaders:
        loader.start()
    value = 0
    for _ in range(400):
        ids = rng.sample(range(32), 4)
        hits, misses = acquire(residency, 0, ids)
        for expert in misses:
            value += 1
            slot = next(
                s
                for s in range(8)
                if residency.state[s] == FREE or (residency.state[s] == RESIDENT and residency.evict(s))
            )
            residency.reserve(slot, 0, expert, [value], 1, False)
            memory[slot] = -1
            with condition:
                work.append((slot, value))
                condition.notify()
        for expert in hits + misses:
            residency.wait(0, expert)
            slot = residency.slot_of(0, expert)
            assert (memory[slot] == int(residency.pointers[slot, 0])).all()
            residency.release(0, expert)
    with condition:
        is_done = True
        condition.notify_all()
    for loader in loaders:
        loader.join()
    assert residency.total_leases() == 0
