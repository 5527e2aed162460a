"""The vocabulary as GGUF metadata gives it, checked before anything is built from it.

    tokenizer.ggml.model        "gpt2": byte-level BPE, the only kind read here
    tokenizer.ggml.tokens       text of every id; normal tokens are spelled in the byte alphabet, others are plain text
    tokenizer.ggml.token_type   1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte; absent: all normal
    tokenizer.ggml.merges       "left right", best first
    tokenizer.ggml.*_token_id   bos, eos, eot, eom, padding

Source: gguf/constants.py (TokenType, Keys.Tokenizer) in the gguf package.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from expertide.errors import FormatError, UnsupportedError
from expertide.text.byte_alphabet import BYTE_TO_CHAR, BYTES_OUTSIDE_UTF8
from expertide.text.special_tokens import FORCED_CONTROL_TEXTS

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """What kind of text a token is; the numbers are GGUF's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """A checked byte-level vocabulary.

    Attributes:
        tokens: text by id; all different, except that padding may be several empty texts.
        ids: id by text, without the empty ones.
        types: a TokenType by id.
        merges: pairs whose parts and whose concatenation are tokens.
        bos_id, eos_id, eot_id, eom_id, pad_id: ids inside the vocabulary, or None.
        add_bos: what the file says, or None where it is silent.
        warnings: sentences worth telling the user.
    """

    tokens: Sequence[str]
    ids: dict[str, int]
    types: bytes
    merges: Sequence[tuple[str, str]]
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    eom_id: int | None
    pad_id: int | None
    add_bos: bool | None
    warnings: tuple[str, ...]


def read_vocabulary(metadata: Mapping[str, object], *, source: str) -> Vocabulary:
    """Read and check the tokenizer keys of GGUF metadata.

    Args:
        source: how messages call the file.

    Raises:
        FormatError: a key is missing, of the wrong type, or contradicts another.
        UnsupportedError: the tokenizer is not byte-level BPE.
    """
    _check_model(metadata, source)
    tokens = _strings(metadata, "tokens", source)
    index = _index(tokens, source)
    named = {role: _token_id(metadata, role, len(tokens), source) for role in ("bos", "eos", "eot", "eom", "padding")}
    types = _types(metadata, tokens, index, named, source)
    return Vocabulary(
        tokens=tokens,
        ids=index,
        types=bytes(types),
        merges=_merges(metadata, tokens, index, source),
        bos_id=named["bos"],
        eos_id=named["eos"],
        eot_id=named["eot"],
        eom_id=named["eom"],
        pad_id=named["padding"],
        add_bos=_switch(metadata, "add_bos_token", source),
        warnings=_missing_bytes(index, source),
    )


def _check_model(metadata: Mapping[str, object], source: str) -> None:
    model = metadata.get(_PREFIX + "model")
    if model is None:
        raise FormatError(f"{source}: {_PREFIX}model is missing: the file has no tokenizer")
    if not isinstance(model, str):
        raise FormatError(f"{source}: {_PREFIX}model: found {type(model).__name__}, expected a string")
    if model != "gpt2":
        raise UnsupportedError(f"{source}: {_PREFIX}model: tokenizer kind {model!r} is not supported; known: 'gpt2'")


def _array(metadata: Mapping[str, object], name: str, source: str) -> Sequence[object]:
    values = metadata.get(_PREFIX + name)
    if values is None:
        raise FormatError(f"{source}: {_PREFIX}{name} is missing")
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise FormatError(f"{source}: {_PREFIX}{name}: found {type(values).__name__}, expected an array")
    return values


def _strings(metadata: Mapping[str, object], name: str, source: str) -> list[str]:
    texts = []
    for position, value in enumerate(_array(metadata, name, source)):
        if not isinstance(value, str):
            raise FormatError(
                f"{source}: {_PREFIX}{name}[{position}]: found {type(value).__name__}, expected a string of valid UTF-8"
            )
        texts.append(value)
    _check_encodable(texts, name, source)
    return texts


def _check_encodable(texts: Sequence[str], name: str, source: str) -> None:
    """No lone surrogates. One encode of everything: 200,000 small ones would cost more than all other checks."""
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        for position, text in enumerate(texts):
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise FormatError(f"{source}: {_PREFIX}{name}[{position}]: {text!a} is not valid UTF-8") from None


def _index(tokens: Sequence[str], source: str) -> dict[str, int]:
    if not tokens:
        raise FormatError(f"{source}: {_PREFIX}tokens is empty")
    index: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        first = index.setdefault(token, token_id)
        if first != token_id and token:
            raise FormatError(f"{source}: {_PREFIX}tokens: {token!r} stands at {first} and again at {token_id}")
    index.pop("", None)  # some converters pad with empty texts: ids that no text reaches
    return index


def _token_id(metadata: Mapping[str, object], role: str, num_tokens: int, source: str) -> int | None:
    name = f"{_PREFIX}{role}_token_id"
    value = metadata.get(name)
    # 2**32 - 1 is how some converters write "none".
    if value is None or value in (-1, 0xFFFF_FFFF):
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise FormatError(f"{source}: {name}: found {type(value).__name__}, expected a whole number")
    if not 0 <= value < num_tokens:
        raise FormatError(f"{source}: {name}: {value:,} is outside the vocabulary of {num_tokens:,} tokens")
    return value


def _switch(metadata: Mapping[str, object], name: str, source: str) -> bool | None:
    value = metadata.get(_PREFIX + name)
    if value is None or isinstance(value, bool):
        return value
    raise FormatError(f"{source}: {_PREFIX}{name}: found {type(value).__name__}, expected true or false")


def _types(
    metadata: Mapping[str, object],
    tokens: Sequence[str],
    index: Mapping[str, int],
    named: Mapping[str, int | None],
    source: str,
) -> array[int]:
    types = array("B", [TokenType.NORMAL]) * len(tokens)
    if metadata.get(_PREFIX + "token_type") is not None:
        values = _array(metadata, "token_type", source)
        if len(values) != len(tokens):
            raise FormatError(
                f"{source}: {_PREFIX}token_type has {len(values):,} entries, {_PREFIX}tokens has {len(tokens):,}"
            )
        known = frozenset(int(kind) for kind in TokenType)
        for token_id, value in enumerate(values):
            if not isinstance(value, int) or value not in known:
                raise FormatError(f"{source}: {_PREFIX}token_type[{token_id}]: {value!r} is not one of 1 to 6")
            types[token_id] = value
    # What the file itself names as begin or end is a control token, whatever its type says; so are a few known texts.
    for role in ("bos", "eos", "eot", "eom"):
        named_id = named[role]
        if named_id is not None:
            types[named_id] = TokenType.CONTROL
    for text in FORCED_CONTROL_TEXTS:
        if text in index:
            types[index[text]] = TokenType.CONTROL
    return types


def _merges(
    metadata: Mapping[str, object], tokens: Sequence[str], index: Mapping[str, int], source: str
) -> list[tuple[str, str]]:
    merges = []
    for position, merge in enumerate(_strings(metadata, "merges", source)):
        # From the second character on: the left part is never empty, and could itself be a space in foreign files.
        border = merge.find(" ", 1)
        left, right = merge[:border], merge[border + 1 :]
        if border < 0 or not right:
            raise FormatError(f"{source}: {_PREFIX}merges[{position}]: {merge!r} is not two parts with a space between")
        for part in (left, right, left + right):
            if part not in index:
                raise FormatError(f"{source}: {_PREFIX}merges[{position}]: {part!r} is not in the vocabulary")
        # The vocabulary's own string objects: 200,000 copies would be 10 MB at the load's peak.
        merges.append((tokens[index[left]], tokens[index[right]]))
    return merges


def _missing_bytes(index: Mapping[str, int], source: str) -> tuple[str, ...]:
    missing = [byte for byte, char in BYTE_TO_CHAR.items() if char not in index and byte not in BYTES_OUTSIDE_UTF8]
    if not missing:
        return ()
    listed = " ".join(f"{byte:02X}" for byte in sorted(missing)[:8])
    more = " …" if len(missing) > 8 else ""
    return (
        f"{source}: the vocabulary has no token for {len(missing)} of the bytes of UTF-8 ({listed}{more}); "
        "text with these bytes loses them",
    )
