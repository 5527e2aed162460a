"""What caches of one row per layer and token have in common: row = position, and cutting back is setting a number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from expertide.errors import RequestError

_DTYPES = {"float16": torch.float16, "float32": torch.float32}


def filled(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Zeros in memory that is taken now, so that what the plan reserved is what a measurement sees.

    Args:
        dtype: "float16" or "float32".
    """
    return torch.empty(shape, dtype=_DTYPES[dtype]).fill_(0)


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """Everything before `length` is as it was when this was made."""

    owner: RowCache
    length: int


class RowCache:
    """Implements `kv.KVCache` but for the rows themselves. Owned by one sequence; one thread at a time."""

    def __init__(self, max_tokens: int, *rows: Tensor) -> None:
        """
        Args:
            rows: all memory of the cache.
        """
        self._max_tokens = max_tokens
        self._nbytes = sum(tensor.numel() * tensor.element_size() for tensor in rows)
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def advance(self, num_tokens: int) -> None:
        assert num_tokens >= 0 and self._length + num_tokens <= self._max_tokens
        self._length += num_tokens

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise RequestError(f"cannot cut a cache of {self._length:,} tokens to {length:,}")
        self._length = length

    def snapshot(self) -> RowSnapshot:
        return RowSnapshot(self, self._length)

    def restore(self, snapshot: object) -> None:
        if not isinstance(snapshot, RowSnapshot) or snapshot.owner is not self:
            raise RequestError("a snapshot can only be restored into the cache that made it")
        self.truncate(snapshot.length)
