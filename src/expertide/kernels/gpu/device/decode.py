"""What packed bytes in device layout mean, for every quant type: the part that all product kernels share.

A row is read in chunks: 16 bytes of the quant plane, which one thread loads at once. A chunk of a type with b bits a
value holds several runs ("parts") of 16 values each; all values of a part share scale and minimum:

    value[k + i] = scale * (code[i] - CENTRE) - minimum        i = 0..15, k = first_value(chunk, part)

    type                          parts   chunks a block
    Q4_0 Q4_1 Q5_0 Q5_1           2       1                part 0: low nibbles, part 1: high nibbles
    IQ4_NL MXFP4                  2       1
    Q4_K Q5_K Q6_K IQ4_XS         2       8
    Q2_K Q3_K                     4       4                part j: bits 2j, 2j+1
    Q8_0                          1       2
    F32 F16 BF16                  1       -                16 values; a row may end inside a chunk

Tiles are [R, C, 16]: R rows, C chunks of a row. The sum over 16 stays inside a thread. Where a row or chunk is masked
out, codes, scales and minima are 0. Byte offsets are those of `gpu/layout.py`; drawings of the blocks are in
`formats/quants`.
"""

import triton
import triton.language as tl

F32 = tl.constexpr(0)
F16 = tl.constexpr(1)
Q4_0 = tl.constexpr(2)
Q4_1 = tl.constexpr(3)
Q5_0 = tl.constexpr(6)
Q5_1 = tl.constexpr(7)
Q8_0 = tl.constexpr(8)
Q2_K = tl.constexpr(10)
Q3_K = tl.constexpr(11)
Q4_K = tl.constexpr(12)
Q5_K = tl.constexpr(13)
Q6_K = tl.constexpr(14)
IQ4_NL = tl.constexpr(20)
IQ4_XS = tl.constexpr(23)
BF16 = tl.constexpr(30)
MXFP4 = tl.constexpr(39)

# The 16 levels of IQ4_NL and of MXFP4 as signed bytes, eight to a number, lowest first: a shift is a look-up.
IQ4_LOW = tl.constexpr(-654466911485192063)
IQ4_HIGH = tl.constexpr(8167635493787864321)
MXFP4_LOW = tl.constexpr(866949542568919296)
MXFP4_HIGH = tl.constexpr(-794609369730842880)


