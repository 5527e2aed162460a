"""F16: IEEE 754 binary16, little-endian; one value is a block of 2 bytes.

    byte 0..1   value: sign 1, exponent 5, fraction 10 bits

Widening is exact, subnormals included.
"""

from __future__ import annotations

from expertide.formats.quants.base import Bytes, Floats, QuantType


class F16(QuantType):
    name = "F16"
    ggml_id = 1
    block_size = 1
    block_bytes = 2

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        values[:] = blocks.view("<f2")
