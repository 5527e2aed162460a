"""`qwen3moe`, `qwen2moe` and `olmoe` files on tiny random weights: against transformers in float32, and streamed
against resident."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memory_model
from comparisons import assert_logits_within, chunked_logits, hf_logits, recorded_logits
from expertide import LLM, SamplingParams, _native
from expertide.formats import open_model
from expertide.kernels import select
from expertide.kernels.rope import RopeSpec, YarnSpec, yarn_magnitude
from expertide.kernels.router import RouterSpec
from expertide.memory.placement import expert_window_bytes
from expertide.models import olmoe, qwen2_moe, qwen3_moe
from expertide.models.grouped_config import Family, GroupedConfig, read_gguf, read_hf
from expertide.models.qwen3_moe import tiny_config
from expertide.options import Options
from expertide.prepare import prepare
from expertide.settings import Settings
from expertide.text.tokenizer import Tokenizer
from hf_grouped import hf_config_dict, hf_model, write_tiny_gguf
from hf_reference import decode_gguf

# Two float32 computations in different orders on logits of size about 2: rounding gives some 1e-5 here. A wrong rule
# (rope pairing, norm after rope, router weights) gives 1e-2 and more, which `test_the_tolerance_would_notice…` shows.
TOLERANCE = 2e-4

YARN = YarnSpec(factor=4.0, original_context=64)

FAMILIES = {"qwen3moe": qwen3_moe, "qwen2moe": qwen2_moe, "olmoe": olmoe}
SHARED = {"shared_inner": 64}

LAYOUTS: dict[str, tuple[GroupedConfig, dict[str, Any]]] = {
    "as released": (tiny_config(), {}),
    "tied": (tiny_config(), {"tied": True}),
    "weights not renormalised": (tiny_config(router=RouterSpec(8, 3)), {}),
    "every second layer dense": (tiny_config(num_layers=4, moe_layers=(1, 3), dense_inner=48), {}),
    "dense first and last": (tiny_config(num_layers=4, moe_layers=(1, 2), dense_inner=40), {"tied": True}),
    "heads of 20, wider than the stream": (
        tiny_config(num_heads=6, num_kv_heads=2, head_dim=20, rope=RopeSpec(20, 1e6, pairs="halves")),
        {},
    ),
    "heads of 6": (tiny_config(num_heads=5, num_kv_heads=5, head_dim=6, rope=RopeSpec(6, 1e4, pairs="halves")), {}),
    "one key/value head": (tiny_config(num_kv_heads=1), {}),
    "one expert per token": (tiny_config(router=RouterSpec(8, 1, renormalize=True)), {}),
    "every expert per token": (tiny_config(router=RouterSpec(5, 5, renormalize=True)), {}),
    "odd inner size": (tiny_config(moe_inner=19), {}),
    "gate and up stacked": (tiny_config(), {"gate_up": True}),
    "YaRN": (tiny_config(rope=RopeSpec(16, 1e6, YARN, yarn_magnitude(4.0, 1.0), "halves")), {}),
    "large epsilon": (tiny_config(norm_eps=1e-2), {}),
    "Qwen2: as released": (qwen2_moe.tiny_config(), {"family": qwen2_moe.FAMILY}),
    "Qwen2: a dense layer, tied": (
        qwen2_moe.tiny_config(moe_layers=(0, 2), dense_inner=48),
        {"family": qwen2_moe.FAMILY, "tied": True},
    ),
    "Qwen2: weights renormalised": (
        qwen2_moe.tiny_config(router=RouterSpec(8, 3, renormalize=True)),
        {"family": qwen2_moe.FAMILY},
    ),
    "OLMoE: as released": (olmoe.tiny_config(), {"family": olmoe.FAMILY}),
    "OLMoE: fewer key/value heads": (olmoe.tiny_config(num_kv_heads=2), {"family": olmoe.FAMILY}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_transformers(layout: str, tmp_path: Path) -> None:
    config, options = LAYOUTS[layout]
    family: Family = options.get("family", qwen3_moe.FAMILY)
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, config, seed=len(layout), **options)
    _, model = memory_model.load(path, select("reference", num_threads=1), kv_dtype="float32")
    ids = torch.randint(0, config.vocab_size, (130,), generator=torch.Generator().manual_seed(1))
    expected = hf_logits(hf_model(config, decode_gguf(path), family), ids)

    _assert_close(chunked_logits(model, ids, chunk=130), expected)
    # In pieces: positions, masks and cache rows of later chunks, and single tokens.
    _assert_close(chunked_logits(model, ids, chunk=7), expected)
    _assert_close(chunked_logits(model, ids[:40], chunk=1), expected[:40])
    assert expected.std() > 0.2, "logits too flat for the tolerance to mean anything"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_config_read_from_a_file_is_the_one_written(layout: str, tmp_path: Path) -> None:
    config, options = LAYOUTS[layout]
    family: Family = options.get("family", qwen3_moe.FAMILY)
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, config, seed=0, **options)
    for found in (read_gguf(open_model(path), family), read_hf(hf_config_dict(config, family), family)):
        assert found.norm_eps == pytest.approx(config.norm_eps, rel=1e-6)  # float32 in the file
        assert replace(found, norm_eps=config.norm_eps) == config


@pytest.mark.parametrize(
    "wrong",
    [
        {"rope": RopeSpec(16, 1.1e6, pairs="halves")},
        {"router": RouterSpec(8, 3)},
        {"norm_eps": 1e-2},
    ],
)
def test_the_tolerance_would_notice_a_wrong_rule(wrong: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config()
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, config, seed=3)
    ids = torch.randint(0, config.vocab_size, (40,), generator=torch.Generator().manual_seed(1))
    right = hf_logits(hf_model(config, decode_gguf(path)), ids)
    other = hf_logits(hf_model(replace(config, **wrong), decode_gguf(path)), ids)
    assert (right - other).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("bits", "allowed"),
    [
        # Activations rounded to 16 bits: what is left is attention's integers, 4e-4 of its results.
        (16, 1e-3),
        # Rounded to 8 bits: 4e-3 of each value, on logits of size 2, growing over layers and 60 tokens. The median,
        # because a router of random weights stands at near-ties everywhere and turns whole tokens.
        (8, 5e-2),
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_native_kernels_agree_with_transformers(tmp_path: Path, name: str, bits: int, allowed: float) -> None:
    family = FAMILIES[name]
    config = family.tiny_config(moe_inner=64)
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, config, seed=5, family=family.FAMILY, quants={"_exps": "Q8_0", "attn_q.": "Q5_0"})
    kernels = select("native", num_threads=2)
    _native.set_activation_bits(bits)
    try:
        _, model = memory_model.load(path, kernels, kv_dtype="float32")
        ids = torch.randint(0, config.vocab_size, (60,), generator=torch.Generator().manual_seed(1))
        found = chunked_logits(model, ids, chunk=60)
    finally:
        _native.set_activation_bits(16)
        kernels.close()
    expected = hf_logits(hf_model(config, decode_gguf(path), family.FAMILY), ids)
    difference = (found - expected).abs()
    assert difference.median() < allowed, f"median {difference.median():.2e}, largest {difference.max():.2e}"


# Types with blocks of 32 in every role; what is left is float32.
PACKED = {"_exps": "Q8_0", "attn_q.": "Q5_0", "attn_k.": "Q4_0", "attn_output": "Q8_0", "ffn_up_shexp": "Q8_0"}


@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_native_logits_have_the_same_bits_for_any_chunks_threads_and_instruction_set(
    name: str, kv_dtype: str, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    config = family.tiny_config(moe_inner=64, **(SHARED if family is qwen2_moe else {}))
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, config, seed=6, family=family.FAMILY, quants=PACKED)
    ids = torch.randint(0, config.vocab_size, (150,), generator=torch.Generator().manual_seed(1))
    expected = None
    for isa, threads, chunk in [
        ("auto", 2, 512),
        ("auto", 2, 64),
        ("auto", 1, 7),
        ("auto", 2, 1),
        ("avx2", 1, 64),
        ("avx2", 2, 7),
        ("base", 2, 64),
        ("base", 1, 512),
    ]:
        if isa not in ("auto", *_native.available_isas()):
            continue
        kernels = select("native", num_threads=threads)
        _native.set_isa(isa)
        try:
            _, model = memory_model.load(path, kernels, kv_dtype=kv_dtype)
            assert all(model._fused), "every layer of this model has fused ops"
            found = chunked_logits(model, ids, chunk=chunk)
        finally:
            _native.set_isa("auto")
            kernels.close()
        expected = found if expected is None else expected
        assert torch.equal(found, expected), f"{isa}, {threads} threads, chunks of {chunk}"


def test_a_float16_cache_stays_near_the_float32_one(tmp_path: Path) -> None:
    config = tiny_config()
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, config, seed=4)
    ids = torch.randint(0, config.vocab_size, (100,), generator=torch.Generator().manual_seed(1))
    kernels = select("reference", num_threads=1)
    exact, half = (
        chunked_logits(memory_model.load(path, kernels, kv_dtype=dtype)[1], ids, chunk=100)
        for dtype in ("float32", "float16")
    )
    # float16 keeps 11 bits: relative 5e-4 on every cached value, on logits of size 1.5; the mean, because a router at a
    # near-tie may turn one token's expert.
    assert 0 < (exact - half).abs().mean() < 5e-3


# Long enough for several chunks, with text that the merges cut and special tokens.
PROMPT = "<|im_start|>user\nThe thin hen ran in the rain on an inn.  12 + 30 = ?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def streamed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of three types, wide enough for a page each; a tokenizer without `tokenizer.ggml.pre`."""
    path = tmp_path_factory.mktemp("qwen3moe") / "tiny.gguf"
    config = tiny_config(
        hidden_size=128,
        vocab_size=320,
        num_layers=4,
        moe_layers=(1, 2, 3),
        dense_inner=96,
        moe_inner=64,
        router=RouterSpec(16, 4, renormalize=True),
    )
    quants = {"gate_exps": "Q8_0", "2.ffn_up_exps": "Q4_0", "down_exps": "Q5_0", "attn_v.": "Q8_0"}
    write_tiny_gguf(path, config, seed=8, quants=quants, tokenizer=True)
    return path


