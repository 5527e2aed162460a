"""Routed experts through the table of addresses, and the reference, expert by expert."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.samples import FLOAT16_PRODUCTS, WHOLE_PRODUCTS, assert_close, matrix, normal
from tests.packed_samples import TYPE_NAMES

from expertide.formats.quants import by_name
from expertide.kernels import select
from expertide.kernels.gpu import experts
from expertide.kernels.gpu.experts import ExpertShape
from expertide.kernels.gpu.matrix import GpuMatrix

# silu of a large negative number passes through an infinity on purpose; the interpreter's numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

REFERENCE = select("reference", num_threads=1)
NUM_EXPERTS, K = 4, 2


class World:
    """Four experts on the device and in host memory."""

    def __init__(self, device: str, gate: str, up: str, down: str, hidden: int = 256, inner: int = 32) -> None:
        self.device = device
        self.shape = ExpertShape(hidden, inner, by_name(gate), by_name(up), by_name(down))
        both = [
            (
                matrix(gate, inner, hidden, device, seed=3 * e),
                matrix(up, inner, hidden, device, seed=3 * e + 1),
                matrix(down, hidden, inner, device, seed=3 * e + 2),
            )
            for e in range(NUM_EXPERTS)
        ]
        self.matrices = [(gate[0], up[0], down[0]) for gate, up, down in both]
        self.held = [(gate[1], up[1], down[1]) for gate, up, down in both]
        self.table = experts.address_table(list(self.matrices))

    def tolerance(self, num_tokens: int) -> float:
        return 2 * (WHOLE_PRODUCTS if num_tokens <= 16 else FLOAT16_PRODUCTS)  # two products in a row

    def results(self, x: torch.Tensor, ids: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        table = self.table if table is None else table
        x, ids = x.to(self.device), ids.to(self.device)
        # NaN first: a result that nobody wrote shows.
        out = torch.full((*ids.shape, self.shape.hidden), float("nan"), device=self.device)
        return experts.expert_mlp(x, ids, table, self.shape, out=out)

    def expected(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = [
            REFERENCE.expert_mlp(x[t : t + 1], *self.held[expert])[0]
            for t, chosen in enumerate(ids.tolist())
            for expert in chosen
        ]
        return torch.stack(rows).view(*ids.shape, -1)


def choices(num_tokens: int) -> torch.Tensor:
    """Expert 3 gets no token."""
    ids = [[t % 3, (t + 1 + t // 3 % 2) % 3] for t in range(num_tokens)]
    return torch.tensor(ids, dtype=torch.int32)


@pytest.mark.parametrize(("gate", "up", "down"), [("Q4_K", "Q4_K", "Q5_0"), ("Q5_0", "Q6_K", "Q8_0")])
@pytest.mark.parametrize("num_tokens", [1, 2, 18])
def test_experts_agree_with_the_reference(device, gate, up, down, num_tokens) -> None:
    world = World(device, gate, up, down)
    x, ids = normal(num_tokens, 256) * 0.1, choices(num_tokens)
    assert_close(world.results(x, ids), world.expected(x, ids), world.tolerance(num_tokens))


@pytest.mark.parametrize("num_tokens", [1, 17])
@pytest.mark.parametrize("name", TYPE_NAMES)
def test_every_type_can_store_gate_and_up(device, name, num_tokens) -> None:
    world = World(device, name, name, "Q8_0", hidden=256, inner=32)
    x, ids = normal(num_tokens, 256) * 0.1, choices(num_tokens)
    assert_close(world.results(x, ids), world.expected(x, ids), world.tolerance(num_tokens))


@pytest.mark.parametrize("num_tokens", [1, 17])
@pytest.mark.parametrize("name", TYPE_NAMES)
def test_every_type_can_store_down(device, name, num_tokens) -> None:
    inner = max(32, by_name(name).block_size)
    world = World(device, "F16", "F16", name, hidden=16, inner=inner)
    x, ids = normal(num_tokens, 16), choices(num_tokens)[:, :1].contiguous()
    assert_close(world.results(x, ids), world.expected(x, ids), world.tolerance(num_tokens))


@pytest.mark.parametrize("num_tokens", [5, 70])
def test_all_tokens_may_choose_one_expert(device, num_tokens) -> None:
    world = World(device, "Q4_0", "Q4_0", "Q4_0", hidden=64)
    x = normal(num_tokens, 64)
    ids = torch.full((num_tokens, 1), 2, dtype=torch.int32)
    assert_close(world.results(x, ids), world.expected(x, ids), world.tolerance(num_tokens))


def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it(device) -> None:
    world = World(device, "Q5_0", "Q5_0", "Q8_0", hidden=64)
    x, ids = normal(7, 64), choices(7)
    together = world.results(x, ids)
    for t in (0, 6):
        assert torch.equal(world.results(x[t : t + 1], ids[t : t + 1])[0], together[t])


@pytest.mark.parametrize("num_tokens", [4, 20])
def test_where_an_experts_bytes_lie_is_not_seen(device, num_tokens) -> None:
    """Cached in one buffer, freshly staged in another: one table names both."""
    world = World(device, "Q5_0", "Q5_0", "Q8_0", hidden=64)
    x, ids = normal(num_tokens, 64), choices(num_tokens)
    staged = [part.data.clone() for part in world.matrices[1]]
    table = world.table.clone()
    table[1] = torch.tensor([part.data_ptr() for part in staged])
    world.matrices[1][0].data.fill_(255)
    moved = world.results(x, ids, table)
    world.matrices[1][0].data.copy_(staged[0])
    assert torch.equal(moved, world.results(x, ids))


@pytest.mark.parametrize("num_tokens", [4, 20])
def test_results_of_an_expert_that_is_elsewhere_are_left_alone(device, num_tokens) -> None:
    world = World(device, "Q5_0", "Q5_0", "Q8_0", hidden=64)
    x, ids = normal(num_tokens, 64), choices(num_tokens)
    whole = world.results(x, ids)
    table = world.table.clone()
    table[1] = 0
    ids[2, 0] = -1
    partly = world.results(x, ids, table)
    is_absent = ((ids == 1) | (ids == -1)).to(partly.device)
    assert is_absent.any() and partly[is_absent].isnan().all()
    assert torch.equal(partly[~is_absent], whole[~is_absent])


def test_the_sum_over_experts_keeps_its_order(device) -> None:
    results, weights = normal(3, 6, 100), normal(3, 6)
    found = experts.moe_sum(results.to(device), weights.to(device)).cpu()
    # A product and a sum may be one rounding on a GPU; large terms that cancel show another order.
    assert_close(found, REFERENCE.moe_sum(results, weights), 1e-6)
    results[:, 0], results[:, 5] = 1e8, -1e8
    weights[:, 0] = weights[:, 5] = 1
    found = experts.moe_sum(results.to(device), weights.to(device)).cpu()
    assert (found - REFERENCE.moe_sum(results, weights)).abs().max() <= 8  # a unit in the last place of 1e8


def test_tiles_hold_every_assignment_once_and_one_expert_each(device) -> None:
    ids = torch.tensor([[0, 2], [2, 5], [-1, 2], [5, 2]], dtype=torch.int32, device=device)
    order, tiles = experts.group_by_expert(ids, 7, 3)
    flat = ids.reshape(-1).tolist()
    seen = []
    for expert, begin, end in tiles.tolist():
        if expert >= 0:
            members = order[begin:end].tolist()
            assert 0 < len(members) <= 3 and {flat[a] for a in members} == {expert} and members == sorted(members)
            seen += members
    assert sorted(seen) == [a for a, expert in enumerate(flat) if expert >= 0]


def test_tables_refuse_parts_that_do_not_start_at_16_bytes(device) -> None:
    world = World(device, "Q4_0", "Q4_0", "Q4_0", hidden=64)
    gate = world.matrices[0][0]
    shifted = torch.zeros(len(gate.data) + 16, dtype=torch.uint8, device=device)[8 : 8 + len(gate.data)]
    with pytest.raises(AssertionError):
        GpuMatrix(shifted, gate.quant, gate.rows, gate.cols, gate.held_rows)
