"""The expert cache: which slot lies where in the arena, who is evicted, who is admitted.

    reserve(layer, expert)   finds room (evicting if it must), names the slot `loading`, returns the reads to issue
    evict                    only resident slots without leases; their pages go back, filled with 0xFF when poisoning
    recover                  takes back the pages of slots whose load failed

Two kinds of slots. Lasting ones were asked for by decode. Transient ones came with a prefill chunk (or are on
probation under second-miss): they go first, and a decode hit makes them lasting. Prefill fills free space, then
recycles transient slots, and touches lasting ones only when fewer than K + 2 transient slots exist: below that it
could not stream.

Only bookkeeping: no torch, no reads. One thread at a time; reader threads speak to the residency table, not to this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertide._native import Residency
from expertide.experts.policies import Policy, Slots, UseRecords
from expertide.formats.tensors import ExpertCatalog
from expertide.memory.arena import PAGE_BYTES, Arena
from expertide.memory.placement import SPARE_SLOTS, smallest_window_bytes, window_pages
from expertide.memory.reader import WindowRead, window_of

_FREE, _LOADING, _RESIDENT, _FAILED = range(4)


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot that is loading, leased once for the caller, and the reads that fill it."""

    slot: int
    layer_id: int
    expert: int
    reads: tuple[WindowRead, ...]


