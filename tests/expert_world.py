"""A small model's worth of experts in a file, and everything that serves them: for tests of the expert floor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from expertide.experts.cache import ExpertCache, make_residency
from expertide.experts.policies import make_policy
from expertide.formats.quants import by_name
from expertide.formats.tensors import ByteRange, ExpertCatalog, ExpertPart
from expertide.memory import placement
from expertide.memory.arena import Arena
from expertide.memory.reader import Reader

# Not a multiple of anything: windows then begin and end inside pages.
_FIRST_OFFSET = 4096 + 32


@dataclass(frozen=True)
class ExpertFile:
    """Random experts on disk.

    Attributes:
        weights: (layer_id, part name) -> float32 [E, rows, cols], as written.
    """

    path: Path
    size: int
    catalog: ExpertCatalog
    weights: dict[tuple[int, str], np.ndarray]


def write_experts(
    path: Path,
    *,
    num_layers: int = 3,
    num_experts: int = 8,
    hidden: int = 64,
    inner: int = 96,
    gap_bytes: int = 96,
    seed: int = 0,
) -> ExpertFile:
    """Stacked expert tensors as a GGUF has them, layers 1..num_layers, float32 and (every second `down`) float16."""
    rng = np.random.default_rng(seed)
    layers: dict[int, tuple[ExpertPart, ...]] = {}
    weights: dict[tuple[int, str], np.ndarray] = {}
    content = bytearray(rng.integers(0, 256, _FIRST_OFFSET, dtype=np.uint8).tobytes())
    for layer_id in range(1, num_layers + 1):
        parts = []
        for name, rows, cols in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            quant = by_name("F16" if name == "down" and layer_id % 2 else "F32")
            values = (rng.standard_normal((num_experts, rows, cols)) / np.sqrt(cols)).astype(np.float32)
            packed = values.astype(np.float16 if quant.name == "F16" else np.float32)
            nbytes = packed[0].nbytes
            ranges = tuple(ByteRange(0, len(content) + e * nbytes, nbytes) for e in range(num_experts))
            content += packed.tobytes() + b"\xee" * gap_bytes
            weights[layer_id, name] = packed.astype(np.float32)
            parts.append(ExpertPart(name, quant, rows, cols, ranges))
        layers[layer_id] = tuple(parts)
    del content[-gap_bytes:]  # the last part ends with the file, inside a page
    path.write_bytes(content)
    return ExpertFile(path, len(content), ExpertCatalog(num_experts, layers), weights)


class World:
    """File, arena, table, cache and reader; closes in the right order."""

    def __init__(
        self,
        file: ExpertFile,
        *,
        k: int = 2,
        cache_bytes: int | None = None,
        policy: str = "lfu",
        serial: bool = False,
        poison: bool = True,
    ) -> None:
        self.file = file
        self.arena = Arena(smallest_cache_bytes(file.catalog, k) if cache_bytes is None else cache_bytes)
        self.residency = make_residency(file.catalog, self.arena)
        self.reader = Reader([file.path], [file.size], num_threads=4, serial=serial)
        self.reader.keep(self.arena)
        self.cache = ExpertCache(
            file.catalog,
            self.arena,
            self.residency,
            make_policy(policy),
            file_sizes=(file.size,),
            num_experts_per_tok=k,
            poison=poison,
        )

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()
        self.arena.close()


def all_windows_bytes(catalog: ExpertCatalog) -> int:
    """Arena bytes in which every expert fits at once."""
    return sum(placement.expert_window_bytes(catalog).values()) * catalog.num_experts


def smallest_cache_bytes(catalog: ExpertCatalog, k: int) -> int:
    """Arena bytes that the plan insists on for `k` experts per token."""
    return placement.smallest_cache_bytes(placement.expert_window_bytes(catalog), catalog.num_experts, k)
