"""What families with grouped-query attention and a softmax router are, as numbers; from GGUF metadata or config.json.

A family (`qwen3_moe.py`, …) says what is its own in a `Family`. What neither a family nor the shared layers know is
refused by name, and so are keys that contradict each other or the tensors. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from expertide.errors import FormatError, UnsupportedError
from expertide.formats.tensors import ModelFiles
from expertide.kernels.rope import RopePairs, RopeSpec, yarn_magnitude
from expertide.kernels.router import RouterSpec
from expertide.models.config_values import (
    GgufKeys,
    JsonFields,
    check_numbers,
    gguf_moe_inner,
    gguf_num_layers,
    gguf_rope_base,
    gguf_vocab_size,
    gguf_yarn,
    hf_rope,
)

# Keys of other families that change what is computed, and the values that mean that they do not.
_NEUTRAL_KEYS: Mapping[str, tuple[float, ...]] = {
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_group_count": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
}


# GGUF name -> checkpoint name, where all of these families agree. {} is the layer; a stacked expert tensor stands for
# one checkpoint tensor per expert, whose number takes the second {}.
HF_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
    "blk.{}.ffn_gate_inp.weight": "model.layers.{}.mlp.gate.weight",
    "blk.{}.ffn_gate_exps.weight": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "blk.{}.ffn_up_exps.weight": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "blk.{}.ffn_down_exps.weight": "model.layers.{}.mlp.experts.{}.down_proj.weight",
}


@dataclass(frozen=True)
class Family:
    """What sets one family apart from the others.

    Attributes:
        name: as GGUF files say in `general.architecture`.
        hf_type: `model_type` of config.json.
        hf_names: what checkpoints have beside `HF_NAMES`.
        qk_norm: RMSNorm of queries and keys before rope: of each head with one weight of D, or of all heads together.
        has_qkv_bias: a bias on queries, keys and values.
        has_shared_expert: beside the routed ones, times sigmoid(shared_gate · x).
        rope_pairs: in GGUF files. Checkpoints have halves, for all families here.
        renormalize: whether a token's K weights sum to 1 where a GGUF file does not say; most do not.
        hf_renormalize: the same for config.json, as the family's config class in transformers has it.
        hf_moe_inner: the field of config.json that holds F.
    """

    name: str
    hf_type: str
    hf_names: Mapping[str, str]
    rope_pairs: RopePairs
    renormalize: bool
    hf_renormalize: bool
    qk_norm: Literal["none", "head", "whole"] = "none"
    has_qkv_bias: bool = False
    has_shared_expert: bool = False
    hf_moe_inner: str = "moe_intermediate_size"


@dataclass(frozen=True)
class GroupedConfig:
    """Everything the layers need to know; made and checked by `read_gguf` or `read_hf`.

    Attributes:
        context_length: tokens, prompt and answer together.
        num_heads, num_kv_heads, head_dim: Q, G, D.
        dense_inner: inner size of dense layers' MLP; 0 where there are none.
        moe_inner: F, inner size of one routed expert.
        shared_inner: inner size of the shared expert; 0 where there is none.
        moe_layers: ids of the layers with routed experts, ascending; at least one.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dense_inner: int
    moe_inner: int
    moe_layers: tuple[int, ...]
    router: RouterSpec
    rope: RopeSpec
    norm_eps: float
    shared_inner: int = 0

    @property
    def num_experts(self) -> int:
        return self.router.num_experts

    @property
    def num_experts_per_tok(self) -> int:
        return self.router.num_experts_per_tok

    @property
    def attention_scale(self) -> float:
        """Factor on scores; YaRN's is on cos and sin (`rope.magnitude`)."""
        return float(self.head_dim**-0.5)


