#include "kernels/attention_tiles.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernels/dispatch.h"

namespace expertide {
namespace {

// Query rows (token, head) of one key/value head up to which the tiles are the tasks; with more, the rows are. 7 tokens of
// 16 heads ran 1.6 times slower tile by tile: their partial results leave the core's cache.
constexpr int64_t kRowsByTile = 64;
// Packed tiles that wait in memory at the same time, and partial results: these are written once and read once, so they
// should not leave the core's cache.
constexpr int64_t kRoundBytes = 4 << 20;
constexpr int64_t kPartialBytes = 768 << 10;
// Row groups of one task where tiles are shared: a packed tile is read once per task.
constexpr int64_t kMaxGroupsPerTask = 8;

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

int64_t tile_bytes(const AttentionWidths& w) {
  return round_up(kKeyTile * (w.score_width + w.value_padded) * 2 + w.num_blocks * kKeyTile * 4, 64);
}

int64_t tile_rows_bytes(const AttentionWidths& w) { return kKeyTile * w.width * 2; }

// One row's partial result with its largest score and its total, in floats.
int64_t partial_floats(const AttentionWidths& w) { return round_up(w.value_padded + 2, kPadding); }

KeyTile tile_at(const AttentionWidths& w, unsigned char* memory, int16_t* rows) {
  KeyTile tile;
  tile.keys = reinterpret_cast<int16_t*>(memory);
  tile.values = tile.keys + kKeyTile * w.score_width;
  tile.scales = reinterpret_cast<float*>(tile.values + kKeyTile * w.value_padded);
  tile.rows = rows;
  return tile;
}

// A worker's own memory.
struct WorkerScratch {
  VectorBuffer tile, rows, partials;
};

WorkerScratch& worker_scratch() {
  thread_local WorkerScratch scratch;
  return scratch;
}

// The caller's memory; one call at a time per thread.
struct CallScratch {
  VectorBuffer query_values, query_scales, tiles, partials, highest, total;
};

CallScratch& call_scratch() {
  thread_local CallScratch scratch;
  return scratch;
}

const void* advanced(const void* base, int64_t values, bool is_half) {
  return static_cast<const unsigned char*>(base) + values * (is_half ? 2 : 4);
}

// One call of attend_in_tiles.
//
// A row is a (token, query head). The rows of one key/value head are numbered token by token and stand in groups of four
// that no other head's rows enter. A pair is one tile of one key/value head, numbered head by head; a round is the pairs
// that are in memory together.
class TileLoop {
 public:
  TileLoop(ThreadPool& pool, const TiledAttention& call)
      : pool_(pool),
        isa_(active_attention()),
        call_(call),
        widths_(call.widths),
        heads_per_kv_(call.num_heads / call.num_kv_heads),
        rows_per_kv_(call.num_tokens * heads_per_kv_),
        groups_per_kv_((rows_per_kv_ + kRowGroup - 1) / kRowGroup),
        num_rows_(call.num_tokens * call.num_heads),
        num_keys_(call.first_position + call.num_tokens),
        num_tiles_((num_keys_ + kKeyTile - 1) / kKeyTile),
        num_pairs_(num_tiles_ * call.num_kv_heads),
        scratch_(call_scratch()),
        highest_(scratch_.highest.get<float>(num_rows_)),
        total_(scratch_.total.get<float>(num_rows_)) {}

  void run() {
    pack_queries();
    // From here on the queries are not read any more: out may be the same memory.
    if (rows_per_kv_ <= kRowsByTile) {
      run_by_tile();
    } else {
      run_by_row();
    }
    pool_.parallel_for(num_rows_, [&](int64_t begin, int64_t end) {
      for (int64_t place = begin; place < end; ++place) {
        isa_.divide(widths_.value_dim, sum_at(place), call_.out + place * widths_.value_dim);
      }
    });
  }

