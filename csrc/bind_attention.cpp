// Python's view of attention, of the small ops between products, and of whole layer halves.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>

#include "kernels/attention.h"
#include "kernels/decode_ops.h"
#include "kernels/fused_layers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace expertide {
namespace {

using Address = uint64_t;
using HeadMatrix = std::tuple<Address, int, int64_t, bool>;  // address, quant type, bytes from head to head, is_transposed
using MatrixSpec = std::tuple<Address, int, int64_t, int64_t>;    // address, quant type, rows, cols
using Sizes = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;  // heads, nope, rope, value, rank
using CachedRows = std::tuple<Address, Address, int64_t, int64_t, bool>;  // latent, rope, their strides, is_half
// num_experts, k, is_sigmoid, num_groups, top_groups, rates_by_two, renormalize, renormalize_eps, scale
using RouterNumbers = std::tuple<int64_t, int64_t, bool, int64_t, int64_t, bool, bool, float, float>;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

LatentRows latent_rows(const CachedRows& rows) {
  return {pointer<const void>(std::get<0>(rows)), pointer<const void>(std::get<1>(rows)), std::get<2>(rows),
          std::get<3>(rows), std::get<4>(rows)};
}

LatentCacheRows cache_rows(const CachedRows& rows) {
  return {pointer<void>(std::get<0>(rows)), pointer<void>(std::get<1>(rows)), std::get<2>(rows), std::get<3>(rows),
          std::get<4>(rows)};
}

Matrix matrix(const MatrixSpec& spec) {
  return {pointer<const uint8_t>(std::get<0>(spec)), std::get<2>(spec), std::get<3>(spec), std::get<1>(spec)};
}

AttentionShape attention_shape(const Sizes& sizes) {
  return std::apply([](auto... values) { return AttentionShape{values...}; }, sizes);
}

UnfoldingMatrices unfolding(const AttentionShape& s, const HeadMatrix& k_b, const HeadMatrix& v_b) {
  const bool by_key = std::get<3>(k_b);
  const int64_t rows = by_key ? s.nope_dim : s.rank;
  const int64_t cols = by_key ? s.rank : s.nope_dim;
  return {{pointer<const uint8_t>(std::get<0>(k_b)), rows, cols, std::get<1>(k_b)}, std::get<2>(k_b), by_key,
          {pointer<const uint8_t>(std::get<0>(v_b)), s.value_dim, s.rank, std::get<1>(v_b)}, std::get<2>(v_b)};
}

RouterSpec router_spec(const RouterNumbers& spec) {
  return std::apply([](auto... values) { return RouterSpec{values...}; }, spec);
}

}  // namespace
}  // namespace expertide

