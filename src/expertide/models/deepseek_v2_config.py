"""What a DeepSeek-V2/V3 model is, as numbers; read from GGUF metadata or from config.json, and checked.

Values that no layer here computes are refused by name, and so are keys that contradict each other or the tensors.
No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from expertide.errors import FormatError, UnsupportedError
from expertide.formats.metadata import Metadata
from expertide.formats.tensors import ModelFiles
from expertide.kernels.rope import RopeSpec, YarnSpec, yarn_magnitude
from expertide.kernels.router import RouterSpec, Score

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
    """Refuse numbers far outside every model: with them angles overflow, or answers are noise without a word."""
    yarn, router = config.rope.yarn, config.router
    ranges: list[tuple[str, float, float, float]] = [
        ("norm epsilon", config.norm_eps, 1e-30, 1.0),
        ("rope base", config.rope.theta, 1.0 + 1e-6, 1e15),
        ("factor on cos and sin", config.rope.magnitude, 1e-4, 1e4),
        ("attention scale", config.attention_scale, 1e-6, 1e4),
    ]
    if yarn is not None:
        ranges += [
            ("YaRN factor", yarn.factor, 1.0, 1e6),
            ("YaRN beta_fast", yarn.beta_fast, 1e-6, 1e6),
            ("YaRN beta_slow", yarn.beta_slow, 1e-6, 1e6),
        ]
    if router is not None:
        ranges.append(("scale of expert weights", router.scale, 1e-6, 1e6))
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise FormatError(f"{source}: {name} {value:g}, expected {low:g} to {high:g}")
    return config


def _from_gguf(files: ModelFiles) -> DeepseekV2Config:
    keys = _Keys(files)
    num_layers = keys.positive("block_count") - keys.count("nextn_predict_layers")
    if not 0 < num_layers <= len(files.tensors):
        raise keys.error("block_count", f"{num_layers:,} layers, but the file holds {len(files.tensors):,} tensors")
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
        vocab_size=_gguf_vocab_size(keys, files),
        context_length=keys.positive("context_length"),
        num_heads=keys.uniform("attention.head_count", num_layers),
        query_rank=_gguf_query_rank(keys, files),
        kv_rank=keys.positive("attention.kv_lora_rank"),
        nope_dim=head_dim - rope_dim,
        rope_dim=rope_dim,
        value_dim=keys.positive("attention.value_length" + suffix),
        dense_inner=keys.uniform("feed_forward_length", num_layers) if len(moe_layers) < num_layers else 0,
        moe_inner=_gguf_moe_inner(keys, files, moe_layers, num_layers),
        num_shared_experts=keys.count("expert_shared_count") if moe_layers else 0,
        moe_layers=moe_layers,
        router=_gguf_router(keys, files, moe_layers, num_layers) if moe_layers else None,
        rope=RopeSpec(rope_dim, _gguf_theta(keys), yarn),
        attention_scale=attention_scale(head_dim, yarn, mscale_all_dim=mscale_all_dim),
        norm_eps=keys.positive_float("attention.layer_norm_rms_epsilon"),
    )


def _gguf_theta(keys: _Keys) -> float:
    theta = keys.positive_float("rope.freq_base", default=10000.0)
    if theta <= 1:
        raise keys.error("rope.freq_base", f"{theta:g}, expected more than 1")
    return theta


def _gguf_yarn(keys: _Keys) -> tuple[YarnSpec | None, float]:
    """(YaRN, mscale_all_dim)."""
    kind = keys.text("rope.scaling.type", default="none")
    if kind == "none":
        return None, 0.0
    if kind != "yarn":
        raise UnsupportedError(f"{keys.named('rope.scaling.type')} is {kind!r}; known: none, yarn")
    if keys.positive_float("rope.scaling.attn_factor", default=1.0) != 1.0:
        raise UnsupportedError(f"{keys.named('rope.scaling.attn_factor')} other than 1 is not known here")
    # Without this key neither the softmax scale (37 % on V2-Lite) nor the size of cos and sin can be known.
    if not keys.has("rope.scaling.yarn_log_multiplier"):
        raise UnsupportedError(
            f"{keys.named('rope.scaling.yarn_log_multiplier')} is missing beside rope.scaling.type yarn: the attention "
            "scale of this model is unknown; files converted since May 2024 have the key"
        )
    # The key holds 0.1 * mscale_all_dim. mscale itself is not in the file; it is the same in every released model.
    multiplier = keys.non_negative_float("rope.scaling.yarn_log_multiplier")
    yarn = YarnSpec(
        factor=keys.positive_float("rope.scaling.factor"),
        original_context=keys.positive("rope.scaling.original_context_length"),
        beta_fast=keys.positive_float("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=keys.positive_float("rope.scaling.yarn_beta_slow", default=1.0),
    )
    return yarn, 10.0 * multiplier


def _gguf_vocab_size(keys: _Keys, files: ModelFiles) -> int:
    embedding = files.tensors.get("token_embd.weight")
    if embedding is None:
        return keys.positive("vocab_size")  # the missing tensor is reported with the others
    rows = embedding.shape[0]
    if keys.has("vocab_size") and keys.positive("vocab_size") != rows:
        raise keys.error("vocab_size", f"{keys.positive('vocab_size'):,}, but token_embd.weight has {rows:,} rows")
    return rows


def _gguf_query_rank(keys: _Keys, files: ModelFiles) -> int | None:
    """The tensors decide; the key is 0, absent, or even set in files of models without a query rank."""
    if "blk.0.attn_q.weight" in files.tensors:
        return None
    if "blk.0.attn_q_a.weight" in files.tensors:
        return keys.positive("attention.q_lora_rank")
    return keys.count("attention.q_lora_rank") or None


def _gguf_moe_layers(keys: _Keys, files: ModelFiles, num_layers: int) -> tuple[int, ...]:
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


def _gguf_moe_inner(keys: _Keys, files: ModelFiles, moe_layers: tuple[int, ...], num_layers: int) -> int:
    if not moe_layers:
        return 0
    if keys.has("expert_feed_forward_length"):
        return keys.uniform("expert_feed_forward_length", num_layers, only=moe_layers)
    down = files.tensors.get(f"blk.{moe_layers[0]}.ffn_down_exps.weight")
    return down.shape[-1] if down else keys.positive("expert_feed_forward_length")


def _gguf_router(keys: _Keys, files: ModelFiles, moe_layers: tuple[int, ...], num_layers: int) -> RouterSpec:
    gating = keys.count("expert_gating_func")
    if gating in UNSUPPORTED_GATING:
        raise UnsupportedError(
            f"{keys.named('expert_gating_func')} is {gating} ({UNSUPPORTED_GATING[gating]}); known here: 1 softmax, "
            "2 sigmoid"
        )
    if gating not in (0, *GATING_FUNCTIONS):
        raise UnsupportedError(f"{keys.named('expert_gating_func')} is {gating}; known here: 1 softmax, 2 sigmoid")
    score = GATING_FUNCTIONS.get(gating, "softmax")
    if gating == 0 and num_layers in (47, 48) and _gguf_vocab_size(keys, files) == 154880:
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


class _Keys:
    """Typed reads of `deepseek2.*` keys, with the range checks that many of them share."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._metadata = Metadata.of(files)

    def named(self, key: str) -> str:
        return f"{self._files.files[0]}: deepseek2.{key}"

    def error(self, key: str, found: str) -> FormatError:
        return FormatError(f"{self.named(key)} says {found}")

    def has(self, key: str) -> bool:
        return f"deepseek2.{key}" in self._files.metadata

    def count(self, key: str) -> int:
        """A number from 0; 0 when absent."""
        return self._metadata.int(f"deepseek2.{key}", default=0)

    def positive(self, key: str) -> int:
        return self._metadata.int(f"deepseek2.{key}", minimum=1)

    def uniform(self, key: str, num_layers: int, *, only: tuple[int, ...] | None = None) -> int:
        """A positive number, or one per layer that must be the same for all layers (of `only`)."""
        values = self._metadata.per_layer_int(f"deepseek2.{key}", num_layers)
        chosen = {values[layer] for layer in (range(num_layers) if only is None else only)}
        if 0 in chosen:
            raise self.error(key, "0, expected 1 or more")
        if len(chosen) > 1:
            raise UnsupportedError(
                f"{self.named(key)} differs between layers ({sorted(chosen)}); one value is known here"
            )
        return chosen.pop()

    def text(self, key: str, *, default: str) -> str:
        return self._metadata.str(f"deepseek2.{key}", default=default)

    def switch(self, key: str) -> bool:
        return self._metadata.bool(f"deepseek2.{key}", default=False)

    def positive_float(self, key: str, *, default: float | None = None) -> float:
        value = self.non_negative_float(key, default=default)
        if value == 0:
            raise self.error(key, "0, expected more")
        return value

    def non_negative_float(self, key: str, *, default: float | None = None) -> float:
        name = f"deepseek2.{key}"
        value = self._metadata.float(name) if default is None else self._metadata.float(name, default=default)
        if value < 0:
            raise self.error(key, f"{value}, expected a number from 0")
        return value