@triton.jit
def first_value(c, PART: tl.constexpr, TYPE: tl.constexpr, PER_BLOCK: tl.constexpr):
    """Index in the row of the first of the 16 values of a chunk's part."""
    within = c % PER_BLOCK
    block = c // PER_BLOCK
    if TYPE == Q4_K or TYPE == Q5_K:
        k = block * 256 + (within // 2) * 64 + PART * 32 + (within % 2) * 16
    elif TYPE == Q6_K:
        k = block * 256 + (within // 4) * 128 + PART * 64 + (within % 4) * 16
    elif TYPE == Q2_K or TYPE == Q3_K:
        k = block * 256 + (within // 2) * 128 + PART * 32 + (within % 2) * 16
    elif TYPE == IQ4_XS:
        k = block * 256 + within * 32 + PART * 16
    elif PER_BLOCK == 1 and not (TYPE == F32 or TYPE == F16 or TYPE == BF16):
        k = block * 32 + PART * 16
    else:
        k = c * 16
    return k


@triton.jit
def load_codes(base, first, r, c, mask, blocks_per_row, TYPE: tl.constexpr, PER_BLOCK: tl.constexpr):
    """The 16 bytes of every chunk, uint8 [R, C, 16]; for plain numbers their 16 values, float32.

    Args:
        base: uint8 pointer to the matrix, a multiple of 16.
        first: int64, the block (plain numbers: the value) at which the tile's row 0 starts.
        r, c: int32 [R] and [C], rows from the tile's row 0 and chunks of the row.
        mask: [R, C], which of them exist.
    """
    lane = tl.arange(0, 16)[None, None, :]
    if TYPE == F32 or TYPE == F16 or TYPE == BF16:
        k = c[None, :, None] * 16 + lane
        offset = r[:, None, None] * blocks_per_row + k
        inside = mask[:, :, None] & (k < blocks_per_row)
        if TYPE == F32:
            values = tl.load(base.to(tl.pointer_type(tl.float32)) + first + offset, mask=inside, other=0.0)
        elif TYPE == F16:
            values = tl.load(base.to(tl.pointer_type(tl.float16)) + first + offset, mask=inside, other=0.0)
        else:
            values = tl.load(base.to(tl.pointer_type(tl.bfloat16)) + first + offset, mask=inside, other=0.0)
        return values.to(tl.float32)
    else:
        block = r[:, None] * blocks_per_row + (c // PER_BLOCK)[None, :]
        within = (c % PER_BLOCK)[None, :]
        if TYPE == Q4_K:
            start = base + first * 144 + 16
            offset = block * 144 + within * 16
        elif TYPE == Q5_K:
            start = base + first * 176 + 48
            offset = block * 176 + within * 16
        else:
            start = base + first * (16 * PER_BLOCK)
            offset = block * (16 * PER_BLOCK) + within * 16
        return tl.load(start + offset[:, :, None] + lane, mask=mask[:, :, None], other=0)


@triton.jit
def load_high_bits(base, num_blocks, first, r, c, mask, blocks_per_row, TYPE: tl.constexpr, PER_BLOCK: tl.constexpr):
    """What holds the upper bits of a chunk's codes: uint8 [R, C, 16] or uint32 [R, C, 1]; 0 for types without."""
    lane = tl.arange(0, 16)[None, None, :]
    block = r[:, None] * blocks_per_row + (c // PER_BLOCK)[None, :]
    within = (c % PER_BLOCK)[None, :]
    if TYPE == Q5_K:
        offset = block * 176 + (within % 2) * 16
        high = tl.load(base + first * 176 + 16 + offset[:, :, None] + lane, mask=mask[:, :, None], other=0)
    elif TYPE == Q6_K:
        offset = block * 64 + (within // 4) * 32 + (within % 2) * 16
        high = tl.load(base + num_blocks * 128 + first * 64 + offset[:, :, None] + lane, mask=mask[:, :, None], other=0)
    elif TYPE == Q3_K:
        offset = block * 32 + (within % 2) * 16
        high = tl.load(base + num_blocks * 64 + first * 32 + offset[:, :, None] + lane, mask=mask[:, :, None], other=0)
    elif TYPE == Q5_0 or TYPE == Q5_1:
        words = (base + num_blocks * 16 + first * 4).to(tl.pointer_type(tl.uint32))
        high = tl.load(words + block, mask=mask, other=0)[:, :, None]
    else:
        high = 0
    return high


@triton.jit
def codes(low, high, c, PART: tl.constexpr, TYPE: tl.constexpr, PER_BLOCK: tl.constexpr):
    """The codes of one part, float32 [R, C, 16], before CENTRE is taken off."""
    within = (c % PER_BLOCK)[None, :, None]
    if TYPE == F32 or TYPE == F16 or TYPE == BF16:
        q = low
    elif TYPE == Q8_0:
        q = low.to(tl.int8, bitcast=True)
    elif TYPE == Q2_K or TYPE == Q3_K:
        q = (low >> (2 * PART)) & 3
        if TYPE == Q3_K:
            q = q | (((high >> ((within // 2) * 4 + PART).to(tl.uint8)) & 1) << 2)
    else:
        if PART == 0:
            q = low & 15
        else:
            q = low >> 4
        if TYPE == Q5_K:
            q = q | (((high >> ((within // 2) * 2 + PART).to(tl.uint8)) & 1) << 4)
        elif TYPE == Q6_K:
            q = q | (((high >> (((within % 4) // 2) * 2 + 4 * PART).to(tl.uint8)) & 3) << 4)
        elif TYPE == Q5_0 or TYPE == Q5_1:
            lane = (tl.arange(0, 16)[None, None, :] + 16 * PART).to(tl.uint32)
            q = q | (((high >> lane) & 1) << 4).to(tl.uint8)
        elif TYPE == IQ4_NL or TYPE == IQ4_XS:
            q = _level(q, IQ4_LOW, IQ4_HIGH)
        elif TYPE == MXFP4:
            q = _level(q, MXFP4_LOW, MXFP4_HIGH)
    return q.to(tl.float32)


@triton.jit
def _level(q, LOW: tl.constexpr, HIGH: tl.constexpr):
    half = tl.where(q < 8, tl.full((), LOW, tl.int64), tl.full((), HIGH, tl.int64))
    return (half >> ((q & 7) * 8).to(tl.int64)).to(tl.int8)


@triton.jit
def _half(word, SHIFT: tl.constexpr):
    """The float16 in bits SHIFT .. SHIFT + 15 of a word, as float32."""
    return ((word >> SHIFT) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_and_minimum(
    base, num_blocks, first, r, c, mask, blocks_per_row, PART: tl.constexpr, TYPE: tl.constexpr, PER_BLOCK: tl.constexpr
):
    """(scale, minimum) of one part, float32 [R, C]; a type without minima gives zeros."""
    block = r[:, None] * blocks_per_row + (c // PER_BLOCK)[None, :]
    within = (c % PER_BLOCK)[None, :]
    if TYPE == Q4_K or TYPE == Q5_K:
        WIDTH: tl.constexpr = 144 if TYPE == Q4_K else 176
        words = (base + first * WIDTH).to(tl.pointer_type(tl.uint32)) + block * (WIDTH // 4)
        group = (within // 2) * 2 + PART
        shift = ((group % 4) * 8).to(tl.uint32)
        ds = tl.load(words, mask=mask, other=0)
        w_scales = tl.load(words + 1, mask=mask, other=0) >> shift
        w_minima = tl.load(words + 2, mask=mask, other=0) >> shift
        w_both = tl.load(words + 3, mask=mask, other=0) >> shift
        s = tl.where(group < 4, w_scales & 63, (w_both & 15) | ((w_scales >> 2) & 48))
        m = tl.where(group < 4, w_minima & 63, ((w_both >> 4) & 15) | ((w_minima >> 2) & 48))
        scale = _half(ds, 0) * s.to(tl.float32)
        minimum = _half(ds, 16) * m.to(tl.float32)
    elif TYPE == Q2_K:
        group = (within // 2) * 8 + PART * 2 + within % 2
        packed = tl.load(base + num_blocks * 64 + first * 16 + (block * 16 + group), mask=mask, other=0)
        ds = tl.load((base + num_blocks * 80 + first * 4).to(tl.pointer_type(tl.uint32)) + block, mask=mask, other=0)
        scale = _half(ds, 0) * (packed & 15).to(tl.float32)
        minimum = _half(ds, 16) * (packed >> 4).to(tl.float32)
    elif TYPE == Q3_K:
        group = (within // 2) * 8 + PART * 2 + within % 2
        scales = base + num_blocks * 96 + first * 12
        lower = tl.load(scales + (block * 12 + group % 8), mask=mask, other=0) >> ((group // 8) * 4).to(tl.uint8)
        upper = tl.load(scales + (block * 12 + 8 + group % 4), mask=mask, other=0) >> ((group // 4) * 2).to(tl.uint8)
        d = tl.load((base + num_blocks * 108 + first * 2).to(tl.pointer_type(tl.float16)) + block, mask=mask, other=0.0)
        s = (lower & 15).to(tl.int32) + ((upper & 3).to(tl.int32) << 4) - 32
        scale = d.to(tl.float32) * s.to(tl.float32)
        minimum = tl.zeros_like(scale)
    elif TYPE == Q6_K:
        group = (within // 4) * 8 + PART * 4 + within % 4
        s = tl.load(base + num_blocks * 192 + first * 16 + (block * 16 + group), mask=mask, other=0)
        d = tl.load((base + num_blocks * 208 + first * 2).to(tl.pointer_type(tl.float16)) + block, mask=mask, other=0.0)
        scale = d.to(tl.float32) * s.to(tl.int8, bitcast=True).to(tl.float32)
        minimum = tl.zeros_like(scale)
    elif TYPE == IQ4_XS:
        words = (base + num_blocks * 128 + first * 8).to(tl.pointer_type(tl.uint32)) + block * 2
        head = tl.load(words, mask=mask, other=0)
        lower = tl.load(words + 1, mask=mask, other=0) >> (within * 4).to(tl.uint32)
        upper = head >> (16 + within * 2).to(tl.uint32)
        s = (lower & 15).to(tl.int32) + ((upper & 3).to(tl.int32) << 4) - 32
        scale = _half(head, 0) * s.to(tl.float32)
        minimum = tl.zeros_like(scale)
    elif TYPE == MXFP4:
        e = tl.load(base + num_blocks * 16 + first + block, mask=mask, other=0).to(tl.uint32)
        bits = tl.where(e < 2, (e + 1) << 21, (e - 1) << 23)  # 2 ** (e - 128); subnormal for e = 0 and 1
        scale = bits.to(tl.float32, bitcast=True)
        minimum = tl.zeros_like(scale)
    elif TYPE == Q4_1 or TYPE == Q5_1:
        PREFIX: tl.constexpr = 16 if TYPE == Q4_1 else 20
        ds = tl.load(
            (base + num_blocks * PREFIX + first * 4).to(tl.pointer_type(tl.uint32)) + block, mask=mask, other=0
        )
        scale = _half(ds, 0)
        minimum = -_half(ds, 16)
    else:
        PREFIX: tl.constexpr = 32 if TYPE == Q8_0 else 20 if TYPE == Q5_0 else 16
        d = tl.load(
            (base + num_blocks * PREFIX + first * 2).to(tl.pointer_type(tl.float16)) + block, mask=mask, other=0.0
        )
        scale = d.to(tl.float32)
        minimum = tl.zeros_like(scale)
    return scale, minimum


@triton.jit
def values(
    low,
    high,
    base,
    num_blocks,
    first,
    r,
    c,
    mask,
    blocks_per_row,
    PART: tl.constexpr,
    TYPE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """The decoded values of one part, float32 [R, C, 16]; rounded as the decoders in `formats/quants` do."""
    q = codes(low, high, c, PART, TYPE, PER_BLOCK)
    if TYPE == F32 or TYPE == F16 or TYPE == BF16:
        decoded = q
    else:
        scale, minimum = scale_and_minimum(base, num_blocks, first, r, c, mask, blocks_per_row, PART, TYPE, PER_BLOCK)
        decoded = scale[:, :, None] * (q - CENTRE)
        if TYPE == Q4_K or TYPE == Q5_K or TYPE == Q2_K or TYPE == Q4_1 or TYPE == Q5_1:
            decoded = decoded - minimum[:, :, None]
    return decoded


@triton.jit
def plain_products(x, x_mask, base, first, r, c, mask, cols, TYPE: tl.constexpr):
    """What each chunk of plain numbers adds to its row's product with the vector at `x` (float32 pointer): [R, C]."""
    w = load_codes(base, first, r, c, mask, cols, TYPE, 1)
    k = c[:, None] * 16 + tl.arange(0, 16)[None, :]
    x_values = tl.load(x + k, mask=x_mask[:, None] & (k < cols), other=0.0)
    return tl.sum(w * x_values[None, :, :], axis=2)
