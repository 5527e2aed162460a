"""The expert cache: which slot lies where in the arena, who is evicted, who is admitted.

    reserve(layer, expert)   finds room (evicting if it must), names the slot `loading`, returns the reads to issue;
                             none when the fill has taken the expert since it was found missing: then only leases it
    reserve_ahead            the same for an expert that the next layer will need; never costs that layer another one
    reserve_free             the same for the start-up fill: takes free room only, and leaves the ring free
    evict                    only resident slots without leases; their pages go back, filled with 0xFF when poisoning
    recover                  takes back the pages of slots whose load failed

Two kinds of slots. Lasting ones were asked for by decode. Transient ones came with a prefill chunk (or are on
probation under second-miss): they go first, and a decode hit makes them lasting. Prefill fills free space, then
recycles transient slots, and touches lasting ones only when fewer than K + 2 transient slots exist: below that it
could not stream.

Only bookkeeping: no torch, no reads. Two threads call: the one that computes and the one that fills; `lock` is held by
every change. Reader threads speak to the residency table, not to this.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertide._native import Residency
from expertide.experts.policies import Policy, Slots, UseRecords
from expertide.experts.popularity import Profile
from expertide.experts.sizes import PartGroup, part_groups, smallest_window_bytes, window_pages
from expertide.formats.tensors import ExpertCatalog
from expertide.memory.arena import PAGE_BYTES, Arena
from expertide.memory.placement import SPARE_SLOTS, expert_window_bytes
from expertide.memory.reader import WindowRead, window_of

_FREE, _LOADING, _RESIDENT, _FAILED = range(4)
# Why a slot was loaded; as `Origin` in csrc/residency.h.
DEMAND, FILL, AHEAD, PREDICTED = range(4)
# Slots that prefill streams through when everything else is taken: enough to keep the disk busy while a layer computes,
# few enough that decode residents hardly notice. At most an eighth of the cache.
RING_SLOTS = 24


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot leased once for the caller, and the reads that fill it; no reads: somebody else has issued them."""

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
        smallest_ring = num_experts_per_tok + SPARE_SLOTS
        self._ring_slots = max(smallest_ring, min(RING_SLOTS, residency.max_slots // 8))
        self.lock = threading.RLock()
        windows = expert_window_bytes(catalog)
        largest_pages = max(windows.values()) // PAGE_BYTES
        holds_everything = arena.capacity_bytes >= sum(windows.values()) * catalog.num_experts
        self._fill_leaves_pages = 0 if holds_everything else self._ring_slots * largest_pages
        self._poison = poison
        self._records = UseRecords(residency, len(catalog.layers))
        self._free_slots = list(range(residency.max_slots - 1, -1, -1))
        self._runs: dict[int, tuple[int, ...]] = {}  # slot -> first page of each group of parts
        self._groups: dict[tuple[int, int], tuple[PartGroup, ...]] = {}
        self._slot_pages: NDArray[np.int64] = np.zeros(residency.max_slots, np.int64)
        self._state = residency.state
        self._num_leases = residency.num_leases
        self._transient = residency.transient
        self._slot_layer = residency.slot_layer
        self.num_evictions = 0

    @property
    def residency(self) -> Residency:
        return self._residency

    def expect(self, profile: Profile) -> None:
        """Let the policy start from what earlier runs asked for; what this run asks for soon outweighs it."""
        self._records.expect(profile)

    @property
    def capacity_bytes(self) -> int:
        return self._arena.capacity_bytes

    @property
    def holds_everything(self) -> bool:
        """Every expert of the model is in memory or on its way."""
        return len(self._runs) == self._catalog.num_experts * len(self._catalog.layers)

    @property
    def num_slots(self) -> int:
        """Experts in memory or on their way."""
        return len(self._runs)

    @property
    def used_bytes(self) -> int:
        """Arena bytes that experts take, windows included."""
        return int(self._slot_pages.sum()) * PAGE_BYTES

    def reserve(self, layer_id: int, expert: int, *, is_prefill: bool) -> Reservation | None:
        """Make room for an expert that was found missing and name its slot `loading`.

        It may have come since: between the table's answer and this call the fill may have taken it. It is then leased
        as it is, and the reservation has no reads.

        Args:
            is_prefill: the slot will be transient; in decode the policy's admission decides that.

        Returns:
            None when no room can be made without touching what is leased or loading, or, for transient loads, lasting
            slots that must be spared: compute and release something, then ask again. With nothing leased and nothing
            loading, a reservation always succeeds in a cache of at least `placement.smallest_cache_bytes`.
        """
        with self.lock:
            if self._residency.try_lease(layer_id, expert):
                return Reservation(self._residency.slot_of(layer_id, expert), layer_id, expert, ())
            transient = is_prefill or not self._policy.admits(layer_id, expert, self._records)
            pages = self._pages_of(layer_id, expert)
            starts = self._make_room(pages, transient=transient, is_prefill=is_prefill)
            return None if starts is None else self._name(layer_id, expert, pages, starts, transient, DEMAND)

    def reserve_ahead(
        self, layer_id: int, expert: int, *, is_prefill: bool, origin: int = AHEAD, spared_layer: int = -1
    ) -> Reservation | None:
        """`reserve` for an expert that is not asked for yet; it must be absent (look under the same hold of `lock`).

        The slot is transient, and experts of the same layer are no victims: they are needed just as soon. The lease is
        the caller's as usual; given back right after the reads are issued, the slot stays until someone evicts it.

        Args:
            spared_layer: one more layer whose experts are no victims.
        """
        with self.lock:
            pages = self._pages_of(layer_id, expert)
            spared = (layer_id, spared_layer)
            starts = self._make_room(pages, transient=True, is_prefill=is_prefill, spared=spared)
            return None if starts is None else self._name(layer_id, expert, pages, starts, True, origin)

    def reserve_free(self, layer_id: int, expert: int) -> Reservation | None:
        """`reserve` without evicting anybody; None when what is left is the ring that prefill streams through.

        The expert must be absent, as for `reserve_ahead`.
        """
        with self.lock:
            pages = self._pages_of(layer_id, expert)
            if self._arena.runs.num_free_pages - sum(pages) < self._fill_leaves_pages:
                return None
            starts = self._try_allocate(pages)
            return None if starts is None else self._name(layer_id, expert, pages, starts, False, FILL)

    def is_absent(self, layer_id: int, expert: int) -> bool:
        return self._residency.slot_of(layer_id, expert) < 0

    def _pages_of(self, layer_id: int, expert: int) -> tuple[int, ...]:
        """Pages of each group of parts."""
        return tuple(window_pages(group.where) for group in self._groups_of(layer_id, expert))

    def _groups_of(self, layer_id: int, expert: int) -> tuple[PartGroup, ...]:
        groups = self._groups.get((layer_id, expert))
        if groups is None:
            groups = self._groups[layer_id, expert] = part_groups(self._catalog.layers[layer_id], expert)
        return groups

    def _make_room(
        self, pages: tuple[int, ...], *, transient: bool, is_prefill: bool, spared: tuple[int, ...] = ()
    ) -> tuple[int, ...] | None:
        starts = self._try_allocate(pages)
        if starts is None and self._can_make_room(sum(pages), spared):
            while starts is None:
                victim = self._victim(transient=transient, is_prefill=is_prefill, spared=spared)
                if victim is None:
                    break
                self._evict(victim)
                starts = self._try_allocate(pages)
        return starts

    def _name(
        self, layer_id: int, expert: int, pages: tuple[int, ...], starts: tuple[int, ...], transient: bool, origin: int
    ) -> Reservation:
        """Give the expert a slot at this place."""
        parts = self._catalog.layers[layer_id]
        slot = self._free_slots.pop()
        addresses, reads = [0] * self._residency.num_parts, []
        for group, start in zip(self._groups_of(layer_id, expert), starts, strict=True):
            where = group.where
            window = window_of(where, self._file_sizes[where.file_id])
            dest = self._arena.address_of(start)
            for number in group.parts:
                addresses[number] = dest + parts[number].ranges[expert].offset - window.offset
            reads.append((slot, where.file_id, window.offset, window.nbytes, window.shift + where.nbytes, dest))
        self._residency.reserve(slot, layer_id, expert, addresses, len(reads), transient, origin)
        self._runs[slot] = starts
        self._slot_pages[slot] = sum(pages)
        return Reservation(slot, layer_id, expert, tuple(reads))

    def recover(self) -> None:
        """Take back the memory of slots whose load has failed and that nobody leases any more."""
        with self.lock:
            for slot in self._residency.collect_failed():
                self._give_back(slot)

    def settle(self) -> None:
        """Wait until no read is under way, then `recover`. Nothing new can be reserved meanwhile."""
        with self.lock:
            self._residency.wait_idle()
            self.recover()

    def clear(self) -> None:
        """Evict everything that is not leased or loading."""
        with self.lock:
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

    def _evictable(self, spared: tuple[int, ...] = ()) -> Slots:
        may_go = (self._state == _RESIDENT) & (self._num_leases == 0)
        for layer_id in spared:
            may_go &= self._slot_layer != layer_id
        return np.flatnonzero(may_go).astype(np.int32)

    def _can_make_room(self, num_pages: int, spared: tuple[int, ...]) -> bool:
        """Whether evicting could help at all; without this check a hopeless call would empty the cache first."""
        evictable = self._evictable(spared)
        return self._arena.runs.num_free_pages + int(self._slot_pages[evictable].sum()) >= num_pages

    def _victim(self, *, transient: bool, is_prefill: bool, spared: tuple[int, ...]) -> int | None:
        """Whom to evict for a load of this kind; None when everyone in question must stay."""
        candidates = self._evictable(spared)
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
        with self.lock:
            self._check()

    def _check(self) -> None:
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
            groups = self._groups_of(layer_id, expert)
            assert len(starts) == len(groups)
            for group, start in zip(groups, starts, strict=True):
                assert self._arena.runs.length_of(start) == window_pages(group.where)
                for number in group.parts:
                    where = self._catalog.layers[layer_id][number].ranges[expert]
                    shift = where.offset - group.where.offset + group.where.offset % PAGE_BYTES
                    assert int(residency.pointers[slot, number]) == self._arena.address_of(start) + shift
        assert np.count_nonzero(table >= 0) == num_named
        assert self._arena.runs.num_runs == sum(map(len, self._runs.values()))
        pages = self._arena.runs.num_pages - self._arena.runs.num_free_pages
        assert pages * PAGE_BYTES == self.used_bytes
