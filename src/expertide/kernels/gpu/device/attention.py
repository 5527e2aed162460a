"""Causal attention over cached keys, for latent and grouped heads alike.

A key is one or two pieces (latent and rotated part; or a whole key of one kv head), a value is the first piece of the
key or a row of its own. Rows of a tile are (token, query head) pairs that share a kv head; latent attention has one.

    decode    a tile holds the heads of one token; keys are split into pieces at absolute positions, their number
              depends on the token's position only; every piece leaves (sum of p·v, maximum, sum of p), and
              merge_kernel joins them in the order of their index
    prefill   a tile holds neighbouring rows of a chunk; its keys are walked in tiles from position 0 on

Scores are in units of log2. Keys, values and weights are multiplied as float16, those of a float32 cache too. In
decode, where memory is what takes time, queries are cut into two halves, so that a score is as exact as the cache. The
position of token 0 is read from memory: a recorded graph serves every step.
"""

import triton
import triton.language as tl


@triton.jit
def split_keys(length, MIN_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Keys of one piece when `length` keys are seen."""
    per_split = (length + MAX_SPLITS - 1) // MAX_SPLITS
    return tl.maximum((per_split + MIN_KEYS - 1) // MIN_KEYS * MIN_KEYS, MIN_KEYS)


@triton.jit
def _scores(q, q_rest, k, IS_EXACT: tl.constexpr):
    scores = tl.dot(q, tl.trans(k))
    if IS_EXACT:
        scores = tl.dot(q_rest, tl.trans(k), scores)
    return scores


@triton.jit
def _cut(q):
    """(q as float16, what the rounding left)."""
    head = q.to(tl.float16)
    return head, (q - head.to(tl.float32)).to(tl.float16)


@triton.jit
def attention_kernel(
    qa_ptr,
    qb_ptr,
    ka_ptr,
    kb_ptr,
    v_ptr,
    out_ptr,
    stats_ptr,
    position_ptr,
    pages_ptr,
    scale,
    num_tokens,
    heads_per_group,
    num_heads,
    qa_stride,
    qb_stride,
    ka_stride,
    kb_stride,
    v_stride,
    ka_head_stride,
    v_head_stride,
    A_SIZE: tl.constexpr,
    B_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    A_DIM: tl.constexpr,
    B_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    SHARES_VALUES: tl.constexpr,
    IS_DECODE: tl.constexpr,
    IS_EXACT: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Axis 0: tile of rows, axis 1: kv head, axis 2: piece of the keys (decode).

    Args:
        qa_ptr, qb_ptr: float32 [T, Q, A], [T, Q, B]; strides from one (t, q) to the next.
        ka_ptr, kb_ptr, v_ptr: [S, .] per kv head, row strides in values; kb has one head only.
        out_ptr: float32 [T, Q, V], or for decode [T, Q, MAX_SPLITS, V]; stats [T, Q, MAX_SPLITS, 2].
        scale: of the scores, times log2(e).
        pages_ptr: int32 page of each PAGE positions, if PAGE > 0.
        *_SIZE: values; *_DIM: the power of two that holds them; B_DIM = 0: no second piece.
    """
    group = tl.program_id(1)
    split = tl.program_id(2)
    first_position = tl.load(position_ptr)
    row = tl.arange(0, QUERIES)
    if IS_DECODE:
        tiles_per_token = (heads_per_group + QUERIES - 1) // QUERIES
        token = tl.program_id(0) // tiles_per_token
        t = token + row * 0
        h = (tl.program_id(0) % tiles_per_token) * QUERIES + row
        length = first_position + token + 1
        keys = split_keys(length, MIN_KEYS, MAX_SPLITS)
        begin = split * keys
        end = tl.minimum(begin + keys, length)
    else:
        flat = tl.program_id(0) * QUERIES + row
        t = flat // heads_per_group
        h = flat % heads_per_group
        begin = 0
        last = tl.minimum(((tl.program_id(0) + 1) * QUERIES - 1) // heads_per_group, num_tokens - 1)
        end = first_position + last + 1
    if begin < end:
        is_row = (t < num_tokens) & (h < heads_per_group)
        entry = t.to(tl.int64) * num_heads + group * heads_per_group + h
        da = tl.arange(0, A_DIM)
        a_mask = is_row[:, None] & (da < A_SIZE)[None, :]
        qa = tl.load(qa_ptr + (entry * qa_stride)[:, None] + da[None, :], mask=a_mask, other=0.0) * scale
        qa, qa_rest = _cut(qa)
        if B_DIM > 0:
            db = tl.arange(0, B_DIM)
            b_mask = is_row[:, None] & (db < B_SIZE)[None, :]
            qb = tl.load(qb_ptr + (entry * qb_stride)[:, None] + db[None, :], mask=b_mask, other=0.0) * scale
            qb, qb_rest = _cut(qb)
        dv = tl.arange(0, V_DIM)
        highest = tl.full((QUERIES,), -float("inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        mean = tl.zeros((QUERIES, V_DIM), tl.float32)
        for key in range(begin, end, KEYS):
            s = key + tl.arange(0, KEYS)
            is_key = s < end
            if PAGE > 0:
                place = tl.load(pages_ptr + s // PAGE, mask=is_key, other=0) * PAGE + s % PAGE
            else:
                place = s
            place = place.to(tl.int64)[:, None]
            ka = tl.load(
                ka_ptr + group * ka_head_stride + place * ka_stride + da[None, :],
                mask=is_key[:, None] & (da < A_SIZE)[None, :],
                other=0.0,
            ).to(tl.float16)
            scores = _scores(qa, qa_rest, ka, IS_EXACT)
            if B_DIM > 0:
                kb = tl.load(
                    kb_ptr + place * kb_stride + db[None, :], mask=is_key[:, None] & (db < B_SIZE)[None, :], other=0.0
                ).to(tl.float16)
                scores += _scores(qb, qb_rest, kb, IS_EXACT)
            scores = tl.where(is_key[None, :] & (s[None, :] <= first_position + t[:, None]), scores, -float("inf"))
            # The first tile holds a key that every row sees, so `highest` is finite from then on.
            new_highest = tl.maximum(highest, tl.max(scores, axis=1))
            shrink = tl.exp2(highest - new_highest)
            p = tl.exp2(scores - new_highest[:, None])
            total = total * shrink + tl.sum(p, axis=1)
            if SHARES_VALUES:
                v = ka
            else:
                v = tl.load(
                    v_ptr + group * v_head_stride + place * v_stride + dv[None, :],
                    mask=is_key[:, None] & (dv < V_SIZE)[None, :],
                    other=0.0,
                ).to(tl.float16)
            mean = tl.dot(p.to(tl.float16), v, mean * shrink[:, None])
            highest = new_highest
        v_mask = is_row[:, None] & (dv < V_SIZE)[None, :]
        if IS_DECODE:
            piece = entry * MAX_SPLITS + split
            tl.store(out_ptr + (piece * V_SIZE)[:, None] + dv[None, :], mean, mask=v_mask)
            tl.store(stats_ptr + piece * 2, highest, mask=is_row)
            tl.store(stats_ptr + piece * 2 + 1, total, mask=is_row)
        else:
            tl.store(out_ptr + (entry * V_SIZE)[:, None] + dv[None, :], mean / total[:, None], mask=v_mask)


@triton.jit
def merge_kernel(
    pieces_ptr,
    stats_ptr,
    out_ptr,
    position_ptr,
    num_heads,
    V_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """The pieces of one (token, head), in the order of their index; axis 0: token and head, axis 1: BLOCK values."""
    entry = tl.program_id(0).to(tl.int64)
    length = tl.load(position_ptr) + tl.program_id(0) // num_heads + 1
    keys = split_keys(length, MIN_KEYS, MAX_SPLITS)
    num_pieces = (length + keys - 1) // keys
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    every = tl.arange(0, MAX_SPLITS)
    stats = stats_ptr + entry * (MAX_SPLITS * 2)
    highest = tl.max(tl.load(stats + every * 2, mask=every < num_pieces, other=-float("inf")), axis=0)
    mean = tl.zeros((BLOCK,), tl.float32)
    total = 0.0
    for begin in range(0, num_pieces, AT_ONCE):
        s = begin + tl.arange(0, AT_ONCE)
        is_piece = s < num_pieces
        weight = tl.exp2(tl.load(stats + s * 2, mask=is_piece, other=-float("inf")) - highest)
        total += tl.sum(weight * tl.load(stats + s * 2 + 1, mask=is_piece, other=0.0), axis=0)
        piece = tl.load(
            pieces_ptr + (entry * MAX_SPLITS + s)[:, None] * V_SIZE + i[None, :],
            mask=is_piece[:, None] & (i < V_SIZE)[None, :],
            other=0.0,
        )
        mean += tl.sum(weight[:, None] * piece, axis=0)
    tl.store(out_ptr + entry * V_SIZE + i, mean / total, mask=i < V_SIZE)
