"""BF16: the upper half of a binary32, little-endian; one value is a block of 2 bytes.

    byte 0..1   bits 16..31 of the float32: sign 1, exponent 8, fraction 7 bits; the lower 16 bits are zero

Source: ggml_compute_bf16_to_fp32 in ggml/src/ggml-impl.h.
"""

from __future__ import annotations

import numpy as np

from expertide.formats.quants.base import Bytes, Floats, QuantType


class BF16(QuantType):
    name = "BF16"
    ggml_id = 30
    block_size = 1
    block_bytes = 2

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        # On the bit patterns, not on floats: a signalling NaN passes unchanged.
        np.left_shift(blocks.view("<u2"), np.uint32(16), out=values.view(np.uint32), dtype=np.uint32)
