"""What a DeepSeek-V2/V3 model is, as numbers; read from GGUF metadata or from config.json, and checked.

Values that no layer here computes are refused by name, and so are keys that contradict each other or the tensors.
No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from expertide.errors import UnsupportedError
from expertide.formats.tensors import ModelFiles
from expertide.kernels.rope import RopeSpec, YarnSpec, yarn_magnitude
from expertide.kernels.router import RouterSpec, Score
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
    hf_rope_section,
)

# The two latent norms keep the default of the original RMSNorm class whatever the config says (transformers, DeepseekV2
# and DeepseekV3); the layer norms follow the config. All DeepSeek models have 1e-6 in both places.
LATENT_NORM_EPS = 1e-6

GATING_FUNCTIONS: Mapping[int, Score] = {1: "softmax", 2: "sigmoid"}  # llama_expert_gating_func_type in llama.cpp
UNSUPPORTED_GATING = {3: "softmax over the chosen logits", 4: "sqrt-softplus"}


@dataclass(frozen=True)
class DeepseekV2Config:
    """Everything the layers need to know; made and checked by `from_gguf` or `from_hf`.

    Attributes:
        context_length: tokens, prompt and answer together.
        query_rank: R, or None for plain queries.
        kv_rank: L.
        nope_dim, rope_dim, value_dim: N, C, U of each head.
        dense_inner: inner size of dense layers' MLP.
        moe_inner: F, inner size of one routed expert, and of one shared one; 0 for dense-only models.
        moe_layers: ids of the layers with routed experts, ascending; empty for dense-only models.
        router: None for dense-only models.
        attention_scale: factor on scores, YaRN's m² included.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    dense_inner: int
    moe_inner: int
    num_shared_experts: int
    moe_layers: tuple[int, ...]
    router: RouterSpec | None
    rope: RopeSpec
    attention_scale: float
    norm_eps: float

    @property
    def num_experts(self) -> int:
        return self.router.num_experts if self.router else 0

    @property
    def num_experts_per_tok(self) -> int:
        return self.router.num_experts_per_tok if self.router else 0

    @property
    def head_dim(self) -> int:
        """Of queries and keys: nope and rope dims together."""
        return self.nope_dim + self.rope_dim

    @classmethod
    def from_gguf(cls, files: ModelFiles) -> DeepseekV2Config:
        """Read the keys, and from the tensor directory what has no key: which layers are MoE, which queries are plain.

        Raises:
            FormatError: a key is missing, of the wrong type, or contradicts another or the tensors.
            UnsupportedError: a value that has no code here.
        """
        return _checked(_from_gguf(files), str(files.files[0]))

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> DeepseekV2Config:
        """Read a config.json of model type deepseek_v2 or deepseek_v3.

        Raises:
            FormatError: a field is missing or of the wrong type.
            UnsupportedError: a value that has no code here.
        """
        return _checked(_from_hf(config), "config.json")


def tiny_config(**overrides: object) -> DeepseekV2Config:
    """A model of a few thousand weights with every feature of V2-Lite; fields may be replaced."""
    yarn = YarnSpec(factor=40.0, original_context=16)
    config = DeepseekV2Config(
        num_layers=3,
        hidden_size=64,
        vocab_size=160,
        context_length=640,
        num_heads=4,
        query_rank=None,
        kv_rank=32,
        nope_dim=16,
        rope_dim=8,
        value_dim=16,
        dense_inner=96,
        moe_inner=32,
        num_shared_experts=2,
        moe_layers=(1, 2),
        router=RouterSpec(num_experts=8, num_experts_per_tok=3),
        rope=RopeSpec(dim=8, theta=10000.0, yarn=yarn),
        attention_scale=attention_scale(24, yarn, mscale_all_dim=0.707),
        norm_eps=1e-6,
    )
    return replace(config, **overrides)  # type: ignore[arg-type]


