"""Q8_0: 32 signed bytes and one scale, 34 bytes a block; value[i] = scale * q[i].

    byte 0..1    scale, float16 little-endian
    byte 2..33   q[0..31], int8

Source: block_q8_0 in ggml/src/ggml-common.h.
"""

from __future__ import annotations

import numpy as np

from expertide.formats.quants.base import Bytes, Floats, QuantType, halves


class Q8_0(QuantType):
    name = "Q8_0"
    ggml_id = 8
    block_size = 32
    block_bytes = 34

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        values[:] = blocks[:, 2:].view(np.int8)
        values *= halves(blocks, 0)
