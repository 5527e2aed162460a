"""The independent opinion on the grouped-query families: tiny random files, and transformers with their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from expertide.models import olmoe, qwen2_moe, qwen3_moe
from expertide.models.grouped_config import HF_NAMES, Family, GroupedConfig
from expertide.text.byte_alphabet import BYTE_TO_CHAR
from hf_reference import Tensors, add_key, finish, random_weights

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġt he", "i n", "Ġ a", "o n", "Ġ Ġ")


def hf_config_dict(config: GroupedConfig, family: Family = qwen3_moe.FAMILY) -> dict[str, Any]:
    """What config.json of such a model says."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope.theta}
    if (yarn := config.rope.yarn) is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_context,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }
    fields: dict[str, Any] = {
        "model_type": family.hf_type,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "norm_topk_prob": config.router.renormalize,
        "rope_parameters": rope,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": False,
    }
    if family is olmoe.FAMILY:
        return fields | {"intermediate_size": config.moe_inner}
    fields |= {
        "intermediate_size": config.dense_inner or 8,
        "moe_intermediate_size": config.moe_inner,
        "mlp_only_layers": [layer for layer in range(config.num_layers) if layer not in config.moe_layers],
        "decoder_sparse_step": 1,
    }
    if family is qwen2_moe.FAMILY:
        return fields | {"shared_expert_intermediate_size": config.shared_inner}
    return fields | {"head_dim": config.head_dim}


def hf_model(config: GroupedConfig, tensors: Tensors, family: Family = qwen3_moe.FAMILY) -> Any:
    """transformers' model in float32 with these weights (GGUF names)."""
    import transformers

    stem = {"qwen3_moe": "Qwen3Moe", "qwen2_moe": "Qwen2Moe", "olmoe": "Olmoe"}[family.hf_type]
    fields = {key: value for key, value in hf_config_dict(config, family).items() if key != "model_type"}
    # The plain loop over experts: the fused product wants rows of a multiple of 16 bytes.
    make_config = getattr(transformers, f"{stem}Config")
    hf_config = make_config(**fields, attn_implementation="eager", experts_implementation="eager")
    model = getattr(transformers, f"{stem}ForCausalLM")(hf_config)
    state = {name: torch.from_numpy(np.array(values)) for name, values in _hf_tensors(tensors, family).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and not missing, (unexpected, missing)
    return model.to(torch.float32).eval()


def _hf_tensors(tensors: Tensors, family: Family) -> Tensors:
    """Checkpoint names, and transformers' fused experts, from GGUF names."""
    names = {**HF_NAMES, **family.hf_names}
    state: Tensors = {}
    for name, values in tensors.items():
        layer = name.split(".")[1] if name.startswith("blk.") else ""
        pattern = name.replace(f"blk.{layer}.", "blk.{}.", 1) if layer else name
        experts = f"model.layers.{layer}.mlp.experts."
        if pattern == "blk.{}.ffn_gate_exps.weight":
            up = tensors[name.replace("gate", "up")]
            state[experts + "gate_up_proj"] = np.concatenate([values, up], axis=1)
        elif pattern == "blk.{}.ffn_down_exps.weight":
            state[experts + "down_proj"] = values
        elif pattern == "blk.{}.ffn_gate_up_exps.weight":
            state[experts + "gate_up_proj"] = values
        elif pattern == "blk.{}.ffn_gate_inp_shexp.weight":
            state[names[pattern].format(layer)] = values[None]  # a matrix of one row there, a vector in GGUF
        elif pattern != "blk.{}.ffn_up_exps.weight":
            state[names[pattern].format(layer)] = values
    state.setdefault("lm_head.weight", tensors["token_embd.weight"])
    return state


def write_tiny_gguf(
    path: Path,
    config: GroupedConfig,
    *,
    seed: int,
    family: Family = qwen3_moe.FAMILY,
    tied: bool = False,
    gate_up: bool = False,
    quants: dict[str, str] | None = None,
    tokenizer: bool = False,
    keys: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, tuple[int, ...]] | None = None,
) -> None:
    """A file of this config with seeded random weights.

    Args:
        tied: no output matrix.
        gate_up: experts' gate and up stacked in one tensor.
        quants: part of a tensor's name -> type it is stored in ("Q8_0"); float32 otherwise.
        tokenizer: with a byte-level vocabulary of 256 bytes, a few merges and the special tokens of Qwen.
        keys: the architecture's keys to add or replace; None as a value removes the key.
        drop: names of tensors to leave out.
        extra: names and shapes of tensors to add.
    """
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, family.name)
    for key, value in (_gguf_keys(config, family) | (keys or {})).items():
        if value is not None:
            add_key(writer, f"{family.name}.{key}", value)
    if tokenizer:
        _add_tokenizer(writer, config.vocab_size)
    for name, shape in (_gguf_shapes(config, family, tied=tied, gate_up=gate_up) | (extra or {})).items():
        if name in drop:
            continue
        values = random_weights(rng, name, shape)
        kind = next((kind for part, kind in (quants or {}).items() if part in name), None)
        if kind is None:
            writer.add_tensor(name, values)
        else:
            quant = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(values, quant), raw_dtype=quant)
    finish(writer)


