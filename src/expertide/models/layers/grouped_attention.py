"""Grouped-query attention: Q query heads share G key/value heads, whose keys and values are cached.

    q, k, v = q(x), k(x), v(x)        [T, Q, D], [T, G, D], [T, G, D]; biases where the model has them
    q, k    = rope(norm(q)), rope(norm(k))     the norm only where the model has one
    y       = output(attention)

Sources: arXiv 2305.13245; for the norms of queries and keys Qwen3MoeAttention (per head) and OlmoeAttention (over all
heads together) in transformers.
"""

from __future__ import annotations

from torch import Tensor

from expertide.kernels.fused import (
    FusedGroupedAttention,
    GroupedAttentionDims,
    GroupedAttentionSpec,
    GroupedAttentionWeights,
)
from expertide.kernels.ops import Kernels
from expertide.kernels.qtensor import QTensor
from expertide.kernels.rope import RopePairs
from expertide.kv.heads import HeadCache
from expertide.models.layers.step import Step


class GroupedAttention:
    """The attention of one layer."""

    def __init__(
        self,
        layer_id: int,
        dims: GroupedAttentionDims,
        weights: GroupedAttentionWeights,
        kernels: Kernels,
        *,
        scale: float,
        norm_eps: float,
        rope_pairs: RopePairs,
    ) -> None:
        self._layer_id = layer_id
        self._dims = dims
        self._weights = weights
        self._kernels = kernels
        self._scale = scale
        self._eps = norm_eps
        self._rope_pairs = rope_pairs

    def fuse(self, norm: Tensor, norm_eps: float) -> GroupedAttentionHalf | None:
        """norm, forward and residual sum as one op, where the kernels have one."""
        ops = self._kernels.fuse_grouped_attention(
            GroupedAttentionSpec(
                dims=self._dims,
                weights=self._weights,
                norm=norm,
                norm_eps=norm_eps,
                qk_norm_eps=self._eps,
                scale=self._scale,
                rope_pairs=self._rope_pairs,
            )
        )
        return None if ops is None else GroupedAttentionHalf(ops, self._layer_id)

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        """Append the step's tokens to the cache and attend; x_TH is already normed."""
        kernels, dims, weights, layer_id = self._kernels, self._dims, self._weights, self._layer_id
        cache = step.cache
        assert isinstance(cache, HeadCache), "a cache made by another model"
        q_TQD = self._positioned(self._projected(x_TH, weights.q, weights.q_bias), weights.q_norm, step)
        k_TGD = self._positioned(self._projected(x_TH, weights.k, weights.k_bias), weights.k_norm, step)
        v_TGD = self._projected(x_TH, weights.v, weights.v_bias).view(-1, dims.num_kv_heads, dims.head_dim)
        cache.append(layer_id, k_TGD, v_TGD)
        k_GSD, v_GSD = cache.view(layer_id, step.first_position + step.num_tokens)

        o_TQD = kernels.gqa_attention(q_TQD, k_GSD, v_GSD, scale=self._scale, first_position=step.first_position)
        y_TH = kernels.linear(o_TQD.reshape(step.num_tokens, -1), weights.output)
        if step.trace is not None:
            for op, tensor in (
                ("q", q_TQD),
                ("k", k_TGD),
                ("v", v_TGD),
                ("attention", o_TQD),
                ("attention_output", y_TH),
            ):
                step.record(layer_id, op, tensor)
        return y_TH

    def _projected(self, x_TH: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
        y = self._kernels.linear(x_TH, w)
        return y if bias is None else y.add_(bias)

    def _positioned(self, flat: Tensor, norm: Tensor | None, step: Step) -> Tensor:
        """Queries or keys of all heads side by side, normed and rotated: [T, heads, D]."""
        num_tokens = flat.shape[0]
        if norm is not None:
            flat = self._kernels.rms_norm(flat.view(num_tokens, -1, norm.shape[0]), norm, self._eps)
        by_head = flat.view(num_tokens, -1, self._dims.head_dim)
        return self._kernels.rope(by_head, step.cos_TP, step.sin_TP, pairs=self._rope_pairs)


class GroupedAttentionHalf:
    """The first half of a layer as one fused op, in place on the residual stream."""

    def __init__(self, ops: FusedGroupedAttention, layer_id: int) -> None:
        self._ops = ops
        self._layer_id = layer_id

    def add_to(self, x_TH: Tensor, step: Step) -> None:
        """x_TH += attention(norm(x)); the step's rows of the cache are written."""
        assert isinstance(step.cache, HeadCache), "a cache made by another model"
        rows = step.cache.rows(self._layer_id)
        self._ops.add_to(x_TH, step.cos_TP, step.sin_TP, rows, step.first_position)
