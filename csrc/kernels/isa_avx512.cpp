// AVX-512 with VNNI (Ice Lake, Zen 4 and later). Nothing in it may have a name that the linker shares with another unit.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
// GCC 12 sees its own placeholder operands of AVX-512 conversions as uninitialised.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/isa_table.h"

#define EXPERTIDE_TABLE kAvx512Table
#define EXPERTIDE_ISA_NAME "avx512"
#define EXPERTIDE_VECTOR_FLOATS 16
#define EXPERTIDE_ROWS_AT_ONCE 4
#define EXPERTIDE_PANEL_ROWS 16
#define EXPERTIDE_FOLD fold_512

#include "kernels/decode_rows.inc"
#include "kernels/vector_math.inc"
#include "kernels/float_ops.inc"
#include "kernels/quantize.inc"
#include "kernels/packed_types.inc"
#include "kernels/gemv_avx2.inc"
#include "kernels/gemv_avx512.inc"
#include "kernels/gemm_avx512.inc"
#include "kernels/fold_avx512.inc"

#include "kernels/isa_table.inc"
#endif
