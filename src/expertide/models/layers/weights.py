"""Loaded weights by the names an architecture file uses, in the form that layers take them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from expertide.formats.tensors import TensorInfo
from expertide.kernels.ops import Kernels
from expertide.kernels.qtensor import QTensor
from expertide.models.layers.ffn import SwiGLU


class LayerWeights:
    """
    Args:
        resident: name -> the tensor that stands for it (another one where a file leaves a copy out).
        weights: loaded tensors by their own names.
    """

    def __init__(self, resident: Mapping[str, TensorInfo], weights: Mapping[str, QTensor]) -> None:
        self._resident = resident
        self._weights = weights

    def matrix(self, name: str) -> QTensor:
        """Packed, as it is in the file."""
        return self._weights[self._resident[name].name]

    def vector(self, name: str) -> Tensor:
        """Decoded, float32."""
        return torch.from_numpy(self.matrix(name).decode().copy())

    def swiglu(self, blk: str, suffix: str, kernels: Kernels) -> SwiGLU:
        """The group that `tensor_groups.take_swiglu` took."""
        gate, up, down = (self.matrix(f"{blk}ffn_{part}{suffix}.weight") for part in ("gate", "up", "down"))
        return SwiGLU(gate, up, down, kernels)
