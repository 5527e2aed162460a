"""Activations in the forms in which products take them, each made once and shared by the matrices that read them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from expertide.formats.quants.base import QuantType
from expertide.kernels.gpu.device import packed, tiles

_PACK_GROUPS = 32  # groups of 16 values of one program

# Triton's interpreter has no inline assembly: there dot4 multiplies byte by byte, with the same whole numbers.
IS_INTERPRETED = isinstance(packed.pack_kernel, InterpretedFunction)


def is_plain(quant: QuantType) -> bool:
    """Whether a type stores numbers one by one; products with it read activations as float32."""
    return quant.block_size == 1


class Activations:
    """Rows of float32: x [..., I].

    A packed form is made at first use and kept; `x` must not change after that.
    """

    def __init__(self, x: Tensor) -> None:
        assert x.dtype == torch.float32
        self.x = x.contiguous()
        self._packed: Tensor | None = None
        self._half: tuple[Tensor, Tensor] | None = None

    @property
    def cols(self) -> int:
        return self.x.shape[-1]

    @property
    def num_rows(self) -> int:
        return self.x.numel() // self.cols if self.cols else 0

    def row_operand(self, quant: QuantType) -> tuple[Tensor, int]:
        """What token-by-token products with a matrix of this type read, and the step from one row to the next."""
        if is_plain(quant):
            return self.x, self.cols
        assert self.cols % 32 == 0
        stride = self.cols // 2 * 5
        if self._packed is None:
            self._packed = torch.empty(self.num_rows * stride, dtype=torch.uint8, device=self.x.device)
            if self.num_rows:
                packed.pack_kernel[(triton.cdiv(self.cols // 16, _PACK_GROUPS), self.num_rows)](
                    self.x, self._packed, self.cols, GROUPS=_PACK_GROUPS, num_warps=4
                )
        return self._packed, stride

    def tile_operand(self, quant: QuantType) -> tuple[Tensor, Tensor]:
        """What tiles with a matrix of this type read: x in rows, and the factor [rows] of each row of results.

        float16, scaled by a power of two per row, for packed weights. Weights of float32 (the router's) are multiplied
        as they are.
        """
        if quant.name == "F32":
            return self.x, torch.ones(self.num_rows, dtype=torch.float32, device=self.x.device)
        if self._half is None:
            half = torch.empty(self.x.shape, dtype=torch.float16, device=self.x.device)
            scale = torch.empty(self.num_rows, dtype=torch.float32, device=self.x.device)
            if self.num_rows:
                block = min(1024, triton.next_power_of_2(self.cols))
                tiles.to_half_kernel[(self.num_rows,)](self.x, half, scale, self.cols, BLOCK=block, num_warps=4)
            self._half = half, scale
        return self._half


def activations(x: Tensor | Activations) -> Activations:
    return x if isinstance(x, Activations) else Activations(x)
