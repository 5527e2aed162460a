"""Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B: GGUF architecture `qwen2moe`.

What is special, and where it is described:

    attention   GQA with biases on queries, keys and values, none on the output          Qwen2MoeAttention
    positions   rope on halves (i, i + D/2) of the whole head
    layers      MoE everywhere in released models
    router      softmax; the K weights are what the softmax gave, not renormalised       Qwen2MoeTopKRouter
    shared      one expert for every token, times sigmoid of one dot product with x      Qwen2MoeSparseMoeBlock

Everything else is what its relatives have too (`grouped_config`, `grouped_decoder`).
"""

from __future__ import annotations

from dataclasses import replace

from expertide.models.grouped_config import TINY, Family, GroupedConfig
from expertide.models.grouped_decoder import GroupedArchitecture

FAMILY = Family(
    name="qwen2moe",
    hf_type="qwen2_moe",
    hf_names={
        "blk.{}.attn_q.bias": "model.layers.{}.self_attn.q_proj.bias",
        "blk.{}.attn_k.bias": "model.layers.{}.self_attn.k_proj.bias",
        "blk.{}.attn_v.bias": "model.layers.{}.self_attn.v_proj.bias",
        "blk.{}.ffn_gate_inp_shexp.weight": "model.layers.{}.mlp.shared_expert_gate.weight",
        "blk.{}.ffn_gate_shexp.weight": "model.layers.{}.mlp.shared_expert.gate_proj.weight",
        "blk.{}.ffn_up_shexp.weight": "model.layers.{}.mlp.shared_expert.up_proj.weight",
        "blk.{}.ffn_down_shexp.weight": "model.layers.{}.mlp.shared_expert.down_proj.weight",
    },
    rope_pairs="halves",
    renormalize=False,
    hf_renormalize=False,
    has_qkv_bias=True,
    has_shared_expert=True,
)


class Qwen2MoeArchitecture(GroupedArchitecture):
    """Implements `architecture.Architecture` for GGUF files of architecture `qwen2moe`."""

    family = FAMILY


def tiny_config(**overrides: object) -> GroupedConfig:
    """A model of a few thousand weights with every feature of Qwen1.5-MoE; fields may be replaced."""
    config = replace(TINY, shared_inner=80)
    return replace(config, **overrides)  # type: ignore[arg-type]
