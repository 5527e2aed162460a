#include "file_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace expertide {
namespace {

// A resident tensor of hundreds of MB is cut into pieces, so that all I/O threads take part.
constexpr int64_t kPieceBytes = int64_t{4} << 20;
// Through this much aligned memory per call go direct reads whose destination is not aligned like the file.
constexpr int64_t kBounceBytes = int64_t{1} << 20;
// Between two of these a background read lets demand go first: 8 threads in the middle of one are 4 MiB, 2-8 ms of disk.
constexpr int64_t kBackgroundPieceBytes = int64_t{512} << 10;
// Windows of demand are cut into these, side by side over the I/O threads: one missing expert is three windows, of which the
// longest alone would have the disk to itself at the end. 4.5 -> 4.0 ms for one of 6.3 MB, 13.0 -> 11.8 ms for three.
constexpr int64_t kDemandPieceBytes = int64_t{512} << 10;
// Below this a direct read costs more than a page of cache.
constexpr int64_t kSmallBytes = int64_t{64} << 10;

int64_t round_down(int64_t value) { return value & ~(kReadAlignment - 1); }
int64_t round_up(int64_t value) { return round_down(value + kReadAlignment - 1); }

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

// Whether the file system wants more than kReadAlignment. Kernels before 6.1 do not say: then 4 KiB it is.
bool is_alignment_enough(int fd) {
#if defined(STATX_DIOALIGN)
  struct statx info;
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN)) {
    return info.stx_dio_offset_align != 0 && info.stx_dio_offset_align <= kReadAlignment &&
           info.stx_dio_mem_align <= kReadAlignment;
  }
#else
  (void)fd;
#endif
  return true;
}

}  // namespace

struct FileReader::Batch {
  std::mutex mutex;
  std::condition_variable done;
  int64_t pending = 0;
  bool has_failure = false;
  ReadFailure failure;
};

// The slot hears of it when the last piece has ended, well or not: until then somebody writes into it.
struct FileReader::Window {
  explicit Window(const WindowRead& whole, int64_t num_pieces) : read(whole), pending(num_pieces) {}
  const WindowRead read;
  std::mutex mutex;
  int64_t pending;
  bool has_failure = false;
  ReadFailure failure;  // of the whole window: where its first bad piece stopped
};

namespace {

WindowRead piece_of(const WindowRead& whole, int64_t at, int64_t nbytes) {
  WindowRead piece = whole;
  piece.offset += at;
  piece.dest += static_cast<uint64_t>(at);
  piece.window_nbytes = std::min(whole.window_nbytes - at, nbytes);
  piece.need_nbytes = std::min(whole.need_nbytes - at, nbytes);
  return piece;
}

ReadFailure failure_of_whole(const WindowRead& whole, int64_t at, const ReadFailure& piece) {
  return {piece.error, whole.file_id, whole.offset, whole.need_nbytes, at + piece.got};
}

}  // namespace

// Whose bytes the reads of this thread count as.
static thread_local Priority current_priority = Priority::kDemand;

FileReader::FileReader(int num_threads, bool serial) : is_serial_(serial) {
  if (num_threads < 1 || num_threads > 256) throw std::invalid_argument("a reader has 1 to 256 threads");
  background_limit_ = num_threads;
  if (serial) return;
  try {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
  } catch (...) {
    close();
    throw;
  }
}

FileReader::~FileReader() { close(); }

int FileReader::open(const std::string& path) {
  auto opened = std::make_unique<File>();
  do {
    opened->buffered_fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  } while (opened->buffered_fd < 0 && errno == EINTR);
  if (opened->buffered_fd < 0) {
    ReadFailure failure;
    failure.error = errno;
    throw ReadFailed(failure);
  }
#if defined(O_DIRECT)
  opened->direct_fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (opened->direct_fd >= 0 && is_alignment_enough(opened->direct_fd)) {
    opened->is_direct = true;
    // The buffered descriptor then serves tails only: reading ahead would fetch bytes nobody asked for.
    posix_fadvise(opened->buffered_fd, 0, 0, POSIX_FADV_RANDOM);
  }
#endif
  std::lock_guard<std::mutex> lock(mutex_);
  files_.push_back(std::move(opened));
  return static_cast<int>(files_.size()) - 1;
}

