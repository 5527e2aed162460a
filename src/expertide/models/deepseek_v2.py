"""DeepSeek-V2, V2-Lite, Coder-V2, V3, R1, Kimi-K2: GGUF architecture `deepseek2`.

What is special, and where it is described:

    attention   latent (MLA): one cached row per token for all heads             arXiv 2405.04434, section 2.1
                queries through a low rank (`attn_q_a`, `attn_q_b`) or not (`attn_q`)
                unfolding matrices split per head (`attn_k_b`, `attn_v_b`) or joint (`attn_kv_b`, older files)
    positions   rope on adjacent pairs of the last `rope_dim` values; YaRN with m(f, a) = 0.1 * a * ln(f) + 1:
                the softmax scale carries m², cos and sin the ratio of two m, which is 1 in every released model
    layers      dense before `first_k_dense_replace`, then MoE where the frequency says so; or dense only
    router      V2: softmax, groups rated by their best. V3: sigmoid + selection bias, groups rated by their two best

Configs come from GGUF metadata or config.json (`deepseek_v2_config`, with the same promises: what neither that file nor
the shared layers know is refused by name). No torch until `build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from expertide.formats.metadata import Metadata
from expertide.formats.tensors import ExpertCatalog, ExpertPart, ModelFiles, TensorInfo
from expertide.kernels import tiles
from expertide.models.deepseek_v2_config import DeepseekV2Config, tiny_config
from expertide.models.describe import describe_rope, describe_router
from expertide.models.tensor_directory import TensorDirectory
from expertide.models.tensor_groups import layer_of, take_experts, take_swiglu

if TYPE_CHECKING:
    from expertide.kernels.ops import Kernels
    from expertide.kernels.qtensor import QTensor
    from expertide.models.architecture import ExpertExecutor, Model
    from expertide.models.layers.ffn import FeedForward
    from expertide.models.layers.latent_attention import LatentAttention
    from expertide.models.layers.weights import LayerWeights

__all__ = ["HF_NAMES", "DeepseekV2Architecture", "DeepseekV2Config", "tiny_config"]

# GGUF name -> checkpoint name. {} is the layer; a stacked expert tensor stands for one checkpoint tensor per expert,
# whose number takes the second {}. `attn_k_b` and `attn_v_b` are made from kv_b_proj, k_b transposed per head.
HF_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_q_a.weight": "model.layers.{}.self_attn.q_a_proj.weight",
    "blk.{}.attn_q_a_norm.weight": "model.layers.{}.self_attn.q_a_layernorm.weight",
    "blk.{}.attn_q_b.weight": "model.layers.{}.self_attn.q_b_proj.weight",
    "blk.{}.attn_kv_a_mqa.weight": "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight",
    "blk.{}.attn_kv_a_norm.weight": "model.layers.{}.self_attn.kv_a_layernorm.weight",
    "blk.{}.attn_kv_b.weight": "model.layers.{}.self_attn.kv_b_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
    "blk.{}.ffn_gate_inp.weight": "model.layers.{}.mlp.gate.weight",
    "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
    "blk.{}.ffn_gate_exps.weight": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "blk.{}.ffn_up_exps.weight": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "blk.{}.ffn_down_exps.weight": "model.layers.{}.mlp.experts.{}.down_proj.weight",
    "blk.{}.ffn_gate_shexp.weight": "model.layers.{}.mlp.shared_experts.gate_proj.weight",
    "blk.{}.ffn_up_shexp.weight": "model.layers.{}.mlp.shared_experts.up_proj.weight",
    "blk.{}.ffn_down_shexp.weight": "model.layers.{}.mlp.shared_experts.down_proj.weight",
}

# Each routed expert is read once per chunk: longer chunks read less and need more workspace. 512 tokens already visit
# nearly every expert of a layer (V2-Lite: 3,072 choices among 64).
PREFILL_CHUNK = 512

_BIAS_NAMES = ("blk.{}.exp_probs_b.bias", "blk.{}.exp_probs_b", "blk.{}.exp_probs_b.weight")


@dataclass(frozen=True)
class _Tensors:
    """What the directory check found: resident tensors by the name this file uses, and the experts' parts."""

    resident: dict[str, TensorInfo]
    experts: dict[int, tuple[ExpertPart, ...]]
    has_joint_kv_b: bool


