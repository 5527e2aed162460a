"""The demo model in Q8_0: the same weights nearly without loss, so quantising and kernels can be told apart.

Against Q4_K_M it shows what four bits cost; native against reference, that the kernels of this one type agree.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from expertide import LLM, SamplingParams
from expertide.cli.evaluate import Suite, nll_of, read_suite
from expertide.formats import open_model
from expertide.settings import Settings

DATA = Path(__file__).parent.parent / "data"
Q8_0_FILE = DATA / "demo-q8_0.gguf"


@pytest.fixture(scope="module")
def suite() -> Suite:
    return read_suite(DATA / "quality_suite.json")


def nll_per_text(model: str | Path, suite: Suite, kernels: str = "native") -> list[float]:
    """Nats per token of each of the suite's texts."""
    # Half of the routed experts: they come and go.
    with LLM(model, context=512, expert_cache="12MiB", settings=Settings(kernels=kernels)) as llm:
        return [nll_of(llm, text)["nll"] for _, text in suite.texts]


def test_the_file_is_q8_0() -> None:
    types = {tensor.quant.name for tensor in open_model(Q8_0_FILE).tensors.values()}
    assert types == {"F32", "Q8_0"}


def test_texts_are_as_likely_as_under_q4_k_m_and_as_in_the_reference(suite: Suite) -> None:
    q8_0 = nll_per_text(Q8_0_FILE, suite)
    # Q4_K_M's weights are off by some 3 %, and a text's mean likelihood moves by about 0.001 nats (measured: 0.0014 at
    # most, either way). A wrong scale or a shifted block costs whole nats; 0.02 keeps both far away.
    assert q8_0 == pytest.approx(nll_per_text("demo", suite), abs=0.02)
    # Float32 sums of the same decoded weights in another order, over six layers (measured: 2e-6).
    assert q8_0 == pytest.approx(nll_per_text(Q8_0_FILE, suite, "reference"), abs=1e-4)


def test_questions_of_every_category_are_answered_right(suite: Suite) -> None:
    with LLM(Q8_0_FILE, context=512, expert_cache="12MiB") as llm:
        for category, questions in suite.questions.items():
            for question in questions[:2]:
                output = llm.generate(question.prompt, SamplingParams(max_tokens=question.max_tokens))
                assert question.pattern.search(output.text), f"{category}: {question.prompt!r} → {output.text!r}"
