"""A `tokenizer.json` next to the model, used as written.

The file is a whole pipeline for the `tokenizers` package: normaliser, added tokens, pre-tokenizer, model. Nothing of
it is replaced, except that truncation and padding are switched off: a prompt is never cut silently. What it does not
say stands in its neighbours: tokenizer_config.json (begin and end token, chat template) and generation_config.json
(end ids).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models

from expertide.errors import FormatError, UnsupportedError
from expertide.text.special_tokens import stop_ids
from expertide.text.vocabulary import TokenType

FILE_NAME = "tokenizer.json"
# The largest vocabularies in use, 260,000 tokens, make files of 35 MB.
_MAX_JSON_BYTES = 256 << 20


def load(path: Path) -> dict[str, Any]:
    """Everything `Tokenizer` is made of.

    Raises:
        FormatError: a file is damaged.
        UnsupportedError: the pipeline is not byte-level BPE.
    """
    backend = _load_backend(path)
    config = _read_object(path.with_name("tokenizer_config.json"))
    generation_eos, warnings = read_generation_eos(path.parent)
    added = backend.get_added_tokens_decoder()
    vocab_size = 1 + max([*backend.get_vocab(with_added_tokens=False).values(), *added], default=-1)
    types = bytearray([TokenType.NORMAL]) * vocab_size
    for token_id, token in added.items():
        types[token_id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    bos_id = _named_token(config, "bos_token", backend, path)
    eos_id = _named_token(config, "eos_token", backend, path)
    for token_id in (bos_id, eos_id):
        if token_id is not None:
            types[token_id] = TokenType.CONTROL
    controls = {token.content: token_id for token_id, token in added.items() if types[token_id] == TokenType.CONTROL}
    return {
        "backend": backend,
        "types": bytes(types),
        "bos_id": bos_id,
        "eos_id": eos_id,
        "stop_ids": stop_ids((eos_id,), controls, generation_eos),
        "add_bos": _adds_bos(config, backend, bos_id),
        "pre_tokenizer": FILE_NAME,
        "chat_template": _chat_template(config, path.parent),
        "warnings": warnings,
    }


def read_generation_eos(folder: Path) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """End ids that generation_config.json in this folder lists, and warnings; both empty where there is no such file.

    A damaged one only warns: it is not needed to run the model.
    """
    path = folder / "generation_config.json"
    try:
        value = _read_object(path).get("eos_token_id")
    except FormatError as error:
        return (), (f"{error}; its end tokens are not used",)
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool)), ()


def _load_backend(path: Path) -> Any:
    _check_size(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except KeyboardInterrupt:
        raise
    # The parser's own errors are plain Exceptions, and its failed assertions are not even those.
    except BaseException as error:
        raise FormatError(f"{path}: not a tokenizer file: {error}") from None
    if not isinstance(backend.model, models.BPE) or not isinstance(backend.decoder, decoders.ByteLevel):
        found = f"{type(backend.model).__name__} with decoder {type(backend.decoder).__name__}"
        raise UnsupportedError(f"{path}: tokenizer kind {found} is not supported; known: BPE with decoder ByteLevel")
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check_size(path: Path) -> None:
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise FormatError(
            f"{path}: {path.stat().st_size:,} bytes are too many for this file; at most {_MAX_JSON_BYTES:,}"
        )


def _read_object(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    if not path.is_file():
        return {}
    _check_size(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: found {type(value).__name__}, expected an object")
    return value


def _named_token(config: Mapping[str, Any], role: str, backend: Any, path: Path) -> int | None:
    value = config.get(role)
    text = value.get("content") if isinstance(value, Mapping) else value
    if text is None:
        return None
    token_id = backend.token_to_id(text) if isinstance(text, str) else None
    if token_id is None:
        raise FormatError(f"{path.with_name('tokenizer_config.json')}: {role} {text!r} is not in {path.name}")
    return int(token_id)


def _adds_bos(config: Mapping[str, Any], backend: Any, bos_id: int | None) -> bool:
    """tokenizer_config.json decides; where it is silent, whether the pipeline itself begins an empty text with BOS."""
    asked = config.get("add_bos_token")
    if isinstance(asked, bool):
        return asked
    return bos_id is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]


def _chat_template(config: Mapping[str, Any], folder: Path) -> str | None:
    """A chat_template.jinja beside the file, else tokenizer_config.json's: one template, or a list with a default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        _check_size(path)
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{path}: not valid UTF-8: {error.reason} at byte {error.start:,}") from None
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) else None
