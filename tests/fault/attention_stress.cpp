// Latent attention, router and norm under a race detector and a memory detector. Run by test_native_races.py.
//
// Odd sizes, exact-size buffers, several threads: a read or write outside a buffer, or a result shared by two threads,
// shows in the detector's report; a result that depends on chunks or threads shows here.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/attention.h"
#include "kernels/decode_ops.h"
#include "kernels/dispatch.h"

using namespace expertide;

namespace {

#define CHECK(what)                                           \
  do {                                                        \
    if (!(what)) {                                            \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, #what); \
      std::exit(1);                                           \
    }                                                         \
  } while (0)

std::mt19937 random_bits(1);

std::vector<float> normal(int64_t count) {
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = distribution(random_bits);
  return values;
}

void attend(ThreadPool& one, ThreadPool& many, int64_t heads, int64_t rank, int64_t rope_dim, int64_t past,
            int64_t tokens) {
  const AttentionWidths widths = latent_widths(rank, rope_dim);
  const int64_t keys = past + tokens, cols = rank + rope_dim;
  const std::vector<float> rows = normal(keys * cols);
  std::vector<uint16_t> halves(rows.size());
  store_halves(rows.data(), keys * cols, halves.data());
  const std::vector<float> qa = normal(tokens * heads * rank), q_rope = normal(tokens * heads * rope_dim);
  for (const bool is_half : {false, true}) {
    KeyValueRows cache = {rows.data(), rows.data() + rank, cols, cols, is_half};
    if (is_half) cache = {halves.data(), halves.data() + rank, cols, cols, is_half};
    std::vector<float> whole(qa.size()), pieces(qa.size());
    latent_mean(many, widths, heads, cache, qa.data(), q_rope.data(), tokens, past, 0.1f, whole.data());
    for (int64_t begin = 0; begin < tokens; begin += 3) {
      const int64_t count = tokens - begin < 3 ? tokens - begin : 3;
      latent_mean(one, widths, heads, cache, qa.data() + begin * heads * rank,
                  q_rope.data() + begin * heads * rope_dim, count, past + begin, 0.1f,
                  pieces.data() + begin * heads * rank);
    }
    CHECK(memcmp(whole.data(), pieces.data(), whole.size() * sizeof(float)) == 0);
  }
}

void small_ops(ThreadPool& pool) {
  const int64_t tokens = 2500;
  const std::vector<float> x = normal(tokens * 33), weight = normal(33);
  std::vector<float> y(x.size());
  rms_norm(pool, x.data(), 33, weight.data(), 1e-6f, tokens, 33, y.data(), 33);
  const std::vector<float> cos = normal(tokens * 3), sin = normal(tokens * 3);
  std::vector<float> turned(static_cast<size_t>(tokens * 5 * 6));
  rope(pool, x.data() + 3, 33, 6, cos.data(), sin.data(), tokens, 5, 3, RopePairs::kAdjacent, turned.data());
  const RouterSpec spec = {33, 4, true, 3, 2, true, true, 1e-20f, 2.5f};
  std::vector<int32_t> ids(static_cast<size_t>(tokens * 4));
  std::vector<float> weights(ids.size());
  route(pool, spec, x.data(), weight.data(), tokens, ids.data(), weights.data());
  for (const int32_t id : ids) CHECK(id >= 0 && id < 33);
  CHECK(add_and_check(pool, x.data(), y.data(), tokens * 33, y.data()));
}

}  // namespace

int main() {
  ThreadPool one(1), many(3);
  for (const char* isa : {"base", "auto"}) {
    set_isa(isa);
    for (const int64_t rank : {1, 31, 130}) {
      attend(one, many, 3, rank, 2, 0, 1);
      attend(one, many, 5, rank, 6, 60, 9);
      attend(one, many, 2, rank, 34, 3, 150);
    }
    small_ops(many);
  }
  std::puts("fine");
}
