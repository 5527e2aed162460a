// AVX2. Nothing in it may have a name that the linker shares with another unit.
#if defined(__AVX2__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/isa_table.h"

#define EXPERTIDE_TABLE kAvx2Table
#define EXPERTIDE_ISA_NAME "avx2"
#define EXPERTIDE_VECTOR_FLOATS 8
#define EXPERTIDE_ROWS_AT_ONCE 2
#define EXPERTIDE_PANEL_ROWS 8

#include "kernels/decode_rows.inc"
#include "kernels/vector_math.inc"
#include "kernels/float_ops.inc"
#include "kernels/quantize.inc"
#include "kernels/packed_types.inc"
#include "kernels/gemv_avx2.inc"
#include "kernels/gemm_avx2.inc"

#include "kernels/isa_table.inc"
#endif
