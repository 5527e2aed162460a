"""The plain cache: per layer, token and key/value head one key, rotated, and one value.

keys, values  [layers, G, max_tokens, D]      row = position; the rows of one head follow each other
"""

from __future__ import annotations

from torch import Tensor

from expertide.kernels.fused import HeadRows
from expertide.kv.rows import RowCache, filled


class HeadCache(RowCache):
    """Implements `kv.KVCache`. Owned by one sequence; one thread at a time."""

    def __init__(self, *, num_layers: int, max_tokens: int, num_kv_heads: int, head_dim: int, dtype: str) -> None:
        """
        Args:
            num_kv_heads: G.
            head_dim: D.
            dtype: "float16" or "float32".
        """
        shape = (num_layers, num_kv_heads, max_tokens, head_dim)
        self._keys, self._values = filled(shape, dtype), filled(shape, dtype)
        super().__init__(max_tokens, self._keys, self._values)
        head = max_tokens * head_dim
        self._places = [
            HeadRows(keys.data_ptr(), values.data_ptr(), head_dim, head_dim, head, head, dtype == "float16")
            for keys, values in zip(self._keys, self._values, strict=True)
        ]

    def append(self, layer_index: int, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Write the rows of the step's tokens behind the tokens held; `advance` makes them count.

        The caller has checked that there is room.
        """
        begin, end = self.length, self.length + k_TGD.shape[0]
        assert end <= self.max_tokens
        self._keys[layer_index, :, begin:end] = k_TGD.transpose(0, 1)
        self._values[layer_index, :, begin:end] = v_TGD.transpose(0, 1)

    def view(self, layer_index: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of one layer, each [G, num_tokens, D]; views, appended rows included."""
        return self._keys[layer_index, :, :num_tokens], self._values[layer_index, :, :num_tokens]

    def rows(self, layer_index: int) -> HeadRows:
        """Where a layer's rows lie, for ops that write and read them in place. Valid as long as the cache lives."""
        return self._places[layer_index]
