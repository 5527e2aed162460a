"""Every op a model is made of, once: meaning, shapes, numbers. Implementations: `reference` (torch), `cpu` (C++).

Shape letters: T tokens, H hidden, I input width, O output width, Q query heads, G kv heads, D head size, N nope dims,
C rope dims, U value dims, L latent rank, S cached tokens, E experts, K experts per token, F expert inner size,
V vocabulary.

Activations are float32 torch tensors, contiguous in the last axis; weights are packed (`QTensor`) or, for vectors,
float32 tensors. Results are new tensors unless said otherwise. No op depends on torch's default dtype, and none changes
its arguments. An op that an implementation lacks is taken from the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from expertide.kernels.fused import FeedForwardSpec, FusedFeedForward, FusedLatentAttention, LatentAttentionSpec
from expertide.kernels.qtensor import QTensor
from expertide.kernels.rope import RopePairs
from expertide.kernels.router import RouterSpec

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Kernels(Protocol):
    """One implementation of all ops. Stateless between calls, except for worker threads and scratch memory."""

    name: str
    """ "reference" or "native"; shown to the user."""

    def linear(self, x_TI: Tensor, w: QTensor) -> Tensor:
        """y_TO = x_TI · wᵀ, with w of shape (O, I); float32 accumulation."""
        ...

    def head_linear(self, x_TQI: Tensor, w: QTensor) -> Tensor:
        """y_TQO[t, q] = w[q] · x[t, q], with w of shape (Q, O, I); entries may lie apart (`lead_stride`)."""
        ...

    def embedding(self, ids_T: Tensor, w: QTensor) -> Tensor:
        """x_TH: row ids[t] of w (V, H). ids are int64 and checked by the caller to lie in [0, V)."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x²) + eps) * weight over the last axis, all in float32."""
        ...

    def rope(self, x: Tensor, cos_TP: Tensor, sin_TP: Tensor, *, pairs: RopePairs = "adjacent") -> Tensor:
        """Rotate pair i of the last axis by angle i; P = C / 2.

        Args:
            x: [T, C] or [T, Q, C].
            cos_TP, sin_TP: already times the YaRN magnitude.
            pairs: which values are pair i: "adjacent" (2i, 2i+1), "halves" (i, i + P).
        """
        ...

    def route(
        self, logits_TE: Tensor, spec: RouterSpec, *, bias_E: Tensor | None, token_ids_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts each token visits and the weight each one gets.

        Args:
            logits_TE: float32.
            bias_E: float32 when `spec.has_bias`, else None.
            token_ids_T: int64; for routers that look the experts up by token. Those of today do not read it.

        Returns:
            topk_ids: [T, K] int32, heaviest choice first, ties by lower id.
            topk_weights: [T, K] float32.
        """
        ...

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
        """Causal latent attention in absorbed form, the same for one token and for a chunk.

            qa = k_b[q] · q_nope;  score = (qa · latent[s] + q_rope · k_rope[s]) * scale,  s <= first_position + t
            ol = Σ softmax(score)[s] latent[s];  o = v_b[q] · ol

        Args:
            latent_SL, k_rope_SC: float16 or float32; rows 0..S-1 with S >= first_position + T; row = position.
            k_b: (Q, L, N), or (Q, N, L) with is_transposed; v_b: (Q, U, L).
            first_position: position of token 0 of this call.

        Returns:
            o_TQU float32. Workspace is bounded whatever T and S are (`tiles.attention_bytes`). The native kernels round
            queries, keys and weights to integers: off by about 3e-4 of the largest result.
        """
        ...

    def gqa_attention(
        self, q_TQD: Tensor, k_GSD: Tensor, v_GSD: Tensor, *, scale: float, first_position: int
    ) -> Tensor:
        """Causal attention of Q query heads on G key/value heads, the same for one token and for a chunk.

            score = q[t, q] · k[q // (Q / G), s] * scale,  s <= first_position + t;  o = Σ softmax(score)[s] v[.., s]

        Args:
            q_TQD: G divides Q; neighbouring query heads share a key/value head.
            k_GSD, v_GSD: float16 or float32; rows 0..S-1 of each head with S >= first_position + T; row = position.
                Heads may lie apart, rows of one head may not.
            first_position: position of token 0 of this call.

        Returns:
            o_TQD float32. Workspace is bounded whatever T and S are (`tiles.gqa_attention_bytes`).
        """
        ...

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, float32."""
        ...

    def expert_mlp(self, x_nH: Tensor, gate: QTensor, up: QTensor, down: QTensor) -> Tensor:
        """y_nH = down · (silu(gate · x) * (up · x)); gate, up (F, H), down (H, F)."""
        ...

    def moe_sum(self, results_TKH: Tensor, weights_TK: Tensor) -> Tensor:
        """y_TH = Σ_k weights[t, k] * results[t, k] in float32, k = 0, 1, … in this order."""
        ...

    def fuse_latent_attention(self, spec: LatentAttentionSpec) -> FusedLatentAttention | None:
        """The attention half of a layer as one op, or None: then the layer calls the ops above."""
        ...

    def fuse_feed_forward(self, spec: FeedForwardSpec) -> FusedFeedForward | None:
        """The feed-forward half of a layer without its routed experts, or None."""
        ...

    def close(self) -> None:
        """End worker threads; the object is not used afterwards."""
        ...
