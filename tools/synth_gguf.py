#!/usr/bin/env python3
"""Write a GGUF file with a real model's exact shapes and quantisation mix, filled with random weights.

Real checkpoints are tens of gigabytes and are not always at hand. What speed, memory and I/O
depend on is the shapes, the quantised block formats and how often each expert is chosen, not what
the weights say. This tool writes those faithfully:

* shapes and per-tensor GGML types of the named preset (``deepseek-v2-lite`` is the Q4_K_M mix
  that llama-quantize produces: Q4_K, with Q8_0/Q5_0 down projections, Q6_K output, F32 norms);
* quantised blocks whose dequantised values have zero mean and the requested standard deviation,
  so that activations stay finite in any engine;
* router rows scaled so that expert popularity is uneven (Zipf exponent ``--zipf``).

    python synth_gguf.py deepseek-v2-lite out.gguf              # 10.4 GB, about two minutes
    python synth_gguf.py deepseek-v2-lite out.gguf --layers 6   # same layer shapes, fewer layers

Needs numpy and gguf. The file loads in llama.cpp, so both engines can be measured on one file.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES


@dataclass(frozen=True)
class Preset:
    arch: str
    hidden: int
    layers: int
    heads: int
    kv_lora: int
    nope: int
    rope: int
    v_head: int
    dense_ffn: int
    moe_ffn: int
    experts: int
    shared: int
    top_k: int
    leading_dense: int
    vocab: int
    context: int


PRESETS = {
    "deepseek-v2-lite": Preset(
        arch="deepseek2",
        hidden=2048,
        layers=27,
        heads=16,
        kv_lora=512,
        nope=128,
        rope=64,
        v_head=128,
        dense_ffn=10944,
        moe_ffn=1408,
        experts=64,
        shared=2,
        top_k=6,
        leading_dense=1,
        vocab=102400,
        context=163840,
    ),
}


def more_bits(layer: int, layers: int) -> bool:
    """The layers to which llama.cpp's Q4_K_M recipe gives the larger type."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def fallback(qtype: T, row: int) -> T:
    """K-quants need rows of a multiple of 256; llama.cpp falls back to these."""
    if row % 256 == 0:
        return qtype
    return {T.Q4_K: T.Q5_0, T.Q6_K: T.Q8_0}[qtype]


