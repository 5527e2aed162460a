"""Few tokens times packed rows: one program takes ROWS rows, token by token.

The weights of a program's rows are read once from memory; for the tokens after the first they come from the cache next
to the processor. Each token's sum goes through the same instructions in the same order, whatever their number: the loop
over tokens is a run-time loop of one compiled kernel.
"""

import triton
import triton.language as tl

from expertide.kernels.gpu.device.decode import (
    BF16,
    F16,
    F32,
    first_value,
    load_codes,
    load_high_bits,
    plain_products,
    values,
)
from expertide.kernels.gpu.device.packed import packed_products


@triton.jit
def chunk_products(
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
    """What each chunk adds to its row's product: float32 [R, C]; `x` is packed unless the weights are plain numbers."""
    if TYPE == F32 or TYPE == F16 or TYPE == BF16:
        return plain_products(x, x_mask, base, first, r, c, mask, cols, TYPE)
    else:
        return packed_products(
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
            TYPE,
            PARTS,
            PER_BLOCK,
            CENTRE,
            EMULATED,
        )


@triton.jit
def row_products(
    x,
    base,
    num_blocks,
    first,
    r,
    row_mask,
    blocks_per_row,
    cols,
    num_chunks,
    TYPE: tl.constexpr,
    PARTS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CENTRE: tl.constexpr,
    EMULATED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The product of ROWS rows and the vector at `x`: float32 [ROWS]."""
    total = tl.zeros((ROWS, CHUNKS), tl.float32)
    for begin in range(0, num_chunks, CHUNKS):
        c = begin + tl.arange(0, CHUNKS)
        is_chunk = c < num_chunks
        mask = row_mask[:, None] & is_chunk[None, :]
        total += chunk_products(
            x, is_chunk, base, num_blocks, first, r, c, mask, blocks_per_row, cols,
            TYPE, PARTS, PER_BLOCK, CENTRE, EMULATED,
        )  # fmt: skip
    return tl.sum(total, axis=1)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def linear_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    num_tokens,
    x_stride,
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
    EMULATED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """y[t, q, o] = w[q] row o · x[t, q]; axis 0: ROWS rows, axis 1: head q.

    x [T, Q, x_stride] as `chunk_products` takes it, y [T, Q, rows] float32; row o of head q is row
    first_row + q * head_stride + o of the matrix.
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS
    r = tl.arange(0, ROWS)
    row_mask = row + r < rows
    first = (first_row + head * head_stride + row).to(tl.int64) * blocks_per_row
    for t in range(num_tokens):
        entry = head.to(tl.int64) + t * num_heads
        y = row_products(
            x_ptr + entry * x_stride, w_ptr, tl.cast(num_blocks, tl.int64), first, r, row_mask, blocks_per_row, cols,
            num_chunks, TYPE, PARTS, PER_BLOCK, CENTRE, EMULATED, ROWS, CHUNKS,
        )  # fmt: skip
        tl.store(y_ptr + entry * rows + row + r, y, mask=row_mask)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def transposed_kernel(
    x_ptr,
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
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """y[t, q, i] = Σ_o w[q][o, i] * x[t, q, o]; axis 0: CHUNKS chunks of the columns, axis 1: head q.

    x [T, Q, rows], y [T, Q, cols], contiguous float32.
    """
    head = tl.program_id(1)
    c = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    is_chunk = c < num_chunks
    lane = tl.arange(0, 16)
    total = num_blocks.to(tl.int64)
    for t in range(num_tokens):
        entry = head.to(tl.int64) + t * num_heads
        for PART in tl.static_range(PARTS):
            acc = tl.zeros((CHUNKS, 16), tl.float32)
            for begin in range(0, rows, ROWS):
                r = tl.arange(0, ROWS)
                row_mask = begin + r < rows
                mask = row_mask[:, None] & is_chunk[None, :]
                first = (first_row + head * head_stride + begin).to(tl.int64) * blocks_per_row
                low = load_codes(w_ptr, first, r, c, mask, blocks_per_row, TYPE, PER_BLOCK)
                high = load_high_bits(w_ptr, total, first, r, c, mask, blocks_per_row, TYPE, PER_BLOCK)
                w = values(low, high, w_ptr, total, first, r, c, mask, blocks_per_row, PART, TYPE, PER_BLOCK, CENTRE)
                x = tl.load(x_ptr + entry * rows + begin + r, mask=row_mask, other=0.0)
                acc += tl.sum(w * x[:, None, None], axis=0)
            k = first_value(c, PART, TYPE, PER_BLOCK)[:, None] + lane[None, :]
            tl.store(y_ptr + entry * cols + k, acc, mask=is_chunk[:, None] & (k < cols))


@triton.jit(do_not_specialize=["num_blocks"])
def dequantise_kernel(
    w_ptr,
    ids_ptr,
    y_ptr,
    num_blocks,
    blocks_per_row,
    rows,
    cols,
    num_chunks,
    first_row,
    HAS_IDS: tl.constexpr,
    TYPE: tl.constexpr,
    PARTS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CENTRE: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """y[i] = row ids[i], or row i, decoded; axis 0: i, axis 1: CHUNKS chunks. Rounded to y's type."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_IDS:
        source = tl.load(ids_ptr + row).to(tl.int64)
    c = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    is_chunk = c < num_chunks
    # A row that does not exist reads as zeros: ids come from outside.
    mask = (c < tl.where((source >= 0) & (source < rows), num_chunks, 0))[None, :]
    r = tl.zeros((1,), tl.int32)
    first = (first_row + source) * blocks_per_row
    total = num_blocks.to(tl.int64)
    low = load_codes(w_ptr, first, r, c, mask, blocks_per_row, TYPE, PER_BLOCK)
    high = load_high_bits(w_ptr, total, first, r, c, mask, blocks_per_row, TYPE, PER_BLOCK)
    lane = tl.arange(0, 16)
    for PART in tl.static_range(PARTS):
        w = values(low, high, w_ptr, total, first, r, c, mask, blocks_per_row, PART, TYPE, PER_BLOCK, CENTRE)
        k = first_value(c, PART, TYPE, PER_BLOCK)[:, None] + lane[None, :]
        tl.store(
            y_ptr + row * cols + k,
            tl.reshape(w, (CHUNKS, 16)).to(y_ptr.dtype.element_ty),
            mask=is_chunk[:, None] & (k < cols),
        )
