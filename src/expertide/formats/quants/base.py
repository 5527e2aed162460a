"""What every quant type says about itself. Plain numpy; one subclass per type, each in a file of this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from expertide.errors import FormatError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Blocks are decoded in groups of about this many values: a group's temporaries (1 MiB of float32 and less) then stay in
# the second-level cache, and decoding a large matrix needs no second copy of it.
_VALUES_PER_GROUP = 1 << 18


class QuantType(ABC):
    """A way to store a row of numbers as blocks of equal size. Instances are stateless singletons.

    Attributes:
        name: as ggml spells it: "Q4_K".
        ggml_id: the number in GGUF files; -1 for a type that GGUF does not have.
        block_size: values in a block.
        block_bytes: bytes of a block.
        can_decode: false for types that are only known by name and size, so that files holding them can be listed.
    """

    name: str
    ggml_id: int
    block_size: int
    block_bytes: int
    can_decode: bool = True

    def decode(self, raw: Bytes) -> Floats:
        """Exact values of whole blocks.

        Args:
            raw: uint8 [..., num_blocks * block_bytes], contiguous in the last axis.

        Returns:
            float32 [..., num_blocks * block_size], bit-identical to the `gguf` package, also where a scale is
            infinite or not a number. Always the caller's own copy.

        Raises:
            FormatError: the last axis does not hold whole blocks.
            UnsupportedError: the type is known only by name and size.
        """
        if raw.dtype != np.uint8:
            raise FormatError(f"{self.name}: blocks are decoded from bytes, not from {raw.dtype}")
        num_bytes = raw.shape[-1] if raw.ndim else 0
        if not raw.ndim or num_bytes % self.block_bytes:
            raise FormatError(f"{num_bytes:,} bytes do not divide into {self.name} blocks of {self.block_bytes} bytes")
        num_row_values = num_bytes // self.block_bytes * self.block_size
        blocks = raw.reshape(-1, self.block_bytes) if raw.size else raw.reshape(0, self.block_bytes)
        values = np.empty((blocks.shape[0], self.block_size), np.float32)
        step = max(1, _VALUES_PER_GROUP // self.block_size)
        # Infinite scales meet zeros and infinite minima here; the result (NaN) is what the format defines, not news.
        with np.errstate(invalid="ignore", over="ignore"):
            for begin in range(0, blocks.shape[0], step):
                self._decode_blocks(blocks[begin : begin + step], values[begin : begin + step])
        return values.reshape(*raw.shape[:-1], num_row_values)

    @abstractmethod
    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        """Write the values of `blocks` [n, block_bytes] to `values` [n, block_size]; rows of both are contiguous."""

    def row_bytes(self, num_values: int) -> int:
        """Bytes of a row of `num_values` values.

        Raises:
            FormatError: the row does not divide into blocks.
        """
        if num_values % self.block_size:
            raise FormatError(
                f"rows of {num_values:,} values do not divide into {self.name} blocks of {self.block_size}"
            )
        return num_values // self.block_size * self.block_bytes

    def __repr__(self) -> str:
        return self.name


def halves(blocks: Bytes, begin: int) -> Floats:
    """The float16 at byte `begin` of every block as float32 [n, 1]; exact, little-endian."""
    return blocks[:, begin : begin + 2].view("<f2").astype(np.float32)


def nibbles(packed: Bytes) -> Bytes:
    """Both halves of each byte: [n, m, w] -> [n, m, 2, w], all low nibbles of a run before its high ones."""
    out = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 0x0F, out=out[..., 0, :])
    np.right_shift(packed, 4, out=out[..., 1, :])
    return out


def bit_planes(packed: Bytes, width: int) -> Bytes:
    """Fields of `width` bits, lowest first: [n, m, w] -> [n, m, 8 / width, w]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    planes: Bytes = packed[..., None, :] >> shifts
    planes &= np.uint8((1 << width) - 1)
    return planes
