"""Tensors and packed matrices in the form the native side takes: addresses and numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from expertide.kernels.qtensor import QTensor
from expertide.kernels.router import RENORMALIZE_EPS, RouterSpec


def floats(x: Tensor) -> Tensor:
    """x itself when it is what the native side reads: contiguous float32 in CPU memory."""
    assert x.device.type == "cpu"
    return x.to(torch.float32).contiguous()


def rows_of(x: Tensor, cols: int) -> Tensor:
    assert x.shape[-1] == cols
    return floats(x)


def strided(x: Tensor) -> Tensor:
    """x with adjacent values in the last axis; outer axes may have gaps."""
    assert x.device.type == "cpu"
    x = x.to(torch.float32)
    return x if x.stride(-1) == 1 else x.contiguous()


def dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def is_half(cache: Tensor) -> bool:
    assert cache.dtype in (torch.float16, torch.float32)
    return cache.dtype == torch.float16


def head_matrix(w: QTensor) -> tuple[int, int, int, bool]:
    """A (Q, rows, cols) matrix for the native side: address, type, bytes from head to head, is_transposed."""
    _, rows, _ = w.shape
    lead_stride = rows * w.row_bytes if w.lead_stride is None else w.lead_stride
    return (w.address, w.quant.ggml_id, lead_stride, w.is_transposed)


def router_numbers(spec: RouterSpec) -> tuple[int, int, bool, int, int, bool, bool, float, float]:
    """A RouterSpec for the native side."""
    return (
        spec.num_experts,
        spec.num_experts_per_tok,
        spec.score == "sigmoid",
        spec.num_groups,
        spec.top_groups,
        spec.group_score == "top2_sum",
        spec.renormalize,
        RENORMALIZE_EPS,
        spec.scale,
    )


def matrix(w: QTensor) -> tuple[int, int, int, int]:
    assert len(w.shape) == 2
    return (w.address, w.quant.ggml_id, w.rows, w.cols)
