"""MXFP4: 32 four-bit floats (e2m1) and one shared exponent byte (e8m0), 17 bytes a block.

    byte 0       e: the scale is 2**(e - 127)
    byte 1..16   byte 1+i: low nibble q[i], high nibble q[i+16]      i = 0..15

    q: sign 1, exponent 2, fraction 1 bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
    value[i] = 2**(e - 128) * DOUBLED[q[i]]

The table holds doubled, whole numbers and the scale is halved in turn, as in ggml. The halved scale of e = 0 and 1 is
subnormal (2**-128, 2**-127); e = 255, which OCP reserves for NaN, is simply 2**127 here. Code 8 is minus zero in OCP
and plus zero in ggml; we follow ggml, whose files these are.

Source: block_mxfp4 and kvalues_mxfp4 in ggml/src/ggml-common.h, ggml_e8m0_to_fp32_half in ggml/src/ggml-impl.h.
"""

from __future__ import annotations

import numpy as np

from expertide.formats.quants.base import Bytes, Floats, QuantType, nibbles

DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _halved_scales() -> Floats:
    exponents = np.arange(256, dtype=np.uint32)
    bits = (exponents - 1) << 23
    bits[:2] = 0x00200000, 0x00400000
    return bits.view(np.float32)


_HALVED_SCALES = _halved_scales()


class MXFP4(QuantType):
    name = "MXFP4"
    ggml_id = 39
    block_size = 32
    block_bytes = 17

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        values[:] = DOUBLED[nibbles(blocks[:, 1:]).reshape(-1, 32)]
        values *= _HALVED_SCALES[blocks[:, :1]]
