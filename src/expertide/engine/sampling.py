"""From logits to the next token: numpy only, one `Sampler` per request.

Order: logit bias, repetition penalty, presence and frequency penalties, constraint, temperature, top-k, top-p, min-p,
draw. At temperature 0 the largest logit wins; of equal ones the lowest id. The draw walks the kept tokens from likely
to unlikely (equal ones by id) with one number of a seeded PCG64, so a seed gives the same tokens on every machine whose
logits agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from expertide.errors import FormatError, RequestError
from expertide.options import option

MAX_TOKENS = 1 << 24
MAX_STOPS = 64
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How one answer is chosen and when it ends.

    `ignore_eos` goes on past the tokens that end an answer, for measurements of a fixed length. `logprobs` and
    `prompt_logprobs` say how many of the likeliest tokens are reported at each place of the answer and of the prompt,
    beside the one that stands there; None reports nothing, 0 only the latter.

    Raises:
        RequestError: a value out of its range; the message names the field.
    """

    max_tokens: int = option(256, "Most tokens of the answer.", metavar="N", flags=("-n", "--max-tokens"))
    temperature: float = option(
        0.0, "0 always takes the likeliest token (greedy); higher draws more freely.", metavar="X"
    )
    top_k: int = option(0, "Draw among the K likeliest tokens; 0 keeps all.", metavar="K")
    top_p: float = option(1.0, "Draw among the likeliest tokens that together hold this probability.", metavar="P")
    min_p: float = option(0.0, "Drop tokens below this share of the likeliest one's probability.", metavar="P")
    repetition_penalty: float = option(
        1.0, "Above 1 makes tokens of the prompt and the answer less likely to come again.", metavar="X"
    )
    presence_penalty: float = option(0.0, "Subtracted once from the logit of a token already answered.", metavar="X")
    frequency_penalty: float = option(0.0, "Subtracted for each time a token was already answered.", metavar="X")
    seed: int | None = option(None, "Makes drawn answers repeatable.", metavar="S")
    stop: tuple[str, ...] = option((), "End the answer before this text; may be given again.", metavar="TEXT")
    logit_bias: Mapping[int, float] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif self.stop is None or isinstance(self.stop, list):
            object.__setattr__(self, "stop", tuple(self.stop or ()))
        elif not isinstance(self.stop, tuple):
            raise RequestError(f"stop: got {type(self.stop).__name__}, expected a text or a list of texts")
        if len(self.stop) > MAX_STOPS or not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError(f"stop: expected at most {MAX_STOPS} texts, none of them empty")
        _whole("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _number("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, 0, MAX_TOKENS)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, (1 << 64) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos: got {self.ignore_eos!r}, expected True or False")
        if not isinstance(self.logit_bias, Mapping | None):
            raise RequestError(f"logit_bias: got {type(self.logit_bias).__name__}, expected a mapping of token ids")
        for token_id, bias in (self.logit_bias or {}).items():
            _whole("logit_bias token id", token_id, 0, MAX_TOKENS)
            _number(f"logit_bias of token {token_id}", bias, -1e6, 1e6)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was where it stands, and which ones were likeliest there.

    Natural logs of the model's own distribution: before bias, penalties, temperature and filters.

    Attributes:
        top: (token id, log of its probability), likeliest first, equal ones by id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, logits: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
        """Args:
        logits: [V], float32; not modified. The softmax runs in float64.
        """
        scores = logits.astype(np.float64)
        largest = scores.max()
        log_sum = float(largest + np.log(np.exp(scores - largest).sum()))
        # `top_k` 0 would mean all.
        ids = _likeliest_first(scores, num_top)[:num_top] if num_top else ()
        return cls(
            int(token_id), float(scores[token_id]) - log_sum, tuple((int(i), float(scores[i]) - log_sum) for i in ids)
        )


class TokenConstraint(Protocol):
    """Says which tokens may come next (a grammar). One per answer."""

    def allowed(self, num_logits: int) -> NDArray[np.bool_]:
        """[num_logits]; at least one is True."""
        ...

    def accept(self, token_id: int) -> None:
        """This token was taken."""
        ...


