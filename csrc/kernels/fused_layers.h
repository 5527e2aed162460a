// The two halves of a decoder layer, each as one or two native calls: the ops of the unfused path, in its order, without
// Python between them. Results are the same bits as those of the ops called one by one.
//
// Objects hold pointers to weights and numbers only; whoever makes them keeps the weights in place. Scratch belongs to the
// calling thread and is shared by all layers.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/attention.h"
#include "kernels/decode_ops.h"
#include "kernels/grouped_attention.h"
#include "kernels/quant.h"
#include "thread_pool.h"

namespace expertide {

// Cached rows of one layer that may be written.
struct LatentCacheRows {
  void* latent;
  void* rope;
  int64_t latent_stride;  // values
  int64_t rope_stride;
  bool is_half;
};

struct LatentAttentionWeights {
  const float* norm;        // [H]
  Matrix q;                 // [Q (N + C), H], or [Q (N + C), R] behind q_a
  std::optional<Matrix> q_a;  // [R, H]
  const float* q_a_norm;    // [R], with q_a
  Matrix kv_a;              // [L + C, H]
  const float* kv_a_norm;   // [L]
  UnfoldingMatrices unfold;
  Matrix output;            // [H, Q U]
};

class LatentAttentionLayer {
 public:
  // Throws std::invalid_argument when types or shapes do not fit together.
  LatentAttentionLayer(const AttentionShape& shape, const LatentAttentionWeights& weights, float norm_eps,
                       float latent_eps, float scale);

  // x [T, H] += attention(norm(x)); appends the rows of positions first_position … + T - 1 to the cache.
  // cos, sin [T, C / 2].
  void run(ThreadPool& pool, float* x, int64_t num_tokens, const LatentCacheRows& cache, int64_t first_position,
           const float* cos, const float* sin) const;

 private:
  void append(const float* latent, const float* rope, int64_t num_tokens, const LatentCacheRows& cache,
              int64_t first_position) const;

  const AttentionShape shape_;
  const LatentAttentionWeights weights_;
  const int64_t hidden_;
  const float norm_eps_, latent_eps_, scale_;
};

struct GroupedAttentionWeights {
  const float* norm;      // [H]
  Matrix q;               // [Q D, H]
  Matrix k;               // [G D, H]
  Matrix v;               // [G D, H]
  Matrix output;          // [H, Q D]
  const float* q_bias;    // [Q D] or null; k_bias and v_bias [G D]
  const float* k_bias;
  const float* v_bias;
  const float* q_norm;    // [D], or [Q D] over whole rows, or null; k_norm [D] or [G D]
  const float* k_norm;
  bool norms_whole_rows;  // over all heads of a token together, else head by head with one weight of D
};

class GroupedAttentionLayer {
 public:
  // Throws std::invalid_argument when types or shapes do not fit together.
  GroupedAttentionLayer(const GroupedShape& shape, const GroupedAttentionWeights& weights, float norm_eps,
                        float qk_norm_eps, float scale, RopePairs pairs);

  // x [T, H] += attention(norm(x)); appends the rows of positions first_position … + T - 1 to the cache.
  // cos, sin [T, D / 2].
  void run(ThreadPool& pool, float* x, int64_t num_tokens, const HeadRows& cache, int64_t first_position,
           const float* cos, const float* sin) const;

 private:
  void project(ThreadPool& pool, const Matrix& w, const float* bias, const float* normed, int64_t num_tokens,
               float* y) const;
  // Norm, where there is one, and rotation of `num_heads` heads, in place.
  void position(ThreadPool& pool, const float* norm, int64_t num_heads, int64_t num_tokens, const float* cos,
                const float* sin, float* y) const;

  const GroupedShape shape_;
  const GroupedAttentionWeights weights_;
  const int64_t hidden_;
  const float norm_eps_, qk_norm_eps_, scale_;
  const RopePairs pairs_;
};

struct SwigluWeights {
  Matrix gate, up, down;
  const float* share;  // [H], or null: the result of token t times sigmoid(share · x[t])
};

struct Router {
  Matrix weights;     // [E, H]
  const float* bias;  // [E] or null
  RouterSpec spec;
};

class FeedForwardLayer {
 public:
  // mlp: a dense layer's, or the shared experts'. At least one of router and mlp.
  FeedForwardLayer(const float* norm, float norm_eps, int64_t hidden, const std::optional<Router>& router,
                   const std::optional<SwigluWeights>& mlp);

  // normed [T, H] = norm(x); with a router also ids and weights [T, K].
  void begin(ThreadPool& pool, const float* x, int64_t num_tokens, float* normed, int32_t* ids, float* weights) const;

  // y [T, H] = mlp(normed), which must be there.
  void multiply(ThreadPool& pool, const float* normed, int64_t num_tokens, float* y) const;

  // x [T, H] += routed + mlp(normed); routed is null exactly when there is no router. own: what `multiply` gave, or null:
  // then it is computed here. Returns whether x is finite.
  bool end(ThreadPool& pool, const float* normed, const float* routed, const float* own, int64_t num_tokens,
           float* x) const;

 private:
  const float* const norm_;
  const float norm_eps_;
  const int64_t hidden_;
  const std::optional<Router> router_;
  const std::optional<SwigluWeights> mlp_;
};

}  // namespace expertide
