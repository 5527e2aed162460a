"""Halves of a decoder layer as single ops: what an implementation may offer beside the ops of `ops.Kernels`.

A fused op means exactly what the layer's ops mean one after the other, in the order written here, and gives the same
bits as the same implementation's ops called one by one. It saves the time between them: a decoded token of a 27-layer
model passes through about 400 ops.

Shape letters as in `ops`. No torch at import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from expertide.kernels.qtensor import QTensor
from expertide.kernels.rope import RopePairs
from expertide.kernels.router import RouterSpec

if TYPE_CHECKING:
    from torch import Tensor


class CacheRows(NamedTuple):
    """One layer's rows of a latent cache, writable; row = position.

    Attributes:
        latent, rope: addresses of row 0.
        latent_stride, rope_stride: values from one row to the next.
        is_half: float16, else float32.
    """

    latent: int
    rope: int
    latent_stride: int
    rope_stride: int
    is_half: bool


class HeadRows(NamedTuple):
    """One layer's rows of a cache of keys and values per head, writable; row = position.

    Attributes:
        keys, values: addresses of row 0 of head 0.
        key_stride, value_stride: values from one row to the next.
        key_head_stride, value_head_stride: values from one head's rows to the next head's.
        is_half: float16, else float32.
    """

    keys: int
    values: int
    key_stride: int
    value_stride: int
    key_head_stride: int
    value_head_stride: int
    is_half: bool


@dataclass(frozen=True, slots=True)
class LatentAttentionDims:
    """Q heads of N nope and C rope dims; L latent values; U value dims."""

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    kv_rank: int


@dataclass(frozen=True, slots=True)
class LatentAttentionWeights:
    """Norm weights are float32. Queries go through `q_a` and `q_a_norm` first where there are some."""

    q: QTensor
    kv_a: QTensor
    kv_a_norm: Tensor
    k_b: QTensor  # (Q, L, N), or (Q, N, L) with is_transposed
    v_b: QTensor  # (Q, U, L)
    output: QTensor
    q_a: QTensor | None = None
    q_a_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """x += output · attention(norm(x)), see `models.layers.latent_attention`.

    Attributes:
        norm: float32; `norm_eps` goes with it, `latent_norm_eps` with the norms among the weights.
    """

    dims: LatentAttentionDims
    weights: LatentAttentionWeights
    norm: Tensor
    norm_eps: float
    latent_norm_eps: float
    scale: float


@dataclass(frozen=True, slots=True)
class GroupedAttentionDims:
    """Q query heads and G key/value heads of D values; G divides Q."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class GroupedAttentionWeights:
    """Norm weights and biases are float32, None for a model without; norms are as long as one head, or as all heads
    together."""

    q: QTensor
    k: QTensor
    v: QTensor
    output: QTensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GroupedAttentionSpec:
    """x += output · attention(norm(x)), see `models.layers.grouped_attention`.

    Attributes:
        norm: float32; `norm_eps` goes with it, `qk_norm_eps` with the norms among the weights.
    """

    dims: GroupedAttentionDims
    weights: GroupedAttentionWeights
    norm: Tensor
    norm_eps: float
    qk_norm_eps: float
    scale: float
    rope_pairs: RopePairs


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """The router of a layer: packed matrix (E, H), float32 bias or None."""

    weights: QTensor
    bias_E: Tensor | None
    spec: RouterSpec


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """x += routed(norm(x)) + share * down · (silu(gate · norm(x)) * (up · norm(x))).

    Attributes:
        router: None for a dense layer.
        mlp: gate, up, down of a dense layer or of the shared experts; None when there are only routed experts.
        share_H: float32; share = sigmoid(share_H · norm(x)) per token. None: 1.
    """

    norm: Tensor
    norm_eps: float
    router: RouterWeights | None
    mlp: tuple[QTensor, QTensor, QTensor] | None
    share_H: Tensor | None = None


class FusedLatentAttention(Protocol):
    def add_to(self, x_TH: Tensor, cos_TP: Tensor, sin_TP: Tensor, rows: CacheRows, first_position: int) -> None:
        """x_TH += …, in place; the cached rows of positions first_position … + T - 1 are written.

        All tensors float32 and contiguous; the rows have room.
        """
        ...


class FusedGroupedAttention(Protocol):
    def add_to(self, x_TH: Tensor, cos_TP: Tensor, sin_TP: Tensor, rows: HeadRows, first_position: int) -> None:
        """x_TH += …, in place; the cached rows of positions first_position … + T - 1 are written.

        All tensors float32 and contiguous; the rows have room.
        """
        ...


class FusedFeedForward(Protocol):
    """Several calls, because what lies between them, the experts, may be on their way from the disk."""

    def begin(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(norm(x), topk_ids_TK, topk_weights_TK); without a router the last two are empty."""
        ...

    def shared(self, normed_TH: Tensor) -> Tensor | None:
        """What `mlp` and `share_H` give, [T, H], to be handed to `end`; None without them."""
        ...

    def end(self, x_TH: Tensor, normed_TH: Tensor, routed_TH: Tensor | None, shared_TH: Tensor | None = None) -> bool:
        """x_TH += …, in place; says whether every value is finite.

        Args:
            routed_TH: the experts' weighted sum; None exactly when there is no router.
            shared_TH: what `shared` gave, if it was called; else it is computed here.
        """
        ...
