// Random packed rows and activations, exact-size memory, and the comparisons that the programs of this folder share.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/quant.h"

namespace samples {

using namespace expertide;

#define CHECK(what)                                                            \
  do {                                                                         \
    if (!(what)) {                                                             \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);          \
      std::exit(1);                                                            \
    }                                                                          \
  } while (0)

// What is being compared, for the message of a failure.
inline std::string& where() {
  static std::string text;
  return text;
}

// Memory of exactly this many bytes, so that an address checker sees the first byte read beyond it. Rows and packed weights
// begin `shift` bytes behind an aligned address: files promise no alignment.
class Bytes {
 public:
  explicit Bytes(size_t nbytes, size_t shift = 0) : memory_(new uint8_t[nbytes + shift]), shift_(shift) {}
  uint8_t* data() const { return memory_.get() + shift_; }

 private:
  std::unique_ptr<uint8_t[]> memory_;
  size_t shift_;
};

struct Floats {
  explicit Floats(int64_t count) : count(count), bytes(static_cast<size_t>(count) * 4) {}
  float* data() const { return reinterpret_cast<float*>(bytes.data()); }
  float& operator[](int64_t i) const { return data()[i]; }
  int64_t count;
  Bytes bytes;
};

inline std::mt19937& random_bits() {
  static std::mt19937 bits(7);
  return bits;
}

// Nearly normal: the sum of four even ones. Exact, so that every processor and library draws the same numbers.
inline Floats normal(int64_t count, float deviation = 1.0f) {
  Floats values(count);
  for (int64_t i = 0; i < count; ++i) {
    int32_t sum = 0;
    for (int j = 0; j < 4; ++j) sum += static_cast<int32_t>(random_bits()() >> 12) - (1 << 19);
    // The variance of one is 2^40 / 12.
    values[i] = static_cast<float>(sum) * (0x1p-20f * 1.7320508f * deviation);
  }
  return values;
}

constexpr QuantId kTypes[] = {kF32,  kF16,  kBF16, kQ4_0, kQ4_1, kQ5_0, kQ5_1,   kQ8_0,
                              kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS, kMXFP4};

inline const TypeKernels& kernels_of(int type) { return active_isa().types[type]; }

inline int64_t row_bytes(int type, int64_t cols) {
  return cols / kernels_of(type).block_size * kernels_of(type).block_bytes;
}

// Where the halves of a block lie that scale it.
inline std::vector<int> half_offsets(int type) {
  switch (type) {
    case kQ4_1: case kQ5_1: case kQ4_K: case kQ5_K: return {0, 2};
    case kQ2_K: return {80, 82};
    case kQ3_K: return {108};
    case kQ6_K: return {208};
    case kF32: case kF16: case kBF16: case kMXFP4: return {};
    default: return {0};
  }
}

// A half between 2^-9 and 2^-5, either sign.
inline uint16_t small_half() {
  const uint32_t bits = random_bits()();
  return static_cast<uint16_t>((bits & 0x83ff) | (6 + (bits >> 16) % 4) << 10);
}

// Rows of random bits whose scales are those of a real matrix; `wild` leaves every bit random: infinities, NaNs, subnormals.
inline Bytes packed_rows(int type, int64_t rows, int64_t cols, bool wild = false) {
  const int64_t nbytes = rows * row_bytes(type, cols);
  Bytes packed(static_cast<size_t>(nbytes), type == kF32 ? 0 : 2);
  for (int64_t i = 0; i < nbytes; ++i) packed.data()[i] = static_cast<uint8_t>(random_bits()() >> 11);
  if (wild) return packed;
  if (type == kF32 || type == kBF16) {
    const Floats values = normal(rows * cols, 0.05f);
    for (int64_t i = 0; i < values.count; ++i) {
      if (type == kF32) std::memcpy(packed.data() + 4 * i, &values[i], 4);
      if (type == kBF16) std::memcpy(packed.data() + 2 * i, reinterpret_cast<const uint8_t*>(&values[i]) + 2, 2);
    }
    return packed;
  }
  const int block_bytes = kernels_of(type).block_bytes;
  for (int64_t begin = 0; begin < nbytes; begin += block_bytes) {
    uint8_t* block = packed.data() + begin;
    if (type == kMXFP4) block[0] = static_cast<uint8_t>(118 + random_bits()() % 6);
    const std::vector<int> halves = type == kF16 ? std::vector<int>{0} : half_offsets(type);
    for (const int offset : halves) {
      const uint16_t half = small_half();
      std::memcpy(block + offset, &half, 2);
    }
  }
  return packed;
}

// Bit for bit, except that one NaN is as good as another: which one an operation makes is the processor's affair.
inline bool same(float a, float b) { return std::memcmp(&a, &b, 4) == 0 || (std::isnan(a) && std::isnan(b)); }

// got [rows of `count` values, `got_stride` apart] against want.
inline void check_same(const float* got, int64_t got_stride, const float* want, int64_t want_stride, int64_t rows,
                       int64_t count) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < count; ++i) {
      const float a = got[r * got_stride + i], b = want[r * want_stride + i];
      if (same(a, b)) continue;
      std::fprintf(stderr, "%s: token %lld, row %lld: got %.9g, expected %.9g\n", where().c_str(),
                   static_cast<long long>(r), static_cast<long long>(i), a, b);
      std::exit(1);
    }
  }
}

// Adds values to a number that every processor must arrive at. NaNs are left out, as above.
inline uint64_t& digest() {
  static uint64_t sum = 1469598103934665603u;
  return sum;
}

inline void add_to_digest(const Floats& values) {
  for (int64_t i = 0; i < values.count; ++i) {
    uint32_t bits = 0;
    if (!std::isnan(values[i])) std::memcpy(&bits, &values[i], 4);
    digest() = (digest() ^ bits) * 1099511628211u;
  }
}

inline void check_close(float got, double want, double bound) {
  if (std::abs(got - want) <= bound) return;
  std::fprintf(stderr, "%s: got %.9g, expected %.9g within %.3g\n", where().c_str(), got, want, bound);
  std::exit(1);
}

}  // namespace samples
