"""Ops on rows of activations: norm, rotation, the router. One program works on one row."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, y_ptr, eps, cols, BLOCK: tl.constexpr):
    """y = x * rsqrt(mean(x²) + eps) * weight; axis 0: row. BLOCK holds a whole row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < cols
    x = tl.load(x_ptr + row * cols + i, mask=mask, other=0.0)
    mean = tl.sum(x * x, axis=0) / cols
    weight = tl.load(weight_ptr + i, mask=mask, other=0.0)
    tl.store(y_ptr + row * cols + i, x * (1.0 / tl.sqrt(mean + eps)) * weight, mask=mask)


@triton.jit
def rope_kernel(x_ptr, cos_ptr, sin_ptr, y_ptr, num_heads, num_pairs, IS_ADJACENT: tl.constexpr, BLOCK: tl.constexpr):
    """Pair i of every head turned by angle i; x, y [T, Q, 2P]; axis 0: token and head, BLOCK >= P."""
    entry = tl.program_id(0).to(tl.int64)
    token = entry // num_heads
    i = tl.arange(0, BLOCK)
    mask = i < num_pairs
    cos = tl.load(cos_ptr + token * num_pairs + i, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + token * num_pairs + i, mask=mask, other=0.0)
    if IS_ADJACENT:
        first = entry * (2 * num_pairs) + 2 * i
        second = first + 1
    else:
        first = entry * (2 * num_pairs) + i
        second = first + num_pairs
    a = tl.load(x_ptr + first, mask=mask, other=0.0)
    b = tl.load(x_ptr + second, mask=mask, other=0.0)
    tl.store(y_ptr + first, a * cos - b * sin, mask=mask)
    tl.store(y_ptr + second, a * sin + b * cos, mask=mask)


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, y_ptr, size, BLOCK: tl.constexpr):
    """y = silu(gate) * up; axis 0: BLOCK values."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    gate = tl.load(gate_ptr + i, mask=mask, other=0.0)
    up = tl.load(up_ptr + i, mask=mask, other=0.0)
    tl.store(y_ptr + i, gate / (1.0 + tl.exp(-gate)) * up, mask=mask)


@triton.jit
def gate_rows_kernel(y_ptr, x_ptr, gate_ptr, out_ptr, cols, BLOCK: tl.constexpr):
    """out = sigmoid(gate · x) * y; axis 0: row. BLOCK holds a whole row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < cols
    x = tl.load(x_ptr + row * cols + i, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + i, mask=mask, other=0.0)
    share = 1.0 / (1.0 + tl.exp(-tl.sum(x * gate, axis=0)))
    y = tl.load(y_ptr + row * cols + i, mask=mask, other=0.0)
    tl.store(out_ptr + row * cols + i, share * y, mask=mask)


@triton.jit
def _best(choice, e):
    """(largest value, its index); equal values: the lower index."""
    value = tl.max(choice, axis=0)
    return value, tl.min(tl.where(choice == value, e, 1 << 30), axis=0)


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    num_experts,
    scale,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_TOP2_SUM: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The choice of one token; see `kernels/router.py`. Axis 0: token; EXPERTS >= E and SLOTS >= K, powers of two."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    mask = e < num_experts
    logits = tl.load(logits_ptr + t * num_experts + e, mask=mask, other=-float("inf"))
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        exponentials = tl.exp(logits - tl.max(logits, axis=0))
        scores = exponentials / tl.sum(exponentials, axis=0)
    choice = scores
    if HAS_BIAS:
        choice = scores + tl.load(bias_ptr + e, mask=mask, other=0.0)
    # Lower than any choice that is left, also than the -inf of dropped groups and of NaN's absence.
    choice = tl.where(mask, choice, -float("inf"))
    if TOP_GROUPS < NUM_GROUPS:
        group = e // (num_experts // NUM_GROUPS)
        kept = tl.zeros((EXPERTS,), tl.int32)
        rating = choice
        for g in tl.static_range(NUM_GROUPS):
            inside = tl.where(group == g, choice, -float("inf"))
            value, best = _best(inside, e)
            if IS_TOP2_SUM:
                value += tl.max(tl.where(e == best, -float("inf"), inside), axis=0)
            rating = tl.where(group == g, value, rating)
        rating = tl.where(mask, rating, -float("inf"))
        for _ in tl.static_range(TOP_GROUPS):
            # Rated alike, the group with the lower ids wins: its experts come first.
            value, best = _best(rating, e)
            is_kept = group == tl.minimum(best, num_experts - 1) // (num_experts // NUM_GROUPS)
            kept = tl.where(is_kept, 1, kept)
            rating = tl.where(is_kept, -float("inf"), rating)
        choice = tl.where(kept == 1, choice, -float("inf"))
    slot = tl.arange(0, SLOTS)
    ids = tl.zeros((SLOTS,), tl.int32)
    weights = tl.zeros((SLOTS,), tl.float32)
    for k in tl.static_range(K):
        value, best = _best(choice, e)
        # Without a largest value (NaN) an id that exists: the step ends with "not finite", not with a wild read.
        best = tl.minimum(best, num_experts - 1)
        weight = tl.sum(tl.where(e == best, scores, 0.0), axis=0)
        ids = tl.where(slot == k, best, ids)
        weights = tl.where(slot == k, weight, weights)
        choice = tl.where(e == best, -float("inf"), choice)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights = weights * scale
    tl.store(ids_ptr + t * K + slot, ids, mask=slot < K)
    tl.store(weights_ptr + t * K + slot, weights, mask=slot < K)
