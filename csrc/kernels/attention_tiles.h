// The loop over key tiles behind every kind of attention: one form for every number of tokens.
//
// Keys are taken in tiles of 64 at absolute positions. A tile gives each row a partial result that depends on the row and
// on the tile's visible keys only, and the partial results of a row are merged in the order of the tiles. So a result has
// the same bits for any split of a prompt into chunks, any number of threads and any instruction set.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention_table.h"
#include "thread_pool.h"

namespace expertide {

// The inner loops for the instruction set in use.
const AttentionTable& active_attention();

// Widths of a row whose scores are taken over both parts, or over the key part only.
AttentionWidths attention_widths(int64_t value_dim, int64_t key_dim, bool scores_over_value);

// Causal attention of T tokens with Q query heads; num_kv_heads divides Q, and neighbouring query heads share cached rows.
// out[t, q] = Σ_s softmax_s(scale * q[t, q] · row[s]) value[s] over rows s = 0 … first_position + t of head q / (Q / G).
struct TiledAttention {
  AttentionWidths widths;
  int64_t num_heads;
  int64_t num_kv_heads;
  KeyValueRows rows;          // of the first key/value head
  int64_t value_head_stride;  // values from one key/value head's rows to the next's
  int64_t key_head_stride;
  const float* q_value;  // [T, Q, value_dim]; not read where scores are taken over the key part only
  const float* q_key;    // [T, Q, key_dim]
  int64_t num_tokens;
  int64_t first_position;
  float scale;
  float* out;  // [T, Q, value_dim]; may be q_value
};

// Throws std::invalid_argument for a position below 0.
void attend_in_tiles(ThreadPool& pool, const TiledAttention& call);

// Tokens that go through together, so that what is kept per row stays small whatever the chunk is.
int64_t tokens_at_once(int64_t num_heads, int64_t max_tokens, int64_t max_rows);

// Upper bound of the memory that attend_in_tiles takes beside its arguments.
int64_t tiles_workspace_bytes(const AttentionWidths& widths, int64_t num_heads, int64_t num_kv_heads, int64_t num_tokens,
                              int num_threads);

// Memory aligned for vectors, grown and kept.
class VectorBuffer {
 public:
  template <class T>
  T* get(int64_t count) {
    const auto wanted = static_cast<size_t>(count) * sizeof(T) + 64;
    if (bytes_.size() < wanted) bytes_.resize(wanted);
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    return reinterpret_cast<T*>((address + 63) / 64 * 64);
  }

 private:
  std::vector<unsigned char> bytes_;
};

}  // namespace expertide
