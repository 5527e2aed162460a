"""How much memory experts need. Pure arithmetic on the catalog: no torch, nothing native."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertide.formats.tensors import ByteRange, ExpertCatalog, ExpertPart
from expertide.memory import placement
from expertide.memory.arena import PAGE_BYTES
from expertide.units import round_down, round_up


def window_pages(where: ByteRange) -> int:
    """Pages of arena that the aligned window around a range takes."""
    end = round_up(where.offset + where.nbytes, PAGE_BYTES)
    return (end - round_down(where.offset, PAGE_BYTES)) // PAGE_BYTES


@dataclass(frozen=True, slots=True)
class PartGroup:
    """Parts of one expert that one request reads.

    Attributes:
        parts: numbers of the parts, in file order.
        where: all of their bytes, and what little lies between them.
    """

    parts: tuple[int, ...]
    where: ByteRange


def part_groups(parts: Sequence[ExpertPart], expert: int) -> tuple[PartGroup, ...]:
    """The parts of an expert, neighbours in the file together.

    Neighbours are parts with less than a page between them: one window around both is no larger than two, and one
    request instead of two. Checkpoints with a tensor per expert are laid out so; usual GGUF files are not.
    The groups come in the order of their first part: gate and up before down.
    """
    ranges = [part.ranges[expert] for part in parts]
    groups: list[PartGroup] = []
    for number in sorted(range(len(parts)), key=lambda n: (ranges[n].file_id, ranges[n].offset)):
        where = ranges[number]
        if groups:
            last = groups[-1]
            end = last.where.offset + last.where.nbytes
            if last.where.file_id == where.file_id and 0 <= where.offset - end < PAGE_BYTES:
                joined = ByteRange(where.file_id, last.where.offset, where.offset + where.nbytes - last.where.offset)
                groups[-1] = PartGroup((*last.parts, number), joined)
                continue
        groups.append(PartGroup((number,), where))
    return tuple(sorted(groups, key=lambda group: min(group.parts)))


def smallest_cache_bytes(catalog: ExpertCatalog, num_experts_per_tok: int) -> int:
    """Arena bytes below which a step could not go on: what the plan insists on."""
    windows = placement.expert_window_bytes(catalog)
    return placement.smallest_cache_bytes(windows, catalog.num_experts, num_experts_per_tok)


def smallest_window_bytes(catalog: ExpertCatalog) -> int:
    """Arena bytes of the smallest expert: capacity divided by this bounds the number of slots."""
    return min(
        sum(window_pages(group.where) for group in part_groups(parts, expert)) * PAGE_BYTES
        for parts in catalog.layers.values()
        for expert in range(catalog.num_experts)
    )