def random_blocks(rng: np.random.Generator, qtype: T, rows: int, row: int, std: float) -> np.ndarray:
    """Return uint8[rows, bytes_per_row] of valid blocks; dequantised: zero mean, about `std`."""
    block, size = GGML_QUANT_SIZES[qtype]
    n = rows * row // block
    raw = rng.integers(0, 256, (n, size), dtype=np.uint8)

    def half(x: float) -> np.ndarray:
        return np.frombuffer(np.float16(x).tobytes(), dtype=np.uint8)

    if qtype == T.Q4_K:  # d, dmin, 12 bytes of 6-bit scales and mins, 128 bytes of nibbles
        scale = rng.integers(24, 56, (n, 8), dtype=np.uint8)  # the same for scale and min
        d = std / (4.61 * 40)
        raw[:, 0:2], raw[:, 2:4] = half(d), half(7.5 * d)
        low, high = scale[:, :4], scale[:, 4:]
        raw[:, 4:8] = (low & 63) | ((high >> 4) << 6)
        raw[:, 8:12] = (low & 63) | ((high >> 4) << 6)
        raw[:, 12:16] = (high & 15) | ((high & 15) << 4)
    elif qtype == T.Q6_K:  # ql[128] qh[64] scales[16] d
        raw[:, 192:208] = rng.integers(32, 64, (n, 16), dtype=np.uint8)
        raw[:, 208:210] = half(std / (18.5 * 48))
    elif qtype == T.Q5_0:  # d, qh[4], qs[16]; values -16..15
        raw[:, 0:2] = half(std / 9.23)
    elif qtype == T.Q8_0:  # d, qs[32]; values -128..127
        raw[:, 0:2] = half(std / 73.9)
    else:
        raise ValueError(f"no random blocks for {qtype.name}")
    return raw.reshape(rows, row // block * size)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("preset", choices=PRESETS)
    ap.add_argument("output")
    ap.add_argument("--layers", type=int, help="write only this many layers")
    ap.add_argument("--std", type=float, default=0.02, help="standard deviation of weights")
    ap.add_argument("--zipf", type=float, default=0.4, help="0: all experts equally popular")
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    p, rng = PRESETS[args.preset], np.random.default_rng(args.seed)
    layers = args.layers or p.layers

    w = GGUFWriter(args.output, p.arch)
    w.add_name(f"synthetic {args.preset}")
    w.add_block_count(layers)
    w.add_context_length(p.context)
    w.add_embedding_length(p.hidden)
    w.add_feed_forward_length(p.dense_ffn)
    w.add_head_count(p.heads)
    w.add_head_count_kv(p.heads)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(10000.0)
    w.add_rope_dimension_count(p.rope)
    w.add_vocab_size(p.vocab)
    w.add_leading_dense_block_count(p.leading_dense)
    w.add_kv_lora_rank(p.kv_lora)
    w.add_key_length(p.nope + p.rope)
    w.add_value_length(p.v_head)
    w.add_expert_feed_forward_length(p.moe_ffn)
    w.add_expert_count(p.experts)
    w.add_expert_used_count(p.top_k)
    w.add_expert_shared_count(p.shared)
    w.add_expert_weights_scale(1.0)
    w.add_rope_scaling_type(__import__("gguf").RopeScalingType.YARN)
    w.add_rope_scaling_factor(40.0)
    w.add_rope_scaling_orig_ctx_len(4096)
    w.add_rope_scaling_yarn_log_mul(0.0707)
    w.add_file_type(15)
    # a byte-level vocabulary, padded to full size with tokens that no text produces
    byte_chars = [c for c in range(256) if 33 <= c < 127 or 161 <= c < 173 or 174 <= c < 256]
    spare, table = 256, {c: chr(c) for c in byte_chars}
    for c in range(256):
        if c not in table:
            table[c], spare = chr(spare), spare + 1
    tokens = [table[c] for c in range(256)]
    merges = [f"{tokens[ord(a)]} {tokens[ord(b)]}" for a, b in ("th", "in", "er", "an", "on")]
    tokens += [m.replace(" ", "") for m in merges]
    tokens += ["<|bos|>", "<|eos|>"] + [f"<|unused{i}|>" for i in range(p.vocab - len(tokens) - 2)]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("deepseek-llm")
    w.add_token_list(tokens)
    w.add_token_types([1] * 261 + [3, 3] + [5] * (p.vocab - 263))
    w.add_token_merges(merges)
    w.add_bos_token_id(261)
    w.add_eos_token_id(262)
    w.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")

    h, qk = p.hidden, p.nope + p.rope
    plan: list[tuple[str, tuple[int, ...], T]] = [  # shape is numpy order: (experts,) rows, row
        ("token_embd.weight", (p.vocab, h), T.Q4_K),
        ("output_norm.weight", (h,), T.F32),
        ("output.weight", (p.vocab, h), T.Q6_K),
    ]
    for i in range(layers):
        down = T.Q6_K if more_bits(i, layers) else T.Q4_K
        plan += [
            (f"blk.{i}.attn_norm.weight", (h,), T.F32),
            (f"blk.{i}.attn_q.weight", (p.heads * qk, h), T.Q4_K),
            (f"blk.{i}.attn_kv_a_mqa.weight", (p.kv_lora + p.rope, h), T.Q4_K),
            (f"blk.{i}.attn_kv_a_norm.weight", (p.kv_lora,), T.F32),
            (f"blk.{i}.attn_kv_b.weight", (p.heads * (p.nope + p.v_head), p.kv_lora), T.Q4_K),
            (f"blk.{i}.attn_output.weight", (h, p.heads * p.v_head), T.Q4_K),
            (f"blk.{i}.ffn_norm.weight", (h,), T.F32),
        ]
        if i < p.leading_dense:
            plan += [
                (f"blk.{i}.ffn_gate.weight", (p.dense_ffn, h), T.Q4_K),
                (f"blk.{i}.ffn_up.weight", (p.dense_ffn, h), T.Q4_K),
                (f"blk.{i}.ffn_down.weight", (h, p.dense_ffn), fallback(down, p.dense_ffn)),
            ]
            continue
        shared = p.moe_ffn * p.shared
        plan += [
            (f"blk.{i}.ffn_gate_inp.weight", (p.experts, h), T.F32),
            (f"blk.{i}.ffn_gate_exps.weight", (p.experts, p.moe_ffn, h), T.Q4_K),
            (f"blk.{i}.ffn_up_exps.weight", (p.experts, p.moe_ffn, h), T.Q4_K),
            (f"blk.{i}.ffn_down_exps.weight", (p.experts, h, p.moe_ffn), fallback(down, p.moe_ffn)),
            (f"blk.{i}.ffn_gate_shexp.weight", (shared, h), T.Q4_K),
            (f"blk.{i}.ffn_up_shexp.weight", (shared, h), T.Q4_K),
            (f"blk.{i}.ffn_down_shexp.weight", (h, shared), fallback(down, shared)),
        ]

    for name, shape, qtype in plan:
        if qtype == T.F32:
            w.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        else:
            block, size = GGML_QUANT_SIZES[qtype]
            packed = (*shape[:-1], shape[-1] // block * size)
            w.add_tensor_info(name, packed, np.dtype(np.uint8), int(np.prod(packed)), raw_dtype=qtype)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()

    popularity = 1.0 / np.arange(1, p.experts + 1) ** args.zipf
    for name, shape, qtype in plan:
        if name.endswith("norm.weight"):
            data = np.ones(shape, np.float32)
        elif qtype == T.F32:  # router: logits of std about 1.5, rows scaled by popularity
            scale = rng.permutation(popularity / popularity.mean())[:, None]
            data = (rng.standard_normal(shape) * scale * 1.5 / np.sqrt(h)).astype(np.float32)
        else:
            data = np.concatenate(
                [
                    random_blocks(rng, qtype, shape[-2], shape[-1], args.std)
                    for _ in range(shape[0] if len(shape) == 3 else 1)
                ]
            )
        w.write_tensor_data(data)
    w.close()


if __name__ == "__main__":
    main()
