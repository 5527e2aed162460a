"""Products with packed matrices: a tile of rows is decoded, multiplied, and forgotten."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from expertide.kernels.qtensor import QTensor
from expertide.kernels.tiles import DECODED_TILE_BYTES


def decode_rows(w: QTensor, begin: int, end: int) -> Tensor:
    """Rows begin..end-1 of a matrix, float32 [end - begin, cols]."""
    values = w.row_range(begin, end).decode()
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def linear(x_TI: Tensor, w: QTensor) -> Tensor:
    """y_TO = x_TI · wᵀ."""
    num_rows, num_cols = w.shape
    assert x_TI.shape[-1] == num_cols, (x_TI.shape, w.shape)
    rows_per_tile = max(1, DECODED_TILE_BYTES // (4 * num_cols))
    if num_rows <= rows_per_tile:
        return x_TI @ decode_rows(w, 0, num_rows).T
    y_TO = x_TI.new_empty((x_TI.shape[0], num_rows), dtype=torch.float32)
    for begin in range(0, num_rows, rows_per_tile):
        end = min(begin + rows_per_tile, num_rows)
        y_TO[:, begin:end] = x_TI @ decode_rows(w, begin, end).T
    return y_TO


def head_linear(x_TQI: Tensor, w: QTensor) -> Tensor:
    """y_TQO[t, q] = w[q] · x[t, q], or its transpose · x[t, q]; as many heads per tile as fit."""
    if w.is_transposed:
        return _transposed_head_linear(x_TQI, w)
    num_heads, num_rows, num_cols = w.shape
    assert x_TQI.shape[1:] == (num_heads, num_cols), (x_TQI.shape, w.shape)
    x_QTI = x_TQI.transpose(0, 1)
    y_TQO = x_TQI.new_empty((x_TQI.shape[0], num_heads, num_rows), dtype=torch.float32)
    heads_per_tile = DECODED_TILE_BYTES // (4 * num_rows * num_cols)
    if heads_per_tile == 0:
        for head in range(num_heads):
            y_TQO[:, head] = linear(x_QTI[head], w.index(head))
        return y_TQO
    packed = w.bytes_array()
    for begin in range(0, num_heads, heads_per_tile):
        end = min(begin + heads_per_tile, num_heads)
        values = w.quant.decode(np.ascontiguousarray(packed[begin:end])).reshape(end - begin, num_rows, num_cols)
        w_QOI = torch.from_numpy(values if values.flags.writeable else values.copy())
        y_TQO[:, begin:end] = torch.bmm(x_QTI[begin:end], w_QOI.transpose(1, 2)).transpose(0, 1)
    return y_TQO


def _transposed_head_linear(x_TQI: Tensor, w: QTensor) -> Tensor:
    """One head at a time; a head's rows are few."""
    num_heads, num_rows, num_cols = w.shape
    assert x_TQI.shape[1:] == (num_heads, num_rows), (x_TQI.shape, w.shape)
    y_TQO = x_TQI.new_empty((x_TQI.shape[0], num_heads, num_cols), dtype=torch.float32)
    for head in range(num_heads):
        y_TQO[:, head] = x_TQI[:, head] @ decode_rows(w.index(head), 0, num_rows)
    return y_TQO


def embedding(ids_T: Tensor, w: QTensor) -> Tensor:
    """Row ids[t] of w, decoded."""
    packed = w.bytes_array()[ids_T.numpy()]  # fancy indexing copies just these rows
    values = w.quant.decode(packed).reshape(len(packed), w.cols)
    return torch.from_numpy(values)
