// What one instruction set offers: per quant type a row decoder and a row-times-activations product.
//
// Every table computes the same bits. A new instruction set is one more translation unit that fills one more table; a
// faster product for a type replaces one entry, in all tables at once.
#pragma once

#include <stdint.h>

#include "kernels/quant.h"

namespace expertide {

// The form in which a type's product takes its activations.
enum class Activation : int { kFloat32, kInt8Blocks32, kInt8Blocks256 };
constexpr int kNumActivations = 3;

// Values that share a scale; 0 for floats.
static constexpr int64_t block_of(Activation form) {
  return form == Activation::kInt8Blocks32 ? 32 : form == Activation::kInt8Blocks256 ? kSuperBlock : 0;
}

// Packed rows times `num_tokens` activation rows. y[t][first_row + r] is written for r < num_rows; the value does not
// depend on num_rows or num_tokens: each (row, token) pair is summed in an order given by cols alone.
struct DotArgs {
  const uint8_t* rows;  // the first row of this call
  int64_t row_bytes;
  int64_t num_rows;
  int64_t cols;
  const void* const* x;  // [num_tokens] pointers to float[cols] or to rows as QuantizedRow draws them
  int64_t num_tokens;
  float* const* y;       // [num_tokens] pointers
  int64_t first_row;
  uint8_t* scratch;  // scratch_bytes(cols), this thread's own, at a multiple of 64 bytes
};

// Largest number of rows that a product takes side by side. Tasks of a multiple of it waste nothing.
constexpr int kMaxRowsAtOnce = 16;

// Room for 16 rows of int8 with their scales (at most 22.5 bytes a column) or for four rows of floats.
static constexpr int64_t scratch_bytes(int64_t cols) { return 24 * cols + 1024; }

// y[t][c] = Σ_r x[t][r] * row r [c], rows in their order, for `count` columns from `first_col` on.
struct FoldArgs {
  void (*decode_row)(const uint8_t* row, int64_t cols, float* out);
  const uint8_t* rows;  // at the first column
  int64_t row_bytes;
  int64_t num_rows;
  int64_t count;         // at most kFoldCols, whole blocks
  const float* const* x;  // [num_tokens] pointers to float[num_rows]
  int64_t num_tokens;
  float* const* y;  // [num_tokens] pointers to the first column
  float* scratch;   // float[num_rows * kFoldCols], at a multiple of 64 bytes
};

constexpr int64_t kFoldCols = 256;

struct TypeKernels {
  void (*decode_row)(const uint8_t* row, int64_t cols, float* out);
  void (*dot)(const DotArgs& args);
  int block_size;
  int block_bytes;
  Activation activation;
};

struct IsaTable {
  const char* name;
  TypeKernels types[kNumQuantIds];  // block_size 0: no such type
  // One row of activations to quantized_layout(block, cols).nbytes bytes; block is 32 or 256.
  void (*quantize)(const float* x, int64_t block, int64_t cols, uint8_t* out);
  void (*fold)(const FoldArgs& args);
  // out[i] = silu(gate[i]) * up[i]; out may be gate.
  void (*silu_mul)(const float* gate, const float* up, int64_t count, float* out);
};

extern const IsaTable kBaseTable;
#if defined(__x86_64__) || defined(_M_X64)
extern const IsaTable kAvx2Table;
extern const IsaTable kAvx512Table;
#elif defined(__aarch64__)
extern const IsaTable kNeonTable;
#endif

}  // namespace expertide
