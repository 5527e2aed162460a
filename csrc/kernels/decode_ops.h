// The small ops between the products: norm, rotation, router, sums. One compilation for every instruction set; each token
// is computed by itself in a fixed order, so nothing depends on its neighbours or on threads.
#pragma once

#include <cstdint>

#include "thread_pool.h"

namespace expertide {

// y[t] = x[t] / sqrt(mean(x[t]²) + eps) * weight; rows lie x_stride and y_stride floats apart. y may be x.
void rms_norm(ThreadPool& pool, const float* x, int64_t x_stride, const float* weight, float eps, int64_t num_tokens,
              int64_t cols, float* y, int64_t y_stride);

// Which values of a head turn together: (2i, 2i + 1) or (i, i + pairs).
enum class RopePairs { kAdjacent, kHalves };

// Turns the pairs of `num_heads` heads of 2 * pairs values by the token's angles: y[t, q] from x[t, q].
// x rows lie x_token_stride and x_head_stride floats apart; y is contiguous [T, num_heads, 2 * pairs] and may be x.
// cos, sin [T, pairs].
void rope(ThreadPool& pool, const float* x, int64_t x_token_stride, int64_t x_head_stride, const float* cos,
          const float* sin, int64_t num_tokens, int64_t num_heads, int64_t pairs, RopePairs which, float* y);

// y[t] += bias; y [T, cols].
void add_bias(ThreadPool& pool, const float* bias, int64_t num_tokens, int64_t cols, float* y);

// out[t] = sigmoid(gate · x[t]) * y[t]; all [T, cols], out may be y.
void gate_rows(ThreadPool& pool, const float* y, const float* x, const float* gate, int64_t num_tokens, int64_t cols,
               float* out);

// The parameters of src/expertide/kernels/router.py, which refuses what makes no sense.
struct RouterSpec {
  int64_t num_experts;
  int64_t k;
  bool is_sigmoid;
  int64_t num_groups;
  int64_t top_groups;
  bool rates_by_two;  // a group is rated by the sum of its two best, else by its best
  bool renormalize;
  float renormalize_eps;
  float scale;
};

// Throws std::invalid_argument when the numbers contradict each other.
void check_router(const RouterSpec& spec);

// logits [T, E], bias [E] or null -> ids [T, K], heaviest choice first, ties by lower id; weights [T, K].
void route(ThreadPool& pool, const RouterSpec& spec, const float* logits, const float* bias, int64_t num_tokens,
           int32_t* ids, float* weights);

// x[i] += a[i] (+ b[i], added to a first); b may be null. Returns whether every x is finite afterwards.
bool add_and_check(ThreadPool& pool, const float* a, const float* b, int64_t count, float* x);

// Float32 to the nearest float16, ties to even; what is too large becomes infinity.
void store_halves(const float* values, int64_t count, uint16_t* halves);

}  // namespace expertide
