"""How each kernel is launched: tile sizes, warps, pipeline stages. The only place for such numbers.

For cards of compute capability 8.0 and newer within 99 KiB of shared memory. `benchmarks/gpu_tune.py` times candidates;
what it found on an H200 stands here (docs/experiments.md), and `benchmarks/gpu_kernels.py` measures the result.
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

    def for_rows_of(self, num_chunks: int) -> RowLaunch:
        """As many chunks a program, but of more rows where a row has fewer; a power of two both."""
        chunks = self.chunks
        while chunks >= 2 * num_chunks:
            chunks //= 2
        return RowLaunch(self.rows * self.chunks // chunks, chunks, self.num_warps)


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


# Rows of 2,048 four-bit values are 64 chunks, of 1,408 five-bit values 44. One warp a program: nothing is exchanged
# between warps. One row a program is 0.1 to 0.3 us faster on an H200, and 1.4 us slower for a head of 20,480 rows;
# a small card holds 16 programs a multiprocessor, and one row each would leave too few bytes on their way.
LINEAR = RowLaunch(rows=2, chunks=32, num_warps=1)
TRANSPOSED = RowLaunch(rows=128, chunks=1, num_warps=4)
EXPERT_GATE_UP = RowLaunch(rows=4, chunks=16, num_warps=1)
EXPERT_DOWN = RowLaunch(rows=8, chunks=16, num_warps=1)
DEQUANTISE = RowLaunch(rows=1, chunks=64, num_warps=4)

GEMM = TileLaunch(tokens=128, rows=64, chunks=4, num_warps=8, num_stages=3)
GEMM_EXACT = TileLaunch(tokens=16, rows=16, chunks=2, num_warps=4, num_stages=1)  # float32 weights: no tensor cores
EXPERT_GEMM = TileLaunch(tokens=64, rows=64, chunks=4, num_warps=4, num_stages=1)


def gemm(quant: QuantType) -> TileLaunch:
    return GEMM_EXACT if quant.name == "F32" else GEMM


def expert_gemm(quant: QuantType) -> TileLaunch:
    return GEMM_EXACT if quant.name == "F32" else EXPERT_GEMM


# Keys wider than 256 are latents: queries, keys and the mean of 512 values each have to fit beside each other.
WIDE_KEY = 256
DECODE_ATTENTION = AttentionLaunch(queries=16, keys=64, num_warps=4, num_stages=2)
DECODE_ATTENTION_WIDE = AttentionLaunch(queries=16, keys=16, num_warps=4, num_stages=2)
PREFILL_ATTENTION = AttentionLaunch(queries=64, keys=64, num_warps=4, num_stages=1)
PREFILL_ATTENTION_WIDE = AttentionLaunch(queries=32, keys=16, num_warps=8, num_stages=1)
PREFILL_ATTENTION_FLOAT32 = AttentionLaunch(queries=16, keys=16, num_warps=4, num_stages=1)  # keys twice as large


def attention(*, is_decode: bool, is_half: bool, key_size: int) -> AttentionLaunch:
    if not is_decode and not is_half:
        return PREFILL_ATTENTION_FLOAT32
    if key_size > WIDE_KEY:
        return DECODE_ATTENTION_WIDE if is_decode else PREFILL_ATTENTION_WIDE
    return DECODE_ATTENTION if is_decode else PREFILL_ATTENTION


# Decode attention is split along the keys into pieces of this many keys, or of more where that would be more pieces
# than MAX_KEY_SPLITS: a function of the number of keys and nothing else.
MIN_SPLIT_KEYS = 32
MAX_KEY_SPLITS = 64