def read_gguf(files: ModelFiles, family: Family) -> GroupedConfig:
    """Read the keys, and from the tensor directory what has no key: which layers are MoE.

    Raises:
        FormatError: a key is missing, of the wrong type, or contradicts another or the tensors.
        UnsupportedError: a value that has no code here.
    """
    keys = GgufKeys(files, family.name)
    for key, neutral in _NEUTRAL_KEYS.items():
        if (value := keys.number(key, default=0)) not in neutral:
            raise UnsupportedError(f"{keys.named(key)} is {value:g}; architecture {family.name!r} is known without it")
    if not family.has_shared_expert and (shared := keys.count("expert_shared_count")):
        raise UnsupportedError(
            f"{keys.named('expert_shared_count')} is {shared}; architecture {family.name!r} is known without it"
        )
    num_layers = gguf_num_layers(keys, files)
    hidden_size = keys.positive("embedding_length")
    num_heads = keys.uniform("attention.head_count", num_layers)
    num_kv_heads = num_heads
    if keys.has("attention.head_count_kv"):
        num_kv_heads = keys.uniform("attention.head_count_kv", num_layers)
    if num_heads % num_kv_heads:
        raise keys.error("attention.head_count_kv", f"{num_kv_heads}, which does not divide {num_heads} query heads")
    head_dim = _gguf_head_dim(keys, hidden_size, num_heads)
    yarn = gguf_yarn(keys)
    magnitude = yarn_magnitude(yarn.factor, 1.0) if yarn else 1.0
    moe_layers = tuple(layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" in files.tensors)
    if not moe_layers:
        # The first one stands for all of them: the message about tensors gives the names that are there.
        moe_layers = (0,)
    config = GroupedConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=gguf_vocab_size(keys, files),
        context_length=keys.positive("context_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dense_inner=keys.uniform("feed_forward_length", num_layers) if len(moe_layers) < num_layers else 0,
        moe_inner=gguf_moe_inner(keys, files, moe_layers, num_layers),
        moe_layers=moe_layers,
        router=_gguf_router(keys, family),
        rope=RopeSpec(head_dim, gguf_rope_base(keys), yarn, magnitude, family.rope_pairs),
        norm_eps=keys.positive_float("attention.layer_norm_rms_epsilon"),
        shared_inner=_gguf_shared_inner(keys, files, moe_layers[0]) if family.has_shared_expert else 0,
    )
    check_numbers(keys.file, config.norm_eps, config.rope, config.attention_scale, config.router)
    return config


def _gguf_head_dim(keys: GgufKeys, hidden_size: int, num_heads: int) -> int:
    """D; values and rotation must have the same."""
    if keys.has("attention.key_length"):
        head_dim = keys.positive("attention.key_length")
    elif hidden_size % num_heads:
        raise keys.error("attention.head_count", f"{num_heads}, which does not divide the width of {hidden_size}")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise keys.error("attention.key_length", f"{head_dim}, expected an even number")
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.has(key) and keys.positive(key) != head_dim:
            raise UnsupportedError(
                f"{keys.named(key)} is {keys.positive(key)}, known here only as the head size, {head_dim}"
            )
    return head_dim


def _gguf_shared_inner(keys: GgufKeys, files: ModelFiles, moe_layer: int) -> int:
    """The key, else the height of the first shared expert."""
    gate = files.tensors.get(f"blk.{moe_layer}.ffn_gate_shexp.weight")
    if keys.has("expert_shared_feed_forward_length") or gate is None:
        return keys.positive("expert_shared_feed_forward_length")
    return gate.shape[0]


def _gguf_router(keys: GgufKeys, family: Family) -> RouterSpec:
    gating = keys.count("expert_gating_func")
    if gating not in (0, 1):  # 0: no key, or one without a value
        raise UnsupportedError(f"{keys.named('expert_gating_func')} is {gating}; known here: 1 softmax")
    try:
        return RouterSpec(
            num_experts=keys.positive("expert_count"),
            num_experts_per_tok=keys.positive("expert_used_count"),
            renormalize=keys.switch("expert_weights_norm", default=family.renormalize),
            scale=keys.non_negative_float("expert_weights_scale", default=0.0) or 1.0,  # 0: no scale, as llama.cpp
        )
    except UnsupportedError as error:
        raise UnsupportedError(f"{keys.file}: {error}") from None


def read_hf(config: Mapping[str, object], family: Family) -> GroupedConfig:
    """Read a config.json.

    Raises:
        FormatError: a field is missing or of the wrong type.
        UnsupportedError: a value that has no code here.
    """
    fields = JsonFields(config)
    kind = fields.text("model_type", default="")
    if kind != family.hf_type:
        raise UnsupportedError(f"config.json: model_type {kind!r} is not known here; known: {family.hf_type}")
    if (act := fields.text("hidden_act", default="silu")) != "silu":
        raise UnsupportedError(f"config.json: hidden_act {act!r} is not known here; known: silu")
    for name in ("attention_bias", "use_sliding_window", "clip_qkv"):
        if config.get(name):
            raise UnsupportedError(f"config.json: {name} is not known here")
    if bool(config.get("qkv_bias", family.has_qkv_bias)) != family.has_qkv_bias:
        raise UnsupportedError(
            f"config.json: qkv_bias is {config['qkv_bias']}, known for {kind}: {family.has_qkv_bias}"
        )
    num_layers, hidden_size = fields.positive("num_hidden_layers"), fields.positive("hidden_size")
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads") or num_heads
    head_dim = fields.count("head_dim") or hidden_size // num_heads
    if num_heads % num_kv_heads or head_dim % 2:
        raise FormatError(
            f"config.json: {num_heads} heads of {head_dim} on {num_kv_heads} key/value heads, expected an even size "
            "and a divisor of the heads"
        )
    moe_layers = _hf_moe_layers(config, num_layers)
    read = GroupedConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=fields.positive("vocab_size"),
        context_length=fields.positive("max_position_embeddings"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dense_inner=fields.positive("intermediate_size") if len(moe_layers) < num_layers else 0,
        moe_inner=fields.positive(family.hf_moe_inner),
        moe_layers=moe_layers,
        router=RouterSpec(
            # transformers 5 writes the second name.
            num_experts=fields.count("num_experts") or fields.positive("num_local_experts"),
            num_experts_per_tok=fields.positive("num_experts_per_tok"),
            renormalize=bool(config.get("norm_topk_prob", family.hf_renormalize)),
        ),
        rope=hf_rope(config, head_dim, pairs="halves"),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        shared_inner=fields.positive("shared_expert_intermediate_size") if family.has_shared_expert else 0,
    )
    check_numbers("config.json", read.norm_eps, read.rope, read.attention_scale, read.router)
    return read


def _hf_moe_layers(config: Mapping[str, object], num_layers: int) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer, without those of `mlp_only_layers`."""
    step = JsonFields(config).count("decoder_sparse_step") or 1
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(isinstance(layer, int) for layer in dense):
        raise FormatError(f"config.json: mlp_only_layers is {dense!r}, expected a list of layer numbers")
    moe_layers = tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense)
    if not moe_layers:
        raise UnsupportedError("config.json: no layer has routed experts; dense models are not known here")
    return moe_layers


# The part that the families' smallest models have in common: a few thousand weights, every kind of layer.
TINY = GroupedConfig(
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
    router=RouterSpec(num_experts=8, num_experts_per_tok=3),
    rope=RopeSpec(dim=16, theta=1e6, pairs="halves"),
    norm_eps=1e-6,
)