class Sampler:
    """Chooses the tokens of one request and remembers those it chose."""

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], constraint: TokenConstraint | None = None
    ) -> None:
        self._params = params
        self._constraint = constraint
        self._seen = set(prompt_ids)
        self._counts: dict[int, int] = {}
        self._random = np.random.Generator(np.random.PCG64(params.seed))

    def pick(self, logits: NDArray[np.float32]) -> int:
        """The next token id.

        Args:
            logits: [V], float32; not modified.

        Raises:
            FormatError: a logit is not a finite number: damaged weights, never something to draw from.
            RequestError: logit_bias names a token that the vocabulary does not have.
        """
        # Sums of finite float32 stay finite in float64: one pass instead of a boolean array.
        if not math.isfinite(float(np.sum(logits, dtype=np.float64))):
            raise FormatError("the model's logits are not finite numbers; the file's weights may be damaged")
        scores = self._adjusted(logits)
        if self._constraint is not None:
            scores = np.where(self._constraint.allowed(len(scores)), scores, -np.inf)
        token_id = int(np.argmax(scores)) if self._params.is_greedy else self._draw(scores)
        if self._constraint is not None:
            self._constraint.accept(token_id)
        self._seen.add(token_id)
        self._counts[token_id] = self._counts.get(token_id, 0) + 1
        return token_id

    def _adjusted(self, logits: NDArray[np.float32]) -> NDArray[np.float64] | NDArray[np.float32]:
        params = self._params
        has_counts = params.presence_penalty != 0 or params.frequency_penalty != 0
        if params.logit_bias is None and params.repetition_penalty == 1 and not has_counts:
            return logits
        scores = logits.astype(np.float64)
        for token_id, bias in (params.logit_bias or {}).items():
            if token_id >= len(scores):
                raise RequestError(f"logit_bias: token {token_id:,} is outside the vocabulary of {len(scores):,}")
            scores[token_id] += bias
        if params.repetition_penalty != 1 and self._seen:
            ids = np.fromiter(self._seen, dtype=np.int64)
            seen = scores[ids]
            scores[ids] = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
        if has_counts and self._counts:
            ids = np.fromiter(self._counts.keys(), dtype=np.int64)
            counts = np.fromiter(self._counts.values(), dtype=np.float64)
            scores[ids] -= params.presence_penalty + params.frequency_penalty * counts
        return scores

    def _draw(self, scores: NDArray[np.float64] | NDArray[np.float32]) -> int:
        params = self._params
        order = _likeliest_first(scores, params.top_k)
        kept = scores[order].astype(np.float64)
        # Subtract the largest before dividing: a tiny temperature then gives -inf and weight 0, never inf - inf.
        with np.errstate(over="ignore"):
            weights = np.exp((kept - kept[0]) / params.temperature)
        probabilities = weights / weights.sum()
        keep = len(order)
        if params.top_p < 1:
            # The token that crosses the threshold is kept, so at least one always is.
            keep = int(np.searchsorted(np.cumsum(probabilities), params.top_p)) + 1
        if params.min_p > 0:
            keep = min(keep, int(np.count_nonzero(probabilities >= params.min_p * probabilities[0])))
        cumulative = np.cumsum(probabilities[:keep])
        place = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        return int(order[min(place, len(cumulative) - 1)])


def _likeliest_first(scores: NDArray[np.float64] | NDArray[np.float32], top_k: int) -> NDArray[np.int64]:
    """Token ids from the highest score down, equal ones by id; the first `top_k` of them when it is not 0."""
    if 0 < top_k < len(scores):
        # A partition first: sorting 100,000 scores for 40 of them would cost milliseconds a token.
        threshold = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
        candidates = np.flatnonzero(scores >= threshold)
        order = candidates[np.argsort(-scores[candidates], kind="stable")]
        return order[:top_k]
    return np.argsort(-scores, kind="stable")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name}: got {value!r}, expected a whole number from {low:,} to {high:,}")


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # The comparisons refuse NaN too, and do not fail on whole numbers beyond every float.
    if not is_number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        bound = f"above {low:g}" if open_low else f"from {low:g}"
        raise RequestError(f"{name}: got {value!r}, expected a number {bound} to {high:g}")
