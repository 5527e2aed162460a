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
  std::vector<float> normed, low_rank, queries, q_nope, q_rope, kv, latent, k_rope, keys, values, attended, y;
};

LayerScratch& layer_scratch() {
  thread_local LayerScratch scratch;
  return scratch;
}

float* room(std::vector<float>& values, int64_t count) {
  if (values.size() < static_cast<size_t>(count)) values.resize(static_cast<size_t>(count));
  return values.data();
}

// Rows of `cols` values, values_stride floats apart, to the cached rows from the first-th on, which lie `stride` values apart.
void store_rows(const float* values, int64_t values_stride, int64_t num_rows, int64_t cols, void* base, int64_t first,
                int64_t stride, bool is_half) {
  for (int64_t t = 0; t < num_rows; ++t) {
    const float* row = values + t * values_stride;
    if (is_half) {
      store_halves(row, cols, static_cast<uint16_t*>(base) + (first + t) * stride);
    } else {
      memcpy(static_cast<float*>(base) + (first + t) * stride, row, static_cast<size_t>(cols) * sizeof(float));
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
  rope(pool, queries + s.nope_dim, s.num_heads * head_dim, head_dim, cos, sin, n, s.num_heads, s.rope_dim / 2,
       RopePairs::kAdjacent, q_rope);

  float* kv = room(scratch.kv, n * kv_cols);
  linear(pool, weights_.kv_a, normed, n, kv);
  float* latent = room(scratch.latent, n * s.rank);
  rms_norm(pool, kv, kv_cols, weights_.kv_a_norm, latent_eps_, n, s.rank, latent, s.rank);
  float* k_rope = room(scratch.k_rope, n * s.rope_dim);
  rope(pool, kv + s.rank, kv_cols, 0, cos, sin, n, 1, s.rope_dim / 2, RopePairs::kAdjacent, k_rope);
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
  store_rows(latent, shape_.rank, num_tokens, shape_.rank, cache.latent, first_position, cache.latent_stride,
             cache.is_half);
  store_rows(rope, shape_.rope_dim, num_tokens, shape_.rope_dim, cache.rope, first_position, cache.rope_stride,
             cache.is_half);
}

GroupedAttentionLayer::GroupedAttentionLayer(const GroupedShape& shape, const GroupedAttentionWeights& weights,
                                             float norm_eps, float qk_norm_eps, float scale, RopePairs pairs)
    : shape_(shape),
      weights_(weights),
      hidden_(weights.output.rows),
      norm_eps_(norm_eps),
      qk_norm_eps_(qk_norm_eps),
      scale_(scale),
      pairs_(pairs) {
  check_grouped(shape);
  if (shape.head_dim % 2 != 0) throw std::invalid_argument("rope turns pairs of values");
  check_matrix(weights.q, shape.num_heads * shape.head_dim, hidden_, "the query matrix");
  check_matrix(weights.k, shape.num_kv_heads * shape.head_dim, hidden_, "the key matrix");
  check_matrix(weights.v, shape.num_kv_heads * shape.head_dim, hidden_, "the value matrix");
  check_matrix(weights.output, hidden_, shape.num_heads * shape.head_dim, "the output matrix");
}

void GroupedAttentionLayer::run(ThreadPool& pool, float* x, int64_t num_tokens, const HeadRows& cache,
                                int64_t first_position, const float* cos, const float* sin) const {
  LayerScratch& scratch = layer_scratch();
  const int64_t n = num_tokens;
  const int64_t dim = shape_.head_dim;
  const int64_t q_cols = shape_.num_heads * dim;
  const int64_t kv_cols = shape_.num_kv_heads * dim;

  float* normed = room(scratch.normed, n * hidden_);
  rms_norm(pool, x, hidden_, weights_.norm, norm_eps_, n, hidden_, normed, hidden_);
  float* queries = room(scratch.queries, n * q_cols);
  project(pool, weights_.q, weights_.q_bias, normed, n, queries);
  position(pool, weights_.q_norm, shape_.num_heads, n, cos, sin, queries);
  float* keys = room(scratch.keys, n * kv_cols);
  project(pool, weights_.k, weights_.k_bias, normed, n, keys);
  position(pool, weights_.k_norm, shape_.num_kv_heads, n, cos, sin, keys);
  float* values = room(scratch.values, n * kv_cols);
  project(pool, weights_.v, weights_.v_bias, normed, n, values);
  const int64_t value_bytes = cache.is_half ? 2 : 4;
  for (int64_t g = 0; g < shape_.num_kv_heads; ++g) {
    auto* head_keys = static_cast<unsigned char*>(cache.keys) + g * cache.key_head_stride * value_bytes;
    auto* head_values = static_cast<unsigned char*>(cache.values) + g * cache.value_head_stride * value_bytes;
    store_rows(keys + g * dim, kv_cols, n, dim, head_keys, first_position, cache.key_stride, cache.is_half);
    store_rows(values + g * dim, kv_cols, n, dim, head_values, first_position, cache.value_stride, cache.is_half);
  }

  float* attended = room(scratch.attended, n * q_cols);
  gqa_attention(pool, shape_, cache, queries, n, first_position, scale_, attended);
  float* y = room(scratch.y, n * hidden_);
  linear(pool, weights_.output, attended, n, y);
  add_and_check(pool, y, nullptr, n * hidden_, x);  // the layer's end looks at the result
}

void GroupedAttentionLayer::project(ThreadPool& pool, const Matrix& w, const float* bias, const float* normed,
                                    int64_t num_tokens, float* y) const {
  linear(pool, w, normed, num_tokens, y);
  if (bias != nullptr) add_bias(pool, bias, num_tokens, w.rows, y);
}

void GroupedAttentionLayer::position(ThreadPool& pool, const float* norm, int64_t num_heads, int64_t num_tokens,
                                     const float* cos, const float* sin, float* y) const {
  const int64_t cols = num_heads * shape_.head_dim;
  if (norm != nullptr) {
    const int64_t norm_dim = weights_.norms_whole_rows ? cols : shape_.head_dim;
    rms_norm(pool, y, norm_dim, norm, qk_norm_eps_, num_tokens * cols / norm_dim, norm_dim, y, norm_dim);
  }
  rope(pool, y, cols, shape_.head_dim, cos, sin, num_tokens, num_heads, shape_.head_dim / 2, pairs_, y);
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

void FeedForwardLayer::multiply(ThreadPool& pool, const float* normed, int64_t num_tokens, float* y) const {
  if (!mlp_) throw std::invalid_argument("this layer has routed experts only");
  expert_mlp(pool, mlp_->gate, mlp_->up, mlp_->down, normed, num_tokens, y);
  if (mlp_->share != nullptr) gate_rows(pool, y, normed, mlp_->share, num_tokens, hidden_, y);
}

bool FeedForwardLayer::end(ThreadPool& pool, const float* normed, const float* routed, const float* own,
                           int64_t num_tokens, float* x) const {
  if ((routed != nullptr) != router_.has_value()) throw std::invalid_argument("experts' results for a layer with a router");
  const int64_t count = num_tokens * hidden_;
  if (!mlp_) return add_and_check(pool, routed, nullptr, count, x);
  if (own == nullptr) {
    float* y = room(layer_scratch().y, count);
    multiply(pool, normed, num_tokens, y);
    own = y;
  }
  return routed == nullptr ? add_and_check(pool, own, nullptr, count, x) : add_and_check(pool, routed, own, count, x);
}

}  // namespace expertide
