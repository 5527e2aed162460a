// Activation rows in the form that a type's product wants, and the memory they need.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/isa_table.h"
#include "thread_pool.h"

namespace expertide {

// Products below this many multiply-adds are done by the caller alone: waking a worker costs more.
constexpr int64_t kSmallWork = 32 * 1024;

// 8: activations are rounded to int8 (0.7 % of their size). 16: what that leaves over is rounded to int8 once more and
// multiplied too (0.004 %), at twice the arithmetic. One setting for the process; not to be changed while a step runs.
int activation_bits();
void set_activation_bits(int bits);  // throws std::invalid_argument unless 8 or 16

// Bytes that do not move: a vector of them whose first one lies on a multiple of 64.
class AlignedBytes {
 public:
  // At least nbytes; what was there before is gone when it grows.
  uint8_t* at_least(size_t nbytes);

 private:
  std::vector<uint8_t> bytes_;
};

// Quantised (or plain) rows of one activation matrix. Memory is kept between calls.
class ActivationRows {
 public:
  // Pointers to the contiguous rows of x [num_rows, cols], valid until the next call. x may be seen as
  // [num_rows / num_heads, num_heads, cols]: the pointers come head by head. In float form they point into x. With 16 bits a second plane lies right
  // behind each quantised row.
  const void* const* prepare(ThreadPool& pool, const IsaTable& isa, Activation form, const float* x, int64_t num_rows,
                             int64_t cols, int64_t num_heads = 1);

 private:
  std::vector<const void*> pointers_;
  AlignedBytes quantized_;
};

}  // namespace expertide
