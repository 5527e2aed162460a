"""The router: every variant is one function with explicit parameters (`RouterSpec`)."""

from __future__ import annotations

import torch
from torch import Tensor

from expertide.kernels.router import RENORMALIZE_EPS, RouterSpec


def route(logits_TE: Tensor, spec: RouterSpec, *, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `Kernels.route`."""
    assert logits_TE.shape[-1] == spec.num_experts
    assert (bias_E is not None) == spec.has_bias
    logits_TE = logits_TE.to(torch.float32)
    scores_TE = torch.softmax(logits_TE, dim=-1) if spec.score == "softmax" else torch.sigmoid(logits_TE)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if spec.top_groups < spec.num_groups:
        choice_TE = _keep_best_groups(choice_TE, spec)
    topk_ids = _best(choice_TE, spec.num_experts_per_tok)
    weights_TK = torch.gather(scores_TE, 1, topk_ids)
    if spec.renormalize:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + RENORMALIZE_EPS)
    if spec.scale != 1.0:
        weights_TK = weights_TK * spec.scale
    return topk_ids.to(torch.int32), weights_TK


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest, largest first; a stable sort gives equal ones to the lower index."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


def _keep_best_groups(choice_TE: Tensor, spec: RouterSpec) -> Tensor:
    """-inf for the experts of all but the best groups.

    DeepSeek's own code puts 0 there, which differs only where a bias makes a choice value negative; transformers and
    llama.cpp use -inf.
    """
    grouped = choice_TE.view(choice_TE.shape[0], spec.num_groups, -1)
    rating = grouped.amax(dim=-1) if spec.group_score == "max" else grouped.topk(2, dim=-1).values.sum(dim=-1)
    drop = torch.ones_like(rating, dtype=torch.bool).scatter_(1, _best(rating, spec.top_groups), False)
    return grouped.masked_fill(drop[:, :, None], float("-inf")).view_as(choice_TE)
