"""What families with grouped-query attention and a softmax router have in common: config, tensors, planner numbers.

A family (`qwen3_moe.py`, …) says what is its own in a `Family`; the rest is here. What neither a family nor the shared
layers know is refused by name. No torch until `build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from expertide.errors import FormatError, UnsupportedError
from expertide.formats.tensors import ExpertCatalog, ExpertPart, ModelFiles, TensorInfo
from expertide.kernels import tiles
from expertide.kernels.rope import RopePairs, RopeSpec, yarn_magnitude
from expertide.kernels.router import RouterSpec
from expertide.models.config_values import (
    GgufKeys,
    JsonFields,
    gguf_moe_inner,
    gguf_num_layers,
    gguf_rope_base,
    gguf_vocab_size,
    gguf_yarn,
    hf_rope,
)
from expertide.models.describe import describe_rope, describe_router
from expertide.models.tensor_directory import TensorDirectory
from expertide.models.tensor_groups import take_experts, take_swiglu

if TYPE_CHECKING:
    from expertide.kernels.ops import Kernels
    from expertide.kernels.qtensor import QTensor
    from expertide.models.architecture import ExpertExecutor, Model
    from expertide.models.layers.ffn import FeedForward
    from expertide.models.layers.grouped_attention import GroupedAttention
    from expertide.models.layers.weights import LayerWeights

# Each routed expert is read once per chunk: longer chunks read less and need more workspace. 512 tokens already visit
# nearly every expert of a layer (Qwen3-30B-A3B: 4,096 choices among 128).
PREFILL_CHUNK = 512

# Keys of other families that change what is computed, and the values that mean that they do not.
_NEUTRAL_KEYS: Mapping[str, tuple[float, ...]] = {
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
}


@dataclass(frozen=True)
class Family:
    """What sets one family apart from the others.

    Attributes:
        name: as GGUF files say in `general.architecture`.
        hf_type: `model_type` of config.json.
        hf_names: GGUF name -> checkpoint name. {} is the layer; a stacked expert tensor stands for one checkpoint
            tensor per expert, whose number takes the second {}.
        qk_norm: RMSNorm of queries and keys before rope: of each head with one weight of D.
        rope_pairs: in GGUF files. Checkpoints have halves, for all families here.
        renormalize: whether a token's K weights sum to 1 where a GGUF file does not say; most do not.
        hf_renormalize: the same for config.json, as the family's config class in transformers has it.
    """

    name: str
    hf_type: str
    hf_names: Mapping[str, str]
    qk_norm: Literal["head"]
    rope_pairs: RopePairs
    renormalize: bool
    hf_renormalize: bool


@dataclass(frozen=True)
class GroupedConfig:
    """Everything the layers need to know; made and checked by `read_gguf` or `read_hf`.

    Attributes:
        context_length: tokens, prompt and answer together.
        num_heads, num_kv_heads, head_dim: Q, G, D.
        dense_inner: inner size of dense layers' MLP; 0 where there are none.
        moe_inner: F, inner size of one routed expert.
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
    return GroupedConfig(
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
    )


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
    for name in ("attention_bias", "use_sliding_window"):
        if config.get(name):
            raise UnsupportedError(f"config.json: {name} is not known here")
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
    return GroupedConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=fields.positive("vocab_size"),
        context_length=fields.positive("max_position_embeddings"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dense_inner=fields.positive("intermediate_size") if len(moe_layers) < num_layers else 0,
        moe_inner=fields.positive("moe_intermediate_size"),
        moe_layers=moe_layers,
        router=RouterSpec(
            # transformers 5 writes the second name.
            num_experts=fields.count("num_experts") or fields.positive("num_local_experts"),
            num_experts_per_tok=fields.positive("num_experts_per_tok"),
            renormalize=bool(config.get("norm_topk_prob", family.hf_renormalize)),
        ),
        rope=hf_rope(config, head_dim, pairs="halves"),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
    )


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


