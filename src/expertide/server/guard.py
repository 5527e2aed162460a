"""Who may come in and with how much: the door in front of every route, as ASGI middleware.

    Host      on a loopback address without a key only names of this machine, and of allowed origins: a web page that
              has its own name resolve to 127.0.0.1 could otherwise read answers
    Origin    a page of another site is refused, unless its origin was allowed; CORS headers are sent only then
    key       every path but /health, if a key is set; compared in constant time

Bodies are read by `read_json`: bounded in size, time and depth, and in all bodies together.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from expertide.server.errors import ApiError

OPEN_PATHS = frozenset({"/health"})
_LOCAL_NAMES: frozenset[str | None] = frozenset({"localhost", "127.0.0.1", "::1"})
# A client that sends slower than this is not a slow network.
BODY_TIMEOUT_S = 60.0
# Bodies of all requests that have not ended, together, in sizes of the largest one. Token ids take about ten times
# their JSON in Python's memory while they are parsed; afterwards the engine process has them, at four times.
MAX_OPEN_BODIES = 4


class Guard:
    """Checks headers before anything is read."""

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, is_loopback: bool, allowed_origins: frozenset[str]
    ) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode("utf-8")
        self._origins = allowed_origins
        # None: any.
        self._names: frozenset[str | None] | None = None
        if is_loopback and api_key is None:
            self._names = _LOCAL_NAMES | {_name_of(_host_of(origin) or "") for origin in allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self._names is not None and _name_of(host) not in self._names:
            raise ApiError(403, "Host: this server answers only to names of this machine", code="host_not_allowed")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin not in self._origins and _host_of(origin) != host:
            raise ApiError(403, "Origin: pages of other sites are not allowed here", code="origin_not_allowed")
        # A browser asks before it sends the key.
        is_preflight = scope["method"] == "OPTIONS" and origin in self._origins
        if self._key is None or scope["path"] in OPEN_PATHS or is_preflight:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _name_of(host: str) -> str | None:
    """The name in a Host header, without port and brackets."""
    try:
        return urlsplit("//" + host).hostname
    except ValueError:
        return None


def _host_of(origin: str) -> str | None:
    """`name:port` of an origin."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


class BodyLease:
    """The part of a request's body in the bound on all of them. `close` gives it back."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0

    def grow(self, size: int) -> None:
        """
        Raises:
            ApiError: there is no room now.
        """
        bodies = self._bodies
        if bodies.open_bytes + size > MAX_OPEN_BODIES * bodies.max_bytes:
            raise ApiError.of("busy", "the bodies of all requests together are too large; try again later")
        bodies.open_bytes += size
        self._size += size

    def close(self) -> None:
        self._bodies.open_bytes -= self._size
        self._size = 0


class Bodies:
    """Reads JSON bodies within bounds: one body's, and that of all requests which have not ended."""

    def __init__(self, max_bytes: int, *, timeout_s: float = BODY_TIMEOUT_S) -> None:
        self.max_bytes = max_bytes
        self._timeout_s = timeout_s
        self.open_bytes = 0

    def lease(self) -> BodyLease:
        return BodyLease(self)

    async def read_json(self, request: Request, lease: BodyLease) -> Any:
        """
        Raises:
            ApiError: too large, too slow, no UTF-8, no JSON, nested too deeply, numbers that JSON does not have.
        """
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self.max_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._timeout_s):
                data = await self._read(request, lease)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._timeout_s:g} s") from None
        return parse_json(data)

    async def _read(self, request: Request, lease: BodyLease) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > self.max_bytes:
                raise self._too_large()
            lease.grow(len(part))
            parts.append(part)
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_bytes:,} bytes", code="body_too_large")


def parse_json(data: bytes) -> Any:
    """
    Raises:
        ApiError: no UTF-8, no JSON, nested too deeply, NaN or Infinity, half a surrogate pair.
    """
    if not data.strip():
        raise ApiError(400, "the body is empty; expected a JSON object")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start:,}") from None
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at character {error.pos:,}") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}") from None
    # "\ud800" is JSON, but not text.
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ApiError(400, "the body holds half a surrogate pair, which is not text") from None
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value
