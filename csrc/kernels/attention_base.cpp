// Attention for the portable baseline.
#include <stdint.h>
#include <string.h>

#include "kernels/attention_table.h"

#define EXPERTIDE_ATTENTION_TABLE kBaseAttention
#define EXPERTIDE_ISA_NAME "base"
#define EXPERTIDE_VECTOR_FLOATS 4

#include "kernels/vector_math.inc"

#include "kernels/attention_ops.inc"
