"""The Python door: text in, text out.

    llm = LLM("model.gguf", ram="12GiB")
    out = llm.generate("…", SamplingParams(max_tokens=64))       .text .token_ids .finish_reason .stats
    for piece in llm.stream("…"): …
    llm.chat([{"role": "user", "content": "…"}]);  llm.loglikelihood("context", "continuation");  llm.close()

Only this floor and those above know both text and engine. Any thread may call; requests run one after another.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import psutil

from expertide.engine.interrupt import Interrupt
from expertide.engine.sampling import SamplingParams, TokenLogprobs
from expertide.errors import ContextLengthError, RequestError
from expertide.options import Options
from expertide.prepare import THREAD_BYTES, Prepared, prepare, with_measured_interpreter
from expertide.settings import Settings

if TYPE_CHECKING:
    from expertide.engine.engine import FinishReason, Generation, TokenScore
    from expertide.engine.sampling import TokenConstraint
    from expertide.loading import Runtime
    from expertide.text.grammar import Grammars
    from expertide.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
# Called with (what, done, total) while something long runs: "loading" in bytes, "prefill" in tokens.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Output:
    """One answer.

    Attributes:
        text: the answer, without stop text and without special tokens.
        token_ids: what was drawn; a token that ended the answer is the last one.
        finish_reason: "stop" (a stop token or text), "length" (max_tokens or the context), "abort" (Ctrl-C).
        stats: the JSON of `expertide run --json`: timings, memory, experts, placement; bytes and seconds.
        logprobs: one entry per token id, if `SamplingParams.logprobs` asked for them; else empty.
        prompt_logprobs: the same of the prompt, whose first token has none.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    stats: dict[str, Any] = field(repr=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list, repr=False)


@dataclass(frozen=True, slots=True)
class StreamStep:
    """What one token, or the end of the answer, brought.

    Attributes:
        text: what became certain; often "" (half a character, the beginning of a stop text, a token without text).
        token_id: None at the end, when only held-back text is left.
        logprobs: of this token, if they were asked for.
    """

    text: str
    token_id: int | None
    logprobs: TokenLogprobs | None


