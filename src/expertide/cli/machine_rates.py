"""What `expertide doctor` measured on this machine, kept in one small file, for `expertide plan`.

$XDG_CACHE_HOME/expertide/machine.json   (by default ~/.cache/expertide/machine.json)
"""

from __future__ import annotations

import contextlib
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from expertide.settings import user_cache


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Bytes per second. `host` guards against a home directory shared by several machines."""

    host: str
    memory_bytes_per_s: float
    disk_bytes_per_s: float


def path() -> Path:
    return user_cache() / "machine.json"


def load() -> MachineRates | None:
    """The measured rates, or None: never measured, of another machine, or not readable."""
    try:
        values = json.loads(path().read_text(encoding="utf-8"))
        rates = MachineRates(
            str(values["host"]), float(values["memory_bytes_per_s"]), float(values["disk_bytes_per_s"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_sane = rates.memory_bytes_per_s > 0 and rates.disk_bytes_per_s > 0
    return rates if rates.host == platform.node() and is_sane else None


def save(rates: MachineRates) -> Path | None:
    """Keep the rates; None when the place cannot be written (they are then only printed)."""
    target = path()
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(asdict(rates), indent=1) + "\n", encoding="utf-8")
        return target
    return None
