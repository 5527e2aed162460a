#!/usr/bin/env python3
"""Turn the demo model's Hugging Face checkpoint into a GGUF file (arch `deepseek2`), in float16.

    python export_gguf.py checkpoint demo-f16.gguf            # key/value up-projections split per head (attn_k_b, attn_v_b)
    python export_gguf.py checkpoint demo-f16.gguf --joint    # older layout: one attn_kv_b, as in many published files
    llama-quantize demo-f16.gguf demo-q4_k_m.gguf Q4_K_M      # llama.cpp's tool

Both layouts mean the same model. The metadata follows what llama.cpp writes for DeepSeek-V2-Lite; the only
addition is `attention.q_lora_rank = 0`, which llama.cpp needs to accept a V2 model without a query
low-rank projection that has not exactly 26 or 27 layers.
"""

from __future__ import annotations

import argparse
import glob
import json

import numpy as np
from gguf import GGUFWriter, RopeScalingType
from safetensors.numpy import load_file


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("checkpoint")
    ap.add_argument("output")
    ap.add_argument("--joint", action="store_true")
    args = ap.parse_args()

    config = json.load(open(f"{args.checkpoint}/config.json"))
    tokenizer = json.load(open(f"{args.checkpoint}/tokenizer.json"))
    weights: dict[str, np.ndarray] = {}
    for file in sorted(glob.glob(f"{args.checkpoint}/*.safetensors")):
        weights |= load_file(file)

    heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    latent, v_head, layers = config["kv_lora_rank"], config["v_head_dim"], config["num_hidden_layers"]
    yarn = config["rope_parameters"]

    w = GGUFWriter(args.output, "deepseek2")
    w.add_name("Expertide demo")
    w.add_description(
        "Small trained mixture-of-experts model with DeepSeek-V2's architecture: stories, facts, arithmetic, EN/ZH"
    )
    w.add_license("apache-2.0")
    w.add_vocab_size(config["vocab_size"])
    w.add_block_count(layers)
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(heads)
    w.add_head_count_kv(heads if args.joint else 1)
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_rope_freq_base(yarn["rope_theta"])
    w.add_rope_dimension_count(rope)
    w.add_rope_scaling_type(RopeScalingType.YARN)
    w.add_rope_scaling_factor(yarn["factor"])
    w.add_rope_scaling_orig_ctx_len(int(yarn["original_max_position_embeddings"]))
    w.add_rope_scaling_yarn_log_mul(0.1 * yarn["mscale_all_dim"])
    w.add_q_lora_rank(0)
    w.add_kv_lora_rank(latent)
    if args.joint:
        w.add_key_length(nope + rope)
        w.add_value_length(v_head)
    else:
        w.add_key_length(latent + rope)
        w.add_value_length(latent)
        w.add_key_length_mla(nope + rope)
        w.add_value_length_mla(v_head)
    w.add_leading_dense_block_count(config["first_k_dense_replace"])
    w.add_expert_feed_forward_length(config["moe_intermediate_size"])
    w.add_expert_count(config["n_routed_experts"])
    w.add_expert_used_count(config["num_experts_per_tok"])
    w.add_expert_shared_count(config["n_shared_experts"])
    w.add_expert_weights_scale(config["routed_scaling_factor"])
    w.add_file_type(1)

    vocab = tokenizer["model"]["vocab"]
    special = {t["id"] for t in tokenizer["added_tokens"]}
    tokens = [t for t, _ in sorted(vocab.items(), key=lambda item: item[1])]
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(tokens)
    w.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    w.add_token_merges(merges)
    w.add_bos_token_id(config["bos_token_id"])
    w.add_eos_token_id(config["eos_token_id"])
    w.add_pad_token_id(vocab["<|pad|>"])
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)
    w.add_chat_template(config["chat_template"])

    def put(name: str, array: np.ndarray) -> None:
        keep = array.ndim == 1 or "ffn_gate_inp" in name
        w.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32 if keep else np.float16))

    put("token_embd.weight", weights["model.embed_tokens.weight"])
    put("output_norm.weight", weights["model.norm.weight"])
    put("output.weight", weights["lm_head.weight"])
    for i in range(layers):
        src, dst = f"model.layers.{i}.", f"blk.{i}."
        put(dst + "attn_norm.weight", weights[src + "input_layernorm.weight"])
        put(dst + "attn_q.weight", weights[src + "self_attn.q_proj.weight"])
        put(dst + "attn_kv_a_mqa.weight", weights[src + "self_attn.kv_a_proj_with_mqa.weight"])
        put(dst + "attn_kv_a_norm.weight", weights[src + "self_attn.kv_a_layernorm.weight"])
        kv_b = weights[src + "self_attn.kv_b_proj.weight"]
        if args.joint:
            put(dst + "attn_kv_b.weight", kv_b)
        else:
            k_b, v_b = np.split(kv_b.reshape(heads, nope + v_head, latent), [nope], axis=1)
            put(dst + "attn_k_b.weight", k_b.transpose(0, 2, 1))
            put(dst + "attn_v_b.weight", v_b)
        put(dst + "attn_output.weight", weights[src + "self_attn.o_proj.weight"])
        put(dst + "ffn_norm.weight", weights[src + "post_attention_layernorm.weight"])
        if i < config["first_k_dense_replace"]:
            for part in ("gate", "up", "down"):
                put(f"{dst}ffn_{part}.weight", weights[f"{src}mlp.{part}_proj.weight"])
            continue
        put(dst + "ffn_gate_inp.weight", weights[src + "mlp.gate.weight"])
        for part in ("gate", "up", "down"):
            stack = [weights[f"{src}mlp.experts.{e}.{part}_proj.weight"] for e in range(config["n_routed_experts"])]
            put(f"{dst}ffn_{part}_exps.weight", np.stack(stack))
            put(f"{dst}ffn_{part}_shexp.weight", weights[f"{src}mlp.shared_experts.{part}_proj.weight"])

    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    main()
