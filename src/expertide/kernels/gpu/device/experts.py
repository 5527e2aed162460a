"""Routed experts through a table of addresses: nothing is gathered, and where an expert lies is not seen in a result.

table[expert] holds the addresses of gate, up and down, multiples of 16, or 0 for an expert that is computed elsewhere;
its results are then not written. Assignment a = t * K + k is token t's k-th expert.
"""

import triton
import triton.language as tl

from expertide.kernels.gpu.device.products import chunk_products, row_products
from expertide.kernels.gpu.device.tiles import tile_step


@triton.jit
def _part(table_ptr, expert, PART: tl.constexpr):
    address = tl.load(table_ptr + expert.to(tl.int64) * 3 + PART)
    return tl.multiple_of(address, 16)


@triton.jit
def _first_assignment(ids_ptr, a, expert, address, num_assignments, ASSIGNMENTS: tl.constexpr):
    """`a` if it is the first assignment to an expert that is here, else num_assignments: no work."""
    earlier = tl.arange(0, ASSIGNMENTS)
    ids = tl.load(ids_ptr + earlier, mask=earlier < a, other=-1)
    is_repeated = tl.max((ids == expert).to(tl.int32), axis=0)
    return tl.where((is_repeated == 0) & (address != 0), a, num_assignments)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_assignments", "num_blocks", "per_token"])
