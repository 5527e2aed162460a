"""F32: plain IEEE 754 binary32, little-endian; one value is a block of 4 bytes.

byte 0..3   value
"""

from __future__ import annotations

from expertide.formats.quants.base import Bytes, Floats, QuantType


class F32(QuantType):
    name = "F32"
    ggml_id = 0
    block_size = 1
    block_bytes = 4

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        values[:] = blocks.view("<f4")
