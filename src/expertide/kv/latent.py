"""Latent attention's cache: per layer and token one row [latent after its norm | rotated key], shared by all heads.

    rows_LTW  [layers, max_tokens, rank + rope_dim]      row = position

A plain list of rows: cutting back is setting a number. All memory is touched when the cache is made, so that what the
plan reserved is what a measurement sees.
"""

from __future__ import annotations

from torch import Tensor

from expertide.kernels.fused import CacheRows
from expertide.kv.rows import RowCache, filled


class LatentCache(RowCache):
    """Implements `kv.KVCache`. Owned by one sequence; one thread at a time."""

    def __init__(self, *, num_layers: int, max_tokens: int, rank: int, rope_dim: int, dtype: str) -> None:
        """
        Args:
            rank: L, values of the latent.
            rope_dim: C, values of the rotated key.
            dtype: "float16" or "float32".
        """
        self._rank = rank
        self._rows = filled((num_layers, max_tokens, rank + rope_dim), dtype)
        super().__init__(max_tokens, self._rows)
        width, value_bytes = rank + rope_dim, self._rows.element_size()
        self._places = [
            CacheRows(address, address + rank * value_bytes, width, width, dtype == "float16")
            for address in (layer.data_ptr() for layer in self._rows)
        ]

    def append(self, layer_index: int, latent_TL: Tensor, k_rope_TC: Tensor) -> None:
        """Write the rows of the step's tokens behind the tokens held; `advance` makes them count.

        The caller has checked that there is room.
        """
        begin, end = self.length, self.length + latent_TL.shape[0]
        assert end <= self.max_tokens
        rows = self._rows[layer_index, begin:end]
        rows[:, : self._rank] = latent_TL
        rows[:, self._rank :] = k_rope_TC

    def view(self, layer_index: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """(latent [num_tokens, L], rotated keys [num_tokens, C]) of one layer; views, appended rows included."""
        rows = self._rows[layer_index, :num_tokens]
        return rows[:, : self._rank], rows[:, self._rank :]

    def rows(self, layer_index: int) -> CacheRows:
        """Where a layer's rows lie, for ops that write and read them in place. Valid as long as the cache lives."""
        return self._places[layer_index]
