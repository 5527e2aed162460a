#include "thread_pool.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace expertide {
namespace {

// Up to 300 microseconds, by the processor (a pause of Skylake and later takes 40 ns): longer than the interpreter's part between
// two layers, shorter than what a busy machine would miss. A sleeping worker costs 30-60 microseconds to wake.
constexpr int kSpins = 6000;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void stay_on(int cpu) {
#if defined(__linux__)
  if (cpu < 0 || cpu >= CPU_SETSIZE) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
  (void)cpu;
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, const std::vector<int>& cpus)
    : num_threads_(num_threads), stretches_(static_cast<size_t>(std::clamp(num_threads, 1, 1024))) {
  if (num_threads < 1 || num_threads > 1024) throw std::invalid_argument("a thread pool has 1 to 1024 threads");
  if (!cpus.empty() && static_cast<int>(cpus.size()) < num_threads) {
    throw std::invalid_argument("a bound thread pool needs a CPU per thread");
  }
  try {
    for (int i = 1; i < num_threads; ++i) {
      const int cpu = cpus.empty() ? -1 : cpus[static_cast<size_t>(i)];
      workers_.emplace_back([this, i, cpu] { work(i, cpu); });
    }
  } catch (...) {
    close();  // the system has no more threads: do not leave the started ones behind
    throw;
  }
}

ThreadPool::~ThreadPool() { close(); }

void ThreadPool::close() {
  std::lock_guard<std::mutex> caller(callers_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void ThreadPool::run(int64_t n, int64_t grain, Function function, void* context) {
  if (n <= 0) return;
  // Chunk numbers have 32 bits.
  grain = std::max<int64_t>({grain, 1, n / std::numeric_limits<int32_t>::max() + 1});
  std::lock_guard<std::mutex> caller(callers_);
  if (workers_.empty() || n <= grain) {
    for (int64_t begin = 0; begin < n; begin += grain) function(context, begin, std::min(begin + grain, n));
    return;
  }
  bool has_sleepers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    function_ = function;
    context_ = context;
    n_ = n;
    grain_ = grain;
    const auto chunks = static_cast<uint64_t>((n + grain - 1) / grain);
    const auto threads = static_cast<uint64_t>(num_threads_);
    for (uint64_t i = 0; i < threads; ++i) {
      stretches_[i].left.store(chunks * i / threads | chunks * (i + 1) / threads << 32, std::memory_order_relaxed);
    }
    open_ = true;
    generation_.fetch_add(1, std::memory_order_release);
    has_sleepers = sleepers_ > 0;
  }
  if (has_sleepers) wake_.notify_all();
  take_ranges(0);

  std::unique_lock<std::mutex> lock(mutex_);
  open_ = false;
  if (active_.load(std::memory_order_relaxed) == 0) return;
  lock.unlock();
  for (int i = 0; i < kSpins && active_.load(std::memory_order_acquire) != 0; ++i) relax();
  lock.lock();
  done_.wait(lock, [this] { return active_.load(std::memory_order_relaxed) == 0; });
}

void ThreadPool::take_ranges(int self) {
  int64_t chunk = 0;
  while (take_front(self, &chunk) || take_back(self, &chunk)) call(chunk);
}

bool ThreadPool::take_front(int self, int64_t* chunk) {
  std::atomic<uint64_t>& left = stretches_[static_cast<size_t>(self)].left;
  uint64_t now = left.load(std::memory_order_relaxed);
  while (static_cast<uint32_t>(now) < now >> 32) {
    if (left.compare_exchange_weak(now, now + 1, std::memory_order_relaxed)) {
      *chunk = static_cast<uint32_t>(now);
      return true;
    }
  }
  return false;
}

bool ThreadPool::take_back(int self, int64_t* chunk) {
  for (int i = 1; i < num_threads_; ++i) {
    std::atomic<uint64_t>& left = stretches_[static_cast<size_t>((self + i) % num_threads_)].left;
    uint64_t now = left.load(std::memory_order_relaxed);
    while (static_cast<uint32_t>(now) < now >> 32) {
      if (left.compare_exchange_weak(now, now - (uint64_t{1} << 32), std::memory_order_relaxed)) {
        *chunk = static_cast<int64_t>(now >> 32) - 1;
        return true;
      }
    }
  }
  return false;
}

void ThreadPool::work(int self, int cpu) {
  stay_on(cpu);
  uint64_t seen = 0;
  for (;;) {
    for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i) relax();
    std::unique_lock<std::mutex> lock(mutex_);
    if (generation_.load(std::memory_order_relaxed) == seen) {
      ++sleepers_;
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
      --sleepers_;
    }
    seen = generation_.load(std::memory_order_relaxed);
    if (closed_) return;
    if (!open_) continue;
    active_.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    take_ranges(self);
    lock.lock();
    if (active_.fetch_sub(1, std::memory_order_release) == 1) done_.notify_one();
  }
}

}  // namespace expertide
