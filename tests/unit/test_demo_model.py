"""The demo model's generator still makes what the shipped files were made from."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def corpus() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("demo_model_corpus", ROOT / "demo_model" / "corpus.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def test_the_generator_writes_exactly_the_quality_suite_that_the_tests_use(corpus: ModuleType) -> None:
    recorded = json.loads((ROOT / "tests" / "data" / "quality_suite.json").read_text(encoding="utf-8"))
    assert corpus.build_suite(corpus.SUITE_BUCKET) == recorded


def test_no_held_out_question_is_in_the_training_text(corpus: ModuleType) -> None:
    recorded = json.loads((ROOT / "tests" / "data" / "quality_suite.json").read_text(encoding="utf-8"))
    # Closed facts (a capital has one answer) are in training by nature; what is worked out must not be.
    held_out = {item["question"] for kind in ("word_problems", "chains") for item in recorded[kind]}
    trained = {turn[0] for document in corpus.documents(1000, 5000) for turn in document}
    assert held_out and not held_out & trained
