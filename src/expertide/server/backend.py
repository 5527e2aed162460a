"""What the engine process asks of an engine, and the engine there is today: `LLM`, one request at a time.

    submit  any thread      text -> tokens, checks, into the queue; what cannot run is refused, before headers go out
    cancel  any thread      the request ends at the next layer
    step    engine thread   advances what runs by one token (or by a prompt) and says what that brought, for all

A paged engine that runs many requests at once takes this class's place: its `step` returns several deltas.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from expertide.engine.sampling import SamplingParams, TokenLogprobs
from expertide.errors import (
    ContextLengthError,
    ExpertideError,
    FormatError,
    NumericsError,
    RequestError,
    StorageError,
    UnsupportedError,
)
from expertide.llm import LLM, Output, Stream
from expertide.server.messages import Accepted, Delta, Done, Failed, Step, Submit
from expertide.text import conventions
from expertide.text.detokenizer import Utf8Stream
from expertide.text.grammar import JsonConstraint

# Called with (request id, prompt tokens done, prompt tokens in all) after each chunk of a prompt.
PrefillProgress = Callable[[str, int, int], None]
MAX_ANSWERS = 128


class Backend(Protocol):
    """An engine behind the server."""

    def facts(self) -> dict[str, Any]:
        """{"model", "context", "vocab_size", "has_chat_template", "lines", "warnings"}: for people and clients."""
        ...

    def submit(self, request: Submit) -> Accepted:
        """Check a request and queue it. Any thread.

        Raises:
            RequestError: it could never run.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Nobody waits for it any more, and nothing need be said of it. Unknown ids are ignored. Any thread."""
        ...

    def cancel_all(self) -> None:
        """Every request, in the queue or running."""
        ...

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer a question outside the queue. Any thread.

        Raises:
            RequestError: the arguments are wrong.
        """
        ...

    @property
    def has_work(self) -> bool: ...

    def step(self) -> Step:
        """Advance. Engine thread only; a failure of one request is in the result, not raised."""
        ...

    def close(self) -> None:
        """Give memory, threads and files back."""
        ...


@dataclass(slots=True, eq=False)
class _Request:
    submit: Submit
    # (index, prompt ids, params), in the order in which they run.
    waiting: deque[tuple[int, list[int], SamplingParams]]
    constraint: JsonConstraint | None
    prompt_tokens: int
    is_cancelled: bool = False
    cached_tokens: int = 0
    completion_tokens: int = 0
    stats: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    """The answer under way."""

    request: _Request
    index: int
    stream: Stream
    has_begun: bool = False
    # Characters of the answer that are complete, for the places of its tokens.
    num_chars: int = 0
    characters: Utf8Stream = field(default_factory=Utf8Stream)


