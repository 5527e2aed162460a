// The kernels of every instruction set that this processor has, against the baseline's bits and against plain double
// precision, in odd shapes; then experts and attention with several threads and callers. No Python, no torch: made for the
// compiler's race and memory detectors, and for processors that are only emulated. Run by native_programs.py.
//
//     kernels_test [--short] [--threads] [ISA ...]
//
// --short: fewer shapes. --threads: only what several threads do together, which is all that a race detector can judge.
#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>

#include "kernels/attention.h"
#include "kernels/decode_ops.h"
#include "kernels/expert_mlp.h"
#include "kernels/linear.h"
#include "kernels/moe.h"
#include "samples.h"

using namespace samples;

namespace {

bool is_short = false;
bool only_threads = false;
std::vector<std::string> isas;  // tested ones; the baseline is what they are compared with

int block_size(int type) { return kernels_of(type).block_size; }

// Numbers 1 … most, or a few of them that have every remainder a vector loop can meet.
std::vector<int64_t> counts(int64_t most) {
  std::vector<int64_t> all;
  for (int64_t n = 1; n <= most; ++n) {
    if (!is_short || n <= 2 || n == most || n % 16 == 9 || n == 5) all.push_back(n);
  }
  return all;
}

// --- rows --------------------------------------------------------------------------------------------------------

void rows_decode_to_the_same_bits(int type) {
  const int64_t unit = block_size(type) == 1 ? 19 : block_size(type);
  for (const int64_t num_units : {1, 2, 5}) {
    const int64_t cols = num_units * unit;
    const Bytes packed = packed_rows(type, 3, cols, true);
    for (int64_t r = 0; r < 3; ++r) {
      const uint8_t* row = packed.data() + r * row_bytes(type, cols);
      Floats want(cols), got(cols);
      set_isa("base");
      kernels_of(type).decode_row(row, cols, want.data());
      add_to_digest(want);
      for (const std::string& isa : isas) {
        set_isa(isa);
        where() = isa + " decode, type " + std::to_string(type);
        kernels_of(type).decode_row(row, cols, got.data());
        check_same(got.data(), cols, want.data(), cols, 1, cols);
      }
    }
  }
  set_isa("base");
}

void activations_round_to_the_same_bits() {
  for (const int64_t block : {int64_t{32}, int64_t{256}}) {
    for (const int64_t num_blocks : counts(9)) {
      const int64_t cols = block * num_blocks, nbytes = quantized_layout(block, cols).nbytes;
      Floats x = normal(cols);
      x[cols - 1] = num_blocks % 3 == 0 ? INFINITY : num_blocks % 3 == 1 ? -1e-38f : 3.0f;
      const auto rounded = [&] {
        Bytes out(static_cast<size_t>(nbytes));
        std::memset(out.data(), 0, static_cast<size_t>(nbytes));  // what lies behind the last sum is not prescribed
        active_isa().quantize(x.data(), block, cols, out.data());
        return out;
      };
      set_isa("base");
      const Bytes want = rounded();
      for (const std::string& isa : isas) {
        set_isa(isa);
        where() = isa + " activations";
        CHECK(std::memcmp(rounded().data(), want.data(), static_cast<size_t>(nbytes)) == 0);
      }
    }
  }
  for (const int64_t count : counts(67)) {
    const Floats gate = normal(count, 30.0f), up = normal(count);
    gate[0] = count % 2 == 0 ? -INFINITY : NAN;
    Floats want(count), got(count);
    set_isa("base");
    active_isa().silu_mul(gate.data(), up.data(), count, want.data());
    add_to_digest(want);
    for (const std::string& isa : isas) {
      set_isa(isa);
      where() = isa + " silu_mul";
      active_isa().silu_mul(gate.data(), up.data(), count, got.data());
      check_same(got.data(), count, want.data(), count, 1, count);
    }
  }
}

// --- products ----------------------------------------------------------------------------------------------------

// How far a product may lie from the double-precision one of decoded weights and unrounded activations. Activations are
// rounded to half a step of largest / 127, and with 16 bits what is left over once more: each value is off by at most
// largest / 254, or largest / 254^2, and 1 % for the roundings of scales. The float steps round each lane's partial sums
// num_blocks / 8 + 8 times; with minimums or an offset a block's parts may be larger than what they add up to, but not than
// four times its largest weight. Float types: 32 lanes, cols / 32 + 6 roundings.
double product_bound(int type, const float* w, const float* x, int64_t cols, int bits) {
  const int64_t block = block_size(type);
  if (block == 1) {
    double magnitude = 0;
    for (int64_t i = 0; i < cols; ++i) magnitude += std::abs(static_cast<double>(w[i]) * x[i]);
    return magnitude * static_cast<double>(cols / 32 + 6) * 0x1p-24 + 1e-30;
  }
  double rounding = 0, magnitude = 0;
  for (int64_t b = 0; b < cols; b += block) {
    double largest_x = 0;
    for (int64_t i = b; i < b + block; ++i) largest_x = std::max(largest_x, std::abs(static_cast<double>(x[i])));
    for (int64_t run = b; run < b + block; run += 32) {
      double largest_w = 0, sum_x = 0;
      for (int64_t i = run; i < run + 32; ++i) {
        largest_w = std::max(largest_w, std::abs(static_cast<double>(w[i])));
        sum_x += std::abs(static_cast<double>(x[i]));
        rounding += std::abs(static_cast<double>(w[i])) * largest_x;
      }
      magnitude += 4 * largest_w * sum_x;
    }
  }
  const double step = bits == 16 ? 1.0 / 254 / 254 : 1.0 / 254;
  return 1.01 * step * rounding + static_cast<double>(cols / block / 8 + 8) * 0x1p-24 * magnitude;
}

void products_are_right(ThreadPool& pool, int type, int64_t cols, int64_t most_rows, int64_t most_tokens, int bits) {
  set_activation_bits(bits);
  set_isa("base");
  const Bytes packed = packed_rows(type, most_rows, cols);
  const Floats x = normal(most_tokens * cols);
  const int64_t stride = row_bytes(type, cols);
  Floats want(most_tokens * most_rows);
  linear(pool, {packed.data(), most_rows, cols, type}, x.data(), most_tokens, want.data());
  add_to_digest(want);
  Floats decoded(cols);
  for (int64_t r = 0; r < most_rows; ++r) {
    kernels_of(type).decode_row(packed.data() + r * stride, cols, decoded.data());
    for (int64_t t = 0; t < most_tokens; ++t) {
      double truth = 0;
      for (int64_t i = 0; i < cols; ++i) truth += static_cast<double>(decoded[i]) * x[t * cols + i];
      where() = "base product, type " + std::to_string(type) + ", " + std::to_string(cols) + " columns";
      check_close(want[t * most_rows + r], truth, product_bound(type, decoded.data(), x.data() + t * cols, cols, bits));
    }
  }
  // A value depends on its row and its token only, so every smaller product is a piece of the largest one.
  const auto check_piece = [&](const std::string& isa, int64_t rows, int64_t tokens) {
    set_isa(isa);
    where() = isa + " product, type " + std::to_string(type) + ", " + std::to_string(rows) + " rows, " +
              std::to_string(cols) + " columns, " + std::to_string(tokens) + " tokens";
    const int64_t first_row = most_rows - rows, first_token = most_tokens - tokens;
    const Bytes piece(static_cast<size_t>(rows * stride), type == kF32 ? 0 : 2);
    std::memcpy(piece.data(), packed.data() + first_row * stride, static_cast<size_t>(rows * stride));
    const Floats own_x(tokens * cols), y(tokens * rows);
    std::memcpy(own_x.data(), x.data() + first_token * cols, static_cast<size_t>(tokens * cols * 4));
    linear(pool, {piece.data(), rows, cols, type}, own_x.data(), tokens, y.data());
    check_same(y.data(), rows, want.data() + first_token * most_rows + first_row, most_rows, tokens, rows);
  };
  for (const std::string& isa : isas) {
    for (const int64_t rows : counts(most_rows)) check_piece(isa, rows, rows % 2 == 0 ? 1 : std::min<int64_t>(most_tokens, 6));
    for (const int64_t tokens : counts(most_tokens)) check_piece(isa, std::min<int64_t>(most_rows, 19), tokens);
  }
  set_isa("base");
}

void wild_products_have_the_same_bits(ThreadPool& pool, int type, int64_t cols) {
  set_isa("base");
  const Bytes packed = packed_rows(type, 18, cols, true);
  const Floats x = normal(7 * cols);
  for (const int64_t tokens : {1, 3, 7}) {
    const Floats want(tokens * 18), got(tokens * 18);
    set_isa("base");
    linear(pool, {packed.data(), 18, cols, type}, x.data(), tokens, want.data());
    add_to_digest(want);
    for (const std::string& isa : isas) {
      set_isa(isa);
      where() = isa + " product of random bits, type " + std::to_string(type);
      linear(pool, {packed.data(), 18, cols, type}, x.data(), tokens, got.data());
      check_same(got.data(), 18, want.data(), 18, tokens, 18);
    }
  }
  set_isa("base");
}

// Products with the transpose: rows are decoded and added in their order, so each sum is off by at most a rounding of what
// it holds after each row: rows * 2^-24 of the sum of magnitudes.
void transposed_products_are_right(ThreadPool& pool, int type, int64_t rows, int64_t cols) {
  constexpr int64_t kHeads = 2;
  const int64_t stride = rows * row_bytes(type, cols);
  const Bytes packed = packed_rows(type, kHeads * rows, cols);
  for (const int64_t tokens : {1, 3, 4, 9}) {
    const Floats x = normal(tokens * kHeads * rows), want(tokens * kHeads * cols), got(tokens * kHeads * cols);
    set_isa("base");
    const Matrix first_head = {packed.data(), rows, cols, type};
    transposed_head_linear(pool, first_head, kHeads, stride, x.data(), tokens, want.data());
    add_to_digest(want);
    where() = "base transposed product, type " + std::to_string(type) + ", " + std::to_string(cols) + " columns";
    Floats decoded(rows * cols);
    for (int64_t q = 0; q < kHeads; ++q) {
      for (int64_t r = 0; r < rows; ++r) {
        kernels_of(type).decode_row(packed.data() + q * stride + r * row_bytes(type, cols), cols, decoded.data() + r * cols);
      }
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t c = 0; c < cols; ++c) {
          double truth = 0, magnitude = 0;
          for (int64_t r = 0; r < rows; ++r) {
            const double product = static_cast<double>(x[(t * kHeads + q) * rows + r]) * decoded[r * cols + c];
            truth += product;
            magnitude += std::abs(product);
          }
          check_close(want[(t * kHeads + q) * cols + c], truth, magnitude * static_cast<double>(rows + 1) * 0x1p-24);
        }
      }
    }
    for (const std::string& isa : isas) {
      set_isa(isa);
      where() = isa + " transposed product, type " + std::to_string(type) + ", " + std::to_string(cols) + " columns";
      transposed_head_linear(pool, first_head, kHeads, stride, x.data(), tokens, got.data());
      check_same(got.data(), kHeads * cols, want.data(), kHeads * cols, tokens, kHeads * cols);
    }
  }
  set_isa("base");
}

