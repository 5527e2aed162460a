"""The start-up fill: fills what is free, in the right order, behind demand, and ends when it is told to."""

from __future__ import annotations

import ctypes
import errno
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from chaos_reader import chaos
from expert_world import ExpertFile, World, all_windows_bytes, write_experts
from expertide._native import ReadFailed
from expertide.experts.fill import StartupFill
from expertide.experts.popularity import Profile, fill_order
from expertide.memory.placement import expert_window_bytes

K = 2


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    return write_experts(tmp_path_factory.mktemp("experts") / "experts.bin")


@contextmanager
def filling(world: World, order: list[tuple[int, int]] | None = None) -> Iterator[StartupFill]:
    order = fill_order(world.file.catalog, None) if order is None else order
    fill = StartupFill(world.cache, world.residency, world.reader, order)
    try:
        yield fill
    finally:
        fill.close()
        world.cache.check()
        assert world.residency.total_leases() == 0 and not (world.residency.state == 1).any()


def bytes_of(world: World, layer_id: int, expert: int) -> list[bytes]:
    slot = world.residency.slot_of(layer_id, expert)
    parts = world.file.catalog.layers[layer_id]
    return [ctypes.string_at(int(world.residency.pointers[slot, i]), part.nbytes) for i, part in enumerate(parts)]


def test_with_room_for_all_everything_is_loaded_as_it_lies_in_the_file(file: ExpertFile) -> None:
    content = file.path.read_bytes()
    with World(file, k=K, cache_bytes=all_windows_bytes(file.catalog)) as world, filling(world) as fill:
        fill.start()
        assert fill.wait(20)
        for layer_id, parts in file.catalog.layers.items():
            for expert in range(8):
                expected = [content[p.ranges[expert].offset :][: p.nbytes] for p in parts]
                assert bytes_of(world, layer_id, expert) == expected
        stats = fill.stats()
        assert stats.num_experts == 24 and stats.is_done and stats.wasted == 0
        assert stats.read_bytes >= file.catalog.total_bytes
        assert world.reader.stats().read_bytes == 0, "no read counts as somebody's demand"


def test_it_evicts_nobody_and_leaves_the_ring(file: ExpertFile) -> None:
    largest = max(expert_window_bytes(file.catalog).values())
    with World(file, k=K, cache_bytes=12 * largest) as world, filling(world) as fill:
        fill.start()
        assert fill.wait(20)
        assert world.cache.num_evictions == 0
        free = world.cache.capacity_bytes - world.cache.used_bytes
        assert (K + 2) * largest <= free < (K + 3) * largest
        held = np.count_nonzero(world.residency.table >= 0, axis=1)[1:]
        assert held.max() - held.min() <= 1, "all layers evenly"


def test_a_cache_of_the_smallest_size_is_left_alone(file: ExpertFile) -> None:
    with World(file, k=K) as world, filling(world) as fill:
        fill.start()
        assert fill.wait(20)
        assert world.cache.num_slots == 0


def test_the_hottest_experts_come_first(file: ExpertFile) -> None:
    rng = np.random.default_rng(3)
    profile = Profile(100.0, {layer_id: rng.random(8) * 100 for layer_id in file.catalog.layers})
    order = fill_order(file.catalog, profile)
    heat = [profile.layers[layer_id][expert] for layer_id, expert in order]
    assert heat == sorted(heat, reverse=True) and len(set(order)) == 24
    largest = max(expert_window_bytes(file.catalog).values())
    with World(file, k=K, cache_bytes=12 * largest) as world, filling(world, order) as fill:
        fill.start()
        assert fill.wait(20)
        loaded = {(int(a), int(b)) for a, b in zip(*np.nonzero(world.residency.table >= 0), strict=True)}
        assert loaded == set(order[: len(loaded)]) and loaded


def test_nothing_begins_while_a_prompt_is_computed(file: ExpertFile) -> None:
    with World(file, k=K, cache_bytes=all_windows_bytes(file.catalog)) as world, filling(world) as fill:
        fill.set_activity("prefill")
        fill.start()
        time.sleep(0.05)
        assert world.cache.num_slots == 0 and not fill.stats().is_done
        fill.set_activity("decode")
        assert fill.wait(20)
        assert world.cache.num_slots == 24


def test_closing_in_mid_fill_cancels_what_has_not_begun(file: ExpertFile, monkeypatch: pytest.MonkeyPatch) -> None:
    # Slow: 24 experts would take some 0.4 s.
    monkeypatch.setattr("expertide.memory.reader.FileReader", chaos(5, max_delay_s=0.02))
    with World(file, k=K, cache_bytes=all_windows_bytes(file.catalog)) as world, filling(world) as fill:
        fill.start()
        time.sleep(0.02)
        fill.close()
        assert world.cache.num_slots < 24
        fill.close()


