#include "kernels/attention.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/linear.h"

namespace expertide {
namespace {

// Query rows (token, head) up to which the tiles are the tasks; with more, the rows are. 7 tokens of 16 heads ran 1.6 times
// slower tile by tile: their partial results leave the core's cache.
constexpr int64_t kRowsByTile = 64;
// Packed tiles that wait in memory at the same time, and partial results: these are written once and read once, so they
// should not leave the core's cache.
constexpr int64_t kRoundBytes = 4 << 20;
constexpr int64_t kPartialBytes = 768 << 10;
// Row groups of one task where tiles are shared: a packed tile is read once per task.
constexpr int64_t kMaxGroupsPerTask = 8;
// Tokens that go through all steps together, so that absorbed queries stay small whatever the chunk is.
constexpr int64_t kTokensAtOnce = 64;
constexpr int64_t kRowsAtOnce = 2048;

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

int64_t tokens_at_once(int64_t num_heads) {
  return std::max<int64_t>(1, std::min(kTokensAtOnce, kRowsAtOnce / num_heads));
}

// Memory aligned for vectors, grown and kept.
class Buffer {
 public:
  template <class T>
  T* get(int64_t count) {
    const auto wanted = static_cast<size_t>(count) * sizeof(T) + 64;
    if (bytes_.size() < wanted) bytes_.resize(wanted);
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    return reinterpret_cast<T*>((address + 63) / 64 * 64);
  }

 private:
  std::vector<unsigned char> bytes_;
};

int64_t tile_bytes(const AttentionWidths& w) {
  return round_up(kKeyTile * (w.width + w.latent_padded) * 2 + w.num_blocks * kKeyTile * 4, 64);
}

int64_t tile_rows_bytes(const AttentionWidths& w) { return kKeyTile * w.width * 2; }

KeyTile tile_at(const AttentionWidths& w, unsigned char* memory, int16_t* rows) {
  KeyTile tile;
  tile.keys = reinterpret_cast<int16_t*>(memory);
  tile.values = tile.keys + kKeyTile * w.width;
  tile.scales = reinterpret_cast<float*>(tile.values + kKeyTile * w.latent_padded);
  tile.rows = rows;
  return tile;
}

// A worker's own memory.
struct WorkerScratch {
  Buffer tile, rows, partials;
};

WorkerScratch& worker_scratch() {
  thread_local WorkerScratch scratch;
  return scratch;
}

// The caller's memory; one call at a time per thread.
struct CallScratch {
  Buffer absorbed, query_values, query_scales, tiles, partials, highest, total;
};

CallScratch& call_scratch() {
  thread_local CallScratch scratch;
  return scratch;
}

// One call of latent_mean.
class LatentMean {
 public:
  LatentMean(ThreadPool& pool, const AttentionWidths& widths, int64_t num_heads, const LatentRows& rows,
             int64_t num_tokens, int64_t first_position, float* out)
      : pool_(pool),
        isa_(active_attention()),
        widths_(widths),
        num_heads_(num_heads),
        rows_(rows),
        first_position_(first_position),
        num_rows_(num_tokens * num_heads),
        num_groups_((num_rows_ + kRowGroup - 1) / kRowGroup),
        num_keys_(first_position + num_tokens),
        num_tiles_((num_keys_ + kKeyTile - 1) / kKeyTile),
        scratch_(call_scratch()),
        highest_(scratch_.highest.get<float>(num_rows_)),
        total_(scratch_.total.get<float>(num_rows_)),
        out_(out) {}

  void run(const float* qa, const float* q_rope, float scale) {
    pack_queries(qa, q_rope, scale);
    // From here on qa is not read any more: out may be the same memory.
    if (num_rows_ <= kRowsByTile) {
      run_by_tile();
    } else {
      run_by_row();
    }
    pool_.parallel_for(num_rows_, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) isa_.divide(widths_.rank, sum_of(row), out_ + row * widths_.rank);
    });
  }

