// AVX2. The only unit built with -mavx2; nothing in it may have a name that the linker shares with another unit.
#if defined(__AVX2__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/isa_table.h"

#define EXPERTIDE_TABLE kAvx2Table
#define EXPERTIDE_ISA_NAME "avx2"
#define EXPERTIDE_VECTOR_FLOATS 8
#define EXPERTIDE_ROWS_AT_ONCE 2

#include "kernels/decode_rows.inc"
#include "kernels/float_ops.inc"
#include "kernels/q4_k_dot_avx2.inc"

#include "kernels/isa_table.inc"
#endif
