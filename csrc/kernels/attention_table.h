// The inner loops of latent attention, once per instruction set; every table computes the same bits.
//
// Products run on integers. A row (query, cached key, or the softmax weights of a tile) becomes 16-bit integers with one
// float scale per block of 128 values; products of two such rows are exact in 32-bit integers in any order, so that no
// vector width, thread count or chunk size shows. Relative to a block's largest value the rounding is 1/8,190 (keys,
// queries) and 1/65,534 (weights): about what the float16 of the cache loses already.
//
//     tile      64 keys at absolute positions 64 i … 64 i + 63
//     row       [ latent, padded to 32 | rope, padded to 32 ]           width values
//     block     128 values of the latent or of the rope part            one scale
//     group     4 query rows, interleaved by pairs of values: [width / 2][4 rows][2]
//
//     keys      [4][width / 2][16 keys][2 values]       scores: lanes are keys
//     values    [latent / 16][32 pairs of keys][16 values][2 keys]      weighted sums: lanes are values
//
// Why the integers cannot overflow: 128 * 4095 * 4095 < 2^31 and 16 * 32767 * 4095 < 2^31 (16 keys are summed before the
// sum becomes a float).
#pragma once

#include <stdint.h>

namespace expertide {

constexpr int64_t kKeyTile = 64;
constexpr int64_t kRowGroup = 4;
constexpr int64_t kBlockValues = 128;
constexpr int64_t kPadding = 32;

// Cached rows of one layer; row s belongs to position s.
struct LatentRows {
  const void* latent;
  const void* rope;
  int64_t latent_stride;  // values from one row to the next
  int64_t rope_stride;
  bool is_half;  // float16, else float32
};

// Sizes that follow from the ranks. Plain numbers: kernels of every unit read it.
struct AttentionWidths {
  int64_t rank;           // L
  int64_t rope_dim;       // C
  int64_t latent_padded;  // both rounded up to kPadding
  int64_t width;          // latent_padded + padded rope
  int64_t latent_blocks;
  int64_t num_blocks;     // latent blocks, then rope blocks
};

// One packed tile. `rows` is scratch of pack_tile.
struct KeyTile {
  int16_t* keys;    // [4][width / 2][16][2]
  int16_t* values;  // [latent_padded / 16][32][16][2]
  float* scales;    // [num_blocks][64]
  int16_t* rows;    // [64][width]
};

// Four packed query rows.
struct QueryGroup {
  const int16_t* values;  // [width / 2][4][2]
  const float* scales;    // [num_blocks][4], softmax scale included
};

// What one tile gives one row: the largest score, Σ e^(score - largest) and Σ e^(score - largest) * latent.
struct Partial {
  float* sums;   // [latent_padded]
  float highest;
  float total;
};

struct AttentionTable {
  const char* name;
  // Packs four rows; `latent[r]` and `rope[r]` are float rows or null for an absent row.
  void (*pack_queries)(const AttentionWidths& widths, const float* const* latent, const float* const* rope, float scale,
                       int16_t* values, float* scales);
  // Packs rows first_key … first_key + num_keys - 1, 1 <= num_keys <= 64; absent keys become zeros.
  void (*pack_tile)(const AttentionWidths& widths, const LatentRows& rows, int64_t first_key, int64_t num_keys,
                    const KeyTile& tile);
  // Row r sees the first visible[r] keys of the tile; rows with 0 are left alone.
  void (*attend)(const AttentionWidths& widths, const KeyTile& tile, const QueryGroup& queries, const int64_t* visible,
                 Partial* partials);
  // Adds a tile to what the tiles before it gave; the first one is copied. sums are [rank].
  void (*merge)(int64_t rank, const Partial& tile, bool is_first, Partial* sum);
  // out[i] = sums[i] / total.
  void (*divide)(int64_t rank, const Partial& sum, float* out);
};

extern const AttentionTable kBaseAttention;
#if defined(__x86_64__) || defined(_M_X64)
extern const AttentionTable kAvx2Attention;
extern const AttentionTable kAvx512Attention;
#elif defined(__aarch64__)
extern const AttentionTable kNeonAttention;
#endif

}  // namespace expertide