// --- experts -----------------------------------------------------------------------------------------------------

struct Expert {
  Bytes gate, up, down;
};

struct Shape {
  int64_t hidden, inner;
  int gate, up, down;
};

Expert random_expert(const Shape& s) {
  return {packed_rows(s.gate, s.inner, s.hidden), packed_rows(s.up, s.inner, s.hidden),
          packed_rows(s.down, s.hidden, s.inner)};
}

void compute_expert(ThreadPool& pool, const Shape& s, const Expert& expert, const float* x, int64_t n, float* y) {
  expert_mlp(pool, {expert.gate.data(), s.inner, s.hidden, s.gate}, {expert.up.data(), s.inner, s.hidden, s.up},
             {expert.down.data(), s.hidden, s.inner, s.down}, x, n, y);
}

// The layer's result the plain way: one token and one expert at a time, on one thread.
Floats layer_by_hand(const Shape& s, const std::vector<Expert>& experts, const Floats& x, const std::vector<int32_t>& ids,
                     const Floats& weights, int64_t tokens, int64_t k) {
  ThreadPool alone(1);
  Floats results(tokens * k * s.hidden), y(tokens * s.hidden);
  for (int64_t i = 0; i < tokens * k; ++i) {
    compute_expert(alone, s, experts[static_cast<size_t>(ids[static_cast<size_t>(i)])], x.data() + i / k * s.hidden, 1,
                   results.data() + i * s.hidden);
  }
  moe_sum(alone, results.data(), weights.data(), tokens, k, s.hidden, y.data());
  return y;
}

