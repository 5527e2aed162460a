"""`expertide eval MODEL --suite F`: held-out questions scored by regular expressions, and perplexity of texts.

The suite is JSON: any number of lists of questions {"id", "prompt", "regex", "max_tokens"}, and a list "perplexity" of
{"id", "text"}. Prompts are complete: they get the begin-of-sequence token and no chat template; decoding is greedy.
"""

from __future__ import annotations

import json as json_module
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from expertide import __version__
from expertide.cli.flags import JsonFlag, ModelName, with_flags
from expertide.cli.output import JsonTarget, ProgressBars, emit, note, table
from expertide.cli.reports import load_line, settings_facts
from expertide.cli.run import INTERRUPTED
from expertide.engine.sampling import SamplingParams
from expertide.errors import FormatError, RequestError, StorageError
from expertide.llm import LLM
from expertide.options import Options

_MAX_SUITE_BYTES = 64 << 20
_TEXTS = "perplexity"


@dataclass(frozen=True, slots=True)
class Question:
    """One item: right when `pattern` is found in the greedy answer."""

    item_id: str
    prompt: str
    pattern: re.Pattern[str]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Suite:
    """Questions by category, and (id, text) pairs for perplexity."""

    questions: dict[str, list[Question]]
    texts: list[tuple[str, str]]


@with_flags
def command(
    model: ModelName,
    options: Options,
    suite: Annotated[Path, typer.Option("--suite", metavar="FILE", help="The questions and texts, as JSON.")],
    json: JsonFlag = None,
) -> None:
    """Score a suite of questions, and measure the perplexity of its texts."""
    target = JsonTarget(json)
    loaded = read_suite(suite)
    with ProgressBars() as progress, LLM.from_options(model, options, progress) as llm:
        for warning in llm.warnings:
            note(f"note: {warning}")
        note(load_line(llm))
        with llm.interrupt:
            llm.interrupt.clear()
            facts = {
                "version": __version__,
                "model": llm.prepared.name,
                "suite": str(suite),
                "settings": settings_facts(llm),
                "placement": llm.placement(),
                **evaluate(llm, loaded, progress),
                "memory": llm.memory(),
            }
    if target:
        target.write(facts)
    if not target.is_stdout:
        emit(table(_rows(facts)) + "\n")


def evaluate(llm: LLM, suite: Suite, progress: ProgressBars) -> dict[str, Any]:
    """{"scores": per category, "total": …, "perplexity": …}."""
    total = sum(len(questions) for questions in suite.questions.values()) + len(suite.texts)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress("evaluating", done, total)
        if llm.interrupt.hit:
            raise typer.Exit(INTERRUPTED)

    scores: dict[str, Any] = {}
    for category, questions in suite.questions.items():
        items = []
        for question in questions:
            output = llm.generate(question.prompt, SamplingParams(max_tokens=question.max_tokens))
            is_right = question.pattern.search(output.text) is not None
            items.append({"id": question.item_id, "right": is_right, "text": output.text})
            step()
        scores[category] = {"right": sum(item["right"] for item in items), "of": len(items), "items": items}
    facts: dict[str, Any] = {
        "scores": scores,
        "total": {
            "right": sum(score["right"] for score in scores.values()),
            "of": sum(score["of"] for score in scores.values()),
        },
        "perplexity": None,
    }
    if suite.texts:
        texts = []
        for text_id, text in suite.texts:
            texts.append({"id": text_id} | nll_of(llm, text))
            step()
        tokens = sum(text["tokens"] for text in texts)
        mean = sum(text["nll"] * text["tokens"] for text in texts) / tokens
        facts["perplexity"] = {"texts": texts, "tokens": tokens, "mean_nll": mean, "perplexity": _perplexity(mean)}
    return facts


def _perplexity(mean_nll: float) -> float:
    try:
        return math.exp(mean_nll)
    except OverflowError:  # 710 nats a token: no language model, but a number all the same
        return math.inf


def nll_of(llm: LLM, text: str) -> dict[str, Any]:
    """Mean negative log-likelihood per token, given all tokens before; the first one follows begin-of-sequence.

    A text longer than the context is cut into pieces that each begin anew.
    """
    ids = llm.tokenizer.encode(text)
    # Without a begin-of-sequence token the first token has nothing to follow and is not scored.
    head, rest = ids[:1], ids[1:]
    if not rest:
        raise RequestError("a perplexity text has fewer than two tokens")
    size = llm.prepared.plan.context - 1
    scores: list[float] = []
    for start in range(0, len(rest), size):
        scores += llm.token_logprobs(head, rest[start : start + size])
    return {"tokens": len(rest), "nll": -sum(scores) / len(scores)}


def read_suite(path: Path) -> Suite:
    """Read and check a suite.

    Raises:
        StorageError: the file cannot be read.
        FormatError: it is no suite; names the item and the field.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_SUITE_BYTES + 1)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > _MAX_SUITE_BYTES:
        raise FormatError(f"{path}: larger than {_MAX_SUITE_BYTES >> 20} MiB, expected a suite of questions")
    try:
        content = json_module.loads(data)
    except (ValueError, RecursionError):
        raise FormatError(f"{path}: is no JSON, expected a suite of questions") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path}: found a {type(content).__name__}, expected an object of lists of questions")
    questions = {
        str(category): [_question(path, f"{category}[{i}]", item) for i, item in enumerate(items)]
        for category, items in content.items()
        if isinstance(items, list) and category != _TEXTS
    }
    items = content.get(_TEXTS, [])
    if not isinstance(items, list):
        raise FormatError(f"{path}: {_TEXTS}: found a {type(items).__name__}, expected a list")
    texts = [
        (str(_field(path, f"{_TEXTS}[{i}]", item, "id", str)), str(_field(path, f"{_TEXTS}[{i}]", item, "text", str)))
        for i, item in enumerate(items)
    ]
    if not any(questions.values()) and not texts:
        raise FormatError(f"{path}: holds no questions and no texts")
    return Suite(questions, texts)


def _question(path: Path, where: str, item: object) -> Question:
    regex = _field(path, where, item, "regex", str)
    max_tokens = _field(path, where, item, "max_tokens", int)
    try:
        pattern = re.compile(regex)
    except (re.error, OverflowError, RecursionError) as error:
        raise FormatError(f"{path}: {where}.regex: {error}") from None
    if not 1 <= max_tokens <= 1 << 20:
        raise FormatError(f"{path}: {where}.max_tokens: found {max_tokens}, expected 1 or more")
    return Question(_field(path, where, item, "id", str), _field(path, where, item, "prompt", str), pattern, max_tokens)


def _field(path: Path, where: str, item: object, name: str, kind: type) -> Any:
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise FormatError(f"{path}: {where}.{name}: found {type(value).__name__}, expected {kind.__name__}")
    return value


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(category, f"{score['right']} of {score['of']}") for category, score in facts["scores"].items()]
    if facts["total"]["of"]:
        rows.append(("total", f"{facts['total']['right']} of {facts['total']['of']}"))
    perplexity = facts["perplexity"]
    if perplexity is not None:
        rows += [
            (f"  {text['id']}", f"{text['nll']:.4f} nats a token, {text['tokens']:,} tokens")
            for text in perplexity["texts"]
        ]
        rows.append(("mean NLL", f"{perplexity['mean_nll']:.4f} (perplexity {perplexity['perplexity']:.3f})"))
    return rows
