#include "kernels/expert_mlp.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "kernels/dispatch.h"
#include "kernels/linear.h"
#include "kernels/row_product.h"

namespace expertide {
namespace {

constexpr int64_t kRowsPerTask = 352;

// body(expert, first row, rows) for every tile of `rows` rows of every expert.
template <class Body>
void for_each_tile(ThreadPool& pool, const std::vector<ExpertWork>& work, int64_t rows, int64_t multiply_adds,
                   Body&& body) {
  const int64_t tiles = (rows + kRowsPerTask - 1) / kRowsPerTask;
  auto run = [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task % tiles * kRowsPerTask;
      body(work[static_cast<size_t>(task / tiles)], begin, std::min(kRowsPerTask, rows - begin));
    }
  };
  const int64_t num_tasks = tiles * static_cast<int64_t>(work.size());
  if (multiply_adds < kSmallWork) {
    run(0, num_tasks);
  } else {
    pool.parallel_for(num_tasks, 1, run);
  }
}

}  // namespace

void TokenRows::reset(const float* x, int64_t num_tokens, int64_t cols) {
  x_ = x;
  num_tokens_ = num_tokens;
  cols_ = cols;
  for (const void* const*& ready : ready_) ready = nullptr;
}

const void* const* TokenRows::in_form(ThreadPool& pool, const IsaTable& isa, Activation form) {
  const int i = static_cast<int>(form);
  if (ready_[i] == nullptr) ready_[i] = rows_[i].prepare(pool, isa, form, x_, num_tokens_, cols_);
  return ready_[i];
}

void compute_experts(ThreadPool& pool, const IsaTable& isa, const std::vector<ExpertWork>& work, TokenRows& x,
                     const int64_t* tokens, float* const* results, ExpertScratch& scratch) {
  if (work.empty()) return;
  const int64_t inner = work[0].gate.rows;
  const int64_t hidden = work[0].gate.cols;
  const int64_t n = work.back().first + work.back().count;
  const auto size = static_cast<size_t>(n);
  if (scratch.gate_out.size() < size * static_cast<size_t>(inner)) {
    scratch.gate_out.resize(size * static_cast<size_t>(inner));
    scratch.up_out.resize(size * static_cast<size_t>(inner));
  }
  scratch.x_gate.resize(size);
  scratch.x_up.resize(size);
  scratch.gate_rows.resize(size);
  scratch.up_rows.resize(size);
  for (const ExpertWork& expert : work) {
    const void* const* x_gate = x.in_form(pool, isa, isa.types[expert.gate.type].activation);
    const void* const* x_up = x.in_form(pool, isa, isa.types[expert.up.type].activation);
    for (int64_t j = expert.first; j < expert.first + expert.count; ++j) {
      scratch.x_gate[static_cast<size_t>(j)] = x_gate[tokens[j]];
      scratch.x_up[static_cast<size_t>(j)] = x_up[tokens[j]];
      scratch.gate_rows[static_cast<size_t>(j)] = scratch.gate_out.data() + j * inner;
      scratch.up_rows[static_cast<size_t>(j)] = scratch.up_out.data() + j * inner;
    }
  }

  for_each_tile(pool, work, inner, 2 * n * inner * hidden, [&](const ExpertWork& expert, int64_t begin, int64_t count) {
    float* const* gate_rows = scratch.gate_rows.data() + expert.first;
    float* const* up_rows = scratch.up_rows.data() + expert.first;
    multiply_rows(isa.types[expert.gate.type], expert.gate, begin, count, scratch.x_gate.data() + expert.first,
              expert.count, gate_rows);
    multiply_rows(isa.types[expert.up.type], expert.up, begin, count, scratch.x_up.data() + expert.first, expert.count,
              up_rows);
    for (int64_t j = 0; j < expert.count; ++j) {
      isa.silu_mul(gate_rows[j] + begin, up_rows[j] + begin, count, gate_rows[j] + begin);
    }
  });

  const void* const* inner_rows[kNumActivations] = {};
  for (const ExpertWork& expert : work) {
    const Activation form = isa.types[expert.down.type].activation;
    const int i = static_cast<int>(form);
    if (inner_rows[i] == nullptr) {
      inner_rows[i] = scratch.inner[i].prepare(pool, isa, form, scratch.gate_out.data(), n, inner);
    }
  }
  for_each_tile(pool, work, hidden, n * inner * hidden, [&](const ExpertWork& expert, int64_t begin, int64_t count) {
    const TypeKernels& kernels = isa.types[expert.down.type];
    multiply_rows(kernels, expert.down, begin, count, inner_rows[static_cast<int>(kernels.activation)] + expert.first,
              expert.count, results + expert.first);
  });
}

void check_expert(const Matrix& gate, const Matrix& up, const Matrix& down) {
  checked_row_bytes(gate.type, gate.cols);
  checked_row_bytes(up.type, up.cols);
  checked_row_bytes(down.type, down.cols);
  if (gate.rows != up.rows || gate.cols != up.cols || down.rows != gate.cols || down.cols != gate.rows) {
    throw std::invalid_argument("an expert needs gate and up of [F, H] and down of [H, F]");
  }
}

void expert_mlp(ThreadPool& pool, const Matrix& gate, const Matrix& up, const Matrix& down, const float* x, int64_t n,
                float* y) {
  check_expert(gate, up, down);
  if (n <= 0) return;
  struct Scratch {
    TokenRows x;
    ExpertScratch experts;
    std::vector<int64_t> tokens;
    std::vector<float*> results;
    std::vector<ExpertWork> work;
  };
  thread_local Scratch scratch;
  scratch.x.reset(x, n, gate.cols);
  scratch.tokens.resize(static_cast<size_t>(n));
  std::iota(scratch.tokens.begin(), scratch.tokens.end(), int64_t{0});
  scratch.results.resize(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) scratch.results[static_cast<size_t>(i)] = y + i * gate.cols;
  scratch.work.assign(1, ExpertWork{gate, up, down, 0, n});
  compute_experts(pool, active_isa(), scratch.work, scratch.x, scratch.tokens.data(), scratch.results.data(),
                  scratch.experts);
}

}  // namespace expertide
