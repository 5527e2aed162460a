"""Types known by name and size only: tensors that hold them are listed and checked, but cannot be decoded.

A file may carry such tensors beside those a model needs (token tables of integers), and `inspect` shows any file. The
error comes when somebody wants their values. Sizes: GGML_QUANT_SIZES in the `gguf` package; for safetensors the
format's own table of dtypes.

A type that gets a decoder may keep its line here: the decoder wins.
"""

from __future__ import annotations

from expertide.errors import UnsupportedError
from expertide.formats.quants import QUANT_TYPES
from expertide.formats.quants.base import Bytes, Floats, QuantType


class OpaqueType(QuantType):
    can_decode = False

    def __init__(self, name: str, ggml_id: int, block_size: int, block_bytes: int) -> None:
        self.name = name
        self.ggml_id = ggml_id
        self.block_size = block_size
        self.block_bytes = block_bytes

    def decode(self, raw: Bytes) -> Floats:
        raise UnsupportedError(f"type {self.name} has no decoder in expertide/formats/quants")

    def _decode_blocks(self, blocks: Bytes, values: Floats) -> None:
        raise AssertionError("decode() refuses before")


_GGML_OTHERS = (
    OpaqueType("Q8_1", 9, 32, 40),
    OpaqueType("Q8_K", 15, 256, 292),
    OpaqueType("IQ2_XXS", 16, 256, 66),
    OpaqueType("IQ2_XS", 17, 256, 74),
    OpaqueType("IQ3_XXS", 18, 256, 98),
    OpaqueType("IQ1_S", 19, 256, 50),
    OpaqueType("IQ3_S", 21, 256, 110),
    OpaqueType("IQ2_S", 22, 256, 82),
    OpaqueType("I8", 24, 1, 1),
    OpaqueType("I16", 25, 1, 2),
    OpaqueType("I32", 26, 1, 4),
    OpaqueType("I64", 27, 1, 8),
    OpaqueType("F64", 28, 1, 8),
    OpaqueType("IQ1_M", 29, 256, 56),
    OpaqueType("TQ1_0", 34, 256, 54),
    OpaqueType("TQ2_0", 35, 256, 66),
    OpaqueType("NVFP4", 40, 64, 36),
    OpaqueType("Q1_0", 41, 128, 18),
)
# Those without a decoder, by their number in GGUF files.
GGML_OPAQUE: dict[int, OpaqueType] = {
    quant.ggml_id: quant for quant in _GGML_OTHERS if quant.ggml_id not in QUANT_TYPES
}