class DeepseekV2Architecture:
    """Implements `architecture.Architecture` for GGUF files of architecture `deepseek2`."""

    name = "deepseek2"
    default_prefill_chunk = PREFILL_CHUNK

    def __init__(self, files: ModelFiles) -> None:
        """
        Raises:
            FormatError: keys or tensors are missing, contradict each other, or have wrong shapes.
            UnsupportedError: a value, or a tensor, that has no code here.
        """
        self.config = DeepseekV2Config.from_gguf(files)
        self._tensors = _find_tensors(files, self.config)

    def resident_tensors(self) -> list[TensorInfo]:
        infos = {info.name: info for info in self._tensors.resident.values()}
        return sorted(infos.values(), key=lambda info: (info.file_id, info.offset))

    def expert_catalog(self) -> ExpertCatalog | None:
        if self.config.router is None:
            return None
        return ExpertCatalog(self.config.num_experts, self._tensors.experts)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return self.config.num_layers * (self.config.kv_rank + self.config.rope_dim) * dtype_bytes

    def workspace_bytes(self, chunk: int) -> int:
        # The plan takes the tiles off again where nothing is decoded.
        return max(self._reference_bytes(chunk), self._native_bytes(chunk) + tiles.decoding_bytes())

    def _native_bytes(self, chunk: int) -> int:
        """See `tiles.native_step_bytes`. Chunks of 512 on DeepSeek-V2-Lite: 155 to 172 MiB, of 172 counted."""
        config = self.config
        hidden, heads = config.hidden_size, config.num_heads
        attention = tiles.native_latent_bytes(chunk, num_heads=heads, rank=config.kv_rank, rope_dim=config.rope_dim)
        # Normed rows and the result; queries, both parts of them, what they attended to; the latent row and its parts.
        row = 2 * hidden + (config.query_rank or 0) + 2 * heads * config.head_dim + heads * config.value_dim
        row += 2 * (config.kv_rank + config.rope_dim)
        widest = max(hidden, heads * config.value_dim, config.query_rank or 0)
        attention += 4 * chunk * row + tiles.native_rows_bytes(chunk, widest)
        return tiles.native_step_bytes(
            chunk,
            attention=attention,
            hidden=hidden,
            moe_inner=config.moe_inner,
            k=0 if config.router is None else config.num_experts_per_tok,
            mlp_inner=max(config.dense_inner, config.moe_inner * config.num_shared_experts),
            vocab_size=config.vocab_size,
        )

    def _reference_bytes(self, chunk: int) -> int:
        """On the reference kernels memory is returned after each op, so that the hungriest one counts."""
        config = self.config
        attention = tiles.attention_bytes(
            chunk, num_heads=config.num_heads, rank=config.kv_rank, rope_dim=config.rope_dim
        )
        # Queries and their parts, the attended values before and after joining tiles.
        attention += 4 * chunk * config.num_heads * (2 * config.head_dim + 2 * config.value_dim)
        widest = max(config.dense_inner, config.moe_inner * max(config.num_shared_experts, 1))
        ffn = 4 * chunk * 3 * widest  # gate, up, the product
        if config.router is not None:
            # Every (token, k) result; the logits and what sorts them; one expert's own rows, at worst all tokens'.
            results = config.num_experts_per_tok * config.hidden_size + 4 * config.num_experts
            ffn = max(ffn, 4 * chunk * (results + 2 * config.hidden_size + 3 * config.moe_inner))
        ffn += tiles.decoding_bytes()
        streams = 4 * chunk * 5 * config.hidden_size  # residual before and after, normed, two layer outputs
        head = 4 * config.vocab_size * 2 + tiles.decoding_bytes()
        return max(attention, ffn, head) + streams

    def describe(self) -> dict[str, object]:
        config = self.config
        facts: dict[str, object] = {
            "layers": config.num_layers,
            "hidden size": config.hidden_size,
            "vocabulary": config.vocab_size,
            "context": config.context_length,
            "attention": (
                f"latent (MLA): {config.num_heads} heads of {config.nope_dim}+{config.rope_dim}, values "
                f"{config.value_dim}, latent {config.kv_rank}"
            ),
            "queries": "plain" if config.query_rank is None else f"low rank {config.query_rank}",
            "key/value up-projection": (
                "joint (attn_kv_b)" if self._tensors.has_joint_kv_b else "split (attn_k_b, attn_v_b)"
            ),
            "attention scale": round(config.attention_scale, 9),
            "rope": describe_rope(config.rope),
            "dense layers": config.num_layers - len(config.moe_layers),
            "MoE layers": len(config.moe_layers),
        }
        if config.router is not None:
            router = config.router
            facts["routed experts"] = f"{router.num_experts}, {router.num_experts_per_tok} per token"
            facts["shared experts"] = config.num_shared_experts
            facts["router"] = describe_router(router)
        return facts

    def build(
        self,
        weights: Mapping[str, QTensor],
        kernels: Kernels,
        executor: ExpertExecutor | None,
        *,
        context: int,
        kv_dtype: str,
    ) -> Model:
        from expertide.kv.latent import LatentCache
        from expertide.models.layers.decoder import DecoderModel
        from expertide.models.layers.step import Rotation
        from expertide.models.layers.weights import LayerWeights

        assert (executor is None) == (self.config.router is None)
        config = self.config
        parts = LayerWeights(self._tensors.resident, weights)
        builder = _Builder(self._tensors, config, parts, kernels, executor)
        return DecoderModel.from_weights(
            parts,
            num_layers=config.num_layers,
            attention=builder.attention,
            ffn=builder.ffn,
            norm_eps=config.norm_eps,
            rotation=Rotation(config.rope),
            make_cache=partial(
                LatentCache,
                num_layers=config.num_layers,
                rank=config.kv_rank,
                rope_dim=config.rope_dim,
                dtype=kv_dtype,
            ),
            kernels=kernels,
        )


