#include "kernels/decode_ops.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "kernels/activations.h"

#define EXPERTIDE_VECTOR_FLOATS 4
#include "kernels/vector_math.inc"

namespace expertide {
namespace {

constexpr int kLanes = 32;

// body(begin, end) over tokens: by the caller alone when the work is small.
template <class Body>
void for_tokens(ThreadPool& pool, int64_t num_tokens, int64_t work_per_token, Body&& body) {
  if (num_tokens * work_per_token < kSmallWork) {
    body(int64_t{0}, num_tokens);
  } else {
    pool.parallel_for(num_tokens, body);
  }
}

// Σ a b in 32 lanes and one tree, like the products of float_ops.inc.
float dot(const float* a, const float* b, int64_t count) {
  float lanes[kLanes] = {};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lanes[lane] + a[i + lane] * b[i + lane];
  }
  for (int64_t i = whole; i < count; ++i) lanes[i - whole] = lanes[i - whole] + a[i] * b[i];
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int lane = 0; lane < step; ++lane) lanes[lane] = lanes[lane] + lanes[lane + step];
  }
  return lanes[0];
}

// In place: e^(x - largest).
void exp_below(float* x, int64_t count, float largest) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const int64_t left = count - i < kWidth ? count - i : kWidth;
    Floats v = {};
    memcpy(&v, x + i, static_cast<size_t>(left) * sizeof(float));
    v = exp_floats(v - largest);
    memcpy(x + i, &v, static_cast<size_t>(left) * sizeof(float));
  }
}

void softmax(const float* logits, int64_t count, float* scores) {
  float largest = logits[0];
  for (int64_t i = 1; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
  memcpy(scores, logits, static_cast<size_t>(count) * sizeof(float));
  exp_below(scores, count, largest);
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum = sum + scores[i];
  for (int64_t i = 0; i < count; ++i) scores[i] = scores[i] / sum;
}

void sigmoid(const float* logits, int64_t count, float* scores) {
  for (int64_t i = 0; i < count; ++i) scores[i] = -logits[i];
  exp_below(scores, count, 0.0f);
  for (int64_t i = 0; i < count; ++i) scores[i] = 1.0f / (1.0f + scores[i]);
}

// Indices of the `count` largest allowed values, largest first, the lower index first among equals. Those that compare
// with nothing (NaN) come when nothing else is left. Clears `allowed` where it chooses.
void choose(const float* values, int64_t n, int64_t count, unsigned char* allowed, int32_t* chosen) {
  for (int64_t k = 0; k < count; ++k) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; ++i) {
      if (!allowed[i]) continue;
      if (best < 0 || values[i] > values[best] || (values[best] != values[best] && values[i] == values[i])) best = i;
    }
    allowed[best] = 0;
    chosen[k] = static_cast<int32_t>(best);
  }
}

struct RouterScratch {
  std::vector<float> scores, choice, ratings;
  std::vector<unsigned char> allowed, group_allowed;
  std::vector<int32_t> groups;
};

// Bars every expert outside the best groups.
void keep_best_groups(const RouterSpec& spec, const float* choice, RouterScratch& scratch) {
  const int64_t size = spec.num_experts / spec.num_groups;
  scratch.ratings.resize(static_cast<size_t>(spec.num_groups));
  scratch.group_allowed.assign(static_cast<size_t>(spec.num_groups), 1);
  scratch.groups.resize(static_cast<size_t>(spec.top_groups));
  for (int64_t g = 0; g < spec.num_groups; ++g) {
    const float* group = choice + g * size;
    float best = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < size; ++i) {
      if (group[i] > best) {
        second = best;
        best = group[i];
      } else if (group[i] > second) {
        second = group[i];
      }
    }
    scratch.ratings[static_cast<size_t>(g)] = spec.rates_by_two ? best + second : best;
  }
  choose(scratch.ratings.data(), spec.num_groups, spec.top_groups, scratch.group_allowed.data(), scratch.groups.data());
  scratch.allowed.assign(static_cast<size_t>(spec.num_experts), 0);
  for (const int32_t g : scratch.groups) memset(scratch.allowed.data() + g * size, 1, static_cast<size_t>(size));
}

void route_token(const RouterSpec& spec, const float* logits, const float* bias, RouterScratch& scratch, int32_t* ids,
                 float* weights) {
  const int64_t n = spec.num_experts;
  scratch.scores.resize(static_cast<size_t>(n));
  float* scores = scratch.scores.data();
  if (spec.is_sigmoid) {
    sigmoid(logits, n, scores);
  } else {
    softmax(logits, n, scores);
  }
  const float* choice = scores;
  if (bias != nullptr) {
    scratch.choice.resize(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) scratch.choice[static_cast<size_t>(i)] = scores[i] + bias[i];
    choice = scratch.choice.data();
  }
  if (spec.top_groups < spec.num_groups) {
    keep_best_groups(spec, choice, scratch);
  } else {
    scratch.allowed.assign(static_cast<size_t>(n), 1);
  }
  choose(choice, n, spec.k, scratch.allowed.data(), ids);
  for (int64_t k = 0; k < spec.k; ++k) weights[k] = scores[ids[k]];
  if (spec.renormalize) {
    float sum = weights[0];
    for (int64_t k = 1; k < spec.k; ++k) sum = sum + weights[k];
    sum = sum + spec.renormalize_eps;
    for (int64_t k = 0; k < spec.k; ++k) weights[k] = weights[k] / sum;
  }
  if (spec.scale != 1.0f) {
    for (int64_t k = 0; k < spec.k; ++k) weights[k] = weights[k] * spec.scale;
  }
}

