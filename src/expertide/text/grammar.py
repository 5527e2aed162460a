"""Answers held to a JSON schema: which tokens may come next, by llguidance.

The view of the vocabulary that this needs is made at first use (0.3 s and 32 MiB for 100,000 tokens; `sizes` has the
formula) and shared by all answers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from expertide.errors import FormatError, RequestError

if TYPE_CHECKING:
    from expertide.text.tokenizer import Tokenizer

# Models that are held to JSON like to go on with white space for ever.
_OPTIONS = {"whitespace_pattern": r"[ \n]{0,16}"}


class JsonConstraint:
    """One answer's place in its grammar. Implements `engine.sampling.TokenConstraint`; one thread."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)

    def allowed(self, num_logits: int) -> NDArray[np.bool_]:
        """[num_logits]: what may come next; only the tokens that end an answer, once the JSON is complete.

        Raises:
            FormatError: the grammar has come to its own limits.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        mask = np.zeros(num_logits, dtype=np.bool_)
        # Logits past the vocabulary belong to no token.
        num_known = min(num_logits, self._vocab_size)
        mask[:num_known] = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[:num_known]
        return mask

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def fork(self) -> JsonConstraint:
        """The same place, for another answer."""
        return JsonConstraint(self._matcher.deep_copy(), self._vocab_size)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise FormatError(f"the answer cannot follow its JSON schema any further: {_first_line(self._matcher)}")


class Grammars:
    """Makes constraints for one tokenizer. Any thread may call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def json(self, schema: Mapping[str, Any]) -> JsonConstraint:
        """An answer that is JSON and follows a schema; {"type": "object"} is any object.

        Raises:
            RequestError: the schema is none, or uses what llguidance does not know.
        """
        from llguidance import LLMatcher

        vocabulary = self._opened()
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_OPTIONS)  # type: ignore[arg-type]
            matcher = LLMatcher(vocabulary, grammar, log_level=0)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"response_format: {str(error).splitlines()[0]}") from None
        if matcher.is_error():
            raise RequestError(f"response_format: the schema cannot be used: {_first_line(matcher)}")
        return JsonConstraint(matcher, self._tokenizer.vocab_size)

    def _opened(self) -> Any:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer)
            return self._vocabulary


def _first_line(matcher: Any) -> str:
    lines = str(matcher.get_error()).splitlines()
    return lines[0][:300] if lines else "unknown"


def _vocabulary(tokenizer: Tokenizer) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    ends = sorted(tokenizer.stop_ids)
    if not ends:
        raise RequestError("response_format: this model names no token that ends an answer")

    class Source:
        """What llguidance asks of a tokenizer."""

        eos_token_id = ends[0]
        bos_token_id = tokenizer.bos_id
        special_token_ids = tuple(token_id for token_id, data in enumerate(tokens) if not data)

        def __init__(self) -> None:
            # Tokens without bytes need a name that no text matches.
            self.tokens = [data or b"\xff<%d>" % token_id for token_id, data in enumerate(tokens)]

        def __call__(self, text: str | bytes) -> list[int]:
            if isinstance(text, bytes):
                text = text.decode("utf-8")
            return tokenizer.encode(text, add_bos=False, parse_special=False)

    wrapper = TokenizerWrapper(Source())
    return LLTokenizer(wrapper, n_vocab=tokenizer.vocab_size, eos_token=ends)