class _Builder:
    """Puts layers together from weights."""

    def __init__(
        self,
        tensors: _Tensors,
        config: DeepseekV2Config,
        parts: LayerWeights,
        kernels: Kernels,
        executor: ExpertExecutor | None,
    ) -> None:
        self._tensors = tensors
        self._config = config
        self._parts = parts
        self._kernels = kernels
        self._executor = executor

    def attention(self, layer_id: int) -> LatentAttention:
        from expertide.kernels.fused import LatentAttentionDims, LatentAttentionWeights
        from expertide.models.deepseek_v2_config import LATENT_NORM_EPS
        from expertide.models.layers.latent_attention import LatentAttention, split_joint_kv_b

        config, blk = self._config, f"blk.{layer_id}."
        dims = LatentAttentionDims(
            num_heads=config.num_heads,
            nope_dim=config.nope_dim,
            rope_dim=config.rope_dim,
            value_dim=config.value_dim,
            kv_rank=config.kv_rank,
        )
        if self._tensors.has_joint_kv_b:
            k_b, v_b = split_joint_kv_b(self._parts.matrix(blk + "attn_kv_b.weight"), dims)
        else:
            k_b, v_b = self._parts.matrix(blk + "attn_k_b.weight"), self._parts.matrix(blk + "attn_v_b.weight")
        is_plain = config.query_rank is None
        weights = LatentAttentionWeights(
            kv_a=self._parts.matrix(blk + "attn_kv_a_mqa.weight"),
            kv_a_norm=self._parts.vector(blk + "attn_kv_a_norm.weight"),
            k_b=k_b,
            v_b=v_b,
            output=self._parts.matrix(blk + "attn_output.weight"),
            q=self._parts.matrix(blk + ("attn_q.weight" if is_plain else "attn_q_b.weight")),
            q_a=None if is_plain else self._parts.matrix(blk + "attn_q_a.weight"),
            q_a_norm=None if is_plain else self._parts.vector(blk + "attn_q_a_norm.weight"),
        )
        return LatentAttention(
            layer_id,
            dims,
            weights,
            self._kernels,
            scale=config.attention_scale,
            latent_norm_eps=LATENT_NORM_EPS,
        )

    def ffn(self, layer_id: int) -> FeedForward:
        from expertide.models.layers.ffn import RoutedExperts

        config, blk = self._config, f"blk.{layer_id}."
        if config.router is None or layer_id not in config.moe_layers:
            return self._parts.swiglu(blk, "", self._kernels)
        assert self._executor is not None
        return RoutedExperts(
            layer_id,
            config.router,
            router=self._parts.matrix(blk + "ffn_gate_inp.weight"),
            bias_E=self._parts.vector(blk + "exp_probs_b.bias") if config.router.has_bias else None,
            shared=self._parts.swiglu(blk, "_shexp", self._kernels) if config.num_shared_experts else None,
            executor=self._executor,
            kernels=self._kernels,
        )


