"""Sound GGUF containers whose model makes no sense, or has no code here: one sentence, by name."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import memory_model
from expertide.errors import ExpertideError, FormatError, NumericsError, RequestError, UnsupportedError
from expertide.formats import open_model
from expertide.kernels import select
from expertide.kernels.router import RouterSpec
from expertide.models import registry
from expertide.models.deepseek_v2 import DeepseekV2Config, tiny_config
from hf_reference import hf_config_dict, write_tiny_gguf

V3_ROUTER = RouterSpec(8, 3, score="sigmoid", has_bias=True, group_score="top2_sum", renormalize=True)

# name: (keys changed, tensors dropped, tensors added, error class, words of the message)
FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, tuple[int, ...]], type[ExpertideError], str]] = {
    "unknown gating": ({"expert_gating_func": 9}, (), {}, UnsupportedError, "expert_gating_func is 9"),
    "sqrt-softplus": ({"expert_gating_func": 4}, (), {}, UnsupportedError, "4 .sqrt-softplus"),
    "linear rope scaling": ({"rope.scaling.type": "linear"}, (), {}, UnsupportedError, "rope.scaling.type is 'linear'"),
    "YaRN of unknown scale": ({"rope.scaling.yarn_log_multiplier": None}, (), {}, UnsupportedError, "log_multi"),
    "YaRN without factor": ({"rope.scaling.factor": None}, (), {}, FormatError, "rope.scaling.factor"),
    "YaRN factor of nan": ({"rope.scaling.factor": float("nan")}, (), {}, FormatError, "rope.scaling.factor"),
    "text for a number": ({"embedding_length": "64"}, (), {}, FormatError, "embedding_length.*whole number"),
    "no latent rank": ({"attention.kv_lora_rank": None}, (), {}, FormatError, "attention.kv_lora_rank"),
    "odd rope dims": ({"rope.dimension_count": 7}, (), {}, FormatError, "dimension_count says 7, expected an even"),
    "heads all rope": ({"attention.key_length_mla": 8}, (), {}, FormatError, "more than the 8 rope dims"),
    "wrong width": ({"embedding_length": 32}, (), {}, FormatError, "token_embd.weight has shape .160, 64., expected"),
    "wrong vocabulary": ({"vocab_size": 161}, (), {}, FormatError, "vocab_size says 161.*160 rows"),
    "billions of layers": ({"block_count": 2_000_000_000}, (), {}, FormatError, "says 2,000,000,000 layers"),
    "one layer too many": ({"block_count": 4}, (), {}, FormatError, "block_count|leading_dense_block_count|blk.3"),
    "heads differ": ({"attention.head_count": [4, 4, 2]}, (), {}, UnsupportedError, "differs between layers"),
    "too few heads listed": ({"attention.head_count": [4, 4]}, (), {}, FormatError, "array of 2 values"),
    "too many experts per token": ({"expert_used_count": 9}, (), {}, UnsupportedError, "9 experts per token of 8"),
    "lying expert count": ({"expert_count": 4_000_000}, (), {}, FormatError, "expected .4,000,000, 64."),
    "experts without a key": ({"expert_count": None}, (), {}, FormatError, "expert_count says 0, but layer 1 has"),
    "lead contradicts": ({"leading_dense_block_count": 2}, (), {}, FormatError, "says 2, but layer 1 has a router"),
    "groups that do not divide": (
        {"expert_group_count": 3, "expert_group_used_count": 1}, (), {}, UnsupportedError, "3 groups",
    ),
    "groups without a number kept": ({"expert_group_count": 4}, (), {}, UnsupportedError, "0 groups kept of 4"),
    "a router is missing": (
        {}, ("blk.1.ffn_gate_inp.weight",), {}, FormatError, "blk.1.ffn_gate.weight|layer 1 has no router",
    ),
    "a norm is missing": (
        {}, ("blk.2.attn_norm.weight",), {}, FormatError,
        "blk.2.attn_norm.weight, required by architecture 'deepseek2', is not in the file; closest",
    ),
    "experts are missing": ({}, ("blk.2.ffn_up_exps.weight",), {}, FormatError, "blk.2.ffn_up_exps.weight, required"),
    "half of a split pair": ({}, ("blk.0.attn_v_b.weight",), {}, FormatError, "blk.0.attn_v_b.weight, required"),
    "a bias nobody adds": (
        {}, (), {"blk.0.attn_output.bias": (64,)}, UnsupportedError, "no use here for blk.0.attn_output.bias",
    ),
    "a selection bias beside softmax": (
        {}, (), {"blk.1.exp_probs_b.bias": (8,), "blk.2.exp_probs_b.bias": (8,)}, UnsupportedError, "selection bias",
    ),
    "fewer layers than the file holds": ({"block_count": 2}, (), {}, UnsupportedError, "no use here for blk.2."),
    "more drafts than layers": ({"nextn_predict_layers": 3}, (), {}, FormatError, "0 layers"),
    "an epsilon beyond float32": (
        {"attention.layer_norm_rms_epsilon": 1e30}, (), {}, FormatError, "norm epsilon 1e.30, expected",
    ),
    "a rope base beyond all bounds": ({"rope.freq_base": 1e30}, (), {}, FormatError, "rope base 1e.30, expected"),
    "a YaRN factor that shrinks": ({"rope.scaling.factor": 1e-9}, (), {}, FormatError, "YaRN factor 1e-09, expected"),
    "an absurd YaRN border": (
        {"rope.scaling.yarn_beta_fast": 1e30}, (), {}, FormatError, "YaRN beta_fast 1e.30, expected",
    ),
    "an attention scale beyond float32": (
        {"rope.scaling.yarn_log_multiplier": 1e30}, (), {}, FormatError, "attention scale .*, expected",
    ),
    "expert weights without a bound": (
        {"expert_weights_scale": 1e30}, (), {}, FormatError, "scale of expert weights 1e.30, expected",
    ),
    "a selection bias in one layer": ({}, (), {"blk.1.exp_probs_b.bias": (8,)}, FormatError, "layer 2 has none"),
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


def test_draft_layers_and_a_second_generation_of_matrices_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    extra = {"blk.3.nextn.eh_proj.weight": (64, 128), "blk.3.attn_norm.weight": (64,)}
    extra |= {f"blk.{layer}.attn_kv_b.weight": (128, 32) for layer in range(3)}
    keys = {"block_count": 4, "nextn_predict_layers": 1}
    write_tiny_gguf(path, tiny_config(), seed=0, keys=keys, extra=extra)
    architecture = registry.find(open_model(path))
    assert architecture.config.num_layers == 3
    assert not [info.name for info in architecture.resident_tensors() if "nextn" in info.name or "kv_b." in info.name]


def test_another_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "qwen9moe")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="'qwen9moe' has no file in expertide/models; known: deepseek2"):
        registry.find(open_model(path))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scoring_func": "tanh"}, "scoring_func 'tanh'"),
        ({"topk_method": "noaux_tc"}, "scoring_func 'softmax' with topk_method 'noaux_tc'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope scaling type 'longrope'"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"rms_norm_eps": -1.0}, "norm epsilon -1, expected"),
        ({"routed_scaling_factor": 1e300}, "scale of expert weights 1e.300, expected"),
    ],
)
def test_unknown_values_of_config_json_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises((FormatError, UnsupportedError), match=words):
        DeepseekV2Config.from_hf(hf_config_dict(tiny_config()) | fields)


def test_values_that_are_not_finite_stop_the_step_and_name_the_layer(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, tiny_config(router=V3_ROUTER), seed=0)
    files = open_model(path)
    poisoned = files.tensors["blk.1.ffn_down_shexp.weight"]
    with path.open("r+b") as file:
        file.seek(poisoned.offset)
        file.write(np.float32(np.inf).tobytes())
    _, model = memory_model.load(path, select("reference", num_threads=1), kv_dtype="float32")
    cache = model.new_cache(8)
    with pytest.raises(NumericsError, match="layer 1 gave values that are not finite"):
        model.forward(torch.tensor([1, 2, 3]), cache, "prefill")
    assert cache.length == 0


def test_impossible_steps_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, tiny_config(), seed=0)
    _, model = memory_model.load(path, select("reference", num_threads=1), kv_dtype="float32")
    cache = model.new_cache(4)
    with pytest.raises(RequestError, match="5 tokens do not fit into a context of 4"):
        model.forward(torch.tensor([1] * 5), cache, "prefill")
    with pytest.raises(RequestError, match="token id 160 is outside the vocabulary of 160"):
        model.forward(torch.tensor([0, 160]), cache, "prefill")
    with pytest.raises(RequestError, match="at least one token"):
        model.forward(torch.tensor([], dtype=torch.int64), cache, "prefill")
    model.forward(torch.tensor([1, 2, 3, 4]), cache, "prefill")
    assert cache.length == 4


def test_finding_a_model_does_not_import_torch(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, replace(tiny_config(), norm_eps=1e-5), seed=0)
    code = (
        "import sys; from expertide.formats import open_model; from expertide.models import registry; "
        "found = registry.find(open_model(sys.argv[1])); found.resident_tensors(); found.expert_catalog(); "
        "found.workspace_bytes(512); found.describe(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
