"""How much RAM this process may take in all: the number people give, or what is free now minus a reserve."""

from __future__ import annotations

from dataclasses import dataclass

from expertide.errors import BudgetError, RequestError
from expertide.memory.topology import Topology
from expertide.units import GIB, MIB, format_size, parse_size

# Below this not even the interpreter with torch fits, so the number must be a slip of the pen (4 for 4GiB).
_SMALLEST_SENSIBLE = 64 * MIB


@dataclass(frozen=True, slots=True)
class RamBudget:
    """The ceiling of this process: peak resident set, the interpreter's own share included.

    Attributes:
        is_auto: nobody gave a number; it follows from what was free.
        warnings: sentences worth telling the user.
    """

    budget_bytes: int
    is_auto: bool
    warnings: tuple[str, ...] = ()


def resolve(ram: str | int, topology: Topology) -> RamBudget:
    """Turn `--ram` into bytes.

    Args:
        ram: "auto", a size as people write it, or bytes.

    Raises:
        RequestError: not a size, or one too small to mean anything.
        BudgetError: more than the machine or its container has.
    """
    if isinstance(ram, str) and ram.strip().lower() == "auto":
        available = topology.ram_available_bytes
        return RamBudget(available - _reserve(available), is_auto=True)
    budget = parse_size(ram) if isinstance(ram, str) else ram
    if budget < _SMALLEST_SENSIBLE:
        raise RequestError(
            f"--ram {format_size(budget)}: expected at least {format_size(_SMALLEST_SENSIBLE)} (write it like 4GiB)"
        )
    if budget > topology.ram_total_bytes:
        place = "this machine" if topology.limit is None else "this container (its memory control group)"
        raise BudgetError(
            f"--ram {format_size(budget)}: {place} has {format_size(topology.ram_total_bytes)}, "
            f"{format_size(topology.ram_available_bytes)} of it free now"
        )
    warnings: tuple[str, ...] = ()
    if budget > topology.ram_available_bytes:
        warnings = (
            f"--ram {format_size(budget)} is more than the {format_size(topology.ram_available_bytes)} that are free "
            "now; other programs may have to swap",
        )
    return RamBudget(budget, is_auto=False, warnings=warnings)


def _reserve(available: int) -> int:
    """What stays free for others: 2 GiB or a tenth, and at most half, so that small machines get their share."""
    return min(max(2 * GIB, available // 10), available // 2)