FileReader::File& FileReader::file(int file_id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (file_id < 0 || file_id >= static_cast<int>(files_.size())) {
    throw std::out_of_range("file " + std::to_string(file_id) + " was never opened");
  }
  return *files_[file_id];
}

bool FileReader::is_direct(int file_id) const { return file(file_id).is_direct; }

void FileReader::submit(Residency* residency, const std::vector<WindowRead>& reads, Priority priority) {
  std::vector<Job> jobs;
  jobs.reserve(reads.size());
  for (const WindowRead& read : reads) {
    file(read.file_id);  // throws here, where a caller can see it, and before anything is queued
    if (read.offset % kReadAlignment || read.dest % kReadAlignment || read.need_nbytes > read.window_nbytes ||
        read.need_nbytes < 0 || read.offset < 0) {
      throw std::invalid_argument("a window must be aligned and hold what is needed of it");
    }
    Job job;
    job.residency = residency;
    job.read = read;
    job.priority = priority;
    add_window(&jobs, job);
  }
  enqueue(jobs);
  if (priority == Priority::kDemand) {
    num_submitted_.fetch_add(static_cast<int64_t>(reads.size()), std::memory_order_release);
  }
}

void FileReader::add_window(std::vector<Job>* jobs, const Job& whole) const {
  const int64_t nbytes = whole.read.need_nbytes;
  if (is_serial_ || whole.priority != Priority::kDemand || nbytes <= kDemandPieceBytes) {
    jobs->push_back(whole);
    return;
  }
  Job job = whole;
  job.window = std::make_shared<Window>(whole.read, (nbytes + kDemandPieceBytes - 1) / kDemandPieceBytes);
  for (int64_t at = 0; at < nbytes; at += kDemandPieceBytes) {
    job.read = piece_of(whole.read, at, kDemandPieceBytes);
    jobs->push_back(job);
  }
}

void FileReader::read_many(const std::vector<ExactRead>& reads) {
  Batch batch;
  std::vector<Job> jobs;
  for (const ExactRead& read : reads) {
    file(read.file_id);
    int64_t begin = read.offset;
    const int64_t end = read.offset + read.nbytes;
    while (begin < end) {
      // Cut at whole pages of the file: no page is then read twice.
      const int64_t stop = std::min(end, round_down(begin + kPieceBytes));
      Job job;
      job.batch = &batch;
      job.read = {-1, read.file_id, begin, stop - begin, stop - begin,
                  read.dest + static_cast<uint64_t>(begin - read.offset)};
      jobs.push_back(job);
      begin = stop;
    }
  }
  batch.pending = static_cast<int64_t>(jobs.size());
  enqueue(jobs);
  std::unique_lock<std::mutex> lock(batch.mutex);
  batch.done.wait(lock, [&] { return batch.pending == 0; });
  if (batch.has_failure) throw ReadFailed(batch.failure);
}

void FileReader::enqueue(const std::vector<Job>& jobs) {
  if (jobs.empty()) return;
  const Priority priority = jobs.front().priority;  // of all of them
  bool is_refused = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_refused = closed_;
    if (!is_refused) {
      // First what can run out of memory: a throw then leaves nothing behind.
      std::deque<Job>& queue = priority == Priority::kDemand ? queue_ : background_;
      if (!is_serial_) queue.insert(queue.end(), jobs.begin(), jobs.end());
      begin_busy(priority, static_cast<int64_t>(jobs.size()));
    }
  }
  if (is_refused) {
    cancel({jobs.begin(), jobs.end()});
    return;
  }
  if (!is_serial_) {
    wake_.notify_all();
    return;
  }
  for (const Job& job : jobs) run(job);
}

void FileReader::work() {
  for (;;) {
    Job job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto can_take_background = [this] {
        return !background_.empty() && num_background_running_ < background_limit_;
      };
      wake_.wait(lock, [&] { return closed_ || !queue_.empty() || can_take_background(); });
      if (!queue_.empty()) {
        job = queue_.front();
        queue_.pop_front();
      } else if (can_take_background()) {
        job = background_.front();
        background_.pop_front();
        ++num_background_running_;
      } else {
        return;  // closed
      }
    }
    run(job);
  }
}