@pytest.fixture(scope="module")
def resident(streamed_file: Path) -> dict[str, tuple[list[int], list[bytes], dict[str, Any]]]:
    """What each implementation says with every expert in memory."""
    return {
        kernels: _answer(streamed_file, settings=Settings(kernels=kernels), prefill_chunk=16)
        for kernels in ("native", "reference")
    }


@pytest.mark.parametrize(
    ("kernels", "policy"),
    [("native", "lfu"), ("native", "lru"), ("native", "random"), ("native", "second-miss"), ("reference", "lfu")],
)
def test_streamed_is_resident_bit_for_bit(streamed_file: Path, resident: Any, kernels: str, policy: str) -> None:
    settings = Settings(kernels=kernels, poison=True)
    prepared = prepare(streamed_file, Options(context=256), settings)
    assert prepared.plan.cached_share == 1.0
    windows = expert_window_bytes(prepared.catalog)
    smallest = (4 + 2) * max(windows.values())
    assert smallest < sum(windows.values()) * 16 / 4
    tokens, logits, stats = _answer(
        streamed_file, settings=settings, prefill_chunk=16, expert_cache=smallest, cache_policy=policy
    )
    assert tokens == resident[kernels][0]
    different = [step for step, (a, b) in enumerate(zip(logits, resident[kernels][1], strict=True)) if a != b]
    assert not different, f"logits differ first at step {different[0]}"
    assert stats["experts"]["decode"]["misses"] > 0
    assert stats["experts"]["prefill"]["evictions"] > 0


