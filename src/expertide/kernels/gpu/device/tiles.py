"""Many tokens times packed rows on tensor cores: packed tile -> registers -> float16 -> product, float32 sums."""

import triton
import triton.language as tl

from expertide.kernels.gpu.device.decode import F32, first_value, load_codes, load_high_bits, values


@triton.jit
def tile_step(
    acc,
    x_rows,
    x_mask,
    base,
    num_blocks,
    first,
    r,
    row_mask,
    begin,
    blocks_per_row,
    cols,
    num_chunks,
    TYPE: tl.constexpr,
    PARTS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CENTRE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """acc [tokens, ROWS] plus the products over CHUNKS chunks from chunk `begin`.

    Args:
        x_rows: [tokens, 1] pointers to the tokens' vectors.
    """
    c = begin + tl.arange(0, CHUNKS)
    mask = row_mask[:, None] & (c < num_chunks)[None, :]
    low = load_codes(base, first, r, c, mask, blocks_per_row, TYPE, PER_BLOCK)
    high = load_high_bits(base, num_blocks, first, r, c, mask, blocks_per_row, TYPE, PER_BLOCK)
    flat = tl.arange(0, CHUNKS * 16)
    flat_chunk = begin + flat // 16
    for PART in tl.static_range(PARTS):
        k = first_value(flat_chunk, PART, TYPE, PER_BLOCK) + flat % 16
        k_mask = (flat_chunk < num_chunks) & (k < cols)
        x = tl.load(x_rows + k[None, :], mask=x_mask & k_mask[None, :], other=0.0)
        w = values(low, high, base, num_blocks, first, r, c, mask, blocks_per_row, PART, TYPE, PER_BLOCK, CENTRE)
        w = tl.reshape(w, (ROWS, CHUNKS * 16)).to(x.dtype)
        if TYPE == F32:  # the router: its choice between experts must not hang on ten bits
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def gemm_kernel(
    x_ptr,
    scale_ptr,
    w_ptr,
    y_ptr,
    num_tokens,
    num_blocks,
    blocks_per_row,
    rows,
    cols,
    num_chunks,
    first_row,
    head_stride,
    num_heads,
    TYPE: tl.constexpr,
    PARTS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CENTRE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """y[t, q, o] = scale[t, q] * w[q] row o · x[t, q]; axis 0: TOKENS tokens, axis 1: ROWS rows, axis 2: head q."""
    head = tl.program_id(2)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS
    r = tl.arange(0, ROWS)
    token_mask = t < num_tokens
    row_mask = row + r < rows
    entry = t.to(tl.int64) * num_heads + head
    x_rows = x_ptr + (entry * cols)[:, None]
    first = (first_row + head * head_stride + row).to(tl.int64) * blocks_per_row
    total = tl.cast(num_blocks, tl.int64)
    acc = tl.zeros((TOKENS, ROWS), tl.float32)
    for begin in range(0, num_chunks, CHUNKS):
        acc = tile_step(
            acc, x_rows, token_mask[:, None], w_ptr, total, first, r, row_mask, begin, blocks_per_row, cols, num_chunks,
            TYPE, PARTS, PER_BLOCK, CENTRE, ROWS, CHUNKS,
        )  # fmt: skip
    acc = acc * tl.load(scale_ptr + entry, mask=token_mask, other=0.0)[:, None]
    tl.store(y_ptr + (entry * rows)[:, None] + (row + r)[None, :], acc, mask=token_mask[:, None] & row_mask[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def transposed_gemm_kernel(
    x_ptr,
    scale_ptr,
    w_ptr,
    y_ptr,
    num_tokens,
    num_blocks,
    blocks_per_row,
    rows,
    cols,
    num_chunks,
    first_row,
    head_stride,
    num_heads,
    TYPE: tl.constexpr,
    PARTS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CENTRE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """y[t, q, i] = scale[t, q] * Σ_o w[q][o, i] x[t, q, o]; axis 0: tokens, 1: CHUNKS chunks of columns, 2: q.

    ROWS rows are one step of the sum here.
    """
    head = tl.program_id(2)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token_mask = t < num_tokens
    entry = t.to(tl.int64) * num_heads + head
    chunk = tl.program_id(1) * CHUNKS
    c = chunk + tl.arange(0, CHUNKS)
    is_chunk = c < num_chunks
    r = tl.arange(0, ROWS)
    flat = tl.arange(0, CHUNKS * 16)
    flat_chunk = chunk + flat // 16
    total = tl.cast(num_blocks, tl.int64)
    scale = tl.load(scale_ptr + entry, mask=token_mask, other=0.0)
    for PART in tl.static_range(PARTS):
        acc = tl.zeros((TOKENS, CHUNKS * 16), tl.float32)
        for begin in range(0, rows, ROWS):
            row_mask = begin + r < rows
            mask = row_mask[:, None] & is_chunk[None, :]
            first = (first_row + head * head_stride + begin).to(tl.int64) * blocks_per_row
            low = load_codes(w_ptr, first, r, c, mask, blocks_per_row, TYPE, PER_BLOCK)
            high = load_high_bits(w_ptr, total, first, r, c, mask, blocks_per_row, TYPE, PER_BLOCK)
            w = values(low, high, w_ptr, total, first, r, c, mask, blocks_per_row, PART, TYPE, PER_BLOCK, CENTRE)
            x = tl.load(
                x_ptr + (entry * rows)[:, None] + (begin + r)[None, :],
                mask=token_mask[:, None] & row_mask[None, :],
                other=0.0,
            )
            w = tl.reshape(w, (ROWS, CHUNKS * 16)).to(x.dtype)
            if TYPE == F32:
                acc = tl.dot(x, w, acc, input_precision="ieee")
            else:
                acc = tl.dot(x, w, acc)
        k = first_value(flat_chunk, PART, TYPE, PER_BLOCK) + flat % 16
        k_mask = (flat_chunk < num_chunks) & (k < cols)
        tl.store(
            y_ptr + (entry * cols)[:, None] + k[None, :],
            acc * scale[:, None],
            mask=token_mask[:, None] & k_mask[None, :],
        )


@triton.jit
def to_half_kernel(x_ptr, y_ptr, scale_ptr, cols, BLOCK: tl.constexpr):
    """y[i] * scale[i] = x[i] with y float16 and scale a power of two that keeps y below 2 ** 14; axis 0: row i.

    The exponent of the largest value of the row decides, nothing else in the batch.
    """
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, cols, BLOCK):
        k = begin + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(x_ptr + row * cols + k, mask=k < cols, other=0.0)))
    exponent = tl.max(largest, axis=0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent - 13, 1), 241)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    for begin in range(0, cols, BLOCK):
        k = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * cols + k, mask=k < cols, other=0.0)
        tl.store(y_ptr + row * cols + k, (x * inverse).to(tl.float16), mask=k < cols)
    tl.store(scale_ptr + row, scale)
