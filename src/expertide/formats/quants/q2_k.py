"""Q2_K: 256 two-bit numbers in 16 groups of 16, each with a 4-bit scale and a 4-bit minimum; 84 bytes a block.

    byte 0..15    byte g: low nibble scale[g], high nibble min[g]      g = i // 16
    byte 16..79   two runs of 32 bytes; run h holds values 128h .. 128h+127:
                  bits 2j, 2j+1 of byte l of the run are q[128h + 32j + l]      j = 0..3, l = 0..31
    byte 80..81   d, float16 little-endian
    byte 82..83   dmin, float16

    value[i] = (d * scale[g]) * q[i] - dmin * min[g]

Source: block_q2_K in ggml/src/ggml-common.h.
"""

from __future__ import annotations

import numpy as np

from expertide.formats.quants.base import Bytes, Floats, QuantType, bit_planes, halves


class Q2_K(QuantType):
    name = "Q2_K"
    ggml_id = 10
    block_size = 256
    block_bytes = 84

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        packed = blocks[:, :16]
        scales = halves(blocks, 80) * (packed & 0x0F).astype(np.float32)
        minima = halves(blocks, 82) * (packed >> 4).astype(np.float32)
        groups = values.reshape(-1, 16, 16)
        groups[:] = bit_planes(blocks[:, 16:80].reshape(-1, 2, 32), width=2).reshape(-1, 16, 16)
        groups *= scales[:, :, None]
        groups -= minima[:, :, None]
