// Reads windows of files straight to their final place, by native threads that know no Python.
//
//     submit --> queue --> I/O thread --pread(O_DIRECT)--> dest --> Residency.complete / fail
//                              |  short: resume from the last whole 4 KiB
//                              +- tail that O_DIRECT cannot take: pread(buffered)
//
// Two queues. Demand reads (somebody computes with them next) go first. Background reads (start-up fill, prefetch) begin
// only when no demand read waits, a few at a time, in short pieces between which the same thread serves demand: a demand
// read waits for pieces of background reads, never for whole ones, and every thread is there for it.
//
// Promises:
// - Every submitted read ends in exactly one complete or fail, also when the reader is closed meanwhile.
// - After the end of a read nobody writes to its destination any more; after close() no destination is written.
// - read_bytes counts what the kernel handed over, windows and repeated pages included; demand and background apart.
// - A background read ends in time whatever comes: once demand pauses it goes on, also with a limit of 1.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "residency.h"

namespace expertide {

// Offsets, lengths and addresses of direct reads are multiples of this; no disk in use asks for more.
constexpr int64_t kReadAlignment = 4096;

// One window of one expert part. `need_nbytes` <= `window_nbytes`: what the part needs, counted from the window's start.
struct WindowRead {
  int slot;
  int file_id;
  int64_t offset;  // multiple of kReadAlignment
  int64_t window_nbytes;
  int64_t need_nbytes;
  uint64_t dest;  // multiple of kReadAlignment
};

struct ExactRead {
  int file_id;
  int64_t offset;
  int64_t nbytes;
  uint64_t dest;  // any address
};

struct ReadStats {
  int64_t read_bytes = 0;
  int64_t num_reads = 0;  // calls that transferred something
  int64_t busy_ns = 0;    // time during which at least one read was queued or running
};

enum class Priority : int { kDemand = 0, kBackground = 1 };

class FileReader {
 public:
  // serial: no threads; every read happens inside the call that asks for it, one after the other.
  FileReader(int num_threads, bool serial);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  // Throws ReadFailed with the errno of open(2).
  int open(const std::string& path);
  bool is_direct(int file_id) const;

  // Queue reads whose slots are `loading` with as many pending reads. After close() each of them fails with ECANCELED.
  void submit(Residency* residency, const std::vector<WindowRead>& reads, Priority priority = Priority::kDemand);

  // Windows taken on by submit on demand so far; a submit that throws takes on none.
  int64_t num_submitted() const { return num_submitted_.load(std::memory_order_acquire); }

  // Read exactly these bytes and return when all are there. Throws the first ReadFailed, after all reads have ended.
  void read_many(const std::vector<ExactRead>& reads);

  // Most background reads that run at once, at least 1.
  void set_background_limit(int limit);

  // Block until at most `max_pending` background reads are queued or running, or the time is over; returns how many are.
  int64_t wait_background(int64_t max_pending, int64_t timeout_ms);

  // Queued background reads fail with ECANCELED; running ones finish.
  void cancel_background();

  ReadStats stats(Priority priority = Priority::kDemand) const;

  // Queued reads fail with ECANCELED, running ones finish, threads end, files close. May be called twice, also by two
  // threads at once: each returns when no read is under way any more.
  void close();

  // For tests: the next `count` kernel reads that touch the range misbehave. error > 0: they fail with that errno
  // (EINTR included); 0: they deliver only a third of their bytes and leave rubbish behind them; -1: end of file.
  void inject_fault(int file_id, int64_t offset, int64_t nbytes, int error, int count);

 private:
  struct File {
    int direct_fd = -1;
    int buffered_fd = -1;
    std::atomic<bool> is_direct{false};
  };
  struct Batch;   // a read_many in progress
  struct Window;  // a demand window whose pieces are read side by side
  struct Job {
    Residency* residency = nullptr;  // a window of a slot,
    Batch* batch = nullptr;          // or a piece of a batch
    std::shared_ptr<Window> window;  // the window that `read` is a piece of, if it was cut
    WindowRead read{};
    Priority priority = Priority::kDemand;
  };
  struct Books {  // of one priority
    std::atomic<int64_t> read_bytes{0};
    std::atomic<int64_t> num_reads{0};
    int64_t num_unfinished = 0;
    std::chrono::steady_clock::time_point busy_since;
    int64_t busy_ns = 0;
  };
  struct Fault {
    int file_id;
    int64_t offset;
    int64_t nbytes;
    int error;
    int count;
  };

  void work();
  void enqueue(const std::vector<Job>& jobs);
  void run(const Job& job);
  void add_window(std::vector<Job>* jobs, const Job& whole) const;
  static void end(const Job& job, const ReadFailure* failure);
  static void end_piece(const Job& job, const ReadFailure* failure);
  static void cancel(const std::deque<Job>& jobs);
  Books& books(Priority priority) { return books_[static_cast<int>(priority)]; }
  void begin_busy(Priority priority, int64_t num_jobs);  // mutex held
  void end_busy(Priority priority);                      // mutex held

  File& file(int file_id) const;
  bool read_window(const WindowRead& read, ReadFailure* failure);
  bool read_in_pieces(const WindowRead& read, ReadFailure* failure);
  void serve_demand();
  bool read_exact(const WindowRead& read, ReadFailure* failure);
  bool read_buffered(int file_id, int64_t offset, int64_t nbytes, uint8_t* dest, int* error, int64_t* got);
  int64_t read_once(int file_id, bool direct, int64_t offset, int64_t nbytes, uint8_t* dest);  // -errno on failure
  int64_t apply_fault(int file_id, int64_t offset, int64_t nbytes, uint8_t* dest, int64_t got);

  const bool is_serial_;
  mutable std::mutex mutex_;  // guards everything down to the threads
  std::condition_variable wake_;
  std::condition_variable idle_;  // the number of unfinished reads of one kind fell to zero
  std::condition_variable background_ended_;
  std::deque<Job> queue_;
  std::deque<Job> background_;
  int num_background_running_ = 0;
  int background_limit_ = 1;
  bool closed_ = false;
  Books books_[2];
  std::vector<std::unique_ptr<File>> files_;
  std::vector<std::thread> threads_;

  std::atomic<int64_t> num_submitted_{0};

  std::mutex fault_mutex_;
  std::vector<Fault> faults_;
  std::atomic<bool> has_faults_{false};
};

}  // namespace expertide
