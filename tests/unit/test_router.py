"""The router against a slow version written from the papers, one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from expertide.errors import UnsupportedError
from expertide.kernels import select
from expertide.kernels.router import RouterSpec

SPECS = {
    "softmax": RouterSpec(8, 3),
    "softmax, scaled": RouterSpec(8, 2, scale=16.0),
    "softmax, sum to one": RouterSpec(8, 3, renormalize=True),
    "softmax, groups by their best": RouterSpec(12, 3, num_groups=4, top_groups=2),
    "sigmoid, bias": RouterSpec(8, 3, score="sigmoid", has_bias=True, renormalize=True, scale=2.5),
    "sigmoid, bias, groups by their two best": RouterSpec(
        16, 4, score="sigmoid", has_bias=True, num_groups=4, top_groups=2, group_score="top2_sum", renormalize=True
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_choices_and_weights_follow_the_definition(name: str) -> None:
    spec = SPECS[name]
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(200, spec.num_experts)).astype(np.float32)
    bias = rng.normal(size=spec.num_experts).astype(np.float32) if spec.has_bias else None
    ids, weights = _route(logits, spec, bias)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    for token in range(len(logits)):
        expected_ids, expected_weights = _slow_route(logits[token].astype(np.float64), spec, bias)
        assert ids[token].tolist() == expected_ids
        assert weights[token].tolist() == pytest.approx(expected_weights, rel=1e-5)  # float32 against float64


def test_equal_scores_go_to_the_lower_id() -> None:
    ids, weights = _route(np.zeros((2, 64), np.float32), RouterSpec(64, 6), None)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert weights.tolist() == [pytest.approx([1 / 64] * 6)] * 2


def test_the_bias_chooses_but_does_not_weigh() -> None:
    bias = np.array([0, 0, 5, 0], np.float32)
    ids, weights = _route(np.array([[2, 1, -3, 0]], np.float32), RouterSpec(4, 1, score="sigmoid", has_bias=True), bias)
    assert ids.tolist() == [[2]]
    assert float(weights) == pytest.approx(1 / (1 + math.exp(3)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"score": "sqrt_softplus"}, "sqrt_softplus"),
        ({"group_score": "mean"}, "mean"),
        ({"num_experts_per_tok": 9}, "9 experts per token of 8"),
        ({"num_experts_per_tok": 0}, "0 experts per token"),
        ({"num_groups": 3}, "do not divide into 3 groups"),
        ({"num_groups": 4, "top_groups": 5}, "5 groups kept of 4"),
        ({"num_groups": 4, "top_groups": 1}, "hold only 2"),
        ({"num_groups": 8, "top_groups": 4, "group_score": "top2_sum"}, "two best"),
        ({"has_bias": True}, "selection bias"),
        ({"scale": 0.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
    ],
)
def test_unknown_combinations_are_refused_by_name(fields: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        RouterSpec(**{"num_experts": 8, "num_experts_per_tok": 3, **fields})  # type: ignore[arg-type]


def _route(logits: np.ndarray, spec: RouterSpec, bias: np.ndarray | None) -> tuple[torch.Tensor, torch.Tensor]:
    return select("reference", num_threads=1).route(
        torch.from_numpy(logits),
        spec,
        bias_E=None if bias is None else torch.from_numpy(bias),
        token_ids_T=torch.zeros(len(logits), dtype=torch.int64),
    )


def _slow_route(logits: np.ndarray, spec: RouterSpec, bias: np.ndarray | None) -> tuple[list[int], list[float]]:
    experts = range(spec.num_experts)
    if spec.score == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    choice = [scores[e] + (float(bias[e]) if bias is not None else 0.0) for e in experts]
    size = spec.num_experts // spec.num_groups
    groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(spec.num_groups)]
    rating = [g[0] if spec.group_score == "max" else g[0] + g[1] for g in groups]
    kept = sorted(range(spec.num_groups), key=lambda g: -rating[g])[: spec.top_groups]
    allowed = [e for e in experts if e // size in kept]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: spec.num_experts_per_tok]
    weights = [scores[e] for e in chosen]
    if spec.renormalize:
        weights = [w / sum(weights) for w in weights]
    return chosen, [w * spec.scale for w in weights]