def decode_gate_up_kernel(
    x_ptr,
    ids_ptr,
    table_ptr,
    h_ptr,
    num_assignments,
    per_token,
    x_stride,
    num_blocks,
    blocks_per_row,
    rows,
    cols,
    num_chunks,
    TYPE: tl.constexpr,
    PARTS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CENTRE: tl.constexpr,
    UP_TYPE: tl.constexpr,
    UP_PARTS: tl.constexpr,
    UP_PER_BLOCK: tl.constexpr,
    UP_CENTRE: tl.constexpr,
    up_num_blocks,
    up_blocks_per_row,
    up_num_chunks,
    EMULATED: tl.constexpr,
    ASSIGNMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """h[a, f] = silu(gate · x) * (up · x) of assignment a; axis 0: ROWS rows, axis 1: a.

    The program of an expert's first assignment serves all its assignments, so that its rows leave memory once.
    """
    a = tl.program_id(1)
    expert = tl.load(ids_ptr + a)
    known = tl.maximum(expert, 0)
    gate = _part(table_ptr, known, 0)
    up = _part(table_ptr, known, 1)
    begin = _first_assignment(ids_ptr, a, expert, tl.where(expert < 0, 0, gate), num_assignments, ASSIGNMENTS)
    gate_ptr = gate.to(tl.pointer_type(tl.uint8))
    up_ptr = up.to(tl.pointer_type(tl.uint8))
    row = tl.program_id(0) * ROWS
    r = tl.arange(0, ROWS)
    row_mask = row + r < rows
    first = row.to(tl.int64) * blocks_per_row
    total = tl.cast(num_blocks, tl.int64)
    for b in range(begin, num_assignments):
        if tl.load(ids_ptr + b) == expert:
            x = x_ptr + (b // per_token) * x_stride
            if TYPE == UP_TYPE:
                sum_g = tl.zeros((ROWS, CHUNKS), tl.float32)
                sum_u = tl.zeros((ROWS, CHUNKS), tl.float32)
                for chunk in range(0, num_chunks, CHUNKS):
                    c = chunk + tl.arange(0, CHUNKS)
                    is_chunk = c < num_chunks
                    mask = row_mask[:, None] & is_chunk[None, :]
                    sum_g += chunk_products(
                        x, is_chunk, gate_ptr, total, first, r, c, mask, blocks_per_row, cols,
                        TYPE, PARTS, PER_BLOCK, CENTRE, EMULATED,
                    )  # fmt: skip
                    sum_u += chunk_products(
                        x, is_chunk, up_ptr, total, first, r, c, mask, blocks_per_row, cols,
                        TYPE, PARTS, PER_BLOCK, CENTRE, EMULATED,
                    )  # fmt: skip
                g = tl.sum(sum_g, axis=1)
                u = tl.sum(sum_u, axis=1)
            else:
                g = row_products(
                    x, gate_ptr, total, first, r, row_mask, blocks_per_row, cols, num_chunks,
                    TYPE, PARTS, PER_BLOCK, CENTRE, EMULATED, ROWS, CHUNKS,
                )  # fmt: skip
                u = row_products(
                    x, up_ptr, tl.cast(up_num_blocks, tl.int64), row.to(tl.int64) * up_blocks_per_row, r, row_mask,
                    up_blocks_per_row, cols, up_num_chunks,
                    UP_TYPE, UP_PARTS, UP_PER_BLOCK, UP_CENTRE, EMULATED, ROWS, CHUNKS,
                )  # fmt: skip
            tl.store(h_ptr + b * rows + row + r, silu(g) * u, mask=row_mask)


@triton.jit(do_not_specialize=["num_assignments", "num_blocks"])
def decode_down_kernel(
    h_ptr,
    ids_ptr,
    table_ptr,
    y_ptr,
    num_assignments,
    h_stride,
    num_blocks,
    blocks_per_row,
    rows,
    cols,
    num_chunks,
    TYPE: tl.constexpr,
    PARTS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CENTRE: tl.constexpr,
    EMULATED: tl.constexpr,
    ASSIGNMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """y[a, i] = down · h[a]; axes as above."""
    a = tl.program_id(1)
    expert = tl.load(ids_ptr + a)
    down = _part(table_ptr, tl.maximum(expert, 0), 2)
    begin = _first_assignment(ids_ptr, a, expert, tl.where(expert < 0, 0, down), num_assignments, ASSIGNMENTS)
    row = tl.program_id(0) * ROWS
    r = tl.arange(0, ROWS)
    row_mask = row + r < rows
    for b in range(begin, num_assignments):
        if tl.load(ids_ptr + b) == expert:
            y = row_products(
                h_ptr + b * h_stride, down.to(tl.pointer_type(tl.uint8)), tl.cast(num_blocks, tl.int64),
                row.to(tl.int64) * blocks_per_row, r, row_mask, blocks_per_row, cols, num_chunks,
                TYPE, PARTS, PER_BLOCK, CENTRE, EMULATED, ROWS, CHUNKS,
            )  # fmt: skip
            tl.store(y_ptr + b * rows + row + r, y, mask=row_mask)


@triton.jit
def sum_kernel(results_ptr, weights_ptr, y_ptr, cols, K: tl.constexpr, BLOCK: tl.constexpr):
    """y[t] = Σ_k weights[t, k] * results[t, k], k = 0, 1, … in this order; axis 0: BLOCK columns, axis 1: token t."""
    t = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < cols
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        weight = tl.load(weights_ptr + t * K + k)
        total += weight * tl.load(results_ptr + (t * K + k) * cols + i, mask=mask, other=0.0)
    tl.store(y_ptr + t * cols + i, total, mask=mask)


@triton.jit(do_not_specialize=["num_blocks", "per_entry"])
def prefill_kernel(
    x_ptr,
    scale_ptr,
    table_ptr,
    order_ptr,
    tiles_ptr,
    y_ptr,
    per_entry,
    num_blocks,
    blocks_per_row,
    rows,
    cols,
    num_chunks,
    TYPE: tl.constexpr,
    PARTS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CENTRE: tl.constexpr,
    UP_TYPE: tl.constexpr,
    UP_PARTS: tl.constexpr,
    UP_PER_BLOCK: tl.constexpr,
    UP_CENTRE: tl.constexpr,
    up_num_blocks,
    up_blocks_per_row,
    up_num_chunks,
    IS_GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grouped products; axis 0: ROWS rows, axis 1: a tile of at most TOKENS assignments of one expert.

    Args:
        x_ptr: float16; assignment a reads entry a // per_entry (K: tokens; 1: what the first call wrote).
        order_ptr: assignments sorted by expert.
        tiles_ptr: int32 [tiles, 3]: expert (-1: an empty tile), first and end place in `order`.
        y_ptr: float32 [assignments, rows]: silu(gate · x) * (up · x) if IS_GATED, else down · x.
    """
    tile = tiles_ptr + tl.program_id(1) * 3
    expert = tl.load(tile)
    if expert >= 0:
        if IS_GATED:
            address = _part(table_ptr, expert, 0)
        else:
            address = _part(table_ptr, expert, 2)
        if address != 0:
            place = tl.load(tile + 1) + tl.arange(0, TOKENS)
            mask = place < tl.load(tile + 2)
            a = tl.load(order_ptr + place, mask=mask, other=0).to(tl.int64)
            entry = a // per_entry
            x_rows = x_ptr + (entry * cols)[:, None]
            row = tl.program_id(0) * ROWS
            r = tl.arange(0, ROWS)
            row_mask = row + r < rows
            first = row.to(tl.int64) * blocks_per_row
            total = tl.cast(num_blocks, tl.int64)
            w_ptr = address.to(tl.pointer_type(tl.uint8))
            acc = tl.zeros((TOKENS, ROWS), tl.float32)
            for begin in range(0, num_chunks, CHUNKS):
                acc = tile_step(
                    acc, x_rows, mask[:, None], w_ptr, total, first, r, row_mask, begin, blocks_per_row, cols,
                    num_chunks, TYPE, PARTS, PER_BLOCK, CENTRE, ROWS, CHUNKS,
                )  # fmt: skip
            scale = tl.load(scale_ptr + entry, mask=mask, other=0.0)[:, None]
            y = acc * scale
            if IS_GATED:
                up_ptr = _part(table_ptr, expert, 1).to(tl.pointer_type(tl.uint8))
                up_first = row.to(tl.int64) * up_blocks_per_row
                up_total = tl.cast(up_num_blocks, tl.int64)
                acc_up = tl.zeros((TOKENS, ROWS), tl.float32)
                for begin in range(0, up_num_chunks, CHUNKS):
                    acc_up = tile_step(
                        acc_up, x_rows, mask[:, None], up_ptr, up_total, up_first, r, row_mask, begin,
                        up_blocks_per_row, cols, up_num_chunks,
                        UP_TYPE, UP_PARTS, UP_PER_BLOCK, UP_CENTRE, ROWS, CHUNKS,
                    )  # fmt: skip
                y = silu(y) * (acc_up * scale)
            tl.store(y_ptr + (a * rows)[:, None] + (row + r)[None, :], y, mask=mask[:, None] & row_mask[None, :])
