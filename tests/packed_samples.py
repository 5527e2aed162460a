"""Random packed weights of every type, for tests with and without the native module."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertide.formats import quants
from expertide.formats.quants.base import QuantType

ALL_TYPES = tuple(quants.QUANT_TYPES.values())
TYPE_NAMES = tuple(quant.name for quant in ALL_TYPES)

# Where each type keeps its float16 scales, in bytes from the start of a block.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def random_weights(quant: QuantType, rows: int, cols: int, seed: int = 0) -> NDArray[np.uint8]:
    """Packed rows [rows, row_bytes]: every bit random, except that scales are those of a real matrix."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(0.05)
    if quant.name == "F32":
        return values.view(np.uint8)
    if quant.name == "F16":
        return values.astype(np.float16).view(np.uint8)
    if quant.name == "BF16":
        return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
    num_blocks = cols // quant.block_size
    raw = rng.integers(0, 256, (rows, num_blocks, quant.block_bytes), dtype=np.uint8)
    if quant.name == "MXFP4":
        raw[:, :, 0] = rng.integers(118, 124, (rows, num_blocks))
    for offset in SCALES.get(quant.name, ()):
        scale = rng.uniform(0.001, 0.02, (rows, num_blocks, 1)).astype(np.float16)
        raw[:, :, offset : offset + 2] = scale.view(np.uint8)
    return raw.reshape(rows, num_blocks * quant.block_bytes)
