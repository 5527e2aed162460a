// Reader, residency table and thread pool under a race detector. Run by test_native_races.py with a file as argument.
//
// One thread plays the engine (acquire, reserve, submit, wait, compute, release, evict), I/O threads load, faults come at
// random. Every slot's bytes are compared with the file: a load seen too early, or a slot overwritten while leased, shows
// as a wrong byte here and as a race in the detector's report.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "file_reader.h"
#include "residency.h"
#include "thread_pool.h"

using namespace expertide;

namespace {

constexpr int kExperts = 24;
constexpr int kSlots = 8;
constexpr int64_t kPart = 20000;
constexpr int64_t kSpan = 24576;  // six pages hold a part at any shift
constexpr int kParts = 2;

int64_t offset_of(int expert, int part) { return 37 + (expert * kParts + part) * kPart; }
uint8_t byte_at(int64_t offset) { return static_cast<uint8_t>((offset * 2654435761u) >> 13); }

#define CHECK(what)                                                  \
  do {                                                               \
    if (!(what)) {                                                   \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, #what);        \
      std::exit(1);                                                  \
    }                                                                \
  } while (0)

}  // namespace

int main(int, char** argv) {
  const int64_t size = offset_of(kExperts, 0) + 11;
  std::vector<uint8_t> content(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) content[static_cast<size_t>(i)] = byte_at(i);
  std::FILE* file = std::fopen(argv[1], "wb");
  CHECK(file && std::fwrite(content.data(), 1, content.size(), file) == content.size());
  std::fclose(file);

  auto* memory = static_cast<uint8_t*>(std::aligned_alloc(kReadAlignment, kSlots * kParts * kSpan));
  ThreadPool pool(3);
  std::mt19937 random(1);
  int num_failures = 0;
  for (int round = 0; round < 6; ++round) {
    Residency residency(1, kExperts, kParts, kSlots);
    FileReader reader(4, false);
    const int id = reader.open(argv[1]);
    std::vector<int32_t> hits, misses;
    for (int step = 0; step < 150; ++step) {
      if (step % 10 == 3) {
        const int errors[] = {EIO, EINTR, 0, -1};
        reader.inject_fault(id, random() % size, 1, errors[random() % 4], 1 + random() % 2);
      }
      int32_t ids[3];
      for (int32_t& expert : ids) expert = static_cast<int32_t>(random() % kExperts);
      residency.acquire(0, ids, 3, &hits, &misses);
      std::vector<WindowRead> reads;
      for (const int32_t expert : misses) {
        int slot = 0;
        while (residency.state(slot) != SlotState::kFree && !residency.evict(slot)) CHECK(++slot < kSlots);
        uint64_t parts[kParts];
        for (int part = 0; part < kParts; ++part) {
          const int64_t shift = offset_of(expert, part) % kReadAlignment;
          uint8_t* dest = memory + (slot * kParts + part) * kSpan;
          std::memset(dest, 0xFF, kSpan);
          parts[part] = reinterpret_cast<uintptr_t>(dest + shift);
          const int64_t start = offset_of(expert, part) - shift;
          const int64_t end = std::min((shift + kPart + kReadAlignment - 1) / kReadAlignment * kReadAlignment, size - start);
          reads.push_back({slot, id, start, end, shift + kPart, reinterpret_cast<uintptr_t>(dest)});
        }
        residency.reserve(slot, 0, expert, parts, kParts, false);
      }
      reader.submit(&residency, reads);
      const bool is_last = step == 149;
      if (is_last) reader.close();  // with reads in flight
      hits.insert(hits.end(), misses.begin(), misses.end());
      for (const int32_t expert : hits) {
        try {
          residency.wait(0, expert);
          const int slot = residency.slot_of(0, expert);
          std::atomic<int64_t> wrong{0};
          auto body = [&](int64_t begin, int64_t end) {
            for (int part = 0; part < kParts; ++part) {
              for (int64_t i = begin; i < end; ++i) {
                if (residency.part_pointer(slot, part)[i] != byte_at(offset_of(expert, part) + i)) ++wrong;
              }
            }
          };
          pool.parallel_for(kPart, 2000, body);
          CHECK(wrong.load() == 0);
        } catch (const ReadFailed&) {
          ++num_failures;
        }
        residency.release(0, expert);
      }
      residency.wait_idle();
      residency.collect_failed();
      CHECK(residency.total_leases() == 0);
    }
  }
  CHECK(num_failures > 0);
  pool.close();
  std::free(memory);
  std::puts("fine");
  return 0;
}
