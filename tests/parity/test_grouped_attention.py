"""Native grouped-query attention, rotation of halves, a shared expert's gate: near the reference, and bit for bit.

Attention rounds queries and keys to integers per block of 32 values, values and softmax weights per 128
(csrc/kernels/attention_table.h). Against float32 that leaves up to 4e-4 of the largest result; the tolerance is twice
that.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from tests import native_samples as samples

from comparisons import assert_within_share
from expertide import _native
from expertide.kernels import select, tiles

ROUNDED = 8e-4

# Heads, key/value heads, head size: below, at and beside the paddings of 32 and the blocks of 128; query heads that do
# and do not fill groups of four.
SHAPES = [(1, 1, 2), (6, 2, 10), (3, 3, 96), (8, 2, 64), (4, 1, 128), (14, 2, 128), (5, 5, 256), (4, 2, 132)]
# Around the borders of tiles; one token and chunks. The last two go row by row, the others tile by tile.
SPANS = [(0, 1), (0, 63), (0, 65), (62, 1), (63, 1), (64, 1), (60, 9), (127, 2), (199, 1), (130, 67), (3, 197)]


class _World:
    """Random queries for `total` positions and their cache, in the layout of `kv.heads`."""

    def __init__(self, total: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float16) -> None:
        generator = torch.Generator().manual_seed(total + heads + dim)
        self.q = torch.randn(total, heads, dim, generator=generator)
        # What lies behind the positions asked for must not be read.
        self.k, self.v = (torch.randn(kv_heads, total + 9, dim, generator=generator).to(dtype) for _ in range(2))
        self.k[:, total:], self.v[:, total:] = float("nan"), float("nan")
        self.scale = dim**-0.5

    def attend(self, kernels, begin: int, end: int) -> torch.Tensor:
        # As the cache hands them out: heads lie apart.
        k, v = self.k[:, : end + 5], self.v[:, : end + 5]
        return kernels.gqa_attention(self.q[begin:end], k, v, scale=self.scale, first_position=begin)


def _assert_close(found: torch.Tensor, expected: torch.Tensor, relative: float = ROUNDED) -> None:
    assert_within_share(found, expected, relative)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_attention_agrees_with_the_reference(native, reference, shape, dtype) -> None:
    for past, tokens in SPANS:
        world = _World(past + tokens, *shape, dtype=dtype)
        _assert_close(world.attend(native, past, past + tokens), world.attend(reference, past, past + tokens))


def test_every_length_up_to_200_agrees_for_a_single_token(native, reference) -> None:
    world = _World(200, 8, 2, 64)
    for position in range(200):
        found, expected = (world.attend(kernels, position, position + 1) for kernels in (native, reference))
        _assert_close(found, expected)


def test_keys_with_one_large_dimension_agree(native, reference) -> None:
    # As biases on keys make them (Qwen2): one dimension of 100 beside others of 1. The integers of its block are then
    # steps of 100 / 8,191, off by 0.0035 (rms) in each of 32 values: times queries of 1 and the scale of 1 / 8 some
    # 0.0025 of a score, and four times that at worst.
    world = _World(150, 8, 2, 64)
    world.k[:, :, 5] += 100.0
    _assert_close(world.attend(native, 100, 150), world.attend(reference, 100, 150), 0.01)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_attention_has_the_same_bits_for_any_chunks_and_threads(native, shape) -> None:
    world = _World(200, *shape)
    whole = world.attend(native, 0, 200)
    for chunk, threads in itertools.product((1, 7, 64, 512), (1, 3)):
        kernels = select("native", num_threads=threads)
        parts = [world.attend(kernels, begin, min(begin + chunk, 200)) for begin in range(0, 200, chunk)]
        kernels.close()
        assert torch.equal(torch.cat(parts), whole), f"chunks of {chunk}, {threads} threads"


def test_a_call_in_several_pieces_has_the_same_bits(native) -> None:
    # 600 tokens of 32 heads are more than the rows of one pass over the tiles.
    world = _World(600, 32, 2, 32)
    whole = world.attend(native, 0, 600)
    assert torch.equal(torch.cat([world.attend(native, 0, 250), world.attend(native, 250, 600)]), whole)


def test_a_key_value_head_of_more_tiles_than_one_round_has_the_same_bits(native, reference) -> None:
    # 8,300 keys of 256 values: 130 tiles of 66 KiB a head, of which 63 are in memory together.
    world = _World(8300, 4, 2, 256)
    rows = world.attend(native, 8220, 8300)
    assert torch.equal(torch.cat([world.attend(native, i, i + 20) for i in range(8220, 8300, 20)]), rows)
    _assert_close(rows, world.attend(reference, 8220, 8300))


@pytest.mark.parametrize("isa", samples.available_isas())
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_grouped_attention_has_the_same_bits_for_any_instruction_set(native, isa, dtype) -> None:
    for shape, (past, tokens) in itertools.product(SHAPES, SPANS):
        world = _World(past + tokens, *shape, dtype=dtype)
        expected = world.attend(native, past, past + tokens)
        with samples.isa(isa):
            assert torch.equal(world.attend(native, past, past + tokens), expected), (shape, past, tokens)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("isa", ["base", "auto"])
def test_what_is_not_finite_shows_in_every_query_that_sees_it_and_in_no_other(native, bad, part, isa) -> None:
    for place in (40, 64, 99):
        world = _World(140, 6, 2, 32)
        clean = world.attend(native, 0, 140)
        getattr(world, part)[1, place, 3] = bad
        with samples.isa(isa):
            found = world.attend(native, 0, 140)
        assert torch.equal(found[:, :3], clean[:, :3]), "heads of the other key/value head"
        assert torch.equal(found[:place], clean[:place])
        assert found[place:, 3:].isnan().all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 4, 128), (16, 16, 128), (64, 4, 128), (5, 5, 6), (8, 1, 256)]
)
def test_the_plan_counts_enough_memory_for_native_attention(heads, kv_heads, dim) -> None:
    for tokens, threads in itertools.product((1, 64, 512, 4096), (1, 2, 16, 32)):
        needed = _native.gqa_workspace_bytes((heads, kv_heads, dim), tokens, threads)
        counted = tiles.native_gqa_bytes(tokens, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
        # Threads bring their own share beside the plan's workspace: prepare.THREAD_BYTES, 1 MiB.
        assert needed <= counted + (threads << 20)


@pytest.mark.parametrize(("hidden", "inner", "k"), [(2048, 768, 8), (64, 32, 3), (2048, 1408, 4)])
def test_the_plan_counts_enough_memory_for_native_experts(hidden, inner, k) -> None:
    for tokens in (1, 7, 64, 512):
        counted = tiles.native_moe_bytes(tokens, hidden=hidden, inner=inner, k=k)
        assert _native.moe_workspace_bytes(hidden, inner, tokens, k) <= counted


@pytest.mark.parametrize("tokens", [1, 5, 700])
def test_rotation_of_halves_is_exact_also_on_views(native, reference, tokens) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 6, 20, generator=generator)
    angles = torch.rand(tokens, 4, generator=generator) * 7
    cos, sin = angles.cos(), angles.sin()
    for view in (x[..., 12:], x[:, 0, 12:]):
        # The same float32 operations in the same order.
        assert torch.equal(native.rope(view, cos, sin, pairs="halves"), reference.rope(view, cos, sin, pairs="halves"))


@pytest.mark.parametrize("cols", [1, 31, 33, 2048])
def test_gated_rows_agree_and_do_not_depend_on_their_neighbours(native, reference, cols) -> None:
    generator = torch.Generator().manual_seed(cols)
    y, x = (torch.randn(40, cols, generator=generator) for _ in range(2))
    gate = torch.randn(cols, generator=generator)
    found = native.gate_rows(y, x, gate)
    # Float32 sums of up to 2,048 products in another order: 1e-5 of a sum of size 45, which the sigmoid passes on.
    _assert_close(found, reference.gate_rows(y, x, gate), 1e-5)
    alone = torch.cat([native.gate_rows(y[i : i + 1], x[i : i + 1], gate) for i in range(40)])
    assert torch.equal(found, alone)


def test_a_gate_far_from_zero_opens_or_closes_the_row(native) -> None:
    y, x = torch.full((3, 8), 2.0), torch.ones(3, 8)
    x[1], x[2] = -1000.0, 1000.0
    found = native.gate_rows(y, x, torch.ones(8))
    assert found.isfinite().all()
    assert found[1].abs().max() < 1e-30 and torch.equal(found[2], y[2])