void FileReader::run(const Job& job) {
  ReadFailure failure;
  const bool is_background = job.priority == Priority::kBackground;
  const Priority before = current_priority;
  current_priority = job.priority;
  const bool is_good = is_background    ? read_in_pieces(job.read, &failure)
                       : job.residency ? read_window(job.read, &failure)
                                       : read_exact(job.read, &failure);
  current_priority = before;
  {
    // Before the end is told: whoever sees its read done also finds it in the statistics.
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_background && !is_serial_) --num_background_running_;
    end_busy(job.priority);
  }
  end(job, is_good ? nullptr : &failure);
  if (is_background) {
    wake_.notify_one();  // another background read may begin
    background_ended_.notify_all();
  }
}

// Demand that has come meanwhile goes first, on this very thread.
void FileReader::serve_demand() {
  for (;;) {
    Job job;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (queue_.empty()) return;
      job = queue_.front();
      queue_.pop_front();
    }
    run(job);
  }
}

bool FileReader::read_in_pieces(const WindowRead& read, ReadFailure* failure) {
  for (int64_t at = 0; at < read.need_nbytes; at += kBackgroundPieceBytes) {
    if (!is_serial_) serve_demand();
    if (read_window(piece_of(read, at, kBackgroundPieceBytes), failure)) continue;
    *failure = failure_of_whole(read, at, *failure);
    return false;
  }
  return true;
}

void FileReader::end_piece(const Job& job, const ReadFailure* failure) {
  Window& window = *job.window;
  {
    std::lock_guard<std::mutex> lock(window.mutex);
    if (failure) {
      const ReadFailure whole = failure_of_whole(window.read, job.read.offset - window.read.offset, *failure);
      if (!window.has_failure || whole.got < window.failure.got) window.failure = whole;
      window.has_failure = true;
    }
    if (--window.pending > 0) return;
  }
  // The last one: nobody else comes here any more.
  Job whole = job;
  whole.window.reset();
  whole.read = window.read;
  end(whole, window.has_failure ? &window.failure : nullptr);
}

void FileReader::end(const Job& job, const ReadFailure* failure) {
  if (job.window) return end_piece(job, failure);
  if (job.residency) {
    if (failure) {
      job.residency->fail(job.read.slot, *failure);
    } else {
      job.residency->complete(job.read.slot);
    }
    return;
  }
  std::lock_guard<std::mutex> lock(job.batch->mutex);
  if (failure && !job.batch->has_failure) {
    job.batch->has_failure = true;
    job.batch->failure = *failure;
  }
  // Under the mutex: the batch lives on the waiting caller's stack and is gone as soon as it sees zero.
  if (--job.batch->pending == 0) job.batch->done.notify_all();
}

void FileReader::cancel(const std::deque<Job>& jobs) {
  for (const Job& job : jobs) {
    ReadFailure failure{ECANCELED, job.read.file_id, job.read.offset, job.read.need_nbytes, 0};
    end(job, &failure);
  }
}

void FileReader::begin_busy(Priority priority, int64_t num_jobs) {
  if (num_jobs == 0) return;
  Books& sums = books(priority);
  if (sums.num_unfinished == 0) sums.busy_since = std::chrono::steady_clock::now();
  sums.num_unfinished += num_jobs;
}

void FileReader::end_busy(Priority priority) {
  Books& sums = books(priority);
  if (--sums.num_unfinished > 0) return;
  sums.busy_ns +=
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - sums.busy_since).count();
  idle_.notify_all();
}

ReadStats FileReader::stats(Priority priority) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Books& sums = books_[static_cast<int>(priority)];
  ReadStats stats;
  stats.read_bytes = sums.read_bytes.load(std::memory_order_relaxed);
  stats.num_reads = sums.num_reads.load(std::memory_order_relaxed);
  stats.busy_ns = sums.busy_ns;
  if (sums.num_unfinished > 0) {
    const auto open = std::chrono::steady_clock::now() - sums.busy_since;
    stats.busy_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(open).count();
  }
  return stats;
}

