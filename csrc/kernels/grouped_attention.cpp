#include "kernels/grouped_attention.h"

#include <algorithm>
#include <stdexcept>

namespace expertide {
namespace {

// Tokens that go through the tiles together: each such piece packs all tiles once more. 8,192 packed queries of 128 values
// are 2 MiB.
constexpr int64_t kTokensAtOnce = 512;
constexpr int64_t kRowsAtOnce = 8192;

AttentionWidths head_widths(const GroupedShape& shape) { return attention_widths(shape.head_dim, shape.head_dim, false); }

}  // namespace

void check_grouped(const GroupedShape& shape) {
  if (shape.num_heads < 1 || shape.num_kv_heads < 1 || shape.head_dim < 1 ||
      shape.num_heads % shape.num_kv_heads != 0) {
    throw std::invalid_argument("grouped attention needs key/value heads that divide the query heads");
  }
}

void gqa_attention(ThreadPool& pool, const GroupedShape& shape, const HeadRows& rows, const float* q, int64_t num_tokens,
                   int64_t first_position, float scale, float* out) {
  check_grouped(shape);
  TiledAttention call = {};
  call.widths = head_widths(shape);
  call.num_heads = shape.num_heads;
  call.num_kv_heads = shape.num_kv_heads;
  call.rows = {rows.values, rows.keys, rows.value_stride, rows.key_stride, rows.is_half};
  call.value_head_stride = rows.value_head_stride;
  call.key_head_stride = rows.key_head_stride;
  call.scale = scale;
  const int64_t at_once = tokens_at_once(shape.num_heads, kTokensAtOnce, kRowsAtOnce);
  for (int64_t begin = 0; begin < num_tokens; begin += at_once) {
    call.num_tokens = std::min(at_once, num_tokens - begin);
    call.first_position = first_position + begin;
    call.q_key = q + begin * shape.num_heads * shape.head_dim;
    call.out = out + begin * shape.num_heads * shape.head_dim;
    attend_in_tiles(pool, call);
  }
}

int64_t gqa_workspace_bytes(const GroupedShape& shape, int64_t num_tokens, int num_threads) {
  const int64_t tokens = std::min(num_tokens, tokens_at_once(shape.num_heads, kTokensAtOnce, kRowsAtOnce));
  return tiles_workspace_bytes(head_widths(shape), shape.num_heads, shape.num_kv_heads, tokens, num_threads);
}

}  // namespace expertide
