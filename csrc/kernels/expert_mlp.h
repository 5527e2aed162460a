// down · (silu(gate · x) * (up · x)) for a batch of experts, each with its own tokens.
//
// All experts of a batch go through the two halves together: with one token per expert a single expert is too little work
// to share between cores.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/activations.h"
#include "kernels/quant.h"

namespace expertide {

// One expert and the assignments [first, first + count) it serves.
struct ExpertWork {
  Matrix gate;  // [F, H]
  Matrix up;    // [F, H]
  Matrix down;  // [H, F]
  int64_t first;
  int64_t count;
};

// The rows of x in each form that some matrix wants; filled at first use.
class TokenRows {
 public:
  void reset(const float* x, int64_t num_tokens, int64_t cols);
  // Pointer [num_tokens] in this form.
  const void* const* in_form(ThreadPool& pool, const IsaTable& isa, Activation form);

 private:
  const float* x_ = nullptr;
  int64_t num_tokens_ = 0;
  int64_t cols_ = 0;
  const void* const* ready_[kNumActivations] = {};
  ActivationRows rows_[kNumActivations];
};

// Memory of compute_experts, kept between calls.
struct ExpertScratch {
  std::vector<float> gate_out;  // [assignments, F]; becomes the activated product
  std::vector<float> up_out;    // [assignments, F]
  std::vector<const void*> x_gate, x_up;
  std::vector<float*> gate_rows, up_rows;
  ActivationRows inner[kNumActivations];  // in the form that `down` wants; experts of a batch may differ in it
};

// Args:
//   work: experts whose assignments together are numbered [0, n) without gaps.
//   tokens: [n] token of each assignment.
//   results: [n] where each assignment's H floats go.
void compute_experts(ThreadPool& pool, const IsaTable& isa, const std::vector<ExpertWork>& work, TokenRows& x,
                     const int64_t* tokens, float* const* results, ExpertScratch& scratch);

// One expert for all rows of x [n, H]; y [n, H]. Throws std::invalid_argument when types or shapes do not fit.
void expert_mlp(ThreadPool& pool, const Matrix& gate, const Matrix& up, const Matrix& down, const float* x, int64_t n,
                float* y);

// Throws std::invalid_argument unless gate and up are [F, H], down is [H, F], and the types are known.
void check_expert(const Matrix& gate, const Matrix& up, const Matrix& down);

}  // namespace expertide
