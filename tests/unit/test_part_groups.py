"""Neighbouring parts of an expert: one window, one request, every pointer where its bytes are."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest

from expert_world import World, all_windows_bytes, write_experts
from expertide.experts.sizes import PartGroup, part_groups
from expertide.formats.quants import by_name
from expertide.formats.tensors import ByteRange, ExpertCatalog, ExpertPart

PAGE = 4096


def parts_at(*ranges: tuple[int, int, int]) -> list[ExpertPart]:
    names = ("gate", "up", "down")
    return [
        ExpertPart(name, by_name("F32"), 1, nbytes // 4, (ByteRange(file_id, offset, nbytes),))
        for name, (file_id, offset, nbytes) in zip(names, ranges, strict=True)
    ]


def test_parts_that_touch_are_one_group_in_any_order() -> None:
    groups = part_groups(parts_at((0, 9000, 4000), (0, 1000, 8000), (0, 13_000, 400)), 0)
    assert groups == (PartGroup((1, 0, 2), ByteRange(0, 1000, 12_400)),)


@pytest.mark.parametrize("gap", [0, 1, PAGE - 1, PAGE, 10 * PAGE])
def test_a_page_between_two_parts_parts_them(gap: int) -> None:
    groups = part_groups(parts_at((0, 100, 5000), (0, 5100 + gap, 5000), (0, 900_000, 5000)), 0)
    assert len(groups) == (2 if gap < PAGE else 3)
    assert groups[-1].parts == (2,)


def test_files_part_them_and_gate_and_up_come_before_down() -> None:
    groups = part_groups(parts_at((1, 5000, 4000), (1, 9000, 4000), (0, 0, 4000)), 0)
    assert [group.parts for group in groups] == [(0, 1), (2,)]


def test_an_expert_whose_parts_are_neighbours_is_one_request(tmp_path) -> None:
    """Laid out as a checkpoint with a tensor per expert: gate, up, down of expert 0, then of expert 1, …"""
    file = write_experts(tmp_path / "x.bin", num_layers=1, num_experts=4, hidden=64, inner=96)
    content = file.path.read_bytes()
    out, ranges = bytearray(b"\xee" * 1000), {"gate": [], "up": [], "down": []}
    parts = file.catalog.layers[1]
    for expert in range(4):
        for part in parts:
            where = part.ranges[expert]
            ranges[part.name].append(ByteRange(0, len(out), where.nbytes))
            out += content[where.offset : where.offset + where.nbytes] + b"\xee" * (8 * (expert % 2))
    file.path.write_bytes(out)
    catalog = ExpertCatalog(4, {1: tuple(dataclasses.replace(p, ranges=tuple(ranges[p.name])) for p in parts)})
    moved = dataclasses.replace(file, size=len(out), catalog=catalog)
    with World(moved, cache_bytes=all_windows_bytes(catalog)) as world:
        for expert in range(4):
            reservation = world.cache.reserve(1, expert, is_prefill=False)
            assert reservation is not None and len(reservation.reads) == 1
            world.reader.submit(world.residency, reservation.reads)
            world.residency.wait(1, expert)
            for number, part in enumerate(parts):
                slot = world.residency.slot_of(1, expert)
                found = ctypes.string_at(int(world.residency.pointers[slot, number]), part.nbytes)
                expected = file.weights[1, part.name][expert].astype(np.float16 if part.quant.name == "F16" else "f4")
                assert found == expected.tobytes()
            world.residency.release(1, expert)
        world.cache.check()
        assert world.reader.stats().num_reads <= 4 + 1, "the last one has a tail of its own"
