"""A pre-norm decoder: embedding, layers of attention and feed-forward on one residual stream, final norm, output.

The residual stream is float32: DeepSeek-V2-Lite's early layers put values above 1,000 on it; float16 could overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from expertide.errors import NumericsError, RequestError
from expertide.kernels.ops import Kernels
from expertide.kernels.qtensor import QTensor
from expertide.kv import KVCache
from expertide.models.architecture import Phase
from expertide.models.layers.ffn import FeedForward, FeedForwardHalf
from expertide.models.layers.step import Rotation, Step
from expertide.models.layers.weights import LayerWeights
from expertide.models.trace import NO_LAYER, Tracer


class AttentionHalf(Protocol):
    def add_to(self, x_TH: Tensor, step: Step) -> None:
        """x_TH += attention(norm(x)), in place."""
        ...


class Attention(Protocol):
    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        """Append the step's tokens to the cache and attend; x_TH is already normed."""
        ...

    def fuse(self, norm: Tensor, norm_eps: float) -> AttentionHalf | None:
        """norm, forward and residual sum as one op, where the kernels have one."""
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


class FusedLayer:
    """A layer whose two halves are fused ops: the same bits as its ops one by one, in place on the residual stream."""

    def __init__(self, attention: AttentionHalf, ffn: FeedForwardHalf) -> None:
        self._attention = attention
        self._ffn = ffn

    def add_to(self, x_TH: Tensor, step: Step) -> bool:
        """Says whether every value is finite."""
        self._attention.add_to(x_TH, step)
        return self._ffn.add_to(x_TH, step)


def _fuse(layer: DecoderLayer, norm_eps: float) -> FusedLayer | None:
    attention = layer.attention.fuse(layer.attention_norm, norm_eps)
    if attention is None:
        return None
    ffn = layer.ffn.fuse(layer.ffn_norm, norm_eps)
    return None if ffn is None else FusedLayer(attention, ffn)


class DecoderModel:
    """Implements `architecture.Model`."""

    @classmethod
    def from_weights(
        cls,
        parts: LayerWeights,
        *,
        num_layers: int,
        attention: Callable[[int], Attention],
        ffn: Callable[[int], FeedForward],
        norm_eps: float,
        rotation: Rotation,
        make_cache: CacheMaker,
        kernels: Kernels,
    ) -> DecoderModel:
        """From tensors under the names that GGUF files of these architectures have in common.

        Args:
            attention, ffn: what stands behind the norms of layer `layer_id`.
        """
        layers = [
            DecoderLayer(
                attention_norm=parts.vector(f"blk.{layer_id}.attn_norm.weight"),
                attention=attention(layer_id),
                ffn_norm=parts.vector(f"blk.{layer_id}.ffn_norm.weight"),
                ffn=ffn(layer_id),
            )
            for layer_id in range(num_layers)
        ]
        return cls(
            embedding=parts.matrix("token_embd.weight"),
            layers=layers,
            final_norm=parts.vector("output_norm.weight"),
            output=parts.matrix("output.weight"),
            norm_eps=norm_eps,
            rotation=rotation,
            make_cache=make_cache,
            kernels=kernels,
        )

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
        self._fused = [_fuse(layer, norm_eps) for layer in layers]

    @property
    def vocab_size(self) -> int:
        return self._embedding.shape[0]

    def new_cache(self, max_tokens: int) -> KVCache:
        return self._make_cache(max_tokens=max_tokens)

    @torch.inference_mode()
    def forward(
        self,
        token_ids_T: Tensor,
        cache: KVCache,
        phase: Phase,
        trace: Tracer | None = None,
        *,
        before_layer: Callable[[], None] | None = None,
    ) -> Tensor:
        self._check_tokens(token_ids_T, cache)
        num_tokens = token_ids_T.shape[0]
        cos_TP, sin_TP = self._rotation.at(cache.length, num_tokens)
        step = Step(token_ids_T, cache.length, cos_TP, sin_TP, cache, phase, trace)
        if trace is not None:
            trace.begin_step(phase, cache.length)
        x_TH = self._kernels.embedding(token_ids_T, self._embedding)
        step.record(NO_LAYER, "embedding", x_TH)
        for layer_id, layer in enumerate(self._layers):
            if before_layer is not None:
                before_layer()
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
        """x_TH may be changed in place; the result is what counts."""
        fused = self._fused[layer_id]
        # A trace wants every op's result.
        if fused is not None and step.trace is None:
            if not fused.add_to(x_TH, step):
                raise _not_finite(layer_id, step)
            return x_TH
        normed = self._kernels.rms_norm(x_TH, layer.attention_norm, self._eps)
        step.record(layer_id, "attention_norm", normed)
        x_TH = x_TH + layer.attention.forward(normed, step)
        normed = self._kernels.rms_norm(x_TH, layer.ffn_norm, self._eps)
        step.record(layer_id, "ffn_norm", normed)
        x_TH = x_TH + layer.ffn.forward(normed, step)
        step.record(layer_id, "output", x_TH)
        if not _is_finite(x_TH):
            raise _not_finite(layer_id, step)
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


def _not_finite(layer_id: int, step: Step) -> NumericsError:
    return NumericsError(
        f"layer {layer_id} gave values that are not finite at position {step.first_position:,} or after; "
        "the generation is stopped"
    )


def _is_finite(x: Tensor) -> bool:
    # A sum meets every NaN and infinity in one pass. Huge finite values can overflow it too: then look at each.
    # NumPy sums on this thread; torch would wake OpenMP threads, which spin on the cores of our own workers afterwards.
    with np.errstate(all="ignore"):
        total = float(x.numpy().sum())
    return math.isfinite(total) or bool(torch.isfinite(x).all())
