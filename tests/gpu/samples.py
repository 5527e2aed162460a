"""Random matrices on the device under test beside what they mean, and the comparison of results."""

from __future__ import annotations

import numpy as np
import torch
from tests.packed_samples import random_weights

from expertide.formats import quants
from expertide.kernels.gpu.matrix import GpuMatrix
from expertide.kernels.qtensor import QTensor

# Sums of a few thousand products in float32 differ by their order: some units in the sixth decimal of the largest.
FLOAT32_SUMS = 1e-5
# Activations beside packed weights are rounded to 15 bits in groups of 16: 2**-15 of the group's largest at most, and
# errors mostly cancel; but so may the products themselves, in sums of one block.
WHOLE_PRODUCTS = 3e-4
# Tensor cores take float16: activations and weights are off by 2**-12 of themselves each, and errors of many terms
# mostly cancel. Half of what is promised of a product.
FLOAT16_PRODUCTS = 2.5e-3


def matrix(name: str, rows: int, cols: int, device: str, seed: int = 0) -> tuple[GpuMatrix, QTensor]:
    """The same random matrix on the device and in host memory; `cols` in blocks for types that have some."""
    quant = quants.by_name(name)
    raw = random_weights(quant, rows, cols, seed)
    w = QTensor.from_array(raw, quant, (rows, cols))
    return GpuMatrix.from_qtensor(w, device), w


def width(name: str, num_blocks: int, odd: int) -> int:
    """Values of a row of `num_blocks` blocks; `odd` for plain numbers."""
    quant = quants.by_name(name)
    return odd if quant.block_size == 1 else num_blocks * quant.block_size


def normal(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def assert_close(found: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    """No difference above `relative` times the largest expected value."""
    found = found.cpu()
    assert found.shape == expected.shape and found.dtype == torch.float32
    difference = (found - expected).abs()
    worst = int(difference.argmax())
    limit = relative * expected.abs().max()
    assert bool((difference <= limit).all()), (
        f"value {worst}: {found.flatten()[worst]:.6g}, expected {expected.flatten()[worst]:.6g}; "
        f"off by {difference.max() / expected.abs().max():.2e} of the largest, at most {relative:.0e}"
    )
