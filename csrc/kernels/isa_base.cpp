// The portable baseline: what any 64-bit machine of the build's architecture can run.
#include <stdint.h>
#include <string.h>

#include "kernels/isa_table.h"

#define EXPERTIDE_TABLE kBaseTable
#define EXPERTIDE_ISA_NAME "base"
#define EXPERTIDE_VECTOR_FLOATS 4
// Eight accumulators a row: a second row would not fit into sixteen registers.
#define EXPERTIDE_ROWS_AT_ONCE 1

#include "kernels/decode_rows.inc"
#include "kernels/vector_math.inc"
#include "kernels/float_ops.inc"
#include "kernels/quantize.inc"
#include "kernels/packed_types.inc"
#include "kernels/packed_dot_portable.inc"

#include "kernels/isa_table.inc"
