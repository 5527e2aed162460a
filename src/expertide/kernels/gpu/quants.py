"""The numbers by which the kernels are compiled for a quant type."""

from __future__ import annotations

from typing import NamedTuple

from expertide.formats.quants.base import QuantType
from expertide.kernels.gpu.layout import planes_of

CHUNK = 16  # bytes of the quant plane that one thread loads at once; for plain numbers, values

# What is taken off the unsigned codes of the types that have no minimum: `CENTRE` in device/decode.py.
_CENTRES = {"Q4_0": 8, "Q5_0": 16, "Q3_K": 4, "Q6_K": 32}
_PARTS = {"F32": 1, "F16": 1, "BF16": 1, "Q8_0": 1, "Q2_K": 4, "Q3_K": 4}
_CHUNKS_PER_BLOCK = {"Q8_0": 2, "Q2_K": 4, "Q3_K": 4, "Q4_K": 8, "Q5_K": 8, "Q6_K": 8, "IQ4_XS": 8}


class QuantConstants(NamedTuple):
    """See the table in `device/decode.py`."""

    type_id: int
    parts: int
    per_block: int
    centre: int


def constants_of(quant: QuantType) -> QuantConstants:
    """Raises UnsupportedError for a type without a device layout."""
    planes_of(quant)
    name = quant.name
    return QuantConstants(quant.ggml_id, _PARTS.get(name, 2), _CHUNKS_PER_BLOCK.get(name, 1), _CENTRES.get(name, 0))


def chunks_per_row(quant: QuantType, cols: int) -> int:
    """Chunks of a row; the last of a row of plain numbers may be partly filled."""
    if quant.block_size == 1:
        return -(-cols // CHUNK)
    return cols // quant.block_size * constants_of(quant).per_block
