"""From token ids to text as they come: only whole characters leave, and every one of them leaves.

Tokens are bytes. A character of UTF-8 may be spread over several tokens, so bytes wait until their character is
complete. Bytes that can never become a character turn into U+FFFD once real text follows them; at the end of a text
they are dropped, as is half a character: a limit on tokens cuts anywhere, and the reader should not see the cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

# A lone surrogate never comes out of valid UTF-8, so it can stand for "invalid bytes were here" without being
# confused with a U+FFFD that the text really contains.
_INVALID = "\udc80"
_HANDLER = "expertide.mark-invalid"


def _mark_invalid(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _INVALID, error.end


class Utf8Stream:
    """Bytes in, whole characters out; how the bytes are cut makes no difference to the text."""

    def __init__(self) -> None:
        codecs.register_error(_HANDLER, _mark_invalid)
        self._decoder = codecs.getincrementaldecoder("utf-8")(_HANDLER)
        self._num_invalid = 0  # invalid sequences seen since the last real character

    def push(self, data: bytes) -> str:
        """The characters that `data` completes."""
        text = self._decoder.decode(data)
        settled = text.rstrip(_INVALID)
        if not settled:
            self._num_invalid += len(text)
            return ""
        text_before, self._num_invalid = "\ufffd" * self._num_invalid, len(text) - len(settled)
        return text_before + settled.replace(_INVALID, "\ufffd")


def decode_bytes(pieces: Iterable[bytes]) -> str:
    """All of it at once; equal to what a stream of the same bytes gives."""
    return Utf8Stream().push(b"".join(pieces))


class HasTokenBytes(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """Text of a growing list of tokens, as it becomes certain. One per request; not for several threads at once.

    The concatenation of everything returned equals `Tokenizer.decode` of all ids pushed.
    """

    def __init__(self, tokenizer: HasTokenBytes) -> None:
        self._tokenizer = tokenizer
        self._stream = Utf8Stream()

    def push(self, token_id: int) -> str:
        """The characters that this token completes; empty while one is still half."""
        return self._stream.push(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """End of the text: always empty, since what is still incomplete is dropped. Ready for a new text."""
        self._stream = Utf8Stream()
        return ""
