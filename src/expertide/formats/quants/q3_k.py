"""Q3_K: 256 three-bit numbers in 16 groups of 16, each with a 6-bit scale around 32; 110 bytes a block.

    byte 0..31     third bits: bit 4h+j of byte l belongs to value 128h + 32j + l; it is CLEAR where 4 is taken off
    byte 32..95    two runs of 32 bytes; bits 2j, 2j+1 of byte l of run h are the lower bits of value 128h + 32j + l
    byte 96..107   sixteen 6-bit scales, A..P for groups 0..15:
                     byte 0..7     IA JB KC LD ME NF OG PH    high nibble, low nibble: lower 4 bits
                     byte 8..11    MIEA NJFB OKGC PLHD        2 bits each, highest first: upper 2 bits
    byte 108..109  d, float16 little-endian

    value[i] = (d * (scale[g] - 32)) * (low[i] - (0 if bit[i] else 4))      g = i // 16

Source: block_q3_K in ggml/src/ggml-common.h.
"""

from __future__ import annotations

import numpy as np

from expertide.formats.quants.base import Bytes, Floats, QuantType, bit_planes, halves, nibbles


class Q3_K(QuantType):
    name = "Q3_K"
    ggml_id = 11
    block_size = 256
    block_bytes = 110

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        scales = nibbles(blocks[:, 96:104]).reshape(-1, 16)
        scales |= bit_planes(blocks[:, 104:108], width=2).reshape(-1, 16) << np.uint8(4)
        scale = halves(blocks, 108) * (scales.view(np.int8) - np.int8(32)).astype(np.float32)

        q = bit_planes(blocks[:, 32:96].reshape(-1, 2, 32), width=2).reshape(-1, 256)
        third = bit_planes(blocks[:, :32], width=1).reshape(-1, 256)
        # low + 4 * bit - 4 is the drawing's formula without a branch.
        third <<= 2
        q += third
        groups = values.reshape(-1, 16, 16)
        np.subtract(q.view(np.int8).reshape(-1, 16, 16), np.int8(4), out=groups)
        groups *= scale[:, :, None]
