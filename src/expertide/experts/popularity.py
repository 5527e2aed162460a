"""Which experts decode asks for most: counted while a model runs, kept in a small file, used to fill the next start.

    ~/.cache/expertide/profiles/<fingerprint>.json     ($XDG_CACHE_HOME instead of ~/.cache where it is set)

    {"format": 1, "tokens": 812.0, "layers": {"1": [requests of expert 0, 1, …], …}}

The fingerprint is made of the bytes of the model, not of its name or place: a copy finds its profile, another quant of
the same model does not. A profile decides speed only; one that cannot be read is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertide.formats.tensors import ExpertCatalog, ModelFiles
from expertide.settings import user_cache

_FORMAT = 1
# Bytes taken from the beginning, the middle and the end of every file: header and weights, in under a millisecond.
_SAMPLE_BYTES = 64 << 10
# Old requests fade once so many tokens are counted: some days of use, so that habits may change.
MAX_TOKENS = 20_000
# Fewer say next to nothing; a file that is written for every short test would be noise.
MIN_TOKENS = 4
# DeepSeek-V3's profile has 160 KB; nothing sane has a hundred times that.
_MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True)
class Profile:
    """Requests per expert.

    Attributes:
        tokens: decode steps that were counted; fractional once they fade.
        layers: MoE layer_id -> [E] requests.
    """

    tokens: float
    layers: Mapping[int, NDArray[np.float64]]

    def __add__(self, other: Profile) -> Profile:
        """Both together; the older one (self) fades so that at most `MAX_TOKENS` count."""
        room = max(MAX_TOKENS - other.tokens, 0.0)
        keep = min(1.0, room / self.tokens) if self.tokens > 0 else 0.0
        layers = {layer_id: self.layers[layer_id] * keep + counts for layer_id, counts in other.layers.items()}
        return Profile(self.tokens * keep + other.tokens, layers)

    def per_token(self, layer_id: int) -> NDArray[np.float64]:
        """Requests of each expert per decoded token."""
        return self.layers[layer_id] / max(self.tokens, 1.0)


def fill_order(catalog: ExpertCatalog, profile: Profile | None) -> list[tuple[int, int]]:
    """Every (layer_id, expert), the one to load first first.

    The hottest of the profile first; experts that were never asked for (all, without a profile) in turns over the
    layers, so that no layer is left without.
    """
    evenly = [(layer_id, expert) for expert in range(catalog.num_experts) for layer_id in catalog.layers]
    if profile is None:
        return evenly
    heat = {layer_id: profile.layers[layer_id] for layer_id in catalog.layers}
    # The sort is stable: equals keep taking turns.
    return sorted(evenly, key=lambda name: -heat[name[0]][name[1]])


def fingerprint(files: ModelFiles) -> str:
    """Of the model's bytes: sizes and samples of every part.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path, size in zip(files.files, files.file_sizes, strict=True):
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb", buffering=0) as file:
            for offset in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
    return digest.hexdigest()[:32]


def path_of(name: str) -> Path:
    """Where the profile of the model with this fingerprint lies."""
    return user_cache() / "profiles" / f"{name}.json"


def load(name: str, catalog: ExpertCatalog) -> Profile | None:
    """The saved profile; None when there is none, or none that fits this catalog."""
    try:
        path = path_of(name)
        if path.stat().st_size > _MAX_FILE_BYTES:
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            return None
        tokens = float(content["tokens"])
        layers = {}
        for layer_id in catalog.layers:
            counts = np.asarray(content["layers"][str(layer_id)], dtype=np.float64)
            if counts.shape != (catalog.num_experts,) or not np.isfinite(counts).all() or (counts < 0).any():
                return None
            layers[layer_id] = counts
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Profile(tokens, layers) if math.isfinite(tokens) and tokens > 0 else None


def save(name: str, profile: Profile) -> Path | None:
    """Keep a profile; None when the place cannot be written (nothing depends on it)."""
    path = path_of(name)
    layers = {str(layer_id): [round(float(n), 2) for n in counts] for layer_id, counts in profile.layers.items()}
    text = json.dumps({"format": _FORMAT, "tokens": round(profile.tokens, 2), "layers": layers})
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when whole: another process that starts now reads the old one or the new one.
        half = path.with_name(f"{path.name}.{os.getpid()}")
        half.write_text(text + "\n", encoding="utf-8")
        half.replace(path)
        return path
    return None
