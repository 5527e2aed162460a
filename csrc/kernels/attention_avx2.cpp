// Attention in AVX2. Built with -mavx2; nothing in it may have a name that the linker shares with another unit.
#if defined(__AVX2__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/attention_table.h"

#define EXPERTIDE_ATTENTION_TABLE kAvx2Attention
#define EXPERTIDE_ISA_NAME "avx2"
#define EXPERTIDE_VECTOR_FLOATS 8

#include "kernels/vector_math.inc"

#include "kernels/attention_ops.inc"
#endif