class LLM:
    """A loaded model. `close()`, or leaving a `with` block, gives everything back.

    Raises (from the constructor):
        FormatError, UnsupportedError, StorageError: the file.
        BudgetError: it does not fit; nothing was read.
        RequestError: an option out of range or without effect.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        ram: str | int = "auto",
        vram: str | int = "auto",
        expert_cache: str | int = "auto",
        device: str = "auto",
        context: int | None = None,
        threads: int | None = None,
        prefill_chunk: int | None = None,
        cache_policy: str = "auto",
        startup_fill: str = "auto",
        prefill_prefetch: bool = True,
        predictive_prefetch: str = "auto",
        pre_tokenizer: str | None = None,
        progress: Progress | None = None,
        settings: Settings | None = None,
        before_load: Callable[[LLM], None] | None = None,
        server_bytes: int = 0,
    ) -> None:
        """Args:
        model: a .gguf file (any part of a split set), a directory, or "demo".
        progress: called while weights load and while long prompts are computed.
        settings: the diagnosis variables; None reads the environment.
        before_load: called when the tokenizer is there and no weight is yet; what it raises ends the load. `encode`,
            `chat_prompt_ids` and `check_prompt` work in it.
        server_bytes: what other processes of this program take of `ram`.

        The other arguments are the fields of `Options`.
        """
        options = Options(
            ram=ram, vram=vram, expert_cache=expert_cache, device=device, context=context, threads=threads,
            prefill_chunk=prefill_chunk, cache_policy=cache_policy, startup_fill=startup_fill,
            prefill_prefetch=prefill_prefetch, predictive_prefetch=predictive_prefetch,
            pre_tokenizer=pre_tokenizer,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._holder: int | None = None
        # Weak: a stream that its caller has dropped must be free to end itself.
        self._active: weakref.ref[Stream] | None = None
        self._runtime: Runtime | None = None
        self._progress = progress
        self.interrupt = Interrupt()
        begin = time.perf_counter()
        self.prepared: Prepared = prepare(model, options, settings, server_bytes=server_bytes)
        self.tokenizer = self._make_tokenizer(options)
        if before_load is not None:
            before_load(self)

        # Torch loads here, after every refusal that needs no torch.
        from expertide.loading import load

        self.prepared = with_measured_interpreter(self.prepared, self._interpreter_bytes())
        self._runtime = load(self.prepared, progress)
        self.load_s = time.perf_counter() - begin

    @classmethod
    def from_options(
        cls,
        model: str | Path,
        options: Options,
        progress: Progress | None = None,
        before_load: Callable[[LLM], None] | None = None,
        server_bytes: int = 0,
    ) -> LLM:
        """The same from an `Options` object, as the command line has it."""
        values = {name: getattr(options, name) for name in Options.__slots__}
        return cls(model, progress=progress, before_load=before_load, server_bytes=server_bytes, **values)

    # A str is a sequence of str too; the first overload is the one that counts then.
    @overload
    def generate(self, prompts: Prompt, params: SamplingParams | None = None) -> Output: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[Output]: ...
    def generate(self, prompts: Any, params: SamplingParams | None = None) -> Output | list[Output]:
        """Answer one prompt, or several one after another.

        Args:
            prompts: text, token ids, or a list of either. Text gets the begin-of-sequence token that the model wants
                and no chat template; token ids are used as they are. An empty text is answered from that token alone.

        A Ctrl-C ends the answer under way, and those after it, with finish_reason "abort" and the text so far.

        Raises:
            RequestError: a prompt without a single token, or with more than the context holds.
            StorageError: the disk failed; the next call works again.
        """
        if _is_one_prompt(prompts):
            return self._finish(self.stream(prompts, params))
        with self.interrupt:
            self.interrupt.clear()
            return [self._finish(self.stream(prompt, params)) for prompt in prompts]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        keep_prefix: bool = False,
        should_stop: Callable[[], bool] | None = None,
        constraint: TokenConstraint | None = None,
    ) -> Stream:
        """Answer piece by piece; the pieces together are the text that `generate` gives.

        Args:
            keep_prefix: reuse what an earlier prompt with the same beginning left in the KV cache.
            should_stop: asked before each layer of each token; True ends the answer with finish_reason "abort". By
                default a Ctrl-C does.
            constraint: holds the answer to a grammar (`grammars.json(schema)`); one per answer.

        Nothing is computed before the first piece is asked for. Requests of other threads wait until this one is read
        to its end or closed.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params: got {type(params).__name__}, expected SamplingParams")
        ids = self._prompt_ids(prompt)
        self._opened()
        self.check_prompt(ids)
        return Stream(self, ids, params, keep_prefix, should_stop, constraint)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Output:
        """Answer a conversation, rendered by the model's own chat template.

        Args:
            messages: {"role": "system"|"user"|"assistant", "content": "…"}.

        Raises:
            RequestError: also for no messages, a model without a chat template, or a message that the template refuses.
        """
        return self._finish(self.stream_chat(messages, params))

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, keep_prefix: bool = False
    ) -> Stream:
        """`chat`, piece by piece."""
        return self.stream(self.chat_prompt_ids(messages), params, keep_prefix=keep_prefix)

    def chat_prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation as the model wants it, ready to be answered."""
        return self.encode(self.chat_prompt_text(messages))

    def chat_prompt_text(self, messages: Sequence[Message], **variables: Any) -> str:
        """The same as text, for `encode`.

        Args:
            variables: more names for the model's chat template, such as `tools` or `enable_thinking`.
        """
        if not messages:
            raise RequestError(f"messages: found {messages!r}, expected at least one message")
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens in it included, with the begin-of-sequence token that the model wants.

        Raises:
            RequestError: no text, or so long that the context could not hold it however it is cut: such a text is not
                even cut, which would take 200 bytes of memory for each of its own.
        """
        context = self.prepared.plan.context
        # Finding the longest token takes a look at each of them, so ordinary prompts go past it.
        if len(text) > 16 * context and len(text) > context * self.tokenizer.max_token_chars:
            raise RequestError(
                f"the prompt has {len(text):,} characters, the context is {context:,} tokens of at most "
                f"{self.tokenizer.max_token_chars} ({self._too_long_hint()})"
            )
        return self.tokenizer.encode(text)

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Refuse a prompt that could never run.

        Raises:
            RequestError: no tokens, or more than the context holds.
        """
        context = self.prepared.plan.context
        if not ids:
            raise RequestError("the prompt is empty: it has no tokens")
        if len(ids) > context:
            raise ContextLengthError(
                f"the prompt has {len(ids):,} tokens, the context is {context:,} ({self._too_long_hint()})",
                prompt_tokens=len(ids),
                context=context,
            )

    def loglikelihood(self, context: str, continuation: str) -> float:
        """Natural log of the probability that `continuation` follows `context`.

        An empty context means: after the begin-of-sequence token.

        Raises:
            RequestError: an empty continuation, or both together longer than the context window.
        """
        if not isinstance(context, str) or not isinstance(continuation, str):
            found = f"{type(context).__name__} and {type(continuation).__name__}"
            raise RequestError(f"loglikelihood: got {found}, expected two texts")
        if not continuation:
            raise RequestError("loglikelihood: the continuation is empty, expected at least one character")
        context_ids = self.encode(context)
        # Tokens are cut from the joined text, as they would be in a prompt; the border falls where the context's end.
        ids = self.encode(context + continuation)
        split = min(len(context_ids), len(ids) - 1)
        return sum(self.token_logprobs(ids[:split], ids[split:]))

    def token_logprobs(self, context_ids: Sequence[int], continuation_ids: Sequence[int]) -> list[float]:
        """Natural log of each continuation token's probability, given all tokens before it."""
        return [score.logprob for score in self.score(context_ids, continuation_ids)]

    def score(self, context_ids: Sequence[int], continuation_ids: Sequence[int]) -> list[TokenScore]:
        """The same, and for each token whether greedy decoding would have taken it.

        Raises:
            RequestError: an empty part, an unknown token id, or both together longer than the context window.
        """
        self.check_ids(context_ids)
        self.check_ids(continuation_ids)
        if context_ids and continuation_ids:
            self.check_prompt([*context_ids, *continuation_ids])
        runtime = self._acquire()
        try:
            runtime.set_activity("prefill")
            return runtime.engine.score(context_ids, continuation_ids)
        finally:
            runtime.set_activity("idle")
            self._release()

    def wait_for_fill(self, timeout_s: float | None = None) -> bool:
        """Wait until the expert cache is as full as the start-up fill makes it; False when the time is over first."""
        return self._opened().wait_for_fill(timeout_s)

    def set_predictive_prefetch(self, kind: str) -> None:
        """Change the option of that name for the answers that follow: "off", "last", "average" or "router".

        Raises:
            RequestError: this model's routers cannot be asked ahead of time, or it has no routed experts.
        """
        runtime = self._acquire()
        try:
            runtime.set_prediction(kind)
        finally:
            self._release()

    def forget_experts(self) -> None:
        """Evict every routed expert: the next answer begins cold, as for measuring."""
        runtime = self._acquire()
        try:
            runtime.forget_experts()
        finally:
            self._release()

    def memory(self) -> dict[str, Any]:
        """The "memory" object of the statistics, now."""
        return self._opened().memory()

    def placement(self) -> dict[str, Any]:
        """The "placement" object of the statistics."""
        return self._opened().placement()

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Makes constraints for `stream`."""
        from expertide.text.grammar import Grammars

        return Grammars(self.tokenizer)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences worth telling the user about the file, the machine and the options."""
        return (*self.prepared.warnings, *self.tokenizer.warnings, *self._opened().warnings)

    def close(self) -> None:
        """Give all memory, threads and files back; ends a stream of this thread. Without effect the second time."""
        if self._runtime is None:
            return
        if self._holder == threading.get_ident() and self._active is not None and (stream := self._active()):
            stream.close()
        with self._lock:
            runtime, self._runtime = self._runtime, None
            if runtime is not None:
                runtime.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _finish(self, stream: Stream) -> Output:
        for _ in stream:
            pass
        return stream.output

    def _make_tokenizer(self, options: Options) -> Tokenizer:
        from expertide.text.tokenizer import Tokenizer

        return Tokenizer.from_files(self.prepared.files, pre_tokenizer=options.pre_tokenizer)

    def _interpreter_bytes(self) -> int:
        """What the process takes before the first weight, without the tokenizer; threads are still to come."""
        resident = int(psutil.Process().memory_info().rss)
        return resident - self.prepared.plan.tokenizer_bytes + self.prepared.num_threads * THREAD_BYTES

    def _too_long_hint(self) -> str:
        if self.prepared.plan.context < self.prepared.needs.max_context:
            return "shorten it, or raise --context"
        return "the model's own limit; shorten it"

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        self.check_ids(prompt)
        return list(prompt)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuse what is no list of this model's token ids.

        Raises:
            RequestError: not a sequence of whole numbers, or one outside the vocabulary.
        """
        vocab_size = self.prepared.architecture.config.vocab_size
        # Bytes are a sequence of whole numbers too, but whoever passes them means text.
        if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Sequence):
            raise RequestError(f"prompt: got {type(ids).__name__}, expected text or a sequence of token ids")
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise RequestError(f"token id {token_id!r}: expected a whole number from 0 to {vocab_size - 1:,}")

    def _opened(self) -> Runtime:
        if self._runtime is None:
            raise RequestError("this LLM is closed")
        return self._runtime

    def _acquire(self) -> Runtime:
        """Take the one place at the engine; waits for other threads."""
        if self._holder == threading.get_ident():
            raise RequestError("a stream of this thread is still open; read it to its end or close it first")
        self._lock.acquire()
        self._holder = threading.get_ident()
        try:
            return self._opened()
        except RequestError:
            self._release()
            raise

    def _release(self) -> None:
        self._holder = None
        self._lock.release()


class Stream:
    """An answer under way: an iterator over pieces of text. `output` is complete once it has ended."""

    def __init__(
        self,
        llm: LLM,
        prompt_ids: list[int],
        params: SamplingParams,
        keep_prefix: bool,
        should_stop: Callable[[], bool] | None,
        constraint: TokenConstraint | None,
    ) -> None:
        self.prompt_token_ids = prompt_ids
        self._llm = llm
        self._answer = _Answer(llm, prompt_ids, params, keep_prefix, should_stop, constraint)
        self._pieces: Generator[StreamStep, None, None] | None = self._answer.steps(weakref.ref(self))

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        while (step := self.next_step()) is not None:
            if step.text:
                return step.text
        raise StopIteration

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """One entry per prompt token, if they were asked for; complete with the first step."""
        return self._answer.prompt_logprobs

    def next_step(self) -> StreamStep | None:
        """Compute one more token, whether it brings text or not; None when the answer has ended."""
        pieces = self._pieces
        if pieces is None:
            return None
        if inspect.getgeneratorstate(pieces) == inspect.GEN_RUNNING:
            raise RequestError("this stream is being read already; one thread at a time")
        with self._llm.interrupt:
            try:
                return next(pieces, None)
            finally:
                # Another thread has closed this stream while a token was computed.
                if self._pieces is None:
                    pieces.close()

    @property
    def output(self) -> Output:
        """The whole answer.

        Raises:
            RequestError: the answer has not ended yet, or failed.
        """
        if self._answer.output is None:
            raise RequestError("this answer has not ended; read the stream to its end or close it")
        return self._answer.output

    def close(self) -> None:
        """End the answer now, with finish_reason "abort" unless it has ended already.

        While another thread reads it, the answer ends there with the token under way.
        """
        pieces, self._pieces = self._pieces, None
        if pieces is not None and inspect.getgeneratorstate(pieces) != inspect.GEN_RUNNING:
            pieces.close()

    def __del__(self) -> None:
        # A stream that was dropped half-read must not keep other threads waiting for ever.
        self.close()


class _Answer:
    """The work behind a `Stream`. It does not know the stream: one that is dropped must end at once, not when the
    garbage collector finds a cycle."""

    def __init__(
        self,
        llm: LLM,
        prompt_ids: list[int],
        params: SamplingParams,
        keep_prefix: bool,
        should_stop: Callable[[], bool] | None,
        constraint: TokenConstraint | None,
    ) -> None:
        self._constraint = constraint
        self.output: Output | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self._should_stop = llm.interrupt if should_stop is None else should_stop
        self._llm = llm
        self._prompt_ids = prompt_ids
        self._params = params
        self._keep_prefix = keep_prefix

    def steps(self, stream: weakref.ref[Stream]) -> Generator[StreamStep, None, None]:
        """Take the place at the engine, compute, give the place back."""
        llm = self._llm
        llm.interrupt.clear()
        runtime = llm._acquire()
        llm._active = stream
        try:
            runtime.set_activity("prefill")
            yield from self._steps_of(runtime)
        finally:
            runtime.set_activity("idle")
            llm._active = None
            llm._release()

    def _steps_of(self, runtime: Runtime) -> Iterator[StreamStep]:
        from expertide.text.detokenizer import IncrementalDetokenizer
        from expertide.text.stops import StopMatcher

        llm, params = self._llm, self._params
        begin = time.perf_counter()
        before = runtime.expert_stats()
        detokenizer, matcher = IncrementalDetokenizer(llm.tokenizer), StopMatcher(params.stop)
        stop_ids: frozenset[int] = frozenset() if params.ignore_eos else llm.tokenizer.stop_ids
        progress = llm._progress
        generation = runtime.engine.generate(
            self._prompt_ids,
            params,
            stop_ids=stop_ids,
            should_stop=self._should_stop,
            on_prefill=None if progress is None else lambda done, total: progress("prefill", done, total),
            keep_prefix=self._keep_prefix,
            constraint=self._constraint,
        )
        self.prompt_logprobs = generation.prompt_logprobs
        shown: list[str] = []
        ttft_s = 0.0
        try:
            for token_id in generation:
                ttft_s = ttft_s or time.perf_counter() - begin
                piece = "" if token_id in stop_ids else detokenizer.push(token_id)
                text, is_stopped = matcher.push(piece)
                if is_stopped:
                    generation.finish("stop")
                shown.append(text)
                yield StreamStep(text, token_id, generation.logprobs[-1] if generation.logprobs else None)
            # A tail that might have become a stop text no longer can; half a character at the end is dropped.
            tail = detokenizer.flush()
            text = matcher.push(tail)[0] + matcher.flush()
            if text:
                shown.append(text)
                yield StreamStep(text, None, None)
        finally:
            generation.finish("abort")
            if generation.finish_reason != "error":
                self.output = self._make_output(runtime, generation, "".join(shown), before, ttft_s)

    def _make_output(self, runtime: Runtime, generation: Generation, text: str, before: Any, ttft_s: float) -> Output:
        from expertide import __version__

        timings = generation.timings
        assert generation.finish_reason is not None
        stats = {
            "model": self._llm.prepared.name,
            "text": text,
            "token_ids": list(generation.token_ids),
            "prompt_token_ids": list(generation.prompt_ids),
            "finish_reason": generation.finish_reason,
            "timings": {
                "load_s": self._llm.load_s,
                "ttft_s": ttft_s,
                "prefill_tokens": timings.prefill_tokens,
                "prefill_s": timings.prefill_s,
                "prefill_tps": timings.prefill_tps,
                "decode_tokens": timings.decode_tokens,
                "decode_s": timings.decode_s,
                "decode_tps": timings.decode_tps,
            },
            "memory": runtime.memory(),
            "experts": runtime.expert_stats_since(before),
            "placement": runtime.placement(),
            "version": __version__,
        }
        return Output(
            text,
            list(generation.token_ids),
            list(generation.prompt_ids),
            generation.finish_reason,
            stats,
            logprobs=generation.logprobs,
            prompt_logprobs=generation.prompt_logprobs,
        )


def _is_one_prompt(prompts: Any) -> bool:
    """Text, or a list of token ids; an empty list is a list of no prompts."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence):
        raise RequestError(f"prompt: got {type(prompts).__name__}, expected text, token ids, or a list of either")
    return len(prompts) > 0 and isinstance(prompts[0], int)
