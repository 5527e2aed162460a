"""The demo model against transformers' DeepseekV2ForCausalLM in float32 with the same decoded weights.

20 prompts of 5 to 300 tokens, reference kernels, both layouts of the up-projection: logits within 2e-3, and 64 greedy
tokens each the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memory_model
import native_samples as samples
from expertide.formats import open_model
from expertide.kernels import select
from expertide.models.architecture import Model
from expertide.models.deepseek_v2 import DeepseekV2Config
from expertide.text.tokenizer import Tokenizer
from hf_reference import decode_gguf, hf_model, write_joint_copy

NUM_PROMPTS, SHORTEST, LONGEST, NUM_NEW = 20, 5, 300, 64
TOLERANCE = 2e-3  # issue 2; measured here: 4e-5 on logits of standard deviation 4

SUITE = Path(__file__).parent.parent / "data" / "quality_suite.json"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for torch's threads: over 580 s with two, 112 s with one, on two busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def demo_path() -> Iterator[Path]:
    with resources.as_file(resources.files("expertide.data") / "demo-q4_k_m.gguf") as path:
        yield path


@pytest.fixture(scope="module")
def split_model(demo_path: Path) -> Model:
    return memory_model.load(demo_path, select("reference", num_threads=1), kv_dtype="float32")[1]


@pytest.fixture(scope="module")
def joint_model(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("joint") / "demo-joint.gguf"
    write_joint_copy(demo_path, path)
    architecture, model = memory_model.load(path, select("reference", num_threads=1), kv_dtype="float32")
    assert any(info.name.endswith("attn_kv_b.weight") for info in architecture.resident_tensors()), "not the joint layout"
    return model


@pytest.fixture(scope="module")
def reference(demo_path: Path) -> Any:
    """transformers' model with the decoded weights."""
    config = DeepseekV2Config.from_gguf(open_model(demo_path))
    return hf_model(config, decode_gguf(demo_path))


@dataclass(frozen=True)
class Answer:
    """A prompt, our 64 greedy tokens with reference kernels, and transformers' logits for all of them."""

    prompt: torch.Tensor
    continuation: list[int]
    logits: torch.Tensor

    @property
    def ids(self) -> torch.Tensor:
        return torch.cat([self.prompt, torch.tensor(self.continuation)])

    @property
    def choices(self) -> torch.Tensor:
        """What transformers chooses after the prompt, and after each answer token but the last."""
        return self.logits[len(self.prompt) - 1 : -1].argmax(dim=-1)


@pytest.fixture(scope="module")
def answers(demo_path: Path, split_model: Model, reference: Any) -> list[Answer]:
    found = []
    for prompt in _prompts(demo_path):
        continuation = _greedy(split_model, prompt)
        with torch.no_grad():
            logits = reference(torch.cat([prompt, torch.tensor(continuation)])[None]).logits[0]
        found.append(Answer(prompt, continuation, logits))
    return found


@pytest.mark.timeout(900)  # 1,280 decode steps on kernels that decode every weight at every step
def test_greedy_tokens_are_those_of_transformers(answers: list[Answer]) -> None:
    # Our own tokens, step by step. transformers reads prompt and answer at once: if each answer token is its first
    # choice after the tokens before it, its own greedy answer is the same, and took a twentieth of the time.
    for answer in answers:
        assert answer.choices.tolist() == answer.continuation, f"prompt of {len(answer.prompt)} tokens"


def test_logits_are_those_of_transformers_in_both_layouts(
    split_model: Model, joint_model: Model, answers: list[Answer]
) -> None:
    for answer in answers:
        for layout, model in (("split", split_model), ("joint", joint_model)):
            where = f"{layout}, prompt of {len(answer.prompt)} tokens"
            found = _logits(model, answer.ids)
            gap = float((found - answer.logits).abs().max())
            assert gap <= TOLERANCE, f"{where}: largest difference {gap:.2e}"
            assert found[len(answer.prompt) - 1 : -1].argmax(dim=-1).tolist() == answer.continuation, where


