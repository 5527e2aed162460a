"""Packed rows times packed activations in whole numbers: what the kernels for few tokens are made of.

Activations are rounded once to 15 bits, in groups of 16 values, and cut into two planes of signed bytes:

    x[i] = scale * v[i],  v = 128 * high + low        scale = largest / 16,256, high in -127..127, low in -64..63

    row of `cols` values   high [cols] int8 | low [cols] int8 | (scale float32, sum of v int32) [cols / 16]

Codes of a packed weight are bytes too, so four products are one instruction (dp4a), whole numbers are exact in any
order, and only one float step is left for 16 values:

    scale_w * scale_x * (sum(code * v) - CENTRE * sum(v)) - minimum * scale_x * sum(v)

Tiles are [R, C, 4] words; see `decode` for chunks and parts.
"""

import triton
import triton.language as tl

from expertide.kernels.gpu.device.decode import (
    IQ4_HIGH,
    IQ4_LOW,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    MXFP4_HIGH,
    MXFP4_LOW,
    Q2_K,
    Q3_K,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    first_value,
    scale_and_minimum,
)


@triton.jit
def pack_kernel(x_ptr, y_ptr, cols, GROUPS: tl.constexpr):
    """Rows of float32 to rows as drawn above; axis 0: GROUPS groups, axis 1: row. cols is a multiple of 16."""
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, 16)
    is_group = group < cols // 16
    k = group[:, None] * 16 + lane[None, :]
    x = tl.load(x_ptr + row * cols + k, mask=is_group[:, None], other=0.0)
    largest = tl.max(tl.abs(x), axis=1)
    # Below this, 1 / scale would be infinite; such values are lost beside anything else.
    largest = tl.where(largest < 1e-30, 0.0, largest)
    inverse = tl.where(largest == 0.0, 0.0, 16256.0 / tl.maximum(largest, 1e-30))
    v = tl.floor(x * inverse[:, None] + 0.5).to(tl.int32)
    high = (v + 64) >> 7
    low = v - (high << 7)
    target = y_ptr + row * (cols // 2 * 5)
    tl.store((target + k).to(tl.pointer_type(tl.int8)), high.to(tl.int8), mask=is_group[:, None])
    tl.store((target + cols + k).to(tl.pointer_type(tl.int8)), low.to(tl.int8), mask=is_group[:, None])
    facts = (target + 2 * cols).to(tl.pointer_type(tl.int32)) + group * 2
    tl.store(facts, (largest * (1.0 / 16256.0)).to(tl.int32, bitcast=True), mask=is_group)
    tl.store(facts + 1, tl.sum(v, axis=1), mask=is_group)


@triton.jit
def dot4(codes, x, IS_SIGNED: tl.constexpr, EMULATED: tl.constexpr):
    """Sum of four products of bytes; codes unsigned unless IS_SIGNED, x signed. EMULATED: without the instruction."""
    if EMULATED:
        total = codes.to(tl.int32) * 0 + x * 0
        for shift in tl.static_range(0, 32, 8):
            if IS_SIGNED:
                code = (codes.to(tl.int32, bitcast=True) << (24 - shift)) >> 24
            else:
                code = ((codes >> shift) & 255).to(tl.int32)
            total += code * ((x << (24 - shift)) >> 24)
        return total
    elif IS_SIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [codes, x], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, 0;", "=r,r,r", [codes, x], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _levels(codes, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Four codes to four signed bytes of a table."""
    found = codes & 0
    for shift in tl.static_range(0, 32, 8):
        q = (codes >> shift) & 15
        half = tl.where(q < 8, tl.full((), LOW, tl.int64), tl.full((), HIGH, tl.int64))
        level = ((half >> ((q & 7) * 8).to(tl.int64)) & 255).to(tl.uint32)
        found = found | (level << shift)
    return found


@triton.jit
def _load_words(base, first, r, c, mask, blocks_per_row, TYPE: tl.constexpr, PER_BLOCK: tl.constexpr):
    """The 16 bytes of every chunk as four words, uint32 [R, C, 4]."""
    lane = tl.arange(0, 4)[None, None, :]
    block = r[:, None] * blocks_per_row + (c // PER_BLOCK)[None, :]
    within = (c % PER_BLOCK)[None, :]
    words = base.to(tl.pointer_type(tl.uint32))
    if TYPE == Q4_K:
        start = words + first * 36 + 4
        offset = block * 36 + within * 4
    elif TYPE == Q5_K:
        start = words + first * 44 + 12
        offset = block * 44 + within * 4
    else:
        start = words + first * (4 * PER_BLOCK)
        offset = block * (4 * PER_BLOCK) + within * 4
    return tl.load(start + (offset[:, :, None] + lane), mask=mask[:, :, None], other=0)


@triton.jit
def _load_high_words(base, num_blocks, first, r, c, mask, blocks_per_row, TYPE: tl.constexpr, PER_BLOCK: tl.constexpr):
    """What holds the upper bits: uint32 [R, C, 4] or [R, C, 1]; 0 for types without."""
    lane = tl.arange(0, 4)[None, None, :]
    block = r[:, None] * blocks_per_row + (c // PER_BLOCK)[None, :]
    within = (c % PER_BLOCK)[None, :]
    words = base.to(tl.pointer_type(tl.uint32))
    if TYPE == Q5_K:
        offset = block * 44 + (within % 2) * 4
        high = tl.load(words + first * 44 + 4 + (offset[:, :, None] + lane), mask=mask[:, :, None], other=0)
    elif TYPE == Q6_K:
        offset = block * 16 + (within // 4) * 8 + (within % 2) * 4
        start = words + num_blocks * 32 + first * 16
        high = tl.load(start + (offset[:, :, None] + lane), mask=mask[:, :, None], other=0)
    elif TYPE == Q3_K:
        offset = block * 8 + (within % 2) * 4
        start = words + num_blocks * 16 + first * 8
        high = tl.load(start + (offset[:, :, None] + lane), mask=mask[:, :, None], other=0)
    elif TYPE == Q5_0 or TYPE == Q5_1:
        high = tl.load(words + num_blocks * 4 + first + block, mask=mask, other=0)[:, :, None]
    else:
        high = 0
    return high


@triton.jit
def _code_words(low, high, c, PART: tl.constexpr, TYPE: tl.constexpr, PER_BLOCK: tl.constexpr):
    """The 16 codes of one part, four to a word, in the order of the values."""
    within = (c % PER_BLOCK)[None, :, None]
    if TYPE == Q8_0:
        q = low
    elif TYPE == Q2_K or TYPE == Q3_K:
        q = (low >> (2 * PART)) & 0x03030303
        if TYPE == Q3_K:
            q = q | (((high >> ((within // 2) * 4 + PART).to(tl.uint32)) & 0x01010101) << 2)
    else:
        q = (low >> (4 * PART)) & 0x0F0F0F0F
        if TYPE == Q5_K:
            q = q | (((high >> ((within // 2) * 2 + PART).to(tl.uint32)) & 0x01010101) << 4)
        elif TYPE == Q6_K:
            q = q | (((high >> (((within % 4) // 2) * 2 + 4 * PART).to(tl.uint32)) & 0x03030303) << 4)
        elif TYPE == Q5_0 or TYPE == Q5_1:
            # Four neighbouring bits to bit 0 of four bytes: the factor's terms are 7 apart, so that none overlap.
            lane = (tl.arange(0, 4)[None, None, :] * 4 + 16 * PART).to(tl.uint32)
            q = q | (((((high >> lane) & 15) * 0x00204081) & 0x01010101) << 4)
        elif TYPE == IQ4_NL or TYPE == IQ4_XS:
            q = _levels(q, IQ4_LOW, IQ4_HIGH)
        elif TYPE == MXFP4:
            q = _levels(q, MXFP4_LOW, MXFP4_HIGH)
    return q


@triton.jit
def packed_products(
    x,
    x_mask,
    base,
    num_blocks,
    first,
    r,
    c,
    mask,
    blocks_per_row,
    cols,
    TYPE: tl.constexpr,
    PARTS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CENTRE: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """What each chunk adds to its row's product with the packed vector at `x` (uint8 pointer): float32 [R, C]."""
    low = _load_words(base, first, r, c, mask, blocks_per_row, TYPE, PER_BLOCK)
    high = _load_high_words(base, num_blocks, first, r, c, mask, blocks_per_row, TYPE, PER_BLOCK)
    lane = tl.arange(0, 4)
    x_high = x.to(tl.pointer_type(tl.int32))
    x_low = (x + cols).to(tl.pointer_type(tl.int32))
    facts = (x + 2 * cols).to(tl.pointer_type(tl.int32))
    IS_SIGNED: tl.constexpr = TYPE == Q8_0 or TYPE == IQ4_NL or TYPE == IQ4_XS or TYPE == MXFP4
    for PART in tl.static_range(PARTS):
        group = first_value(c, PART, TYPE, PER_BLOCK) // 16
        word = group[:, None] * 4 + lane[None, :]
        q = _code_words(low, high, c, PART, TYPE, PER_BLOCK)
        v_high = tl.load(x_high + word, mask=x_mask[:, None], other=0)[None, :, :]
        v_low = tl.load(x_low + word, mask=x_mask[:, None], other=0)[None, :, :]
        whole = dot4(q, v_high, IS_SIGNED, EMULATED) * 128 + dot4(q, v_low, IS_SIGNED, EMULATED)
        total = tl.sum(whole, axis=2)
        x_scale = tl.load(facts + group * 2, mask=x_mask, other=0).to(tl.float32, bitcast=True)
        x_sum = tl.load(facts + group * 2 + 1, mask=x_mask, other=0)
        scale, minimum = scale_and_minimum(base, num_blocks, first, r, c, mask, blocks_per_row, PART, TYPE, PER_BLOCK)
        if CENTRE != 0:
            total -= (CENTRE * x_sum)[None, :]
        part = scale * total.to(tl.float32)
        if TYPE == Q4_K or TYPE == Q5_K or TYPE == Q2_K or TYPE == Q4_1 or TYPE == Q5_1:
            part -= minimum * x_sum.to(tl.float32)[None, :]
        part = part * x_scale[None, :]
        if PART == 0:
            result = part
        else:
            result += part
    return result
