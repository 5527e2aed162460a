"""Products with packed matrices, and decoding, on the GPU. Meanings are those of `ops.Kernels`.

Up to `SMALL_TOKENS` tokens each one gets the same bits whatever stands beside it: packed weights are multiplied in
whole numbers with activations of 15 bits (`device/packed.py`), plain ones in float32. Larger calls go through tensor
cores: activations as float16 with a power of two per token, weights decoded to float16, float32 sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from expertide.formats.quants.base import QuantType
from expertide.kernels.gpu import launch_table
from expertide.kernels.gpu.activations import IS_INTERPRETED, Activations, activations
from expertide.kernels.gpu.device import products as device
from expertide.kernels.gpu.device import tiles
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


def linear(x_TI: Tensor | Activations, w: GpuMatrix) -> Tensor:
    """y_TO = x_TI · wᵀ, float32."""
    assert w.num_heads == 1
    x = activations(x_TI)
    num_tokens, cols = x.x.shape
    assert cols == w.cols, (x.x.shape, w.cols)
    return _linear(x, num_tokens, w)[:, 0]


def head_linear(x_TQI: Tensor | Activations, w: GpuMatrix) -> Tensor:
    """y_TQO[t, q] = w[q] · x[t, q], or its transpose · x[t, q]; float32."""
    x = activations(x_TQI)
    num_tokens, num_heads, width = x.x.shape
    assert (num_heads, width) == (w.num_heads, w.rows if w.is_transposed else w.cols), (x.x.shape, w)
    return _linear(x, num_tokens, w)


def _linear(x: Activations, num_tokens: int, w: GpuMatrix) -> Tensor:
    num_results = w.cols if w.is_transposed else w.rows
    y_TQO = torch.empty((num_tokens, w.num_heads, num_results), dtype=torch.float32, device=w.data.device)
    if not y_TQO.numel():
        return y_TQO
    if num_tokens > launch_table.SMALL_TOKENS:
        _tiled(x, num_tokens, w, y_TQO)
    elif w.is_transposed:
        _transposed(x, num_tokens, w, y_TQO)
    else:
        _row_products(x, num_tokens, w, y_TQO)
    return y_TQO


def _row_products(x: Activations, num_tokens: int, w: GpuMatrix, y_TQO: Tensor) -> None:
    launch = launch_table.LINEAR.for_rows_of(chunks_per_row(w.quant, w.cols))
    operand, stride = x.row_operand(w.quant)
    device.linear_kernel[(triton.cdiv(w.rows, launch.rows), w.num_heads)](
        operand, w.data, y_TQO, num_tokens, stride, *_sizes(w), w.first_row, w.head_stride, w.num_heads,
        **compile_constants(w.quant), EMULATED=IS_INTERPRETED, ROWS=launch.rows, CHUNKS=launch.chunks,
        num_warps=launch.num_warps,
    )  # fmt: skip


def _transposed(x: Activations, num_tokens: int, w: GpuMatrix, y_TQI: Tensor) -> None:
    launch = launch_table.TRANSPOSED
    num_programs = triton.cdiv(chunks_per_row(w.quant, w.cols), launch.chunks)
    device.transposed_kernel[(num_programs, w.num_heads)](
        x.x, w.data, y_TQI, num_tokens, *_sizes(w), w.first_row, w.head_stride, w.num_heads,
        **compile_constants(w.quant), ROWS=launch.rows, CHUNKS=launch.chunks, num_warps=launch.num_warps,
    )  # fmt: skip


def _tiled(x: Activations, num_tokens: int, w: GpuMatrix, y: Tensor) -> None:
    launch = launch_table.gemm(w.quant)
    operand, scale = x.tile_operand(w.quant)
    if w.is_transposed:
        kernel = tiles.transposed_gemm_kernel
        num_programs = triton.cdiv(chunks_per_row(w.quant, w.cols), launch.chunks)
    else:
        kernel, num_programs = tiles.gemm_kernel, triton.cdiv(w.rows, launch.rows)
    kernel[(triton.cdiv(num_tokens, launch.tokens), num_programs, w.num_heads)](
        operand, scale, w.data, y, num_tokens, *_sizes(w), w.first_row, w.head_stride, w.num_heads,
        **compile_constants(w.quant), TOKENS=launch.tokens, ROWS=launch.rows, CHUNKS=launch.chunks,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip


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