def _from_hf(config: Mapping[str, object]) -> DeepseekV2Config:
    fields = _Fields(config)
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
    rope, mscale_all_dim = _hf_rope(config, rope_dim)
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
    fields = _Fields(config)
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


def _hf_rope(config: Mapping[str, object], rope_dim: int) -> tuple[RopeSpec, float]:
    """(rope, mscale_all_dim) from `rope_scaling` beside `rope_theta`, or from `rope_parameters` (transformers 5)."""
    section = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(section, Mapping):
        raise FormatError(f"config.json: rope_scaling is {type(section).__name__}, expected an object")
    fields = _Fields(section)
    theta = fields.number("rope_theta", default=_Fields(config).number("rope_theta", default=10000.0))
    kind = fields.text("rope_type", default=fields.text("type", default="default"))
    if kind == "default":
        return RopeSpec(rope_dim, theta), 0.0
    if kind != "yarn":
        raise UnsupportedError(f"config.json: rope scaling type {kind!r} is not known here; known: default, yarn")
    if section.get("attention_factor") is not None or section.get("truncate", True) is not True:
        raise UnsupportedError("config.json: attention_factor and truncate of YaRN are not known here")
    yarn = YarnSpec(
        factor=fields.number("factor"),
        original_context=fields.positive("original_max_position_embeddings"),
        beta_fast=fields.number("beta_fast", default=32.0),
        beta_slow=fields.number("beta_slow", default=1.0),
    )
    mscale, mscale_all_dim = fields.number("mscale", default=0.0), fields.number("mscale_all_dim", default=0.0)
    # As transformers: the ratio when both are given, else YaRN's own factor.
    magnitude = yarn_magnitude(yarn.factor, 1.0)
    if mscale and mscale_all_dim:
        magnitude = yarn_magnitude(yarn.factor, mscale) / yarn_magnitude(yarn.factor, mscale_all_dim)
    return RopeSpec(rope_dim, theta, yarn, magnitude), mscale_all_dim


class _Fields:
    """Typed reads of config.json; null counts as absent."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def positive(self, name: str) -> int:
        value = self._fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise FormatError(f"config.json: {name} is {value!r}, expected a whole number from 1")
        return value

    def count(self, name: str) -> int:
        value = self._fields.get(name) or 0
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise FormatError(f"config.json: {name} is {value!r}, expected a whole number from 0")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self._fields.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise FormatError(f"config.json: {name} is {value!r}, expected a number")
        return float(value)

    def text(self, name: str, *, default: str) -> str:
        value = self._fields.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise FormatError(f"config.json: {name} is {value!r}, expected text")
        return value
