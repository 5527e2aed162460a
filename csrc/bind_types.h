// How matrices, attention, routers and layers cross from Python: tuples of addresses and numbers, and what they become.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <tuple>

#include "kernels/attention.h"
#include "kernels/decode_ops.h"
#include "kernels/fused_layers.h"
#include "kernels/grouped_attention.h"

namespace expertide {

using Address = uint64_t;
using HeadMatrix = std::tuple<Address, int, int64_t, bool>;  // address, quant type, bytes from head to head, is_transposed
using MatrixSpec = std::tuple<Address, int, int64_t, int64_t>;    // address, quant type, rows, cols
using Sizes = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;  // heads, nope, rope, value, rank
using LatentPlaces = std::tuple<Address, Address, int64_t, int64_t, bool>;  // latent, rope, their strides, is_half
// keys, values, their strides from row to row, then from head to head, is_half
using HeadPlaces = std::tuple<Address, Address, int64_t, int64_t, int64_t, int64_t, bool>;
using GroupedSizes = std::tuple<int64_t, int64_t, int64_t>;  // heads, kv heads, head size
// num_experts, k, is_sigmoid, num_groups, top_groups, rates_by_two, renormalize, renormalize_eps, scale
using RouterNumbers = std::tuple<int64_t, int64_t, bool, int64_t, int64_t, bool, bool, float, float>;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

inline KeyValueRows latent_rows(const LatentPlaces& rows) {
  return {pointer<const void>(std::get<0>(rows)), pointer<const void>(std::get<1>(rows)), std::get<2>(rows),
          std::get<3>(rows), std::get<4>(rows)};
}

inline LatentCacheRows cache_rows(const LatentPlaces& rows) {
  return {pointer<void>(std::get<0>(rows)), pointer<void>(std::get<1>(rows)), std::get<2>(rows), std::get<3>(rows),
          std::get<4>(rows)};
}

inline RopePairs rope_pairs(bool halves) { return halves ? RopePairs::kHalves : RopePairs::kAdjacent; }

inline HeadRows head_rows(const HeadPlaces& rows) {
  return std::apply(
      [](Address keys, Address values, auto... rest) {
        return HeadRows{pointer<void>(keys), pointer<void>(values), rest...};
      },
      rows);
}

inline Matrix matrix(Address data, int type, int64_t rows, int64_t cols) {
  if (rows < 0) throw std::invalid_argument("a matrix has no negative number of rows");
  return {pointer<const uint8_t>(data), rows, cols, type};
}

inline Matrix matrix(const MatrixSpec& spec) {
  return std::apply([](auto... parts) { return matrix(parts...); }, spec);
}

inline AttentionShape attention_shape(const Sizes& sizes) {
  return std::apply([](auto... values) { return AttentionShape{values...}; }, sizes);
}

inline GroupedShape grouped_shape(const GroupedSizes& sizes) {
  return std::apply([](auto... values) { return GroupedShape{values...}; }, sizes);
}

inline UnfoldingMatrices unfolding(const AttentionShape& s, const HeadMatrix& k_b, const HeadMatrix& v_b) {
  const bool by_key = std::get<3>(k_b);
  const int64_t rows = by_key ? s.nope_dim : s.rank;
  const int64_t cols = by_key ? s.rank : s.nope_dim;
  return {{pointer<const uint8_t>(std::get<0>(k_b)), rows, cols, std::get<1>(k_b)}, std::get<2>(k_b), by_key,
          {pointer<const uint8_t>(std::get<0>(v_b)), s.value_dim, s.rank, std::get<1>(v_b)}, std::get<2>(v_b)};
}

inline RouterSpec router_spec(const RouterNumbers& spec) {
  return std::apply([](auto... values) { return RouterSpec{values...}; }, spec);
}

}  // namespace expertide
