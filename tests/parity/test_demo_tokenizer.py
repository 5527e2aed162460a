"""The demo model's tokenizer from its GGUF file, against the pipeline that it was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import expertide
from expertide.formats import open_model
from expertide.text.detokenizer import IncrementalDetokenizer
from expertide.text.tokenizer import Tokenizer
from text_samples import mixed_lines

DEMO = Path(expertide.__file__).parent / "data" / "demo-q4_k_m.gguf"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_files(open_model(DEMO))


@pytest.fixture(scope="module")
def trained_with() -> Any:
    """As demo_model/train.py builds it: digits apart, then GPT-2's own pieces."""
    metadata: Any = open_model(DEMO).metadata
    vocab = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def test_ids_equal_those_of_the_training_pipeline(tokenizer: Tokenizer, trained_with: Any) -> None:
    for line in mixed_lines(2000, seed=21):
        assert tokenizer.encode(line, add_bos=False) == trained_with.encode(line).ids, f"{line!a}"


def test_streamed_text_equals_the_full_decode_for_every_cut(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("中国的首都是北京。🙂 naïve 9.11 > 9.9")
    for end in range(len(ids) + 1):
        detokenizer = IncrementalDetokenizer(tokenizer)
        streamed = "".join(detokenizer.push(token_id) for token_id in ids[:end])
        assert streamed + detokenizer.flush() == tokenizer.decode(ids[:end])
        assert "\ufffd" not in streamed


def test_the_chat_form_begins_once_and_ends_open(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "5-2=?"}])
    assert text == "<|bos|>User: 5-2=?\n\nAssistant:"
    ids = tokenizer.encode(text)
    assert ids.count(0) == 1
    assert ids[0] == tokenizer.bos_id == 0
    assert tokenizer.stop_ids == {1}
    assert tokenizer.warnings == ()
