// Attention in AVX-512 with VNNI. Nothing in it may have a name that the linker shares with another unit.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/attention_table.h"

#define EXPERTIDE_ATTENTION_TABLE kAvx512Attention
#define EXPERTIDE_ISA_NAME "avx512"
#define EXPERTIDE_VECTOR_FLOATS 16

#include "kernels/vector_math.inc"

#include "kernels/attention_ops.inc"
#endif
