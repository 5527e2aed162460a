// Some rows of a matrix times all tokens of a step, on the calling thread: tiles of tokens, planes of activations.
#pragma once

#include <cstdint>

#include "kernels/isa_table.h"

namespace expertide {

// Tokens that share one unpacking of a row. 64 rows of 2,048 floats are 512 KiB, 128 of int8 in two planes as much: they
// stay in a core's own cache. Larger tiles were not faster (docs/experiments.md).
constexpr int64_t token_tile(Activation form) { return form == Activation::kFloat32 ? 64 : 128; }

// y[t][begin + r] = w[begin + r] · x[t] for r < count and t < num_tokens. x are pointers as ActivationRows::prepare gives
// them. The value does not depend on count or num_tokens.
void multiply_rows(const TypeKernels& kernels, const Matrix& w, int64_t begin, int64_t count, const void* const* x,
                   int64_t num_tokens, float* const* y);

}  // namespace expertide
