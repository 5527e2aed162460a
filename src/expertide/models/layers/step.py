"""What lives for one forward pass and is handed to every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from expertide.kernels.rope import RopeSpec
from expertide.kv import KVCache
from expertide.models.architecture import Phase
from expertide.models.trace import Tracer


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over T tokens of one sequence.

    Attributes:
        token_ids_T: int64.
        first_position: of token 0; the cache holds everything before it.
        cos_TP, sin_TP: rotation of each position, float32, magnitude included.
        cache: made by the model whose layers see it; each kind of attention knows its own kind of cache.
        phase: for the statistics of expert requests.
        trace: None, or where every intermediate is recorded.
    """

    token_ids_T: Tensor
    first_position: int
    cos_TP: Tensor
    sin_TP: Tensor
    cache: KVCache
    phase: Phase
    trace: Tracer | None

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]

    def record(self, layer_id: int, op: str, tensor: Tensor) -> None:
        if self.trace is not None:
            self.trace.record(layer_id, op, tensor)


class Rotation:
    """Cosines and sines of positions; computed per step, since a table for 160k positions would take 40 MiB."""

    def __init__(self, spec: RopeSpec) -> None:
        self._frequencies_P = torch.from_numpy(spec.inverse_frequencies())  # float64: an angle at 160k keeps 9 digits
        self._magnitude = spec.magnitude

    def at(self, first_position: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions first_position … + num_tokens - 1, float32 [T, P]."""
        positions = torch.arange(first_position, first_position + num_tokens, dtype=torch.float64)
        angles = torch.outer(positions, self._frequencies_P)
        cos, sin = angles.cos(), angles.sin()
        if self._magnitude != 1.0:
            cos, sin = cos * self._magnitude, sin * self._magnitude
        return cos.to(torch.float32), sin.to(torch.float32)
