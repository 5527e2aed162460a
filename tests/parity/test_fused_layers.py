"""A layer as two fused halves and the same layer op by op: the same bits, for every layout of files that we know.

`deepseek2` (latent attention) and `qwen3moe`, `qwen2moe`, `olmoe` (grouped-query attention).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_deepseek_v2_layouts import LAYOUTS
from test_grouped_families import LAYOUTS as GROUPED_LAYOUTS

import hf_grouped
import memory_model
from expertide.errors import NumericsError
from expertide.kernels import select
from hf_reference import write_tiny_gguf

# Weights are F32; attention in integers is off by 3e-4 of its largest value (test_attention_kernels.py,
# test_grouped_attention.py).
INTEGER_ATTENTION = 0.005
# A router at a near-tie may turn an expert of one token, and that token's state reaches the later ones.
TURNED_TOKENS = 0.25
NUM_TOKENS = 140  # three key tiles


def _logits(model: Any, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    cache = model.new_cache(len(ids))
    parts = [model.forward(ids[i : i + chunk], cache, "prefill") for i in range(0, len(ids), chunk)]
    return model.logits(torch.cat(parts))


@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_layers_give_the_bits_of_their_ops(native, layout: str, kv_dtype: str, tmp_path: Path) -> None:
    config, options = LAYOUTS[layout]
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, config, seed=len(layout), **options)
    _compare(path, config, native, kv_dtype, chunks=(37, 1))


@pytest.mark.parametrize("layout", GROUPED_LAYOUTS)
def test_fused_layers_of_grouped_families_give_the_bits_of_their_ops(native, layout: str, tmp_path: Path) -> None:
    config, options = GROUPED_LAYOUTS[layout]
    path = tmp_path / "tiny.gguf"
    hf_grouped.write_tiny_gguf(path, config, seed=len(layout), **options)
    # Single tokens: tests/parity/test_grouped_families.py.
    _compare(path, config, native, "float16" if len(layout) % 2 else "float32", chunks=(37,))


def _compare(path: Path, config: Any, native: Any, kv_dtype: str, *, chunks: tuple[int, ...]) -> None:
    _, model = memory_model.load(path, native, kv_dtype=kv_dtype)
    assert all(model._fused), "every layer of this model has fused ops"
    ids = torch.randint(0, config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    whole = _logits(model, ids, NUM_TOKENS)
    for chunk in chunks:
        assert torch.equal(_logits(model, ids, chunk), whole), f"chunks of {chunk}"
    model._fused = [None] * config.num_layers
    assert torch.equal(_logits(model, ids, NUM_TOKENS), whole)
    assert torch.equal(_logits(model, ids, 37), whole)

    _, reference = memory_model.load(path, select("reference", num_threads=1), kv_dtype=kv_dtype)
    expected = _logits(reference, ids, NUM_TOKENS)
    differences = (whole - expected).abs().amax(dim=1) / expected.abs().max()
    assert differences.quantile(1 - TURNED_TOKENS) <= INTEGER_ATTENTION, differences
    assert differences.median() <= INTEGER_ATTENTION / 2


def test_a_value_that_is_not_finite_names_its_layer_also_in_fused_layers(native, tmp_path: Path) -> None:
    config, options = LAYOUTS["plain queries, split"]
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, config, seed=1, **options)
    _, model = memory_model.load(path, native, kv_dtype="float16")
    half = model._fused[1]._ffn
    model._fused[1]._ffn = _Spoiled(half)
    cache = model.new_cache(8)
    with pytest.raises(NumericsError, match="layer 1 gave values that are not finite"):
        model.forward(torch.tensor([3, 4]), cache, "prefill")
    assert cache.length == 0


class _Spoiled:
    def __init__(self, half: Any) -> None:
        self._half = half

    def add_to(self, x_TH: torch.Tensor, step: Any) -> bool:
        x_TH[-1, 5] = float("inf")
        return self._half.add_to(x_TH, step)
