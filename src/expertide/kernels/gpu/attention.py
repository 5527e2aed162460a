"""Causal attention on the GPU over cached latents, or over cached keys and values per kv head.

Up to `SMALL_TOKENS` tokens each one's keys are split into pieces whose number depends on its own position only; more
tokens are a chunk of a prompt, walked in tiles from position 0. Keys are float16, or float32 and rounded when used;
rows of one head follow each other at any stride; with a page table the rows of a page do.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from expertide.kernels.gpu import launch_table
from expertide.kernels.gpu.device import attention as device
from expertide.kernels.gpu.matrix import GpuMatrix
from expertide.kernels.gpu.products import head_linear


def mla_attention(
    q_nope_TQN: Tensor,
    q_rope_TQC: Tensor,
    latent_SL: Tensor,
    k_rope_SC: Tensor,
    k_b: GpuMatrix,
    v_b: GpuMatrix,
    *,
    scale: float,
    first_position: Tensor,
    max_length: int,
    pages: Tensor | None = None,
    page_size: int = 0,
) -> Tensor:
    """o_TQU; see `Kernels.mla_attention`.

    Args:
        first_position: int32 [1] on the device: position of token 0.
        max_length: positions that there may be, this step's included: the grid of a recorded step.
        pages, page_size: int32 page of each `page_size` positions; None: row = position.
    """
    qa_TQL = head_linear(q_nope_TQN, k_b)
    mean_TQL = latent_attention(
        qa_TQL, q_rope_TQC, latent_SL, k_rope_SC, scale=scale, first_position=first_position, max_length=max_length,
        pages=pages, page_size=page_size,
    )  # fmt: skip
    return head_linear(mean_TQL, v_b)


def latent_attention(
    qa_TQL: Tensor,
    q_rope_TQC: Tensor,
    latent_SL: Tensor,
    k_rope_SC: Tensor,
    *,
    scale: float,
    first_position: Tensor,
    max_length: int,
    pages: Tensor | None = None,
    page_size: int = 0,
) -> Tensor:
    """The mean of the latents under each query's softmax, [T, Q, L]; the middle of `mla_attention`."""
    assert latent_SL.dtype == k_rope_SC.dtype and latent_SL.stride(1) == k_rope_SC.stride(1) == 1
    return _attend(
        qa_TQL, q_rope_TQC, latent_SL[None], k_rope_SC, None,
        scale=scale, first_position=first_position, max_length=max_length, pages=pages, page_size=page_size,
    )  # fmt: skip


def gqa_attention(
    q_TQD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    *,
    scale: float,
    first_position: Tensor,
    max_length: int,
    pages: Tensor | None = None,
    page_size: int = 0,
) -> Tensor:
    """o_TQD; see `Kernels.gqa_attention`, and `mla_attention` for the other arguments."""
    assert k_GSD.dtype == v_GSD.dtype and k_GSD.stride(2) == v_GSD.stride(2) == 1
    return _attend(
        q_TQD, None, k_GSD, None, v_GSD,
        scale=scale, first_position=first_position, max_length=max_length, pages=pages, page_size=page_size,
    )  # fmt: skip


def _attend(
    qa: Tensor,
    qb: Tensor | None,
    ka_GSA: Tensor,
    kb_SB: Tensor | None,
    v_GSV: Tensor | None,
    *,
    scale: float,
    first_position: Tensor,
    max_length: int,
    pages: Tensor | None,
    page_size: int,
) -> Tensor:
    num_tokens, num_heads, a_size = qa.shape
    num_groups = ka_GSA.shape[0]
    assert num_heads % num_groups == 0 and first_position.dtype == torch.int32
    assert ka_GSA.dtype in (torch.float16, torch.float32)
    qa = qa.contiguous()
    qb = qb if qb is None else qb.contiguous()
    values = ka_GSA if v_GSV is None else v_GSV
    v_size = values.shape[2]
    b_size = 0 if qb is None else qb.shape[2]
    heads_per_group = num_heads // num_groups
    is_decode = num_tokens <= launch_table.SMALL_TOKENS
    is_half = ka_GSA.dtype == torch.float16
    launch = launch_table.attention(is_decode=is_decode, is_half=is_half, key_size=a_size + b_size)
    most = launch_table.MAX_KEY_SPLITS
    out = torch.empty((num_tokens, num_heads, v_size), dtype=torch.float32, device=qa.device)
    if not out.numel():
        return out
    if is_decode:
        # The number of pieces is the kernel's to find; the grid covers the most there can be up to max_length.
        num_splits = min(most, triton.cdiv(max_length, launch_table.MIN_SPLIT_KEYS))
        grid = (num_tokens * triton.cdiv(heads_per_group, launch.queries), num_groups, num_splits)
        pieces = torch.empty((num_tokens, num_heads, most, v_size), dtype=torch.float32, device=qa.device)
        stats = torch.empty((num_tokens, num_heads, most, 2), dtype=torch.float32, device=qa.device)
    else:
        grid = (triton.cdiv(num_tokens * heads_per_group, launch.queries), num_groups, 1)
        pieces = stats = out
    device.attention_kernel[grid](
        qa, qa if qb is None else qb, ka_GSA, ka_GSA if kb_SB is None else kb_SB, values, pieces, stats,
        first_position, first_position if pages is None else pages, scale * math.log2(math.e),
        num_tokens, heads_per_group, num_heads, a_size, b_size,
        ka_GSA.stride(1), 0 if kb_SB is None else kb_SB.stride(0), values.stride(1),
        ka_GSA.stride(0), values.stride(0),
        A_SIZE=a_size, B_SIZE=b_size, V_SIZE=v_size,
        A_DIM=_padded(a_size), B_DIM=_padded(b_size) if b_size else 0, V_DIM=_padded(v_size),
        SHARES_VALUES=v_GSV is None, IS_DECODE=is_decode, IS_EXACT=is_decode,
        PAGE=0 if pages is None else page_size,
        QUERIES=launch.queries, KEYS=launch.keys, MIN_KEYS=launch_table.MIN_SPLIT_KEYS, MAX_SPLITS=most,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if is_decode:
        block = min(128, triton.next_power_of_2(v_size))
        device.merge_kernel[(num_tokens * num_heads, triton.cdiv(v_size, block))](
            pieces, stats, out, first_position, num_heads, V_SIZE=v_size, BLOCK=block, AT_ONCE=8,
            MIN_KEYS=launch_table.MIN_SPLIT_KEYS, MAX_SPLITS=most, num_warps=4,
        )  # fmt: skip
    return out


def _padded(size: int) -> int:
    """A tensor core's operand is at least 16 wide."""
    return max(16, int(triton.next_power_of_2(size)))
