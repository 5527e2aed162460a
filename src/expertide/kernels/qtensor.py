"""A packed matrix in memory: where its bytes start, how they are stored, and what keeps them alive.

Knows no torch and no file: an address may lie in the arena, in a numpy array, or in any other buffer. Kernels get the
address; whoever made the QTensor guarantees that `owner` keeps the bytes valid and in place.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertide.formats.quants.base import QuantType


@dataclass(frozen=True, slots=True)
class QTensor:
    """Rows of `quant` blocks at `address`, last axis fastest.

    Attributes:
        address: of the first byte.
        quant: how each row of `shape[-1]` values is stored.
        shape: (rows, cols), or one leading axis more: (Q, rows, cols). A vector is (cols,).
        owner: anything that keeps the bytes alive; never looked into.
        lead_stride: bytes from one entry of the leading axis to the next; None when they follow each other. The rows
            of one matrix always follow each other.
        is_transposed: the matrix meant is the transpose of each entry: a product takes `rows` values and gives `cols`.
    """

    address: int
    quant: QuantType
    shape: tuple[int, ...]
    owner: object
    lead_stride: int | None = None
    is_transposed: bool = False

    @property
    def rows(self) -> int:
        """Rows of all entries together."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        return self.quant.row_bytes(self.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the values; gaps between entries do not count."""
        return self.rows * self.row_bytes

    @property
    def is_contiguous(self) -> bool:
        return self.lead_stride is None

    def bytes_array(self) -> NDArray[np.uint8]:
        """The bytes as uint8 [..., row_bytes]; a view, valid as long as the owner lives."""
        packed = (*self.shape[:-1], self.row_bytes)
        span = self.nbytes
        if self.lead_stride is not None:
            span = (self.shape[0] - 1) * self.lead_stride + self.nbytes // self.shape[0]
        flat = np.ctypeslib.as_array(ctypes.cast(self.address, ctypes.POINTER(ctypes.c_uint8)), (span,))
        if self.lead_stride is None:
            return flat.reshape(packed)
        strides = (self.lead_stride, self.row_bytes, 1)
        return np.lib.stride_tricks.as_strided(flat, packed, strides, writeable=False)

    def index(self, i: int) -> QTensor:
        """The i-th entry of the leading axis."""
        assert len(self.shape) >= 2 and 0 <= i < self.shape[0]
        stride = self.nbytes // self.shape[0] if self.lead_stride is None else self.lead_stride
        return QTensor(self.address + i * stride, self.quant, self.shape[1:], self.owner)

    def row_range(self, begin: int, end: int) -> QTensor:
        """Rows begin..end-1 of a matrix."""
        assert len(self.shape) == 2 and 0 <= begin <= end <= self.shape[0]
        return QTensor(self.address + begin * self.row_bytes, self.quant, (end - begin, self.shape[1]), self.owner)

    def decode(self) -> NDArray[np.float32]:
        """All values, float32 [*shape]. For small tensors; kernels decode big ones in tiles."""
        return self.quant.decode(np.ascontiguousarray(self.bytes_array())).reshape(self.shape)

    @classmethod
    def from_array(cls, raw: NDArray[np.uint8], quant: QuantType, shape: tuple[int, ...]) -> QTensor:
        """A QTensor over bytes of a contiguous numpy array, which becomes its owner."""
        assert raw.flags.c_contiguous
        tensor = cls(raw.ctypes.data, quant, shape, raw)
        assert tensor.nbytes == raw.nbytes
        return tensor