@pytest.mark.parametrize("name", ["qwen2moe", "olmoe"])
def test_streamed_is_resident_in_the_other_families(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    own = {"num_kv_heads": 2, **SHARED} if name == "qwen2moe" else {"num_kv_heads": 8}
    config = family.tiny_config(
        hidden_size=128, num_heads=8, vocab_size=320, moe_inner=64, router=RouterSpec(16, 4), **own
    )
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, config, seed=9, family=family.FAMILY, quants=PACKED, tokenizer=True)
    options = {"pre_tokenizer": "qwen2", "prefill_chunk": 16}
    smallest = (4 + 2) * max(expert_window_bytes(prepare(path, Options(pre_tokenizer="qwen2")).catalog).values())
    resident = _answer(path, settings=Settings(), **options)
    streamed = _answer(path, settings=Settings(poison=True), expert_cache=smallest, **options)
    assert streamed[:2] == resident[:2]
    assert streamed[2]["experts"]["decode"]["misses"] > 0


def test_a_file_without_a_pre_tokenizer_gets_the_one_of_qwen(streamed_file: Path) -> None:
    tokenizer = Tokenizer.from_files(open_model(streamed_file))
    assert tokenizer.pre_tokenizer == "qwen2"
    assert any("using 'qwen2'" in warning for warning in tokenizer.warnings)
    ids = tokenizer.encode(PROMPT)
    assert tokenizer.decode(ids) == PROMPT.replace("<|im_start|>", "").replace("<|im_end|>", "")


def _answer(path: Path, **options: Any) -> tuple[list[int], list[bytes], dict[str, Any]]:
    """Token ids, the bytes of every logit row, and the statistics."""
    with LLM(path, context=256, threads=2, **options) as llm:
        with recorded_logits(llm) as rows:
            output = llm.generate(PROMPT, SamplingParams(max_tokens=16, ignore_eos=True))
        llm._runtime.cache.check()
        return output.token_ids, rows, output.stats


def _assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert_logits_within(found, expected, TOLERANCE)
