"""Text to token ids and back.

Made from a model's own files: the vocabulary in GGUF metadata becomes a byte-level BPE pipeline of the `tokenizers`
package; a `tokenizer.json` is used as written (hf_tokenizer.py).

Control tokens (begin, end, roles …) are matched in text only where `parse_special` allows it, and never show in
decoded text. User-defined tokens are ordinary text that was given an id of its own: always matched, always shown.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, models

from expertide.errors import FormatError, RequestError
from expertide.formats.gguf_values import GgufMetadata
from expertide.text import hf_tokenizer, pre_tokenizers
from expertide.text.byte_alphabet import spelled_bytes
from expertide.text.chat import ChatTemplate
from expertide.text.detokenizer import decode_bytes
from expertide.text.pre_tokenizers import PreTokenizer
from expertide.text.special_tokens import stop_ids
from expertide.text.vocabulary import TokenType, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from expertide.formats.tensors import ModelFiles


class Tokenizer:
    """One model's tokenizer. Any thread may call any method.

    Attributes:
        bos_id, eos_id: begin and end of sequence; None where the model has none.
        stop_ids: every id that ends a generation; the caller does not decode these.
        vocab_size: ids the vocabulary names. A model's logits may be longer: ids past the end decode to nothing.
        add_bos: whether `encode` puts `bos_id` in front when it is not told otherwise.
        pre_tokenizer: name of the pre-tokenizer in use; "tokenizer.json" where that file brings its own.
        warnings: sentences worth telling the user.
    """

    def __init__(
        self,
        backend: Any,
        *,
        types: bytes,
        bos_id: int | None,
        eos_id: int | None,
        stop_ids: frozenset[int],
        add_bos: bool,
        pre_tokenizer: str,
        chat_template: str | None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._backend = backend
        self._types = types
        self._encode_lock = threading.Lock()
        # An empty template would answer every conversation without having read it.
        self._chat_source = chat_template or None
        self._chat: ChatTemplate | None = None
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.stop_ids = stop_ids
        self.vocab_size = len(types)
        self.add_bos = add_bos and bos_id is not None
        self.pre_tokenizer = pre_tokenizer
        self.warnings = warnings

    @classmethod
    def from_files(cls, files: ModelFiles, *, pre_tokenizer: str | None = None) -> Tokenizer:
        """The tokenizer of a model: from GGUF metadata, else from a tokenizer.json in the same folder.

        Args:
            pre_tokenizer: use this pre-tokenizer, whatever the file names.

        Raises:
            FormatError: the model has no tokenizer, or a damaged one.
            UnsupportedError: a kind of tokenizer, or a pre-tokenizer, that is not known.
            RequestError: `pre_tokenizer` is not known, or can have no effect.
        """
        folder = files.files[0].parent
        if files.container == "gguf" and "tokenizer.ggml.model" in files.metadata:
            generation_eos, warnings = hf_tokenizer.read_generation_eos(folder)
            tokenizer = cls.from_metadata(
                files.metadata,
                pre_tokenizer=pre_tokenizer,
                source=files.files[0].name,
                generation_eos=generation_eos,
                warnings=warnings,
            )
            if isinstance(files.metadata, GgufMetadata):
                # The strings of a large vocabulary are 17 MiB that nobody needs a second time.
                files.metadata.forget_decoded()
            return tokenizer
        path = folder / hf_tokenizer.FILE_NAME
        if not path.is_file():
            raise FormatError(f"{files.files[0]}: has no tokenizer inside and no {hf_tokenizer.FILE_NAME} beside it")
        if pre_tokenizer is not None:
            raise RequestError(f"--pre-tokenizer {pre_tokenizer}: has no effect, {path} brings its own pre-tokenizer")
        return cls.from_hf_json(path)

    @classmethod
    def from_metadata(
        cls,
        metadata: Mapping[str, object],
        *,
        pre_tokenizer: str | None = None,
        source: str = "GGUF metadata",
        generation_eos: Iterable[int] = (),
        warnings: tuple[str, ...] = (),
    ) -> Tokenizer:
        """Build from the `tokenizer.*` keys of a GGUF file. The metadata is not kept.

        Args:
            pre_tokenizer: use this one instead of `tokenizer.ggml.pre`.
            source: how messages call the file.
            generation_eos: end ids from a generation_config.json beside the file.
            warnings: what is already known to be worth telling.

        Raises:
            FormatError, UnsupportedError, RequestError: as `from_files`.
        """
        asked = None if pre_tokenizer is None else pre_tokenizers.find_asked(pre_tokenizer)
        vocabulary = read_vocabulary(metadata, source=source)
        chosen, choice_warnings = (asked, ()) if asked else _choose(metadata, len(vocabulary.tokens), source)
        controls = {token: vocabulary.ids[token] for token in _texts(vocabulary, TokenType.CONTROL)}
        template = metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise FormatError(f"{source}: tokenizer.chat_template: found {type(template).__name__}, expected a string")
        return cls(
            _build_backend(vocabulary, chosen),
            types=vocabulary.types,
            bos_id=vocabulary.bos_id,
            eos_id=vocabulary.eos_id,
            stop_ids=stop_ids((vocabulary.eos_id, vocabulary.eot_id, vocabulary.eom_id), controls, generation_eos),
            add_bos=chosen.add_bos if vocabulary.add_bos is None else vocabulary.add_bos,
            pre_tokenizer=chosen.name,
            chat_template=template,
            warnings=(*warnings, *choice_warnings, *vocabulary.warnings),
        )

    @classmethod
    def from_hf_json(cls, path: Path) -> Tokenizer:
        """Use a tokenizer.json as written, with the tokenizer_config.json and generation_config.json beside it.

        Raises:
            FormatError: a file is damaged.
            UnsupportedError: the pipeline is not byte-level BPE.
        """
        return cls(**hf_tokenizer.load(path))

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_bos: put the begin-of-sequence token in front; None does what the model's file says. A text that already
                begins with it, as rendered chat templates may, does not get a second one.
            parse_special: control tokens written in the text become their ids; otherwise they are ordinary characters.

        Raises:
            RequestError: the text holds a lone surrogate, or the model has no begin-of-sequence token to add.
        """
        _check_encodable(text)
        if add_bos is None:
            add_bos = self.add_bos
        elif add_bos and self.bos_id is None:
            raise RequestError("add_bos: the model names no begin-of-sequence token")
        # One at a time: whether control tokens are matched is a switch of the shared pipeline, not an argument.
        with self._encode_lock:
            self._backend.encode_special_tokens = not parse_special
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, without control tokens. Half a character at the end is dropped.

        Raises:
            RequestError: a negative id.
        """
        return decode_bytes(self.token_bytes(token_id) for token_id in ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: nothing for control and unused tokens, and for ids that only pad the model.

        Raises:
            RequestError: a negative id.
        """
        if token_id < 0:
            raise RequestError(f"token id {token_id}: ids begin at 0")
        kind = self._types[token_id] if token_id < self.vocab_size else TokenType.UNUSED
        if kind in (TokenType.CONTROL, TokenType.UNUSED, TokenType.UNKNOWN):
            return b""
        text: str | None = self._backend.id_to_token(token_id)
        if text is None:
            return b""
        if kind == TokenType.NORMAL:
            return spelled_bytes(text)
        if kind == TokenType.BYTE and len(text) == 6 and text.startswith("<0x"):
            return _byte_of(text)
        return text.encode("utf-8")

    @functools.cached_property
    def max_token_chars(self) -> int:
        """No token stands for more characters of a text than this."""
        longest = max(len(self._backend.id_to_token(token_id) or "") for token_id in range(self.vocab_size))
        # NFC makes one character of up to four.
        return longest * (1 if self._backend.normalizer is None else 4)

    def token_text(self, token_id: int) -> str:
        """How to show a token to a person: control tokens by their text, half characters as U+FFFD.

        Raises:
            RequestError: a negative id.
        """
        data = self.token_bytes(token_id)
        if data:
            return data.decode("utf-8", errors="replace")
        text: str | None = self._backend.id_to_token(token_id) if token_id < self.vocab_size else None
        return f"<unused {token_id}>" if text is None else text

    @property
    def chat_template(self) -> str | None:
        """Its jinja2 source."""
        return self._chat_source

    @property
    def has_chat_template(self) -> bool:
        return self._chat_source is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation; encode it with `parse_special=True` and `add_bos=None`.

        Args:
            messages: each with `role` and `content`.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: more names for the template (`tools`, `enable_thinking`, …).

        Raises:
            RequestError: the model has no template, a message has the wrong shape, or the template fails.
        """
        if self._chat_source is None:
            raise RequestError("the model has no chat template: send it plain text (run --raw), not messages")
        if self._chat is None:
            self._chat = ChatTemplate(
                self._chat_source, bos_token=self._control_text(self.bos_id), eos_token=self._control_text(self.eos_id)
            )
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def _control_text(self, token_id: int | None) -> str:
        return "" if token_id is None else self._backend.id_to_token(token_id) or ""


def _choose(metadata: Mapping[str, object], num_tokens: int, source: str) -> tuple[PreTokenizer, tuple[str, ...]]:
    """The pre-tokenizer that the file names, or its architecture's with a warning."""
    name = metadata.get("tokenizer.ggml.pre")
    if isinstance(name, str):
        return pre_tokenizers.find(name, source=source), ()
    if name is not None:
        raise FormatError(f"{source}: tokenizer.ggml.pre: found {type(name).__name__}, expected a string")
    entry = pre_tokenizers.find_default(str(metadata.get("general.architecture", "")), num_tokens, source=source)
    return entry, (
        f"{source}: tokenizer.ggml.pre is missing; using {entry.name!r}, the architecture's usual one "
        "(another one: --pre-tokenizer NAME)",
    )