def _gguf_keys(config: GroupedConfig, family: Family) -> dict[str, Any]:
    """As the converter writes them; what it leaves out is added where the config asks for another value."""
    keys: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.dense_inner or 8,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope.theta,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
    }
    if family is olmoe.FAMILY:
        keys["feed_forward_length"] = config.moe_inner
    else:
        keys["expert_feed_forward_length"] = config.moe_inner
    if family is qwen2_moe.FAMILY:
        keys["expert_shared_feed_forward_length"] = config.shared_inner
    if family is qwen3_moe.FAMILY:
        keys |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if config.router.renormalize != (family is qwen3_moe.FAMILY):
        keys["expert_weights_norm"] = config.router.renormalize
    if (yarn := config.rope.yarn) is not None:
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": yarn.factor,
            "rope.scaling.original_context_length": yarn.original_context,
        }
    return keys


def _gguf_shapes(config: GroupedConfig, family: Family, *, tied: bool, gate_up: bool) -> dict[str, tuple[int, ...]]:
    """Written down once more, independently of the loader's own table."""
    hidden, experts, inner = config.hidden_size, config.num_experts, config.moe_inner
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab_size, hidden)}
    shapes["output_norm.weight"] = (hidden,)
    if not tied:
        shapes["output.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        part: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
        part |= {"attn_q.weight": (q, hidden), "attn_k.weight": (kv, hidden), "attn_v.weight": (kv, hidden)}
        if family is qwen3_moe.FAMILY:
            part |= {"attn_q_norm.weight": (config.head_dim,), "attn_k_norm.weight": (config.head_dim,)}
        elif family is olmoe.FAMILY:
            part |= {"attn_q_norm.weight": (q,), "attn_k_norm.weight": (kv,)}
        else:
            part |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        part["attn_output.weight"] = (hidden, q)
        if layer not in config.moe_layers:
            dense = config.dense_inner
            part |= {"ffn_gate.weight": (dense, hidden), "ffn_up.weight": (dense, hidden)}
            part["ffn_down.weight"] = (hidden, dense)
        else:
            part["ffn_gate_inp.weight"] = (experts, hidden)
            if gate_up:
                part["ffn_gate_up_exps.weight"] = (experts, 2 * inner, hidden)
            else:
                part |= {f"ffn_{name}_exps.weight": (experts, inner, hidden) for name in ("gate", "up")}
            part["ffn_down_exps.weight"] = (experts, hidden, inner)
            if family is qwen2_moe.FAMILY:
                shared = config.shared_inner
                part |= {"ffn_gate_shexp.weight": (shared, hidden), "ffn_up_shexp.weight": (shared, hidden)}
                part |= {"ffn_down_shexp.weight": (hidden, shared), "ffn_gate_inp_shexp.weight": (hidden,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in part.items()}
    return shapes


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Bytes first, then what the merges make, the special tokens, and padding as in Qwen's own files."""
    tokens = [BYTE_TO_CHAR[byte] for byte in range(256)] + [merge.replace(" ", "") for merge in MERGES]
    types = [gguf.TokenType.NORMAL] * len(tokens)
    special = {text: len(tokens) + index for index, text in enumerate(SPECIAL_TOKENS)}
    tokens += SPECIAL_TOKENS
    types += [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    num_padding = vocab_size - len(tokens)
    assert num_padding >= 0
    tokens += [f"[PAD{len(tokens) + index}]" for index in range(num_padding)]
    types += [gguf.TokenType.UNUSED] * num_padding
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(special["<|im_end|>"])
    writer.add_pad_token_id(special["<|endoftext|>"])
