"""Q6_K: 256 six-bit numbers around 32 in 16 groups of 16, each with a signed byte scale; 210 bytes a block.

    byte 0..127     lower 4 bits: two runs of 64 bytes, run h for values 128h .. 128h+127:
                      byte l:      low nibble value l,       high nibble value 64 + l       (l = 0..31)
                      byte 32+l:   low nibble value 32 + l,  high nibble value 96 + l
    byte 128..191   upper 2 bits: two runs of 32 bytes; bits 2j, 2j+1 of byte l of run h: value 128h + 32j + l
    byte 192..207   scale[0..15], int8
    byte 208..209   d, float16 little-endian

    value[i] = (d * scale[g]) * (q[i] - 32)      g = i // 16

Source: block_q6_K in ggml/src/ggml-common.h.
"""

from __future__ import annotations

import numpy as np

from expertide.formats.quants.base import Bytes, Floats, QuantType, bit_planes, halves, nibbles


class Q6_K(QuantType):
    name = "Q6_K"
    ggml_id = 14
    block_size = 256
    block_bytes = 210

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        scales = halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
        q = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
        upper = bit_planes(blocks[:, 128:192].reshape(-1, 2, 32), width=2).reshape(-1, 256)
        upper <<= 4
        q |= upper
        groups = values.reshape(-1, 16, 16)
        np.subtract(q.view(np.int8).reshape(-1, 16, 16), np.int8(32), out=groups)
        groups *= scales[:, :, None]
