// The inner loops of attention, once per instruction set; every table computes the same bits.
//
// A cached row has two parts. In latent attention the value part is the latent and the key part the rotated key; scores
// are taken over both. In grouped-query attention they are a head's value and its key; scores are taken over the key part
// only, and nothing else differs.
//
// Products run on integers. A row (query, cached key, or the softmax weights of a tile) becomes 16-bit integers with one
// float scale per block of 128 values; products of two such rows are exact in 32-bit integers in any order, so that no
// vector width, thread count or chunk size shows. Relative to a block's largest value the rounding is 1/8,190 (keys,
// queries) and 1/65,534 (weights): about what the float16 of the cache loses already. Keys of heads have blocks of 32 and
// 1/16,382: biases make single dimensions of 100 and more there (Qwen2), which would coarsen all 128.
//
//     tile      64 keys at absolute positions 64 i … 64 i + 63
//     row       [ value part, padded to 32 | key part, padded to 32 ]   width values
//     block     128 values of one of the parts, or 32                   one scale
//     scores    from column score_column to the end of the row          score_width values
//     group     4 query rows, interleaved by pairs of values: [score_width / 2][4 rows][2]
//
//     keys      [4][score_width / 2][16 keys][2 values]                 scores: lanes are keys
//     values    [value part / 16][32 pairs of keys][16 values][2 keys]  weighted sums: lanes are values
//
// Why the integers cannot overflow: 128 * 4095 * 4095 < 2^31, 32 * 8191 * 8191 < 2^31, and 16 * 32767 * 4095 < 2^31 (16 keys
// are summed before the sum becomes a float).
#pragma once

#include <stdint.h>

namespace expertide {

constexpr int64_t kKeyTile = 64;
constexpr int64_t kRowGroup = 4;
constexpr int64_t kBlockValues = 128;
constexpr int64_t kHeadKeyBlock = 32;
constexpr int64_t kPadding = 32;

// Cached rows of one layer and key/value head; row s belongs to position s.
struct KeyValueRows {
  const void* value;
  const void* key;
  int64_t value_stride;  // values from one row to the next
  int64_t key_stride;
  bool is_half;  // float16, else float32
};

// Sizes that follow from the widths of the parts. Plain numbers: kernels of every unit read it.
struct AttentionWidths {
  int64_t value_dim;
  int64_t key_dim;
  int64_t value_padded;  // rounded up to kPadding
  int64_t width;         // value_padded + padded key part
  int64_t value_blocks;
  int64_t key_block;     // values of a block of the key part: kBlockValues or kHeadKeyBlock
  int64_t num_blocks;    // those of the value part, then those of the key part
  int64_t score_column;  // where scores begin: 0, or behind the value part
  int64_t score_block;   // the block that begins there
  int64_t score_width;   // width - score_column
};

// One packed tile. `rows` is scratch of pack_tile.
struct KeyTile {
  int16_t* keys;    // [4][score_width / 2][16][2]
  int16_t* values;  // [value_padded / 16][32][16][2]
  float* scales;    // [num_blocks][64]
  int16_t* rows;    // [64][width]
};

// Four packed query rows.
struct QueryGroup {
  const int16_t* values;  // [score_width / 2][4][2]
  const float* scales;    // [num_blocks - score_block][4], softmax scale included
};

// What one tile gives one row: the largest score, Σ e^(score - largest) and Σ e^(score - largest) * value.
struct Partial {
  float* sums;   // [value_padded]
  float highest;
  float total;
};

struct AttentionTable {
  const char* name;
  // Packs four rows; `value_part[r]` and `key_part[r]` are float rows or null for an absent row. The value part is read only
  // where scores are taken over it.
  void (*pack_queries)(const AttentionWidths& widths, const float* const* value_part, const float* const* key_part,
                       float scale, int16_t* values, float* scales);
  // Packs rows first_key … first_key + num_keys - 1, 1 <= num_keys <= 64; absent keys become zeros.
  void (*pack_tile)(const AttentionWidths& widths, const KeyValueRows& rows, int64_t first_key, int64_t num_keys,
                    const KeyTile& tile);
  // Row r sees the first visible[r] keys of the tile; rows with 0 are left alone.
  void (*attend)(const AttentionWidths& widths, const KeyTile& tile, const QueryGroup& queries, const int64_t* visible,
                 Partial* partials);
  // Adds a tile to what the tiles before it gave; the first one is copied. sums are [value_dim].
  void (*merge)(int64_t value_dim, const Partial& tile, bool is_first, Partial* sum);
  // out[i] = sums[i] / total.
  void (*divide)(int64_t value_dim, const Partial& sum, float* out);
};

extern const AttentionTable kBaseAttention;
#if defined(__x86_64__) || defined(_M_X64)
extern const AttentionTable kAvx2Attention;
extern const AttentionTable kAvx512Attention;
#elif defined(__aarch64__)
extern const AttentionTable kNeonAttention;
#endif

}  // namespace expertide
