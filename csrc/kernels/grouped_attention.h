// Causal grouped-query attention on the tile loop: a row of the cache is a head's value and its rotated key, and scores are
// taken over the key.
#pragma once

#include <cstdint>

#include "kernels/attention_tiles.h"
#include "thread_pool.h"

namespace expertide {

struct GroupedShape {
  int64_t num_heads;     // Q
  int64_t num_kv_heads;  // G, divides Q
  int64_t head_dim;      // D
};

// Cached rows of one layer. Strides are in values: from one row to the next, and from one head's rows to the next's.
struct HeadRows {
  void* keys;
  void* values;
  int64_t key_stride;
  int64_t value_stride;
  int64_t key_head_stride;
  int64_t value_head_stride;
  bool is_half;  // float16, else float32
};

// out[t, q] = Σ_s softmax_s(scale * q[t, q] · key[g, s]) value[g, s] over rows s = 0 … first_position + t; g = q / (Q / G).
//
// Args:
//   q, out [T, Q, D]: contiguous.
// Throws std::invalid_argument when the shape makes no sense.
void gqa_attention(ThreadPool& pool, const GroupedShape& shape, const HeadRows& rows, const float* q, int64_t num_tokens,
                   int64_t first_position, float scale, float* out);

// Upper bound of the memory that gqa_attention takes beside its arguments.
int64_t gqa_workspace_bytes(const GroupedShape& shape, int64_t num_tokens, int num_threads);

void check_grouped(const GroupedShape& shape);

}  // namespace expertide
