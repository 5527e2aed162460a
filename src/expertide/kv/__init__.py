"""State a sequence leaves behind per layer: an interface, as not every model keeps a plain list of keys and values.

Knows tensors and token counts; knows no model, request or text.
"""

from __future__ import annotations

from typing import Protocol


class Snapshot(Protocol):
    """A point to return to. Opaque; belongs to the cache that made it."""

    @property
    def length(self) -> int: ...


class KVCache(Protocol):
    """What the engine may do with any model's state. Layers write through the concrete class (`LatentCache.append`).

    A forward pass appends to every layer, then calls `advance` once; a pass that fails half-way leaves `length` as it
    was, and the next pass overwrites what it left.
    """

    @property
    def length(self) -> int:
        """Tokens held; also the position of the next one."""
        ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Memory held, filled or not."""
        ...

    def advance(self, num_tokens: int) -> None:
        """Count tokens that every layer has appended."""
        ...

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on.

        Raises:
            RequestError: this kind of state cannot be cut back to there (use snapshot and restore).
        """
        ...

    def snapshot(self) -> Snapshot:
        """A point that `restore` returns to. For state that cannot be cut back (recurrent layers, windows).

        Nobody calls the two yet: the engine cuts lists of rows back with `truncate`. They are here so that such a model
        is one more class, not another interface.
        """
        ...

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of this cache; later ones become invalid."""
        ...
