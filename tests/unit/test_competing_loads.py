"""Demand, reading ahead, predictions and the start-up fill want the same experts at once: each is loaded by one of them
and served to all, the bits stay the same, and nothing stays leased, loading or lost.

The bug behind this file: a step asked the table, was told that an expert was missing, and reserved a slot for it; the
fill, a thread of its own, had taken that very expert in between ("expert 11 of layer 4 already has a slot").
"""

from __future__ import annotations

import errno
import random
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from chaos_reader import chaos
from expert_world import ExpertFile, World, all_windows_bytes, smallest_cache_bytes, write_experts
from expertide._native import Residency
from expertide.errors import StorageError
from expertide.experts.executor import MoEExecutor
from expertide.experts.fill import StartupFill
from expertide.experts.layer_step import NativeLayer
from expertide.kernels import select
from expertide.kernels.ops import Kernels

K = 2
LAYERS = (1, 2, 3)
NUM_EXPERTS = 8
NUM_BATCHES = 12
NUM_PASSES = 500  # of three layers


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    return write_experts(tmp_path_factory.mktemp("experts") / "experts.bin")


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    kernels = select("native", num_threads=2)
    yield kernels
    kernels.close()


def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every third one is a prompt that needs nearly all experts, so that reading ahead begins."""
    num_tokens = 11 if number % 3 == 0 else 1
    rng = np.random.default_rng(number)
    x = rng.standard_normal((num_tokens, 64)).astype(np.float32)
    ids = np.stack([rng.permutation(NUM_EXPERTS)[:K] for _ in range(num_tokens)]).astype(np.int32)
    return torch.from_numpy(x), torch.from_numpy(ids), torch.from_numpy(rng.random((num_tokens, K)).astype(np.float32))


class Guess:
    """Any experts; some of them will be asked for."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def predict(self, layer_id: int, x_TH: Tensor) -> Sequence[int]:
        return self._random.sample(range(NUM_EXPERTS), 3)


def run(executor: MoEExecutor, layer_id: int, number: int) -> bytes:
    x, ids, weights = batch(number)
    return executor.run(layer_id, x, ids, weights, "prefill" if len(x) > 1 else "decode").numpy().tobytes()


@pytest.fixture(scope="module")
def expected(file: ExpertFile, kernels: Kernels) -> dict[tuple[int, int], bytes]:
    with World(file, k=K, cache_bytes=all_windows_bytes(file.catalog)) as world:
        executor = MoEExecutor(file.catalog, world.cache, world.residency, world.reader, kernels)
        return {(layer_id, n): run(executor, layer_id, n) for n in range(NUM_BATCHES) for layer_id in LAYERS}


def new_fill(world: World, rng: random.Random) -> StartupFill:
    order = [(layer_id, expert) for layer_id in LAYERS for expert in range(NUM_EXPERTS)]
    rng.shuffle(order)
    fill = StartupFill(world.cache, world.residency, world.reader, order)
    fill.start()
    return fill