 private:
  void pack_queries() {
    const int64_t num_groups = groups_per_kv_ * call_.num_kv_heads;
    query_values_ = scratch_.query_values.get<int16_t>(num_groups * kRowGroup * widths_.score_width);
    query_scales_ = scratch_.query_scales.get<float>(num_groups * kRowGroup * score_blocks());
    pool_.parallel_for(num_groups, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        const float* value_part[kRowGroup] = {};
        const float* key_part[kRowGroup] = {};
        for (int64_t r = 0; r < kRowGroup; ++r) {
          const int64_t row = group % groups_per_kv_ * kRowGroup + r;
          if (row >= rows_per_kv_) break;
          const int64_t place = place_of(group / groups_per_kv_, row);
          if (call_.q_value != nullptr) value_part[r] = call_.q_value + place * widths_.value_dim;
          key_part[r] = call_.q_key + place * widths_.key_dim;
        }
        isa_.pack_queries(widths_, value_part, key_part, call_.scale,
                          query_values_ + group * kRowGroup * widths_.score_width,
                          query_scales_ + group * kRowGroup * score_blocks());
      }
    });
  }

  // Few rows: each task packs a tile and serves every row with it; partial results are merged afterwards.
  void run_by_tile() {
    const int64_t floats = partial_floats(widths_);
    const int64_t round = std::max<int64_t>(2 * pool_.num_threads(), kPartialBytes / (rows_per_kv_ * floats * 4));
    float* partials = scratch_.partials.get<float>(std::min(round, num_pairs_) * rows_per_kv_ * floats);
    const auto partial_of = [&](int64_t slot, int64_t row) { return partials + (slot * rows_per_kv_ + row) * floats; };
    for (int64_t first = 0; first < num_pairs_; first += round) {
      const int64_t count = std::min(round, num_pairs_ - first);
      pool_.parallel_for(count, 1, [&](int64_t begin, int64_t end) {
        WorkerScratch& own = worker_scratch();
        const KeyTile tile = tile_at(widths_, own.tile.get<unsigned char>(tile_bytes(widths_)),
                                     own.rows.get<int16_t>(kKeyTile * widths_.width));
        for (int64_t i = begin; i < end; ++i) {
          pack(first + i, tile);
          attend_all(first + i, tile, [&](int64_t row) { return partial_of(i, row); });
        }
      });
      const int64_t first_head = first / num_tiles_;
      const int64_t num_heads = (first + count - 1) / num_tiles_ - first_head + 1;
      pool_.parallel_for(num_heads * rows_per_kv_, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t head = first_head + i / rows_per_kv_;
          const int64_t row = i % rows_per_kv_;
          const int64_t last = std::min(first + count, (head + 1) * num_tiles_);
          for (int64_t pair = std::max(first, head * num_tiles_); pair < last; ++pair) {
            const int64_t tile = pair - head * num_tiles_;
            if (visible_keys(row, tile) == 0) break;
            float* sums = partial_of(pair - first, row);
            add(place_of(head, row), tile, {sums, sums[widths_.value_padded], sums[widths_.value_padded + 1]});
          }
        }
      });
    }
  }

  // A tile's partial results for all rows of its head.
  template <class Place>
  void attend_all(int64_t pair, const KeyTile& tile, Place&& place) const {
    for (int64_t group = 0; group < groups_per_kv_; ++group) {
      Partial found[kRowGroup] = {};
      int64_t visible[kRowGroup];
      for (int64_t r = 0; r < kRowGroup; ++r) {
        const int64_t row = group * kRowGroup + r;
        visible[r] = visible_keys(row, pair % num_tiles_);
        if (visible[r] != 0) found[r].sums = place(row);
      }
      isa_.attend(widths_, tile, queries(pair / num_tiles_, group), visible, found);
      for (int64_t r = 0; r < kRowGroup; ++r) {
        if (visible[r] == 0) continue;
        found[r].sums[widths_.value_padded] = found[r].highest;
        found[r].sums[widths_.value_padded + 1] = found[r].total;
      }
    }
  }

  // Many rows: tiles are packed once for all, then each task takes its rows through them.
  void run_by_row() {
    const int64_t round = std::max<int64_t>(2 * pool_.num_threads(), kRoundBytes / tile_bytes(widths_));
    unsigned char* packed = scratch_.tiles.get<unsigned char>(std::min(round, num_pairs_) * tile_bytes(widths_));
    for (int64_t first = 0; first < num_pairs_; first += round) {
      const int64_t count = std::min(round, num_pairs_ - first);
      pool_.parallel_for(count, 1, [&](int64_t begin, int64_t end) {
        int16_t* rows = worker_scratch().rows.get<int16_t>(kKeyTile * widths_.width);
        for (int64_t i = begin; i < end; ++i) pack(first + i, tile_at(widths_, packed + i * tile_bytes(widths_), rows));
      });
      const int64_t first_head = first / num_tiles_;
      const int64_t num_heads = (first + count - 1) / num_tiles_ - first_head + 1;
      const int64_t share = groups_per_kv_ * num_heads / (4 * pool_.num_threads());
      const int64_t per_task = std::clamp<int64_t>(share, 1, kMaxGroupsPerTask);
      const int64_t num_tasks = (groups_per_kv_ + per_task - 1) / per_task * num_heads;
      pool_.parallel_for(num_tasks, 1, [&](int64_t begin, int64_t end) {
        // Late rows see more keys: the longest tasks first, so that no thread is left with one at the end.
        for (int64_t task = num_tasks - end; task < num_tasks - begin; ++task) {
          const int64_t head = first_head + task % num_heads;
          const int64_t group = task / num_heads * per_task;
          const int64_t first_pair = std::max(first, head * num_tiles_);
          const int64_t end_pair = std::min(first + count, (head + 1) * num_tiles_);
          attend_groups(head, group, std::min(group + per_task, groups_per_kv_), first_pair, end_pair,
                        packed + (first_pair - first) * tile_bytes(widths_));
        }
      });
    }
  }

  void attend_groups(int64_t head, int64_t begin, int64_t end, int64_t first_pair, int64_t end_pair,
                     unsigned char* packed) {
    float* sums = worker_scratch().partials.get<float>(kRowGroup * widths_.value_padded);
    for (int64_t pair = first_pair; pair < end_pair; ++pair, packed += tile_bytes(widths_)) {
      const KeyTile tile = tile_at(widths_, packed, nullptr);
      const int64_t tile_index = pair - head * num_tiles_;
      for (int64_t group = begin; group < end; ++group) {
        Partial found[kRowGroup] = {};
        int64_t visible[kRowGroup];
        for (int64_t r = 0; r < kRowGroup; ++r) {
          visible[r] = visible_keys(group * kRowGroup + r, tile_index);
          found[r].sums = sums + r * widths_.value_padded;
        }
        isa_.attend(widths_, tile, queries(head, group), visible, found);
        for (int64_t r = 0; r < kRowGroup; ++r) {
          if (visible[r] != 0) add(place_of(head, group * kRowGroup + r), tile_index, found[r]);
        }
      }
    }
  }

  void pack(int64_t pair, const KeyTile& tile) const {
    const int64_t head = pair / num_tiles_;
    const int64_t first_key = pair % num_tiles_ * kKeyTile;
    KeyValueRows rows = call_.rows;
    rows.value = advanced(rows.value, head * call_.value_head_stride, rows.is_half);
    rows.key = advanced(rows.key, head * call_.key_head_stride, rows.is_half);
    isa_.pack_tile(widths_, rows, first_key, std::min(kKeyTile, num_keys_ - first_key), tile);
  }

  // Keys of a tile that a row may see; rows beyond the last see none.
  int64_t visible_keys(int64_t row, int64_t tile_index) const {
    if (row >= rows_per_kv_) return 0;
    const int64_t position = call_.first_position + row / heads_per_kv_;
    return std::clamp<int64_t>(position + 1 - tile_index * kKeyTile, 0, kKeyTile);
  }

  // Where a row of a key/value head stands in [T, Q].
  int64_t place_of(int64_t kv_head, int64_t row) const {
    return row / heads_per_kv_ * call_.num_heads + kv_head * heads_per_kv_ + row % heads_per_kv_;
  }

  QueryGroup queries(int64_t kv_head, int64_t group) const {
    const int64_t first_row = (kv_head * groups_per_kv_ + group) * kRowGroup;
    return {query_values_ + first_row * widths_.score_width, query_scales_ + first_row * score_blocks()};
  }

  int64_t score_blocks() const { return widths_.num_blocks - widths_.score_block; }

  Partial sum_at(int64_t place) const { return {call_.out + place * widths_.value_dim, highest_[place], total_[place]}; }

  void add(int64_t place, int64_t tile_index, const Partial& part) const {
    Partial sum = sum_at(place);
    isa_.merge(widths_.value_dim, part, tile_index == 0, &sum);
    highest_[place] = sum.highest;
    total_[place] = sum.total;
  }

  ThreadPool& pool_;
  const AttentionTable& isa_;
  const TiledAttention& call_;  // its `out` holds the running sums, divided at the end
  const AttentionWidths widths_;
  const int64_t heads_per_kv_;
  const int64_t rows_per_kv_;
  const int64_t groups_per_kv_;
  const int64_t num_rows_;
  const int64_t num_keys_;
  const int64_t num_tiles_;
  const int64_t num_pairs_;
  CallScratch& scratch_;
  float* const highest_;
  float* const total_;
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

