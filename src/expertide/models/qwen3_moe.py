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

Everything else is what its relatives have too (`grouped_config`, `grouped_decoder`).
"""

from __future__ import annotations

from dataclasses import replace

from expertide.kernels.router import RouterSpec
from expertide.models.grouped_config import TINY, Family, GroupedConfig
from expertide.models.grouped_decoder import GroupedArchitecture

FAMILY = Family(
    name="qwen3moe",
    hf_type="qwen3_moe",
    hf_names={
        "blk.{}.attn_q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
        "blk.{}.attn_k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    },
    qk_norm="head",
    rope_pairs="halves",
    renormalize=True,
    hf_renormalize=False,
)


class Qwen3MoeArchitecture(GroupedArchitecture):
    """Implements `architecture.Architecture` for GGUF files of architecture `qwen3moe`."""

    family = FAMILY


def tiny_config(**overrides: object) -> GroupedConfig:
    """A model of a few thousand weights with every feature of Qwen3-30B-A3B; fields may be replaced."""
    config = replace(TINY, router=RouterSpec(num_experts=8, num_experts_per_tok=3, renormalize=True))
    return replace(config, **overrides)  # type: ignore[arg-type]
