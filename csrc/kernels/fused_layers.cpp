#include "kernels/fused_layers.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/expert_mlp.h"
#include "kernels/linear.h"

namespace expertide {
namespace {

void check_matrix(const Matrix& w, int64_t rows, int64_t cols, const char* name) {
  checked_row_bytes(w.type, w.cols);
  if (w.rows != rows || w.cols != cols) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(w.rows) + " by " + std::to_string(w.cols) +
                                ", expected " + std::to_string(rows) + " by " + std::to_string(cols));
  }
}

// Activations of one call; a thread runs one layer at a time.
struct LayerScratch {
  std::vector<float> normed, low_rank, queries, q_nope, q_rope, kv, latent, k_rope, attended, y;
};

LayerScratch& layer_scratch() {
  thread_local LayerScratch scratch;
  return scratch;
}

float* room(std::vector<float>& values, int64_t count) {
  if (values.size() < static_cast<size_t>(count)) values.resize(static_cast<size_t>(count));
  return values.data();
}

void store_rows(const float* values, int64_t num_rows, int64_t cols, void* base, int64_t stride, bool is_half) {
  for (int64_t t = 0; t < num_rows; ++t) {
    if (is_half) {
      store_halves(values + t * cols, cols, static_cast<uint16_t*>(base) + t * stride);
    } else {
      memcpy(static_cast<float*>(base) + t * stride, values + t * cols, static_cast<size_t>(cols) * sizeof(float));
    }
  }
}

}  // namespace

LatentAttentionLayer::LatentAttentionLayer(const AttentionShape& shape, const LatentAttentionWeights& weights,
                                           float norm_eps, float latent_eps, float scale)
    : shape_(shape),
      weights_(weights),
      hidden_(weights.output.rows),
      norm_eps_(norm_eps),
      latent_eps_(latent_eps),
      scale_(scale) {
  check_attention(shape, weights.unfold);
  if (shape.rope_dim % 2 != 0) throw std::invalid_argument("rope turns pairs of values");
  const int64_t query_rows = shape.num_heads * (shape.nope_dim + shape.rope_dim);
  check_matrix(weights.q, query_rows, weights.q_a ? weights.q_a->rows : hidden_, "the query matrix");
  if (weights.q_a) check_matrix(*weights.q_a, weights.q_a->rows, hidden_, "the low-rank query matrix");
  check_matrix(weights.kv_a, shape.rank + shape.rope_dim, hidden_, "the latent matrix");
  check_matrix(weights.output, hidden_, shape.num_heads * shape.value_dim, "the output matrix");
}

void LatentAttentionLayer::run(ThreadPool& pool, float* x, int64_t num_tokens, const LatentCacheRows& cache,
                               int64_t first_position, const float* cos, const float* sin) const {
  LayerScratch& scratch = layer_scratch();
  const AttentionShape& s = shape_;
  const int64_t head_dim = s.nope_dim + s.rope_dim;
  const int64_t kv_cols = s.rank + s.rope_dim;
  const int64_t n = num_tokens;

  float* normed = room(scratch.normed, n * hidden_);
  rms_norm(pool, x, hidden_, weights_.norm, norm_eps_, n, hidden_, normed, hidden_);

  const float* query_input = normed;
  if (weights_.q_a) {
    const int64_t rank = weights_.q_a->rows;
    float* low_rank = room(scratch.low_rank, n * rank);
    linear(pool, *weights_.q_a, normed, n, low_rank);
    rms_norm(pool, low_rank, rank, weights_.q_a_norm, latent_eps_, n, rank, low_rank, rank);
    query_input = low_rank;
  }
  float* queries = room(scratch.queries, n * s.num_heads * head_dim);
  linear(pool, weights_.q, query_input, n, queries);
  float* q_nope = room(scratch.q_nope, n * s.num_heads * s.nope_dim);
  for (int64_t i = 0; i < n * s.num_heads; ++i) {
    memcpy(q_nope + i * s.nope_dim, queries + i * head_dim, static_cast<size_t>(s.nope_dim) * sizeof(float));
  }
  float* q_rope = room(scratch.q_rope, n * s.num_heads * s.rope_dim);
  rope(pool, queries + s.nope_dim, s.num_heads * head_dim, head_dim, cos, sin, n, s.num_heads, s.rope_dim / 2, q_rope);

  float* kv = room(scratch.kv, n * kv_cols);
  linear(pool, weights_.kv_a, normed, n, kv);
  float* latent = room(scratch.latent, n * s.rank);
  rms_norm(pool, kv, kv_cols, weights_.kv_a_norm, latent_eps_, n, s.rank, latent, s.rank);
  float* k_rope = room(scratch.k_rope, n * s.rope_dim);
  rope(pool, kv + s.rank, kv_cols, 0, cos, sin, n, 1, s.rope_dim / 2, k_rope);
  append(latent, k_rope, n, cache, first_position);

  float* attended = room(scratch.attended, n * s.num_heads * s.value_dim);
  const KeyValueRows rows = {cache.latent, cache.rope, cache.latent_stride, cache.rope_stride, cache.is_half};
  mla_attention(pool, s, weights_.unfold, rows, q_nope, q_rope, n, first_position, scale_, attended);
  float* y = room(scratch.y, n * hidden_);
  linear(pool, weights_.output, attended, n, y);
  add_and_check(pool, y, nullptr, n * hidden_, x);  // the layer's end looks at the result
}