 private:
  void pack_queries(const float* qa, const float* q_rope, float scale) {
    query_values_ = scratch_.query_values.get<int16_t>(num_groups_ * kRowGroup * widths_.width);
    query_scales_ = scratch_.query_scales.get<float>(num_groups_ * kRowGroup * widths_.num_blocks);
    pool_.parallel_for(num_groups_, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        const float* latent[kRowGroup] = {};
        const float* rope[kRowGroup] = {};
        for (int64_t r = 0; r < kRowGroup && group * kRowGroup + r < num_rows_; ++r) {
          latent[r] = qa + (group * kRowGroup + r) * widths_.rank;
          rope[r] = q_rope + (group * kRowGroup + r) * widths_.rope_dim;
        }
        isa_.pack_queries(widths_, latent, rope, scale, query_values_ + group * kRowGroup * widths_.width,
                          query_scales_ + group * kRowGroup * widths_.num_blocks);
      }
    });
  }

  // Few rows: each task packs a tile and serves every row with it; partial results are merged afterwards.
  void run_by_tile() {
    const int64_t partial_floats = round_up(widths_.latent_padded + 2, kPadding);
    const int64_t round = std::max<int64_t>(2 * pool_.num_threads(), kPartialBytes / (num_rows_ * partial_floats * 4));
    float* partials = scratch_.partials.get<float>(std::min(round, num_tiles_) * num_rows_ * partial_floats);
    const auto partial_of = [&](int64_t slot, int64_t row) {
      return partials + (slot * num_rows_ + row) * partial_floats;
    };
    for (int64_t first = 0; first < num_tiles_; first += round) {
      const int64_t count = std::min(round, num_tiles_ - first);
      pool_.parallel_for(count, 1, [&](int64_t begin, int64_t end) {
        WorkerScratch& own = worker_scratch();
        const KeyTile tile =
            tile_at(widths_, own.tile.get<unsigned char>(tile_bytes(widths_)), own.rows.get<int16_t>(kKeyTile * widths_.width));
        for (int64_t i = begin; i < end; ++i) {
          pack(first + i, tile);
          for (int64_t group = 0; group < num_groups_; ++group) {
            Partial found[kRowGroup] = {};
            int64_t visible[kRowGroup];
            for (int64_t r = 0; r < kRowGroup; ++r) {
              const int64_t row = group * kRowGroup + r;
              visible[r] = visible_keys(row, first + i);
              if (visible[r] != 0) found[r].sums = partial_of(i, row);
            }
            isa_.attend(widths_, tile, queries(group), visible, found);
            for (int64_t r = 0; r < kRowGroup; ++r) {
              if (visible[r] == 0) continue;
              found[r].sums[widths_.latent_padded] = found[r].highest;
              found[r].sums[widths_.latent_padded + 1] = found[r].total;
            }
          }
        }
      });
      pool_.parallel_for(num_rows_, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          Partial sum = sum_of(row);
          for (int64_t i = 0; i < count && visible_keys(row, first + i) != 0; ++i) {
            float* sums = partial_of(i, row);
            const Partial part = {sums, sums[widths_.latent_padded], sums[widths_.latent_padded + 1]};
            isa_.merge(widths_.rank, part, first + i == 0, &sum);
          }
          keep(row, sum);
        }
      });
    }
  }

  // Many rows: tiles are packed once for all, then each task takes its rows through them.
  void run_by_row() {
    const int64_t round = std::max<int64_t>(2 * pool_.num_threads(), kRoundBytes / tile_bytes(widths_));
    unsigned char* packed = scratch_.tiles.get<unsigned char>(std::min(round, num_tiles_) * tile_bytes(widths_));
    for (int64_t first = 0; first < num_tiles_; first += round) {
      const int64_t count = std::min(round, num_tiles_ - first);
      pool_.parallel_for(count, 1, [&](int64_t begin, int64_t end) {
        int16_t* rows = worker_scratch().rows.get<int16_t>(kKeyTile * widths_.width);
        for (int64_t i = begin; i < end; ++i) pack(first + i, tile_at(widths_, packed + i * tile_bytes(widths_), rows));
      });
      const int64_t share = num_groups_ / (4 * pool_.num_threads());
      const int64_t per_task = std::clamp<int64_t>(share, 1, kMaxGroupsPerTask);
      const int64_t num_tasks = (num_groups_ + per_task - 1) / per_task;
      pool_.parallel_for(num_tasks, 1, [&](int64_t begin, int64_t end) {
        // Late rows see more keys: the longest tasks first, so that no thread is left with one at the end.
        for (int64_t task = num_tasks - end; task < num_tasks - begin; ++task) {
          const int64_t group = task * per_task;
          attend_groups(group, std::min(group + per_task, num_groups_), first, count, packed);
        }
      });
    }
  }

  void attend_groups(int64_t begin, int64_t end, int64_t first, int64_t count, unsigned char* packed) {
    float* sums = worker_scratch().partials.get<float>(kRowGroup * widths_.latent_padded);
    for (int64_t i = 0; i < count; ++i) {
      const KeyTile tile = tile_at(widths_, packed + i * tile_bytes(widths_), nullptr);
      for (int64_t group = begin; group < end; ++group) {
        Partial found[kRowGroup] = {};
        int64_t visible[kRowGroup];
        for (int64_t r = 0; r < kRowGroup; ++r) {
          visible[r] = visible_keys(group * kRowGroup + r, first + i);
          found[r].sums = sums + r * widths_.latent_padded;
        }
        isa_.attend(widths_, tile, queries(group), visible, found);
        for (int64_t r = 0; r < kRowGroup; ++r) {
          if (visible[r] == 0) continue;
          const int64_t row = group * kRowGroup + r;
          Partial sum = sum_of(row);
          isa_.merge(widths_.rank, found[r], first + i == 0, &sum);
          keep(row, sum);
        }
      }
    }
  }

  void pack(int64_t tile_index, const KeyTile& tile) const {
    const int64_t first_key = tile_index * kKeyTile;
    isa_.pack_tile(widths_, rows_, first_key, std::min(kKeyTile, num_keys_ - first_key), tile);
  }

  // Keys of a tile that a row may see; rows beyond the last see none.
  int64_t visible_keys(int64_t row, int64_t tile_index) const {
    if (row >= num_rows_) return 0;
    const int64_t position = first_position_ + row / num_heads_;
    return std::clamp<int64_t>(position + 1 - tile_index * kKeyTile, 0, kKeyTile);
  }

  QueryGroup queries(int64_t group) const {
    return {query_values_ + group * kRowGroup * widths_.width, query_scales_ + group * kRowGroup * widths_.num_blocks};
  }

  Partial sum_of(int64_t row) const { return {out_ + row * widths_.rank, highest_[row], total_[row]}; }

  void keep(int64_t row, const Partial& sum) const {
    highest_[row] = sum.highest;
    total_[row] = sum.total;
  }

  ThreadPool& pool_;
  const AttentionTable& isa_;
  const AttentionWidths widths_;
  const int64_t num_heads_;
  const LatentRows rows_;
  const int64_t first_position_;
  const int64_t num_rows_;
  const int64_t num_groups_;
  const int64_t num_keys_;
  const int64_t num_tiles_;
  CallScratch& scratch_;
  float* const highest_;
  float* const total_;
  float* const out_;  // the running sums, divided at the end
  int16_t* query_values_ = nullptr;
  float* query_scales_ = nullptr;
};

}  // namespace

