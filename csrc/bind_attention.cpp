// Python's view of attention, of the small ops between products, and of whole layer halves.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>
#include <tuple>

#include "kernels/attention.h"
#include "kernels/decode_ops.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace expertide {
namespace {

using Address = uint64_t;
using HeadMatrix = std::tuple<Address, int, int64_t>;             // address, quant type, bytes from head to head
using CachedRows = std::tuple<Address, Address, int64_t, int64_t, bool>;  // latent, rope, their strides, is_half
// num_experts, k, is_sigmoid, num_groups, top_groups, rates_by_two, renormalize, renormalize_eps, scale
using Router = std::tuple<int64_t, int64_t, bool, int64_t, int64_t, bool, bool, float, float>;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

LatentRows latent_rows(const CachedRows& rows) {
  return {pointer<const void>(std::get<0>(rows)), pointer<const void>(std::get<1>(rows)), std::get<2>(rows),
          std::get<3>(rows), std::get<4>(rows)};
}

RouterSpec router_spec(const Router& spec) {
  return std::apply([](auto... values) { return RouterSpec{values...}; }, spec);
}

}  // namespace
}  // namespace expertide

void bind_attention(nb::module_& m) {
  using namespace expertide;
  m.def(
      "mla_attention",
      [](ThreadPool& pool, const std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>& sizes, const HeadMatrix& k_b,
         const HeadMatrix& v_b, const CachedRows& rows, Address q_nope, Address q_rope, int64_t num_tokens,
         int64_t first_position, float scale, Address out) {
        nb::gil_scoped_release release;
        const auto [heads, nope, rope_dim, value, rank] = sizes;
        const AttentionShape shape = {heads, nope, rope_dim, value, rank};
        const UnfoldingMatrices unfold = {
            {pointer<const uint8_t>(std::get<0>(k_b)), rank, nope, std::get<1>(k_b)}, std::get<2>(k_b),
            {pointer<const uint8_t>(std::get<0>(v_b)), value, rank, std::get<1>(v_b)}, std::get<2>(v_b)};
        mla_attention(pool, shape, unfold, latent_rows(rows), pointer<const float>(q_nope), pointer<const float>(q_rope),
                      num_tokens, first_position, scale, pointer<float>(out));
      },
      "pool"_a, "sizes"_a, "k_b"_a, "v_b"_a, "rows"_a, "q_nope"_a, "q_rope"_a, "num_tokens"_a, "first_position"_a,
      "scale"_a, "out"_a);
  m.def(
      "latent_mean",
      [](ThreadPool& pool, int64_t num_heads, int64_t rank, int64_t rope_dim, const CachedRows& rows, Address qa,
         Address q_rope, int64_t num_tokens, int64_t first_position, float scale, Address out) {
        nb::gil_scoped_release release;
        latent_mean(pool, attention_widths(rank, rope_dim), num_heads, latent_rows(rows), pointer<const float>(qa),
                    pointer<const float>(q_rope), num_tokens, first_position, scale, pointer<float>(out));
      },
      "pool"_a, "num_heads"_a, "rank"_a, "rope_dim"_a, "rows"_a, "qa"_a, "q_rope"_a, "num_tokens"_a, "first_position"_a,
      "scale"_a, "out"_a);
  m.def(
      "attention_workspace_bytes",
      [](int64_t num_heads, int64_t rank, int64_t rope_dim, int64_t num_tokens, int num_threads) {
        return attention_workspace_bytes({num_heads, 1, rope_dim, 1, rank}, num_tokens, num_threads);
      },
      "num_heads"_a, "rank"_a, "rope_dim"_a, "num_tokens"_a, "num_threads"_a);
  m.def(
      "rms_norm",
      [](ThreadPool& pool, Address x, int64_t x_stride, Address weight, float eps, int64_t num_tokens, int64_t cols,
         Address y) {
        rms_norm(pool, pointer<const float>(x), x_stride, pointer<const float>(weight), eps, num_tokens, cols,
                 pointer<float>(y), cols);
      },
      "pool"_a, "x"_a, "x_stride"_a, "weight"_a, "eps"_a, "num_tokens"_a, "cols"_a, "y"_a,
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "rope",
      [](ThreadPool& pool, Address x, int64_t token_stride, int64_t head_stride, Address cos, Address sin,
         int64_t num_tokens, int64_t num_heads, int64_t pairs, Address y) {
        rope(pool, pointer<const float>(x), token_stride, head_stride, pointer<const float>(cos),
             pointer<const float>(sin), num_tokens, num_heads, pairs, pointer<float>(y));
      },
      "pool"_a, "x"_a, "token_stride"_a, "head_stride"_a, "cos"_a, "sin"_a, "num_tokens"_a, "num_heads"_a, "pairs"_a,
      "y"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "route",
      [](ThreadPool& pool, const Router& spec, Address logits, Address bias, int64_t num_tokens, Address ids,
         Address weights) {
        nb::gil_scoped_release release;
        route(pool, router_spec(spec), pointer<const float>(logits), pointer<const float>(bias), num_tokens,
              pointer<int32_t>(ids), pointer<float>(weights));
      },
      "pool"_a, "spec"_a, "logits"_a, "bias"_a, "num_tokens"_a, "ids"_a, "weights"_a);
}
