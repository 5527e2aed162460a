"""Attention on the GPU, and the reference."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.samples import assert_close, matrix, normal

from expertide.kernels import select
from expertide.kernels.gpu import attention, launch_table
from expertide.kernels.qtensor import QTensor

REFERENCE = select("reference", num_threads=1)
# Weights of the softmax are multiplied as float16, in a chunk the queries too: a score of 4 is then off by 2**-10. One
# of some thousand results was off by 1.1e-3 of the largest on an H200.
HALF = 2e-3


def position(first: int, device: str) -> torch.Tensor:
    return torch.tensor([first], dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "first"), [(1, 0), (1, 63), (1, 64), (3, 126), (1, 200), (17, 0), (19, 41)])
def test_grouped_attention_agrees(device, dtype, num_tokens, first) -> None:
    heads, groups, dim, rows = 6, 2, 24, first + num_tokens + 3
    q = normal(num_tokens, heads, dim) * 2
    k, v = (normal(groups, rows, dim, seed=seed).to(dtype) for seed in (1, 2))
    found = attention.gqa_attention(
        q.to(device), k.to(device), v.to(device),
        scale=0.3, first_position=position(first, device), max_length=rows,
    )  # fmt: skip
    expected = REFERENCE.gqa_attention(q, k, v, scale=0.3, first_position=first)
    assert_close(found, expected, HALF)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize(("num_tokens", "first"), [(1, 0), (2, 100), (18, 50)])
def test_latent_attention_agrees(device, dtype, is_joint, num_tokens, first) -> None:
    heads, nope, rope_dim, value, rank, rows = 3, 32, 8, 5, 64, first + num_tokens
    q_nope, q_rope = normal(num_tokens, heads, nope), normal(num_tokens, heads, rope_dim, seed=1)
    latent, k_rope = (normal(rows, size, seed=2).to(dtype) for size in (rank, rope_dim))
    if is_joint:
        kv_b, held = matrix("Q8_0", heads * (nope + value), rank, device)
        k_b = kv_b.heads(heads, rows=nope, stride=nope + value, is_transposed=True)
        v_b = kv_b.heads(heads, rows=value, first_row=nope, stride=nope + value)
        stride = (nope + value) * held.row_bytes
        held_k = QTensor(held.address, held.quant, (heads, nope, rank), held, stride, is_transposed=True)
        held_v = QTensor(held.address + nope * held.row_bytes, held.quant, (heads, value, rank), held, stride)
    else:
        k_all, k_held = matrix("Q8_0", heads * rank, nope, device)
        v_all, v_held = matrix("Q8_0", heads * value, rank, device)
        k_b, v_b = k_all.heads(heads, rows=rank), v_all.heads(heads, rows=value)
        held_k = QTensor(k_held.address, k_held.quant, (heads, rank, nope), k_held)
        held_v = QTensor(v_held.address, v_held.quant, (heads, value, rank), v_held)
    found = attention.mla_attention(
        q_nope.to(device), q_rope.to(device), latent.to(device), k_rope.to(device), k_b, v_b,
        scale=0.05, first_position=position(first, device), max_length=rows,
    )  # fmt: skip
    expected = REFERENCE.mla_attention(q_nope, q_rope, latent, k_rope, held_k, held_v, scale=0.05, first_position=first)
    # Beyond 16 tokens k_b and v_b go through float16 products as well.
    assert_close(found, expected, 3 * HALF if num_tokens > launch_table.SMALL_TOKENS else HALF)


def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it(device) -> None:
    q = normal(16, 4, 16).to(device)
    k, v = (normal(2, 90, 16, seed=seed).to(device, torch.float16) for seed in (1, 2))
    together = attention.gqa_attention(q, k, v, scale=0.3, first_position=position(70, device), max_length=90)
    for t in (0, 15):
        alone = attention.gqa_attention(
            q[t : t + 1], k, v, scale=0.3, first_position=position(70 + t, device), max_length=90
        )
        assert torch.equal(alone[0], together[t])


def test_a_chunk_gives_the_same_bits_wherever_it_is_cut(device) -> None:
    q = normal(40, 3, 16).to(device)
    k, v = (normal(1, 40, 16, seed=seed).to(device, torch.float16) for seed in (1, 2))
    whole = attention.gqa_attention(q, k, v, scale=0.3, first_position=position(0, device), max_length=40)
    pieces = [
        attention.gqa_attention(q[a:b], k, v, scale=0.3, first_position=position(a, device), max_length=40)
        for a, b in ((0, 17), (17, 40))
    ]
    assert torch.equal(torch.cat(pieces), whole)


def test_a_longer_grid_than_needed_changes_nothing(device) -> None:
    """A recorded step has the grid of the longest context."""
    q = normal(1, 4, 16).to(device)
    k, v = (normal(2, 300, 16, seed=seed).to(device, torch.float16) for seed in (1, 2))
    fits, longer = (
        attention.gqa_attention(q, k, v, scale=0.3, first_position=position(99, device), max_length=length)
        for length in (100, 300)
    )
    assert torch.equal(fits, longer)


@pytest.mark.parametrize("num_tokens", [2, 17])
def test_pages_may_lie_in_any_order(device, num_tokens) -> None:
    first, page, num_pages = 30, 16, 4
    q = normal(num_tokens, 4, 16).to(device)
    k, v = (normal(2, num_pages * page, 16, seed=seed).to(device, torch.float16) for seed in (1, 2))
    places = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=device)
    scattered = []
    for rows in (k, v):
        moved = torch.empty_like(rows)
        for number, place in enumerate(places.tolist()):
            moved[:, place * page : (place + 1) * page] = rows[:, number * page : (number + 1) * page]
        scattered.append(moved)
    given = {"scale": 0.3, "first_position": position(first, device), "max_length": 64}
    found = attention.gqa_attention(q, *scattered, **given, pages=places, page_size=page)
    assert torch.equal(found, attention.gqa_attention(q, k, v, **given))


def test_large_scores_do_not_overflow(device) -> None:
    q = normal(1, 2, 16) * 100
    k, v = (normal(1, 70, 16, seed=seed).to(torch.float16) for seed in (1, 2))
    found = attention.gqa_attention(
        q.to(device), k.to(device), v.to(device), scale=1.0, first_position=position(69, device), max_length=70
    )
    assert_close(found, REFERENCE.gqa_attention(q, k, v, scale=1.0, first_position=69), HALF)