void FileReader::set_background_limit(int limit) {
  if (limit < 1) throw std::invalid_argument("at least one background read must be able to run");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    background_limit_ = limit;
  }
  wake_.notify_all();
}

int64_t FileReader::wait_background(int64_t max_pending, int64_t timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  const Books& sums = books(Priority::kBackground);
  background_ended_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                             [&] { return sums.num_unfinished <= max_pending; });
  return sums.num_unfinished;
}

void FileReader::cancel_background() {
  std::deque<Job> cancelled;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    cancelled.swap(background_);
    for (size_t i = 0; i < cancelled.size(); ++i) end_busy(Priority::kBackground);
  }
  cancel(cancelled);
  background_ended_.notify_all();
}

void FileReader::close() {
  std::deque<Job> cancelled;
  std::vector<std::thread> threads;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    cancelled.swap(queue_);
    threads.swap(threads_);
    for (size_t i = 0; i < cancelled.size(); ++i) end_busy(Priority::kDemand);
  }
  cancel_background();
  wake_.notify_all();
  cancel(cancelled);
  for (std::thread& thread : threads) thread.join();
  std::unique_lock<std::mutex> lock(mutex_);
  // Reads may still run in threads that another close() is joining, or, serially, in a caller of submit.
  idle_.wait(lock, [this] { return books_[0].num_unfinished + books_[1].num_unfinished == 0; });
  for (auto& opened : files_) {
    for (int* fd : {&opened->direct_fd, &opened->buffered_fd}) {
      if (*fd >= 0) ::close(*fd);
      *fd = -1;
    }
  }
}

// The window of one part: as much as possible by O_DIRECT, the rest buffered.
bool FileReader::read_window(const WindowRead& read, ReadFailure* failure) {
  File& source = file(read.file_id);
  auto* dest = reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(read.dest));
  int error = 0;
  int64_t got = 0;
  if (source.is_direct) {
    const int64_t direct_nbytes = round_down(read.window_nbytes);  // clipped at the end of the file: the tail is left
    while (got < std::min(direct_nbytes, read.need_nbytes)) {
      const int64_t n = read_once(read.file_id, true, read.offset + got, direct_nbytes - got, dest + got);
      if (n == -EINTR) continue;
      if (n == -EINVAL) {  // the file system accepted the flag but not the read
        source.is_direct = false;
        break;
      }
      if (n < 0) {
        *failure = {static_cast<int>(-n), read.file_id, read.offset, read.need_nbytes, got};
        return false;
      }
      if (got + n >= read.need_nbytes) return true;
      const int64_t resume = round_down(got + n);
      if (resume <= got) break;  // less than a page came: direct reads make no progress here
      got = resume;
    }
  }
  if (got >= read.need_nbytes) return true;
  const int64_t before = got;
  if (read_buffered(read.file_id, read.offset + got, read.need_nbytes - got, dest + got, &error, &got)) return true;
  *failure = {error, read.file_id, read.offset, read.need_nbytes, before + got};
  return false;
}

// On success true; otherwise *got holds the bytes that came and *error the errno, 0 for the end of the file.
bool FileReader::read_buffered(int file_id, int64_t offset, int64_t nbytes, uint8_t* dest, int* error, int64_t* got) {
  *got = 0;
  *error = 0;
  while (*got < nbytes) {
    const int64_t n = read_once(file_id, false, offset + *got, nbytes - *got, dest + *got);
    if (n == -EINTR) continue;
    if (n <= 0) {
      *error = static_cast<int>(-n);
      return false;
    }
    *got += n;
  }
  return true;
}

