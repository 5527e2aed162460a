"""IQ4_XS: 256 nibbles that index IQ4_NL's table, in 8 groups of 32 with a 6-bit scale around 32; 136 bytes a block.

    byte 0..1     d, float16 little-endian
    byte 2..3     upper 2 bits of the scales: bits 2g, 2g+1 of the 16-bit little-endian word      g = 0..7
    byte 4..7     lower 4 bits of the scales: byte 4+k: low nibble group 2k, high nibble group 2k+1
    byte 8..135   eight runs of 16 bytes; byte l of run g: low nibble q[32g + l], high nibble q[32g + 16 + l]

    value[i] = (d * (scale[g] - 32)) * LEVELS[q[i]]      g = i // 32

Source: block_iq4_xs in ggml/src/ggml-common.h.
"""

from __future__ import annotations

import numpy as np

from expertide.formats.quants.base import Bytes, Floats, QuantType, halves, nibbles
from expertide.formats.quants.iq4_nl import LEVELS


class IQ4_XS(QuantType):
    name = "IQ4_XS"
    ggml_id = 23
    block_size = 256
    block_bytes = 136

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        # Each byte of the upper bits serves four groups, each byte of the lower bits two.
        upper = (blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8)).reshape(-1, 8) & 0x03
        lower = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(-1, 8) & 0x0F
        scales = (lower | (upper << np.uint8(4))).view(np.int8) - np.int8(32)
        groups = values.reshape(-1, 8, 32)
        groups[:] = LEVELS[nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32)]
        groups *= (halves(blocks, 0) * scales.astype(np.float32))[:, :, None]
