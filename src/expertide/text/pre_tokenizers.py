"""Pre-tokenizers by the name that GGUF files give in `tokenizer.ggml.pre`.

A pre-tokenizer cuts text into pieces; BPE merges only inside a piece. Each one here is a list of splits run in order:
a split cuts every piece left by the one before it, and both its matches and the gaps between them become pieces.
After the last split, bytes are written in the byte alphabet.

A wrong pre-tokenizer still gives valid ids, only worse ones. So a name that is not in this table is refused, never
guessed.

Sources: the tokenizer.json files of the models; for the names, the registry in llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from expertide.errors import RequestError, UnsupportedError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one family of models cuts text, and what its files leave unsaid.

    Attributes:
        name: as in `tokenizer.ggml.pre`.
        splits: expressions, in order; each runs on the pieces left by the previous one.
        add_bos: whether a prompt starts with the begin-of-sequence token when the file has no `add_bos_token`.
        ignore_merges: a piece that is in the vocabulary as it stands is taken whole, even where no merges lead to it.
        normalize_nfc: text is brought to Unicode NFC before it is cut.
    """

    name: str
    splits: tuple[str, ...]
    add_bos: bool = False
    ignore_merges: bool = False
    normalize_nfc: bool = False

    def pipeline(self) -> Any:
        """The `tokenizers` pre-tokenizer; its pieces are spelled in the byte alphabet."""
        steps = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> Any | None:
        """The `tokenizers` normalizer, or None where text is taken as it is."""
        return normalizers.NFC() if self.normalize_nfc else None


# Cased letters of an old Unicode version, as hexadecimal ranges. Pasted characters would not survive: NFC turns U+1FD3,
# U+2126, U+212A and others into different ones.
_DEEPSEEK_LETTERS = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5
3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15
1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3
1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139
213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787
A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2
118A0-118DF 1E900-1E943
"""
# ASCII but for digits, full-width forms, curly quotes, ideographic space, comma and full stop. The ASCII letters inside
# 3A-7E do no harm: the split before has taken them.
_DEEPSEEK_PUNCTUATION = "21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002"
_DEEPSEEK_IDEOGRAPHS = "4E00-9FA5 800-4E00 AC00-D7FF"
_DEEPSEEK_V3_IDEOGRAPHS = "4E00-9FA5 3040-309F 30A0-30FF"


def character_class(ranges: str) -> str:
    """`[\\x{41}-\\x{5A}…]` for hexadecimal code points and ranges between spaces."""
    parts = []
    for entry in ranges.split():
        first, _, last = entry.partition("-")
        parts.append(f"\\x{{{first}}}-\\x{{{last}}}" if last else f"\\x{{{first}}}")
    return "[" + "".join(parts) + "]"


_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


def _tiktoken_like(digits: str) -> str:
    """The expression of cl100k and its descendants; `digits` says how numbers are cut."""
    return (
        rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_KNOWN = (
    PreTokenizer("gpt-2", (_GPT2,)),
    PreTokenizer("smollm", (r"\p{N}", _GPT2)),
    PreTokenizer("olmo", (_GPT2,), normalize_nfc=True),  # GPTNeoXTokenizer in transformers
    PreTokenizer(
        "deepseek-llm",
        (
            r"[\r\n]",
            rf"\s?{character_class(_DEEPSEEK_LETTERS)}+",
            rf"\s?{character_class(_DEEPSEEK_PUNCTUATION)}+",
            r"\s+$",
            rf"{character_class(_DEEPSEEK_IDEOGRAPHS)}+",
            r"\p{N}",
        ),
        add_bos=True,
    ),
    PreTokenizer(
        "deepseek-coder",
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"{character_class(_DEEPSEEK_IDEOGRAPHS)}+", r"\p{N}"),
        add_bos=True,
    ),
    PreTokenizer(
        "deepseek-v3",
        (
            r"\p{N}{1,3}",
            rf"{character_class(_DEEPSEEK_V3_IDEOGRAPHS)}+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        add_bos=True,
    ),
    PreTokenizer("llama-bpe", (_tiktoken_like(r"\p{N}{1,3}"),), add_bos=True, ignore_merges=True),
    PreTokenizer("qwen2", (_tiktoken_like(r"\p{N}"),), normalize_nfc=True),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {entry.name: entry for entry in _KNOWN}

# Other names under which converters registered a tokenizer with exactly these splits.
_ALIASES: Mapping[str, str] = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "joyai-llm": "deepseek-v3"}

# For files made before `tokenizer.ggml.pre` existed: architecture -> (smallest and largest vocabulary, name). The
# sizes keep other families that share the architecture (Kimi-K2: 163,840 tokens) from getting a wrong default.
_DEFAULTS: Mapping[str, tuple[tuple[int, int, str], ...]] = {
    "deepseek2": ((0, 102_400, "deepseek-llm"), (128_000, 129_280, "deepseek-v3")),
    "qwen2moe": ((0, 151_936, "qwen2"),),
    "qwen3moe": ((0, 151_936, "qwen2"),),
}


def find(name: str, *, source: str) -> PreTokenizer:
    """The pre-tokenizer that a file names.

    Raises:
        UnsupportedError: no entry has this name.
    """
    entry = PRE_TOKENIZERS.get(_ALIASES.get(name, name))
    if entry is None:
        raise UnsupportedError(
            f"{source}: tokenizer.ggml.pre: pre-tokenizer {name!r} is not known; known: {known_names()} "
            "(if the model's text is cut like one of these, say so with --pre-tokenizer NAME)"
        )
    return entry


def find_asked(name: str) -> PreTokenizer:
    """The pre-tokenizer that the caller asks for with `--pre-tokenizer`.

    Raises:
        RequestError: no entry has this name.
    """
    entry = PRE_TOKENIZERS.get(_ALIASES.get(name, name))
    if entry is None:
        raise RequestError(f"--pre-tokenizer {name}: known names are {known_names()}")
    return entry


def find_default(architecture: str, num_tokens: int, *, source: str) -> PreTokenizer:
    """The pre-tokenizer of an architecture whose file names none.

    Raises:
        UnsupportedError: the architecture has no default.
    """
    for smallest, largest, name in _DEFAULTS.get(architecture, ()):
        if smallest <= num_tokens <= largest:
            return PRE_TOKENIZERS[name]
    raise UnsupportedError(
        f"{source}: tokenizer.ggml.pre is missing, and architecture {architecture!r} with {num_tokens:,} tokens "
        f"has no default; choose one with --pre-tokenizer NAME; known: {known_names()}"
    )


def known_names() -> str:
    return ", ".join(sorted(PRE_TOKENIZERS))
