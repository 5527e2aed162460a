"""Routed experts on the GPU: few tokens, and a chunk of a prompt.

    expert_mlp(...)  ->  results_TKH  ->  moe_sum(results, weights)

The experts' bytes lie anywhere in device memory, in device layout; a table of addresses [E, 3] says where gate, up and
down of each one are. 0 stands for an expert that is computed elsewhere: its results are left as they were, for the
caller to fill in. A dense or shared MLP is an expert too: one row in a table, chosen by every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from expertide.formats.quants.base import QuantType
from expertide.kernels.gpu import launch_table
from expertide.kernels.gpu.activations import IS_INTERPRETED, Activations, activations, is_plain
from expertide.kernels.gpu.device import experts as device
from expertide.kernels.gpu.matrix import ALIGNMENT, GpuMatrix
from expertide.kernels.gpu.products import compile_constants
from expertide.kernels.gpu.quants import chunks_per_row


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What all experts of a layer have in common: gate, up (F, H) and down (H, F), and how each is stored."""

    hidden: int
    inner: int
    gate: QuantType
    up: QuantType
    down: QuantType


def address_table(experts: list[tuple[GpuMatrix, GpuMatrix, GpuMatrix] | None]) -> Tensor:
    """The table of these experts, int64 [E, 3]; whoever uses it keeps the matrices alive."""
    rows = [[0, 0, 0] if parts is None else [part.data.data_ptr() for part in parts] for parts in experts]
    assert all(address % ALIGNMENT == 0 for row in rows for address in row)
    device_of = next(parts[0].data.device for parts in experts if parts is not None)
    return torch.tensor(rows, dtype=torch.int64, device=device_of)


def expert_mlp(
    x_TH: Tensor | Activations, topk_ids_TK: Tensor, table: Tensor, shape: ExpertShape, *, out: Tensor | None = None
) -> Tensor:
    """results[t, k] = down · (silu(gate · x[t]) * (up · x[t])) of expert topk_ids[t, k].

    Up to `SMALL_TOKENS` tokens a result's bits depend on its own token and expert only.

    Args:
        x_TH: float32.
        topk_ids_TK: int32, contiguous; a negative id, too, is an expert that is computed elsewhere.
        table: int64 [E, 3], see `address_table`.
        out: float32 [T, K, H], made if None.
    """
    num_tokens, per_token = topk_ids_TK.shape
    x = activations(x_TH)
    assert x.x.shape == (num_tokens, shape.hidden)
    assert topk_ids_TK.dtype == torch.int32 and topk_ids_TK.is_contiguous()
    assert table.dtype == torch.int64 and table.shape[1:] == (3,) and table.is_contiguous()
    results = out
    if results is None:
        results = torch.empty((num_tokens, per_token, shape.hidden), dtype=torch.float32, device=x.x.device)
    assert results.shape == (num_tokens, per_token, shape.hidden) and results.is_contiguous()
    if results.numel():
        run = _decode if num_tokens <= launch_table.SMALL_TOKENS else _prefill
        run(x, topk_ids_TK, table, shape, results)
    return results


def moe_sum(results_TKH: Tensor, weights_TK: Tensor) -> Tensor:
    """y_TH = Σ_k weights[t, k] * results[t, k] in float32, k = 0, 1, … in this order."""
    num_tokens, per_token, hidden = results_TKH.shape
    assert results_TKH.is_contiguous() and weights_TK.is_contiguous() and weights_TK.shape == (num_tokens, per_token)
    y_TH = torch.empty((num_tokens, hidden), dtype=torch.float32, device=results_TKH.device)
    if y_TH.numel():
        block = min(512, triton.next_power_of_2(hidden))
        device.sum_kernel[(triton.cdiv(hidden, block), num_tokens)](
            results_TKH, weights_TK, y_TH, hidden, K=per_token, BLOCK=block, num_warps=4
        )
    return y_TH


