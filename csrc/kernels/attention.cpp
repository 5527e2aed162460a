#include "kernels/attention.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/linear.h"

namespace expertide {
namespace {

// Tokens that go through all steps together, so that absorbed queries stay small whatever the chunk is.
constexpr int64_t kTokensAtOnce = 64;
constexpr int64_t kRowsAtOnce = 2048;

}  // namespace

AttentionWidths latent_widths(int64_t rank, int64_t rope_dim) { return attention_widths(rank, rope_dim, true); }

void check_attention(const AttentionShape& shape, const UnfoldingMatrices& unfold) {
  if (shape.num_heads < 1 || shape.rank < 1 || shape.nope_dim < 1 || shape.rope_dim < 1 || shape.value_dim < 1) {
    throw std::invalid_argument("latent attention needs at least one head and one value in every part");
  }
  checked_row_bytes(unfold.k_b.type, unfold.k_b.cols);
  checked_row_bytes(unfold.v_b.type, unfold.v_b.cols);
  const int64_t k_b_rows = unfold.k_b_is_transposed ? unfold.k_b.cols : unfold.k_b.rows;
  const int64_t k_b_cols = unfold.k_b_is_transposed ? unfold.k_b.rows : unfold.k_b.cols;
  if (k_b_rows != shape.rank || k_b_cols != shape.nope_dim || unfold.v_b.rows != shape.value_dim ||
      unfold.v_b.cols != shape.rank) {
    throw std::invalid_argument("latent attention needs k_b of [Q, L, N] and v_b of [Q, U, L]");
  }
}

void latent_mean(ThreadPool& pool, const AttentionWidths& widths, int64_t num_heads, const KeyValueRows& rows,
                 const float* qa, const float* q_rope, int64_t num_tokens, int64_t first_position, float scale,
                 float* out) {
  attend_in_tiles(pool, {widths, num_heads, 1, rows, 0, 0, qa, q_rope, num_tokens, first_position, scale, out});
}

void mla_attention(ThreadPool& pool, const AttentionShape& shape, const UnfoldingMatrices& unfold,
                   const KeyValueRows& rows, const float* q_nope, const float* q_rope, int64_t num_tokens,
                   int64_t first_position, float scale, float* out) {
  check_attention(shape, unfold);
  const AttentionWidths widths = latent_widths(shape.rank, shape.rope_dim);
  const int64_t at_once = tokens_at_once(shape.num_heads, kTokensAtOnce, kRowsAtOnce);
  const int64_t heads = shape.num_heads;
  thread_local VectorBuffer absorbed_buffer;
  for (int64_t begin = 0; begin < num_tokens; begin += at_once) {
    const int64_t count = std::min(at_once, num_tokens - begin);
    float* absorbed = absorbed_buffer.get<float>(count * heads * shape.rank);
    const auto product = unfold.k_b_is_transposed ? transposed_head_linear : head_linear;
    product(pool, unfold.k_b, heads, unfold.k_b_stride, q_nope + begin * heads * shape.nope_dim, count, absorbed);
    latent_mean(pool, widths, heads, rows, absorbed, q_rope + begin * heads * shape.rope_dim, count,
                first_position + begin, scale, absorbed);
    head_linear(pool, unfold.v_b, heads, unfold.v_b_stride, absorbed, count, out + begin * heads * shape.value_dim);
  }
}

int64_t attention_workspace_bytes(const AttentionShape& shape, int64_t num_tokens, int num_threads) {
  const int64_t tokens = std::min(num_tokens, tokens_at_once(shape.num_heads, kTokensAtOnce, kRowsAtOnce));
  const AttentionWidths widths = latent_widths(shape.rank, shape.rope_dim);
  return tokens * shape.num_heads * shape.rank * 4 +
         tiles_workspace_bytes(widths, shape.num_heads, 1, tokens, num_threads) +
         num_threads * transposed_scratch_bytes(shape.nope_dim);
}

}  // namespace expertide
