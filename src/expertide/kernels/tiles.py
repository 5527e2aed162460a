"""Sizes of the pieces in which ops work. No torch: the plan computes workspace from the same numbers."""

from __future__ import annotations

from expertide.units import MIB

# Decoded values of one tile of a packed matrix. The ceiling promised everywhere is 32 MiB; the decoders of the K types
# need about twice a tile for their intermediate arrays, and small tiles stay in the CPU's cache until multiplied.
DECODED_TILE_BYTES = 8 * MIB

KEY_TILE = 2048  # keys of one attention step; as float32, a tile of 576-wide rows takes 4.5 MiB
QUERY_TILE_SCORES = 4 * MIB  # scores of one (query tile, key tile) pair: 16 MiB of float32

# What one call of native attention keeps between its steps: packed key tiles and partial results
# (kRoundBytes and kPartialBytes in csrc/kernels/attention_tiles.cpp).
NATIVE_ROUND_BYTES = 5 * MIB
NATIVE_QUERY_ROWS = 8192  # (token, head) pairs of one call, see csrc/kernels/grouped_attention.cpp
NATIVE_BATCH = 64  # (token, expert) pairs computed together, or one expert's where those are more


def queries_per_tile(num_heads: int) -> int:
    """Tokens whose attention is computed together."""
    return max(1, QUERY_TILE_SCORES // (num_heads * KEY_TILE))


def decoding_bytes() -> int:
    """Temporary memory of multiplying with a packed matrix, without the result."""
    return 3 * DECODED_TILE_BYTES


def attention_bytes(num_tokens: int, *, num_heads: int, rank: int, rope_dim: int) -> int:
    """Temporary memory of `mla_attention`, whatever the number of keys, without arguments and result."""
    queries = min(num_tokens, queries_per_tile(num_heads))
    scores = queries * num_heads * KEY_TILE
    latents = 3 * queries * num_heads * rank  # absorbed queries, the running mean, a copy in the order of heads
    keys = KEY_TILE * (rank + rope_dim)
    return 4 * (scores + latents + keys) + decoding_bytes()


def gqa_attention_bytes(num_tokens: int, *, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Temporary memory of `gqa_attention`, whatever the number of keys, without arguments and result."""
    queries = min(num_tokens, queries_per_tile(num_heads))
    scores = queries * num_heads * KEY_TILE
    rows = 3 * queries * num_heads * head_dim  # scaled queries by kv head, the running mean, the mean by query head
    keys = 2 * KEY_TILE * num_kv_heads * head_dim
    return 4 * (scores + rows + keys)


def native_latent_bytes(num_tokens: int, *, num_heads: int, rank: int, rope_dim: int) -> int:
    """Memory that the native `mla_attention` takes and keeps; not arguments, result and what each thread has."""
    rows = max(min(num_tokens * num_heads, NATIVE_QUERY_ROWS), num_heads) + 4
    # Absorbed queries and running sums in float32; queries as int16 in padded rows, their scales.
    return NATIVE_ROUND_BYTES + rows * (4 * (rank + 2) + 2 * (rank + rope_dim) + 256)


def native_gqa_bytes(num_tokens: int, *, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Memory that the native `gqa_attention` takes and keeps; not arguments, result and what each thread has."""
    rows = max(min(num_tokens * num_heads, NATIVE_QUERY_ROWS), num_heads) + 4 * num_kv_heads
    return NATIVE_ROUND_BYTES + rows * (2 * head_dim + 128)  # queries as int16 in padded rows, scales, running sums


def native_rows_bytes(num_rows: int, cols: int) -> int:
    """Activations as native products take them: two planes of int8 with scales and sums, 2.41 bytes a value at most."""
    return num_rows * (5 * cols // 2 + 512)


def native_moe_bytes(num_tokens: int, *, hidden: int, inner: int, k: int) -> int:
    """Memory of the native routed experts, without arguments and result: every (token, k) result and one batch."""
    batch = min(num_tokens * k, max(NATIVE_BATCH, num_tokens))
    # Two forms of activations: gate, up and down may be of types with blocks of 32 and of 256.
    packed = 2 * native_rows_bytes(num_tokens, hidden) + 2 * native_rows_bytes(batch, inner)
    return 4 * (num_tokens * k * hidden + 2 * batch * inner) + packed + 16 * num_tokens * k + 64 * batch


def native_mlp_bytes(num_tokens: int, *, hidden: int, inner: int) -> int:
    """Memory that the native dense or shared MLP takes and keeps, without arguments and result."""
    packed = native_rows_bytes(num_tokens, hidden) + native_rows_bytes(num_tokens, inner)
    return 8 * num_tokens * inner + packed + 64 * num_tokens


def native_step_bytes(
    num_tokens: int, *, attention: int, hidden: int, moe_inner: int, k: int, mlp_inner: int, vocab_size: int
) -> int:
    """Memory of a whole step on the native kernels: both halves of a layer keep their scratch, so that it adds up.

    Args:
        attention: what the first half takes and keeps.
        moe_inner, k: of routed experts; 0, 0 for a model without.
        mlp_inner: the widest dense or shared MLP; 0 for a model without.
    """
    experts = native_moe_bytes(num_tokens, hidden=hidden, inner=moe_inner, k=k) if k else 0
    mlp = native_mlp_bytes(num_tokens, hidden=hidden, inner=mlp_inner) if mlp_inner else 0
    streams = 4 * num_tokens * 3 * hidden  # residual, normed, the experts' sum
    return attention + experts + mlp + streams + 4 * vocab_size * 2
