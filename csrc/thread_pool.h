// Persistent workers for one data-parallel loop at a time. The calling thread takes part.
//
// Promises: every index of [0, n) is handed out exactly once; everything the body wrote is visible to the caller when
// parallel_for returns; no allocation inside the loop. Which thread runs which range is not promised, so a body must
// write each result to its own place.
//
//     indices   [ caller: -> -> ->       | worker 1: -> ->     <- | worker 2: -> -> ->        ]
//
// Each thread walks its own stretch of the indices from the front, so that what a body has asked for ahead (the next rows
// of a matrix) is what the same thread computes next; one that is done takes from the back of the others' stretches.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace expertide {

class ThreadPool {
 public:
  // num_threads counts the calling thread: 1 means that no worker is started.
  // cpus: worker i (from 1) stays on CPU cpus[i]; the caller goes where the system puts it, best on cpus[0], which is left
  // free for it. Empty: nobody is bound. A CPU that is refused, or a system that cannot bind, leaves its worker free.
  explicit ThreadPool(int num_threads, const std::vector<int>& cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Call body(begin, end) on ranges of at most `grain` indices that cover [0, n), and return when all are done.
  // The body must not throw and must not call parallel_for on the same pool. Two threads may call at once: the second
  // waits for the first. After close() the caller does all of the work.
  template <class Body>
  void parallel_for(int64_t n, int64_t grain, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(n, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<Plain*>(context))(begin, end); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

  // The same with a grain that gives each thread about four ranges.
  template <class Body>
  void parallel_for(int64_t n, Body&& body) {
    const int64_t ranges = int64_t{4} * num_threads_;
    parallel_for(n, (n + ranges - 1) / ranges, static_cast<Body&&>(body));
  }

  // End the workers. Waits for a loop in progress; may be called twice.
  void close();

 private:
  using Function = void (*)(void* context, int64_t begin, int64_t end);

  void run(int64_t n, int64_t grain, Function function, void* context);
  void work(int self, int cpu);  // a worker's life, on this CPU unless it is -1
  void take_ranges(int self);
  bool take_front(int self, int64_t* chunk);
  bool take_back(int self, int64_t* chunk);
  void call(int64_t chunk) { function_(context_, chunk * grain_, std::min(n_, (chunk + 1) * grain_)); }

  const int num_threads_;
  std::mutex callers_;  // held for the whole of a loop: one loop at a time

  // What is left of one thread's stretch, in chunks of grain_ indices: first chunk in the low half, end in the high half.
  // A cache line each: everybody writes his own all the time.
  struct alignas(64) Stretch {
    std::atomic<uint64_t> left{0};
  };

  std::mutex mutex_;  // guards everything below except stretches_; generation_ and active_ may be read without it
  std::condition_variable wake_;
  std::condition_variable done_;

  // The loop in progress. A worker may enter it only while it is open, and is counted in active_ until it has left:
  // one that wakes late finds the loop shut and never touches a body that is gone.
  bool open_ = false;
  std::atomic<int> active_{0};
  std::atomic<uint64_t> generation_{0};
  Function function_ = nullptr;
  void* context_ = nullptr;
  int64_t n_ = 0;
  int64_t grain_ = 1;
  std::vector<Stretch> stretches_;

  int sleepers_ = 0;
  bool closed_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace expertide
