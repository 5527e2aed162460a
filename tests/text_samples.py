"""Text to test tokenizers with: seeded mixed lines, and small vocabularies made on the spot."""

from __future__ import annotations

import random
from collections.abc import Iterable

from expertide.text.byte_alphabet import BYTE_TO_CHAR

_TEXT = (
    "the capital of France is Paris and a model larger than memory can still answer It's we'll THEY'RE don't I'd "
    "naïve café Ωμέγα Здравствуй мир שלום مرحبا नमस्ते สวัสดี Straße ǅ İstanbul ﬁn Ꮳ ꭰ 𐐀𐐨 "
    "'\u017f it\u2019s \u212a \u212b \u1fdb"
)
_WORDS = _TEXT.split()
_IDEOGRAPHS = "中国的首都是北京你好世界模型记忆龥一鿿㐀𠀀ひらがなカタカナー々〆한국어퟿"
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~！（），．／：；＜＝＞？＠［～‘’“”‟　、。〃《》—…·«»¿€£¥+±×÷√∞→⇒█"
_NUMERIC = "0123456789٠١٢३४๓０１９²³¹¼½ⅠⅫↀ①⑩㊿𝟘𝟗一二"
_SPACES = [
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\r\n",
    "\r",
    "\n\n",
    " \n",
    "\n ",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\u0085",
    "\x0b",
    "\x0c",
]
_CODE = [
    "def f(x):\n    return x**2",
    "for(i=0;i<10;++i){",
    "a_b.c",
    "https://x.org/?q=1",
    '{"k": [1, 2.50]}',
    "x<=y!=z",
    "#include",
]
_EMOJI = [
    "🙂",
    "👨‍👩‍👧",
    "🏳️‍🌈",
    "👍🏽",
    "🇩🇪",
    "e\u0301",
    "\u0301",
    "\u200d",
    "\ufeff",
    "\ufffd",
    "\x00",
    "\x7f",
    "\ue000",
]


def mixed_lines(num_lines: int, *, seed: int) -> list[str]:
    """Lines that mix scripts, numbers, punctuation, code, emoji, spaces of all kinds and random code points."""
    rng = random.Random(seed)
    return ["".join(_piece(rng) for _ in range(rng.randint(1, 14))) for _ in range(num_lines)]


def _piece(rng: random.Random) -> str:
    kind = rng.randrange(10)
    if kind < 3:
        return rng.choice(("", " ")) + rng.choice(_WORDS)
    if kind == 3:
        return "".join(rng.choices(_IDEOGRAPHS, k=rng.randint(1, 6)))
    if kind == 4:
        return rng.choice(("", " ")) + "".join(rng.choices(_PUNCTUATION, k=rng.randint(1, 5)))
    if kind == 5:
        return "".join(rng.choices(_NUMERIC[:10] if rng.random() < 0.6 else _NUMERIC, k=rng.randint(1, 7)))
    if kind == 6:
        return rng.choice(_SPACES)
    if kind == 7:
        return rng.choice(_CODE)
    if kind == 8:
        return rng.choice(_EMOJI)
    return "".join(_random_char(rng) for _ in range(rng.randint(1, 3)))


def _random_char(rng: random.Random) -> str:
    """Any code point that is a character of its own: no surrogates."""
    code = rng.randrange(rng.choice((0x80, 0x800, 0x3000, 0x10000, 0x110000)))
    return chr(code) if not 0xD800 <= code < 0xE000 else "\u0800"


def toy_metadata(
    *,
    merges: Iterable[str] = (),
    control: Iterable[str] = ("<|bos|>", "<|eos|>"),
    user_defined: Iterable[str] = (),
    unused: Iterable[str] = (),
    pre: str | None = "gpt-2",
    **keys: object,
) -> dict[str, object]:
    """GGUF metadata of a byte-level vocabulary: ids 0..255 are the bytes, then merges, control, user-defined, unused.

    Merges are written as in the file ("Ġ the"). `keys` are more keys that begin with `tokenizer.ggml.`.
    """
    merges, control, user_defined, unused = list(merges), list(control), list(user_defined), list(unused)
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [BYTE_TO_CHAR[byte] for byte in range(256)] + merged + control + user_defined + unused
    types = [1] * (256 + len(merged)) + [3] * len(control) + [4] * len(user_defined) + [5] * len(unused)
    metadata: dict[str, object] = {
        "general.architecture": "deepseek2",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    if control:
        metadata["tokenizer.ggml.bos_token_id"] = 256 + len(merged)
        metadata["tokenizer.ggml.eos_token_id"] = 256 + len(merged) + len(control) - 1
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