uint16_t half_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65,536 and above
  if (magnitude < 0x38800000u) {
    // Below 2^-14 halves are multiples of 2^-24; adding 0.5 puts such a multiple into the low bits of the sum.
    float absolute;
    memcpy(&absolute, &magnitude, sizeof absolute);
    const float sum = absolute + 0.5f;
    uint32_t sum_bits;
    memcpy(&sum_bits, &sum, sizeof sum_bits);
    return static_cast<uint16_t>(sign | (sum_bits - 0x3f000000u));
  }
  // Half a unit, or one less where the kept part is even; a carry runs on into the exponent, up to infinity.
  const uint32_t rounded = magnitude - (112u << 23) + 0x0fffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

}  // namespace

void rms_norm(ThreadPool& pool, const float* x, int64_t x_stride, const float* weight, float eps, int64_t num_tokens,
              int64_t cols, float* y, int64_t y_stride) {
  for_tokens(pool, num_tokens, cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* row = x + t * x_stride;
      float* out = y + t * y_stride;
      const float mean = dot(row, row, cols) / static_cast<float>(cols);
      const float factor = 1.0f / std::sqrt(mean + eps);
      for (int64_t i = 0; i < cols; ++i) out[i] = row[i] * factor * weight[i];
    }
  });
}

void rope(ThreadPool& pool, const float* x, int64_t x_token_stride, int64_t x_head_stride, const float* cos,
          const float* sin, int64_t num_tokens, int64_t num_heads, int64_t pairs, RopePairs which, float* y) {
  for_tokens(pool, num_tokens, num_heads * pairs * 2, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* c = cos + t * pairs;
      const float* s = sin + t * pairs;
      for (int64_t q = 0; q < num_heads; ++q) {
        const float* head = x + t * x_token_stride + q * x_head_stride;
        float* out = y + (t * num_heads + q) * pairs * 2;
        if (which == RopePairs::kHalves) {
          for (int64_t i = 0; i < pairs; ++i) {
            const float first = head[i], second = head[i + pairs];
            out[i] = first * c[i] - second * s[i];
            out[i + pairs] = first * s[i] + second * c[i];
          }
          continue;
        }
        for (int64_t i = 0; i < pairs; ++i) {
          const float even = head[2 * i], odd = head[2 * i + 1];
          out[2 * i] = even * c[i] - odd * s[i];
          out[2 * i + 1] = even * s[i] + odd * c[i];
        }
      }
    }
  });
}

void add_bias(ThreadPool& pool, const float* bias, int64_t num_tokens, int64_t cols, float* y) {
  for_tokens(pool, num_tokens, cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = y + t * cols;
      for (int64_t i = 0; i < cols; ++i) row[i] = row[i] + bias[i];
    }
  });
}

void gate_rows(ThreadPool& pool, const float* y, const float* x, const float* gate, int64_t num_tokens, int64_t cols,
               float* out) {
  for_tokens(pool, num_tokens, 2 * cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float logit = dot(x + t * cols, gate, cols);
      float share;
      sigmoid(&logit, 1, &share);
      for (int64_t i = t * cols; i < (t + 1) * cols; ++i) out[i] = y[i] * share;
    }
  });
}

void check_router(const RouterSpec& spec) {
  const bool fits = spec.num_experts >= 1 && spec.k >= 1 && spec.num_groups >= 1 && spec.top_groups >= 1 &&
                    spec.top_groups <= spec.num_groups && spec.num_experts % spec.num_groups == 0 &&
                    spec.k <= spec.num_experts / spec.num_groups * spec.top_groups;
  if (!fits) throw std::invalid_argument("a router whose numbers of experts and groups contradict each other");
}

void route(ThreadPool& pool, const RouterSpec& spec, const float* logits, const float* bias, int64_t num_tokens,
           int32_t* ids, float* weights) {
  check_router(spec);
  for_tokens(pool, num_tokens, spec.num_experts * (8 + spec.k), [&](int64_t begin, int64_t end) {
    thread_local RouterScratch scratch;
    for (int64_t t = begin; t < end; ++t) {
      route_token(spec, logits + t * spec.num_experts, bias, scratch, ids + t * spec.k, weights + t * spec.k);
    }
  });
}

bool add_and_check(ThreadPool& pool, const float* a, const float* b, int64_t count, float* x) {
  std::atomic<bool> is_finite{true};
  constexpr int64_t kPiece = 4096;
  const auto body = [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t first = piece * kPiece;
      const int64_t last = first + kPiece < count ? first + kPiece : count;
      // The exponent of a non-finite value is all ones.
      uint32_t largest = 0;
      for (int64_t i = first; i < last; ++i) {
        x[i] = b == nullptr ? x[i] + a[i] : x[i] + (a[i] + b[i]);
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
      }
      if (largest >= 0x7f800000u) is_finite.store(false, std::memory_order_relaxed);
    }
  };
  const int64_t num_pieces = (count + kPiece - 1) / kPiece;
  if (count < kSmallWork) {
    body(0, num_pieces);
  } else {
    pool.parallel_for(num_pieces, body);
  }
  return is_finite.load();
}

void store_halves(const float* values, int64_t count, uint16_t* halves) {
  for (int64_t i = 0; i < count; ++i) halves[i] = half_of(values[i]);
}

}  // namespace expertide
