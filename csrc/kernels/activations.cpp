#include "kernels/activations.h"

#include <atomic>
#include <stdexcept>

namespace expertide {
namespace {

std::atomic<int> bits{16};

// What the first plane leaves over, rounded once more. A block that is not finite has a scale of NaN, and so has its rest.
void quantize_rest(const IsaTable& isa, const float* x, int64_t block, int64_t cols, const uint8_t* first, uint8_t* out) {
  thread_local std::vector<float> rest;
  rest.resize(static_cast<size_t>(cols));
  const QuantizedRow row = quantized_row(first, block, cols);
  for (int64_t b = 0; b < cols / block; ++b) {
    for (int64_t i = b * block; i < (b + 1) * block; ++i) {
      rest[static_cast<size_t>(i)] = x[i] - row.scale[b] * static_cast<float>(row.q[i]);
    }
  }
  isa.quantize(rest.data(), block, cols, out);
}

}  // namespace

uint8_t* AlignedBytes::at_least(size_t nbytes) {
  constexpr size_t kAlignment = 64;
  if (bytes_.size() < nbytes + kAlignment) bytes_.resize(nbytes + kAlignment);
  const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
  return bytes_.data() + (kAlignment - address % kAlignment) % kAlignment;
}

int activation_bits() { return bits.load(std::memory_order_relaxed); }

void set_activation_bits(int wanted) {
  if (wanted != 8 && wanted != 16) throw std::invalid_argument("activations have 8 or 16 bits");
  bits.store(wanted, std::memory_order_relaxed);
}

const void* const* ActivationRows::prepare(ThreadPool& pool, const IsaTable& isa, Activation form, const float* x,
                                           int64_t num_rows, int64_t cols, int64_t num_heads) {
  const int64_t block = block_of(form);
  const bool is_float = block == 0;
  const int64_t plane_bytes = is_float ? 0 : quantized_layout(block, cols).nbytes;
  const bool has_planes = activation_bits() == 16;
  const int64_t row_bytes = has_planes ? 2 * plane_bytes : plane_bytes;
  uint8_t* quantized = quantized_.at_least(static_cast<size_t>(num_rows * row_bytes));
  if (!is_float) {
    auto quantize = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        uint8_t* row = quantized + i * row_bytes;
        isa.quantize(x + i * cols, block, cols, row);
        if (has_planes) quantize_rest(isa, x + i * cols, block, cols, row, row + plane_bytes);
      }
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
