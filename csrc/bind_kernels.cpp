// Python's view of the kernels. Buffers cross as integer addresses; Python keeps them alive and vouches for their sizes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "bind_types.h"
#include "kernels/dispatch.h"
#include "kernels/expert_mlp.h"
#include "kernels/linear.h"
#include "kernels/moe.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace expertide {
namespace {

using Part = std::tuple<int, int64_t, int>;  // part, offset, quant type

PartSpec part_spec(const Part& part) { return {std::get<0>(part), std::get<1>(part), std::get<2>(part)}; }

void check_block(int64_t block, int64_t cols) {
  if (block != 32 && block != kSuperBlock) throw std::invalid_argument("activations have blocks of 32 or 256 values");
  if (cols < 0 || cols % block != 0) throw std::invalid_argument("the row does not divide into its blocks");
}

std::vector<int> native_types() {
  std::vector<int> ids;
  for (int id = 0; id < kNumQuantIds; ++id) {
    if (kBaseTable.types[id].block_size != 0) ids.push_back(id);
  }
  return ids;
}

}  // namespace
}  // namespace expertide

void bind_kernels(nb::module_& m) {
  using namespace expertide;
  m.def("set_isa", &set_isa, "name"_a);
  m.def("isa", [] { return std::string(active_isa().name); });
  m.def("quant_types", &native_types);
  m.def("row_bytes", &checked_row_bytes, "type"_a, "cols"_a);
  m.def("available_isas", &available_isas);
  m.def("set_activation_bits", &set_activation_bits, "bits"_a);
  m.def("activation_bits", &activation_bits);
  m.def(
      "quantized_layout",
      [](int64_t block, int64_t cols) {
        check_block(block, cols);
        const QuantizedLayout layout = quantized_layout(block, cols);
        return std::make_tuple(layout.scale, layout.sums32, layout.sums16, layout.nbytes);
      },
      "block"_a, "cols"_a);

  m.def(
      "linear",
      [](ThreadPool& pool, Address data, int type, int64_t rows, int64_t cols, Address x, int64_t num_tokens, Address y) {
        linear(pool, matrix(data, type, rows, cols), pointer<const float>(x), num_tokens, pointer<float>(y));
      },
      "pool"_a, "data"_a, "type"_a, "rows"_a, "cols"_a, "x"_a, "num_tokens"_a, "y"_a,
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "head_linear",
      [](ThreadPool& pool, Address data, int type, int64_t num_heads, int64_t lead_stride, int64_t rows, int64_t cols,
         Address x, int64_t num_tokens, Address y) {
        head_linear(pool, matrix(data, type, rows, cols), num_heads, lead_stride, pointer<const float>(x), num_tokens,
                    pointer<float>(y));
      },
      "pool"_a, "data"_a, "type"_a, "num_heads"_a, "lead_stride"_a, "rows"_a, "cols"_a, "x"_a, "num_tokens"_a, "y"_a,
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "transposed_head_linear",
      [](ThreadPool& pool, Address data, int type, int64_t num_heads, int64_t lead_stride, int64_t rows, int64_t cols,
         Address x, int64_t num_tokens, Address y) {
        transposed_head_linear(pool, matrix(data, type, rows, cols), num_heads, lead_stride, pointer<const float>(x),
                               num_tokens, pointer<float>(y));
      },
      "pool"_a, "data"_a, "type"_a, "num_heads"_a, "lead_stride"_a, "rows"_a, "cols"_a, "x"_a, "num_tokens"_a, "y"_a,
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "decode_rows",
      [](ThreadPool& pool, Address data, int type, int64_t rows, int64_t cols, Address ids, int64_t num_ids, Address out) {
        decode_rows(pool, matrix(data, type, rows, cols), pointer<const int64_t>(ids), num_ids, pointer<float>(out));
      },
      "pool"_a, "data"_a, "type"_a, "rows"_a, "cols"_a, "ids"_a, "num_ids"_a, "out"_a,
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "expert_mlp",
      [](ThreadPool& pool, const MatrixSpec& gate, const MatrixSpec& up, const MatrixSpec& down, Address x, int64_t n,
         Address y) {
        nb::gil_scoped_release release;
        expert_mlp(pool, matrix(gate), matrix(up), matrix(down), pointer<const float>(x), n, pointer<float>(y));
      },
      "pool"_a, "gate"_a, "up"_a, "down"_a, "x"_a, "n"_a, "y"_a);
  m.def(
      "moe_sum",
      [](ThreadPool& pool, Address results, Address weights, int64_t num_tokens, int64_t k, int64_t hidden, Address y) {
        if (k < 1) throw std::invalid_argument("a sum over no experts");
        moe_sum(pool, pointer<const float>(results), pointer<const float>(weights), num_tokens, k, hidden,
                pointer<float>(y));
      },
      "pool"_a, "results"_a, "weights"_a, "num_tokens"_a, "k"_a, "hidden"_a, "y"_a,
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "silu_mul",
      [](Address gate, Address up, int64_t count, Address out) {
        active_isa().silu_mul(pointer<const float>(gate), pointer<const float>(up), count, pointer<float>(out));
      },
      "gate"_a, "up"_a, "count"_a, "out"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "quantize",
      [](Address x, int64_t block, int64_t cols, Address out) {
        check_block(block, cols);
        active_isa().quantize(pointer<const float>(x), block, cols, pointer<uint8_t>(out));
      },
      "x"_a, "block"_a, "cols"_a, "out"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("moe_workspace_bytes", &moe_workspace_bytes, "hidden"_a, "inner"_a, "num_tokens"_a, "k"_a);

  nb::class_<MoeLayer>(m, "MoeLayer")
      .def(
          "__init__",
          [](MoeLayer* self, std::shared_ptr<Residency> residency, int layer, int64_t hidden, int64_t inner,
             const Part& gate, const Part& up, const Part& down) {
            new (self) MoeLayer(std::move(residency), layer, hidden, inner, part_spec(gate), part_spec(up),
                                part_spec(down));
          },
          "residency"_a, "layer"_a, "hidden"_a, "inner"_a, "gate"_a, "up"_a, "down"_a)
      .def(
          "run",
          [](MoeLayer& self, ThreadPool& pool, Address x, Address ids, Address weights, int64_t num_tokens, int64_t k,
             Address out, bool defer) {
            nb::gil_scoped_release release;
            return self.run(pool, pointer<const float>(x), pointer<const int32_t>(ids), pointer<const float>(weights),
                            num_tokens, k, pointer<float>(out), defer);
          },
          "pool"_a, "x"_a, "ids"_a, "weights"_a, "num_tokens"_a, "k"_a, "out"_a, "defer"_a = false)
      .def(
          "finish",
          [](MoeLayer& self, ThreadPool& pool, const std::vector<int32_t>& experts, bool last, int64_t max_experts) {
            nb::gil_scoped_release release;
            return self.finish(pool, experts, last, max_experts);
          },
          "pool"_a, "experts"_a, "last"_a, "max_experts"_a = 0)
      .def("abort", &MoeLayer::abort, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("num_waiting", &MoeLayer::num_waiting)
      .def_prop_ro("run_stall_ns", &MoeLayer::run_stall_ns)
      .def_prop_ro("is_pending", &MoeLayer::is_pending);
}