// Any offset, any address: whole pages come by direct reads, through aligned memory where the address does not fit.
bool FileReader::read_exact(const WindowRead& read, ReadFailure* failure) {
  const int64_t end = read.offset + read.need_nbytes;
  auto* dest = reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(read.dest));
  int64_t position = read.offset;
  int error = 0;
  int64_t got = 0;
  std::unique_ptr<uint8_t, FreeDeleter> bounce;
  while (position < end) {
    uint8_t* to = dest + (position - read.offset);
    bool is_good;
    int64_t step;
    if (!file(read.file_id).is_direct || read.need_nbytes < kSmallBytes) {
      step = end - position;
      is_good = read_buffered(read.file_id, position, step, to, &error, &got);
    } else {
      const bool is_aligned = position % kReadAlignment == 0 && reinterpret_cast<uintptr_t>(to) % kReadAlignment == 0 &&
                              end - position >= kReadAlignment;
      const int64_t start = round_down(position);
      ReadFailure inner;
      if (is_aligned) {
        step = round_down(end - position);
        is_good = read_window({-1, read.file_id, position, step, step, reinterpret_cast<uintptr_t>(to)}, &inner);
      } else {
        if (!bounce) bounce.reset(static_cast<uint8_t*>(std::aligned_alloc(kReadAlignment, kBounceBytes)));
        if (!bounce) {
          *failure = {ENOMEM, read.file_id, read.offset, read.need_nbytes, position - read.offset};
          return false;
        }
        // Where only the first page differs, one page through the bounce buffer makes the rest aligned.
        const bool fits_later = (reinterpret_cast<uintptr_t>(to) - static_cast<uintptr_t>(position)) % kReadAlignment == 0;
        const int64_t room = fits_later ? kReadAlignment : kBounceBytes;
        step = std::min(end, start + room) - position;
        const int64_t need = position - start + step;
        is_good = read_window({-1, read.file_id, start, round_up(need), need,
                               reinterpret_cast<uintptr_t>(bounce.get())}, &inner);
        if (is_good) std::memcpy(to, bounce.get() + (position - start), static_cast<size_t>(step));
        inner.got = std::max<int64_t>(inner.got - (position - start), 0);
      }
      error = inner.error;
      got = inner.got;
    }
    if (!is_good) {
      *failure = {error, read.file_id, read.offset, read.need_nbytes, position - read.offset + got};
      return false;
    }
    position += step;
  }
  return true;
}

int64_t FileReader::read_once(int file_id, bool direct, int64_t offset, int64_t nbytes, uint8_t* dest) {
  const File& source = file(file_id);
  const ssize_t n = ::pread(direct ? source.direct_fd : source.buffered_fd, dest, static_cast<size_t>(nbytes), offset);
  int64_t got = n < 0 ? -static_cast<int64_t>(errno) : n;
  if (got > 0) {
    Books& sums = books(current_priority);
    sums.read_bytes.fetch_add(got, std::memory_order_relaxed);
    sums.num_reads.fetch_add(1, std::memory_order_relaxed);
  }
  if (has_faults_.load(std::memory_order_acquire)) got = apply_fault(file_id, offset, nbytes, dest, got);
  return got;
}

void FileReader::inject_fault(int file_id, int64_t offset, int64_t nbytes, int error, int count) {
  std::lock_guard<std::mutex> lock(fault_mutex_);
  faults_.push_back({file_id, offset, nbytes, error, count});
  has_faults_.store(true, std::memory_order_release);
}

int64_t FileReader::apply_fault(int file_id, int64_t offset, int64_t nbytes, uint8_t* dest, int64_t got) {
  std::lock_guard<std::mutex> lock(fault_mutex_);
  for (size_t i = 0; i < faults_.size(); ++i) {
    Fault& fault = faults_[i];
    if (fault.file_id != file_id || offset + nbytes <= fault.offset || fault.offset + fault.nbytes <= offset) continue;
    const int error = fault.error;
    if (--fault.count <= 0) {
      faults_.erase(faults_.begin() + static_cast<std::ptrdiff_t>(i));
      if (faults_.empty()) has_faults_.store(false, std::memory_order_release);
    }
    if (got < 0) return got;
    const int64_t kept = error == 0 ? (got + 2) / 3 : 0;
    std::memset(dest + kept, 0xEE, static_cast<size_t>(got - kept));
    if (error == 0) return kept;
    return error > 0 ? -static_cast<int64_t>(error) : 0;
  }
  return got;
}

}  // namespace expertide
