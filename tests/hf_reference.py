"""The independent opinion: the `gguf` package decodes, transformers computes, both in float32.

    decode_gguf(path)                        every tensor as float32, by the `gguf` package's decoders
    hf_model(config, tensors)                DeepseekV2ForCausalLM / DeepseekV3ForCausalLM holding exactly these values
    write_tiny_gguf(path, config, …)         a random file of any layout the config can name
    write_joint_copy(source, target)         the older layout: attn_k_b and attn_v_b merged into attn_kv_b

transformers' DeepseekV2 knows no layer frequency and no dense-only models; there its MoE blocks are replaced by its own
dense MLP, which is what such a layer is.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from expertide.models.deepseek_v2 import HF_NAMES, DeepseekV2Config

Tensors = dict[str, NDArray[np.float32]]


def decode_gguf(path: Path) -> Tensors:
    """Every tensor of a file, float32, slowest axis first."""
    reader = gguf.GGUFReader(path)
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        .reshape([int(size) for size in tensor.shape[::-1]])
        .astype(np.float32)
        for tensor in reader.tensors
    }


def hf_model(config: DeepseekV2Config, tensors: Tensors) -> Any:
    """A transformers model in float32 with these weights."""
    from transformers import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2MLP

    is_v3 = config.router is not None and config.router.score == "sigmoid"
    hf_config = _hf_config(config, is_v3)
    model = (DeepseekV3ForCausalLM if is_v3 else DeepseekV2ForCausalLM)(hf_config)
    for layer_id, layer in enumerate(model.model.layers):
        if layer_id not in config.moe_layers and hasattr(layer.mlp, "gate"):
            assert not is_v3
            layer.mlp = DeepseekV2MLP(hf_config)
    state = {name: torch.from_numpy(np.array(values)) for name, values in _hf_tensors(config, tensors).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    # Computed buffers may be absent; a weight may not.
    assert not unexpected, unexpected
    assert not set(missing) & {name for name, weight in model.named_parameters() if weight.numel()}, missing
    return model.to(torch.float32).eval()


def hf_config_dict(config: DeepseekV2Config) -> dict[str, Any]:
    """What config.json of such a model says."""
    router = config.router
    is_v3 = router is not None and router.score == "sigmoid"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope.theta}
    if (yarn := config.rope.yarn) is not None:
        m = math.sqrt(config.attention_scale * math.sqrt(config.head_dim))
        mscale = (m - 1) / (0.1 * math.log(yarn.factor))
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_context,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": mscale,
            "mscale_all_dim": mscale,
        }
    lead = config.moe_layers[0] if config.moe_layers else config.num_layers
    fields: dict[str, Any] = {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.query_rank,
        "kv_lora_rank": config.kv_rank,
        "qk_nope_head_dim": config.nope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.value_dim,
        "intermediate_size": config.dense_inner or 8,
        "moe_intermediate_size": config.moe_inner or 8,
        "n_shared_experts": config.num_shared_experts,
        "n_routed_experts": config.num_experts or 2,
        "num_experts_per_tok": config.num_experts_per_tok or 1,
        "first_k_dense_replace": lead,
        "moe_layer_freq": config.moe_layers[1] - lead if len(config.moe_layers) > 1 else 1,
        "rope_parameters": rope,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": False,
    }
    if router is not None:
        fields |= {
            "n_group": router.num_groups,
            "topk_group": router.top_groups,
            "norm_topk_prob": router.renormalize,
            "routed_scaling_factor": router.scale,
        }
        fields["scoring_func"] = router.score
        grouped = "group_limited_greedy" if router.num_groups > 1 else "greedy"
        fields["topk_method"] = "noaux_tc" if is_v3 else grouped
    return fields


def _hf_config(config: DeepseekV2Config, is_v3: bool) -> Any:
    from transformers import DeepseekV2Config as HfV2Config
    from transformers import DeepseekV3Config as HfV3Config

    unknown = ("model_type", "scoring_func", "moe_layer_freq")
    fields = {key: value for key, value in hf_config_dict(config).items() if key not in unknown}
    if is_v3:
        fields.pop("topk_method")
        fields["num_mtp_layers"] = 0
    return (HfV3Config if is_v3 else HfV2Config)(**fields, attn_implementation="eager")


def _hf_tensors(config: DeepseekV2Config, tensors: Tensors) -> Tensors:
    """Checkpoint names and transformers' fused experts from GGUF names."""
    state: Tensors = {}
    for name, values in tensors.items():
        pieces = name.split(".")
        layer = pieces[1] if pieces[0] == "blk" else ""
        pattern = name.replace(f"blk.{layer}.", "blk.{}.", 1) if layer else name
        prefix = f"model.layers.{layer}."
        if pattern.startswith(("blk.{}.attn_k_b", "blk.{}.ffn_up_exps", "blk.{}.ffn_gate_exps")):
            continue
        if pattern == "blk.{}.attn_v_b.weight":
            state[prefix + "self_attn.kv_b_proj.weight"] = join_kv_b(tensors[f"blk.{layer}.attn_k_b.weight"], values)
        elif pattern == "blk.{}.ffn_gate_up_exps.weight":
            state[prefix + "mlp.experts.gate_up_proj"] = values
        elif pattern == "blk.{}.ffn_down_exps.weight":
            state[prefix + "mlp.experts.down_proj"] = values
            if f"blk.{layer}.ffn_gate_exps.weight" in tensors:
                gate_up = [tensors[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up")]
                state[prefix + "mlp.experts.gate_up_proj"] = np.concatenate(gate_up, axis=1)
        else:
            state[HF_NAMES[pattern].format(layer)] = values
    state.setdefault("lm_head.weight", tensors["token_embd.weight"])
    return state


def join_kv_b(k_b_QLN: NDArray[np.float32], v_b_QUL: NDArray[np.float32]) -> NDArray[np.float32]:
    """[Q * (N + U), L]: per head the key rows (k_b transposed back), then the value rows."""
    joint_QRL = np.concatenate([k_b_QLN.transpose(0, 2, 1), v_b_QUL], axis=1)
    return np.ascontiguousarray(joint_QRL.reshape(-1, joint_QRL.shape[-1]))


def write_joint_copy(source: Path, target: Path) -> None:
    """Copy a GGUF file, with attn_k_b and attn_v_b merged into a float32 attn_kv_b, and the keys of that generation."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "deepseek2")
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    mla = {name: fields.pop(f"deepseek2.attention.{name}_mla").contents() for name in ("key_length", "value_length")}
    for name, field in fields.items():
        if name == "general.architecture":
            continue
        value = mla.get(name.removeprefix("deepseek2.attention."), field.contents())
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type=sub_type)
    decoded = decode_gguf(source)
    for tensor in reader.tensors:
        if tensor.name.endswith("attn_k_b.weight"):
            v_b = decoded[tensor.name.replace("attn_k_b", "attn_v_b")]
            writer.add_tensor(tensor.name.replace("attn_k_b", "attn_kv_b"), join_kv_b(decoded[tensor.name], v_b))
        elif not tensor.name.endswith("attn_v_b.weight"):
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    finish(writer)


def write_tiny_gguf(
    path: Path,
    config: DeepseekV2Config,
    *,
    seed: int,
    joint: bool = False,
    gate_up: bool = False,
    tied: bool = False,
    keys: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, tuple[int, ...]] | None = None,
) -> None:
    """A float32 file of this config with seeded random weights.

    Args:
        joint: attn_kv_b instead of attn_k_b and attn_v_b.
        gate_up: experts' gate and up stacked in one tensor.
        tied: no output matrix.
        keys: `deepseek2.*` keys to add or replace; None as a value removes the key.
        drop: names of tensors to leave out.
        extra: names and shapes of tensors to add.
    """
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "deepseek2")
    for key, value in (_gguf_keys(config, joint) | (keys or {})).items():
        if value is not None:
            add_key(writer, f"deepseek2.{key}", value)
    for name, shape in (_gguf_shapes(config, joint=joint, gate_up=gate_up, tied=tied) | (extra or {})).items():
        if name not in drop:
            writer.add_tensor(name, random_weights(rng, name, shape))
    finish(writer)


def random_weights(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    values = rng.standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 1 + 0.1 * values
    elif name.endswith("exp_probs_b.bias"):
        values = 0.2 * values
    else:
        # Wide enough that routers and softmaxes decide clearly, and the logits reach a size of about one.
        values = values * (1.5 / math.sqrt(shape[-1]))
    return values.astype(np.float32)


def _gguf_keys(config: DeepseekV2Config, joint: bool) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.dense_inner or 8,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_heads if joint else 1,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.kv_lora_rank": config.kv_rank,
        "rope.dimension_count": config.rope_dim,
        "rope.freq_base": config.rope.theta,
    }
    if config.query_rank is not None:
        keys["attention.q_lora_rank"] = config.query_rank
    mla = "" if joint else "_mla"
    if not joint:
        keys |= {"attention.key_length": config.kv_rank + config.rope_dim, "attention.value_length": config.kv_rank}
    keys |= {f"attention.key_length{mla}": config.head_dim, f"attention.value_length{mla}": config.value_dim}
    if (yarn := config.rope.yarn) is not None:
        m = math.sqrt(config.attention_scale * math.sqrt(config.head_dim))
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": yarn.factor,
            "rope.scaling.original_context_length": yarn.original_context,
            "rope.scaling.yarn_log_multiplier": (m - 1) / math.log(yarn.factor),
            "rope.scaling.yarn_beta_fast": yarn.beta_fast,
            "rope.scaling.yarn_beta_slow": yarn.beta_slow,
        }
    if (router := config.router) is None:
        return keys
    return keys | {
        "leading_dense_block_count": next(layer for layer in config.moe_layers),
        "expert_feed_forward_length": config.moe_inner,
        "expert_count": router.num_experts,
        "expert_used_count": router.num_experts_per_tok,
        "expert_shared_count": config.num_shared_experts,
        "expert_weights_scale": router.scale,
        "expert_weights_norm": router.renormalize,
        "expert_gating_func": {"softmax": 1, "sigmoid": 2}[router.score],
        "expert_group_count": router.num_groups if router.num_groups > 1 else None,
        "expert_group_used_count": router.top_groups if router.num_groups > 1 else None,
    }


def _gguf_shapes(config: DeepseekV2Config, *, joint: bool, gate_up: bool, tied: bool) -> dict[str, tuple[int, ...]]:
    """Written down once more, independently of the loader's own table."""
    hidden, heads, rank, experts = config.hidden_size, config.num_heads, config.kv_rank, config.num_experts
    nope, rope, value = config.nope_dim, config.rope_dim, config.value_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab_size, hidden)}
    shapes["output_norm.weight"] = (hidden,)
    if not tied:
        shapes["output.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        part: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
        if config.query_rank is None:
            part["attn_q.weight"] = (heads * (nope + rope), hidden)
        else:
            part["attn_q_a.weight"] = (config.query_rank, hidden)
            part["attn_q_a_norm.weight"] = (config.query_rank,)
            part["attn_q_b.weight"] = (heads * (nope + rope), config.query_rank)
        part["attn_kv_a_mqa.weight"] = (rank + rope, hidden)
        part["attn_kv_a_norm.weight"] = (rank,)
        if joint:
            part["attn_kv_b.weight"] = (heads * (nope + value), rank)
        else:
            part |= {"attn_k_b.weight": (heads, rank, nope), "attn_v_b.weight": (heads, value, rank)}
        part["attn_output.weight"] = (hidden, heads * value)
        if layer in config.moe_layers:
            inner, shared = config.moe_inner, config.moe_inner * config.num_shared_experts
            part["ffn_gate_inp.weight"] = (experts, hidden)
            if gate_up:
                part["ffn_gate_up_exps.weight"] = (experts, 2 * inner, hidden)
            else:
                part |= {
                    "ffn_gate_exps.weight": (experts, inner, hidden),
                    "ffn_up_exps.weight": (experts, inner, hidden),
                }
            part["ffn_down_exps.weight"] = (experts, hidden, inner)
            if shared:
                part |= {"ffn_gate_shexp.weight": (shared, hidden), "ffn_up_shexp.weight": (shared, hidden)}
                part["ffn_down_shexp.weight"] = (hidden, shared)
            if config.router is not None and config.router.has_bias:
                part["exp_probs_b.bias"] = (experts,)
        else:
            inner = config.dense_inner
            part |= {"ffn_gate.weight": (inner, hidden), "ffn_up.weight": (inner, hidden)}
            part["ffn_down.weight"] = (hidden, inner)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in part.items()}
    return shapes


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