constexpr int kExperts = 9;

enum class Choice { kRandom, kAllOnOne, kFew };

std::vector<int32_t> choose(Choice choice, int64_t tokens, int64_t k) {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < k; ++i) {
      const int32_t one = static_cast<int32_t>(random_bits()() % kExperts);
      // Distinct experts of a token, as a router gives them; experts without a token otherwise.
      ids.push_back(choice == Choice::kAllOnOne ? 4
                    : choice == Choice::kFew    ? static_cast<int32_t>(i * 3)
                    : i == 0                    ? one
                                                : (ids.back() + 1) % kExperts);
    }
  }
  return ids;
}

// Several callers, each with a layer of its own on one table and one pool; a loader completes the misses of each step a
// little later, and takes the slots away afterwards.
void layer_steps_agree(ThreadPool& pool, const Shape& s) {
  set_isa("base");
  constexpr int kCallers = 3;
  std::vector<Expert> experts;
  for (int e = 0; e < kExperts; ++e) experts.push_back(random_expert(s));
  struct Step {
    int64_t tokens, k;
    std::vector<int32_t> ids;
    Floats x, weights, want;
  };
  std::vector<Step> steps;
  for (const int64_t tokens : is_short ? std::vector<int64_t>{1, 9} : std::vector<int64_t>{1, 2, 7, 19, 67}) {
    for (const Choice choice : {Choice::kRandom, Choice::kAllOnOne, Choice::kFew}) {
      const int64_t k = choice == Choice::kAllOnOne ? 1 : 3;
      std::vector<int32_t> ids = choose(choice, tokens, k);
      Floats x = normal(tokens * s.hidden), weights = normal(tokens * k);
      Floats want = layer_by_hand(s, experts, x, ids, weights, tokens, k);
      add_to_digest(want);
      steps.push_back({tokens, k, std::move(ids), std::move(x), std::move(weights), std::move(want)});
    }
  }
  std::shared_ptr<Residency> residency;
  const auto call = [&](int layer) {
    MoeLayer moe(residency, layer, s.hidden, s.inner, {0, 0, s.gate}, {1, 0, s.up}, {2, 0, s.down});
    for (size_t i = 0; i < steps.size(); ++i) {
      const Step& step = steps[(i + static_cast<size_t>(layer) * 2) % steps.size()];
      const Floats y(step.tokens * s.hidden);
      const std::vector<int32_t> misses = moe.run(pool, step.x.data(), step.ids.data(), step.weights.data(), step.tokens,
                                                  step.k, y.data(), i % 4 == 3);
      std::vector<int> slots;
      for (const int32_t expert : misses) {
        const Expert& parts = experts[static_cast<size_t>(expert)];
        const uint64_t places[3] = {reinterpret_cast<uintptr_t>(parts.gate.data()),
                                    reinterpret_cast<uintptr_t>(parts.up.data()),
                                    reinterpret_cast<uintptr_t>(parts.down.data())};
        slots.push_back(layer * kExperts + expert);
        residency->reserve(slots.back(), layer, expert, places, 1, false);
      }
      std::thread loader([&] {
        for (const int slot : slots) {
          std::this_thread::yield();
          residency->complete(slot);
        }
      });
      if (!misses.empty() || moe.is_pending()) moe.finish(pool, misses, true);
      loader.join();
      check_same(y.data(), s.hidden, step.want.data(), s.hidden, step.tokens, s.hidden);
      for (const int slot : slots) {
        if (slot % 2 == 0) CHECK(residency->evict(slot));
      }
    }
  };
  for (const std::string& isa : isas) {
    set_isa(isa);
    where() = isa + " layer step, types " + std::to_string(s.gate) + ", " + std::to_string(s.down);
    residency = std::make_shared<Residency>(kCallers, kExperts, 3, kCallers * kExperts);
    std::vector<std::thread> callers;
    for (int layer = 0; layer < kCallers; ++layer) callers.emplace_back(call, layer);
    for (std::thread& caller : callers) caller.join();
    CHECK(residency->total_leases() == 0);
  }
  set_isa("base");
}

