"""Sound containers that call themselves `qwen3moe` and make no sense, or have no code here: one sentence, by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expertide.errors import ExpertideError, FormatError, UnsupportedError
from expertide.formats import open_model
from expertide.models import registry
from expertide.models.grouped_config import read_hf
from expertide.models.qwen3_moe import FAMILY, tiny_config
from hf_grouped import hf_config_dict, write_tiny_gguf

# name: (keys changed, tensors dropped, tensors added, error class, words of the message)
FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, tuple[int, ...]], type[ExpertideError], str]] = {
    "linear rope scaling": ({"rope.scaling.type": "linear"}, (), {}, UnsupportedError, "rope.scaling.type is 'linear'"),
    "a factor without a type": ({"rope.scaling.factor": 4.0}, (), {}, UnsupportedError, "rope.scaling.factor.*linear"),
    "the old key of linear scaling": ({"rope.scale_linear": 2.0}, (), {}, UnsupportedError, "rope.scale_linear"),
    "YaRN without factor": ({"rope.scaling.type": "yarn"}, (), {}, FormatError, "rope.scaling.factor"),
    "rope on part of a head": ({"rope.dimension_count": 8}, (), {}, UnsupportedError, "dimension_count is 8.*size, 16"),
    "values of another size": ({"attention.value_length": 8}, (), {}, UnsupportedError, "value_length is 8.*size, 16"),
    "odd heads": ({"attention.key_length": 15}, (), {}, FormatError, "key_length says 15, expected an even"),
    "heads that do not share": ({"attention.head_count_kv": 3}, (), {}, FormatError, "3, which does not divide 4"),
    "heads differ": ({"attention.head_count_kv": [2, 2, 1]}, (), {}, UnsupportedError, "differs between layers"),
    "width that heads do not divide": (
        {"attention.key_length": None, "attention.head_count": 6}, (), {}, FormatError, "6, which does not divide .*64",
    ),
    "sliding window": ({"attention.sliding_window": 4096}, (), {}, UnsupportedError, "sliding_window is 4096"),
    "clamped queries": ({"attention.clamp_kqv": 8.0}, (), {}, UnsupportedError, "clamp_kqv is 8"),
    "a shared expert": ({"expert_shared_count": 1}, (), {}, UnsupportedError, "expert_shared_count is 1"),
    "groups of experts": ({"expert_group_count": 4}, (), {}, UnsupportedError, "expert_group_count is 4"),
    "sigmoid router": ({"expert_gating_func": 2}, (), {}, UnsupportedError, "expert_gating_func is 2"),
    "text for a number": ({"embedding_length": "64"}, (), {}, FormatError, "embedding_length.*whole number"),
    "text for a switch": ({"expert_weights_norm": 1}, (), {}, FormatError, "expert_weights_norm.*true or false"),
    "no epsilon": ({"attention.layer_norm_rms_epsilon": None}, (), {}, FormatError, "layer_norm_rms_epsilon"),
    "too many experts per token": ({"expert_used_count": 9}, (), {}, UnsupportedError, "9 experts per token of 8"),
    "lying expert count": ({"expert_count": 4_000_000}, (), {}, FormatError, "expected .4,000,000, 64."),
    "absurd epsilon": ({"attention.layer_norm_rms_epsilon": 2.0}, (), {}, FormatError, "norm epsilon 2, expected"),
    "absurd rope base": ({"rope.freq_base": 1e30}, (), {}, FormatError, "rope base 1e.30, expected"),
    "no experts": ({"expert_count": 0}, (), {}, FormatError, "expert_count"),
    "wrong width": ({"embedding_length": 32}, (), {}, FormatError, "token_embd.weight has shape .160, 64., expected"),
    "billions of layers": ({"block_count": 2_000_000_000}, (), {}, FormatError, "says 2,000,000,000 layers"),
    "one layer too many": ({"block_count": 4}, (), {}, FormatError, "blk.3.attn_norm.weight, required"),
    "a router is missing": (
        {}, ("blk.1.ffn_gate_inp.weight",), {}, FormatError, "blk.1.ffn_gate_inp.weight, required",
    ),
    "a norm of the queries is missing": (
        {}, ("blk.2.attn_q_norm.weight",), {}, FormatError,
        "blk.2.attn_q_norm.weight, required by architecture 'qwen3moe', is not in the file; closest",
    ),
    "experts are missing": ({}, ("blk.2.ffn_up_exps.weight",), {}, FormatError, "blk.2.ffn_up_exps.weight, required"),
    "a bias nobody adds": (
        {}, (), {"blk.0.attn_q.bias": (64,)}, UnsupportedError, "no use here for blk.0.attn_q.bias",
    ),
    "factors of frequencies": ({}, (), {"rope_freqs.weight": (8,)}, UnsupportedError, "no use here for rope_freqs"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_makes_no_sense_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    keys, drop, extra, error, words = FAULTS[fault]
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, tiny_config(), seed=0, keys=keys, drop=drop, extra=extra)
    with pytest.raises(error, match=words) as caught:
        registry.find(open_model(path))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))


@pytest.mark.parametrize(
    "keys",
    [
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {"rope.dimension_count": 16, "attention.sliding_window": 0, "expert_gating_func": 1},
        {"expert_weights_scale": 0.0, "expert_weights_norm": True},
        {"attention.key_length": None, "attention.value_length": None},
    ],
)
def test_keys_that_change_nothing_do_no_harm(keys: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    config = tiny_config(norm_eps=0.5)  # a number that float32 has
    write_tiny_gguf(path, config, seed=0, keys=keys)
    assert registry.find(open_model(path)).config == config


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope scaling type 'longrope'"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_key_value_heads": 3}, "4 heads of 16 on 3 key/value heads"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers is '0'"),
        ({"mlp_only_layers": [0, 1, 2]}, "no layer has routed experts"),
        ({"num_experts": None}, "num_local_experts is None"),
    ],
)
def test_unknown_values_of_config_json_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises((FormatError, UnsupportedError), match=words):
        read_hf(hf_config_dict(tiny_config()) | fields, FAMILY)


def test_a_sparse_step_makes_the_layers_between_dense() -> None:
    fields = hf_config_dict(tiny_config(num_layers=7, dense_inner=48))
    assert read_hf(fields | {"mlp_only_layers": [5], "decoder_sparse_step": 2}, FAMILY).moe_layers == (1, 3)


def test_finding_a_model_does_not_import_torch(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, tiny_config(), seed=0)
    code = (
        "import sys; from expertide.formats import open_model; from expertide.models import registry; "
        "found = registry.find(open_model(sys.argv[1])); found.resident_tensors(); found.expert_catalog(); "
        "found.workspace_bytes(512); found.describe(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
