"""The latent cache against a plain list of rows, under seeded random use."""

from __future__ import annotations

import random

import pytest
import torch

from expertide.errors import RequestError
from expertide.kv.latent import LatentCache


def test_random_use_equals_a_list_of_rows() -> None:
    rng = random.Random(11)
    cache = LatentCache(num_layers=2, max_tokens=40, rank=3, rope_dim=2, dtype="float32")
    rows: list[torch.Tensor] = []
    snapshots: list[tuple[object, list[torch.Tensor]]] = []
    counter = 0.0
    for _ in range(2000):
        action = rng.choice(("append", "append", "fail", "truncate", "snapshot", "restore"))
        if action in ("append", "fail"):
            count = min(rng.randint(1, 6), 40 - len(rows))
            new = [torch.full((5,), counter + i) for i in range(count)]
            counter += count
            if count:
                stacked = torch.stack(new)
                # A pass that fails has written some layers and never counts.
                for layer in range(2 if action == "append" else 1):
                    cache.append(layer, stacked[:, :3] + layer, stacked[:, 3:] + layer)
            if action == "append":
                cache.advance(count)
                rows += new
        elif action == "truncate":
            length = rng.randint(0, len(rows))
            cache.truncate(length)
            rows = rows[:length]
            snapshots = [(snapshot, kept) for snapshot, kept in snapshots if len(kept) <= length]
        elif action == "snapshot":
            snapshots.append((cache.snapshot(), list(rows)))
        elif snapshots:
            index = rng.randrange(len(snapshots))
            snapshot, rows = snapshots[index]
            rows = list(rows)
            cache.restore(snapshot)
            snapshots = [pair for pair in snapshots[: index + 1] if len(pair[1]) <= len(rows)]
        assert cache.length == len(rows)
        for layer in range(2):
            latent, k_rope = cache.view(layer, len(rows))
            expected = torch.stack(rows) + layer if rows else torch.empty(0, 5)
            assert torch.equal(torch.cat([latent, k_rope], dim=1), expected)


def test_memory_is_what_was_planned() -> None:
    cache = LatentCache(num_layers=27, max_tokens=64, rank=512, rope_dim=64, dtype="float16")
    assert cache.nbytes == 64 * 31_104  # bytes per token of DeepSeek-V2-Lite


def test_impossible_cuts_and_foreign_snapshots_are_refused() -> None:
    cache = LatentCache(num_layers=1, max_tokens=4, rank=3, rope_dim=2, dtype="float32")
    other = LatentCache(num_layers=1, max_tokens=4, rank=3, rope_dim=2, dtype="float32")
    with pytest.raises(RequestError, match="cannot cut a cache of 0 tokens to 1"):
        cache.truncate(1)
    with pytest.raises(RequestError, match="the cache that made it"):
        cache.restore(other.snapshot())
