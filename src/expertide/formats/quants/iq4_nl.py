"""IQ4_NL: 32 nibbles that index a table of 16 unevenly spaced numbers, and one scale; 18 bytes a block.

    byte 0..1    scale, float16 little-endian
    byte 2..17   byte 2+i: low nibble q[i], high nibble q[i+16]      i = 0..15

    value[i] = scale * LEVELS[q[i]]

Source: block_iq4_nl and kvalues_iq4nl in ggml/src/ggml-common.h.
"""

from __future__ import annotations

import numpy as np

from expertide.formats.quants.base import Bytes, Floats, QuantType, halves, nibbles

LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


class IQ4_NL(QuantType):
    name = "IQ4_NL"
    ggml_id = 20
    block_size = 32
    block_bytes = 18

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        q = nibbles(blocks[:, 2:]).reshape(-1, 32)
        values[:] = LEVELS[q]
        values *= halves(blocks, 0)
