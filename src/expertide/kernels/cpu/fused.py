"""The fused halves of a layer in C++ (csrc/kernels/fused_layers.cpp): adapters from tensors to addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from expertide import _native
from expertide.kernels.cpu.arguments import floats, head_matrix, matrix, router_numbers
from expertide.kernels.fused import CacheRows, FeedForwardSpec, GroupedAttentionSpec, HeadRows, LatentAttentionSpec


class NativeLatentAttention:
    """Implements `fused.FusedLatentAttention`."""

    def __init__(self, pool: _native.ThreadPool, spec: LatentAttentionSpec) -> None:
        self._pool = pool
        dims, weights = spec.dims, spec.weights
        # The native object holds addresses: these keep what lies there alive.
        norms = [None if norm is None else floats(norm) for norm in (spec.norm, weights.q_a_norm, weights.kv_a_norm)]
        self._owners = (spec, norms)
        norm, q_a_norm, kv_a_norm = (0 if tensor is None else tensor.data_ptr() for tensor in norms)
        self._layer = _native.LatentAttentionLayer(
            sizes=(dims.num_heads, dims.nope_dim, dims.rope_dim, dims.value_dim, dims.kv_rank),
            norm=norm,
            q=matrix(weights.q),
            q_a=None if weights.q_a is None else matrix(weights.q_a),
            q_a_norm=q_a_norm,
            kv_a=matrix(weights.kv_a),
            kv_a_norm=kv_a_norm,
            k_b=head_matrix(weights.k_b),
            v_b=head_matrix(weights.v_b),
            output=matrix(weights.output),
            norm_eps=spec.norm_eps,
            latent_eps=spec.latent_norm_eps,
            scale=spec.scale,
        )

    def add_to(self, x_TH: Tensor, cos_TP: Tensor, sin_TP: Tensor, rows: CacheRows, first_position: int) -> None:
        x, cos, sin = x_TH.data_ptr(), cos_TP.data_ptr(), sin_TP.data_ptr()
        self._layer.run(self._pool, x, x_TH.shape[0], rows, first_position, cos, sin)


class NativeGroupedAttention:
    """Implements `fused.FusedGroupedAttention`."""

    def __init__(self, pool: _native.ThreadPool, spec: GroupedAttentionSpec) -> None:
        self._pool = pool
        dims, weights = spec.dims, spec.weights
        norms_whole_rows = weights.q_norm is not None and weights.q_norm.shape[0] != dims.head_dim
        for weight, num_heads in ((weights.q_norm, dims.num_heads), (weights.k_norm, dims.num_kv_heads)):
            expected = dims.head_dim * (num_heads if norms_whole_rows else 1)
            assert weight is None or weight.shape == (expected,), (weight.shape, dims)
        # The native object holds addresses: these keep what lies there alive.
        vectors = [
            None if vector is None else floats(vector)
            for vector in (spec.norm, weights.q_norm, weights.k_norm, weights.q_bias, weights.k_bias, weights.v_bias)
        ]
        self._owners = (spec, vectors)
        norm, q_norm, k_norm, q_bias, k_bias, v_bias = (
            0 if vector is None else vector.data_ptr() for vector in vectors
        )
        self._layer = _native.GroupedAttentionLayer(
            sizes=(dims.num_heads, dims.num_kv_heads, dims.head_dim),
            matrices=(matrix(weights.q), matrix(weights.k), matrix(weights.v), matrix(weights.output)),
            vectors=(norm, q_norm, k_norm, q_bias, k_bias, v_bias),
            norms_whole_rows=norms_whole_rows,
            norm_eps=spec.norm_eps,
            qk_norm_eps=spec.qk_norm_eps,
            scale=spec.scale,
            halves=spec.rope_pairs == "halves",
        )

    def add_to(self, x_TH: Tensor, cos_TP: Tensor, sin_TP: Tensor, rows: HeadRows, first_position: int) -> None:
        x, cos, sin = x_TH.data_ptr(), cos_TP.data_ptr(), sin_TP.data_ptr()
        self._layer.run(self._pool, x, x_TH.shape[0], rows, first_position, cos, sin)


class NativeFeedForward:
    """Implements `fused.FusedFeedForward`."""

    def __init__(self, pool: _native.ThreadPool, spec: FeedForwardSpec) -> None:
        self._pool = pool
        self._k = 0 if spec.router is None else spec.router.spec.num_experts_per_tok
        norm = floats(spec.norm)
        bias_E = None if spec.router is None or spec.router.bias_E is None else floats(spec.router.bias_E)
        share_H = None if spec.share_H is None else floats(spec.share_H)
        self._owners = (spec, norm, bias_E, share_H)
        router = None
        if spec.router is not None:
            bias = 0 if bias_E is None else bias_E.data_ptr()
            router = (matrix(spec.router.weights), bias, router_numbers(spec.router.spec))
        mlp = None
        self._has_mlp = spec.mlp is not None
        if spec.mlp is not None:
            gate, up, down = spec.mlp
            mlp = (matrix(gate), matrix(up), matrix(down), 0 if share_H is None else share_H.data_ptr())
        self._layer = _native.FeedForwardLayer(
            norm=norm.data_ptr(), norm_eps=spec.norm_eps, hidden=norm.shape[0], router=router, mlp=mlp
        )

    def begin(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens = x_TH.shape[0]
        normed_TH = torch.empty_like(x_TH)
        ids_TK = torch.empty((num_tokens, self._k), dtype=torch.int32)
        weights_TK = torch.empty((num_tokens, self._k), dtype=torch.float32)
        self._layer.begin(
            self._pool, x_TH.data_ptr(), num_tokens, normed_TH.data_ptr(), ids_TK.data_ptr(), weights_TK.data_ptr()
        )
        return normed_TH, ids_TK, weights_TK

    def shared(self, normed_TH: Tensor) -> Tensor | None:
        if not self._has_mlp:
            return None
        y_TH = torch.empty_like(normed_TH)
        self._layer.multiply(self._pool, normed_TH.data_ptr(), normed_TH.shape[0], y_TH.data_ptr())
        return y_TH

    def end(self, x_TH: Tensor, normed_TH: Tensor, routed_TH: Tensor | None, shared_TH: Tensor | None = None) -> bool:
        routed, own = (0 if tensor is None else tensor.data_ptr() for tensor in (routed_TH, shared_TH))
        return self._layer.end(self._pool, normed_TH.data_ptr(), routed, own, x_TH.shape[0], x_TH.data_ptr())