// Two threads with pools of their own, and two on one pool: scratch belongs to its thread.
void experts_have_the_same_bits(ThreadPool& pool, const Shape& s) {
  set_isa("base");
  const Expert expert = random_expert(s);
  for (const int64_t n : is_short ? std::vector<int64_t>{9} : std::vector<int64_t>{1, 2, 3, 5, 17, 67}) {
    const Floats x = normal(n * s.hidden), want(n * s.hidden);
    set_isa("base");
    compute_expert(pool, s, expert, x.data(), n, want.data());
    for (const std::string& isa : isas) {
      set_isa(isa);
      where() = isa + " expert, types " + std::to_string(s.gate) + ", " + std::to_string(s.up) + ", " + std::to_string(s.down);
      std::vector<std::thread> callers;
      for (int i = 0; i < 3; ++i) {
        callers.emplace_back([&, i] {
          ThreadPool own(2);
          const Floats y(n * s.hidden);
          compute_expert(i == 0 ? own : pool, s, expert, x.data(), n, y.data());
          check_same(y.data(), s.hidden, want.data(), s.hidden, n, s.hidden);
        });
      }
      for (std::thread& caller : callers) caller.join();
    }
  }
  set_isa("base");
}

// --- attention ---------------------------------------------------------------------------------------------------

