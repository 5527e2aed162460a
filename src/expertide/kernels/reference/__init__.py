"""The meaning of every op, in torch. Slow where that is clearer; exact float32 on decoded weights.

Results may differ in rounding between thread counts and chunk sizes, as torch's own products do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertide.kernels.fused import (
    FeedForwardSpec,
    FusedFeedForward,
    FusedGroupedAttention,
    FusedLatentAttention,
    GroupedAttentionSpec,
    LatentAttentionSpec,
)
from expertide.kernels.qtensor import QTensor
from expertide.kernels.reference import attention, grouped_attention, packed, routing
from expertide.kernels.rope import RopePairs
from expertide.kernels.router import RouterSpec


class ReferenceKernels:
    """Implements `ops.Kernels`. Other implementations may inherit, and so replace one op after the other."""

    name = "reference"

    def linear(self, x_TI: Tensor, w: QTensor) -> Tensor:
        return packed.linear(x_TI, w)

    def head_linear(self, x_TQI: Tensor, w: QTensor) -> Tensor:
        return packed.head_linear(x_TQI, w)

    def embedding(self, ids_T: Tensor, w: QTensor) -> Tensor:
        return packed.embedding(ids_T, w)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def rope(self, x: Tensor, cos_TP: Tensor, sin_TP: Tensor, *, pairs: RopePairs = "adjacent") -> Tensor:
        if x.dim() == 3:
            cos_TP, sin_TP = cos_TP[:, None, :], sin_TP[:, None, :]
        if pairs == "halves":
            first, second = x.chunk(2, dim=-1)
            return torch.cat((first * cos_TP - second * sin_TP, first * sin_TP + second * cos_TP), dim=-1)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos_TP - odd * sin_TP, even * sin_TP + odd * cos_TP), dim=-1).flatten(-2)

    def route(
        self, logits_TE: Tensor, spec: RouterSpec, *, bias_E: Tensor | None, token_ids_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        return routing.route(logits_TE, spec, bias_E=bias_E)

    def mla_attention(
        self,
        q_nope_TQN: Tensor,
        q_rope_TQC: Tensor,
        latent_SL: Tensor,
        k_rope_SC: Tensor,
        k_b: QTensor,
        v_b: QTensor,
        *,
        scale: float,
        first_position: int,
    ) -> Tensor:
        return attention.mla_attention(
            q_nope_TQN,
            q_rope_TQC,
            latent_SL,
            k_rope_SC,
            k_b,
            v_b,
            scale=scale,
            first_position=first_position,
            head_linear=self.head_linear,
        )

    def gqa_attention(
        self, q_TQD: Tensor, k_GSD: Tensor, v_GSD: Tensor, *, scale: float, first_position: int
    ) -> Tensor:
        return grouped_attention.gqa_attention(q_TQD, k_GSD, v_GSD, scale=scale, first_position=first_position)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate).mul_(up)  # in place: three buffers at the peak, as the plan counts

    def gate_rows(self, y_TH: Tensor, x_TH: Tensor, gate_H: Tensor) -> Tensor:
        # A sum over each token's own row: a matrix product could give other bits beside other tokens.
        return y_TH * torch.sigmoid((x_TH * gate_H).sum(dim=-1, keepdim=True))

    def expert_mlp(self, x_nH: Tensor, gate: QTensor, up: QTensor, down: QTensor) -> Tensor:
        return self.linear(self.swiglu(self.linear(x_nH, gate), self.linear(x_nH, up)), down)

    def moe_sum(self, results_TKH: Tensor, weights_TK: Tensor) -> Tensor:
        y_TH = results_TKH[:, 0] * weights_TK[:, 0, None]
        for k in range(1, results_TKH.shape[1]):
            y_TH = y_TH + results_TKH[:, k] * weights_TK[:, k, None]
        return y_TH

    def fuse_latent_attention(self, spec: LatentAttentionSpec) -> FusedLatentAttention | None:
        return None

    def fuse_grouped_attention(self, spec: GroupedAttentionSpec) -> FusedGroupedAttention | None:
        return None

    def fuse_feed_forward(self, spec: FeedForwardSpec) -> FusedFeedForward | None:
        return None

    def close(self) -> None:
        return
