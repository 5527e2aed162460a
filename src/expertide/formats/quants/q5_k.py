"""Q5_K: 256 unsigned five-bit numbers in 8 groups of 32, each with a 6-bit scale and minimum; 176 bytes a block.

    byte 0..15     d, dmin, scales and minima as in Q4_K
    byte 16..47    fifth bits: bit g of byte l is bit 4 of q[32g + l]      g = 0..7, l = 0..31
    byte 48..175   four runs of 32 bytes; byte l of run r: low nibble q[64r + l] & 15, high nibble q[64r + 32 + l] & 15

    value[i] = (d * scale[g]) * q[i] - dmin * min[g]      g = i // 32

Source: block_q5_K in ggml/src/ggml-common.h.
"""

from __future__ import annotations

from expertide.formats.quants.base import Bytes, Floats, QuantType, bit_planes, nibbles
from expertide.formats.quants.q4_k import scales_and_minima


class Q5_K(QuantType):
    name = "Q5_K"
    ggml_id = 13
    block_size = 256
    block_bytes = 176

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        scales, minima = scales_and_minima(blocks)
        q = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
        fifth = bit_planes(blocks[:, 16:48], width=1)
        fifth <<= 4
        q |= fifth
        groups = values.reshape(-1, 8, 32)
        groups[:] = q
        groups *= scales[:, :, None]
        groups -= minima[:, :, None]
