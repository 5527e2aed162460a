// Quant types of packed weights: numbers, block sizes, and a matrix of packed rows.
//
// The numbers are ggml's type ids, as GGUF files store them. Included by every instruction-set unit, so everything here
// has internal linkage: an inline function shared through the linker could end up as AVX2 code in the baseline's path.
#pragma once

#include <stdint.h>

namespace expertide {

enum QuantId : int {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kBF16 = 30,
  kMXFP4 = 39,
};

constexpr int kNumQuantIds = 40;  // one more than the largest id: tables are indexed by id

// Values of a super-block: the K types scale 256 values at once, and activations follow them.
constexpr int kSuperBlock = 256;

// One row of activations as int8, in blocks of `block` values with one scale each: value[i] = scale[i / block] * q[i].
//
//     q       int8 [cols], -127..127, zero up to the next multiple of 64
//     scale   float32 [cols / block], zero up to a multiple of 16; NaN when the block held a NaN or an infinity
//     sums32  int16 [cols / 32], sum of q over each run of 32 values: what a type with minimums or an offset needs
//     sums16  int16 [cols / 16], the same over runs of 16; with block 256 only
//
// Each array begins on a multiple of 64 bytes. A type is multiplied with activations in blocks of its own size.
struct QuantizedRow {
  const int8_t* q;
  const float* scale;
  const int16_t* sums32;
  const int16_t* sums16;
};

// Where the arrays begin, in bytes from the start of the row, and the size of it all.
struct QuantizedLayout {
  int64_t scale;
  int64_t sums32;
  int64_t sums16;
  int64_t nbytes;
};

static constexpr int64_t padded_to_64(int64_t nbytes) { return (nbytes + 63) / 64 * 64; }

static constexpr QuantizedLayout quantized_layout(int64_t block, int64_t cols) {
  const int64_t scale = padded_to_64(cols);
  const int64_t sums32 = scale + padded_to_64(cols / block * 4);
  const int64_t sums16 = sums32 + padded_to_64(cols / 32 * 2);
  return {scale, sums32, sums16, sums16 + (block == kSuperBlock ? padded_to_64(cols / 16 * 2) : 0)};
}

static inline QuantizedRow quantized_row(const void* row, int64_t block, int64_t cols) {
  const QuantizedLayout layout = quantized_layout(block, cols);
  const int8_t* q = static_cast<const int8_t*>(row);
  return {q, reinterpret_cast<const float*>(q + layout.scale), reinterpret_cast<const int16_t*>(q + layout.sums32),
          reinterpret_cast<const int16_t*>(q + layout.sums16)};
}

// Packed rows, one after the other. `row_bytes` is cols / block size * block bytes.
struct Matrix {
  const uint8_t* data;
  int64_t rows;
  int64_t cols;
  int type;
};

}  // namespace expertide
