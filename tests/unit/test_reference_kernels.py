"""Reference ops against definitions written out in float64."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from expertide.formats import quants
from expertide.kernels import select, tiles
from expertide.kernels.qtensor import QTensor
from expertide.kernels.rope import RopeSpec, YarnSpec, yarn_magnitude

KERNELS = select("reference", num_threads=1)


@pytest.mark.parametrize(("past", "tokens"), [(0, 1), (0, 70), (5, 1), (5, 130), (2047, 1), (2040, 20), (4100, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_in_tiles_is_attention(past: int, tokens: int, dtype: torch.dtype) -> None:
    # 3 heads; more cached rows than are asked for, filled with NaN, which must not be read.
    generator = torch.Generator().manual_seed(past + tokens)
    q_nope, q_rope = (torch.randn(tokens, 3, size, generator=generator) for size in (6, 4))
    held = past + tokens
    latent, k_rope = (torch.randn(held + 9, size, generator=generator).to(dtype) for size in (8, 4))
    latent[held:], k_rope[held:] = float("nan"), float("nan")
    k_b, v_b = torch.randn(3, 8, 6, generator=generator), torch.randn(3, 5, 8, generator=generator)
    found = KERNELS.mla_attention(
        q_nope, q_rope, latent, k_rope, _packed(k_b), _packed(v_b), scale=0.4, first_position=past
    )

    keys = torch.einsum("sl,qln->sqn", latent[:held].double(), k_b.double())
    values = torch.einsum("sl,qul->squ", latent[:held].double(), v_b.double())
    scores = torch.einsum("tqn,sqn->tqs", q_nope.double(), keys)
    scores += torch.einsum("tqc,sc->tqs", q_rope.double(), k_rope[:held].double())
    future = torch.arange(held)[None, :] > torch.arange(past, held)[:, None]
    weights = (scores * 0.4).masked_fill(future[:, None, :], float("-inf")).softmax(dim=-1)
    expected = torch.einsum("tqs,squ->tqu", weights, values)
    # Sums of up to 4,103 float32 products of size 1.
    assert (found.double() - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("past", "tokens"), [(0, 1), (0, 70), (5, 1), (5, 130), (2047, 1), (2040, 20), (4100, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (4, 1)])
def test_grouped_attention_in_tiles_is_attention(
    heads: int, kv_heads: int, past: int, tokens: int, dtype: torch.dtype
) -> None:
    # More cached rows than are asked for, filled with NaN, which must not be read.
    generator = torch.Generator().manual_seed(past + tokens)
    held = past + tokens
    q = torch.randn(tokens, heads, 10, generator=generator)
    k, v = (torch.randn(kv_heads, held + 9, 10, generator=generator).to(dtype) for _ in range(2))
    k[:, held:], v[:, held:] = float("nan"), float("nan")
    found = KERNELS.gqa_attention(q, k, v, scale=0.4, first_position=past)

    keys, values = (rows[:, :held].double().repeat_interleave(heads // kv_heads, dim=0) for rows in (k, v))
    scores = torch.einsum("tqd,qsd->tqs", q.double(), keys) * 0.4
    future = torch.arange(held)[None, :] > torch.arange(past, held)[:, None]
    weights = scores.masked_fill(future[:, None, :], float("-inf")).softmax(dim=-1)
    expected = torch.einsum("tqs,qsd->tqd", weights, values)
    # Means of float32 values of size 1 under a softmax over up to 4,103 keys.
    assert (found.double() - expected).abs().max() < 2e-5


def test_grouped_attention_works_in_several_query_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(50, 4, 8, generator=generator)
    k, v = (torch.randn(2, 60, 8, generator=generator) for _ in range(2))
    whole = KERNELS.gqa_attention(q, k, v, scale=0.3, first_position=10)
    monkeypatch.setattr("expertide.kernels.tiles.QUERY_TILE_SCORES", 4 * tiles.KEY_TILE * 7)  # 7 queries
    assert torch.allclose(KERNELS.gqa_attention(q, k, v, scale=0.3, first_position=10), whole, atol=1e-6)


def test_linear_is_the_same_in_one_tile_and_in_many(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(100, 32, generator=torch.Generator().manual_seed(0))
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    whole = KERNELS.linear(x, _packed(w))
    monkeypatch.setattr("expertide.kernels.reference.packed.DECODED_TILE_BYTES", 32 * 4 * 9)  # 9 rows
    assert torch.allclose(KERNELS.linear(x, _packed(w)), whole, atol=1e-6)
    assert torch.allclose(whole, x @ w.T, atol=1e-6)


def test_a_wide_matrix_is_never_decoded_whole() -> None:
    quant = quants.by_name("Q4_0")
    raw = np.zeros((40_000, 2048 // 32 * 18), np.uint8)  # 328 MB decoded
    x = torch.zeros(1, 2048)
    w = QTensor.from_array(raw, quant, (40_000, 2048))
    tracemalloc.start()
    KERNELS.linear(x, w)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * tiles.DECODED_TILE_BYTES <= 32 << 20


def test_head_linear_takes_heads_that_lie_apart() -> None:
    joint = torch.randn(4, 10, 16, generator=torch.Generator().manual_seed(2))  # per head 6 rows, then 4 rows
    x = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(3))
    whole = _packed(joint)
    lower = QTensor(whole.address + 6 * 16 * 4, whole.quant, (4, 4, 16), whole.owner, lead_stride=10 * 16 * 4)
    expected = torch.einsum("tqi,qoi->tqo", x, joint[:, 6:])
    assert torch.allclose(KERNELS.head_linear(x, lower), expected, atol=1e-5)
    for head in range(4):
        assert np.array_equal(lower.index(head).decode(), joint[head, 6:].numpy())


def test_embedding_picks_rows() -> None:
    w = torch.randn(50, 8, generator=torch.Generator().manual_seed(4))
    ids = torch.tensor([49, 0, 7, 7])
    assert torch.equal(KERNELS.embedding(ids, _packed(w)), w[ids])


def test_moe_sum_adds_in_the_order_of_k() -> None:
    # In float32 1e8 + 1 - 1e8 is 0, and 1 + 1e8 - 1e8 too, but 1e8 - 1e8 + 1 is 1: the order shows.
    results = torch.tensor([[[1e8], [-1e8], [1.0]], [[1e8], [1.0], [-1e8]]])
    assert KERNELS.moe_sum(results, torch.ones(2, 3)).tolist() == [[1.0], [0.0]]


def test_rope_turns_adjacent_pairs() -> None:
    x = torch.tensor([[1.0, 0.0, 0.0, 2.0]])
    angle = torch.tensor([[0.5, 0.25]])
    cos, sin = angle.cos(), angle.sin()
    expected = torch.tensor([[cos[0, 0], sin[0, 0], -2 * sin[0, 1], 2 * cos[0, 1]]])
    assert torch.allclose(KERNELS.rope(x, cos, sin), expected)
    assert torch.equal(KERNELS.rope(x[:, None, :], cos, sin)[:, 0], KERNELS.rope(x, cos, sin))


def test_rope_turns_the_halves_against_each_other() -> None:
    # The same turns as of adjacent pairs, on values in another order.
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(5))
    angle = torch.randn(5, 4, generator=torch.Generator().manual_seed(6))
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # place in `x` of each value of the adjacent form
    turned = KERNELS.rope(x[..., order], angle.cos(), angle.sin())
    assert torch.equal(KERNELS.rope(x, angle.cos(), angle.sin(), pairs="halves")[..., order], turned)


def test_yarn_frequencies_of_deepseek_v2_lite() -> None:
    # Made with DeepseekV2YarnRotaryEmbedding's formulas: factor 40 over 4,096 positions, base 10,000, 64 dims.
    found = RopeSpec(64, 10000.0, YarnSpec(40.0, 4096)).inverse_frequencies()
    expected = {0: 1.0, 1: 0.7498942, 10: 5.623413e-2, 11: 3.900693e-2, 12: 2.687936e-2, 16: 5.5e-3, 20: 7.905694e-4}
    expected |= {22: 1.778279e-4, 23: 3.333804e-5, 31: 3.333804e-6}
    assert {pair: found[pair] for pair in expected} == pytest.approx(expected, rel=1e-6)
    assert yarn_magnitude(40.0, 0.707) == pytest.approx(1.2608037774)
    assert yarn_magnitude(0.5, 0.707) == 1.0


def test_ops_do_not_depend_on_the_default_dtype() -> None:
    w, x = torch.randn(6, 4), torch.randn(2, 4)
    torch.set_default_dtype(torch.float64)
    try:
        assert KERNELS.linear(x, _packed(w)).dtype == torch.float32
        assert KERNELS.rms_norm(x, torch.ones(4, dtype=torch.float32), 1e-6).dtype == torch.float32
        assert KERNELS.embedding(torch.tensor([1]), _packed(w)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def _packed(values: torch.Tensor) -> QTensor:
    raw = np.ascontiguousarray(values.numpy()).view(np.uint8)
    return QTensor.from_array(raw, quants.by_name("F32"), tuple(values.shape))