def test_a_failed_read_is_left_to_whoever_needs_the_expert(file: ExpertFile) -> None:
    with World(file, k=K, cache_bytes=all_windows_bytes(file.catalog)) as world, filling(world) as fill:
        broken = file.catalog.layers[2][1].ranges[5]
        world.reader.inject_fault(0, broken.offset + 4096, 1, errno.EIO)
        fill.start()
        assert fill.wait(20)
        world.cache.settle()
        assert world.residency.slot_of(2, 5) == -1 and world.cache.num_slots == 23
        assert fill.stats().wasted == 1
        reservation = world.cache.reserve(2, 5, is_prefill=False)
        assert reservation is not None
        world.reader.submit(world.residency, reservation.reads)
        world.residency.wait(2, 5)
        world.residency.release(2, 5)


def test_demand_goes_before_background_reads(tmp_path: pytest.TempPathFactory) -> None:
    """One I/O thread, a queue of background reads: the demand read that comes last ends among the first."""
    file = write_experts(tmp_path / "x.bin", num_experts=16, hidden=256, inner=256)  # type: ignore[operator]
    with World(file, k=K, cache_bytes=all_windows_bytes(file.catalog)) as world:
        world.reader.set_background_limit(1)
        with world.cache.lock:
            for expert in range(16):
                reservation = world.cache.reserve_free(1, expert)
                assert reservation is not None
                world.reader.submit(world.residency, reservation.reads, background=True)
                world.residency.release(1, expert)
        reservation = world.cache.reserve(2, 3, is_prefill=False)
        assert reservation is not None
        world.reader.submit(world.residency, reservation.reads)
        world.residency.wait(2, 3)
        pending = world.reader.wait_background(0, 0)
        assert pending > 0, "background reads were still queued when the demand read was done"
        assert world.reader.wait_background(0, 10_000) == 0
        world.residency.release(2, 3)


def test_a_background_read_that_a_step_asks_for_goes_before_the_others(tmp_path: pytest.TempPathFactory) -> None:
    """The last of many queued reads is leased: it ends while others are still queued."""
    file = write_experts(tmp_path / "x.bin", num_experts=96, hidden=256, inner=256)  # type: ignore[operator]
    with World(file, k=K, cache_bytes=all_windows_bytes(file.catalog)) as world:
        world.reader.set_background_limit(1)
        with world.cache.lock:
            for expert in range(96):
                reservation = world.cache.reserve_free(1, expert)
                assert reservation is not None
                world.reader.submit(world.residency, reservation.reads, background=True)
                world.residency.release(1, expert)
        ids = np.array([95], np.int32)
        hits, misses = world.residency.acquire(1, ids.ctypes.data, 1)
        assert (hits, misses) == ([95], [])
        world.residency.wait(1, 95)
        pending = world.reader.wait_background(0, 0)
        assert pending > 0, "background reads were still queued when the one that was asked for was done"
        world.residency.release(1, 95)
        assert world.reader.wait_background(0, 10_000) == 0
        world.cache.settle()
        assert world.cache.num_slots == 96


def test_a_step_after_the_reader_has_closed_tells_nobody(file: ExpertFile) -> None:
    """The reader's close takes its hook out of the table: a later lease must not call into what is gone."""
    with World(file, k=K, cache_bytes=all_windows_bytes(file.catalog)) as world:
        reservation = world.cache.reserve_free(1, 0)
        assert reservation is not None
        world.reader.submit(world.residency, reservation.reads, background=True)
        world.residency.release(1, 0)
        world.reader.close()
        other = world.cache.reserve_free(1, 1)
        assert other is not None
        ids = np.array([1], np.int32)
        assert world.residency.acquire(1, ids.ctypes.data, 1) == ([1], [])
        world.reader.submit(world.residency, other.reads, background=True)
        with pytest.raises(ReadFailed) as failed:
            world.residency.wait(1, 1)
        assert failed.value.errno == errno.ECANCELED
        for _ in range(2):
            world.residency.release(1, 1)


def test_cancelled_background_reads_end_as_failures(file: ExpertFile, tmp_path: object) -> None:
    with World(file, k=K, cache_bytes=all_windows_bytes(file.catalog)) as world:
        world.reader.set_background_limit(1)
        reservations = [world.cache.reserve_free(1, expert) for expert in range(8)]
        for reservation in reservations:
            assert reservation is not None
            world.reader.submit(world.residency, reservation.reads, background=True)
        world.reader.cancel_background()
        ends = []
        for expert in range(8):
            try:
                world.residency.wait(1, expert)
                ends.append(0)
            except ReadFailed as error:
                ends.append(error.errno)
            world.residency.release(1, expert)
        assert set(ends) <= {0, errno.ECANCELED}
        world.cache.settle()
        assert world.cache.num_slots == ends.count(0)
        world.cache.check()


def test_a_program_that_closes_nothing_ends_in_order() -> None:
    """The fill's thread may be inside a native call when the interpreter ends."""
    program = "from expertide import LLM\nllm = LLM('demo')\nprint('loaded')"
    for _ in range(3):
        done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "loaded\n", "")
