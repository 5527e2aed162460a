"""The expert cache keeps its books whole and its promises about who is evicted."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from expert_world import ExpertFile, World, all_windows_bytes, smallest_cache_bytes, write_experts
from expertide.errors import RequestError
from expertide.experts.policies import POLICY_NAMES, Lfu, Lru, RandomOldest, UseRecords, make_policy


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    return write_experts(tmp_path_factory.mktemp("experts") / "experts.bin")


def request(world: World, layer_id: int, ids: list[int]) -> tuple[list[int], list[int]]:
    array = np.array(ids, np.int32)
    return world.residency.acquire(layer_id, array.ctypes.data, array.size)


def load(world: World, layer_id: int, expert: int, *, is_prefill: bool = False) -> int:
    """Ask for an absent expert, load it (no bytes move), release it; returns its slot."""
    _, misses = request(world, layer_id, [expert])
    assert misses == [expert]
    reservation = world.cache.reserve(layer_id, expert, is_prefill=is_prefill)
    assert reservation is not None
    for _ in reservation.reads:
        world.residency.complete(reservation.slot)
    world.residency.release(layer_id, expert)
    return reservation.slot


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_random_use_keeps_the_books_whole(file: ExpertFile, policy: str, share: float) -> None:
    smallest = smallest_cache_bytes(file.catalog, 2)
    size = int(smallest + share * (all_windows_bytes(file.catalog) - smallest))
    rng = random.Random(f"{policy} {share}")
    with World(file, cache_bytes=size, policy=policy) as world:
        cache, residency = world.cache, world.residency
        leases: Counter[tuple[int, int]] = Counter()
        pending: list[tuple[int, int, int]] = []  # slot and its (layer, expert), one entry per read
        for _ in range(1500):
            action = rng.random()
            layer_id = rng.randrange(1, 4)
            is_prefill = rng.random() < 0.3
            residency.set_phase(0 if is_prefill else 1)
            if action < 0.4:
                hits, misses = request(world, layer_id, rng.sample(range(8), rng.randrange(1, 3)))
                leases.update((layer_id, expert) for expert in hits)
                for expert in misses:
                    before = {(layer, e) for layer, e in leases if leases[layer, e]}
                    reservation = cache.reserve(layer_id, expert, is_prefill=is_prefill)
                    assert all(residency.slot_of(*name) >= 0 for name in before), "a leased expert was evicted"
                    if reservation is None:
                        assert residency.total_leases() or pending
                        continue
                    leases[layer_id, expert] += 1
                    pending += [(reservation.slot, layer_id, expert)] * len(reservation.reads)
            elif action < 0.75 and pending:
                slot, layer_id, expert = pending.pop(rng.randrange(len(pending)))
                if rng.random() < 0.05:
                    residency.fail(slot, 5, 0, 0, 1, 0)
                else:
                    residency.complete(slot)
            elif action < 0.97 and +leases:
                name = rng.choice(list(+leases))
                residency.release(*name)
                leases[name] -= 1
            else:
                cache.recover()
            cache.check()
        assert residency.total_leases() == sum(leases.values())
        for slot, _, _ in pending:
            residency.complete(slot)
        for name in leases.elements():
            residency.release(*name)
        cache.recover()
        cache.clear()
        cache.check()
        assert cache.num_slots == 0 and world.arena.runs.largest_free_run == world.arena.runs.num_pages


def test_the_smallest_cache_always_has_room_once_nothing_is_leased(file: ExpertFile) -> None:
    """Whatever holes earlier evictions left: sizes differ between layers, and parts lie apart."""
    rng = random.Random(11)
    with World(file) as world:
        for _ in range(300):
            layer_id, expert = rng.randrange(1, 4), rng.randrange(8)
            if world.residency.slot_of(layer_id, expert) < 0:
                load(world, layer_id, expert, is_prefill=rng.random() < 0.5)
                world.cache.check()


def test_a_cache_that_holds_everything_never_evicts(file: ExpertFile) -> None:
    with World(file, cache_bytes=all_windows_bytes(file.catalog)) as world:
        for layer_id in file.catalog.layers:
            for expert in range(8):
                load(world, layer_id, expert)
        assert world.cache.num_evictions == 0 and world.cache.num_slots == 24


def test_prefill_recycles_its_own_slots_before_it_touches_those_of_decode(file: ExpertFile) -> None:
    k = 2
    with World(file, k=k, cache_bytes=smallest_cache_bytes(file.catalog, 10)) as world:
        world.residency.set_phase(1)
        lasting = [(1, expert) for expert in range(6)]
        for layer_id, expert in lasting:
            load(world, layer_id, expert)
        world.residency.set_phase(0)
        for _ in range(3):
            for layer_id in (2, 3):
                for expert in range(8):
                    if world.residency.slot_of(layer_id, expert) < 0:
                        load(world, layer_id, expert, is_prefill=True)
        assert all(world.residency.slot_of(*name) >= 0 for name in lasting)


def test_prefill_takes_lasting_slots_only_until_it_has_its_ring(file: ExpertFile) -> None:
    k = 2
    with World(file, k=k, cache_bytes=smallest_cache_bytes(file.catalog, 10)) as world:
        world.residency.set_phase(1)
        for layer_id in (1, 2):
            for expert in range(8):
                if world.cache.num_evictions == 0:
                    load(world, layer_id, expert)
        num_lasting = world.cache.num_slots
        world.residency.set_phase(0)
        for expert in range(8):
            load(world, 3, expert, is_prefill=True)
        transient = int(world.residency.transient.sum())
        assert 1 <= transient <= k + 2
        # Sizes differ by layer, so that one lasting slot more or less may have gone for the same ring.
        assert world.cache.num_slots - transient >= num_lasting - (k + 2) - 2


def test_a_hopeless_reservation_evicts_nobody(file: ExpertFile) -> None:
    with World(file) as world:
        world.residency.set_phase(1)
        while world.cache.num_evictions == 0:
            free = [(x, e) for x in (1, 2, 3) for e in range(8) if world.residency.slot_of(x, e) < 0]
            load(world, *free[0])
        held = [(x, e) for x in (1, 2, 3) for e in range(8) if world.residency.slot_of(x, e) >= 0]
        spared = held.pop()
        for layer_id, expert in held:
            request(world, layer_id, [expert])
        evictions = world.cache.num_evictions
        absent = next(e for e in range(8) if world.residency.slot_of(2, e) < 0)
        request(world, 2, [absent])
        reservation = world.cache.reserve(2, absent, is_prefill=False)
        if reservation is None:
            assert world.cache.num_evictions == evictions
            assert world.residency.slot_of(*spared) >= 0


def filled(file: ExpertFile, world: World) -> UseRecords:
    world.residency.set_phase(1)
    for expert in range(6):
        load(world, 1, expert)
    return UseRecords(world.residency, 3)


def test_lru_evicts_the_longest_unused_and_lfu_the_rarest(file: ExpertFile) -> None:
    with World(file, cache_bytes=all_windows_bytes(file.catalog)) as world:
        records = filled(file, world)
        for expert in (0, 0, 1, 2, 4, 5):
            request(world, 1, [expert])
        slots = np.array([world.residency.slot_of(1, e) for e in range(6)], np.int32)
        assert Lru().choose(slots, records) == slots[3]
        assert Lfu().choose(slots, records) == slots[3]
        for _ in range(3):
            request(world, 1, [3])
        assert Lru().choose(slots, records) == slots[0]
        assert Lfu().choose(slots, records) == slots[1], "asked twice, like 2, 4 and 5, but longest ago"


def test_random_stays_within_the_oldest_quarter_and_repeats_with_its_seed(file: ExpertFile) -> None:
    with World(file, cache_bytes=all_windows_bytes(file.catalog)) as world:
        records = filled(file, world)
        slots = np.array([world.residency.slot_of(1, e) for e in range(6)], np.int32)
        first, second = RandomOldest(3), RandomOldest(3)
        choices = [first.choose(slots, records) for _ in range(50)]
        assert set(choices) == {slots[0], slots[1]}
        assert choices == [second.choose(slots, records) for _ in range(50)]


def test_second_miss_admits_an_expert_when_it_comes_back(file: ExpertFile) -> None:
    with World(file, cache_bytes=all_windows_bytes(file.catalog), policy="second-miss") as world:
        world.residency.set_phase(1)
        slot = load(world, 1, 4)
        assert world.residency.transient[slot] == 1
        assert world.residency.evict(slot)
        world.cache._give_back(slot)
        slot = load(world, 1, 4)
        assert world.residency.transient[slot] == 0


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match="'clock' is not known; known: auto, lfu, lru, random, second-miss"):
        make_policy("clock")


def test_the_smallest_cache_is_k_plus_2_experts_or_all_of_them(tmp_path: Path, file: ExpertFile) -> None:
    one = smallest_cache_bytes(file.catalog, 2) // 4
    assert smallest_cache_bytes(file.catalog, 5) == 7 * one
    assert smallest_cache_bytes(file.catalog, 1000) == all_windows_bytes(file.catalog)
