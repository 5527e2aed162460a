"""How each kernel is launched: tile sizes, warps, pipeline stages. The only place for such numbers.

Chosen by hand for cards of compute capability 8.0 and newer within 99 KiB of shared memory; `benchmarks/gpu_kernels.py`
measures them.
"""

from __future__ import annotations

from dataclasses import dataclass

from expertide.formats.quants.base import QuantType

SMALL_TOKENS = 16  # up to here the token-by-token kernels, beyond it tensor cores


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """Token-by-token products: a program takes `rows` rows, `chunks` chunks of 16 bytes at a time."""

    rows: int
    chunks: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class TileLaunch:
    """Tensor-core products: tiles of `tokens` x `rows`, `chunks` chunks of 16 bytes of each row at a time."""

    tokens: int
    rows: int
    chunks: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Tiles of `queries` (token, head) rows x `keys` keys."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# Rows of 2,048 four-bit values are 64 chunks, of 1,408 five-bit values 44.
LINEAR = RowLaunch(rows=8, chunks=64, num_warps=4)
TRANSPOSED = RowLaunch(rows=16, chunks=4, num_warps=4)
EXPERT_GATE_UP = RowLaunch(rows=4, chunks=64, num_warps=4)
EXPERT_DOWN = RowLaunch(rows=8, chunks=64, num_warps=4)
DEQUANTISE = RowLaunch(rows=1, chunks=64, num_warps=4)

GEMM = TileLaunch(tokens=64, rows=64, chunks=4, num_warps=4, num_stages=2)
GEMM_EXACT = TileLaunch(tokens=16, rows=16, chunks=2, num_warps=4, num_stages=1)  # float32 weights: no tensor cores


def gemm(quant: QuantType) -> TileLaunch:
    return GEMM_EXACT if quant.name == "F32" else GEMM


DECODE_ATTENTION = AttentionLaunch(queries=16, keys=32, num_warps=4, num_stages=1)
PREFILL_ATTENTION = AttentionLaunch(queries=32, keys=32, num_warps=8, num_stages=1)
# Keys of float32: a tile of 32 would not fit beside the queries.
EXACT_ATTENTION = AttentionLaunch(queries=16, keys=16, num_warps=4, num_stages=1)


def attention(*, is_decode: bool, is_half: bool) -> AttentionLaunch:
    if not is_half:
        return EXACT_ATTENTION
    return DECODE_ATTENTION if is_decode else PREFILL_ATTENTION


# Decode attention is split along the keys into pieces of this many keys, or of more where that would be more pieces
# than MAX_KEY_SPLITS: a function of the number of keys and nothing else.
MIN_SPLIT_KEYS = 64
MAX_KEY_SPLITS = 64