// Softmax over latents in double precision. Keys and queries are rounded to 1/8,190 of a block's largest value, weights to
// 1/65,534: with scores of a few units the shares move by under 1 %, and so does the mean of values of about 1.
void check_mean(const Floats& rows, int64_t rank, int64_t rope_dim, const float* qa, const float* q_rope, int64_t keys,
                double scale, const float* got) {
  const int64_t cols = rank + rope_dim;
  std::vector<double> shares(static_cast<size_t>(keys)), mean(static_cast<size_t>(rank));
  double highest = -INFINITY, total = 0;
  for (int64_t s = 0; s < keys; ++s) {
    double score = 0;
    for (int64_t i = 0; i < rank; ++i) score += static_cast<double>(qa[i]) * rows[s * cols + i];
    for (int64_t i = 0; i < rope_dim; ++i) score += static_cast<double>(q_rope[i]) * rows[s * cols + rank + i];
    shares[static_cast<size_t>(s)] = score * scale;
    highest = std::max(highest, score * scale);
  }
  for (double& share : shares) total += share = std::exp(share - highest);
  for (int64_t s = 0; s < keys; ++s) {
    for (int64_t i = 0; i < rank; ++i) {
      mean[static_cast<size_t>(i)] += shares[static_cast<size_t>(s)] / total * rows[s * cols + i];
    }
  }
  for (int64_t i = 0; i < rank; ++i) check_close(got[i], mean[static_cast<size_t>(i)], 0.02);
}

void attention_is_right(ThreadPool& pool, int64_t heads, int64_t rank, int64_t rope_dim, int64_t past, int64_t tokens) {
  const AttentionWidths widths = latent_widths(rank, rope_dim);
  const int64_t keys = past + tokens, cols = rank + rope_dim;
  const Floats rows = normal(keys * cols), qa = normal(tokens * heads * rank), q_rope = normal(tokens * heads * rope_dim);
  const float scale = 1.0f / std::sqrt(static_cast<float>(cols));
  const Bytes halves(static_cast<size_t>(keys * cols * 2));
  store_halves(rows.data(), keys * cols, reinterpret_cast<uint16_t*>(halves.data()));
  for (const bool is_half : {false, true}) {
    const auto mean = [&] {
      Floats out(tokens * heads * rank);
      const uint8_t* base = is_half ? halves.data() : reinterpret_cast<const uint8_t*>(rows.data());
      const KeyValueRows cache = {base, base + rank * (is_half ? 2 : 4), cols, cols, is_half};
      latent_mean(pool, widths, heads, cache, qa.data(), q_rope.data(), tokens, past, scale, out.data());
      return out;
    };
    set_isa("base");
    where() = "base attention, rank " + std::to_string(rank) + ", " + std::to_string(keys) + " keys";
    const Floats want = mean();
    add_to_digest(want);
    for (int64_t row = 0; row < tokens * heads; row += is_short ? 7 : 1) {
      check_mean(rows, rank, rope_dim, qa.data() + row * rank, q_rope.data() + row * rope_dim, past + row / heads + 1, scale,
                 want.data() + row * rank);
    }
    for (const std::string& isa : isas) {
      set_isa(isa);
      where() = isa + " attention, rank " + std::to_string(rank) + ", " + std::to_string(keys) + " keys";
      check_same(mean().data(), rank, want.data(), rank, tokens * heads, rank);
    }
  }
  set_isa("base");
}

