#include "kernels/linear.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/activations.h"
#include "kernels/dispatch.h"
#include "kernels/row_product.h"

namespace expertide {
namespace {

// Rows a task: enough tasks to even out two unequal cores; rows enough that a task's first bytes, which nothing has asked for
// ahead, do not show. docs/experiments.md
constexpr int64_t kMaxRowsPerTask = 512;

int64_t rows_per_task(int64_t rows, int num_threads) {
  const int64_t share = (rows + 4 * num_threads - 1) / (4 * num_threads);
  return std::min(kMaxRowsPerTask, (share + kMaxRowsAtOnce - 1) / kMaxRowsAtOnce * kMaxRowsAtOnce);
}

// Caller's memory for pointers and quantised activations; a thread runs one product at a time.
struct LinearScratch {
  ActivationRows activations;
  std::vector<float*> y;
};

LinearScratch& linear_scratch() {
  thread_local LinearScratch scratch;
  return scratch;
}

}  // namespace

int64_t checked_row_bytes(int type, int64_t cols) {
  if (type < 0 || type >= kNumQuantIds || active_isa().types[type].block_size == 0) {
    throw std::invalid_argument("quant type " + std::to_string(type) + " has no native kernel");
  }
  const TypeKernels& kernels = active_isa().types[type];
  if (cols < 0 || cols % kernels.block_size != 0) {
    throw std::invalid_argument("rows of " + std::to_string(cols) + " values do not divide into blocks of " +
                                std::to_string(kernels.block_size));
  }
  return cols / kernels.block_size * kernels.block_bytes;
}

void linear(ThreadPool& pool, const Matrix& w, const float* x, int64_t num_tokens, float* y) {
  head_linear(pool, w, 1, 0, x, num_tokens, y);
}

void head_linear(ThreadPool& pool, const Matrix& w, int64_t num_heads, int64_t lead_stride, const float* x,
                 int64_t num_tokens, float* y) {
  checked_row_bytes(w.type, w.cols);
  if (num_tokens <= 0 || num_heads <= 0 || w.rows <= 0) return;
  const IsaTable& isa = active_isa();
  const TypeKernels& kernels = isa.types[w.type];
  LinearScratch& scratch = linear_scratch();

  // Pointers head by head: [num_heads, num_tokens].
  const int64_t num_rows = num_heads * num_tokens;
  const void* const* x_rows =
      scratch.activations.prepare(pool, isa, kernels.activation, x, num_rows, w.cols, num_heads);
  scratch.y.resize(static_cast<size_t>(num_rows));
  for (int64_t q = 0; q < num_heads; ++q) {
    for (int64_t t = 0; t < num_tokens; ++t) {
      scratch.y[static_cast<size_t>(q * num_tokens + t)] = y + (t * num_heads + q) * w.rows;
    }
  }
  float* const* y_rows = scratch.y.data();

  const int64_t grain = rows_per_task(num_heads * w.rows, pool.num_threads());
  const int64_t tasks_per_head = (w.rows + grain - 1) / grain;
  auto body = [&](int64_t first_task, int64_t last_task) {
    for (int64_t task = first_task; task < last_task; ++task) {
      const int64_t q = task / tasks_per_head;
      const int64_t begin = task % tasks_per_head * grain;
      Matrix head = w;
      head.data += q * lead_stride;
      multiply_rows(kernels, head, begin, std::min(grain, w.rows - begin), x_rows + q * num_tokens, num_tokens,
                    y_rows + q * num_tokens);
    }
  };
  const int64_t num_tasks = num_heads * tasks_per_head;
  if (num_rows * w.rows * w.cols < kSmallWork) {
    body(0, num_tasks);
  } else {
    pool.parallel_for(num_tasks, 1, body);
  }
}

void transposed_head_linear(ThreadPool& pool, const Matrix& w, int64_t num_heads, int64_t lead_stride, const float* x,
                            int64_t num_tokens, float* y) {
  const int64_t row_bytes = checked_row_bytes(w.type, w.cols);
  if (num_tokens <= 0 || num_heads <= 0 || w.cols <= 0) return;
  const IsaTable& isa = active_isa();
  const TypeKernels& kernels = isa.types[w.type];
  static_assert(kFoldCols % kSuperBlock == 0, "pieces of whole blocks");
  const int64_t pieces = (w.cols + kFoldCols - 1) / kFoldCols;
  auto body = [&](int64_t first_task, int64_t last_task) {
    thread_local AlignedBytes memory;
    thread_local std::vector<const float*> x_rows;
    thread_local std::vector<float*> y_rows;
    auto* scratch = reinterpret_cast<float*>(memory.at_least(static_cast<size_t>(transposed_scratch_bytes(w.rows))));
    x_rows.resize(static_cast<size_t>(num_tokens));
    y_rows.resize(static_cast<size_t>(num_tokens));
    for (int64_t task = first_task; task < last_task; ++task) {
      const int64_t q = task / pieces;
      const int64_t first_col = task % pieces * kFoldCols;
      for (int64_t t = 0; t < num_tokens; ++t) {
        x_rows[static_cast<size_t>(t)] = x + (t * num_heads + q) * w.rows;
        y_rows[static_cast<size_t>(t)] = y + (t * num_heads + q) * w.cols + first_col;
      }
      const uint8_t* rows = w.data + q * lead_stride + first_col / kernels.block_size * kernels.block_bytes;
      isa.fold({kernels.decode_row, rows, row_bytes, w.rows, std::min(kFoldCols, w.cols - first_col), x_rows.data(),
                num_tokens, y_rows.data(), scratch});
    }
  };
  const int64_t num_tasks = num_heads * pieces;
  if (num_tokens * num_heads * w.rows * w.cols < kSmallWork) {
    body(0, num_tasks);
  } else {
    pool.parallel_for(num_tasks, 1, body);
  }
}

int64_t transposed_scratch_bytes(int64_t rows) { return rows * kFoldCols * static_cast<int64_t>(sizeof(float)); }

void decode_rows(ThreadPool& pool, const Matrix& w, const int64_t* ids, int64_t num_ids, float* out) {
  const int64_t row_bytes = checked_row_bytes(w.type, w.cols);
  for (int64_t i = 0; i < num_ids; ++i) {
    if (ids[i] < 0 || ids[i] >= w.rows) {
      throw std::out_of_range("row " + std::to_string(ids[i]) + " of a matrix of " + std::to_string(w.rows) + " rows");
    }
  }
  const TypeKernels& kernels = active_isa().types[w.type];
  auto body = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kernels.decode_row(w.data + ids[i] * row_bytes, w.cols, out + i * w.cols);
  };
  if (num_ids * w.cols < kSmallWork) {
    body(0, num_ids);
  } else {
    pool.parallel_for(num_ids, body);
  }
}

}  // namespace expertide
