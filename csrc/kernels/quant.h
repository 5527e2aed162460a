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

// One block of activations: value[i] = scale * q[i].
//
//     byte 0..3     scale, float32 (NaN when the block held a NaN or an infinity)
//     byte 4..15    unused
//     byte 16..31   sums[0..7], int16: sum of q over each run of 32 values (a type with minimums needs it)
//     byte 32..287  q[0..255], int8 in -127..127
struct BlockQ8K {
  float scale;
  int32_t unused[3];
  int16_t sums[kSuperBlock / 32];
  int8_t q[kSuperBlock];
};
static_assert(sizeof(BlockQ8K) == 288, "a multiple of 32 bytes, so that q stays aligned in an aligned array");

// Packed rows, one after the other. `row_bytes` is cols / block size * block bytes.
struct Matrix {
  const uint8_t* data;
  int64_t rows;
  int64_t cols;
  int type;
};

}  // namespace expertide
