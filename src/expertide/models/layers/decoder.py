"""A pre-norm decoder: embedding, layers of attention and feed-forward on one residual stream, final norm, output.

The residual stream is float32: DeepSeek-V2-Lite's early layers put values above 1,000 on it; float16 could overflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from expertide.errors import NumericsError, RequestError
from expertide.kernels.ops import Kernels
from expertide.kernels.qtensor import QTensor
from expertide.kv import KVCache
from expertide.models.architecture import Phase
from expertide.models.layers.ffn import FeedForward
from expertide.models.layers.step import Rotation, Step
from expertide.models.trace import NO_LAYER, Tracer


class Attention(Protocol):
    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        """Append the step's tokens to the cache and attend; x_TH is already normed."""
        ...


class CacheMaker(Protocol):
    def __call__(self, *, max_tokens: int) -> KVCache:
        """The empty cache of one sequence, of the kind that this model's attention layers write."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights and parts of one layer."""

    attention_norm: Tensor
    attention: Attention
    ffn_norm: Tensor
    ffn: FeedForward


class DecoderModel:
    """Implements `architecture.Model`."""

    def __init__(
        self,
        *,
        embedding: QTensor,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        output: QTensor,
        norm_eps: float,
        rotation: Rotation,
        make_cache: CacheMaker,
        kernels: Kernels,
    ) -> None:
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._output = output
        self._eps = norm_eps
        self._rotation = rotation
        self._make_cache = make_cache
        self._kernels = kernels

    @property
    def vocab_size(self) -> int:
        return self._embedding.shape[0]

    def new_cache(self, max_tokens: int) -> KVCache:
        return self._make_cache(max_tokens=max_tokens)

    @torch.inference_mode()
    def forward(self, token_ids_T: Tensor, cache: KVCache, phase: Phase, trace: Tracer | None = None) -> Tensor:
        self._check_tokens(token_ids_T, cache)
        num_tokens = token_ids_T.shape[0]
        cos_TP, sin_TP = self._rotation.at(cache.length, num_tokens)
        step = Step(token_ids_T, cache.length, cos_TP, sin_TP, cache, phase, trace)
        if trace is not None:
            trace.begin_step(phase, cache.length)
        x_TH = self._kernels.embedding(token_ids_T, self._embedding)
        step.record(NO_LAYER, "embedding", x_TH)
        for layer_id, layer in enumerate(self._layers):
            x_TH = self._run_layer(layer_id, layer, x_TH, step)
        cache.advance(num_tokens)
        return x_TH

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        x_nH = self._kernels.rms_norm(hidden, self._final_norm, self._eps)
        logits_nV = self._kernels.linear(x_nH, self._output)
        if not _is_finite(logits_nV):
            raise NumericsError("the model gave logits that are not finite after its last layer; nothing is sampled")
        return logits_nV

    def _run_layer(self, layer_id: int, layer: DecoderLayer, x_TH: Tensor, step: Step) -> Tensor:
        normed = self._kernels.rms_norm(x_TH, layer.attention_norm, self._eps)
        step.record(layer_id, "attention_norm", normed)
        x_TH = x_TH + layer.attention.forward(normed, step)
        normed = self._kernels.rms_norm(x_TH, layer.ffn_norm, self._eps)
        step.record(layer_id, "ffn_norm", normed)
        x_TH = x_TH + layer.ffn.forward(normed, step)
        step.record(layer_id, "output", x_TH)
        if not _is_finite(x_TH):
            raise NumericsError(
                f"layer {layer_id} gave values that are not finite at position {step.first_position:,} or after; "
                "the generation is stopped"
            )
        return x_TH

    def _check_tokens(self, token_ids_T: Tensor, cache: KVCache) -> None:
        num_tokens = token_ids_T.shape[0]
        if num_tokens == 0:
            raise RequestError("a forward pass needs at least one token")
        if cache.length + num_tokens > cache.max_tokens:
            raise RequestError(
                f"{cache.length + num_tokens:,} tokens do not fit into a context of {cache.max_tokens:,}"
            )
        lowest, highest = int(token_ids_T.min()), int(token_ids_T.max())
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(f"token id {wrong:,} is outside the vocabulary of {self.vocab_size:,}")


def _is_finite(x: Tensor) -> bool:
    # A sum meets every NaN and infinity in one pass. Huge finite values can overflow it too: then look at each.
    return math.isfinite(float(x.sum())) or bool(torch.isfinite(x).all())
