"""The architecture of families with grouped-query attention and a softmax router: tensors, planner numbers, build.

A family (`qwen3_moe.py`, …) subclasses it and says what is its own in a `Family`. No torch until `build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from expertide.formats.tensors import ExpertCatalog, ExpertPart, ModelFiles, TensorInfo
from expertide.kernels import tiles
from expertide.models.describe import describe_rope, describe_router
from expertide.models.grouped_config import Family, GroupedConfig, read_gguf
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

    def workspace_bytes(self, chunk: int) -> int:
        # The plan takes the tiles off again where nothing is decoded.
        return max(self._reference_bytes(chunk), self._native_bytes(chunk) + tiles.decoding_bytes())

    def _native_bytes(self, chunk: int) -> int:
        """See `tiles.native_step_bytes`.

        Measured with 2 threads and chunks of 512 on a layer of the sizes of Qwen3-30B-A3B, Qwen1.5-MoE-A2.7B and
        OLMoE-1B-7B: 92, 104 and 90 MiB, of 97, 114 and 93 counted here.
        """
        config = self.config
        hidden = config.hidden_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = tiles.native_gqa_bytes(
            chunk, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
        )
        # Normed rows and the result; queries and what they attended to; keys and values. The products' own input.
        attention += 4 * chunk * (2 * hidden + 2 * q + 2 * kv) + tiles.native_rows_bytes(chunk, max(q, hidden))
        return tiles.native_step_bytes(
            chunk,
            attention=attention,
            hidden=hidden,
            moe_inner=config.moe_inner,
            k=config.num_experts_per_tok,
            mlp_inner=max(config.shared_inner, config.dense_inner),
            vocab_size=config.vocab_size,
        )

    def _reference_bytes(self, chunk: int) -> int:
        """On the reference kernels memory is returned after each op, so that the hungriest one counts."""
        config = self.config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        tiled = tiles.gqa_attention_bytes(
            chunk, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
        )
        # While attending: rotated queries, keys, values, and the result before and after joining tiles. While rotating:
        # queries as made, normed, rotated, and the four products of the rotation (each half as wide).
        attention = max(tiled + 4 * chunk * (3 * q + 2 * kv), tiles.decoding_bytes() + 4 * chunk * (5 * q + kv))
        # Every (token, k) result; the logits and what sorts them; one expert's own rows, at worst all tokens'. A shared
        # or dense MLP: gate, up, the product. Measured with heads of Qwen3-30B-A3B and chunks of 512: 59 to 70 MiB in
        # all, of 85 counted here.
        results = config.num_experts_per_tok * config.hidden_size + 4 * config.num_experts
        ffn = max(results + 2 * config.hidden_size + 3 * config.moe_inner, 3 * config.dense_inner)
        ffn = 4 * chunk * max(ffn, config.hidden_size + 3 * config.shared_inner) + tiles.decoding_bytes()
        streams = 4 * chunk * 5 * config.hidden_size  # residual before and after, normed, two layer outputs
        head = 4 * config.vocab_size * 2 + tiles.decoding_bytes()
        return max(attention, ffn, head) + streams

    def describe(self) -> dict[str, object]:
        config = self.config
        norm = {"none": "", "head": ", queries and keys normed per head", "whole": ", queries and keys normed"}
        return {
            "layers": config.num_layers,
            "hidden size": config.hidden_size,
            "vocabulary": config.vocab_size,
            "context": config.context_length,
            "attention": (
                f"grouped (GQA): {config.num_heads} heads of {config.head_dim} on {config.num_kv_heads} key/value heads"
                + norm[self.family.qk_norm]
                + (", with biases" if self.family.has_qkv_bias else "")
            ),
            "rope": describe_rope(config.rope),
            "dense layers": config.num_layers - len(config.moe_layers),
            "MoE layers": len(config.moe_layers),
            "routed experts": f"{config.num_experts}, {config.num_experts_per_tok} per token",
            "shared experts": "1, gated" if config.shared_inner else 0,
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
        from expertide.models.layers.decoder import DecoderModel
        from expertide.models.layers.step import Rotation
        from expertide.models.layers.weights import LayerWeights

        assert executor is not None
        config = self.config
        parts = LayerWeights(self._tensors.resident, weights)
        return DecoderModel.from_weights(
            parts,
            num_layers=config.num_layers,
            attention=lambda layer_id: _attention(layer_id, config, self.family, parts, kernels),
            ffn=lambda layer_id: _ffn(layer_id, config, parts, kernels, executor),
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


def _attention(
    layer_id: int, config: GroupedConfig, family: Family, parts: LayerWeights, kernels: Kernels
) -> GroupedAttention:
    from expertide.kernels.fused import GroupedAttentionDims, GroupedAttentionWeights
    from expertide.models.layers.grouped_attention import GroupedAttention

    blk = f"blk.{layer_id}."
    has_norm, has_bias = family.qk_norm != "none", family.has_qkv_bias
    return GroupedAttention(
        layer_id,
        GroupedAttentionDims(config.num_heads, config.num_kv_heads, config.head_dim),
        GroupedAttentionWeights(
            q=parts.matrix(blk + "attn_q.weight"),
            k=parts.matrix(blk + "attn_k.weight"),
            v=parts.matrix(blk + "attn_v.weight"),
            output=parts.matrix(blk + "attn_output.weight"),
            q_norm=parts.vector(blk + "attn_q_norm.weight") if has_norm else None,
            k_norm=parts.vector(blk + "attn_k_norm.weight") if has_norm else None,
            q_bias=parts.vector(blk + "attn_q.bias") if has_bias else None,
            k_bias=parts.vector(blk + "attn_k.bias") if has_bias else None,
            v_bias=parts.vector(blk + "attn_v.bias") if has_bias else None,
        ),
        kernels,
        scale=config.attention_scale,
        norm_eps=config.norm_eps,
        rope_pairs=config.rope.pairs,
    )


def _ffn(
    layer_id: int, config: GroupedConfig, parts: LayerWeights, kernels: Kernels, executor: ExpertExecutor
) -> FeedForward:
    from expertide.models.layers.ffn import GatedSwiGLU, RoutedExperts

    blk = f"blk.{layer_id}."
    if layer_id not in config.moe_layers:
        return parts.swiglu(blk, "", kernels)
    shared = None
    if config.shared_inner:
        gate_H = parts.vector(blk + "ffn_gate_inp_shexp.weight")
        shared = GatedSwiGLU(parts.swiglu(blk, "_shexp", kernels), gate_H, kernels)
    return RoutedExperts(
        layer_id,
        config.router,
        router=parts.matrix(blk + "ffn_gate_inp.weight"),
        bias_E=None,
        shared=shared,
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
        if family.qk_norm != "none":
            take(blk + "attn_q_norm.weight", q if family.qk_norm == "whole" else config.head_dim)
            take(blk + "attn_k_norm.weight", kv if family.qk_norm == "whole" else config.head_dim)
        if family.has_qkv_bias:
            take(blk + "attn_q.bias", q)
            take(blk + "attn_k.bias", kv)
            take(blk + "attn_v.bias", kv)
        take(blk + "ffn_norm.weight", hidden)
        if layer_id not in config.moe_layers and directory.has(blk + "ffn_gate.weight"):
            take_swiglu(take, blk, "", hidden, config.dense_inner)
            continue
        take(blk + "ffn_gate_inp.weight", config.num_experts, hidden)
        if family.has_shared_expert:
            take(blk + "ffn_gate_inp_shexp.weight", hidden)
            take_swiglu(take, blk, "_shexp", hidden, config.shared_inner)
        experts[layer_id] = take_experts(directory, blk, config.num_experts, inner=config.moe_inner, hidden=hidden)
    directory.refuse_leftovers()
    return _Tensors(resident, experts)
