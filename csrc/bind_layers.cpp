// Python's view of whole layer halves.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <optional>
#include <tuple>

#include "bind_types.h"

namespace nb = nanobind;
using namespace nb::literals;

void bind_layers(nb::module_& m) {
  using namespace expertide;
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
          [](const LatentAttentionLayer& self, ThreadPool& pool, Address x, int64_t num_tokens, const LatentPlaces& cache,
             int64_t first_position, Address cos, Address sin) {
            nb::gil_scoped_release release;
            self.run(pool, pointer<float>(x), num_tokens, cache_rows(cache), first_position, pointer<const float>(cos),
                     pointer<const float>(sin));
          },
          "pool"_a, "x"_a, "num_tokens"_a, "cache"_a, "first_position"_a, "cos"_a, "sin"_a);

  // norm, q and k norms, biases of q, k, v; 0 where the layer has none
  using Vectors = std::tuple<Address, Address, Address, Address, Address, Address>;
  using GroupedMatrices = std::tuple<MatrixSpec, MatrixSpec, MatrixSpec, MatrixSpec>;  // q, k, v, output
  nb::class_<GroupedAttentionLayer>(m, "GroupedAttentionLayer")
      .def(
          "__init__",
          [](GroupedAttentionLayer* self, const GroupedSizes& sizes, const GroupedMatrices& matrices,
             const Vectors& vectors, bool norms_whole_rows, float norm_eps, float qk_norm_eps, float scale,
             bool halves) {
            const auto [norm, q_norm, k_norm, q_bias, k_bias, v_bias] =
                std::apply([](auto... at) { return std::array{pointer<const float>(at)...}; }, vectors);
            const GroupedAttentionWeights weights = {norm,
                                                     matrix(std::get<0>(matrices)),
                                                     matrix(std::get<1>(matrices)),
                                                     matrix(std::get<2>(matrices)),
                                                     matrix(std::get<3>(matrices)),
                                                     q_bias,
                                                     k_bias,
                                                     v_bias,
                                                     q_norm,
                                                     k_norm,
                                                     norms_whole_rows};
            new (self) GroupedAttentionLayer(grouped_shape(sizes), weights, norm_eps, qk_norm_eps, scale,
                                             rope_pairs(halves));
          },
          "sizes"_a, "matrices"_a, "vectors"_a, "norms_whole_rows"_a, "norm_eps"_a, "qk_norm_eps"_a, "scale"_a,
          "halves"_a)
      .def(
          "run",
          [](const GroupedAttentionLayer& self, ThreadPool& pool, Address x, int64_t num_tokens,
             const HeadPlaces& cache, int64_t first_position, Address cos, Address sin) {
            nb::gil_scoped_release release;
            self.run(pool, pointer<float>(x), num_tokens, head_rows(cache), first_position, pointer<const float>(cos),
                     pointer<const float>(sin));
          },
          "pool"_a, "x"_a, "num_tokens"_a, "cache"_a, "first_position"_a, "cos"_a, "sin"_a);

  // gate, up, down; the vector of the result's share, or 0
  using Mlp = std::tuple<MatrixSpec, MatrixSpec, MatrixSpec, Address>;
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
              own_mlp = SwigluWeights{matrix(std::get<0>(*mlp)), matrix(std::get<1>(*mlp)), matrix(std::get<2>(*mlp)),
                                      pointer<const float>(std::get<3>(*mlp))};
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
          "multiply",
          [](const FeedForwardLayer& self, ThreadPool& pool, Address normed, int64_t num_tokens, Address y) {
            self.multiply(pool, pointer<const float>(normed), num_tokens, pointer<float>(y));
          },
          "pool"_a, "normed"_a, "num_tokens"_a, "y"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "end",
          [](const FeedForwardLayer& self, ThreadPool& pool, Address normed, Address routed, Address own,
             int64_t num_tokens, Address x) {
            return self.end(pool, pointer<const float>(normed), pointer<const float>(routed), pointer<const float>(own),
                            num_tokens, pointer<float>(x));
          },
          "pool"_a, "normed"_a, "routed"_a, "own"_a, "num_tokens"_a, "x"_a, nb::call_guard<nb::gil_scoped_release>());
}
