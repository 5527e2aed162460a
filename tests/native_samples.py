"""Random packed weights and the native calls on them, for the tests of the C++ kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from tests.packed_samples import ALL_TYPES, SCALES, TYPE_NAMES, random_weights

from expertide import _native
from expertide.formats.quants.base import QuantType

Floats = NDArray[np.float32]

__all__ = ["ALL_TYPES", "TYPE_NAMES", "random_weights"]  # for those who test the native kernels


def constant_weights(quant: QuantType, rows: int, cols: int, fill: int) -> NDArray[np.uint8]:
    """Packed rows of one byte, except that every scale is 1 (2^-7 for MXFP4, whose scale is an exponent)."""
    raw = np.full((rows, cols // quant.block_size, quant.block_bytes), fill, dtype=np.uint8)
    if quant.name == "MXFP4":
        raw[:, :, 0] = 120
    for offset in SCALES.get(quant.name, ()):
        raw[:, :, offset : offset + 2] = np.array([1], dtype=np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def linear(pool: _native.ThreadPool, quant: QuantType, packed: NDArray[np.uint8], x: Floats) -> Floats:
    rows, cols = packed.shape[0], x.shape[1]
    assert packed.shape[1] == quant.row_bytes(cols) and packed.flags.c_contiguous and x.flags.c_contiguous
    y = np.full((x.shape[0], rows), np.nan, dtype=np.float32)
    _native.linear(pool, packed.ctypes.data, quant.ggml_id, rows, cols, x.ctypes.data, x.shape[0], y.ctypes.data)
    return y


def decode_rows(pool: _native.ThreadPool, quant: QuantType, packed: NDArray[np.uint8], ids: list[int]) -> Floats:
    cols = packed.shape[1] // quant.block_bytes * quant.block_size
    ids_array = np.array(ids, dtype=np.int64)
    out = np.full((len(ids), cols), np.nan, dtype=np.float32)
    _native.decode_rows(
        pool,
        packed.ctypes.data,
        quant.ggml_id,
        packed.shape[0],
        cols,
        ids_array.ctypes.data,
        len(ids),
        out.ctypes.data,
    )
    return out


@contextmanager
def isa(name: str) -> Iterator[None]:
    """Run with another instruction set, then with the one before."""
    before = _native.isa()
    _native.set_isa(name)
    try:
        yield
    finally:
        _native.set_isa(before)


@contextmanager
def activation_bits(bits: int) -> Iterator[None]:
    """Round activations to so many bits, then as before."""
    before = _native.activation_bits()
    _native.set_activation_bits(bits)
    try:
        yield
    finally:
        _native.set_activation_bits(before)


def available_isas() -> tuple[str, ...]:
    return tuple(_native.available_isas())


def assert_same_bits(a: Floats, b: Floats) -> None:
    """Equal bit for bit; the message shows the first place. Any NaN equals any NaN: hardware may choose its payload."""
    assert a.shape == b.shape
    different = (a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))
    if different.any():
        place = tuple(int(i) for i in np.argwhere(different)[0])
        raise AssertionError(f"{different.sum()} of {a.size} differ, first at {place}: {a[place]!r} and {b[place]!r}")
