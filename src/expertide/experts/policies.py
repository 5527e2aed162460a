"""Whom to evict and whom to admit. Numbers in, a slot out; no torch, no bytes, no state of experts.

    lfu           fewest requests lately: counts halve every `HALF_LIFE_STEPS` steps
    lru           longest unused
    random        any of the oldest quarter; seeded, so that a run can be repeated
    second-miss   lfu, and an expert becomes a lasting resident only when it is asked for a second time within a
                  half-life; until then its slot is the first to be recycled

A policy decides speed only: whatever it answers, the model says the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from expertide._native import Residency
from expertide.errors import RequestError
from expertide.experts.popularity import Profile

Slots = NDArray[np.int32]

# Steps (tokens in decode, chunks in prefill) after which a request counts half. To be set by replaying traces.
HALF_LIFE_STEPS = 128


class UseRecords:
    """When and how often each expert was asked for; read per miss, kept natively per request."""

    def __init__(self, residency: Residency, num_moe_layers: int) -> None:
        # The clock ticks once per layer and step.
        self.decay = 0.5 ** (1.0 / (HALF_LIFE_STEPS * max(num_moe_layers, 1)))
        residency.set_decay(self.decay)
        self._residency = residency
        self._frequency = residency.frequency
        self._last_use = residency.last_use
        self._slot_layer = residency.slot_layer
        self._slot_expert = residency.slot_expert

    def frequency(self, slots: Slots) -> NDArray[np.float64]:
        """Decayed number of requests of the experts in these slots, as of now."""
        layers, experts = self._slot_layer[slots], self._slot_expert[slots]
        idle = self._residency.clock - self._last_use[layers, experts]
        decayed: NDArray[np.float64] = self._frequency[layers, experts] * np.power(self.decay, idle)
        return decayed

    def expect(self, profile: Profile) -> None:
        """Start as if requests had come as often as the profile says, for one half-life."""
        for layer_id in profile.layers:
            self._frequency[layer_id] = profile.per_token(layer_id) * HALF_LIFE_STEPS
            self._last_use[layer_id] = 0

    def last_use(self, slots: Slots) -> NDArray[np.int64]:
        """Clock of the last request of the experts in these slots."""
        found: NDArray[np.int64] = self._last_use[self._slot_layer[slots], self._slot_expert[slots]]
        return found

    def requests_of(self, layer_id: int, expert: int) -> float:
        """Decayed number of requests of one expert as of its last one, which counts 1."""
        return float(self._frequency[layer_id, expert])


class Policy(Protocol):
    """Chooses victims; called per miss."""

    name: str

    def choose(self, candidates: Slots, records: UseRecords) -> int:
        """One of the candidates (resident, not leased, at least one), to be evicted."""
        ...

    def admits(self, layer_id: int, expert: int, records: UseRecords) -> bool:
        """Whether an expert that decode has just missed becomes a lasting resident."""
        ...


class Lru:
    name = "lru"

    def choose(self, candidates: Slots, records: UseRecords) -> int:
        return int(candidates[np.argmin(records.last_use(candidates))])

    def admits(self, layer_id: int, expert: int, records: UseRecords) -> bool:
        return True


class Lfu:
    name = "lfu"

    def choose(self, candidates: Slots, records: UseRecords) -> int:
        frequency = records.frequency(candidates)
        # Many have been asked for exactly once: among equals the oldest goes.
        rarest = candidates[frequency <= frequency.min()]
        return int(rarest[np.argmin(records.last_use(rarest))])

    def admits(self, layer_id: int, expert: int, records: UseRecords) -> bool:
        return True


class RandomOldest:
    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def choose(self, candidates: Slots, records: UseRecords) -> int:
        num_oldest = (len(candidates) + 3) // 4
        order = np.argsort(records.last_use(candidates), kind="stable")
        return int(candidates[order[self._random.integers(num_oldest)]])

    def admits(self, layer_id: int, expert: int, records: UseRecords) -> bool:
        return True


class SecondMiss(Lfu):
    name = "second-miss"

    def admits(self, layer_id: int, expert: int, records: UseRecords) -> bool:
        # This request counts 1; another one within a half-life still counts at least a half.
        return records.requests_of(layer_id, expert) >= 1.5


_POLICIES: dict[str, Callable[[], Policy]] = {
    "lfu": Lfu,
    "lru": Lru,
    "random": RandomOldest,
    "second-miss": SecondMiss,
}
POLICY_NAMES = tuple(_POLICIES)
# Until traces say better: second-miss needs room for lasting residents to pay, and lfu never does badly.
DEFAULT_POLICY = "lfu"


def make_policy(name: str) -> Policy:
    """The policy called `name`; "auto" is the default one.

    Raises:
        RequestError: no policy has this name.
    """
    make = _POLICIES.get(DEFAULT_POLICY if name == "auto" else name)
    if make is None:
        raise RequestError(f"cache policy {name!r} is not known; known: auto, {', '.join(POLICY_NAMES)}")
    return make()
