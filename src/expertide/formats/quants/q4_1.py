"""Q4_1: 32 unsigned nibbles, one scale and one minimum, 20 bytes a block; value[i] = scale * q[i] + min.

    byte 0..1    scale, float16 little-endian
    byte 2..3    min, float16
    byte 4..19   byte 4+i: low nibble q[i], high nibble q[i+16]      i = 0..15

Source: block_q4_1 in ggml/src/ggml-common.h.
"""

from __future__ import annotations

from expertide.formats.quants.base import Bytes, Floats, QuantType, halves, nibbles


class Q4_1(QuantType):
    name = "Q4_1"
    ggml_id = 3
    block_size = 32
    block_bytes = 20

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        values[:] = nibbles(blocks[:, 4:]).reshape(-1, 32)
        values *= halves(blocks, 0)
        values += halves(blocks, 2)
