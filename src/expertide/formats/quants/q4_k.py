"""Q4_K: 256 unsigned nibbles in 8 groups of 32, each with a 6-bit scale and a 6-bit minimum; 144 bytes a block.

    byte 0..1      d, float16 little-endian
    byte 2..3      dmin, float16
    byte 4..15     8 scales A..H and 8 minima a..h of 6 bits, highest bit first:
                     byte 0..3    EEAAAAAA FFBBBBBB GGCCCCCC HHDDDDDD
                     byte 4..7    eeaaaaaa ffbbbbbb ggcccccc hhdddddd      EE, ee: bits 4, 5 of E, e
                     byte 8..11   eeeeEEEE ffffFFFF ggggGGGG hhhhHHHH      bits 0..3
    byte 16..143   four runs of 32 bytes; byte l of run r: low nibble q[64r + l], high nibble q[64r + 32 + l]

    value[i] = (d * scale[g]) * q[i] - dmin * min[g]      g = i // 32

Source: block_q4_K in ggml/src/ggml-common.h, get_scale_min_k4 in ggml/src/ggml-quants.c.
"""

from __future__ import annotations

import numpy as np

from expertide.formats.quants.base import Bytes, Floats, QuantType, halves, nibbles


def scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """d * scale and dmin * min of the first 16 bytes of `blocks`, which Q4_K and Q5_K share: float32 [n, 8] each."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minima = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], axis=1)
    return halves(blocks, 0) * scales.astype(np.float32), halves(blocks, 2) * minima.astype(np.float32)


class Q4_K(QuantType):
    name = "Q4_K"
    ggml_id = 12
    block_size = 256
    block_bytes = 144

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        scales, minima = scales_and_minima(blocks)
        groups = values.reshape(-1, 8, 32)
        groups[:] = nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
        groups *= scales[:, :, None]
        groups -= minima[:, :, None]
