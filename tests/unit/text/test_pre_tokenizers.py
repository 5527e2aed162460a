"""Every pre-tokenizer against a second implementation: Python's `regex`, or plain code for deepseek-llm."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import regex

from expertide.errors import RequestError, UnsupportedError
from expertide.text import pre_tokenizers
from expertide.text.byte_alphabet import BYTE_TO_CHAR, BYTES_OUTSIDE_UTF8, CHAR_TO_BYTE, spelled_bytes
from text_samples import mixed_lines

LINES = mixed_lines(3000, seed=11)
IDEOGRAPHS = "[\\u4e00-\\u9fa5\\u0800-\\u4e00\\uac00-\\ud7ff]+"


def pieces_of(name: str, line: str) -> list[str]:
    """What our pipeline cuts a line into, as text."""
    cut = pre_tokenizers.PRE_TOKENIZERS[name].pipeline().pre_tokenize_str(line)
    return [b"".join(bytes([CHAR_TO_BYTE[char]]) for char in piece).decode() for piece, _ in cut]


def split(expressions: list[str], line: str) -> list[str]:
    """Each expression cuts the pieces left by the one before; matches and gaps both stay."""
    pieces = [line]
    for expression in expressions:
        pieces = [part for piece in pieces for part in matches_and_gaps(regex.compile(expression), piece)]
    return pieces


def matches_and_gaps(expression: regex.Pattern[str], piece: str) -> Iterator[str]:
    end = 0
    for match in expression.finditer(piece):
        if match.start() > end:
            yield piece[end : match.start()]
        if match.end() > match.start():
            yield match[0]
        end = match.end()
    if end < len(piece):
        yield piece[end:]


# Written out as the models' own files have them, apart from the table under test.
GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
EXPRESSIONS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "olmo": [GPT2],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", IDEOGRAPHS, r"\p{N}"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "llama-bpe": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + AFTER_DIGITS],
    "qwen2": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + AFTER_DIGITS],
}

LETTER_RANGES = pre_tokenizers._DEEPSEEK_LETTERS.split()


def deepseek_llm(line: str) -> list[str]:
    """The six splits in plain Python."""
    pieces = [line]
    for cut in (
        is_newline,
        run_after_space(is_letter),
        run_after_space(is_punctuation),
        spaces_at_end,
        ideographs,
        numeric,
    ):
        pieces = [part for piece in pieces for part in apply(cut, piece)]
    return pieces


def apply(match_length: Callable[[str, int], int], piece: str) -> Iterator[str]:
    start = gap = 0
    while start < len(piece):
        length = match_length(piece, start)
        if length:
            if gap < start:
                yield piece[gap:start]
            yield piece[start : start + length]
            start = gap = start + length
        else:
            start += 1
    if gap < len(piece):
        yield piece[gap:]


def is_space(char: str) -> bool:
    # Python also counts the four ASCII separators, which Unicode's White_Space does not.
    return char.isspace() and not "\x1c" <= char <= "\x1f"


def is_newline(piece: str, start: int) -> int:
    return int(piece[start] in "\r\n")


def is_letter(char: str) -> bool:
    bounds = (entry.split("-") for entry in LETTER_RANGES)
    return any(int(first[0], 16) <= ord(char) <= int(first[-1], 16) for first in bounds)


def is_punctuation(char: str) -> bool:
    code = ord(char)
    return any(
        low <= code <= high
        for low, high in (
            (0x21, 0x2F),
            (0x3A, 0x7E),
            (0xFF01, 0xFF0F),
            (0xFF1A, 0xFF5E),
            (0x2018, 0x201F),
            (0x3000, 0x3002),
        )
    )


def run_after_space(is_member: Callable[[str], bool]) -> Callable[[str, int], int]:
    def match_length(piece: str, start: int) -> int:
        # A space that is itself a member (U+3000) may be either; greedy matching makes both the same run.
        first = (
            start + 1 if is_space(piece[start]) and start + 1 < len(piece) and is_member(piece[start + 1]) else start
        )
        end = first
        while end < len(piece) and is_member(piece[end]):
            end += 1
        return end - start if end > first else 0

    return match_length


def spaces_at_end(piece: str, start: int) -> int:
    return len(piece) - start if all(is_space(char) for char in piece[start:]) else 0


def ideographs(piece: str, start: int) -> int:
    end = start
    while end < len(piece) and (0x800 <= ord(piece[end]) <= 0x9FA5 or 0xAC00 <= ord(piece[end]) <= 0xD7FF):
        end += 1
    return end - start


def numeric(piece: str, start: int) -> int:
    return int(unicodedata.category(piece[start]).startswith("N"))


def is_stable(line: str) -> bool:
    """Only characters that every Unicode version since Python 3.11's knows: the engines' tables differ beyond."""
    return all(unicodedata.category(char) != "Cn" for char in line)


@pytest.mark.parametrize("name", sorted(EXPRESSIONS))
def test_pieces_equal_those_of_a_second_regex_engine(name: str) -> None:
    lines = [line for line in LINES if is_stable(line)]
    assert len(lines) > 2000
    for line in lines:
        assert pieces_of(name, line) == split(EXPRESSIONS[name], line), f"{name}: {line!a}"


def test_deepseek_llm_pieces_equal_those_of_plain_code() -> None:
    lines = [line for line in LINES if is_stable(line)]
    for line in lines:
        assert pieces_of("deepseek-llm", line) == deepseek_llm(line), f"{line!a}"


def test_every_border_of_the_letter_ranges_is_kept() -> None:
    ends = {int(bound, 16) for entry in LETTER_RANGES for bound in entry.split("-")}
    around = sorted({code + step for code in ends for step in (-1, 0, 1)})
    for code in around:
        line = "~" + chr(code) + "A"
        assert pieces_of("deepseek-llm", line) == deepseek_llm(line), f"U+{code:04X}"


@pytest.mark.parametrize("name", sorted(pre_tokenizers.PRE_TOKENIZERS))
def test_pieces_concatenate_to_the_text(name: str) -> None:
    for line in LINES[:500]:
        assert "".join(pieces_of(name, line)) == line


def test_these_names_are_known() -> None:
    names = {"gpt-2", "smollm", "deepseek-llm", "deepseek-coder", "deepseek-v3", "llama-bpe", "qwen2", "olmo"}
    assert names == set(pre_tokenizers.PRE_TOKENIZERS)


def test_an_unknown_name_is_refused_with_the_name_and_the_way_out() -> None:
    with pytest.raises(
        UnsupportedError, match=r"m\.gguf: tokenizer\.ggml\.pre: .*'gpt-9'.*qwen2.*--pre-tokenizer NAME"
    ):
        pre_tokenizers.find("gpt-9", source="m.gguf")


def test_an_unknown_override_is_the_caller_s_error() -> None:
    with pytest.raises(RequestError, match=r"--pre-tokenizer gpt-9: known names are .*smollm"):
        pre_tokenizers.find_asked("gpt-9")


@pytest.mark.parametrize(
    ("num_tokens", "name"), [(102_400, "deepseek-llm"), (4_096, "deepseek-llm"), (129_280, "deepseek-v3")]
)
def test_a_file_without_a_name_gets_its_architecture_s(num_tokens: int, name: str) -> None:
    assert pre_tokenizers.find_default("deepseek2", num_tokens, source="m.gguf").name == name


@pytest.mark.parametrize(("architecture", "num_tokens"), [("deepseek2", 163_840), ("qwen9", 100), ("", 100)])
def test_no_default_is_guessed_where_families_differ(architecture: str, num_tokens: int) -> None:
    with pytest.raises(UnsupportedError, match=r"m\.gguf: tokenizer\.ggml\.pre is missing.*--pre-tokenizer NAME"):
        pre_tokenizers.find_default(architecture, num_tokens, source="m.gguf")


def test_the_byte_alphabet_is_one_to_one_and_printable() -> None:
    assert sorted(BYTE_TO_CHAR) == list(range(256))
    assert len(CHAR_TO_BYTE) == 256
    assert BYTE_TO_CHAR[0x20] == "Ġ"
    assert BYTE_TO_CHAR[0x0A] == "Ċ"
    assert not any(char.isspace() for char in CHAR_TO_BYTE)


def test_bytes_outside_utf8_never_occur_in_text() -> None:
    seen = {byte for code in range(0x110000) if not 0xD800 <= code < 0xE000 for byte in chr(code).encode()}
    assert seen == set(range(256)) - BYTES_OUTSIDE_UTF8


def test_a_token_outside_the_alphabet_is_its_own_text() -> None:
    assert spelled_bytes("Ġthe") == b" the"
    assert spelled_bytes("ä½ł") == "你".encode()
    assert spelled_bytes("<｜fim▁hole｜>") == "<｜fim▁hole｜>".encode()


def test_deepseek_v3_pieces_equal_those_recorded_from_the_model_s_own_file() -> None:
    golden = Path(__file__).parents[2] / "golden" / "deepseek_v3_pieces.json"
    vectors = json.loads(golden.read_text(encoding="utf-8"))["vectors"]
    assert len(vectors) == 80
    cut = pre_tokenizers.PRE_TOKENIZERS["deepseek-v3"].pipeline()
    for vector in vectors:
        assert [piece for piece, _ in cut.pre_tokenize_str(vector["text"])] == vector["pieces"], f"{vector['text']!a}"
