"""Q5_0: 32 unsigned five-bit numbers around 16 and one scale, 22 bytes a block; value[i] = scale * (q[i] - 16).

    byte 0..1    scale, float16 little-endian
    byte 2..5    fifth bits: bit i of the 32-bit little-endian word is bit 4 of q[i]
    byte 6..21   byte 6+i: low nibble q[i] & 15, high nibble q[i+16] & 15      i = 0..15

Source: block_q5_0 in ggml/src/ggml-common.h.
"""

from __future__ import annotations

import numpy as np

from expertide.formats.quants.base import Bytes, Floats, QuantType, halves, nibbles


def five_bits(packed: Bytes) -> Bytes:
    """q[0..31] of the 4 + 16 bytes `packed` [n, 20] that Q5_0 and Q5_1 share: uint8 [n, 32]."""
    q = nibbles(packed[:, 4:]).reshape(-1, 32)
    fifth = np.unpackbits(packed[:, :4], axis=-1, bitorder="little")
    fifth <<= 4
    q |= fifth
    return q


class Q5_0(QuantType):
    name = "Q5_0"
    ggml_id = 6
    block_size = 32
    block_bytes = 22

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        np.subtract(five_bits(blocks[:, 2:]).view(np.int8), np.int8(16), out=values)
        values *= halves(blocks, 0)