def _find_tensors(files: ModelFiles, config: DeepseekV2Config) -> _Tensors:
    """Find and check every tensor the config asks for; refuse what is left over.

    Raises:
        FormatError, UnsupportedError: see `TensorDirectory`.
    """
    directory = TensorDirectory(files, DeepseekV2Architecture.name)
    resident: dict[str, TensorInfo] = {}
    experts: dict[int, tuple[ExpertPart, ...]] = {}
    hidden, vocab = config.hidden_size, config.vocab_size

    def take(name: str, *shape: int, aliases: tuple[str, ...] = ()) -> None:
        resident[name] = directory.take(name, shape, aliases=aliases)

    take("token_embd.weight", vocab, hidden)
    take("output_norm.weight", hidden)
    take("output.weight", vocab, hidden, aliases=("token_embd.weight",))  # tied embeddings have no output matrix
    is_joint = not directory.has("blk.0.attn_k_b.weight") and directory.has("blk.0.attn_kv_b.weight")
    for layer_id in range(config.num_layers):
        blk = f"blk.{layer_id}."
        for name, shape in _attention_shapes(config, is_joint).items():
            take(blk + name, *shape)
        # Some files carry both generations; one is enough.
        directory.ignore([blk + "attn_k_b.weight", blk + "attn_v_b.weight"] if is_joint else [blk + "attn_kv_b.weight"])
        take(blk + "ffn_norm.weight", hidden)
        if config.router is None or layer_id not in config.moe_layers:
            take_swiglu(take, blk, "", hidden, config.dense_inner)
            continue
        take(blk + "ffn_gate_inp.weight", config.num_experts, hidden)
        if config.router.has_bias:
            names = [name.format(layer_id) for name in _BIAS_NAMES]
            take(names[0], config.num_experts, aliases=tuple(names[1:]))
        if config.num_shared_experts:
            take_swiglu(take, blk, "_shexp", hidden, config.moe_inner * config.num_shared_experts)
        experts[layer_id] = take_experts(directory, blk, config.num_experts, inner=config.moe_inner, hidden=hidden)
    # Draft layers (multi-token prediction) come after the model's own and are not used; they are as many as the key
    # says, so that a wrong number of layers does not leave half a model out.
    num_drafts = Metadata.of(files).int("deepseek2.nextn_predict_layers", default=0)
    drafts = range(config.num_layers, config.num_layers + num_drafts)
    directory.ignore(name for name in files.tensors if layer_of(name) in drafts)
    directory.refuse_leftovers()
    return _Tensors(resident, experts, is_joint)


def _attention_shapes(config: DeepseekV2Config, is_joint: bool) -> dict[str, tuple[int, ...]]:
    heads, rank, hidden = config.num_heads, config.kv_rank, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,)}
    if config.query_rank is None:
        shapes["attn_q.weight"] = (heads * config.head_dim, hidden)
    else:
        shapes["attn_q_a.weight"] = (config.query_rank, hidden)
        shapes["attn_q_a_norm.weight"] = (config.query_rank,)
        shapes["attn_q_b.weight"] = (heads * config.head_dim, config.query_rank)
    shapes["attn_kv_a_mqa.weight"] = (rank + config.rope_dim, hidden)
    shapes["attn_kv_a_norm.weight"] = (rank,)
    if is_joint:
        shapes["attn_kv_b.weight"] = (heads * (config.nope_dim + config.value_dim), rank)
    else:
        shapes["attn_k_b.weight"] = (heads, rank, config.nope_dim)
        shapes["attn_v_b.weight"] = (heads, config.value_dim, rank)
    shapes["attn_output.weight"] = (hidden, heads * config.value_dim)
    return shapes
