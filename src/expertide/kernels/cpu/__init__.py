"""The native kernels: C++ on packed weights (csrc/kernels/), chosen by instruction set at run time.

Promises: a result depends on its own token and weights only: not on the number of threads, the tokens beside it or the
instruction set. What is not native yet is inherited from the reference, and without these promises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertide import _native
from expertide.formats.quants.base import QuantType
from expertide.kernels.qtensor import QTensor
from expertide.kernels.reference import ReferenceKernels


class CpuKernels(ReferenceKernels):
    """Implements `ops.Kernels`.

    Attributes:
        pool: the worker threads; the experts of a layer run on them too.
    """

    name = "native"

    def __init__(self, num_threads: int) -> None:
        self.pool = _native.ThreadPool(num_threads)
        self._native_types = frozenset(_native.quant_types())

    def linear(self, x_TI: Tensor, w: QTensor) -> Tensor:
        if not self._has(w.quant):
            return super().linear(x_TI, w)
        x_TI = _rows(x_TI, w.cols)
        num_tokens = x_TI.shape[0]
        y_TO = torch.empty(num_tokens, w.rows, dtype=torch.float32)
        _native.linear(
            self.pool, w.address, w.quant.ggml_id, w.rows, w.cols, x_TI.data_ptr(), num_tokens, y_TO.data_ptr()
        )
        return y_TO

    def head_linear(self, x_TQI: Tensor, w: QTensor) -> Tensor:
        if not self._has(w.quant):
            return super().head_linear(x_TQI, w)
        num_heads, rows, cols = w.shape
        x_TQI = _rows(x_TQI, cols)
        num_tokens = x_TQI.shape[0]
        assert x_TQI.shape[1] == num_heads
        lead_stride = rows * w.row_bytes if w.lead_stride is None else w.lead_stride
        y_TQO = torch.empty(num_tokens, num_heads, rows, dtype=torch.float32)
        _native.head_linear(
            self.pool,
            w.address,
            w.quant.ggml_id,
            num_heads,
            lead_stride,
            rows,
            cols,
            x_TQI.data_ptr(),
            num_tokens,
            y_TQO.data_ptr(),
        )
        return y_TQO

    def embedding(self, ids_T: Tensor, w: QTensor) -> Tensor:
        if not self._has(w.quant):
            return super().embedding(ids_T, w)
        ids_T = ids_T.to(torch.int64).contiguous()
        x_TH = torch.empty(ids_T.shape[0], w.cols, dtype=torch.float32)
        _native.decode_rows(
            self.pool,
            w.address,
            w.quant.ggml_id,
            w.rows,
            w.cols,
            ids_T.data_ptr(),
            ids_T.shape[0],
            x_TH.data_ptr(),
        )
        return x_TH

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        assert gate.shape == up.shape
        gate, up = _floats(gate), _floats(up)
        out = torch.empty_like(gate)
        _native.silu_mul(gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr())
        return out

    def expert_mlp(self, x_nH: Tensor, gate: QTensor, up: QTensor, down: QTensor) -> Tensor:
        if not all(self._has(w.quant) for w in (gate, up, down)):
            return super().expert_mlp(x_nH, gate, up, down)
        x_nH = _rows(x_nH, gate.cols)
        y_nH = torch.empty_like(x_nH)
        _native.expert_mlp(
            self.pool, _matrix(gate), _matrix(up), _matrix(down), x_nH.data_ptr(), x_nH.shape[0], y_nH.data_ptr()
        )
        return y_nH

    def moe_sum(self, results_TKH: Tensor, weights_TK: Tensor) -> Tensor:
        results_TKH, weights_TK = _floats(results_TKH), _floats(weights_TK)
        num_tokens, k, hidden = results_TKH.shape
        assert weights_TK.shape == (num_tokens, k)
        y_TH = torch.empty(num_tokens, hidden, dtype=torch.float32)
        _native.moe_sum(
            self.pool, results_TKH.data_ptr(), weights_TK.data_ptr(), num_tokens, k, hidden, y_TH.data_ptr()
        )
        return y_TH

    def close(self) -> None:
        self.pool.close()

    def _has(self, quant: QuantType) -> bool:
        return quant.ggml_id in self._native_types


def _floats(x: Tensor) -> Tensor:
    """x itself when it is what the native side reads: contiguous float32 in CPU memory."""
    assert x.device.type == "cpu"
    return x.to(torch.float32).contiguous()


def _rows(x: Tensor, cols: int) -> Tensor:
    assert x.shape[-1] == cols
    return _floats(x)


def _matrix(w: QTensor) -> tuple[int, int, int, int]:
    assert len(w.shape) == 2
    return (w.address, w.quant.ggml_id, w.rows, w.cols)
