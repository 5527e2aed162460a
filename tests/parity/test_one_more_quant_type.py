"""docs/adding-a-quant.md is true: one class and its line make a type load and run, also in routed experts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from expertide import LLM, SamplingParams
from expertide.formats import open_model, quants
from expertide.formats.quants.opaque import GGML_OPAQUE
from expertide.formats.quants.q8_0 import Q8_0

Q8_0_FILE = Path(__file__).parent.parent / "data" / "demo-q8_0.gguf"


class Toy(Q8_0):
    """Blocks of Q8_0 under a number that is listed as opaque and has no native kernel."""

    name = "TOY"
    ggml_id = 9


def write_toy_copy(target: Path) -> None:
    """The Q8_0 demo with every Q8_0 tensor marked as TOY in the directory; the blocks stay as they are."""
    content = bytearray(Q8_0_FILE.read_bytes())
    for name, info in open_model(Q8_0_FILE).tensors.items():
        if info.quant.ggml_id == Q8_0.ggml_id:
            key = len(name).to_bytes(8, "little") + name.encode()
            at = content.index(key) + len(key) + 4 + 8 * len(info.shape)
            assert content[at] == Q8_0.ggml_id
            content[at] = Toy.ggml_id
    target.write_bytes(content)


def test_a_type_without_native_kernels_loads_and_runs_on_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "toy.gguf"
    write_toy_copy(path)
    assert Toy.ggml_id in GGML_OPAQUE, "else this would not show that a decoder wins over that list"
    monkeypatch.setattr(quants, "QUANT_TYPES", {**quants.QUANT_TYPES, Toy.ggml_id: Toy()})
    question, right = "User: 5-2=?\n\nAssistant:", " 3"
    with LLM(Q8_0_FILE, context=64) as llm:
        assert not [warning for warning in llm.warnings if "kernel" in warning]
        expected = llm.loglikelihood(question, right)
    # Too small for all experts: they come and go on the reference path too.
    with LLM(path, context=64, expert_cache="8MiB") as llm:
        assert [warning for warning in llm.warnings if "kernel" in warning] == [
            "no native kernel for TOY: such tensors run on the reference kernels"
        ]
        # Both multiply float32 by exactly decoded weights, in another order: 1e-3 is a hundred times what that moves.
        assert math.isclose(llm.loglikelihood(question, right), expected, abs_tol=1e-3)
        output = llm.generate(question, SamplingParams(max_tokens=8))
        assert "3" in output.text
        assert output.stats["experts"]["decode"]["requests"] > 0
