#include "kernels/activations.h"

namespace expertide {

uint8_t* AlignedBytes::at_least(size_t nbytes) {
  constexpr size_t kAlignment = 64;
  if (bytes_.size() < nbytes + kAlignment) bytes_.resize(nbytes + kAlignment);
  const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
  return bytes_.data() + (kAlignment - address % kAlignment) % kAlignment;
}

uint8_t* row_scratch(int64_t cols) {
  thread_local AlignedBytes scratch;
  return scratch.at_least(static_cast<size_t>(scratch_bytes(cols)));
}

const void* const* ActivationRows::prepare(ThreadPool& pool, const IsaTable& isa, Activation form, const float* x,
                                           int64_t num_rows, int64_t cols, int64_t num_heads) {
  const int64_t block = block_of(form);
  const bool is_float = block == 0;
  const int64_t row_bytes = is_float ? 0 : quantized_layout(block, cols).nbytes;
  uint8_t* quantized = quantized_.at_least(static_cast<size_t>(num_rows * row_bytes));
  if (!is_float) {
    auto quantize = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) isa.quantize(x + i * cols, block, cols, quantized + i * row_bytes);
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
      const void* pointer = quantized + row * row_bytes;
      pointers_[static_cast<size_t>(q * num_tokens + t)] = is_float ? static_cast<const void*>(x + row * cols) : pointer;
    }
  }
  return pointers_.data();
}

}  // namespace expertide
