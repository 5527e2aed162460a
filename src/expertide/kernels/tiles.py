"""Sizes of the pieces in which the reference ops work. No torch: the plan computes workspace from the same numbers."""

from __future__ import annotations

from expertide.units import MIB

# Decoded values of one tile of a packed matrix. The ceiling promised everywhere is 32 MiB; the decoders of the K types
# need about twice a tile for their intermediate arrays, and small tiles stay in the CPU's cache until multiplied.
DECODED_TILE_BYTES = 8 * MIB

KEY_TILE = 2048  # keys of one attention step; as float32, a tile of 576-wide rows takes 4.5 MiB
QUERY_TILE_SCORES = 4 * MIB  # scores of one (query tile, key tile) pair: 16 MiB of float32


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