def assert_all_is_given_back(world: World) -> None:
    world.cache.settle()
    world.cache.check()
    assert world.residency.total_leases() == 0 and not (world.residency.state == 1).any()


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns a hundred times as often as usual: what can come between two lines does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0], ids=["smallest", "tight", "roomy", "everything"])
@pytest.mark.parametrize("has_faults", [False, True], ids=["sound", "faulty"])
def test_whoever_loads_an_expert_all_are_served(
    file: ExpertFile,
    kernels: Kernels,
    expected: dict[tuple[int, int], bytes],
    share: float,
    has_faults: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(f"{share} {has_faults}")
    monkeypatch.setattr("expertide.memory.reader.FileReader", chaos(rng.randrange(1000), max_delay_s=0.0002))
    smallest, everything = smallest_cache_bytes(file.catalog, K), all_windows_bytes(file.catalog)
    num_failed = num_filled = 0
    with World(file, k=K, cache_bytes=smallest + int((everything - smallest) * share)) as world:
        executor = MoEExecutor(
            file.catalog, world.cache, world.residency, world.reader, kernels, predictor=Guess(rng.randrange(1000))
        )
        fill = new_fill(world, rng)
        executor.set_fill(fill)
        for number in range(NUM_PASSES):
            for layer_id in LAYERS:
                if has_faults and rng.random() < 0.05:
                    where = rng.choice(file.catalog.layers[layer_id]).ranges[rng.randrange(NUM_EXPERTS)]
                    world.reader.inject_fault(0, where.offset, 1, errno.EIO)
                which = rng.randrange(NUM_BATCHES)
                try:
                    assert run(executor, layer_id, which) == expected[layer_id, which]
                except StorageError:
                    assert has_faults
                    num_failed += 1
                assert world.residency.total_leases() <= 1, "at most the fill holds one, between reserve and submit"
            if rng.random() < 0.3:
                world.cache.clear()
            if fill.stats().is_done or number % 40 == 0:
                fill.close()
                assert_all_is_given_back(world)
                fill = new_fill(world, rng)
                executor.set_fill(fill)
        num_filled = fill.stats().num_experts
        fill.close()
        assert_all_is_given_back(world)
        predicted = executor.stats().predicted
    assert predicted.loads > 0 and predicted.useful > 0
    assert (num_filled > 0) == (share > 0), "the smallest cache has no room beside the ring"
    assert (num_failed > 0) == has_faults


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("is_complete", [False, True], ids=["loading", "resident"])
def test_a_miss_that_somebody_else_loads_meanwhile_is_waited_for_not_loaded_twice(
    file: ExpertFile, kernels: Kernels, phase: str, is_complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug, step by step: the fill takes a missing expert between the table's answer and the reservation."""
    with World(file, k=K, cache_bytes=all_windows_bytes(file.catalog)) as world:
        executor = MoEExecutor(file.catalog, world.cache, world.residency, world.reader, kernels)
        x, ids, weights = batch(1)
        wanted = executor.run(1, x, ids, weights, "decode").numpy().tobytes()
        world.cache.clear()
        before = executor.stats()
        begin = NativeLayer.begin

        def begin_and_be_overtaken(self: NativeLayer, *args: object, **options: object) -> list[int]:
            misses = begin(self, *args, **options)  # type: ignore[arg-type]
            assert len(misses) == K
            for expert in misses:
                reservation = world.cache.reserve_free(1, expert)
                assert reservation is not None and reservation.reads
                world.reader.submit(world.residency, reservation.reads, background=True)
                world.residency.release(1, expert)
            if is_complete:
                world.residency.wait_idle()
            return misses

        monkeypatch.setattr(NativeLayer, "begin", begin_and_be_overtaken)
        assert executor.run(1, x, ids, weights, phase).numpy().tobytes() == wanted  # type: ignore[arg-type]
        assert_all_is_given_back(world)
        assert world.residency.origins(1)[:2] == (K, K), "loaded by the fill, and useful"
        stats = executor.stats() - before
        decode, prefill = stats.decode, stats.prefill
        assert decode.read_bytes + prefill.read_bytes == 0
        assert decode.hits_host + prefill.hits_host == K and decode.misses + prefill.misses == 0


def test_reading_ahead_passes_over_what_the_fill_has_taken(
    file: ExpertFile, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with World(file, k=K, cache_bytes=all_windows_bytes(file.catalog)) as world:
        executor = MoEExecutor(file.catalog, world.cache, world.residency, world.reader, kernels)
        reserve, taken = world.cache.reserve, []

        def reserve_and_be_overtaken(layer_id: int, expert: int, *, is_prefill: bool) -> object:
            if not taken:  # after the list of certain reads was made
                reservation = world.cache.reserve_free(2, 4)
                assert reservation is not None
                taken.append(reservation)
                world.reader.submit(world.residency, reservation.reads, background=True)
                world.residency.release(2, 4)
            return reserve(layer_id, expert, is_prefill=is_prefill)

        monkeypatch.setattr(world.cache, "reserve", reserve_and_be_overtaken)
        x, ids, weights = batch(0)
        assert len(set(ids.flatten().tolist())) >= NUM_EXPERTS - 1
        executor.run(1, x, ids, weights, "prefill")
        assert_all_is_given_back(world)
        assert taken and executor.stats().ahead.loads == NUM_EXPERTS - 1


def test_a_lease_on_what_came_meanwhile_turns_the_miss_into_a_hit() -> None:
    residency = Residency(1, 4, 1, 2)
    residency.set_phase(1)
    ids = np.array([2], np.int32)
    assert residency.acquire(0, ids.ctypes.data, 1) == ([], [2])
    assert not residency.try_lease(0, 2) and residency.total_leases() == 0
    residency.reserve(1, 0, 2, [64], 1, True, 1)
    residency.release(0, 2)
    assert residency.try_lease(0, 2) and residency.num_leases[1] == 1
    assert residency.counters(1)[:3] == (1, 1, 0) and residency.transient[1] == 0
    assert residency.origins(1) == (1, 1, 1, 0), "useful, though late"
    residency.complete(1)
    residency.release(0, 2)
    assert residency.evict(1)
    with pytest.raises(IndexError):
        residency.try_lease(0, 4)
