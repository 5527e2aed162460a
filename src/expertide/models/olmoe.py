"""OLMoE-1B-7B: GGUF architecture `olmoe`.

What is special, and where it is described:

    attention   as many key/value heads as query heads; RMSNorm of the queries of all heads together, and of the keys,
                before rope                                         arXiv 2409.02060, section 2; OlmoeAttention
    positions   rope on halves (i, i + D/2) of the whole head
    layers      MoE everywhere; `feed_forward_length` is the inner size of an expert
    router      softmax; the K weights are what the softmax gave, not renormalised       OlmoeTopKRouter

Clamped queries, keys and values (`clip_qkv`) are refused: no released model has them. Everything else is what
its relatives have too (`grouped_config`, `grouped_decoder`).
"""

from __future__ import annotations

from dataclasses import replace

from expertide.kernels.rope import RopeSpec
from expertide.models.grouped_config import TINY, Family, GroupedConfig
from expertide.models.grouped_decoder import GroupedArchitecture

FAMILY = Family(
    name="olmoe",
    hf_type="olmoe",
    hf_names={
        "blk.{}.attn_q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
        "blk.{}.attn_k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    },
    rope_pairs="halves",
    renormalize=False,
    hf_renormalize=False,
    qk_norm="whole",
    hf_moe_inner="intermediate_size",
)


class OlmoeArchitecture(GroupedArchitecture):
    """Implements `architecture.Architecture` for GGUF files of architecture `olmoe`."""

    family = FAMILY


def tiny_config(**overrides: object) -> GroupedConfig:
    """A model of a few thousand weights with every feature of OLMoE-1B-7B; fields may be replaced."""
    config = replace(TINY, num_kv_heads=4, rope=RopeSpec(dim=16, theta=1e4, pairs="halves"), norm_eps=1e-5)
    return replace(config, **overrides)  # type: ignore[arg-type]
