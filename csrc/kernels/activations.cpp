#include "kernels/activations.h"

namespace expertide {

float* row_scratch(int64_t cols) {
  thread_local std::vector<float> scratch;
  const auto wanted = static_cast<size_t>(kMaxRowsAtOnce * cols);
  if (scratch.size() < wanted) scratch.resize(wanted);
  return scratch.data();
}

const void* const* ActivationRows::prepare(ThreadPool& pool, const IsaTable& isa, Activation form, const float* x,
                                           int64_t num_rows, int64_t cols, int64_t num_heads) {
  const bool is_float = form == Activation::kFloat32;
  const int64_t row_blocks = cols / kSuperBlock;
  if (!is_float) {
    if (blocks_.size() < static_cast<size_t>(num_rows * row_blocks)) {
      blocks_.resize(static_cast<size_t>(num_rows * row_blocks));
    }
    auto quantize = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) isa.quantize_q8_k(x + i * cols, cols, blocks_.data() + i * row_blocks);
    };
    if (num_rows * cols < kSmallWork) {
      quantize(0, num_rows);
    } else {
      pool.parallel_for(num_rows, quantize);
    }
  }
  pointers_.resize(static_cast<size_t>(num_rows));
  const int64_t num_tokens = num_rows / num_heads;
  for (int64_t q = 0; q < num_heads; ++q) {
    for (int64_t t = 0; t < num_tokens; ++t) {
      const int64_t row = t * num_heads + q;
      const void* pointer = blocks_.data() + row * row_blocks;
      pointers_[static_cast<size_t>(q * num_tokens + t)] = is_float ? static_cast<const void*>(x + row * cols) : pointer;
    }
  }
  return pointers_.data();
}

}  // namespace expertide