def attention_scale(head_dim: int, yarn: YarnSpec | None, *, mscale_all_dim: float) -> float:
    """1/sqrt(N + C), times m(factor, mscale_all_dim)² under YaRN."""
    m = yarn_magnitude(yarn.factor, mscale_all_dim) if yarn else 1.0
    return m * m / math.sqrt(head_dim)


def _checked(config: DeepseekV2Config, source: str) -> DeepseekV2Config:
    check_numbers(source, config.norm_eps, config.rope, config.attention_scale, config.router)
    return config


def _from_gguf(files: ModelFiles) -> DeepseekV2Config:
    keys = GgufKeys(files, "deepseek2")
    num_layers = gguf_num_layers(keys, files, num_unused=keys.count("nextn_predict_layers"))
    rope_dim = keys.positive("rope.dimension_count")
    if rope_dim % 2:
        raise keys.error("rope.dimension_count", f"{rope_dim}, expected an even number")
    # Files with split unfolding matrices describe the cached row in key_length, and one head in key_length_mla.
    is_mla = keys.has("attention.key_length_mla") or keys.has("attention.value_length_mla")
    suffix = "_mla" if is_mla else ""
    head_dim = keys.positive("attention.key_length" + suffix)
    if head_dim <= rope_dim:
        raise keys.error("attention.key_length" + suffix, f"{head_dim}, expected more than the {rope_dim} rope dims")
    yarn, mscale_all_dim = _gguf_yarn(keys)
    moe_layers = _gguf_moe_layers(keys, files, num_layers)
    return DeepseekV2Config(
        num_layers=num_layers,
        hidden_size=keys.positive("embedding_length"),
        vocab_size=gguf_vocab_size(keys, files),
        context_length=keys.positive("context_length"),
        num_heads=keys.uniform("attention.head_count", num_layers),
        query_rank=_gguf_query_rank(keys, files),
        kv_rank=keys.positive("attention.kv_lora_rank"),
        nope_dim=head_dim - rope_dim,
        rope_dim=rope_dim,
        value_dim=keys.positive("attention.value_length" + suffix),
        dense_inner=keys.uniform("feed_forward_length", num_layers) if len(moe_layers) < num_layers else 0,
        moe_inner=gguf_moe_inner(keys, files, moe_layers, num_layers),
        num_shared_experts=keys.count("expert_shared_count") if moe_layers else 0,
        moe_layers=moe_layers,
        router=_gguf_router(keys, files, moe_layers, num_layers) if moe_layers else None,
        rope=RopeSpec(rope_dim, gguf_rope_base(keys), yarn),
        attention_scale=attention_scale(head_dim, yarn, mscale_all_dim=mscale_all_dim),
        norm_eps=keys.positive_float("attention.layer_norm_rms_epsilon"),
    )


def _gguf_yarn(keys: GgufKeys) -> tuple[YarnSpec | None, float]:
    """(YaRN, mscale_all_dim)."""
    yarn = gguf_yarn(keys)
    if yarn is None:
        return None, 0.0
    # Without this key neither the softmax scale (37 % on V2-Lite) nor the size of cos and sin can be known.
    if not keys.has("rope.scaling.yarn_log_multiplier"):
        raise UnsupportedError(
            f"{keys.named('rope.scaling.yarn_log_multiplier')} is missing beside rope.scaling.type yarn: the attention "
            "scale of this model is unknown; files converted since May 2024 have the key"
        )
    # The key holds 0.1 * mscale_all_dim. mscale itself is not in the file; it is the same in every released model.
    return yarn, 10.0 * keys.non_negative_float("rope.scaling.yarn_log_multiplier")


def _gguf_query_rank(keys: GgufKeys, files: ModelFiles) -> int | None:
    """The tensors decide; the key is 0, absent, or even set in files of models without a query rank."""
    if "blk.0.attn_q.weight" in files.tensors:
        return None
    if "blk.0.attn_q_a.weight" in files.tensors:
        return keys.positive("attention.q_lora_rank")
    return keys.count("attention.q_lora_rank") or None


