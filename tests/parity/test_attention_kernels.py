"""Native latent attention, norm, rotation and router: against the reference, and against themselves bit for bit.

Attention rounds queries, keys and softmax weights to integers per block of 128 values (csrc/kernels/attention_table.h).
Against float32 that leaves about 3e-4 of the largest result; the tolerance is three times that.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests import native_samples as samples

from comparisons import assert_within_share
from expertide import _native
from expertide.formats import quants
from expertide.kernels import select, tiles
from expertide.kernels.qtensor import QTensor
from expertide.kernels.router import RouterSpec

ROUNDED = 1e-3
TILE = 64


def _packed(values: torch.Tensor) -> QTensor:
    raw = np.ascontiguousarray(values.numpy()).view(np.uint8)
    return QTensor.from_array(raw, quants.by_name("F32"), tuple(values.shape))


class _World:
    """Random queries for `total` positions, their cache, and the unfolding matrices."""

    def __init__(self, total: int, heads: int, nope: int, rope: int, rank: int, value: int, **options: object) -> None:
        generator = torch.Generator().manual_seed(total + rank)
        dtype = options.get("dtype", torch.float16)
        spread = options.get("spread", 1.0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.q_nope, self.q_rope = normal(total, heads, nope) * spread, normal(total, heads, rope) * spread
        # One row per position in one tensor, as the cache keeps them; what lies behind must not be read.
        rows = normal(total + 9, rank + rope).to(dtype)
        rows[total:] = float("nan")
        self.latent, self.k_rope = rows[:, :rank], rows[:, rank:]
        self.k_b = _packed(normal(heads, rank, nope) / nope**0.5)
        self.v_b = _packed(normal(heads, value, rank) / rank**0.5)
        self.scale = (rank + rope) ** -0.5

    def attend(self, kernels, begin: int, end: int) -> torch.Tensor:
        return kernels.mla_attention(
            self.q_nope[begin:end],
            self.q_rope[begin:end],
            self.latent[: max(end, 1) + 5],
            self.k_rope[: max(end, 1) + 5],
            self.k_b,
            self.v_b,
            scale=self.scale,
            first_position=begin,
        )


def _assert_close(found: torch.Tensor, expected: torch.Tensor, relative: float = ROUNDED) -> None:
    assert_within_share(found, expected, relative)


# Ranks below, at and beside the paddings of 32 and the blocks of 128; heads that do and do not fill groups of four.
SHAPES = [
    (1, 3, 2, 1, 1),
    (3, 6, 4, 8, 5),
    (4, 16, 8, 32, 16),
    (5, 16, 6, 130, 7),
    (8, 32, 16, 64, 32),
    (16, 8, 64, 200, 8),
]
# Around the borders of tiles; one token and chunks.
SPANS = [(0, 1), (0, 63), (0, 65), (62, 1), (63, 1), (64, 1), (60, 9), (127, 2), (130, 67), (1000, 1)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_agrees_with_the_reference(native, reference, shape, dtype) -> None:
    for past, tokens in SPANS:
        world = _World(past + tokens, *shape, dtype=dtype)
        _assert_close(world.attend(native, past, past + tokens), world.attend(reference, past, past + tokens))


def test_attention_agrees_for_the_shapes_of_v2_lite(native, reference) -> None:
    world = _World(700, 16, 128, 64, 512, 128)
    _assert_close(world.attend(native, 600, 700), world.attend(reference, 600, 700))


def test_attention_agrees_where_a_few_keys_take_all_the_weight(native, reference) -> None:
    # Scores of standard deviation 30. Their integers are off by up to 1/8,190 of a block's largest product: some
    # hundredths of a score, which show in the weights where two keys are nearly equal.
    world = _World(500, 4, 16, 8, 32, 16, spread=30.0)
    found, expected = world.attend(native, 400, 500), world.attend(reference, 400, 500)
    _assert_close(found, expected, 0.02)
    assert (found - expected).norm() < 0.004 * expected.norm()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_has_the_same_bits_for_any_chunks_and_threads(native, shape) -> None:
    world = _World(300, *shape)
    whole = world.attend(native, 0, 300)
    for chunk, threads in itertools.product((1, 7, 64, 100), (1, 3)):
        kernels = select("native", num_threads=threads)
        parts = [world.attend(kernels, begin, min(begin + chunk, 300)) for begin in range(0, 300, chunk)]
        kernels.close()
        assert torch.equal(torch.cat(parts), whole), f"chunks of {chunk}, {threads} threads"


@pytest.mark.parametrize("isa", samples.available_isas())
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_attention_has_the_same_bits_for_any_instruction_set(native, isa, dtype) -> None:
    for shape, (past, tokens) in itertools.product(SHAPES, SPANS):
        world = _World(past + tokens, *shape, dtype=dtype)
        world.latent[0, 0] = 1e-7  # subnormal as a half
        expected = world.attend(native, past, past + tokens)
        with samples.isa(isa):
            assert torch.equal(world.attend(native, past, past + tokens), expected), (shape, past, tokens)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("isa", ["base", "auto"])
def test_a_key_that_is_not_finite_shows_in_every_query_that_sees_it_and_in_no_other(native, bad, isa) -> None:
    for place in (40, 64, 99):
        world = _World(140, 4, 16, 8, 32, 16)
        clean = world.attend(native, 0, 140)
        world.latent[place, 3] = bad
        with samples.isa(isa):
            found = world.attend(native, 0, 140)
        assert torch.equal(found[:place], clean[:place])
        assert found[place:].isnan().all()


def test_unfolding_matrices_may_lie_apart(native, reference) -> None:
    world = _World(20, 4, 16, 8, 32, 16)
    joint = _packed(torch.randn(4, 24, 32, generator=torch.Generator().manual_seed(5)))
    world.v_b = QTensor(joint.address + 8 * 32 * 4, joint.quant, (4, 16, 32), joint, lead_stride=24 * 32 * 4)
    _assert_close(world.attend(native, 10, 20), world.attend(reference, 10, 20))


def test_key_rows_may_be_used_as_they_were_trained(native, reference) -> None:
    """k_b transposed, (Q, N, L) for (Q, L, N): for one token, several, and more columns than are folded at once."""
    for heads, nope, rope, rank, value in ((4, 16, 8, 32, 16), (3, 5, 4, 300, 7), (2, 128, 64, 512, 16)):
        world = _World(70, heads, nope, rope, rank, value)
        values = torch.from_numpy(world.k_b.decode()).transpose(1, 2).contiguous()
        rows = QTensor.from_array(values.numpy().view(np.uint8), quants.by_name("F32"), tuple(values.shape))
        k_b, world.k_b = world.k_b, replace(rows, is_transposed=True)
        found = world.attend(native, 0, 70)
        _assert_close(found, world.attend(reference, 0, 70))
        # The token alone, and beside others: the same sums in the same order.
        assert torch.equal(world.attend(native, 69, 70)[0], found[69])
        world.k_b = k_b
        _assert_close(found, world.attend(native, 0, 70))


@pytest.mark.parametrize(("heads", "rank", "rope"), [(16, 512, 64), (128, 512, 64), (8, 64, 16), (4, 32, 8)])
def test_the_plan_counts_enough_memory_for_native_attention(heads, rank, rope) -> None:
    for tokens, threads in itertools.product((1, 64, 512, 4096), (1, 2, 16, 32)):
        needed = _native.attention_workspace_bytes(heads, rank, 128, rope, tokens, threads)
        # Threads bring their own share beside the plan's workspace: prepare.THREAD_BYTES, 1 MiB.
        counted = tiles.native_latent_bytes(tokens, num_heads=heads, rank=rank, rope_dim=rope)
        assert needed <= counted + (threads << 20)
        assert needed <= tiles.attention_bytes(tokens, num_heads=heads, rank=rank, rope_dim=rope) + (threads << 20)


@pytest.mark.parametrize("cols", [1, 31, 32, 33, 512, 2048])
def test_rms_norm_agrees_also_on_views(native, reference, cols) -> None:
    generator = torch.Generator().manual_seed(cols)
    x, weight = torch.randn(9, cols + 5, generator=generator)[:, :cols], torch.randn(cols, generator=generator)
    _assert_close(native.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), 1e-6)
    alone = torch.cat([native.rms_norm(row[None], weight, 1e-6) for row in x])
    assert torch.equal(native.rms_norm(x.contiguous(), weight, 1e-6), alone)


@pytest.mark.parametrize("tokens", [1, 5, 700])
def test_rotation_is_exact_also_on_views(native, reference, tokens) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 6, 20, generator=generator)
    angles = torch.rand(tokens, 4, generator=generator) * 7
    cos, sin = angles.cos(), angles.sin()
    # The same float32 operations in the same order.
    assert torch.equal(native.rope(x[..., 12:], cos, sin), reference.rope(x[..., 12:], cos, sin))
    assert torch.equal(native.rope(x[:, 0, 12:], cos, sin), reference.rope(x[:, 0, 12:], cos, sin))


ROUTERS = [
    RouterSpec(1, 1),
    RouterSpec(64, 6),
    RouterSpec(64, 6, scale=2.5),
    RouterSpec(9, 9, renormalize=True),
    RouterSpec(160, 6, num_groups=8, top_groups=3, scale=16.0),
    RouterSpec(60, 4, score="sigmoid"),
    RouterSpec(
        256,
        8,
        score="sigmoid",
        has_bias=True,
        num_groups=8,
        top_groups=4,
        group_score="top2_sum",
        renormalize=True,
        scale=2.5,
    ),
    RouterSpec(12, 3, score="sigmoid", has_bias=True, num_groups=6, top_groups=6, group_score="top2_sum"),
    RouterSpec(12, 4, score="sigmoid", has_bias=True, num_groups=3, top_groups=1, group_score="max", renormalize=True),
]


@pytest.mark.parametrize("spec", ROUTERS, ids=str)
def test_the_router_chooses_the_same_experts(native, reference, spec) -> None:
    generator = torch.Generator().manual_seed(spec.num_experts)
    logits = torch.randn(600, spec.num_experts, generator=generator) * 3
    # Small shares are far apart in logits and near in float32: ties there would be decided by rounding.
    bias = torch.randn(spec.num_experts, generator=generator) * 0.2 if spec.has_bias else None
    ids = torch.zeros(600, dtype=torch.int64)
    found_ids, found = native.route(logits, spec, bias_E=bias, token_ids_T=ids)
    expected_ids, expected = reference.route(logits, spec, bias_E=bias, token_ids_T=ids)
    assert found_ids.dtype == torch.int32
    same = (found_ids == expected_ids).all(dim=1)
    assert same.sum() >= 599  # one near-tie that rounding may decide
    assert torch.allclose(found[same], expected[same], rtol=1e-5, atol=1e-7)
    alone = [native.route(row[None], spec, bias_E=bias, token_ids_T=ids[:1]) for row in logits[:50]]
    assert torch.equal(torch.cat([pair[0] for pair in alone]), found_ids[:50])
    assert torch.equal(torch.cat([pair[1] for pair in alone]), found[:50])


@pytest.mark.parametrize("spec", ROUTERS, ids=str)
def test_of_equal_scores_the_lower_expert_wins(native, reference, spec) -> None:
    logits = torch.zeros(2, spec.num_experts)
    logits[1, spec.num_experts // 2 :] = 1.0
    bias = torch.zeros(spec.num_experts) if spec.has_bias else None
    ids = torch.zeros(2, dtype=torch.int64)
    found, _ = native.route(logits, spec, bias_E=bias, token_ids_T=ids)
    expected, _ = reference.route(logits, spec, bias_E=bias, token_ids_T=ids)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("spec", ROUTERS, ids=str)
def test_logits_that_are_not_numbers_still_choose_different_experts_that_exist(native, spec) -> None:
    # The layer's end refuses the result; until then the ids go to the expert cache.
    logits = torch.full((3, spec.num_experts), float("nan"))
    logits[1, ::2] = 1.0
    logits[2] = float("inf")
    bias = torch.zeros(spec.num_experts) if spec.has_bias else None
    found, _ = native.route(logits, spec, bias_E=bias, token_ids_T=torch.zeros(3, dtype=torch.int64))
    for row in found.tolist():
        assert len(set(row)) == spec.num_experts_per_tok
        assert all(0 <= expert < spec.num_experts for expert in row)
