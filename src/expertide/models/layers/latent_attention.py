"""Multi-head latent attention (DeepSeek-V2): the cache holds one small latent per token, heads are unfolded from it.

    q        = q(x)  or  q(norm(q_a(x)))          [T, Q, N + C], the last C rotated
    c | kr   = kv_a(x)                            c normed, kr rotated: the cached row of this token
    o        = attention in absorbed form         k_b and v_b stay packed, scores and values are taken on latents
    y        = output(o)

Source: DeepSeek-V2 paper, section 2.1; DeepseekV2Attention in transformers.
"""

from __future__ import annotations

from torch import Tensor

from expertide.kernels.fused import (
    FusedLatentAttention,
    LatentAttentionDims,
    LatentAttentionSpec,
    LatentAttentionWeights,
)
from expertide.kernels.ops import Kernels
from expertide.kernels.qtensor import QTensor
from expertide.kv.latent import LatentCache
from expertide.models.layers.step import Step


class LatentAttention:
    """The attention of one layer."""

    def __init__(
        self,
        layer_id: int,
        dims: LatentAttentionDims,
        weights: LatentAttentionWeights,
        kernels: Kernels,
        *,
        scale: float,
        latent_norm_eps: float,
    ) -> None:
        assert (weights.q_a is None) == (weights.q_a_norm is None)
        self._layer_id = layer_id
        self._dims = dims
        self._weights = weights
        self._kernels = kernels
        self._scale = scale
        self._eps = latent_norm_eps

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        """Append the step's tokens to the cache and attend; x_TH is already normed."""
        kernels, dims, weights, layer_id = self._kernels, self._dims, self._weights, self._layer_id
        cache = step.cache
        assert isinstance(cache, LatentCache), "a cache made by another model"
        q = self._queries(x_TH).view(step.num_tokens, dims.num_heads, dims.nope_dim + dims.rope_dim)
        q_nope_TQN, q_rope_TQC = q[..., : dims.nope_dim], q[..., dims.nope_dim :]
        q_rope_TQC = kernels.rope(q_rope_TQC, step.cos_TP, step.sin_TP)

        kv = kernels.linear(x_TH, weights.kv_a)
        latent_TL = kernels.rms_norm(kv[:, : dims.kv_rank], weights.kv_a_norm, self._eps)
        k_rope_TC = kernels.rope(kv[:, dims.kv_rank :], step.cos_TP, step.sin_TP)
        cache.append(layer_id, latent_TL, k_rope_TC)
        latent_SL, k_rope_SC = cache.view(layer_id, step.first_position + step.num_tokens)

        o_TQU = kernels.mla_attention(
            q_nope_TQN,
            q_rope_TQC,
            latent_SL,
            k_rope_SC,
            weights.k_b,
            weights.v_b,
            scale=self._scale,
            first_position=step.first_position,
        )
        y_TH = kernels.linear(o_TQU.reshape(step.num_tokens, -1), weights.output)
        if step.trace is not None:
            for op, tensor in (
                ("q_nope", q_nope_TQN),
                ("q_rope", q_rope_TQC),
                ("latent", latent_TL),
                ("k_rope", k_rope_TC),
                ("attention", o_TQU),
                ("attention_output", y_TH),
            ):
                step.record(layer_id, op, tensor)
        return y_TH

    def fuse(self, norm: Tensor, norm_eps: float) -> LatentAttentionHalf | None:
        """norm, forward and residual sum as one op, where the kernels have one."""
        ops = self._kernels.fuse_latent_attention(
            LatentAttentionSpec(
                dims=self._dims,
                weights=self._weights,
                norm=norm,
                norm_eps=norm_eps,
                latent_norm_eps=self._eps,
                scale=self._scale,
            )
        )
        return None if ops is None else LatentAttentionHalf(ops, self._layer_id)

    def _queries(self, x_TH: Tensor) -> Tensor:
        weights = self._weights
        if weights.q_a is not None:
            assert weights.q_a_norm is not None
            x_TH = self._kernels.rms_norm(self._kernels.linear(x_TH, weights.q_a), weights.q_a_norm, self._eps)
        return self._kernels.linear(x_TH, weights.q)


class LatentAttentionHalf:
    """The first half of a layer as one fused op, in place on the residual stream."""

    def __init__(self, ops: FusedLatentAttention, layer_id: int) -> None:
        self._ops = ops
        self._layer_id = layer_id

    def add_to(self, x_TH: Tensor, step: Step) -> None:
        """x_TH += attention(norm(x)); the step's rows of the cache are written."""
        assert isinstance(step.cache, LatentCache)
        rows = step.cache.rows(self._layer_id)
        self._ops.add_to(x_TH, step.cos_TP, step.sin_TP, rows, step.first_position)


def split_joint_kv_b(kv_b: QTensor, dims: LatentAttentionDims) -> tuple[QTensor, QTensor]:
    """k_b and v_b of a file that keeps both in one matrix (Q * (N + U), L), N key rows before U value rows per head.

    Both are used in place, packed; k_b as the transpose of its rows (qa = Σ_n qn[n] * row n).
    """
    heads, nope, value, rank = dims.num_heads, dims.nope_dim, dims.value_dim, dims.kv_rank
    assert kv_b.shape == (heads * (nope + value), rank)
    stride = (nope + value) * kv_b.row_bytes
    v_b_address = kv_b.address + nope * kv_b.row_bytes
    k_b = QTensor(kv_b.address, kv_b.quant, (heads, nope, rank), kv_b.owner, lead_stride=stride, is_transposed=True)
    v_b = QTensor(v_b_address, kv_b.quant, (heads, value, rank), kv_b.owner, lead_stride=stride)
    return k_b, v_b