class LLMBackend:
    """Implements `Backend`."""

    def __init__(self, llm: LLM, on_prefill: PrefillProgress | None = None) -> None:
        self._llm = llm
        self._lock = threading.Lock()
        self._queue: deque[_Request] = deque()
        self._requests: dict[str, _Request] = {}
        self._running: _Running | None = None
        self._on_prefill = on_prefill

    def facts(self) -> dict[str, Any]:
        llm = self._llm
        return {
            "model": llm.prepared.name,
            "context": llm.prepared.plan.context,
            "vocab_size": llm.prepared.architecture.config.vocab_size,
            "has_chat_template": llm.tokenizer.has_chat_template,
            "memory": llm.memory(),
            "warnings": list(llm.warnings),
        }

    def prefill_progress(self, done: int, total: int) -> None:
        """To be called by the `LLM` after each chunk of a prompt."""
        if self._on_prefill is not None and self._running is not None:
            self._on_prefill(self._running.request.submit.id, done, total)

    def submit(self, request: Submit) -> Accepted:
        text = None if request.chat is None else self._chat_text(request.chat["messages"], request.chat["variables"])
        prompts = self._prompts(request, text)
        if len(prompts) * request.n > MAX_ANSWERS:
            raise RequestError(f"n: {len(prompts):,} prompts x {request.n} answers, expected at most {MAX_ANSWERS}")
        for ids in prompts:
            self._llm.check_ids(ids)
            self._llm.check_prompt(ids)
        waiting = deque(
            (number * request.n + sample, ids, self._params(request.params, sample))
            for number, ids in enumerate(prompts)
            for sample in range(request.n)
        )
        constraint = None if request.schema is None else self._llm.grammars.json(request.schema)
        entry = _Request(request, waiting, constraint, prompt_tokens=sum(map(len, prompts)))
        accepted = Accepted(request.id, [len(ids) for ids in prompts])
        if text is not None:
            template = self._llm.tokenizer.chat_template
            accepted = replace(
                accepted,
                thinking=conventions.thinking_of(template, text),
                tool_format=conventions.tool_format_of(template),
            )
        with self._lock:
            self._requests[request.id] = entry
            self._queue.append(entry)
        return accepted

    def cancel(self, request_id: str) -> None:
        with self._lock:
            entry = self._requests.get(request_id)
            if entry is not None:
                entry.is_cancelled = True
                if entry in self._queue:
                    self._queue.remove(entry)
                    del self._requests[request_id]

    def cancel_all(self) -> None:
        for request_id in list(self._requests):
            self.cancel(request_id)

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name == "tokenize":
            return self._tokenize(arguments)
        if name == "detokenize":
            self._llm.check_ids(arguments["tokens"])
            return {"prompt": self._llm.tokenizer.decode(arguments["tokens"])}
        assert name == "tokenizer_info"
        return self._tokenizer_info()

    @property
    def has_work(self) -> bool:
        with self._lock:
            return self._running is not None or bool(self._queue)

    def step(self) -> Step:
        deltas: list[Delta] = []
        done: list[Done] = []
        failed: list[Failed] = []
        entry = self._running.request if self._running is not None else self._next_request()
        if entry is not None:
            try:
                self._advance(entry, deltas, done)
            except Exception as error:  # the outermost loop: whatever it is, it ends this request only
                self._running = None
                self._forget(entry)
                failed.append(failure(entry.submit.id, error))
        with self._lock:
            return Step(deltas, done, failed, num_waiting=len(self._queue))

    def close(self) -> None:
        if self._running is not None:
            self._running.stream.close()
            self._running = None
        self._llm.close()

    def _prompts(self, request: Submit, chat_text: str | None) -> list[list[int]]:
        llm = self._llm
        if chat_text is not None:
            return [llm.encode(chat_text)]
        return [llm.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompts]

    def _check_tools(self) -> None:
        """
        Raises:
            RequestError: the model was not made for tools, or calls them in an unknown way.
        """
        template = self._llm.tokenizer.chat_template
        if not conventions.has_tools(template):
            raise RequestError("tools: this model's chat template knows no tools")
        if conventions.tool_format_of(template) is None:
            raise RequestError("tools: this model's way to call tools is not known to this server")

    def _chat_text(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        # "developer" is OpenAI's newer word for "system"; few templates know it, and most skip roles they do not know.
        if "developer" not in (self._llm.tokenizer.chat_template or ""):
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if variables.get("tools"):
            self._check_tools()
        parsed = [_with_parsed_arguments(message) for message in messages]
        try:
            return self._llm.chat_prompt_text(parsed, **variables)
        except RequestError:
            # Most templates write a call's arguments as JSON, some put the text that OpenAI has there as it is.
            if parsed == messages:
                raise
            return self._llm.chat_prompt_text(messages, **variables)

    def _params(self, values: dict[str, Any], sample: int) -> SamplingParams:
        values = dict(values)
        # One token more than the context holds can be drawn: the last one needs no state.
        most = self._llm.prepared.plan.context + 1
        # The answer of a request for 0 tokens is computed and not shown: all its cost is the prompt's.
        values["max_tokens"] = most if values.get("max_tokens") is None else max(1, values["max_tokens"])
        bias = values.get("logit_bias")
        if bias:
            values["logit_bias"] = {int(token_id): amount for token_id, amount in bias.items()}
            self._llm.check_ids(list(values["logit_bias"]))
        if values.get("seed") is not None:
            # Answers to one prompt differ, and each can be had again by itself.
            values["seed"] = (values["seed"] + sample) % (1 << 64)
        return SamplingParams(**values)

    def _next_request(self) -> _Request | None:
        with self._lock:
            return self._queue.popleft() if self._queue else None

    def _forget(self, entry: _Request) -> None:
        with self._lock:
            self._requests.pop(entry.submit.id, None)

    def _advance(self, entry: _Request, deltas: list[Delta], done: list[Done]) -> None:
        running = self._running
        if running is None:
            if entry.is_cancelled:
                entry.waiting.clear()
            if not entry.waiting:
                self._end(entry, done)
                return
            index, ids, params = entry.waiting.popleft()
            stream = self._llm.stream(
                ids,
                params,
                keep_prefix=True,
                should_stop=lambda: entry.is_cancelled,
                constraint=None if entry.constraint is None else entry.constraint.fork(),
            )
            running = self._running = _Running(entry, index, stream)
        step = running.stream.next_step()
        prompt = None
        if not running.has_begun:
            running.has_begun = True
            prompt = self._prompt_of(running) if entry.submit.returns_prompt else None
        # A request for 0 tokens wants the prompt's figures only.
        is_shown = entry.submit.params.get("max_tokens") != 0
        if step is not None:
            logprobs = []
            if step.token_id is not None:
                if is_shown and step.logprobs is not None:
                    logprobs.append(self._entry(step.token_id, step.logprobs, running.num_chars))
                data = self._llm.tokenizer.token_bytes(step.token_id)
                running.num_chars += len(running.characters.push(data))
            ids = [step.token_id] if is_shown and step.token_id is not None else []
            text = step.text if is_shown else ""
            deltas.append(Delta(entry.submit.id, running.index, text, ids, logprobs, prompt=prompt))
            return
        output = running.stream.output
        self._running = None
        finish = output.finish_reason if is_shown or output.finish_reason == "abort" else "length"
        deltas.append(Delta(entry.submit.id, running.index, finish=finish, prompt=prompt))
        self._count(entry, output, is_shown)
        if not entry.waiting or entry.is_cancelled:
            entry.waiting.clear()
            self._end(entry, done)
        else:
            with self._lock:
                self._queue.appendleft(entry)

    def _count(self, entry: _Request, output: Output, is_shown: bool) -> None:
        stats = {name: value for name, value in output.stats.items() if name not in _TEXTS}
        entry.stats.append(stats)
        # What a stop in prefill left undone was not found in the cache either.
        if output.token_ids:
            entry.cached_tokens += len(output.prompt_token_ids) - output.stats["timings"]["prefill_tokens"]
            entry.completion_tokens += len(output.token_ids) if is_shown else 0

    def _end(self, entry: _Request, done: list[Done]) -> None:
        self._forget(entry)
        done.append(
            Done(entry.submit.id, entry.prompt_tokens, entry.cached_tokens, entry.completion_tokens, entry.stats)
        )

    def _prompt_of(self, running: _Running) -> dict[str, Any]:
        """The prompt's text, and its tokens' log-probabilities if they were asked for."""
        stream, submit = running.stream, running.request.submit
        ids = stream.prompt_token_ids
        asked = submit.prompts[running.index // submit.n] if submit.prompts else None
        entries, characters, num_chars = [], Utf8Stream(), 0
        for token_id, logprobs in zip(ids, stream.prompt_logprobs, strict=False):
            entries.append(self._entry(token_id, logprobs, num_chars))
            num_chars += len(characters.push(self._llm.tokenizer.token_bytes(token_id)))
        text = asked if isinstance(asked, str) else self._llm.tokenizer.decode(ids)
        return {"text": text, "token_ids": ids, "logprobs": entries}

    def _entry(self, token_id: int, logprobs: TokenLogprobs | None, offset: int) -> dict[str, Any]:
        """A token with its log-probability.

        {"id", "text", "bytes", "logprob", "offset", "top": [{"id", "text", "bytes", "logprob"}, …]}: `text` is None
        where the bytes are no whole characters, `offset` counts the characters before the token.
        """
        entry = self._token(token_id)
        entry["logprob"] = None if logprobs is None else logprobs.logprob
        entry["offset"] = offset
        top = () if logprobs is None else logprobs.top
        entry["top"] = [{**self._token(other), "logprob": logprob} for other, logprob in top]
        return entry

    def _token(self, token_id: int) -> dict[str, Any]:
        tokenizer = self._llm.tokenizer
        data = tokenizer.token_bytes(token_id)
        try:
            # Control tokens add no bytes to a text; a person who looks at them wants their name.
            text: str | None = data.decode("utf-8") if data else tokenizer.token_text(token_id)
        except UnicodeDecodeError:
            text = None
        return {"id": token_id, "text": text, "bytes": list(data or (text or "").encode("utf-8"))}

    def _tokenize(self, arguments: dict[str, Any]) -> dict[str, Any]:
        llm = self._llm
        if arguments.get("messages") is not None:
            text = self._chat_text(arguments["messages"], {})
        else:
            text = arguments["prompt"]
        ids = llm.encode(text) if arguments.get("add_special_tokens", True) else _encode_plain(llm, text)
        result: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": llm.prepared.plan.context,
            "tokens": ids,
        }
        if arguments.get("return_token_strs"):
            result["token_strs"] = [llm.tokenizer.token_text(token_id) for token_id in ids]
        return result

    def _tokenizer_info(self) -> dict[str, Any]:
        tokenizer = self._llm.tokenizer

        def text(token_id: int | None) -> str | None:
            return None if token_id is None else tokenizer.token_text(token_id)

        return {
            "bos_token": text(tokenizer.bos_id),
            "eos_token": text(tokenizer.eos_id),
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "stop_token_ids": sorted(tokenizer.stop_ids),
            "add_bos_token": tokenizer.add_bos,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": self._llm.prepared.plan.context,
            "pre_tokenizer": tokenizer.pre_tokenizer,
            "chat_template": tokenizer.chat_template,
        }


_TEXTS = ("text", "token_ids", "prompt_token_ids", "finish_reason")


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a message's tool calls as objects; OpenAI has them as JSON in a text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_parsed_call(call) for call in calls]}


def _with_parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _encode_plain(llm: LLM, text: str) -> list[int]:
    ids = llm.encode(text)
    tokenizer = llm.tokenizer
    # `encode` has the check of the length; only the token that it put in front goes.
    return tokenizer.encode(text, add_bos=False) if tokenizer.add_bos else ids


def failure(request_id: str, error: Exception) -> Failed:
    """How a request that ended with `error` is reported."""
    kind, message = "internal", f"internal error: {type(error).__name__}: {error}"
    details: dict[str, Any] = {}
    if isinstance(error, MemoryError):
        kind, message = "memory", "the engine is out of memory; lower --ram, --context or --prefill-chunk"
    elif isinstance(error, ExpertideError):
        kind, message = next(name for cls, name in _KINDS if isinstance(error, cls)), str(error)
    if isinstance(error, ContextLengthError):
        details = {"prompt_tokens": error.prompt_tokens, "context": error.context}
    elif isinstance(error, RequestError):
        param = message.partition(":")[0]
        details = {"param": param} if param.isidentifier() else {}
    return Failed(request_id, kind, message, details)


_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (ContextLengthError, "context"),
    (RequestError, "request"),
    (UnsupportedError, "unsupported"),
    (StorageError, "storage"),
    (NumericsError, "model"),
    (FormatError, "model"),
    (ExpertideError, "internal"),
)