void bind_attention(nb::module_& m) {
  using namespace expertide;
  m.def(
      "mla_attention",
      [](ThreadPool& pool, const Sizes& sizes, const HeadMatrix& k_b, const HeadMatrix& v_b, const CachedRows& rows,
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
      [](int64_t num_heads, int64_t rank, int64_t nope_dim, int64_t rope_dim, int64_t num_tokens, int num_threads) {
        return attention_workspace_bytes({num_heads, nope_dim, rope_dim, 1, rank}, num_tokens, num_threads);
      },
      "num_heads"_a, "rank"_a, "nope_dim"_a, "rope_dim"_a, "num_tokens"_a, "num_threads"_a);
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
      [](ThreadPool& pool, const RouterNumbers& spec, Address logits, Address bias, int64_t num_tokens, Address ids,
         Address weights) {
        nb::gil_scoped_release release;
        route(pool, router_spec(spec), pointer<const float>(logits), pointer<const float>(bias), num_tokens,
              pointer<int32_t>(ids), pointer<float>(weights));
      },
      "pool"_a, "spec"_a, "logits"_a, "bias"_a, "num_tokens"_a, "ids"_a, "weights"_a);

  nb::class_<LatentAttentionLayer>(m, "LatentAttentionLayer")
      .def(
          "__init__",
          [](LatentAttentionLayer* self, const Sizes& sizes, Address norm, const MatrixSpec& q,
             const std::optional<MatrixSpec>& q_a, Address q_a_norm, const MatrixSpec& kv_a, Address kv_a_norm,
             const HeadMatrix& k_b, const HeadMatrix& v_b, const MatrixSpec& output, float norm_eps, float latent_eps,
             float scale) {
            const AttentionShape shape = attention_shape(sizes);
            LatentAttentionWeights weights = {pointer<const float>(norm),
                                              matrix(q),
                                              std::nullopt,
                                              pointer<const float>(q_a_norm),
                                              matrix(kv_a),
                                              pointer<const float>(kv_a_norm),
                                              unfolding(shape, k_b, v_b),
                                              matrix(output)};
            if (q_a) weights.q_a = matrix(*q_a);
            new (self) LatentAttentionLayer(shape, weights, norm_eps, latent_eps, scale);
          },
          "sizes"_a, "norm"_a, "q"_a, "q_a"_a.none(), "q_a_norm"_a, "kv_a"_a, "kv_a_norm"_a, "k_b"_a, "v_b"_a,
          "output"_a, "norm_eps"_a, "latent_eps"_a, "scale"_a)
      .def(
          "run",
          [](const LatentAttentionLayer& self, ThreadPool& pool, Address x, int64_t num_tokens, const CachedRows& cache,
             int64_t first_position, Address cos, Address sin) {
            nb::gil_scoped_release release;
            self.run(pool, pointer<float>(x), num_tokens, cache_rows(cache), first_position, pointer<const float>(cos),
                     pointer<const float>(sin));
          },
          "pool"_a, "x"_a, "num_tokens"_a, "cache"_a, "first_position"_a, "cos"_a, "sin"_a);

  using Mlp = std::tuple<MatrixSpec, MatrixSpec, MatrixSpec>;
  using RouterArgs = std::tuple<MatrixSpec, Address, RouterNumbers>;  // weights, bias or 0, numbers
  nb::class_<FeedForwardLayer>(m, "FeedForwardLayer")
      .def(
          "__init__",
          [](FeedForwardLayer* self, Address norm, float norm_eps, int64_t hidden,
             const std::optional<RouterArgs>& router, const std::optional<Mlp>& mlp) {
            std::optional<Router> own_router;
            if (router) {
              own_router = Router{matrix(std::get<0>(*router)), pointer<const float>(std::get<1>(*router)),
                                  router_spec(std::get<2>(*router))};
            }
            std::optional<SwigluWeights> own_mlp;
            if (mlp) {
              own_mlp = SwigluWeights{matrix(std::get<0>(*mlp)), matrix(std::get<1>(*mlp)), matrix(std::get<2>(*mlp))};
            }
            new (self) FeedForwardLayer(pointer<const float>(norm), norm_eps, hidden, own_router, own_mlp);
          },
          "norm"_a, "norm_eps"_a, "hidden"_a, "router"_a.none(), "mlp"_a.none())
      .def(
          "begin",
          [](const FeedForwardLayer& self, ThreadPool& pool, Address x, int64_t num_tokens, Address normed, Address ids,
             Address weights) {
            self.begin(pool, pointer<const float>(x), num_tokens, pointer<float>(normed), pointer<int32_t>(ids),
                       pointer<float>(weights));
          },
          "pool"_a, "x"_a, "num_tokens"_a, "normed"_a, "ids"_a, "weights"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "end",
          [](const FeedForwardLayer& self, ThreadPool& pool, Address normed, Address routed, int64_t num_tokens,
             Address x) {
            return self.end(pool, pointer<const float>(normed), pointer<const float>(routed), num_tokens,
                            pointer<float>(x));
          },
          "pool"_a, "normed"_a, "routed"_a, "num_tokens"_a, "x"_a, nb::call_guard<nb::gil_scoped_release>());
}
