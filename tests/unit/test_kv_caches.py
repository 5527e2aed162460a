"""Each cache against a plain list of rows, under seeded random use."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from expertide.errors import RequestError
from expertide.kv.heads import HeadCache
from expertide.kv.latent import LatentCache


def _latent(max_tokens: int) -> LatentCache:
    return LatentCache(num_layers=2, max_tokens=max_tokens, rank=3, rope_dim=2, dtype="float32")


def _heads(max_tokens: int) -> HeadCache:
    return HeadCache(num_layers=2, max_tokens=max_tokens, num_kv_heads=2, head_dim=3, dtype="float32")


def _append(cache: Any, layer: int, rows: torch.Tensor) -> None:
    """Rows of 12 values: as many of them as the cache takes."""
    if isinstance(cache, LatentCache):
        cache.append(layer, rows[:, :3], rows[:, 3:5])
    else:
        cache.append(layer, rows[:, :6].view(-1, 2, 3), rows[:, 6:].view(-1, 2, 3))


def _held(cache: Any, layer: int, count: int) -> torch.Tensor:
    first, second = cache.view(layer, count)
    if isinstance(cache, LatentCache):
        return torch.cat([first, second], dim=1)
    return torch.cat([first.transpose(0, 1).reshape(count, 6), second.transpose(0, 1).reshape(count, 6)], dim=1)


CACHES = pytest.mark.parametrize("make", [_latent, _heads])


@CACHES
def test_random_use_equals_a_list_of_rows(make: Callable[[int], Any]) -> None:
    rng = random.Random(11)
    cache = make(40)
    rows: list[torch.Tensor] = []
    snapshots: list[tuple[object, list[torch.Tensor]]] = []
    counter = 0.0
    for _ in range(2000):
        action = rng.choice(("append", "append", "fail", "truncate", "snapshot", "restore"))
        if action in ("append", "fail"):
            count = min(rng.randint(1, 6), 40 - len(rows))
            new = [100 * torch.arange(12.0) + counter + i for i in range(count)]
            counter += count
            if count:
                stacked = torch.stack(new)
                # A pass that fails has written some layers and never counts.
                for layer in range(2 if action == "append" else 1):
                    _append(cache, layer, stacked + layer)
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
            found = _held(cache, layer, len(rows))
            expected = torch.stack(rows)[:, : found.shape[1]] + layer if rows else torch.empty(0, found.shape[1])
            assert torch.equal(found, expected)


def test_memory_is_what_was_planned() -> None:
    cache = LatentCache(num_layers=27, max_tokens=64, rank=512, rope_dim=64, dtype="float16")
    assert cache.nbytes == 64 * 31_104  # bytes per token of DeepSeek-V2-Lite
    plain = HeadCache(num_layers=48, max_tokens=64, num_kv_heads=4, head_dim=128, dtype="float16")
    assert plain.nbytes == 64 * 98_304  # of Qwen3-30B-A3B


@CACHES
def test_impossible_cuts_and_foreign_snapshots_are_refused(make: Callable[[int], Any]) -> None:
    cache, other = make(4), make(4)
    with pytest.raises(RequestError, match="cannot cut a cache of 0 tokens to 1"):
        cache.truncate(1)
    with pytest.raises(RequestError, match="the cache that made it"):
        cache.restore(other.snapshot())
