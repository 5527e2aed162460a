"""Causal attention of query heads on shared key/value heads, with bounded workspace.

for a tile of queries (see tiles.py)
    for key tiles 0.., 2048.., 4096.. in this order        absolute positions, so that a tile holds the same keys
        scores, running maximum, running sum, running Σ p·v         whatever chunk asks

The Q / G query heads of one key/value head are rows of one product: a batch of G products per tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertide.kernels.reference.attention import mask_future, next_weights
from expertide.kernels.tiles import KEY_TILE, queries_per_tile


def gqa_attention(q_TQD: Tensor, k_GSD: Tensor, v_GSD: Tensor, *, scale: float, first_position: int) -> Tensor:
    """See `Kernels.gqa_attention`."""
    num_tokens, num_heads, _ = q_TQD.shape
    assert num_heads % k_GSD.shape[0] == 0, (q_TQD.shape, k_GSD.shape)
    assert k_GSD.shape[1] >= first_position + num_tokens and k_GSD.shape == v_GSD.shape
    num_queries = queries_per_tile(num_heads)
    outputs = []
    for begin in range(0, num_tokens, num_queries):
        end = min(begin + num_queries, num_tokens)
        num_keys = first_position + end
        outputs.append(
            _attend(
                q_TQD[begin:end] * scale,
                k_GSD[:, :num_keys],
                v_GSD[:, :num_keys],
                first_position=first_position + begin,
            )
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(q_TQD: Tensor, k_GSD: Tensor, v_GSD: Tensor, *, first_position: int) -> Tensor:
    """o_TQD for one tile of (already scaled) queries."""
    num_tokens, num_heads, head_dim = q_TQD.shape
    num_groups, num_held, _ = k_GSD.shape
    heads_per_group = num_heads // num_groups
    num_rows = num_tokens * heads_per_group
    q_GRD = q_TQD.view(num_tokens, num_groups, heads_per_group, head_dim).transpose(0, 1)
    q_GRD = q_GRD.reshape(num_groups, num_rows, head_dim)
    # One set of buffers for all key tiles: fresh ones of this size would come from, and fragment, the heap each time.
    widest = min(KEY_TILE, num_held)
    score_buffer = q_GRD.new_empty(num_groups * num_rows * widest)
    key_buffer, value_buffer = (q_GRD.new_empty(num_groups * widest * head_dim) for _ in range(2))
    highest = q_GRD.new_full((num_groups, num_rows, 1), float("-inf"))
    total = q_GRD.new_zeros((num_groups, num_rows, 1))
    mean = q_GRD.new_zeros((num_groups, num_rows, head_dim))
    for begin in range(0, num_held, KEY_TILE):
        num_keys = min(KEY_TILE, num_held - begin)
        size = num_groups * num_keys * head_dim
        k, v = (
            buffer[:size].view(num_groups, num_keys, head_dim).copy_(rows[:, begin : begin + num_keys])
            for buffer, rows in ((key_buffer, k_GSD), (value_buffer, v_GSD))
        )
        scores = score_buffer[: num_groups * num_rows * num_keys].view(num_groups, num_rows, num_keys)
        torch.bmm(q_GRD, k.transpose(1, 2), out=scores)
        if begin + num_keys - 1 > first_position:
            by_token = scores.view(num_groups, num_tokens, heads_per_group, num_keys)
            for group in range(num_groups):
                mask_future(by_token[group], begin, first_position)
        weights, highest = next_weights(scores, highest, total, mean, is_first=begin == 0)
        mean.baddbmm_(weights, v)
    mean.div_(total)
    o_GTrD = mean.view(num_groups, num_tokens, heads_per_group, head_dim)
    return o_GTrD.transpose(0, 1).reshape(num_tokens, num_heads, head_dim)