const AttentionTable& active_attention() {
#if defined(__x86_64__) || defined(_M_X64)
  for (const AttentionTable* table : {&kAvx512Attention, &kAvx2Attention}) {
    if (std::strcmp(active_isa().name, table->name) == 0) return *table;
  }
#elif defined(__aarch64__)
  if (std::strcmp(active_isa().name, kNeonAttention.name) == 0) return kNeonAttention;
#endif
  return kBaseAttention;
}

AttentionWidths attention_widths(int64_t rank, int64_t rope_dim) {
  AttentionWidths widths;
  widths.rank = rank;
  widths.rope_dim = rope_dim;
  widths.latent_padded = round_up(rank, kPadding);
  widths.width = widths.latent_padded + round_up(rope_dim, kPadding);
  widths.latent_blocks = (rank + kBlockValues - 1) / kBlockValues;
  widths.num_blocks = widths.latent_blocks + (rope_dim + kBlockValues - 1) / kBlockValues;
  return widths;
}

void check_attention(const AttentionShape& shape, const UnfoldingMatrices& unfold) {
  if (shape.num_heads < 1 || shape.rank < 1 || shape.nope_dim < 1 || shape.rope_dim < 1 || shape.value_dim < 1) {
    throw std::invalid_argument("latent attention needs at least one head and one value in every part");
  }
  checked_row_bytes(unfold.k_b.type, unfold.k_b.cols);
  checked_row_bytes(unfold.v_b.type, unfold.v_b.cols);
  const int64_t k_b_rows = unfold.k_b_is_transposed ? unfold.k_b.cols : unfold.k_b.rows;
  const int64_t k_b_cols = unfold.k_b_is_transposed ? unfold.k_b.rows : unfold.k_b.cols;
  if (k_b_rows != shape.rank || k_b_cols != shape.nope_dim || unfold.v_b.rows != shape.value_dim ||
      unfold.v_b.cols != shape.rank) {
    throw std::invalid_argument("latent attention needs k_b of [Q, L, N] and v_b of [Q, U, L]");
  }
}