// The whole of it, unfolding matrices packed, from two callers at once.
void unfolded_attention_has_the_same_bits(ThreadPool& pool, int type, bool is_transposed) {
  const AttentionShape shape = {3, 64, 6, 33, 256};
  const int64_t tokens = 5, past = 70, cols = shape.rank + shape.rope_dim;
  const Bytes k_b = packed_rows(kQ8_0, shape.num_heads * shape.rank, shape.nope_dim);
  const Bytes v_b = packed_rows(type, shape.num_heads * shape.value_dim, shape.rank);
  const int64_t k_b_rows = is_transposed ? shape.nope_dim : shape.rank;
  const UnfoldingMatrices unfold = {{k_b.data(), k_b_rows, is_transposed ? shape.rank : shape.nope_dim, kQ8_0},
                                    shape.rank * row_bytes(kQ8_0, shape.nope_dim),
                                    is_transposed,
                                    {v_b.data(), shape.value_dim, shape.rank, type},
                                    shape.value_dim * row_bytes(type, shape.rank)};
  const Floats rows = normal((past + tokens) * cols), q_nope = normal(tokens * shape.num_heads * shape.nope_dim, 0.2f),
               q_rope = normal(tokens * shape.num_heads * shape.rope_dim);
  const int64_t count = tokens * shape.num_heads * shape.value_dim;
  const auto attend = [&](const Floats& out) {
    mla_attention(pool, shape, unfold, {rows.data(), rows.data() + shape.rank, cols, cols, false}, q_nope.data(),
                  q_rope.data(), tokens, past, 0.1f, out.data());
  };
  const Floats want(count);
  attend(want);
  add_to_digest(want);
  for (const std::string& isa : isas) {
    set_isa(isa);
    where() = isa + " unfolded attention, type " + std::to_string(type);
    std::vector<std::thread> callers;
    for (int i = 0; i < 2; ++i) {
      callers.emplace_back([&] {
        const Floats out(count);
        attend(out);
        check_same(out.data(), count, want.data(), count, 1, count);
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
  set_isa("base");
}

void test_products(ThreadPool& pool) {
  for (const int type : kTypes) {
    rows_decode_to_the_same_bits(type);
    const int64_t unit = block_size(type);
    for (const int bits : {16, 8}) {
      if (bits == 8 && (is_short || unit == 1)) continue;
      // A width for every remainder of eight lanes, two rounds of them included.
      for (const int64_t blocks :
           is_short ? std::vector<int64_t>{1, 11} : std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 17}) {
        products_are_right(pool, type, unit == 1 ? blocks * 31 : blocks * unit, 3, 3, bits);
      }
      const int64_t cols = unit == 1 ? 101 : unit == 32 ? 10 * 32 : 3 * 256;
      products_are_right(pool, type, cols, is_short ? 19 : 67, is_short ? 18 : 67, bits);
    }
    set_activation_bits(16);
    transposed_products_are_right(pool, type, 19, unit == 1 ? 301 : 256 + unit);
    transposed_products_are_right(pool, type, 1, unit == 1 ? 5 : unit);
    wild_products_have_the_same_bits(pool, type, unit == 1 ? 77 : 9 * unit);
  }
  activations_round_to_the_same_bits();
}

void test_experts(ThreadPool& pool) {
  const std::vector<Shape> shapes = {{256, 352 + 32, kQ4_K, kQ4_K, kQ5_0}, {512, 256, kQ2_K, kQ8_0, kQ3_K},
                                     {96, 64, kMXFP4, kMXFP4, kMXFP4},     {256, 33, kIQ4_XS, kQ6_K, kF32},
                                     {64, 768, kQ4_1, kF16, kQ5_K},        {32, 96, kIQ4_NL, kQ5_1, kQ4_0}};
  for (const Shape& shape : shapes) {
    if (is_short && shape.hidden * shape.inner > 256 * 64) continue;
    experts_have_the_same_bits(pool, shape);
    layer_steps_agree(pool, shape);
  }
}

void test_attention(ThreadPool& pool) {
  for (const int64_t rank : is_short ? std::vector<int64_t>{31, 130} : std::vector<int64_t>{1, 16, 31, 32, 127, 130, 256}) {
    attention_is_right(pool, 3, rank, 2, 0, 1);
    attention_is_right(pool, 5, rank, 6, 60, 9);
    attention_is_right(pool, 2, rank, 34, 3, is_short ? 70 : 150);
  }
  for (const int type : {kF32, kQ4_K, kQ8_0}) unfolded_attention_has_the_same_bits(pool, type, type == kQ4_K);
}

}  // namespace

int main(int argc, char** argv) try {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--short") {
      is_short = true;
    } else if (word == "--threads") {
      only_threads = true;
    } else {
      isas.push_back(word);
    }
  }
  if (isas.empty()) isas = available_isas();
  for (const std::string& isa : isas) set_isa(isa);  // refused here, if at all
  ThreadPool pool(3);
  if (!only_threads) test_products(pool);
  test_experts(pool);
  test_attention(pool);
  std::string names;
  for (const std::string& isa : isas) names += " " + isa;
  // The digest is that of the baseline's results: the same on every processor.
  std::printf("fine:%s, digest %016llx\n", names.c_str(), static_cast<unsigned long long>(digest()));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