def make_residency(catalog: ExpertCatalog, arena: Arena) -> Residency:
    """An empty table for every (layer, expert) of the catalog and as many slots as the arena can ever hold."""
    residency = Residency(
        max(catalog.layers) + 1,
        catalog.num_experts,
        max(len(parts) for parts in catalog.layers.values()),
        max(1, arena.capacity_bytes // smallest_window_bytes(catalog)),
    )
    for layer_id in catalog.layers:
        residency.set_expert_nbytes(layer_id, catalog.expert_nbytes(layer_id))
    return residency


class ExpertCache:
    """Experts in one arena. Capacity counts in bytes; sizes differ from layer to layer."""

    def __init__(
        self,
        catalog: ExpertCatalog,
        arena: Arena,
        residency: Residency,
        policy: Policy,
        *,
        file_sizes: tuple[int, ...],
        num_experts_per_tok: int,
        poison: bool = False,
    ) -> None:
        self._catalog = catalog
        self._arena = arena
        self._residency = residency
        self._policy = policy
        self._file_sizes = file_sizes
        self._ring_slots = num_experts_per_tok + SPARE_SLOTS
        self._poison = poison
        self._records = UseRecords(residency, len(catalog.layers))
        self._free_slots = list(range(residency.max_slots - 1, -1, -1))
        self._runs: dict[int, tuple[int, ...]] = {}  # slot -> first page of each part
        self._slot_pages: NDArray[np.int64] = np.zeros(residency.max_slots, np.int64)
        self._state = residency.state
        self._num_leases = residency.num_leases
        self._transient = residency.transient
        self.num_evictions = 0

    @property
    def capacity_bytes(self) -> int:
        return self._arena.capacity_bytes

    @property
    def num_slots(self) -> int:
        """Experts in memory or on their way."""
        return len(self._runs)

    @property
    def used_bytes(self) -> int:
        """Arena bytes that experts take, windows included."""
        return int(self._slot_pages.sum()) * PAGE_BYTES

    def reserve(self, layer_id: int, expert: int, *, is_prefill: bool) -> Reservation | None:
        """Make room for an absent expert and name its slot `loading`.

        Args:
            is_prefill: the slot will be transient; in decode the policy's admission decides that.

        Returns:
            None when no room can be made without touching what is leased or loading, or, for transient loads, lasting
            slots that must be spared: compute and release something, then ask again. With nothing leased and nothing
            loading, a reservation always succeeds in a cache of at least `placement.smallest_cache_bytes`.
        """
        transient = is_prefill or not self._policy.admits(layer_id, expert, self._records)
        parts = self._catalog.layers[layer_id]
        pages = tuple(window_pages(part.ranges[expert]) for part in parts)
        starts = self._try_allocate(pages)
        if starts is None and self._can_make_room(sum(pages)):
            while starts is None:
                victim = self._victim(transient=transient, is_prefill=is_prefill)
                if victim is None:
                    break
                self._evict(victim)
                starts = self._try_allocate(pages)
        if starts is None:
            return None

        slot = self._free_slots.pop()
        addresses, reads = [], []
        for part, start in zip(parts, starts, strict=True):
            where = part.ranges[expert]
            window = window_of(where, self._file_sizes[where.file_id])
            dest = self._arena.address_of(start)
            addresses.append(dest + window.shift)
            reads.append((slot, where.file_id, window.offset, window.nbytes, window.shift + where.nbytes, dest))
        addresses += [0] * (self._residency.num_parts - len(parts))
        self._residency.reserve(slot, layer_id, expert, addresses, len(reads), transient)
        self._runs[slot] = starts
        self._slot_pages[slot] = sum(pages)
        return Reservation(slot, layer_id, expert, tuple(reads))

    def recover(self) -> None:
        """Take back the memory of slots whose load has failed and that nobody leases any more."""
        for slot in self._residency.collect_failed():
            self._give_back(slot)

    def clear(self) -> None:
        """Evict everything that is not leased or loading."""
        for slot in list(self._runs):
            if self._residency.evict(slot):
                self._give_back(slot)

    def _try_allocate(self, pages: tuple[int, ...]) -> tuple[int, ...] | None:
        """A run per part, or nothing at all."""
        starts: list[int] = []
        for count in pages:
            start = self._arena.runs.try_allocate(count)
            if start is None:
                for taken in starts:
                    self._arena.runs.free(taken)
                return None
            starts.append(start)
        return tuple(starts)

    def _evictable(self) -> Slots:
        return np.flatnonzero((self._state == _RESIDENT) & (self._num_leases == 0)).astype(np.int32)

    def _can_make_room(self, num_pages: int) -> bool:
        """Whether evicting could help at all; without this check a hopeless call would empty the cache first."""
        return self._arena.runs.num_free_pages + int(self._slot_pages[self._evictable()].sum()) >= num_pages

    def _victim(self, *, transient: bool, is_prefill: bool) -> int | None:
        """Whom to evict for a load of this kind; None when everyone in question must stay."""
        candidates = self._evictable()
        passing = candidates[self._transient[candidates] != 0]
        if len(passing):
            return self._circular_victim(passing) if is_prefill else self._policy.choose(passing, self._records)
        if not len(candidates):
            return None
        if transient and np.count_nonzero(self._transient) >= self._ring_slots:
            return None
        return self._policy.choose(candidates, self._records)

    def _circular_victim(self, passing: Slots) -> int:
        # Prefill visits the layers in a circle, chunk after chunk: the one used last is needed again last. Evicting the
        # oldest instead would throw out every expert just before its next use.
        last_use = self._records.last_use(passing)
        latest = passing[last_use == last_use.max()]
        return int(latest[np.argmin(self._records.frequency(latest))])

    def _evict(self, slot: int) -> None:
        is_evicted = self._residency.evict(slot)
        assert is_evicted, f"slot {slot} was leased while its eviction was decided"
        self.num_evictions += 1
        self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        for start in self._runs.pop(slot):
            if self._poison:
                self._arena.poison(start)
            self._arena.runs.free(start)
        self._slot_pages[slot] = 0
        self._free_slots.append(slot)

    def check(self) -> None:
        """Assert that table, slots and arena tell the same story."""
        self._arena.runs.check()
        residency = self._residency
        state, table = residency.state, residency.table
        assert len(self._free_slots) + len(self._runs) == residency.max_slots
        assert len(set(self._free_slots)) == len(self._free_slots) and not set(self._free_slots) & set(self._runs)
        for slot in self._free_slots:
            assert state[slot] == _FREE and residency.num_leases[slot] == 0
        num_named = 0
        for slot, starts in self._runs.items():
            layer_id, expert = int(residency.slot_layer[slot]), int(residency.slot_expert[slot])
            assert state[slot] != _FREE and residency.num_leases[slot] >= 0
            if table[layer_id, expert] == slot:
                num_named += 1
            else:
                assert state[slot] == _FAILED and residency.num_leases[slot] == 0
            parts = self._catalog.layers[layer_id]
            assert len(starts) == len(parts)
            for number, (part, start) in enumerate(zip(parts, starts, strict=True)):
                assert self._arena.runs.length_of(start) == window_pages(part.ranges[expert])
                shift = part.ranges[expert].offset % PAGE_BYTES
                assert int(residency.pointers[slot, number]) == self._arena.address_of(start) + shift
        assert np.count_nonzero(table >= 0) == num_named
        assert self._arena.runs.num_runs == sum(map(len, self._runs.values()))
        pages = self._arena.runs.num_pages - self._arena.runs.num_free_pages
        assert pages * PAGE_BYTES == self.used_bytes
