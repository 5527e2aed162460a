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

struct SwigluWeights {
  Matrix gate, up, down;
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

  // x [T, H] += routed + mlp(normed); routed is null exactly when there is no router. Returns whether x is finite.
  bool end(ThreadPool& pool, const float* normed, const float* routed, int64_t num_tokens, float* x) const;

 private:
  const float* const norm_;
  const float norm_eps_;
  const int64_t hidden_;
  const std::optional<Router> router_;
  const std::optional<SwigluWeights> mlp_;
};

}  // namespace expertide