void LatentAttentionLayer::append(const float* latent, const float* rope, int64_t num_tokens,
                                  const LatentCacheRows& cache, int64_t first_position) const {
  const int64_t bytes = cache.is_half ? 2 : 4;
  auto* latent_row = static_cast<unsigned char*>(cache.latent) + first_position * cache.latent_stride * bytes;
  auto* rope_row = static_cast<unsigned char*>(cache.rope) + first_position * cache.rope_stride * bytes;
  store_rows(latent, num_tokens, shape_.rank, latent_row, cache.latent_stride, cache.is_half);
  store_rows(rope, num_tokens, shape_.rope_dim, rope_row, cache.rope_stride, cache.is_half);
}

FeedForwardLayer::FeedForwardLayer(const float* norm, float norm_eps, int64_t hidden,
                                   const std::optional<Router>& router, const std::optional<SwigluWeights>& mlp)
    : norm_(norm), norm_eps_(norm_eps), hidden_(hidden), router_(router), mlp_(mlp) {
  if (!router && !mlp) throw std::invalid_argument("a feed-forward layer needs experts or weights of its own");
  if (router) {
    check_router(router->spec);
    check_matrix(router->weights, router->spec.num_experts, hidden, "the router");
  }
  if (mlp) {
    check_expert(mlp->gate, mlp->up, mlp->down);
    if (mlp->gate.cols != hidden) throw std::invalid_argument("gate rows are not as long as the hidden state");
  }
}

void FeedForwardLayer::begin(ThreadPool& pool, const float* x, int64_t num_tokens, float* normed, int32_t* ids,
                             float* weights) const {
  rms_norm(pool, x, hidden_, norm_, norm_eps_, num_tokens, hidden_, normed, hidden_);
  if (!router_) return;
  float* logits = room(layer_scratch().y, num_tokens * router_->spec.num_experts);
  linear(pool, router_->weights, normed, num_tokens, logits);
  route(pool, router_->spec, logits, router_->bias, num_tokens, ids, weights);
}

bool FeedForwardLayer::end(ThreadPool& pool, const float* normed, const float* routed, int64_t num_tokens,
                           float* x) const {
  if ((routed != nullptr) != router_.has_value()) throw std::invalid_argument("experts' results for a layer with a router");
  const int64_t count = num_tokens * hidden_;
  if (!mlp_) return add_and_check(pool, routed, nullptr, count, x);
  float* y = room(layer_scratch().y, count);
  expert_mlp(pool, mlp_->gate, mlp_->up, mlp_->down, normed, num_tokens, y);
  return routed == nullptr ? add_and_check(pool, y, nullptr, count, x) : add_and_check(pool, routed, y, count, x);
}

}  // namespace expertide
