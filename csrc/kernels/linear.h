// Packed matrices times activations, and packed rows to floats.
#pragma once

#include <cstdint>

#include "kernels/quant.h"
#include "thread_pool.h"

namespace expertide {

// The kernels of a matrix's type. Throws std::invalid_argument when the type is unknown or its blocks do not divide the
// row: that is how a Matrix is checked at the door.
int64_t checked_row_bytes(int type, int64_t cols);

// y[t, r] = w[r] · x[t]; x is [num_tokens, w.cols], y is [num_tokens, w.rows], both contiguous.
// A value depends on its row and its token only: not on num_tokens, the pool's size or the instruction set.
void linear(ThreadPool& pool, const Matrix& w, const float* x, int64_t num_tokens, float* y);

// y[t, q, r] = w_q[r] · x[t, q]; w_q starts `lead_stride` bytes after w_(q-1), each [rows, cols].
void head_linear(ThreadPool& pool, const Matrix& w, int64_t num_heads, int64_t lead_stride, const float* x,
                 int64_t num_tokens, float* y);

// y[t, q] = Σ_r x[t, q, r] * w_q[r], the product with the transpose: x is [num_tokens, num_heads, w.rows], y is
// [num_tokens, num_heads, w.cols]. Rows are decoded to float32 and summed in their order.
void transposed_head_linear(ThreadPool& pool, const Matrix& w, int64_t num_heads, int64_t lead_stride, const float* x,
                            int64_t num_tokens, float* y);

// What a thread of the pool keeps for it.
int64_t transposed_scratch_bytes(int64_t rows);

// out[i] = row ids[i] of w, float32. Throws std::out_of_range for an id outside [0, w.rows); nothing is written then.
void decode_rows(ThreadPool& pool, const Matrix& w, const int64_t* ids, int64_t num_ids, float* out);

}  // namespace expertide
