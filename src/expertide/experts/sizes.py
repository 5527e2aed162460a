"""How much memory experts need. Pure arithmetic on the catalog: no torch, nothing native."""

from __future__ import annotations

from expertide.formats.tensors import ByteRange, ExpertCatalog
from expertide.memory.placement import expert_window_bytes
from expertide.units import round_down, round_up

PAGE_BYTES = 4096
# Beside the experts of one token: one being read while another waits to be freed.
SPARE_SLOTS = 2


def window_pages(where: ByteRange) -> int:
    """Pages of arena that the aligned window around a range takes."""
    end = round_up(where.offset + where.nbytes, PAGE_BYTES)
    return (end - round_down(where.offset, PAGE_BYTES)) // PAGE_BYTES


def smallest_cache_bytes(catalog: ExpertCatalog, num_experts_per_tok: int) -> int:
    """Arena bytes below which a step could not go on: K + 2 largest experts, or all of them if that is less."""
    windows = expert_window_bytes(catalog)
    slots = (num_experts_per_tok + SPARE_SLOTS) * max(windows.values())
    return min(slots, sum(windows.values()) * catalog.num_experts)


def smallest_window_bytes(catalog: ExpertCatalog) -> int:
    """Arena bytes of the smallest expert: capacity divided by this bounds the number of slots."""
    return min(
        sum(window_pages(part.ranges[expert]) for part in parts) * PAGE_BYTES
        for parts in catalog.layers.values()
        for expert in range(catalog.num_experts)
    )
