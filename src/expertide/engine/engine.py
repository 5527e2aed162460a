"""One request at a time: prompt in chunks, then token by token, until something ends it.

    Engine.generate(prompt_ids, …) -> Generation        nothing is computed yet
        iterate it                                        first token after the prefill, then one per decode step
        .finish_reason                                    None while it runs; then "stop", "length", "abort" or "error"

A generation ends exactly once. A new one may start only when the one before has ended: both would write the one cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from expertide.engine.sampling import Sampler, SamplingParams, TokenConstraint, TokenLogprobs
from expertide.errors import ContextLengthError, RequestError
from expertide.models.trace import NO_LAYER

if TYPE_CHECKING:
    from torch import Tensor

    from expertide.models.architecture import Model, Phase
    from expertide.models.trace import Tracer

FinishReason = Literal["stop", "length", "abort", "error"]
# Called with (prompt tokens done, prompt tokens in all) after each chunk.
PrefillProgress = Callable[[int, int], None]
# 16 rows of a 102,400 entry vocabulary are 6.3 MiB of float32: small beside the workspace that was planned.
LOGIT_ROWS = 16


@dataclass(slots=True)
class Timings:
    """Seconds and counts of one request. `decode_tokens` excludes the first token, which prefill gives."""

    ttft_s: float = 0.0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0

    @property
    def prefill_tps(self) -> float:
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tps(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Natural log of a token's probability, and whether greedy decoding would have taken it."""

    logprob: float
    is_greedy: bool


class _StopAskedError(Exception):
    """`should_stop` said so in the middle of a forward pass; never leaves this file."""


class Generation:
    """One request under way; an iterator over its token ids.

    The id that ends an answer (one of `stop_ids`) is the last one it yields.

    Attributes:
        logprobs: one entry per token id, if they were asked for.
        prompt_logprobs: one entry per prompt token, if they were asked for; complete when the first token is there. The
            first token has none: nothing stands before it.
    """

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.finish_reason: FinishReason | None = None
        self.timings = Timings()
        self._steps: Generator[int, None, None] | None = None

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> int:
        if self._steps is None:
            raise StopIteration
        try:
            return next(self._steps)
        except StopIteration:
            self._steps = None
            raise
        except BaseException:
            self.finish("error")
            raise

    def finish(self, reason: FinishReason) -> None:
        """End it now (a stop text was met, the caller has had enough); without effect when it has ended already."""
        self.finish_reason = self.finish_reason or reason
        if self._steps is not None:
            steps, self._steps = self._steps, None
            steps.close()


