"""Norm, rotation, gates and the router on the GPU, and the reference."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.samples import assert_close, normal

from expertide.kernels import select
from expertide.kernels.gpu import rows
from expertide.kernels.router import RouterSpec

REFERENCE = select("reference", num_threads=1)
# Exponentials, roots and sums of a row in another order: a few units in the seventh decimal.
ROUNDING = 2e-6

ROUTERS = {
    "softmax": RouterSpec(64, 6),
    "scaled": RouterSpec(64, 6, renormalize=True, scale=2.5),
    "one": RouterSpec(5, 1),
    "all": RouterSpec(7, 7, renormalize=True),
    "sigmoid with bias": RouterSpec(24, 4, score="sigmoid", has_bias=True, renormalize=True, scale=1.8),
    "groups by maximum": RouterSpec(20, 3, num_groups=4, top_groups=2, scale=16.0),
    "groups by two best": RouterSpec(
        24, 4, score="sigmoid", has_bias=True, num_groups=8, top_groups=4, group_score="top2_sum", renormalize=True
    ),
}


@pytest.mark.parametrize("shape", [(1, 1), (3, 77), (2, 3, 128), (1, 2048)])
def test_norm_agrees(device, shape) -> None:
    x, weight = normal(*shape) * 30, normal(shape[-1], seed=8)
    found = rows.rms_norm(x.to(device), weight.to(device), 1e-6)
    assert_close(found, REFERENCE.rms_norm(x, weight, 1e-6), ROUNDING)


@pytest.mark.parametrize("pairs", ["adjacent", "halves"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 64), (2, 5, 12)])
def test_rope_agrees(device, shape, pairs) -> None:
    x = normal(*shape)
    cos, sin = normal(shape[0], shape[-1] // 2, seed=1), normal(shape[0], shape[-1] // 2, seed=2)
    found = rows.rope(x.to(device), cos.to(device), sin.to(device), pairs=pairs)
    assert_close(found, REFERENCE.rope(x, cos, sin, pairs=pairs), ROUNDING)


def test_gates_agree(device) -> None:
    gate, up = normal(3, 700) * 5, normal(3, 700, seed=1)
    assert_close(rows.swiglu(gate.to(device), up.to(device)), REFERENCE.swiglu(gate.clone(), up), ROUNDING)
    share = normal(700, seed=2) * 0.1
    found = rows.gate_rows(up.to(device), gate.to(device), share.to(device))
    assert_close(found, REFERENCE.gate_rows(up, gate, share), ROUNDING)


@pytest.mark.parametrize("name", ROUTERS)
def test_the_router_agrees(device, name) -> None:
    spec = ROUTERS[name]
    logits = normal(9, spec.num_experts) * 2
    bias = normal(spec.num_experts, seed=3) * 0.1 if spec.has_bias else None
    ids, weights = rows.route(logits.to(device), spec, bias_E=None if bias is None else bias.to(device))
    expected_ids, expected = REFERENCE.route(logits, spec, bias_E=bias, token_ids_T=torch.zeros(9, dtype=torch.int64))
    assert torch.equal(ids.cpu(), expected_ids)
    assert_close(weights, expected, ROUNDING)


@pytest.mark.parametrize("spec", [RouterSpec(12, 5), RouterSpec(12, 4, num_groups=4, top_groups=2)])
def test_equal_scores_go_to_the_lower_id(device, spec) -> None:
    logits = torch.zeros(2, 12)
    logits[1, 7] = 1
    ids, _ = rows.route(logits.to(device), spec, bias_E=None)
    expected, _ = REFERENCE.route(logits, spec, bias_E=None, token_ids_T=torch.zeros(2, dtype=torch.int64))
    assert torch.equal(ids.cpu(), expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_router_that_meets_nan_still_names_experts_that_exist(device) -> None:
    ids, weights = rows.route(torch.full((1, 5), float("nan"), device=device), RouterSpec(5, 2), bias_E=None)
    assert ((ids >= 0) & (ids < 5)).all() and weights.isnan().all()