AttentionWidths attention_widths(int64_t value_dim, int64_t key_dim, bool scores_over_value) {
  AttentionWidths widths;
  widths.value_dim = value_dim;
  widths.key_dim = key_dim;
  widths.value_padded = round_up(value_dim, kPadding);
  widths.width = widths.value_padded + round_up(key_dim, kPadding);
  widths.value_blocks = (value_dim + kBlockValues - 1) / kBlockValues;
  widths.key_block = scores_over_value ? kBlockValues : kHeadKeyBlock;
  widths.num_blocks = widths.value_blocks + (key_dim + widths.key_block - 1) / widths.key_block;
  widths.score_column = scores_over_value ? 0 : widths.value_padded;
  widths.score_block = scores_over_value ? 0 : widths.value_blocks;
  widths.score_width = widths.width - widths.score_column;
  return widths;
}

void attend_in_tiles(ThreadPool& pool, const TiledAttention& call) {
  if (call.num_tokens <= 0) return;
  if (call.first_position < 0) throw std::invalid_argument("a position below 0");
  TileLoop(pool, call).run();
}

int64_t tokens_at_once(int64_t num_heads, int64_t max_tokens, int64_t max_rows) {
  return std::max<int64_t>(1, std::min(max_tokens, max_rows / num_heads));
}

int64_t tiles_workspace_bytes(const AttentionWidths& w, int64_t num_heads, int64_t num_kv_heads, int64_t num_tokens,
                              int num_threads) {
  const int64_t rows = num_tokens * num_heads;
  const int64_t score_blocks = w.num_blocks - w.score_block;
  const int64_t queries = (rows + kRowGroup * num_kv_heads) * (w.score_width * 2 + score_blocks * 4);
  const int64_t partial = partial_floats(w) * 4;
  const int64_t by_tile = std::max(kPartialBytes, 2 * num_threads * std::min(rows / num_kv_heads, kRowsByTile) * partial);
  const int64_t by_row = std::max(kRoundBytes, 2 * num_threads * tile_bytes(w));
  const int64_t workers = num_threads * (tile_bytes(w) + tile_rows_bytes(w) + kRowGroup * partial);
  return rows * 2 * 4 + queries + by_tile + by_row + workers;
}

}  // namespace expertide