class Engine:
    """Owns the one sequence state and drives the model. Not thread-safe; `LLM` holds the lock."""

    def __init__(self, model: Model, *, chunk: int, context: int, tracer: Tracer | None = None) -> None:
        """Args:
        chunk: prompt tokens per forward pass.
        context: most tokens of prompt and answer; the memory for all of them is taken here.
        """
        self.chunk = chunk
        self.context = context
        self._model = model
        self._tracer = tracer
        self._cache = model.new_cache(context)
        # Tokens whose state came from whole prefill chunks and still lies in the cache, from position 0.
        self._chunked_ids: list[int] = []
        self._running: Generation | None = None

    @property
    def kv_bytes(self) -> int:
        """Memory of the sequence state, filled or not."""
        return self._cache.nbytes

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        stop_ids: Collection[int] = (),
        should_stop: Callable[[], bool] = lambda: False,
        on_prefill: PrefillProgress | None = None,
        keep_prefix: bool = False,
        constraint: TokenConstraint | None = None,
    ) -> Generation:
        """Begin a request.

        Args:
            stop_ids: token ids that end the answer.
            should_stop: asked before each layer of each step; True ends the generation with "abort".
            keep_prefix: reuse state that an earlier prompt left for the same first tokens. Only whole chunks are
                reused: those were computed from the same tokens with the same shapes, so the answer has the same bits.
                With `prompt_logprobs` every prompt token is computed all the same.
            constraint: says at each place which tokens may be drawn.

        Raises:
            RequestError: the prompt is empty or longer than the context, or another generation still runs.
        """
        self.check_prompt(prompt_ids)
        if self._running is not None and self._running.finish_reason is None:
            raise RequestError("a generation is still running; read it to its end or close it first")
        generation = Generation(tuple(prompt_ids))
        generation._steps = self._steps(
            generation, params, frozenset(stop_ids), should_stop, on_prefill,
            keep_prefix and params.prompt_logprobs is None, constraint,
        )  # fmt: skip
        self._running = generation
        return generation

    def score(self, context_ids: Sequence[int], continuation_ids: Sequence[int]) -> list[TokenScore]:
        """How likely each continuation token is, given all tokens before it.

        Raises:
            RequestError: an empty part, or both together longer than the context.
        """
        if not context_ids or not continuation_ids:
            raise RequestError("log-likelihood needs at least one token of context and one of continuation")
        if self._running is not None and self._running.finish_reason is None:
            raise RequestError("a generation is still running; read it to its end or close it first")
        ids = [*context_ids, *continuation_ids]
        self.check_prompt(ids)
        self._rewind(0)
        scores: list[TokenScore] = []
        first = len(context_ids) - 1  # this token's logits give the first continuation token
        for start in range(0, len(ids) - 1, self.chunk):
            stop = min(start + self.chunk, len(ids) - 1)
            hidden = self._forward(ids[start:stop], "prefill")
            for row in range(max(start, first), stop, LOGIT_ROWS):
                end = min(row + LOGIT_ROWS, stop)
                scores.extend(self._scores(hidden[row - start : end - start], ids[row + 1 : end + 1]))
        return scores

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Refuse a prompt that could never run.

        Raises:
            RequestError: no tokens, or more than the context holds.
        """
        if not ids:
            raise RequestError("the prompt is empty: it has no tokens")
        if len(ids) > self.context:
            raise ContextLengthError(
                f"the prompt has {len(ids):,} tokens, the context is {self.context:,} (shorten it)",
                prompt_tokens=len(ids),
                context=self.context,
            )

    def _steps(
        self,
        generation: Generation,
        params: SamplingParams,
        stop_ids: frozenset[int],
        should_stop: Callable[[], bool],
        on_prefill: PrefillProgress | None,
        keep_prefix: bool,
        constraint: TokenConstraint | None,
    ) -> Generator[int, None, None]:
        def before_layer() -> None:
            if should_stop():
                raise _StopAskedError

        timings = generation.timings
        begin = time.perf_counter()
        sampler = Sampler(params, generation.prompt_ids, constraint)
        try:
            last = self._prefill(generation, before_layer, on_prefill, keep_prefix, params.prompt_logprobs)
            token_id = self._pick(generation, sampler, last, params.logprobs)
            # TTFT counts from the first `next`, prefill and the first draw included.
            timings.ttft_s = time.perf_counter() - begin
            while True:
                generation.token_ids.append(token_id)
                if token_id in stop_ids:
                    generation.finish_reason = "stop"
                elif len(generation.token_ids) >= params.max_tokens or self._cache.length >= self.context:
                    generation.finish_reason = "length"
                yield token_id
                if generation.finish_reason is not None:
                    return
                step = time.perf_counter()
                hidden = self._forward([token_id], "decode", before_layer)
                token_id = self._pick(generation, sampler, hidden, params.logprobs)
                timings.decode_s += time.perf_counter() - step
                timings.decode_tokens += 1
        except _StopAskedError:
            generation.finish_reason = "abort"

    def _prefill(
        self,
        generation: Generation,
        before_layer: Callable[[], None],
        on_prefill: PrefillProgress | None,
        keep_prefix: bool,
        num_top: int | None,
    ) -> Tensor:
        """Run the prompt; the last token's state [1, …]."""
        ids = generation.prompt_ids
        begin = time.perf_counter()
        self._rewind(self._common_chunks(ids) if keep_prefix else 0)
        first = self._cache.length
        hidden: Tensor | None = None
        for start in range(first, len(ids), self.chunk):
            part = list(ids[start : start + self.chunk])
            hidden = self._forward(part, "prefill", before_layer)
            if len(part) == self.chunk:
                self._chunked_ids.extend(part)
            if num_top is not None:
                self._add_prompt_logprobs(generation, hidden, start, num_top, before_layer)
            generation.timings.prefill_tokens += len(part)
            generation.timings.prefill_s = time.perf_counter() - begin
            if on_prefill is not None:
                on_prefill(start + len(part), len(ids))
        assert hidden is not None
        return hidden[-1:]

    def _add_prompt_logprobs(
        self, generation: Generation, hidden: Tensor, start: int, num_top: int, before_rows: Callable[[], None]
    ) -> None:
        """Of the tokens that follow those at positions `start` …; the last one's are what the answer is drawn from."""
        ids, found = generation.prompt_ids, generation.prompt_logprobs
        if not found:
            found.append(None)
        last = min(len(hidden), len(ids) - 1 - start)
        for row in range(0, last, LOGIT_ROWS):
            before_rows()
            with torch.inference_mode():
                logits = self._model.logits(hidden[row : min(row + LOGIT_ROWS, last)]).numpy()
            for offset, row_V in enumerate(logits):
                found.append(TokenLogprobs.of(row_V, ids[start + row + offset + 1], num_top))

    def _common_chunks(self, ids: Sequence[int]) -> int:
        """Leading tokens whose state can be reused: whole chunks, and never the last prompt token."""
        # The last prompt token is computed even on a full hit: its logits are what we sample from.
        limit = min(len(self._chunked_ids), len(ids) - 1)
        same = 0
        while same < limit and self._chunked_ids[same] == ids[same]:
            same += 1
        return same // self.chunk * self.chunk

    def _rewind(self, length: int) -> None:
        self._cache.truncate(length)
        del self._chunked_ids[length:]

    def _forward(self, ids: list[int], phase: Phase, before_layer: Callable[[], None] | None = None) -> Tensor:
        with torch.inference_mode():
            tokens = torch.tensor(ids, dtype=torch.int64)
            return self._model.forward(tokens, self._cache, phase, self._tracer, before_layer=before_layer)

    def _pick(self, generation: Generation, sampler: Sampler, hidden: Tensor, num_top: int | None) -> int:
        with torch.inference_mode():
            logits = self._model.logits(hidden[-1:])
        if self._tracer is not None:
            self._tracer.record(NO_LAYER, "logits", logits)
        logits_V = logits[0].numpy()
        token_id = sampler.pick(logits_V)
        if num_top is not None:
            generation.logprobs.append(TokenLogprobs.of(logits_V, token_id, num_top))
        return token_id

    def _scores(self, hidden: Tensor, wanted_ids: list[int]) -> list[TokenScore]:
        """Of wanted_ids[i] after everything up to row i; the softmax runs in float64."""
        with torch.inference_mode():
            logits = self._model.logits(hidden)
            logs = torch.log_softmax(logits.to(torch.float64), dim=-1)
            chosen = logs.gather(1, torch.tensor(wanted_ids, dtype=torch.int64)[:, None])[:, 0]
            # As the sampler chooses: of equal logits the lowest id.
            greedy = logits.numpy().argmax(axis=-1)
        return [
            TokenScore(float(logprob), int(best) == wanted)
            for logprob, best, wanted in zip(chosen, greedy, wanted_ids, strict=True)
        ]
