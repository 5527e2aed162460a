#include "kernels/row_product.h"

#include <algorithm>
#include <vector>

#include "kernels/activations.h"

namespace expertide {
namespace {

uint8_t* row_scratch(int64_t cols) {
  thread_local AlignedBytes scratch;
  return scratch.at_least(static_cast<size_t>(scratch_bytes(cols)));
}

// The second plane's places and results of one tile.
struct PlaneScratch {
  std::vector<const void*> x;
  std::vector<float*> y;
  std::vector<float> rest;
};

// Both planes of a token are two tokens to the kernel; their products are added at the end.
void multiply_planes(const TypeKernels& kernels, DotArgs args, int64_t begin) {
  thread_local PlaneScratch scratch;
  const auto num_tokens = static_cast<size_t>(args.num_tokens);
  const auto num_rows = static_cast<size_t>(args.num_rows);
  const int64_t plane_bytes = quantized_layout(block_of(kernels.activation), args.cols).nbytes;
  scratch.x.resize(2 * num_tokens);
  scratch.y.resize(2 * num_tokens);
  if (scratch.rest.size() < num_tokens * num_rows) scratch.rest.resize(num_tokens * num_rows);
  for (size_t t = 0; t < num_tokens; ++t) {
    scratch.x[t] = args.x[t];
    scratch.x[num_tokens + t] = static_cast<const uint8_t*>(args.x[t]) + plane_bytes;
    scratch.y[t] = args.y[t] + begin;
    scratch.y[num_tokens + t] = scratch.rest.data() + t * num_rows;
  }
  args.x = scratch.x.data();
  args.y = scratch.y.data();
  args.num_tokens *= 2;
  args.first_row = 0;
  kernels.dot(args);
  for (size_t t = 0; t < num_tokens; ++t) {
    float* sum = scratch.y[t];
    const float* rest = scratch.y[num_tokens + t];
    for (size_t r = 0; r < num_rows; ++r) sum[r] += rest[r];
  }
}

}  // namespace

void multiply_rows(const TypeKernels& kernels, const Matrix& w, int64_t begin, int64_t count, const void* const* x,
                   int64_t num_tokens, float* const* y) {
  const bool has_planes = kernels.activation != Activation::kFloat32 && activation_bits() == 16;
  const int64_t tile = token_tile(kernels.activation) / (has_planes ? 2 : 1);
  DotArgs args = {};
  args.row_bytes = w.cols / kernels.block_size * kernels.block_bytes;
  args.rows = w.data + begin * args.row_bytes;
  args.num_rows = count;
  args.cols = w.cols;
  args.first_row = begin;
  args.scratch = row_scratch(w.cols);
  for (int64_t t = 0; t < num_tokens; t += tile) {
    args.x = x + t;
    args.num_tokens = std::min(tile, num_tokens - t);
    args.y = y + t;
    if (has_planes) {
      multiply_planes(kernels, args, begin);
    } else {
      kernels.dot(args);
    }
  }
}

}  // namespace expertide