# The promise is the first line: the default. The second is a count of near-ties, each of which must be one; all but
# half of the answers have none (docs/experiments.md).
@pytest.mark.parametrize(("bits", "max_different"), [(16, 1), (8, 10)])
def test_native_kernels_choose_the_same_tokens_but_at_near_ties(
    demo_path: Path, answers: list[Answer], bits: int, max_different: int
) -> None:
    """With int8 activations some of these 20 answers leave the reference's within 64 tokens, with 16 bits none."""
    num_different = 0
    with samples.activation_bits(bits):
        kernels = select("native", num_threads=1)
        model = memory_model.load(demo_path, kernels, kv_dtype="float16")[1]
        for answer in answers:
            found = _greedy(model, answer.prompt)
            if found == answer.continuation:
                continue
            num_different += 1
            step = next(i for i in range(NUM_NEW) if found[i] != answer.continuation[i])
            logits = answer.logits[len(answer.prompt) - 1 + step]
            margin = float(logits[answer.continuation[step]] - logits[found[step]])
            print(f"{bits} bits, prompt of {len(answer.prompt)} tokens, answer token {step}: margin {margin:.3f}")
            # int8 activations move these logits (standard deviation 4) by 0.06 (root of the mean square), so a gap
            # between two of them by 0.09: five times that.
            assert margin < 0.45, "not a near-tie"
        kernels.close()
    assert num_different <= max_different


def test_mean_negative_log_likelihood_of_the_suite_texts_agrees(
    demo_path: Path, split_model: Model, reference: Any
) -> None:
    tokenizer = Tokenizer.from_metadata(open_model(demo_path).metadata)
    for item in json.loads(SUITE.read_text(encoding="utf-8"))["perplexity"]:
        ids = torch.tensor(tokenizer.encode(item["text"], add_bos=True))
        with torch.no_grad():
            expected = _mean_nll(reference(ids[None]).logits[0], ids)
        # The issue allows 1 %; logits that agree to 2e-3 give far less.
        assert _mean_nll(_logits(split_model, ids), ids) == pytest.approx(expected, rel=1e-3)


def _prompts(demo_path: Path) -> list[torch.Tensor]:
    """Prompts of the quality suite, strung together and cut to lengths from 5 to 300; each starts with BOS."""
    tokenizer = Tokenizer.from_metadata(open_model(demo_path).metadata)
    suite = json.loads(SUITE.read_text(encoding="utf-8"))
    texts = [item["prompt"] for part in ("short", "word_problems", "chains", "multiple_choice") for item in suite[part]]
    texts += [item["text"] for item in suite["perplexity"]]
    prompts = []
    for number, length in enumerate(np.linspace(SHORTEST, LONGEST, NUM_PROMPTS).astype(int).tolist()):
        ids: list[int] = []
        following = number
        while len(ids) < length:
            ids += tokenizer.encode(texts[following % len(texts)] + "\n\n", add_bos=not ids)
            following += 1
        prompts.append(torch.tensor(ids[:length]))
    assert [len(prompts[0]), len(prompts[-1])] == [SHORTEST, LONGEST]
    return prompts


def _greedy(model: Model, prompt: torch.Tensor) -> list[int]:
    cache = model.new_cache(len(prompt) + NUM_NEW)
    hidden = model.forward(prompt, cache, "prefill")
    tokens = [int(model.logits(hidden[-1:]).argmax())]
    while len(tokens) < NUM_NEW:
        hidden = model.forward(torch.tensor(tokens[-1:]), cache, "decode")
        tokens.append(int(model.logits(hidden).argmax()))
    return tokens


def _logits(model: Model, ids: torch.Tensor) -> torch.Tensor:
    return model.logits(model.forward(ids, model.new_cache(len(ids)), "prefill"))


def _mean_nll(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], ids[1:]))
