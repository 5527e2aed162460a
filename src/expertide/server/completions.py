"""The two endpoints that compute: from a checked body to a reply, whole or as events.

body -> ApiError, or a ticket at the engine -> accepted -> deltas … done -> reply
                                                 from here on a stream has its headers
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from expertide.memory.peak import peak_resident_bytes
from expertide.server import replies
from expertide.server.client import EngineClient, Ticket
from expertide.server.errors import ApiError
from expertide.server.messages import Accepted, Delta, Done, Submit
from expertide.server.parts import Part, Splitter, Text, ToolCall
from expertide.server.record import Record
from expertide.server.replies import Choice
from expertide.server.schemas import ChatRequest, CompletionRequest
from expertide.server.sse import DONE, EventStream, event, unless_gone


class Job:
    """One request at the engine. `open` it, then `reply` or `events`."""

    object_name = ""
    chunk_name = ""
    id_prefix = ""

    def __init__(self, body: CompletionRequest | ChatRequest, model: str, record: Record, client: EngineClient) -> None:
        self.body = body
        self.record = record
        self._model = model
        self._client = client
        self._created = int(time.time())
        self._ticket: Ticket | None = None
        self._accepted: Accepted | None = None

    async def respond(self, request: Request) -> Response | None:
        """The whole exchange; None when the client left before there was anything to send.

        Raises:
            ApiError: refused, or failed before headers were sent.
        """
        ticket = self._ticket = self._client.submit(self._submit())
        # The engine has them now; they can be large.
        self._forget_prompt()
        is_handed_on = False
        try:
            accepted: Accepted | None = await unless_gone(request.receive, _value(ticket.accepted))
            if accepted is None:
                self.record.close("cancelled")
                return None
            self._accepted = accepted
            self.record.prompt_tokens = sum(accepted.prompt_tokens)
            self.record.status = 200
            if self.body.stream:
                is_handed_on = True
                return EventStream(self._events(ticket), self._comment, on_close=lambda: self._end_stream(ticket))
            reply = await unless_gone(request.receive, self._reply(ticket))
            if reply is None:
                self.record.close("cancelled")
                return None
            self.record.close()
            return JSONResponse(reply)
        finally:
            if not is_handed_on:
                ticket.close()

    def _comment(self) -> str:
        """For a silence: how far the prompt is."""
        prefill = None if self._ticket is None else self._ticket.prefill
        return "keep-alive" if prefill is None else f"keep-alive, prompt {prefill[0]}/{prefill[1]}"

    async def _reply(self, ticket: Ticket) -> dict[str, Any]:
        choices: dict[int, Choice] = {}
        done: Done | None = None
        async for entry in ticket.events():
            if isinstance(entry, Done):
                done = entry
                continue
            self.record.add(entry)
            choices.setdefault(entry.index, Choice(entry.index)).add(entry)
        assert done is not None
        return {
            **self._head(self.object_name),
            "choices": [self._choice(choices[index]) for index in sorted(choices)],
            "usage": replies.usage(done),
            "expertide": self._end(done),
        }

    async def _events(self, ticket: Ticket) -> AsyncIterator[bytes]:
        finish = "cancelled"
        try:
            seen: dict[int, Choice] = {}
            async for entry in ticket.events():
                if isinstance(entry, Done):
                    for last in self._last_events(entry):
                        yield last
                    continue
                self.record.add(entry)
                choice = seen.get(entry.index)
                is_first = choice is None
                choice = choice or seen.setdefault(entry.index, Choice(entry.index))
                choice.add(entry)
                for part in self._chunks(choice, entry, is_first=is_first):
                    yield event({**self._head(self.chunk_name), "choices": [part], **self._no_usage()})
            yield DONE
            finish = ""
        except ApiError as error:
            # The headers are out: clients look for an error in the events.
            finish, self.record.error = "error", error.message
            yield event(error.body())
        finally:
            self._end_stream(ticket, finish)

    def _end_stream(self, ticket: Ticket, finish: str = "cancelled") -> None:
        """Only the first call counts."""
        ticket.close()
        self.record.close(finish)

    def _last_events(self, done: Done) -> list[bytes]:
        extension = self._end(done)
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return []
        return [
            event(
                {
                    **self._head(self.chunk_name),
                    "choices": [],
                    "usage": replies.usage(done),
                    "expertide": extension,
                }
            )
        ]

    def _no_usage(self) -> dict[str, Any]:
        options = self.body.stream_options
        return {"usage": None} if options is not None and options.include_usage else {}

    def _end(self, done: Done) -> dict[str, Any]:
        extension = replies.extension(done, self.body.unknown_fields(), peak_resident_bytes())
        self.record.end(done, extension)
        return extension

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.record.id, "object": name, "created": self._created, "model": self._model}

    def _ids(self, token_ids: list[int]) -> dict[str, Any]:
        return {"token_ids": token_ids} if self.body.return_token_ids else {}

    def _submit(self) -> Submit:
        raise NotImplementedError

    def _forget_prompt(self) -> None:
        raise NotImplementedError

    def _choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _chunks(self, choice: Choice, delta: Delta, *, is_first: bool) -> list[dict[str, Any]]:
        """Choices of the events that a delta makes."""
        raise NotImplementedError


class CompletionJob(Job):
    """POST /v1/completions."""

    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl"
    body: CompletionRequest

    def _submit(self) -> Submit:
        body = self.body
        return Submit(
            self.record.id,
            body.prompt,
            None,
            body.num_answers,
            body.params(),
            returns_prompt=bool(body.echo or body.return_token_ids),
            schema=body.response_format,
        )

    def _forget_prompt(self) -> None:
        self.body.prompt = []

    def _choice(self, choice: Choice) -> dict[str, Any]:
        prompt = choice.prompt or {"text": "", "token_ids": [], "logprobs": []}
        echoed = prompt["text"] if self.body.echo else ""
        found: dict[str, Any] = {
            "index": choice.index,
            "text": echoed + choice.text,
            "logprobs": None,
            "finish_reason": choice.finish,
            **self._ids(choice.token_ids),
        }
        if self.body.return_token_ids:
            found["prompt_token_ids"] = prompt["token_ids"]
        if self.body.logprobs is not None:
            found["logprobs"] = self._logprobs(prompt["logprobs"] if self.body.echo else [], choice.logprobs, echoed)
        return found

    def _chunks(self, choice: Choice, delta: Delta, *, is_first: bool) -> list[dict[str, Any]]:
        parts = []
        prompt = delta.prompt if self.body.echo else None
        if prompt is not None:
            part = {"index": delta.index, "text": prompt["text"], "logprobs": None, "finish_reason": None}
            if self.body.logprobs is not None:
                part["logprobs"] = self._logprobs(prompt["logprobs"], [], "")
            parts.append(part)
        if not (delta.text or delta.finish or delta.logprobs or (delta.token_ids and self.body.return_token_ids)):
            return parts
        echoed = choice.prompt["text"] if self.body.echo and choice.prompt else ""
        part = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish,
            **self._ids(delta.token_ids),
        }
        if self.body.logprobs is not None and delta.logprobs:
            part["logprobs"] = self._logprobs([], delta.logprobs, echoed)
        return [*parts, part]

    def _logprobs(self, prompt: list[dict[str, Any]], answer: list[dict[str, Any]], echoed: str) -> dict[str, Any]:
        moved = [{**entry, "offset": entry["offset"] + len(echoed)} for entry in answer]
        return replies.completion_logprobs([*prompt, *moved], has_top=bool(self.body.logprobs))


class ChatJob(Job):
    """POST /v1/chat/completions."""

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl"
    body: ChatRequest

    def _submit(self) -> Submit:
        body = self.body
        self._splitters: dict[int, Splitter] = {}
        return Submit(
            self.record.id,
            [],
            {"messages": body.messages, "variables": body.variables()},
            body.num_answers,
            body.params(),
            returns_prompt=bool(body.return_token_ids),
            schema=body.response_format,
        )

    def _forget_prompt(self) -> None:
        self.body.messages = []

    def _splitter(self, index: int) -> Splitter:
        """Of one answer; made when the engine has said what kind of answer it is."""
        if index not in self._splitters:
            assert self._accepted is not None
            tools = self.body.active_tools
            self._splitters[index] = Splitter(
                thinking=self._accepted.thinking,
                tool_format=self._accepted.tool_format if tools else None,
                tools=tools,
                max_calls=1 if self.body.parallel_tool_calls is False else None,
            )
        return self._splitters[index]

    def _choice(self, choice: Choice) -> dict[str, Any]:
        splitter = self._splitter(choice.index)
        parts = [*splitter.push(choice.text), *splitter.flush()]
        content = "".join(part.text for part in parts if isinstance(part, Text) and not part.is_reasoning)
        reasoning = "".join(part.text for part in parts if isinstance(part, Text) and part.is_reasoning)
        calls = [part.to_json() for part in parts if isinstance(part, ToolCall)]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
            message["content"] = content or None
        found: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": replies.chat_logprobs(choice.logprobs) if self.body.logprobs else None,
            "finish_reason": _finish(choice.finish, splitter),
            **self._ids(choice.token_ids),
        }
        if self.body.return_token_ids and choice.prompt is not None:
            found["prompt_token_ids"] = choice.prompt["token_ids"]
        return found

    def _chunks(self, choice: Choice, delta: Delta, *, is_first: bool) -> list[dict[str, Any]]:
        splitter = self._splitter(choice.index)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}] if is_first else []
        parts = splitter.push(delta.text)
        if delta.finish:
            parts += splitter.flush()
        for part in parts:
            deltas += _deltas(part)
        chunks = [_chunk(delta.index, entry) for entry in deltas]
        if delta.logprobs or (delta.token_ids and self.body.return_token_ids):
            # With what the token brought, or with nothing, if its text is held back.
            if not parts:
                chunks.append(_chunk(delta.index, {}))
            chunks[-1] |= self._ids(delta.token_ids)
            if delta.logprobs:
                chunks[-1]["logprobs"] = replies.chat_logprobs(delta.logprobs)
        if delta.finish:
            chunks.append(_chunk(delta.index, {}, _finish(delta.finish, splitter)))
        return chunks


def _finish(finish: str | None, splitter: Splitter) -> str | None:
    return "tool_calls" if finish == "stop" and splitter.num_calls else finish


def _deltas(part: Part) -> list[dict[str, Any]]:
    """A call has its name in one event and its arguments in the next, as clients put them together."""
    if isinstance(part, Text):
        return [{"reasoning_content" if part.is_reasoning else "content": part.text}]
    opening = {"index": part.index, **part.to_json()}
    opening["function"] = {"name": part.name, "arguments": ""}
    return [
        {"tool_calls": [opening]},
        {"tool_calls": [{"index": part.index, "function": {"arguments": part.arguments}}]},
    ]


def _chunk(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


async def _value(future: Any) -> Any:
    # A future of the client's must not be cancelled with the task that waits for it.
    return await future


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