def _decode(x: Activations, ids_TK: Tensor, table: Tensor, shape: ExpertShape, results: Tensor) -> None:
    count, per_token = ids_TK.numel(), ids_TK.shape[1]
    h = torch.empty((count, shape.inner), dtype=torch.float32, device=results.device)
    # By K alone, so that one compiled kernel serves every number of tokens.
    assignments = triton.next_power_of_2(launch_table.SMALL_TOKENS * per_token)
    launch = launch_table.EXPERT_GATE_UP.for_rows_of(chunks_per_row(shape.gate, shape.hidden))
    assert is_plain(shape.gate) == is_plain(shape.up)
    operand, stride = x.row_operand(shape.gate)
    device.decode_gate_up_kernel[(triton.cdiv(shape.inner, launch.rows), count)](
        operand, ids_TK, table, h, count, per_token, stride, *_sizes(shape.gate, shape.inner, shape.hidden),
        **compile_constants(shape.gate), **_up_constants(shape), EMULATED=IS_INTERPRETED, ASSIGNMENTS=assignments,
        ROWS=launch.rows, CHUNKS=launch.chunks, num_warps=launch.num_warps,
    )  # fmt: skip
    launch = launch_table.EXPERT_DOWN.for_rows_of(chunks_per_row(shape.down, shape.inner))
    operand, stride = Activations(h).row_operand(shape.down)
    device.decode_down_kernel[(triton.cdiv(shape.hidden, launch.rows), count)](
        operand, ids_TK, table, results, count, stride, *_sizes(shape.down, shape.hidden, shape.inner),
        **compile_constants(shape.down), EMULATED=IS_INTERPRETED, ASSIGNMENTS=assignments,
        ROWS=launch.rows, CHUNKS=launch.chunks, num_warps=launch.num_warps,
    )  # fmt: skip


def _prefill(x: Activations, ids_TK: Tensor, table: Tensor, shape: ExpertShape, results: Tensor) -> None:
    count, per_token = ids_TK.numel(), ids_TK.shape[1]
    launch = launch_table.expert_gemm(shape.gate)
    order, tiles = group_by_expert(ids_TK, len(table), launch.tokens)
    operand, scale = x.tile_operand(shape.gate)
    h = torch.empty((count, shape.inner), dtype=torch.float32, device=results.device)
    device.prefill_kernel[(triton.cdiv(shape.inner, launch.rows), len(tiles))](
        operand, scale, table, order, tiles, h, per_token, *_sizes(shape.gate, shape.inner, shape.hidden),
        **compile_constants(shape.gate), **_up_constants(shape), IS_GATED=True,
        TOKENS=launch.tokens, ROWS=launch.rows, CHUNKS=launch.chunks,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    launch_down = launch_table.expert_gemm(shape.down)
    if launch_down.tokens != launch.tokens:
        order, tiles = group_by_expert(ids_TK, len(table), launch_down.tokens)
    # Rows of h that were not written (experts elsewhere) are not read either.
    operand, scale = Activations(h).tile_operand(shape.down)
    device.prefill_kernel[(triton.cdiv(shape.hidden, launch_down.rows), len(tiles))](
        operand, scale, table, order, tiles, results, 1, *_sizes(shape.down, shape.hidden, shape.inner),
        **compile_constants(shape.down), **_up_constants(shape), IS_GATED=False,
        TOKENS=launch_down.tokens, ROWS=launch_down.rows, CHUNKS=launch_down.chunks,
        num_warps=launch_down.num_warps, num_stages=launch_down.num_stages,
    )  # fmt: skip


def group_by_expert(ids_TK: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """The assignments sorted by expert, and tiles of at most `tile` of them that share one.

    Without waiting for the device, so as many tiles as there could be; those not needed have expert -1.

    Returns:
        order: int32 [T * K], assignment numbers; those of one expert ascend.
        tiles: int32 [tiles, 3]: expert, first and end place in `order`.
    """
    ids = ids_TK.reshape(-1).long()
    ids = torch.where(ids < 0, num_experts, ids)
    order = torch.argsort(ids, stable=True)
    experts = torch.arange(num_experts, device=ids.device)
    counts = (ids[:, None] == experts).sum(dim=0)
    ends = counts.cumsum(0)
    tile_ends = ((counts + tile - 1) // tile).cumsum(0)
    most = ids.numel() // tile + min(num_experts, ids.numel())
    number = torch.arange(most, device=ids.device)
    expert = torch.searchsorted(tile_ends, number, right=True)
    known = expert.clamp(max=num_experts - 1)
    tiles_of = (counts[known] + tile - 1) // tile
    first = ends[known] - counts[known] + (number - (tile_ends[known] - tiles_of)) * tile
    expert = torch.where(expert < num_experts, expert, -1)
    tiles = torch.stack((expert, first, torch.minimum(first + tile, ends[known])), dim=1)
    return order.to(torch.int32), tiles.to(torch.int32)


def _sizes(quant: QuantType, rows: int, cols: int) -> tuple[int, int, int, int, int]:
    """num_blocks, blocks_per_row, rows, cols, num_chunks."""
    per_row = cols // quant.block_size
    return rows * per_row, per_row, rows, cols, chunks_per_row(quant, cols)


def _up_constants(shape: ExpertShape) -> dict[str, Any]:
    num_blocks, blocks_per_row, _, _, num_chunks = _sizes(shape.up, shape.inner, shape.hidden)
    named = {f"UP_{name}": value for name, value in compile_constants(shape.up).items()}
    return {
        **named,
        "up_num_blocks": num_blocks,
        "up_blocks_per_row": blocks_per_row,
        "up_num_chunks": num_chunks,
    }
