"""The native kernels: C++ on packed weights (csrc/kernels/), chosen by instruction set at run time.

Promises: a result depends on its own token and weights only, and for attention on the tokens before it: not on the
number of threads, the split of a prompt into chunks, the tokens beside it or the instruction set. A type without native
kernels is computed by the inherited reference, without these promises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expertide import _native
from expertide.formats.quants.base import QuantType
from expertide.kernels.cpu.arguments import (
    dense_rows,
    floats,
    head_matrix,
    is_half,
    matrix,
    router_numbers,
    rows_of,
    strided,
)
from expertide.kernels.cpu.fused import NativeFeedForward, NativeGroupedAttention, NativeLatentAttention
from expertide.kernels.fused import FeedForwardSpec, GroupedAttentionSpec, LatentAttentionSpec
from expertide.kernels.qtensor import QTensor
from expertide.kernels.reference import ReferenceKernels
from expertide.kernels.rope import RopePairs
from expertide.kernels.router import RouterSpec


class CpuKernels(ReferenceKernels):
    """Implements `ops.Kernels`.

    Attributes:
        pool: the worker threads; the experts of a layer run on them too.
    """

    name = "native"

    def __init__(self, num_threads: int, cpus: Sequence[int] = ()) -> None:
        """Args:
        cpus: which CPU each thread stays on; none: wherever the system puts it.
        """
        self.pool = _native.ThreadPool(num_threads, cpus)
        self._native_types = frozenset(_native.quant_types())

    def linear(self, x_TI: Tensor, w: QTensor) -> Tensor:
        if not self._has(w.quant):
            return super().linear(x_TI, w)
        x_TI = rows_of(x_TI, w.cols)
        num_tokens = x_TI.shape[0]
        y_TO = torch.empty(num_tokens, w.rows, dtype=torch.float32)
        _native.linear(
            self.pool, w.address, w.quant.ggml_id, w.rows, w.cols, x_TI.data_ptr(), num_tokens, y_TO.data_ptr()
        )
        return y_TO

    def head_linear(self, x_TQI: Tensor, w: QTensor) -> Tensor:
        if not self._has(w.quant):
            return super().head_linear(x_TQI, w)
        num_heads, rows, cols = w.shape
        x_TQI = rows_of(x_TQI, rows if w.is_transposed else cols)
        num_tokens = x_TQI.shape[0]
        assert x_TQI.shape[1] == num_heads
        lead_stride = rows * w.row_bytes if w.lead_stride is None else w.lead_stride
        y_TQO = torch.empty(num_tokens, num_heads, cols if w.is_transposed else rows, dtype=torch.float32)
        product = _native.transposed_head_linear if w.is_transposed else _native.head_linear
        product(
            self.pool,
            w.address,
            w.quant.ggml_id,
            num_heads,
            lead_stride,
            rows,
            cols,
            x_TQI.data_ptr(),
            num_tokens,
            y_TQO.data_ptr(),
        )
        return y_TQO

    def embedding(self, ids_T: Tensor, w: QTensor) -> Tensor:
        if not self._has(w.quant):
            return super().embedding(ids_T, w)
        ids_T = ids_T.to(torch.int64).contiguous()
        x_TH = torch.empty(ids_T.shape[0], w.cols, dtype=torch.float32)
        _native.decode_rows(
            self.pool,
            w.address,
            w.quant.ggml_id,
            w.rows,
            w.cols,
            ids_T.data_ptr(),
            ids_T.shape[0],
            x_TH.data_ptr(),
        )
        return x_TH

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        cols = x.shape[-1]
        assert weight.shape == (cols,)
        if x.dim() != 2:
            return self.rms_norm(x.reshape(-1, cols), weight, eps).reshape(x.shape)
        x, weight = strided(x), floats(weight)
        y = torch.empty(x.shape, dtype=torch.float32)
        _native.rms_norm(self.pool, x.data_ptr(), x.stride(0), weight.data_ptr(), eps, x.shape[0], cols, y.data_ptr())
        return y

    def rope(self, x: Tensor, cos_TP: Tensor, sin_TP: Tensor, *, pairs: RopePairs = "adjacent") -> Tensor:
        num_tokens, num_pairs = cos_TP.shape
        assert x.shape[0] == num_tokens and x.shape[-1] == 2 * num_pairs and x.dim() in (2, 3)
        x, cos_TP, sin_TP = strided(x), floats(cos_TP), floats(sin_TP)
        num_heads = x.shape[1] if x.dim() == 3 else 1
        head_stride = x.stride(1) if x.dim() == 3 else 0
        y = torch.empty(x.shape, dtype=torch.float32)
        _native.rope(
            self.pool,
            x.data_ptr(),
            x.stride(0),
            head_stride,
            cos_TP.data_ptr(),
            sin_TP.data_ptr(),
            num_tokens,
            num_heads,
            num_pairs,
            pairs == "halves",
            y.data_ptr(),
        )
        return y

    def route(
        self, logits_TE: Tensor, spec: RouterSpec, *, bias_E: Tensor | None, token_ids_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert (bias_E is not None) == spec.has_bias
        logits_TE = rows_of(logits_TE, spec.num_experts)
        bias_E = None if bias_E is None else rows_of(bias_E, spec.num_experts)
        num_tokens = logits_TE.shape[0]
        topk_ids_TK = torch.empty(num_tokens, spec.num_experts_per_tok, dtype=torch.int32)
        topk_weights_TK = torch.empty(num_tokens, spec.num_experts_per_tok, dtype=torch.float32)
        _native.route(
            self.pool,
            router_numbers(spec),
            logits_TE.data_ptr(),
            0 if bias_E is None else bias_E.data_ptr(),
            num_tokens,
            topk_ids_TK.data_ptr(),
            topk_weights_TK.data_ptr(),
        )
        return topk_ids_TK, topk_weights_TK

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
        if not (self._has(k_b.quant) and self._has(v_b.quant)):
            return super().mla_attention(
                q_nope_TQN, q_rope_TQC, latent_SL, k_rope_SC, k_b, v_b, scale=scale, first_position=first_position
            )
        num_tokens, num_heads, nope_dim = q_nope_TQN.shape
        value_dim, rank = v_b.shape[1:]
        assert latent_SL.shape[0] >= first_position + num_tokens and latent_SL.dtype == k_rope_SC.dtype
        q_nope_TQN, q_rope_TQC = floats(q_nope_TQN), floats(q_rope_TQC)
        latent_SL, k_rope_SC = dense_rows(latent_SL), dense_rows(k_rope_SC)
        o_TQU = torch.empty(num_tokens, num_heads, value_dim, dtype=torch.float32)
        _native.mla_attention(
            self.pool,
            (num_heads, nope_dim, q_rope_TQC.shape[2], value_dim, rank),
            head_matrix(k_b),
            head_matrix(v_b),
            (
                latent_SL.data_ptr(),
                k_rope_SC.data_ptr(),
                latent_SL.stride(0),
                k_rope_SC.stride(0),
                is_half(latent_SL),
            ),
            q_nope_TQN.data_ptr(),
            q_rope_TQC.data_ptr(),
            num_tokens,
            first_position,
            scale,
            o_TQU.data_ptr(),
        )
        return o_TQU

    def gqa_attention(
        self, q_TQD: Tensor, k_GSD: Tensor, v_GSD: Tensor, *, scale: float, first_position: int
    ) -> Tensor:
        num_tokens, num_heads, head_dim = q_TQD.shape
        num_kv_heads = k_GSD.shape[0]
        assert k_GSD.shape == v_GSD.shape and k_GSD.dtype == v_GSD.dtype
        assert k_GSD.shape[1] >= first_position + num_tokens and k_GSD.shape[2] == head_dim
        q_TQD, k_GSD, v_GSD = floats(q_TQD), dense_rows(k_GSD), dense_rows(v_GSD)
        o_TQD = torch.empty(num_tokens, num_heads, head_dim, dtype=torch.float32)
        _native.gqa_attention(
            self.pool,
            (num_heads, num_kv_heads, head_dim),
            (
                k_GSD.data_ptr(),
                v_GSD.data_ptr(),
                k_GSD.stride(1),
                v_GSD.stride(1),
                k_GSD.stride(0),
                v_GSD.stride(0),
                is_half(k_GSD),
            ),
            q_TQD.data_ptr(),
            num_tokens,
            first_position,
            scale,
            o_TQD.data_ptr(),
        )
        return o_TQD

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        assert gate.shape == up.shape
        gate, up = floats(gate), floats(up)
        out = torch.empty_like(gate)
        _native.silu_mul(gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr())
        return out

    def gate_rows(self, y_TH: Tensor, x_TH: Tensor, gate_H: Tensor) -> Tensor:
        num_tokens, hidden = y_TH.shape
        y_TH, x_TH, gate_H = floats(y_TH), rows_of(x_TH, hidden), rows_of(gate_H, hidden)
        out_TH = torch.empty_like(y_TH)
        _native.gate_rows(
            self.pool, y_TH.data_ptr(), x_TH.data_ptr(), gate_H.data_ptr(), num_tokens, hidden, out_TH.data_ptr()
        )
        return out_TH

    def expert_mlp(self, x_nH: Tensor, gate: QTensor, up: QTensor, down: QTensor) -> Tensor:
        if not all(self._has(w.quant) for w in (gate, up, down)):
            return super().expert_mlp(x_nH, gate, up, down)
        x_nH = rows_of(x_nH, gate.cols)
        y_nH = torch.empty_like(x_nH)
        _native.expert_mlp(
            self.pool, matrix(gate), matrix(up), matrix(down), x_nH.data_ptr(), x_nH.shape[0], y_nH.data_ptr()
        )
        return y_nH

    def moe_sum(self, results_TKH: Tensor, weights_TK: Tensor) -> Tensor:
        results_TKH, weights_TK = floats(results_TKH), floats(weights_TK)
        num_tokens, k, hidden = results_TKH.shape
        assert weights_TK.shape == (num_tokens, k)
        y_TH = torch.empty(num_tokens, hidden, dtype=torch.float32)
        _native.moe_sum(
            self.pool, results_TKH.data_ptr(), weights_TK.data_ptr(), num_tokens, k, hidden, y_TH.data_ptr()
        )
        return y_TH

    def fuse_latent_attention(self, spec: LatentAttentionSpec) -> NativeLatentAttention | None:
        w = spec.weights
        matrices = [w.q, w.q_a, w.kv_a, w.k_b, w.v_b, w.output]
        if not all(matrix is None or self._has(matrix.quant) for matrix in matrices):
            return None
        return NativeLatentAttention(self.pool, spec)

    def fuse_grouped_attention(self, spec: GroupedAttentionSpec) -> NativeGroupedAttention | None:
        w = spec.weights
        if not all(self._has(matrix.quant) for matrix in (w.q, w.k, w.v, w.output)):
            return None
        return NativeGroupedAttention(self.pool, spec)

    def fuse_feed_forward(self, spec: FeedForwardSpec) -> NativeFeedForward | None:
        matrices = list(spec.mlp or ())
        if spec.router is not None:
            matrices.append(spec.router.weights)
        if not all(self._has(w.quant) for w in matrices):
            return None
        return NativeFeedForward(self.pool, spec)

    def close(self) -> None:
        self.pool.close()

    def _has(self, quant: QuantType) -> bool:
        return quant.ggml_id in self._native_types
