// NEON with the dot-product instructions (Cortex-A75, Neoverse N1 and later). Nothing in it may have a name that the linker
// shares with another unit.
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "kernels/isa_table.h"

#define EXPERTIDE_NEON
#define EXPERTIDE_TABLE kNeonTable
#define EXPERTIDE_ISA_NAME "neon"
#define EXPERTIDE_VECTOR_FLOATS 4
// Sixteen of thirty-two registers are accumulators then.
#define EXPERTIDE_ROWS_AT_ONCE 2

#include "kernels/vector_math.inc"
#include "kernels/decode_rows.inc"
#include "kernels/float_ops.inc"
#include "kernels/quantize.inc"
#include "kernels/packed_types.inc"
#include "kernels/gemv_neon.inc"
#include "kernels/gemm_neon.inc"

#include "kernels/isa_table.inc"
#endif
