"""What `expertide doctor` measured on this machine, kept in one small file: for `expertide plan`, and for options that
are "auto".

    $XDG_CACHE_HOME/expertide/machine.json   (by default ~/.cache/expertide/machine.json)

    {"machines": {host: {"memory_bytes_per_s", "values_per_s": {threads: {quant type: rate}}, "layer_s",
                         "disks": {device: bytes per second}, "predictions": {device: kind of predictive prefetch}}}}

By host, for a home directory that several machines share; by disk, since models lie on fast ones and slow ones.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expertide.memory.topology import Disk
from expertide.options import PREDICTIONS
from expertide.settings import user_cache


@dataclass(frozen=True, slots=True)
class MachineRates:
    """One machine's rates.

    Attributes:
        memory_bytes_per_s: one thread reading RAM.
        values_per_s: threads -> quant type -> packed weights multiplied per second, for one token.
        layer_s: seconds that a layer takes at decode beside its multiplications.
        disks: device -> bytes per second of expert-sized reads.
        predictions: device -> predictive prefetch that won with a model on it, "off" where none did.
    """

    memory_bytes_per_s: float
    values_per_s: Mapping[int, Mapping[str, float]]
    layer_s: float
    disks: Mapping[str, float] = field(default_factory=dict)
    predictions: Mapping[str, str] = field(default_factory=dict)


def path() -> Path:
    return user_cache() / "machine.json"


def disk_key(disk: Disk | None) -> str:
    """What tells one disk from another; the file system belongs to it, as "overlay" alone names no device."""
    return "unknown" if disk is None else f"{disk.device} ({disk.filesystem})"


def load() -> MachineRates | None:
    """The measured rates, or None: never measured here, or not readable."""
    try:
        values = _read()["machines"][platform.node()]
        return MachineRates(
            memory_bytes_per_s=_rate(values["memory_bytes_per_s"]),
            values_per_s={
                int(threads): {str(name): _rate(rate) for name, rate in by_type.items()}
                for threads, by_type in values["values_per_s"].items()
            },
            layer_s=_rate(values["layer_s"]),
            disks={str(name): _rate(rate) for name, rate in values["disks"].items()},
            predictions={str(name): _kind(kind) for name, kind in values.get("predictions", {}).items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def save(rates: MachineRates) -> Path | None:
    """Keep the rates of this machine, and of its other disks and of other machines what was known.

    None when the place cannot be written (they are then only printed).
    """
    target, before = path(), load()
    try:
        machines = dict(_read()["machines"])
    except (OSError, ValueError, KeyError, TypeError):
        machines = {}
    machines[platform.node()] = {
        "memory_bytes_per_s": rates.memory_bytes_per_s,
        "values_per_s": {str(threads): dict(by_type) for threads, by_type in rates.values_per_s.items()},
        "layer_s": rates.layer_s,
        "disks": {**(before.disks if before is not None else {}), **rates.disks},
        "predictions": {**(before.predictions if before is not None else {}), **rates.predictions},
    }
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"machines": machines}, indent=1) + "\n", encoding="utf-8")
        return target
    return None


def _read() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path().read_text(encoding="utf-8"))
    return content


def _kind(value: object) -> str:
    if value not in PREDICTIONS or value == "auto":
        raise ValueError(f"{value!r} is no way to predict")
    return str(value)


def _rate(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{value!r} is no rate")
    return float(value)
