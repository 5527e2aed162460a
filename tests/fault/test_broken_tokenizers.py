"""Tokenizer keys that are missing, of the wrong type, or contradict each other: one sentence names file and key."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from expertide.errors import ExpertideError, FormatError, RequestError, UnsupportedError
from expertide.text.tokenizer import Tokenizer
from text_samples import toy_metadata

REMOVE = object()

FAULTS: list[tuple[str, dict[str, Any], type[ExpertideError], str]] = [
    ("no tokenizer", {"model": REMOVE}, FormatError, "model is missing: the file has no tokenizer"),
    ("model is a number", {"model": 3}, FormatError, "model: found int, expected a string"),
    (
        "another kind",
        {"model": "llama"},
        UnsupportedError,
        "model: tokenizer kind 'llama' is not supported; known: 'gpt2'",
    ),
    ("no tokens", {"tokens": REMOVE}, FormatError, "tokens is missing"),
    ("tokens is a string", {"tokens": "abc"}, FormatError, "tokens: found str, expected an array"),
    ("tokens is a number", {"tokens": 7}, FormatError, "tokens: found int, expected an array"),
    ("tokens is empty", {"tokens": []}, FormatError, "tokens is empty"),
    ("a token is a number", {"tokens": ["a", 3]}, FormatError, "tokens[1]: found int, expected a string"),
    (
        "a token is no UTF-8",
        {"tokens": ["a", b"\xff"]},
        FormatError,
        "tokens[1]: found bytes, expected a string of valid UTF-8",
    ),
    (
        "a token is half a character",
        {"tokens": ["a", "\ud83d"]},
        FormatError,
        "tokens[1]: '\\ud83d' is not valid UTF-8",
    ),
    ("two equal tokens", {"tokens": ["a", "b", "a"]}, FormatError, "tokens: 'a' stands at 0 and again at 2"),
    ("types too short", {"token_type": [1, 1]}, FormatError, "token_type has 2 entries, tokenizer.ggml.tokens has 259"),
    ("unknown type", {"token_type": [9] * 259}, FormatError, "token_type[0]: 9 is not one of 1 to 6"),
    ("type of text", {"token_type": ["1"] * 259}, FormatError, "token_type[0]: '1' is not one of 1 to 6"),
    ("huge type", {"token_type": [1 << 40] * 259}, FormatError, "is not one of 1 to 6"),
    ("no merges", {"merges": REMOVE}, FormatError, "merges is missing"),
    (
        "a merge without a space",
        {"merges": ["th"]},
        FormatError,
        "merges[0]: 'th' is not two parts with a space between",
    ),
    ("a merge with an empty part", {"merges": ["t "]}, FormatError, "merges[0]: 't ' is not two parts"),
    ("a merge of unknown parts", {"merges": ["t h", "x yy"]}, FormatError, "merges[1]: 'yy' is not in the vocabulary"),
    ("a merge without a result", {"merges": ["x y"]}, FormatError, "merges[0]: 'xy' is not in the vocabulary"),
    ("bos outside", {"bos_token_id": 259}, FormatError, "bos_token_id: 259 is outside the vocabulary of 259 tokens"),
    ("eos negative", {"eos_token_id": -7}, FormatError, "eos_token_id: -7 is outside the vocabulary"),
    ("eos is text", {"eos_token_id": "2"}, FormatError, "eos_token_id: found str, expected a whole number"),
    ("eos is a truth value", {"eos_token_id": True}, FormatError, "eos_token_id: found bool, expected a whole number"),
    ("add_bos is a number", {"add_bos_token": 1}, FormatError, "add_bos_token: found int, expected true or false"),
    ("pre is a number", {"pre": 1}, FormatError, "pre: found int, expected a string"),
    ("pre is unknown", {"pre": "gpt-9"}, UnsupportedError, "pre: pre-tokenizer 'gpt-9' is not known"),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
def test_a_broken_tokenizer_ends_in_one_sentence(
    changes: dict[str, Any], error: type[ExpertideError], message: str
) -> None:
    metadata = toy_metadata(merges=["t h"])
    for name, value in changes.items():
        metadata[f"tokenizer.ggml.{name}"] = value
        if value is REMOVE:
            del metadata[f"tokenizer.ggml.{name}"]
    with pytest.raises(error) as caught:
        Tokenizer.from_metadata(metadata, source="broken.gguf")
    assert str(caught.value).startswith("broken.gguf: tokenizer.ggml.")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_is_no_text_is_refused() -> None:
    metadata = toy_metadata() | {"tokenizer.chat_template": ["x"]}
    with pytest.raises(FormatError, match=r"m\.gguf: tokenizer\.chat_template: found list, expected a string"):
        Tokenizer.from_metadata(metadata, source="m.gguf")


def test_an_override_that_does_not_exist_is_the_caller_s_error() -> None:
    with pytest.raises(RequestError, match="--pre-tokenizer gpt-9: known names are"):
        Tokenizer.from_metadata(toy_metadata(), pre_tokenizer="gpt-9")


def test_random_damage_ends_in_success_or_an_error_of_ours() -> None:
    rng = random.Random(7)
    values = [None, -1, 0, 5, 1 << 70, 0.5, True, "", "x", "a b", b"\xff", [], [1], ["a"], ["a b"], {}, [None] * 3]
    num_refused = 0
    for _ in range(400):
        metadata = toy_metadata(merges=["t h", "th e"], user_defined=["<u>"])
        for _ in range(rng.randint(1, 3)):
            key = rng.choice(sorted(metadata))
            current = metadata[key]
            if isinstance(current, list) and current and rng.random() < 0.7:
                current[rng.randrange(len(current))] = rng.choice(values)
            else:
                metadata[key] = rng.choice(values)
        try:
            tokenizer = Tokenizer.from_metadata(metadata)
            tokenizer.decode(tokenizer.encode("the end <u> 🙂"))
        except ExpertideError:
            num_refused += 1
    assert 100 < num_refused < 400


# Files beside the model


BROKEN_JSON = [
    "",
    "{",
    "[]",
    '{"model": 3}',
    "\xff",
    '{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}',
]


@pytest.mark.parametrize("content", BROKEN_JSON)
def test_a_broken_tokenizer_json_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(FormatError, match=r"tokenizer\.json: not a tokenizer file: ") as caught:
        Tokenizer.from_hf_json(path)
    assert str(path) in str(caught.value)
