"""Causal latent attention in absorbed form, with bounded workspace.

for a tile of queries (see tiles.py)
    qa = k_b · q_nope
    for key tiles 0.., 2048.., 4096.. in this order        absolute positions, so that a tile holds the same keys
        scores, running maximum, running sum, running Σ p·latent    whatever chunk asks
    o = v_b · (Σ p·latent / sum)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from expertide.kernels.qtensor import QTensor
from expertide.kernels.tiles import KEY_TILE, queries_per_tile

# Shares of the softmax below this become 0: beside a largest share of 1 they are lost in float32 anyway, and denormal
# numbers made the two products 23 times slower (128 queries, 8,192 keys, scores of standard deviation 25).
NO_WEIGHT = 1e-30


def mla_attention(
    q_nope_TQN: Tensor,
    q_rope_TQC: Tensor,
    latent_SL: Tensor,
    k_rope_SC: Tensor,
    k_b: QTensor,
    v_b: QTensor,
    *,
    scale: float,
    first_position: int,
    head_linear: Callable[[Tensor, QTensor], Tensor],
) -> Tensor:
    """See `Kernels.mla_attention`; `head_linear` multiplies with the packed per-head matrices."""
    num_tokens, num_heads, _ = q_nope_TQN.shape
    assert latent_SL.shape[0] >= first_position + num_tokens
    num_queries = queries_per_tile(num_heads)
    outputs = []
    for begin in range(0, num_tokens, num_queries):
        end = min(begin + num_queries, num_tokens)
        num_keys = first_position + end
        attended = _attend(
            head_linear(q_nope_TQN[begin:end], k_b),
            q_rope_TQC[begin:end],
            latent_SL[:num_keys],
            k_rope_SC[:num_keys],
            scale=scale,
            first_position=first_position + begin,
        )
        outputs.append(head_linear(attended, v_b))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(
    qa_TQL: Tensor, q_rope_TQC: Tensor, latent_SL: Tensor, k_rope_SC: Tensor, *, scale: float, first_position: int
) -> Tensor:
    """ol_TQL: for each query and head, the mean of the latents under the softmax of its scores."""
    num_tokens, num_heads, rank = qa_TQL.shape
    num_rows = num_tokens * num_heads
    qa = qa_TQL.reshape(num_rows, rank)
    q_rope = q_rope_TQC.reshape(num_rows, -1)
    # One set of buffers for all key tiles: fresh ones of this size would come from, and fragment, the heap each time.
    widest = min(KEY_TILE, latent_SL.shape[0])
    score_buffer = qa.new_empty(num_rows * widest)
    latent_buffer = qa.new_empty((widest, rank))
    k_rope_buffer = qa.new_empty((widest, q_rope.shape[1]))
    highest = qa.new_full((num_rows, 1), float("-inf"))
    total = qa.new_zeros((num_rows, 1))
    mean = qa.new_zeros((num_rows, rank))
    for begin in range(0, latent_SL.shape[0], KEY_TILE):
        num_keys = min(KEY_TILE, latent_SL.shape[0] - begin)
        latent = latent_buffer[:num_keys].copy_(latent_SL[begin : begin + num_keys])
        k_rope = k_rope_buffer[:num_keys].copy_(k_rope_SC[begin : begin + num_keys])
        scores = score_buffer[: num_rows * num_keys].view(num_rows, num_keys)
        torch.mm(q_rope, k_rope.T, out=scores)
        scores.addmm_(qa, latent.T, beta=scale, alpha=scale)
        if begin + num_keys - 1 > first_position:
            mask_future(scores.view(num_tokens, num_heads, num_keys), begin, first_position)
        weights, highest = next_weights(scores, highest, total, mean, is_first=begin == 0)
        mean.addmm_(weights, latent)
    return mean.div_(total).view(num_tokens, num_heads, rank)


def next_weights(
    scores: Tensor, highest: Tensor, total: Tensor, mean: Tensor, *, is_first: bool
) -> tuple[Tensor, Tensor]:
    """One more tile of keys in a softmax that goes tile by tile.

    Args:
        scores: [..., s], overwritten.
        highest, total: [..., 1]; mean: [..., L]; what earlier tiles left. `total` takes this tile in, `mean` is scaled
            for the caller to add weights · values; `highest` is used up.

    Returns:
        weights [..., s] and the new highest score [..., 1].
    """
    # Tile 0 holds position 0, which every query sees: its maximum is finite; that of later tiles may be -inf.
    new_highest = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
    weights = torch.nn.functional.threshold(scores.sub_(new_highest).exp_(), NO_WEIGHT, 0.0, inplace=True)
    if not is_first:
        shrink = highest.sub_(new_highest).exp_()
        total.mul_(shrink)
        mean.mul_(shrink)
    total.add_(weights.sum(dim=-1, keepdim=True))
    return weights, new_highest


def mask_future(scores_TQs: Tensor, first_key: int, first_position: int) -> None:
    """Set scores of keys behind each query's own position to -inf, in place."""
    num_tokens, _, num_keys = scores_TQs.shape
    keys = torch.arange(first_key, first_key + num_keys)
    positions = torch.arange(first_position, first_position + num_tokens)
    scores_TQs.masked_fill_((keys[None, :] > positions[:, None])[:, None, :], float("-inf"))
