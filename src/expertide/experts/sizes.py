"""How much memory experts need. Pure arithmetic on the catalog: no torch, nothing native."""

from __future__ import annotations

from expertide.formats.tensors import ByteRange, ExpertCatalog
from expertide.memory import placement
from expertide.memory.arena import PAGE_BYTES
from expertide.units import round_down, round_up


def window_pages(where: ByteRange) -> int:
    """Pages of arena that the aligned window around a range takes."""
    end = round_up(where.offset + where.nbytes, PAGE_BYTES)
    return (end - round_down(where.offset, PAGE_BYTES)) // PAGE_BYTES


def smallest_cache_bytes(catalog: ExpertCatalog, num_experts_per_tok: int) -> int:
    """Arena bytes below which a step could not go on: what the plan insists on."""
    windows = placement.expert_window_bytes(catalog)
    return placement.smallest_cache_bytes(windows, catalog.num_experts, num_experts_per_tok)


def smallest_window_bytes(catalog: ExpertCatalog) -> int:
    """Arena bytes of the smallest expert: capacity divided by this bounds the number of slots."""
    return min(
        sum(window_pages(part.ranges[expert]) for part in parts) * PAGE_BYTES
        for parts in catalog.layers.values()
        for expert in range(catalog.num_experts)
    )
