"""Q5_1: 32 unsigned five-bit numbers, one scale and one minimum, 24 bytes a block; value[i] = scale * q[i] + min.

    byte 0..1    scale, float16 little-endian
    byte 2..3    min, float16
    byte 4..7    fifth bits: bit i of the 32-bit little-endian word is bit 4 of q[i]
    byte 8..23   byte 8+i: low nibble q[i] & 15, high nibble q[i+16] & 15      i = 0..15

Source: block_q5_1 in ggml/src/ggml-common.h.
"""

from __future__ import annotations

from expertide.formats.quants.base import Bytes, Floats, QuantType, halves
from expertide.formats.quants.q5_0 import five_bits


class Q5_1(QuantType):
    name = "Q5_1"
    ggml_id = 7
    block_size = 32
    block_bytes = 24

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        values[:] = five_bits(blocks[:, 4:])
        values *= halves(blocks, 0)
        values += halves(blocks, 2)
