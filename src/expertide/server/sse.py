"""Server-sent events: the headers at once, then one event per step, and a comment whenever 5 s were silent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# Proxies and clients give up on a silent connection after 30 to 60 s.
KEEP_ALIVE_S = 5.0
T = TypeVar("T")


def event(data: dict[str, Any]) -> bytes:
    """One event. ASCII only: no client cuts a character in two, and no surrogate can end the answer."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """A response whose body comes from `events`.

    Args:
        events: whole events. It is closed when the client leaves.
        comment: what to say in a silence; from a clock, not from progress.
        on_close: called at the end in any case, also where the client has left before `events` has begun (a generator
            that has not begun runs none of its own endings).
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        comment: Callable[[], str],
        *,
        on_close: Callable[[], None],
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._events = events
        self._on_close = on_close
        self._comment = comment
        self._keep_alive_s = keep_alive_s
        super().__init__(
            status_code=200,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        # Set by `Response` for an empty body.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # The headers leave with the first piece of the body.
            await send({"type": "http.response.body", "body": f": {self._comment()}\n\n".encode(), "more_body": True})
            await unless_gone(receive, self._write(send))
        finally:
            self._on_close()

    async def _write(self, send: Send) -> None:
        events = aiter(self._events)
        following: asyncio.Future[bytes] = asyncio.ensure_future(anext(events))
        try:
            while True:
                done, _ = await asyncio.wait((following,), timeout=self._keep_alive_s)
                if not done:
                    body = f": {self._comment()}\n\n".encode()
                else:
                    try:
                        body = following.result()
                    except StopAsyncIteration:
                        break
                    following = asyncio.ensure_future(anext(events))
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await self._events.aclose()  # type: ignore[attr-defined]


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T | None:
    """The result of `work`; None, and the work cancelled, when the client leaves before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for entry in (task, gone):
            entry.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
