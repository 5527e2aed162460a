// Python's view of attention and of the small ops between products.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include "bind_types.h"

namespace nb = nanobind;
using namespace nb::literals;

void bind_attention(nb::module_& m) {
  using namespace expertide;
  m.def(
      "mla_attention",
      [](ThreadPool& pool, const Sizes& sizes, const HeadMatrix& k_b, const HeadMatrix& v_b, const LatentPlaces& rows,
         Address q_nope, Address q_rope, int64_t num_tokens, int64_t first_position, float scale, Address out) {
        nb::gil_scoped_release release;
        const AttentionShape shape = attention_shape(sizes);
        const UnfoldingMatrices unfold = unfolding(shape, k_b, v_b);
        mla_attention(pool, shape, unfold, latent_rows(rows), pointer<const float>(q_nope), pointer<const float>(q_rope),
                      num_tokens, first_position, scale, pointer<float>(out));
      },
      "pool"_a, "sizes"_a, "k_b"_a, "v_b"_a, "rows"_a, "q_nope"_a, "q_rope"_a, "num_tokens"_a, "first_position"_a,
      "scale"_a, "out"_a);
  m.def(
      "latent_mean",
      [](ThreadPool& pool, int64_t num_heads, int64_t rank, int64_t rope_dim, const LatentPlaces& rows, Address qa,
         Address q_rope, int64_t num_tokens, int64_t first_position, float scale, Address out) {
        nb::gil_scoped_release release;
        latent_mean(pool, latent_widths(rank, rope_dim), num_heads, latent_rows(rows), pointer<const float>(qa),
                    pointer<const float>(q_rope), num_tokens, first_position, scale, pointer<float>(out));
      },
      "pool"_a, "num_heads"_a, "rank"_a, "rope_dim"_a, "rows"_a, "qa"_a, "q_rope"_a, "num_tokens"_a, "first_position"_a,
      "scale"_a, "out"_a);
  m.def(
      "attention_workspace_bytes",
      [](int64_t num_heads, int64_t rank, int64_t nope_dim, int64_t rope_dim, int64_t num_tokens, int num_threads) {
        return attention_workspace_bytes({num_heads, nope_dim, rope_dim, 1, rank}, num_tokens, num_threads);
      },
      "num_heads"_a, "rank"_a, "nope_dim"_a, "rope_dim"_a, "num_tokens"_a, "num_threads"_a);
  m.def(
      "gqa_attention",
      [](ThreadPool& pool, const GroupedSizes& sizes, const HeadPlaces& rows, Address q, int64_t num_tokens,
         int64_t first_position, float scale, Address out) {
        nb::gil_scoped_release release;
        gqa_attention(pool, grouped_shape(sizes), head_rows(rows), pointer<const float>(q), num_tokens, first_position,
                      scale, pointer<float>(out));
      },
      "pool"_a, "sizes"_a, "rows"_a, "q"_a, "num_tokens"_a, "first_position"_a, "scale"_a, "out"_a);
  m.def(
      "gqa_workspace_bytes",
      [](const GroupedSizes& sizes, int64_t num_tokens, int num_threads) {
        return gqa_workspace_bytes(grouped_shape(sizes), num_tokens, num_threads);
      },
      "sizes"_a, "num_tokens"_a, "num_threads"_a);
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
         int64_t num_tokens, int64_t num_heads, int64_t pairs, bool halves, Address y) {
        rope(pool, pointer<const float>(x), token_stride, head_stride, pointer<const float>(cos),
             pointer<const float>(sin), num_tokens, num_heads, pairs, rope_pairs(halves), pointer<float>(y));
      },
      "pool"_a, "x"_a, "token_stride"_a, "head_stride"_a, "cos"_a, "sin"_a, "num_tokens"_a, "num_heads"_a, "pairs"_a,
      "halves"_a, "y"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gate_rows",
      [](ThreadPool& pool, Address y, Address x, Address gate, int64_t num_tokens, int64_t cols, Address out) {
        gate_rows(pool, pointer<const float>(y), pointer<const float>(x), pointer<const float>(gate), num_tokens, cols,
                  pointer<float>(out));
      },
      "pool"_a, "y"_a, "x"_a, "gate"_a, "num_tokens"_a, "cols"_a, "out"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "route",
      [](ThreadPool& pool, const RouterNumbers& spec, Address logits, Address bias, int64_t num_tokens, Address ids,
         Address weights) {
        nb::gil_scoped_release release;
        route(pool, router_spec(spec), pointer<const float>(logits), pointer<const float>(bias), num_tokens,
              pointer<int32_t>(ids), pointer<float>(weights));
      },
      "pool"_a, "spec"_a, "logits"_a, "bias"_a, "num_tokens"_a, "ids"_a, "weights"_a);
}