def _build_backend(vocabulary: Vocabulary, chosen: PreTokenizer) -> Any:
    vocab = _reachable(vocabulary) if chosen.ignore_merges else vocabulary.ids
    model = models.BPE(vocab=vocab, merges=vocabulary.merges, ignore_merges=chosen.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = chosen.pipeline()
    normalizer = chosen.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    # Matched in the text as written, before it is normalised; their texts are in the vocabulary already, so ids stay.
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in _texts(vocabulary, TokenType.CONTROL)]
    )
    backend.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in _texts(vocabulary, TokenType.USER_DEFINED)]
    )
    return backend


def _texts(vocabulary: Vocabulary, kind: TokenType) -> list[str]:
    return [token for token, found in zip(vocabulary.tokens, vocabulary.types, strict=True) if found == kind and token]


def _reachable(vocabulary: Vocabulary) -> dict[str, int]:
    """The vocabulary without unused tokens: where pieces are looked up as they stand, one of them could be hit."""
    unused = set(_texts(vocabulary, TokenType.UNUSED))
    for left, right in vocabulary.merges if unused else ():
        unused -= {left, right, left + right}
    return {token: token_id for token, token_id in vocabulary.ids.items() if token not in unused}


def _byte_of(text: str) -> bytes:
    """The byte of `<0xAB>`."""
    try:
        return bytes.fromhex(text[3:5])
    except ValueError:
        return text.encode("utf-8")


def _check_encodable(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text: character {error.start:,} is a lone surrogate (U+{ord(text[error.start]):04X}), not text; "
            "it comes from input that was no valid UTF-8 or UTF-16"
        ) from None
