"""Products with packed matrices, and decoding, on the GPU. Meanings are those of `ops.Kernels`.

`linear` of up to `SMALL_TOKENS` tokens gives each token the same bits whatever stands beside it. Larger calls go through
tensor cores: activations as float16 with a power of two per token, weights decoded to float16, float32 sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from expertide.formats.quants.base import QuantType
from expertide.kernels.gpu import launch_table
from expertide.kernels.gpu.device import products as device
from expertide.kernels.gpu.device import tiles
from expertide.kernels.gpu.launch_table import RowLaunch
from expertide.kernels.gpu.matrix import GpuMatrix
from expertide.kernels.gpu.quants import chunks_per_row, constants_of


def compile_constants(quant: QuantType) -> dict[str, Any]:
    """The arguments every kernel on packed rows is compiled by."""
    constants = constants_of(quant)
    return {
        "TYPE": constants.type_id,
        "PARTS": constants.parts,
        "PER_BLOCK": constants.per_block,
        "CENTRE": constants.centre,
    }


def small_linear(x_TI: Tensor, w: GpuMatrix, *, launch: RowLaunch = launch_table.LINEAR) -> Tensor:
    """y_TO = x_TI · wᵀ, token by token; float32, contiguous."""
    assert w.num_heads == 1
    return _row_products(x_TI[:, None, :], w, launch)[:, 0]


def linear(x_TI: Tensor, w: GpuMatrix) -> Tensor:
    """y_TO = x_TI · wᵀ; float32, contiguous."""
    assert w.num_heads == 1
    return head_linear(x_TI[:, None, :], w)[:, 0]


def head_linear(x_TQI: Tensor, w: GpuMatrix) -> Tensor:
    """y_TQO[t, q] = w[q] · x[t, q], or its transpose · x[t, q]."""
    assert x_TQI.shape[1] == w.num_heads, (x_TQI.shape, w.num_heads)
    if len(x_TQI) > launch_table.SMALL_TOKENS:
        return _tiled(x_TQI, w)
    if w.is_transposed:
        return _transposed(x_TQI, w, launch_table.TRANSPOSED)
    return _row_products(x_TQI, w, launch_table.LINEAR)


def tile_operand(x: Tensor, quant: QuantType) -> tuple[Tensor, Tensor]:
    """(rows of x in the type in which tiles are multiplied, the factor each row is to be multiplied with, 1-D).

    float16 for packed weights. Weights of float32 (the router's) are multiplied as they are.
    """
    x = x.contiguous()
    num_rows = x.numel() // x.shape[-1]
    if quant.name == "F32":
        return x, torch.ones(num_rows, dtype=torch.float32, device=x.device)
    half = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if x.numel():
        block = min(1024, triton.next_power_of_2(x.shape[-1]))
        tiles.to_half_kernel[(num_rows,)](x, half, scale, x.shape[-1], BLOCK=block, num_warps=4)
    return half, scale


def _tiled(x_TQI: Tensor, w: GpuMatrix) -> Tensor:
    num_tokens, num_heads, width = x_TQI.shape
    launch = launch_table.gemm(w.quant)
    assert width == (w.rows if w.is_transposed else w.cols), (x_TQI.shape, w.rows, w.cols)
    num_results = w.cols if w.is_transposed else w.rows
    y = torch.empty((num_tokens, num_heads, num_results), dtype=torch.float32, device=x_TQI.device)
    if not y.numel():
        return y
    operand, scale = tile_operand(x_TQI, w.quant)
    if w.is_transposed:
        kernel, num_programs = (
            tiles.transposed_gemm_kernel,
            triton.cdiv(chunks_per_row(w.quant, w.cols), launch.chunks),
        )
    else:
        kernel, num_programs = tiles.gemm_kernel, triton.cdiv(w.rows, launch.rows)
    kernel[(triton.cdiv(num_tokens, launch.tokens), num_programs, num_heads)](
        operand, scale, w.data, y, num_tokens, *_sizes(w), w.first_row, w.head_stride, num_heads,
        **compile_constants(w.quant), TOKENS=launch.tokens, ROWS=launch.rows, CHUNKS=launch.chunks,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return y


def _row_products(x_TQI: Tensor, w: GpuMatrix, launch: RowLaunch) -> Tensor:
    num_tokens, num_heads, cols = x_TQI.shape
    assert cols == w.cols and x_TQI.dtype == torch.float32 and x_TQI.is_contiguous(), (x_TQI.shape, w.cols)
    y_TQO = torch.empty((num_tokens, num_heads, w.rows), dtype=torch.float32, device=x_TQI.device)
    if y_TQO.numel():
        device.linear_kernel[(triton.cdiv(w.rows, launch.rows), num_heads)](
            x_TQI, w.data, y_TQO, num_tokens, *_sizes(w), w.first_row, w.head_stride, num_heads,
            **compile_constants(w.quant), ROWS=launch.rows, CHUNKS=launch.chunks, num_warps=launch.num_warps,
        )  # fmt: skip
    return y_TQO


def _transposed(x_TQO: Tensor, w: GpuMatrix, launch: RowLaunch) -> Tensor:
    num_tokens, num_heads, rows = x_TQO.shape
    assert rows == w.rows and x_TQO.dtype == torch.float32 and x_TQO.is_contiguous(), (x_TQO.shape, w.rows)
    y_TQI = torch.empty((num_tokens, num_heads, w.cols), dtype=torch.float32, device=x_TQO.device)
    if y_TQI.numel():
        num_programs = triton.cdiv(chunks_per_row(w.quant, w.cols), launch.chunks)
        device.transposed_kernel[(num_programs, num_heads)](
            x_TQO, w.data, y_TQI, num_tokens, *_sizes(w), w.first_row, w.head_stride, num_heads,
            **compile_constants(w.quant), ROWS=launch.rows, CHUNKS=launch.chunks, num_warps=launch.num_warps,
        )  # fmt: skip
    return y_TQI


def dequantise(w: GpuMatrix, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """All rows, decoded: [rows, cols] of float32, float16 or bfloat16."""
    assert w.num_heads == 1
    return _decoded(w, None, w.rows, dtype)


def embedding(ids_T: Tensor, w: GpuMatrix) -> Tensor:
    """x_TH: row ids[t] of w. An id outside the matrix gives a row of zeros; ids are int32 or int64."""
    return _decoded(w, ids_T, len(ids_T), torch.float32)


def _decoded(w: GpuMatrix, ids: Tensor | None, num_rows: int, dtype: torch.dtype) -> Tensor:
    launch = launch_table.DEQUANTISE
    y = torch.empty((num_rows, w.cols), dtype=dtype, device=w.data.device)
    if y.numel():
        num_chunks = chunks_per_row(w.quant, w.cols)
        device.dequantise_kernel[(num_rows, triton.cdiv(num_chunks, launch.chunks))](
            w.data, w.data if ids is None else ids, y, *_sizes(w), w.first_row, HAS_IDS=ids is not None,
            **compile_constants(w.quant), CHUNKS=launch.chunks, num_warps=launch.num_warps,
        )  # fmt: skip
    return y


def _sizes(w: GpuMatrix) -> tuple[int, int, int, int, int]:
    """num_blocks, blocks_per_row, rows, cols, num_chunks as the kernels take them."""
    return w.held_rows * w.blocks_per_row, w.blocks_per_row, w.rows, w.cols, chunks_per_row(w.quant, w.cols)
