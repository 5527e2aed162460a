#include "memory_rate.h"

#include <atomic>

namespace expertide {

uint64_t xor_words(ThreadPool& pool, const uint64_t* words, int64_t num_words) {
  // 1 MiB a range: long streams for the prefetcher, and a thread that starts late takes fewer of them.
  constexpr int64_t kGrain = int64_t{1} << 17;
  // One accumulator would make every load wait for the one before it; with these the loop is bound by memory.
  constexpr int kLanes = 32;
  std::atomic<uint64_t> all{0};
  auto body = [&](int64_t begin, int64_t end) {
    uint64_t lanes[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] ^= words[i + lane];
    }
    uint64_t sum = 0;
    for (; i < end; ++i) sum ^= words[i];
    for (const uint64_t lane : lanes) sum ^= lane;
    all.fetch_xor(sum, std::memory_order_relaxed);
  };
  pool.parallel_for(num_words, kGrain, body);
  return all.load(std::memory_order_relaxed);
}

}  // namespace expertide
