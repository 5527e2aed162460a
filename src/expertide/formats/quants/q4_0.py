"""Q4_0: 32 unsigned nibbles around 8 and one scale, 18 bytes a block; value[i] = scale * (q[i] - 8).

    byte 0..1    scale, float16 little-endian
    byte 2..17   byte 2+i: low nibble q[i], high nibble q[i+16]      i = 0..15

Source: block_q4_0 in ggml/src/ggml-common.h.
"""

from __future__ import annotations

import numpy as np

from expertide.formats.quants.base import Bytes, Floats, QuantType, halves, nibbles


class Q4_0(QuantType):
    name = "Q4_0"
    ggml_id = 2
    block_size = 32
    block_bytes = 18

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        q = nibbles(blocks[:, 2:]).reshape(-1, 32)
        np.subtract(q.view(np.int8), np.int8(8), out=values)
        values *= halves(blocks, 0)
