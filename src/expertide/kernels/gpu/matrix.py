"""A packed matrix on a device: where its bytes start, how they are stored, and what keeps them alive.

The counterpart of `QTensor`. A part of a matrix cannot be named by an address alone, because its planes lie apart;
`row_range` and `heads` say which rows are meant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expertide.formats.quants.base import QuantType
from expertide.kernels.gpu.layout import planes_of, to_device_layout
from expertide.kernels.qtensor import QTensor

ALIGNMENT = 16  # bytes; what every address given to a kernel is a multiple of


@dataclass(frozen=True, slots=True)
class GpuMatrix:
    """Rows first_row .. first_row + rows - 1 of a matrix of `held_rows` rows in device layout.

    Attributes:
        data: uint8 [held_rows * row bytes] on the device; owns the bytes.
        quant: how a row of `cols` values is stored.
        head_stride: with several heads, rows from the first of one head to the first of the next; 0 for one matrix.
        num_heads: matrices of `rows` rows each; 1 for one matrix.
        is_transposed: as in `QTensor`.
    """

    data: Tensor
    quant: QuantType
    rows: int
    cols: int
    held_rows: int
    first_row: int = 0
    num_heads: int = 1
    head_stride: int = 0
    is_transposed: bool = False

    def __post_init__(self) -> None:
        planes_of(self.quant)  # a type the kernels do not know is refused here
        assert self.data.dtype == torch.uint8 and self.data.is_contiguous()
        assert self.data.data_ptr() % ALIGNMENT == 0
        assert self.data.numel() == self.held_rows * self.quant.row_bytes(self.cols)
        last = self.first_row + (self.num_heads - 1) * self.head_stride + self.rows
        assert self.first_row >= 0 and last <= self.held_rows

    @property
    def blocks_per_row(self) -> int:
        return self.cols // self.quant.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of the rows meant."""
        return self.num_heads * self.rows * self.quant.row_bytes(self.cols)

    def row_range(self, begin: int, end: int) -> GpuMatrix:
        """Rows begin..end-1."""
        assert self.num_heads == 1 and 0 <= begin <= end <= self.rows
        return replace(self, rows=end - begin, first_row=self.first_row + begin)

    def heads(
        self, num_heads: int, *, rows: int, first_row: int = 0, stride: int | None = None, is_transposed: bool = False
    ) -> GpuMatrix:
        """The matrix as `num_heads` matrices: `rows` rows each, from row first_row of every `stride` rows."""
        assert self.num_heads == 1
        return replace(
            self,
            rows=rows,
            first_row=self.first_row + first_row,
            num_heads=num_heads,
            head_stride=rows if stride is None else stride,
            is_transposed=is_transposed,
        )

    @classmethod
    def from_file_bytes(cls, file_bytes: Tensor, quant: QuantType, rows: int, cols: int) -> GpuMatrix:
        """A matrix from bytes in the order of the file, on the device where they lie; they are copied."""
        return cls(to_device_layout(file_bytes.reshape(-1), quant), quant, rows, cols, rows)

    @classmethod
    def from_qtensor(cls, w: QTensor, device: torch.device | str) -> GpuMatrix:
        """A matrix from packed bytes in host memory, whose entries may lie apart."""
        file_bytes = torch.from_numpy(w.bytes_array().copy()).to(device)
        matrix = cls.from_file_bytes(file_bytes, w.quant, w.rows, w.cols)
        if len(w.shape) < 3:
            return matrix
        return matrix.heads(w.shape[0], rows=w.shape[1], is_transposed=w.is_transposed)
