// Causal latent attention in absorbed form: one form for every number of tokens.
//
// Keys are taken in tiles of 64 at absolute positions. A tile gives each row a partial result that depends on the row and
// on the tile's visible keys only, and the partial results of a row are merged in the order of the tiles. So a result has
// the same bits for any split of a prompt into chunks, any number of threads and any instruction set.
#pragma once

#include <cstdint>

#include "kernels/attention_table.h"
#include "kernels/quant.h"
#include "thread_pool.h"

namespace expertide {

// The inner loops for the instruction set in use.
const AttentionTable& active_attention();

struct AttentionShape {
  int64_t num_heads;
  int64_t nope_dim;
  int64_t rope_dim;
  int64_t value_dim;
  int64_t rank;
};

// Per-head matrices: k_b (Q, L, N), or (Q, N, L) where the key rows lie as they were trained, and v_b (Q, U, L); the
// strides are bytes from one head to the next.
struct UnfoldingMatrices {
  Matrix k_b;
  int64_t k_b_stride;
  bool k_b_is_transposed;
  Matrix v_b;
  int64_t v_b_stride;
};

// out[t, q] = v_b[q] · Σ softmax(scale * (k_b[q] q_nope · latent + q_rope · rope)) latent over rows 0 … first_position + t.
//
// Args:
//   q_nope [T, Q, N], q_rope [T, Q, C], out [T, Q, U]: contiguous.
// Throws std::invalid_argument when types or shapes do not fit.
void mla_attention(ThreadPool& pool, const AttentionShape& shape, const UnfoldingMatrices& unfold,
                   const LatentRows& rows, const float* q_nope, const float* q_rope, int64_t num_tokens,
                   int64_t first_position, float scale, float* out);

// The part on latents: qa [T, Q, L] in, weighted mean of the latents [T, Q, L] out; may be the same memory.
void latent_mean(ThreadPool& pool, const AttentionWidths& widths, int64_t num_heads, const LatentRows& rows,
                 const float* qa, const float* q_rope, int64_t num_tokens, int64_t first_position, float scale,
                 float* out);

AttentionWidths attention_widths(int64_t rank, int64_t rope_dim);

// Upper bound of the memory that mla_attention takes beside its arguments.
int64_t attention_workspace_bytes(const AttentionShape& shape, int64_t num_tokens, int num_threads);

void check_attention(const AttentionShape& shape, const UnfoldingMatrices& unfold);

}  // namespace expertide
