"""The HTTP process's end of the engine: starts it, speaks with it, and knows whether it lives.

    starting -> loading -> ready -> dead
                   +--> refused

Every ticket ends: with Done, with an `ApiError`, or because its holder let go of it (`cancel`). When the engine process
dies, all tickets end with the error that says so.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from expertide.server import messages
from expertide.server.errors import ApiError
from expertide.server.messages import (
    Accepted,
    Answer,
    Call,
    Cancel,
    Close,
    Delta,
    Done,
    Failed,
    Load,
    Message,
    Progress,
    Ready,
    Refused,
    Step,
    Submit,
)

State = Literal["starting", "loading", "ready", "refused", "dead"]
# Given back by the engine when asked to close; then it is ended.
_CLOSE_S = 10.0


class Ticket:
    """One request on its way. Iterate `events` after `accepted`."""

    def __init__(self, client: EngineClient, request_id: str) -> None:
        self.id = request_id
        self.accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        # (tokens done, tokens in all) of the prompt under way.
        self.prefill: tuple[int, int] | None = None
        self._client = client
        self._events: asyncio.Queue[Delta | Done | ApiError] = asyncio.Queue()

    async def events(self) -> AsyncIterator[Delta | Done]:
        """What the engine says, until and with Done.

        Raises:
            ApiError: the request failed, or the engine is gone.
        """
        while True:
            event = await self._events.get()
            if isinstance(event, ApiError):
                raise event
            yield event
            if isinstance(event, Done):
                return

    def push(self, event: Delta | Done | ApiError) -> None:
        if isinstance(event, ApiError) and not self.accepted.done():
            self.accepted.set_exception(event)
        else:
            self._events.put_nowait(event)

    def close(self) -> None:
        """Let go of it: if it has not ended, the engine stops working on it."""
        self._client.forget(self.id)


class EngineClient:
    """One engine process."""

    def __init__(self, load: Load, *, on_progress: Callable[[str, int, int], None] | None = None) -> None:
        self.state: State = "starting"
        self.facts: dict[str, Any] = {}
        self.why = ""  # it is refused or dead
        self.num_waiting = 0
        self.progress: tuple[int, int] | None = None
        self._load = load
        self._on_progress = on_progress
        self._tickets: dict[str, Ticket] = {}
        self._calls: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._call_ids = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._is_closing = False
        self.settled = asyncio.Event()  # ready, refused or dead: loading is over
        self.ended = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._tickets)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Start the process and listen to it until it ends."""
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name != "EXPERTIDE_API_KEY"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "expertide.server.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        self.state = "loading"
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        self._send(self._load)
        try:
            while (message := await messages.read(reader)) is not None:
                self._receive(message)
        finally:
            await self._end()

    def submit(self, request: Submit) -> Ticket:
        """Hand a request over.

        Raises:
            ApiError: the engine is not there.
        """
        self.check()
        ticket = self._tickets[request.id] = Ticket(self, request.id)
        self._send(request)
        return ticket

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Ask something outside the queue.

        Raises:
            ApiError: the engine is not there, or refuses.
        """
        self.check()
        call_id = f"call-{next(self._call_ids)}"
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send(Call(call_id, name, arguments))
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    def check(self) -> None:
        """
        Raises:
            ApiError: the engine cannot take a request now.
        """
        if self.state == "dead":
            raise ApiError.of("dead", self.why)
        if self._is_closing:
            raise ApiError.of("closing", "the server is shutting down")
        if self.state != "ready":
            raise ApiError.of("loading", "the model is being loaded; try again in a moment")

    def forget(self, request_id: str) -> None:
        if self._tickets.pop(request_id, None) is not None and self.state == "ready":
            self._send(Cancel(request_id))

    def refuse_new(self) -> None:
        """From now on `submit` fails; what runs goes on."""
        self._is_closing = True

    def fail_all(self, kind: str, message: str) -> None:
        """End every ticket and call with an error."""
        for ticket in list(self._tickets.values()):
            ticket.push(ApiError.of(kind, message))
            self.forget(ticket.id)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ApiError.of(kind, message))

    async def close(self) -> None:
        """Ask the process to end, and see to it that it does."""
        self.refuse_new()
        if self._process is None:
            return
        if self._process.poll() is None:
            self._send(Close())
        try:
            await asyncio.wait_for(self.ended.wait(), _CLOSE_S)
        except TimeoutError:
            self.kill()
            await self.ended.wait()

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(messages.encode(message))

    def _receive(self, message: Any) -> None:
        if isinstance(message, Step):
            self.num_waiting = message.num_waiting
            for delta in message.deltas:
                self._push(delta.id, delta)
            for done in message.done:
                self._push(done.id, done, is_last=True)
            for failed in message.failed:
                self._fail(failed)
        elif isinstance(message, Accepted):
            ticket = self._tickets.get(message.id)
            if ticket is not None and not ticket.accepted.done():
                ticket.accepted.set_result(message)
        elif isinstance(message, Failed):
            self._fail(message)
        elif isinstance(message, Answer):
            future = self._calls.get(message.id)
            if future is not None and not future.done():
                future.set_result(message.value)
        elif isinstance(message, Progress):
            self._note_progress(message)
        elif isinstance(message, Ready):
            self.facts, self.state = message.facts, "ready"
            self.settled.set()
        elif isinstance(message, Refused):
            self.why, self.state = message.message, "refused"

    def _push(self, request_id: str, event: Delta | Done | ApiError, *, is_last: bool = False) -> None:
        ticket = self._tickets.pop(request_id, None) if is_last else self._tickets.get(request_id)
        if ticket is not None:
            ticket.push(event)

    def _fail(self, failed: Failed) -> None:
        error = ApiError.of(failed.kind, failed.message, failed.details)
        future = self._calls.get(failed.id)
        if future is not None and not future.done():
            future.set_exception(error)
        self._push(failed.id, error, is_last=True)

    def _note_progress(self, message: Progress) -> None:
        if message.id is None:
            self.progress = (message.done, message.total)
            if self._on_progress is not None:
                self._on_progress(message.what, message.done, message.total)
        elif (ticket := self._tickets.get(message.id)) is not None:
            ticket.prefill = (message.done, message.total)

    async def _end(self) -> None:
        """The other end of the socket is closed: the process has ended, or will without us."""
        assert self._process is not None
        if self._writer is not None:
            self._writer.close()
        try:
            code = await asyncio.wait_for(asyncio.to_thread(self._process.wait), 2 * _CLOSE_S)
        except TimeoutError:
            self.kill()
            code = await asyncio.to_thread(self._process.wait)
        if self.state != "refused":
            self.state, self.why = "dead", f"the engine process has ended ({_how(code)}); restart the server"
        self.fail_all("dead", self.why)
        self.settled.set()
        self.ended.set()


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
