"""Every layout of `deepseek2` files, on tiny random weights, against transformers in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memory_model
from comparisons import assert_logits_within, chunked_logits, hf_logits
from expertide.formats import open_model
from expertide.kernels import select
from expertide.kernels.rope import RopeSpec, YarnSpec
from expertide.kernels.router import RouterSpec
from expertide.models.deepseek_v2 import DeepseekV2Config, tiny_config
from expertide.models.deepseek_v2_config import attention_scale
from hf_reference import decode_gguf, hf_config_dict, hf_model, write_tiny_gguf

# Two float32 computations in different orders on logits of size about 3: rounding gives some 1e-5 here. A wrong rule
# (scale, rope pairing, router weights) gives 1e-2 and more, which `test_the_tolerance_would_notice…` shows.
TOLERANCE = 2e-4

YARN_V3 = YarnSpec(factor=40.0, original_context=64, beta_fast=32.0, beta_slow=1.0)
YARN_STEP = YarnSpec(factor=8.0, original_context=256, beta_fast=1.0, beta_slow=1.0)  # as Kimi-K2's config

LAYOUTS: dict[str, tuple[DeepseekV2Config, dict[str, Any]]] = {
    "plain queries, split": (tiny_config(), {}),
    "plain queries, joint": (tiny_config(), {"joint": True}),
    "query rank, split": (tiny_config(query_rank=24), {}),
    "query rank, joint": (tiny_config(query_rank=24), {"joint": True}),
    "three leading dense layers": (tiny_config(num_layers=5, moe_layers=(3, 4)), {}),
    "no leading dense layer": (tiny_config(moe_layers=(0, 1, 2), dense_inner=0), {}),
    "a MoE layer after every dense one": (tiny_config(num_layers=6, moe_layers=(2, 4)), {}),
    "dense only": (tiny_config(router=None, moe_layers=(), moe_inner=0, num_shared_experts=0), {}),
    "no shared experts": (tiny_config(num_shared_experts=0), {}),
    "gate and up stacked": (tiny_config(), {"gate_up": True}),
    "no output matrix": (tiny_config(), {"tied": True}),
    "no rope scaling": (
        tiny_config(rope=RopeSpec(8, 10000.0), attention_scale=attention_scale(24, None, mscale_all_dim=0)),
        {},
    ),
    "YaRN with mscale 1": (
        tiny_config(
            rope=RopeSpec(8, 10000.0, YARN_V3), attention_scale=attention_scale(24, YARN_V3, mscale_all_dim=1.0)
        ),
        {},
    ),
    "YaRN as a step": (
        tiny_config(
            rope=RopeSpec(8, 50000.0, YARN_STEP), attention_scale=attention_scale(24, YARN_STEP, mscale_all_dim=1.0)
        ),
        {},
    ),
    "scaled weights": (tiny_config(router=RouterSpec(8, 3, scale=16.0)), {}),
    "one expert per token": (tiny_config(router=RouterSpec(8, 1)), {}),
    "every expert per token": (tiny_config(router=RouterSpec(8, 8)), {}),
    "group-limited": (tiny_config(router=RouterSpec(16, 3, num_groups=4, top_groups=2, scale=2.0)), {}),
    "value dims unlike nope dims": (tiny_config(value_dim=24, nope_dim=20, attention_scale=0.3), {}),
    "sigmoid with bias": (
        tiny_config(router=RouterSpec(8, 3, score="sigmoid", has_bias=True, group_score="top2_sum", renormalize=True)),
        {},
    ),
    "V3: sigmoid, bias, groups, query rank": (
        tiny_config(
            query_rank=24,
            num_shared_experts=1,
            router=RouterSpec(
                16,
                4,
                score="sigmoid",
                has_bias=True,
                num_groups=4,
                top_groups=2,
                group_score="top2_sum",
                renormalize=True,
                scale=2.5,
            ),
        ),
        {},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_transformers(layout: str, tmp_path: Path) -> None:
    config, options = LAYOUTS[layout]
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, config, seed=len(layout), **options)
    _, model = memory_model.load(path, select("reference", num_threads=1), kv_dtype="float32")
    reference = hf_model(config, decode_gguf(path))
    ids = torch.randint(0, config.vocab_size, (130,), generator=torch.Generator().manual_seed(1))
    expected = hf_logits(reference, ids)

    whole = chunked_logits(model, ids, chunk=130)
    _assert_close(whole, expected)
    # In pieces: positions, masks and cache rows of later chunks, and single tokens.
    _assert_close(chunked_logits(model, ids, chunk=37), expected)
    _assert_close(chunked_logits(model, ids[:24], chunk=1), expected[:24])
    assert expected.std() > 0.2, "logits too flat for the tolerance to mean anything"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_config_read_from_a_file_is_the_one_written(layout: str, tmp_path: Path) -> None:
    config, options = LAYOUTS[layout]
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, config, seed=0, **options)
    read = DeepseekV2Config.from_gguf(open_model(path))
    from_json = DeepseekV2Config.from_hf(hf_config_dict(config))
    for found in (read, from_json):
        # Floats go through float32 in the file, and through a square root and back in the test's writer.
        assert found.attention_scale == pytest.approx(config.attention_scale, rel=1e-5)
        assert found.norm_eps == pytest.approx(config.norm_eps, rel=1e-6)
        if config.router and found.router:
            assert found.router.scale == pytest.approx(config.router.scale, rel=1e-6)
            found = replace(found, router=replace(found.router, scale=config.router.scale))
        assert replace(found, attention_scale=config.attention_scale, norm_eps=config.norm_eps) == _as_read(
            config, found
        )


def test_the_tolerance_would_notice_a_wrong_attention_scale(tmp_path: Path) -> None:
    config = tiny_config()
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, config, seed=3)
    ids = torch.randint(0, config.vocab_size, (40,), generator=torch.Generator().manual_seed(1))
    right = hf_logits(hf_model(config, decode_gguf(path)), ids)
    wrong = hf_logits(hf_model(replace(config, attention_scale=config.attention_scale * 1.02), decode_gguf(path)), ids)
    assert (right - wrong).abs().max() > 10 * TOLERANCE


def test_a_float16_cache_stays_near_the_float32_one(tmp_path: Path) -> None:
    config = tiny_config()
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, config, seed=4, joint=True)
    ids = torch.randint(0, config.vocab_size, (100,), generator=torch.Generator().manual_seed(1))
    kernels = select("reference", num_threads=1)
    exact, half = (
        chunked_logits(memory_model.load(path, kernels, kv_dtype=dtype)[1], ids, chunk=100)
        for dtype in ("float32", "float16")
    )
    # float16 keeps 11 bits: relative 5e-4 on every cached value, on logits of size 1.5; the mean, because a router at a
    # near-tie may turn one token's expert.
    assert 0 < (exact - half).abs().mean() < 5e-3


def _as_read(config: DeepseekV2Config, found: DeepseekV2Config) -> DeepseekV2Config:
    """The rule a group is rated by only means something where there are groups."""
    if config.router is None or found.router is None or config.router.num_groups > 1:
        return config
    return replace(config, router=replace(config.router, group_score=found.router.group_score))


def _assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert_logits_within(found, expected, TOLERANCE)