void latent_mean(ThreadPool& pool, const AttentionWidths& widths, int64_t num_heads, const LatentRows& rows,
                 const float* qa, const float* q_rope, int64_t num_tokens, int64_t first_position, float scale,
                 float* out) {
  if (num_tokens <= 0) return;
  if (first_position < 0) throw std::invalid_argument("a position below 0");
  LatentMean(pool, widths, num_heads, rows, num_tokens, first_position, out).run(qa, q_rope, scale);
}

void mla_attention(ThreadPool& pool, const AttentionShape& shape, const UnfoldingMatrices& unfold,
                   const LatentRows& rows, const float* q_nope, const float* q_rope, int64_t num_tokens,
                   int64_t first_position, float scale, float* out) {
  check_attention(shape, unfold);
  const AttentionWidths widths = attention_widths(shape.rank, shape.rope_dim);
  const int64_t at_once = tokens_at_once(shape.num_heads);
  const int64_t heads = shape.num_heads;
  for (int64_t begin = 0; begin < num_tokens; begin += at_once) {
    const int64_t count = std::min(at_once, num_tokens - begin);
    float* absorbed = call_scratch().absorbed.get<float>(count * heads * shape.rank);
    const auto product = unfold.k_b_is_transposed ? transposed_head_linear : head_linear;
    product(pool, unfold.k_b, heads, unfold.k_b_stride, q_nope + begin * heads * shape.nope_dim, count, absorbed);
    latent_mean(pool, widths, heads, rows, absorbed, q_rope + begin * heads * shape.rope_dim, count,
                first_position + begin, scale, absorbed);
    head_linear(pool, unfold.v_b, heads, unfold.v_b_stride, absorbed, count, out + begin * heads * shape.value_dim);
  }
}

int64_t attention_workspace_bytes(const AttentionShape& shape, int64_t num_tokens, int num_threads) {
  const AttentionWidths w = attention_widths(shape.rank, shape.rope_dim);
  const int64_t rows = std::min(num_tokens, tokens_at_once(shape.num_heads)) * shape.num_heads;
  const int64_t queries = (rows + kRowGroup) * (w.width * 2 + w.num_blocks * 4);
  const int64_t partial = round_up(w.latent_padded + 2, kPadding) * 4;
  const int64_t by_tile = std::max(kPartialBytes, 2 * num_threads * std::min(rows, kRowsByTile) * partial);
  const int64_t by_row = std::max(kRoundBytes, 2 * num_threads * tile_bytes(w));
  const int64_t workers = num_threads * (tile_bytes(w) + tile_rows_bytes(w) + kRowGroup * partial +
                                         transposed_scratch_bytes(shape.nope_dim));
  return rows * (shape.rank + 2) * 4 + queries + by_tile + by_row + workers;
}

}  // namespace expertide
