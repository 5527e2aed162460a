"""What the two processes say to each other: frames of four length bytes (big-endian) and a JSON object.

    HTTP -> engine      Load, then Submit, Cancel, Call, Close in any order
    engine -> HTTP      Progress …, Ready or Refused; then Accepted or Failed per Submit, Answer or Failed per Call,
                        and one Step per engine step with what it brought for every request

JSON, because the standard library has it in C (20 µs for a step of one token, beside the milliseconds of the step), it
can be read in a log, floats survive it exactly, and a damaged frame cannot run code, as a pickle could. The end of the
stream is a message too: the other process is gone.

Importing this imports the standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from asyncio import IncompleteReadError, StreamReader
from dataclasses import dataclass, field
from typing import Any, Literal

_LENGTH_BYTES = 4
# A step brings a few kilobytes, a prompt's log-probabilities some megabytes; more is no message of ours.
MAX_FRAME_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Load:
    """The first message. `options`: fields of `Options`."""

    model: str
    options: dict[str, Any]
    server_bytes: int


@dataclass(frozen=True, slots=True)
class Submit:
    """A request: `n` answers to each prompt, or to one conversation. Answer `i` of prompt `p` has index p * n + i.

    Attributes:
        prompts: text or token ids; empty where `chat` is given.
        chat: {"messages", "tools", "variables"} for the model's chat template.
        params: fields of `SamplingParams`; max_tokens may be 0 (the prompt's own figures only) or None (the context).
        returns_prompt: with the first step comes the prompt: text, ids, log-probabilities if `params` asks for them.
        schema: JSON schema that every answer follows.
    """

    id: str
    prompts: list[str | list[int]]
    chat: dict[str, Any] | None
    n: int
    params: dict[str, Any]
    returns_prompt: bool = False
    schema: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this request any more. Answered like any end of it."""

    id: str


@dataclass(frozen=True, slots=True)
class Call:
    """A question outside the queue: "tokenize", "detokenize", "tokenizer_info"."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Close:
    """Give everything back and end."""


@dataclass(frozen=True, slots=True)
class Progress:
    """`what` is "loading" (bytes) or "prefill" (tokens, of request `id`)."""

    what: str
    done: int
    total: int
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded. `facts` is described at `backend.Backend.facts`."""

    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """The model is not loaded, for this reason; the process ends."""

    message: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request can run and waits for its turn.

    Attributes:
        prompt_tokens: of each prompt.
        thinking, tool_format: of a conversation, see `text.conventions`.
    """

    id: str
    prompt_tokens: list[int]
    thinking: Literal["none", "possible", "open"] = "none"
    tool_format: Literal["json", "xml"] | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request or call has ended without a result. `kind` decides the status (errors.STATUS)."""

    id: str
    kind: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a Call."""

    id: str
    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step brought for one answer.

    Attributes:
        token_ids: drawn in this step.
        logprobs: one entry per token id if they were asked for, see `backend.logprobs_entry`.
        finish: why the answer ended, with its last delta: "stop", "length", "abort".
        prompt: {"text", "token_ids", "logprobs"} with the first delta, if the request asked for its prompt.
    """

    id: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    prompt: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """All answers of a request have ended. `stats`: one object per answer, as `run --json` has it, without texts."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stats: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that one engine step brought. `num_waiting`: requests that have not begun."""

    deltas: list[Delta]
    done: list[Done]
    failed: list[Failed]
    num_waiting: int


Message = (
    Load | Submit | Cancel | Call | Close
    | Progress | Ready | Refused | Accepted | Failed | Answer | Step
)  # fmt: skip
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Load, Submit, Cancel, Call, Close, Progress, Ready, Refused, Accepted, Failed, Answer, Step)
}


def encode(message: Message) -> bytes:
    """One frame."""
    data = json.dumps([type(message).__name__, dataclasses.asdict(message)], separators=(",", ":")).encode("ascii")
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def decode(data: bytes) -> Any:
    """The message in a frame, its length bytes taken off."""
    name, values = json.loads(data)
    if name == "Step":
        return Step(
            deltas=[Delta(**entry) for entry in values["deltas"]],
            done=[Done(**entry) for entry in values["done"]],
            failed=[Failed(**entry) for entry in values["failed"]],
            num_waiting=values["num_waiting"],
        )
    return _KINDS[name](**values)


class Channel:
    """The engine's end: blocking; any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._stream = connection.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """
        Raises:
            OSError: the other process is gone.
        """
        frame = encode(message)
        with self._lock:
            self._socket.sendall(frame)

    def receive(self) -> Any:
        """The next message; None when the other process is gone."""
        try:
            head = self._stream.read(_LENGTH_BYTES)
            length = int.from_bytes(head, "big")
            data = self._stream.read(length) if len(head) == _LENGTH_BYTES else b""
        except OSError:
            return None
        return decode(data) if data and len(data) == length else None


async def read(reader: StreamReader) -> Any:
    """The next message at the HTTP process's end; None when the engine process is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        return decode(await reader.readexactly(length)) if length <= MAX_FRAME_BYTES else None
    except (IncompleteReadError, OSError):
        return None
