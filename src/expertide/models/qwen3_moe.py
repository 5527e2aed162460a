"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder-30B-A3B, …): GGUF architecture `qwen3moe`.

What is special, and where it is described:

    attention   GQA; RMSNorm of each query and key head, one weight of D for all heads,
                before rope                                     arXiv 2505.09388, section 2; Qwen3MoeAttention
    positions   rope on halves (i, i + D/2) of the whole head; long contexts by YaRN, whose factor
                m = 0.1 * ln(f) + 1 goes on cos and sin         _compute_yarn_parameters in transformers
    layers      MoE everywhere in released models. `mlp_only_layers` and `decoder_sparse_step` may make some dense; such
                a GGUF file shows it by its tensors (llama.cpp does not load one)
    router      softmax, no shared expert, K weights renormalised: released checkpoints say so (`norm_topk_prob`), GGUF
                files mostly do not, and llama.cpp always does  Qwen3MoeTopKRouter
    output      tied to the embedding where the file has no output matrix

Everything else is the family's (`grouped_decoder`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from expertide.formats.tensors import ModelFiles
from expertide.kernels.rope import RopeSpec
from expertide.kernels.router import RouterSpec
from expertide.models.grouped_decoder import Family, GroupedArchitecture, GroupedConfig, read_gguf, read_hf

HF_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.attn_q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "blk.{}.attn_k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
    "blk.{}.ffn_gate_inp.weight": "model.layers.{}.mlp.gate.weight",
    "blk.{}.ffn_gate_exps.weight": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "blk.{}.ffn_up_exps.weight": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "blk.{}.ffn_down_exps.weight": "model.layers.{}.mlp.experts.{}.down_proj.weight",
}

FAMILY = Family(
    name="qwen3moe",
    hf_type="qwen3_moe",
    hf_names=HF_NAMES,
    qk_norm="head",
    rope_pairs="halves",
    renormalize=True,
    hf_renormalize=False,
)


class Qwen3MoeArchitecture(GroupedArchitecture):
    """Implements `architecture.Architecture` for GGUF files of architecture `qwen3moe`."""

    family = FAMILY


def from_gguf(files: ModelFiles) -> GroupedConfig:
    """See `grouped_decoder.read_gguf`."""
    return read_gguf(files, FAMILY)


def from_hf(config: Mapping[str, object]) -> GroupedConfig:
    """Read a config.json of model type qwen3_moe; see `grouped_decoder.read_hf`."""
    return read_hf(config, FAMILY)


def tiny_config(**overrides: object) -> GroupedConfig:
    """A model of a few thousand weights with every feature of Qwen3-30B-A3B; fields may be replaced."""
    config = GroupedConfig(
        num_layers=3,
        hidden_size=64,
        vocab_size=160,
        context_length=640,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        dense_inner=0,
        moe_inner=32,
        moe_layers=(0, 1, 2),
        router=RouterSpec(num_experts=8, num_experts_per_tok=3, renormalize=True),
        rope=RopeSpec(dim=16, theta=1e6, pairs="halves"),
        norm_eps=1e-6,
    )
    return replace(config, **overrides)  # type: ignore[arg-type]
