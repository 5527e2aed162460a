"""ggml's own row products, timed in its library through ctypes: the peer of `linear.py`.

Takes a folder with libggml-base.so and libggml-cpu.so, as llama-cpp-python installs them (site-packages/llama_cpp/lib).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np


class _Traits(ctypes.Structure):
    """struct ggml_type_traits_cpu of ggml-cpu.h."""

    _fields_ = (
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


_FROM_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_VEC_DOT = ctypes.CFUNCTYPE(
    None,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
)


class GgmlRows:
    """ggml's product of packed rows with one row of activations, row after row as its own matrix product calls it."""

    def __init__(self, folder: Path) -> None:
        self._base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self._cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
        self._cpu.ggml_cpu_init()
        self._cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_Traits)
        self._cpu.ggml_get_type_traits_cpu.argtypes = [ctypes.c_int]
        self._base.ggml_row_size.restype = ctypes.c_size_t
        self._base.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
        self.isa = "avx512" if self._cpu.ggml_cpu_has_avx512() else "avx2" if self._cpu.ggml_cpu_has_avx2() else "base"

    def product(self, type_id: int, packed: np.ndarray, x: np.ndarray) -> tuple[Callable[[], None], np.ndarray]:
        """A function that multiplies once, and the float32 it writes.

        A call through ctypes costs a microsecond, ten short rows' worth. So all of the weights are one long row here,
        and its activations stay in the core's second cache.
        """
        traits = self._cpu.ggml_get_type_traits_cpu(type_id).contents
        activations = np.zeros(self._base.ggml_row_size(traits.vec_dot_type, x.size), dtype=np.uint8)
        if traits.vec_dot_type == 0:
            activations = x.view(np.uint8)
        else:
            other = self._cpu.ggml_get_type_traits_cpu(traits.vec_dot_type).contents
            _FROM_FLOAT(other.from_float)(x.ctypes.data, activations.ctypes.data, x.size)
        y = np.zeros(1, dtype=np.float32)
        dot = _VEC_DOT(traits.vec_dot)
        arguments = (x.size, y.ctypes.data, 0, packed.ctypes.data, 0, activations.ctypes.data, 0, 1)

        def call(_alive: object = (packed, x, activations, y)) -> None:
            dot(*arguments)

        return call, y
