"""Norm, rotation, gates and the router on the GPU. Meanings are those of `ops.Kernels`; everything is float32."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from expertide.kernels.gpu.device import rows as device
from expertide.kernels.rope import RopePairs
from expertide.kernels.router import RouterSpec


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x²) + eps) * weight over the last axis."""
    x = _checked(x)
    y = torch.empty_like(x)
    cols = x.shape[-1]
    if x.numel():
        device.rms_norm_kernel[(x.numel() // cols,)](
            x, weight, y, eps, cols, BLOCK=triton.next_power_of_2(cols), num_warps=_warps(cols)
        )
    return y


def rope(x: Tensor, cos_TP: Tensor, sin_TP: Tensor, *, pairs: RopePairs = "adjacent") -> Tensor:
    """Pair i of the last axis of [T, C] or [T, Q, C] turned by angle i; P = C / 2."""
    x = _checked(x)
    y = torch.empty_like(x)
    num_heads = x.shape[1] if x.dim() == 3 else 1
    num_pairs = x.shape[-1] // 2
    assert cos_TP.shape == sin_TP.shape == (len(x), num_pairs) and cos_TP.is_contiguous() and sin_TP.is_contiguous()
    if x.numel():
        device.rope_kernel[(len(x) * num_heads,)](
            x, cos_TP, sin_TP, y, num_heads, num_pairs, IS_ADJACENT=pairs == "adjacent",
            BLOCK=triton.next_power_of_2(num_pairs), num_warps=1,
        )  # fmt: skip
    return y


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = _checked(gate), _checked(up)
    assert gate.shape == up.shape
    y = torch.empty_like(gate)
    if y.numel():
        device.swiglu_kernel[(triton.cdiv(y.numel(), 1024),)](gate, up, y, y.numel(), BLOCK=1024, num_warps=4)
    return y


def gate_rows(y_TH: Tensor, x_TH: Tensor, gate_H: Tensor) -> Tensor:
    """sigmoid(gate · x[t]) * y[t]."""
    y_TH, x_TH = _checked(y_TH), _checked(x_TH)
    out = torch.empty_like(y_TH)
    cols = y_TH.shape[-1]
    if out.numel():
        device.gate_rows_kernel[(len(y_TH),)](
            y_TH, x_TH, gate_H, out, cols, BLOCK=triton.next_power_of_2(cols), num_warps=_warps(cols)
        )
    return out


def route(logits_TE: Tensor, spec: RouterSpec, *, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """(topk_ids_TK int32, topk_weights_TK float32): heaviest choice first, equal ones by lower id."""
    logits_TE = _checked(logits_TE)
    num_tokens, num_experts = logits_TE.shape
    assert num_experts == spec.num_experts and (bias_E is not None) == spec.has_bias
    per_token = spec.num_experts_per_tok
    ids = torch.empty((num_tokens, per_token), dtype=torch.int32, device=logits_TE.device)
    weights = torch.empty((num_tokens, per_token), dtype=torch.float32, device=logits_TE.device)
    if num_tokens:
        device.route_kernel[(num_tokens,)](
            logits_TE, logits_TE if bias_E is None else bias_E, ids, weights, num_experts, float(spec.scale),
            K=per_token, NUM_GROUPS=spec.num_groups, TOP_GROUPS=spec.top_groups, IS_SIGMOID=spec.score == "sigmoid",
            HAS_BIAS=spec.has_bias, IS_TOP2_SUM=spec.group_score == "top2_sum", RENORMALIZE=spec.renormalize,
            EXPERTS=triton.next_power_of_2(num_experts), SLOTS=triton.next_power_of_2(per_token), num_warps=1,
        )  # fmt: skip
    return ids, weights


def _checked(x: Tensor) -> Tensor:
    assert x.dtype == torch.float32
    return x.contiguous()


def _warps(cols: int) -> int:
    """Warps for a program that holds a row: 16 values a thread, and at most 16 warps."""
    return max(1, min(16, int(triton.next_power_of_2(cols)) // 512))
