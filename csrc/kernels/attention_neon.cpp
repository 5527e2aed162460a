// Latent attention in NEON. Nothing in it may have a name that the linker shares with another unit.
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "kernels/attention_table.h"

#define EXPERTIDE_NEON
#define EXPERTIDE_ATTENTION_TABLE kNeonAttention
#define EXPERTIDE_ISA_NAME "neon"
#define EXPERTIDE_VECTOR_FLOATS 4

#include "kernels/vector_math.inc"

#include "kernels/attention_ops.inc"
#endif
