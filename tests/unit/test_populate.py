"""An arena's pages are taken ahead, stop when told, and a system that refuses costs nothing."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from expertide.memory.arena import Arena
from expertide.memory.populate import Populator
from expertide.units import MIB


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_page_is_there_before_anybody_writes(num_threads: int) -> None:
    arena = Arena(50 * MIB + 4096)
    before = resident_bytes()
    populator = Populator(arena, num_threads)
    populator.start()
    if not populator.wait(60) or populator.populated_bytes == 0:
        pytest.skip("this kernel does not populate pages on request (Linux 5.14)")
    assert populator.populated_bytes == arena.capacity_bytes
    # Other threads of the test process may give a little back meanwhile.
    assert resident_bytes() - before > 48 * MIB
    assert ctypes.string_at(arena.address, arena.capacity_bytes) == bytes(arena.capacity_bytes)
    populator.close()
    arena.close()


def test_close_stops_it_before_the_end_and_may_come_twice_or_first() -> None:
    arena = Arena(2048 * MIB)
    populator = Populator(arena, 1)
    populator.close()
    populator = Populator(arena, 1)
    populator.start()
    assert not populator.wait(0.0)
    populator.close()
    populator.close()
    assert populator.populated_bytes < arena.capacity_bytes
    assert populator.wait(0.0)
    arena.close()


def test_a_refusal_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertide.memory.populate._MADV_POPULATE_WRITE", 9999)
    arena = Arena(8 * MIB)
    populator = Populator(arena, 2)
    populator.start()
    assert populator.wait(10) and populator.populated_bytes == 0
    ctypes.memset(arena.address, 1, arena.capacity_bytes)
    arena.close()
