"""How a packed matrix lies on a device: the bytes of the file, permuted into planes where its blocks are awkward.

Blocks of 22, 34 or 210 bytes start at odd addresses and would be read two bytes at a time. On a device such a matrix is
cut into planes: the same part of every block, block after block, row after row; then the next part.

    file     [d q...q][d q...q][d q...q]        one block after the other
    device   [q...q q...q q...q][d d d]         planes one after the other, widest alignment first

Every plane starts at a multiple of its own element size as long as the matrix starts at a multiple of 16, and a thread
reads 16 quant bytes at once. Not one byte is added or lost, so a matrix takes the same place in a slot in either form,
and a type whose blocks are multiples of 16 bytes, or plain numbers, stays as it is in the file.

`device/decode.py` knows the same offsets as numbers; the tests of every type hold the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from expertide.errors import UnsupportedError
from expertide.formats.quants.base import QuantType

# (first byte, end) of each plane within a block of the file, in the order of the planes on the device.
Planes = tuple[tuple[int, int], ...]

_PLANES: Mapping[str, Planes] = MappingProxyType(
    {
        "F32": ((0, 4),),
        "F16": ((0, 2),),
        "BF16": ((0, 2),),
        "Q4_0": ((2, 18), (0, 2)),  # quants | scale
        "Q4_1": ((4, 20), (0, 4)),  # quants | scale and minimum
        "Q5_0": ((6, 22), (2, 6), (0, 2)),  # quants | fifth bits | scale
        "Q5_1": ((8, 24), (4, 8), (0, 4)),
        "Q8_0": ((2, 34), (0, 2)),
        "Q2_K": ((16, 80), (0, 16), (80, 84)),  # quants | group scales | d and dmin
        "Q3_K": ((32, 96), (0, 32), (96, 108), (108, 110)),  # quants | third bits | group scales | d
        "Q4_K": ((0, 144),),
        "Q5_K": ((0, 176),),
        "Q6_K": ((0, 128), (128, 192), (192, 208), (208, 210)),  # lower bits | upper bits | group scales | d
        "IQ4_NL": ((2, 18), (0, 2)),
        "IQ4_XS": ((8, 136), (0, 8)),  # quants | d and group scales
        "MXFP4": ((1, 17), (0, 1)),
    }
)


def planes_of(quant: QuantType) -> Planes:
    """The planes of a type.

    Raises:
        UnsupportedError: the GPU kernels do not know the type.
    """
    planes = _PLANES.get(quant.name)
    if planes is None:
        raise UnsupportedError(f"type {quant.name} has no layout on a GPU; known: {', '.join(_PLANES)}")
    return planes


def is_as_in_file(quant: QuantType) -> bool:
    """Whether the device layout is the file's own, so that nothing has to be permuted."""
    return len(planes_of(quant)) == 1


def to_device_layout(file_bytes: Tensor, quant: QuantType, *, out: Tensor | None = None) -> Tensor:
    """The bytes of one matrix in the order in which the kernels read them.

    Args:
        file_bytes: uint8, whole blocks in the order of the file, on any device; contiguous.
        out: uint8, as many bytes, contiguous, not the same memory; made if None.

    Returns:
        `out`, 1-D.
    """
    source, target = _checked(file_bytes, quant, out)
    blocks = source.view(-1, quant.block_bytes)
    begin = 0
    for first, end in planes_of(quant):
        size = len(blocks) * (end - first)
        target[begin : begin + size].view(len(blocks), end - first).copy_(blocks[:, first:end])
        begin += size
    return target


def to_file_layout(device_bytes: Tensor, quant: QuantType, *, out: Tensor | None = None) -> Tensor:
    """The exact inverse of `to_device_layout`."""
    source, target = _checked(device_bytes, quant, out)
    blocks = target.view(-1, quant.block_bytes)
    begin = 0
    for first, end in planes_of(quant):
        size = len(blocks) * (end - first)
        blocks[:, first:end] = source[begin : begin + size].view(len(blocks), end - first)
        begin += size
    return target


def _checked(given: Tensor, quant: QuantType, out: Tensor | None) -> tuple[Tensor, Tensor]:
    assert given.dtype == torch.uint8 and given.is_contiguous() and given.numel() % quant.block_bytes == 0
    target = torch.empty(given.numel(), dtype=torch.uint8, device=given.device) if out is None else out
    assert target.dtype == torch.uint8 and target.is_contiguous() and target.numel() == given.numel()
    assert given.numel() == 0 or target.data_ptr() != given.data_ptr()
    return given.view(-1), target.view(-1)
