"""What experts cost, prefill and decode apart: requests, hits, misses, bytes, seconds."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class PhaseStats:
    """Sums over the steps of one phase; sizes in bytes, times in seconds.

    Attributes:
        requests: distinct (layer, expert) per step, a step being one forward pass of one chunk; hits + misses.
        needed_bytes: bytes of the requested experts, without alignment windows.
        read_bytes: what the disk delivered, windows and repeated pages included.
        h2d_bytes: copied to a device.
        computed_on_cpu: requests multiplied on the CPU.
        read_s: time during which at least one read was under way.
        stall_s: time during which computing waited for a read.
    """

    requests: int = 0
    hits_device: int = 0
    hits_host: int = 0
    misses: int = 0
    needed_bytes: int = 0
    read_bytes: int = 0
    h2d_bytes: int = 0
    computed_on_cpu: int = 0
    read_s: float = 0.0
    stall_s: float = 0.0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of requests served from memory, 0..1; 0 without requests."""
        return (self.hits_device + self.hits_host) / self.requests if self.requests else 0.0

    def __sub__(self, earlier: PhaseStats) -> PhaseStats:
        return PhaseStats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def to_json(self) -> dict[str, int | float]:
        found: dict[str, int | float] = {}
        for f in fields(self):
            found[f.name] = getattr(self, f.name)
            if f.name == "misses":
                found["hit_rate"] = self.hit_rate
        return found


@dataclass(frozen=True, slots=True)
class EarlyStats:
    """Loads that began before anybody asked for the expert.

    Attributes:
        useful: asked for before they were evicted.
        late: of these, still on their way when they were asked for.
        wasted: evicted, or failed, without having been asked for.
    """

    loads: int = 0
    useful: int = 0
    late: int = 0
    wasted: int = 0

    def __sub__(self, earlier: EarlyStats) -> EarlyStats:
        return EarlyStats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def to_json(self) -> dict[str, int | float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """Both phases, and what was read early: certain reads of a prompt's next layer, and predicted ones."""

    prefill: PhaseStats = field(default_factory=PhaseStats)
    decode: PhaseStats = field(default_factory=PhaseStats)
    ahead: EarlyStats = field(default_factory=EarlyStats)
    predicted: EarlyStats = field(default_factory=EarlyStats)

    def __sub__(self, earlier: ExpertStats) -> ExpertStats:
        return ExpertStats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def to_json(self) -> dict[str, dict[str, int | float]]:
        """As `run --json` shows it under "experts"."""
        return {f.name: getattr(self, f.name).to_json() for f in fields(self)}