@dataclass(frozen=True)
class _Tensors:
    """What the directory check found: resident tensors by the name this file uses, and the experts' parts."""

    resident: dict[str, TensorInfo]
    experts: dict[int, tuple[ExpertPart, ...]]


class GroupedArchitecture:
    """Implements `architecture.Architecture`; a family names itself in `family`."""

    family: Family
    default_prefill_chunk = PREFILL_CHUNK

    def __init__(self, files: ModelFiles) -> None:
        """
        Raises:
            FormatError: keys or tensors are missing, contradict each other, or have wrong shapes.
            UnsupportedError: a value, or a tensor, that has no code here.
        """
        self.config = read_gguf(files, self.family)
        self._tensors = _find_tensors(files, self.config, self.family)

    @property
    def name(self) -> str:
        return self.family.name

    def resident_tensors(self) -> list[TensorInfo]:
        infos = {info.name: info for info in self._tensors.resident.values()}
        return sorted(infos.values(), key=lambda info: (info.file_id, info.offset))

    def expert_catalog(self) -> ExpertCatalog | None:
        return ExpertCatalog(self.config.num_experts, self._tensors.experts)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype_bytes

    def decoded_copy_bytes(self, dtype_bytes: int) -> int:
        return 0

    def workspace_bytes(self, chunk: int) -> int:
        config = self.config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        tiled = tiles.gqa_attention_bytes(
            chunk, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
        )
        # While attending: rotated queries, keys, values, and the result before and after joining tiles. While rotating:
        # queries as made, normed, rotated, and the four products of the rotation (each half as wide).
        attention = max(tiled + 4 * chunk * (3 * q + 2 * kv), tiles.decoding_bytes() + 4 * chunk * (5 * q + kv))
        ffn = 4 * chunk * 4 * config.dense_inner + tiles.decoding_bytes()  # gate, up, silu(gate), the product
        # What attention has freed lies in pieces too small for the experts' results, and stays with the process.
        # Measured with heads of Qwen3-30B-A3B, 512 tokens after none and after 6,000: 77 to 102 MiB of 103 counted here.
        ffn += 4 * chunk * (config.num_experts_per_tok * config.hidden_size + 4 * config.num_experts) + tiled
        streams = 4 * chunk * 5 * config.hidden_size  # residual before and after, normed, two layer outputs
        head = 4 * config.vocab_size * 2 + tiles.decoding_bytes()
        return max(attention, ffn, head) + streams

    def describe(self) -> dict[str, object]:
        config = self.config
        norm = ", queries and keys normed per head" if self.family.qk_norm == "head" else ""
        return {
            "layers": config.num_layers,
            "hidden size": config.hidden_size,
            "vocabulary": config.vocab_size,
            "context": config.context_length,
            "attention": (
                f"grouped (GQA): {config.num_heads} heads of {config.head_dim} on {config.num_kv_heads} key/value heads"
                + norm
            ),
            "rope": describe_rope(config.rope),
            "dense layers": config.num_layers - len(config.moe_layers),
            "MoE layers": len(config.moe_layers),
            "routed experts": f"{config.num_experts}, {config.num_experts_per_tok} per token",
            "router": describe_router(config.router),
        }

    def build(
        self,
        weights: Mapping[str, QTensor],
        kernels: Kernels,
        executor: ExpertExecutor | None,
        *,
        context: int,
        kv_dtype: str,
    ) -> Model:
        from expertide.kv.heads import HeadCache
        from expertide.models.layers.decoder import DecoderLayer, DecoderModel
        from expertide.models.layers.step import Rotation
        from expertide.models.layers.weights import LayerWeights

        assert executor is not None
        config = self.config
        parts = LayerWeights(self._tensors.resident, weights)
        layers = [
            DecoderLayer(
                attention_norm=parts.vector(f"blk.{layer_id}.attn_norm.weight"),
                attention=_attention(layer_id, config, parts, kernels),
                ffn_norm=parts.vector(f"blk.{layer_id}.ffn_norm.weight"),
                ffn=_ffn(layer_id, config, parts, kernels, executor),
            )
            for layer_id in range(config.num_layers)
        ]
        return DecoderModel(
            embedding=parts.matrix("token_embd.weight"),
            layers=layers,
            final_norm=parts.vector("output_norm.weight"),
            output=parts.matrix("output.weight"),
            norm_eps=config.norm_eps,
            rotation=Rotation(config.rope),
            make_cache=partial(
                HeadCache,
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=kv_dtype,
            ),
            kernels=kernels,
        )