def _gguf_moe_layers(keys: GgufKeys, files: ModelFiles, num_layers: int) -> tuple[int, ...]:
    """Layers with a router tensor; they must agree with the keys, and follow from some moe_layer_freq."""
    moe_layers = tuple(layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" in files.tensors)
    num_experts = keys.count("expert_count")
    if (num_experts > 0) != bool(moe_layers):
        found = "no layer has" if not moe_layers else f"layer {moe_layers[0]} has"
        raise keys.error("expert_count", f"{num_experts:,}, but {found} a router (ffn_gate_inp)")
    if not moe_layers:
        return ()
    lead = keys.count("leading_dense_block_count")
    if moe_layers[0] < lead:
        raise keys.error("leading_dense_block_count", f"{lead}, but layer {moe_layers[0]} has a router (ffn_gate_inp)")
    if all(layers_of_frequency(num_layers, lead, freq) != moe_layers for freq in range(1, num_layers + 1)):
        dense = next(layer for layer in range(lead, num_layers) if layer not in moe_layers)
        raise keys.error(
            "leading_dense_block_count",
            f"{lead}, but layer {dense} has no router (blk.{dense}.ffn_gate_inp.weight), and no layer frequency fits",
        )
    return moe_layers


def layers_of_frequency(num_layers: int, num_leading_dense: int, frequency: int) -> tuple[int, ...]:
    """MoE layers: every layer from `num_leading_dense` on whose number `frequency` divides."""
    return tuple(layer for layer in range(num_leading_dense, num_layers) if layer % frequency == 0)


def _gguf_router(keys: GgufKeys, files: ModelFiles, moe_layers: tuple[int, ...], num_layers: int) -> RouterSpec:
    gating = keys.count("expert_gating_func")
    if gating in UNSUPPORTED_GATING:
        raise UnsupportedError(
            f"{keys.named('expert_gating_func')} is {gating} ({UNSUPPORTED_GATING[gating]}); known here: 1 softmax, "
            "2 sigmoid"
        )
    if gating not in (0, *GATING_FUNCTIONS):
        raise UnsupportedError(f"{keys.named('expert_gating_func')} is {gating}; known here: 1 softmax, 2 sigmoid")
    score = GATING_FUNCTIONS.get(gating, "softmax")
    if gating == 0 and num_layers in (47, 48) and gguf_vocab_size(keys, files) == 154880:
        score = "sigmoid"  # GLM-4.7-Flash files of the first weeks lack the key (llama.cpp makes the same exception)
    biased = [layer for layer in moe_layers if _has_bias(files, layer)]
    if biased and len(biased) < len(moe_layers):
        plain = next(layer for layer in moe_layers if layer not in biased)
        raise keys.error(
            "expert_count", f"layer {biased[0]} has a selection bias (exp_probs_b), layer {plain} has none"
        )
    try:
        return _router(
            num_experts=keys.positive("expert_count"),
            num_experts_per_tok=keys.positive("expert_used_count"),
            score=score,
            has_bias=bool(biased),
            num_groups=keys.count("expert_group_count"),
            top_groups=keys.count("expert_group_used_count"),
            renormalize=keys.switch("expert_weights_norm"),
            scale=keys.non_negative_float("expert_weights_scale", default=0.0) or 1.0,  # 0: the key of older files
        )
    except UnsupportedError as error:
        raise UnsupportedError(f"{files.files[0]}: {error}") from None


def _has_bias(files: ModelFiles, layer: int) -> bool:
    return any(f"blk.{layer}.exp_probs_b{ending}" in files.tensors for ending in (".bias", ".weight", ""))


def _router(
    *,
    num_experts: int,
    num_experts_per_tok: int,
    score: Score,
    has_bias: bool,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    scale: float,
) -> RouterSpec:
    """The rules that belong to the scoring function.

    Group scores: V2 rates a group by its best expert, V3 by its two best. V2's own code scales only weights that it
    does not renormalise, and renormalises only when K > 1; V3 does both.
    """
    if score == "softmax":
        renormalize = renormalize and num_experts_per_tok > 1
        scale = 1.0 if renormalize else scale
    is_grouped = num_groups > 1
    return RouterSpec(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        score=score,
        has_bias=has_bias,
        num_groups=num_groups if is_grouped else 1,
        top_groups=top_groups if is_grouped else 1,
        group_score="top2_sum" if score == "sigmoid" else "max",
        renormalize=renormalize,
        scale=scale,
    )


def _from_hf(config: Mapping[str, object]) -> DeepseekV2Config:
    fields = JsonFields(config)
    kind = fields.text("model_type", default="")
    if kind not in ("deepseek_v2", "deepseek_v3"):
        raise UnsupportedError(f"config.json: model_type {kind!r} is not known here; known: deepseek_v2, deepseek_v3")
    if (act := fields.text("hidden_act", default="silu")) != "silu":
        raise UnsupportedError(f"config.json: hidden_act {act!r} is not known here; known: silu")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise UnsupportedError(f"config.json: {name} is not known here")
    num_layers, rope_dim = fields.positive("num_hidden_layers"), fields.positive("qk_rope_head_dim")
    head_dim = fields.positive("qk_nope_head_dim") + rope_dim
    rope = hf_rope(config, rope_dim)
    mscale_all_dim = JsonFields(hf_rope_section(config)).number("mscale_all_dim", default=0.0) if rope.yarn else 0.0
    num_experts = fields.count("n_routed_experts")
    lead, frequency = fields.count("first_k_dense_replace"), fields.count("moe_layer_freq") or 1
    moe_layers = layers_of_frequency(num_layers, lead, frequency) if num_experts else ()
    return DeepseekV2Config(
        num_layers=num_layers,
        hidden_size=fields.positive("hidden_size"),
        vocab_size=fields.positive("vocab_size"),
        context_length=fields.positive("max_position_embeddings"),
        num_heads=fields.positive("num_attention_heads"),
        query_rank=fields.count("q_lora_rank") or None,
        kv_rank=fields.positive("kv_lora_rank"),
        nope_dim=head_dim - rope_dim,
        rope_dim=rope_dim,
        value_dim=fields.positive("v_head_dim"),
        dense_inner=fields.positive("intermediate_size") if len(moe_layers) < num_layers else 0,
        moe_inner=fields.positive("moe_intermediate_size") if moe_layers else 0,
        num_shared_experts=fields.count("n_shared_experts") if moe_layers else 0,
        moe_layers=moe_layers,
        router=_hf_router(config, kind) if moe_layers else None,
        rope=rope,
        attention_scale=attention_scale(head_dim, rope.yarn, mscale_all_dim=mscale_all_dim),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
    )


def _hf_router(config: Mapping[str, object], kind: str) -> RouterSpec:
    fields = JsonFields(config)
    is_v3 = kind == "deepseek_v3"
    scoring = fields.text("scoring_func", default="sigmoid" if is_v3 else "softmax")
    method = fields.text("topk_method", default="noaux_tc" if is_v3 else "greedy")
    known: dict[tuple[str, str], Score] = {
        ("softmax", "greedy"): "softmax",
        ("softmax", "group_limited_greedy"): "softmax",
        ("sigmoid", "noaux_tc"): "sigmoid",
    }
    if (scoring, method) not in known:
        pairs = ", ".join(f"{score} with {how}" for score, how in known)
        raise UnsupportedError(f"config.json: scoring_func {scoring!r} with topk_method {method!r}; known: {pairs}")
    is_grouped = method != "greedy"
    return _router(
        num_experts=fields.positive("n_routed_experts"),
        num_experts_per_tok=fields.positive("num_experts_per_tok"),
        score=known[scoring, method],
        has_bias=method == "noaux_tc",
        num_groups=fields.count("n_group") if is_grouped else 1,
        top_groups=fields.count("topk_group") if is_grouped else 1,
        renormalize=bool(config.get("norm_topk_prob", is_v3)),
        scale=fields.number("routed_scaling_factor", default=1.0),
    )