def _attention(layer_id: int, config: GroupedConfig, parts: LayerWeights, kernels: Kernels) -> GroupedAttention:
    from expertide.models.layers.grouped_attention import (
        GroupedAttention,
        GroupedAttentionDims,
        GroupedAttentionWeights,
    )

    blk = f"blk.{layer_id}."
    return GroupedAttention(
        layer_id,
        GroupedAttentionDims(config.num_heads, config.num_kv_heads, config.head_dim),
        GroupedAttentionWeights(
            q=parts.matrix(blk + "attn_q.weight"),
            k=parts.matrix(blk + "attn_k.weight"),
            v=parts.matrix(blk + "attn_v.weight"),
            output=parts.matrix(blk + "attn_output.weight"),
            q_norm=parts.vector(blk + "attn_q_norm.weight"),
            k_norm=parts.vector(blk + "attn_k_norm.weight"),
        ),
        kernels,
        scale=config.attention_scale,
        norm_eps=config.norm_eps,
        rope_pairs=config.rope.pairs,
    )


def _ffn(
    layer_id: int, config: GroupedConfig, parts: LayerWeights, kernels: Kernels, executor: ExpertExecutor
) -> FeedForward:
    from expertide.models.layers.ffn import RoutedExperts

    blk = f"blk.{layer_id}."
    if layer_id not in config.moe_layers:
        return parts.swiglu(blk, "", kernels)
    return RoutedExperts(
        layer_id,
        config.router,
        router=parts.matrix(blk + "ffn_gate_inp.weight"),
        bias_E=None,
        shared=None,
        executor=executor,
        kernels=kernels,
    )


def _find_tensors(files: ModelFiles, config: GroupedConfig, family: Family) -> _Tensors:
    """Find and check every tensor the config asks for; refuse what is left over.

    Raises:
        FormatError, UnsupportedError: see `TensorDirectory`.
    """
    directory = TensorDirectory(files, family.name)
    resident: dict[str, TensorInfo] = {}
    experts: dict[int, tuple[ExpertPart, ...]] = {}
    hidden, vocab = config.hidden_size, config.vocab_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def take(name: str, *shape: int, aliases: tuple[str, ...] = ()) -> None:
        resident[name] = directory.take(name, shape, aliases=aliases)

    take("token_embd.weight", vocab, hidden)
    take("output_norm.weight", hidden)
    take("output.weight", vocab, hidden, aliases=("token_embd.weight",))  # tied embeddings have no output matrix
    for layer_id in range(config.num_layers):
        blk = f"blk.{layer_id}."
        take(blk + "attn_norm.weight", hidden)
        take(blk + "attn_q.weight", q, hidden)
        take(blk + "attn_k.weight", kv, hidden)
        take(blk + "attn_v.weight", kv, hidden)
        take(blk + "attn_output.weight", hidden, q)
        take(blk + "attn_q_norm.weight", config.head_dim)
        take(blk + "attn_k_norm.weight", config.head_dim)
        take(blk + "ffn_norm.weight", hidden)
        if layer_id not in config.moe_layers and directory.has(blk + "ffn_gate.weight"):
            take_swiglu(take, blk, "", hidden, config.dense_inner)
            continue
        take(blk + "ffn_gate_inp.weight", config.num_experts, hidden)
        experts[layer_id] = take_experts(directory, blk, config.num_experts, inner=config.moe_inner, hidden=hidden)
    directory.refuse_leftovers()
    return _Tensors(resident, experts)
