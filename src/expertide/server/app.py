"""The routes. What they compute is in completions.py; what they accept in schemas.py; who may call in guard.py."""

from __future__ import annotations

import time
import traceback
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from expertide import __version__
from expertide.server import schemas
from expertide.server.client import EngineClient
from expertide.server.completions import ChatJob, CompletionJob, new_id
from expertide.server.errors import ApiError
from expertide.server.guard import Bodies, BodyLease, Guard
from expertide.server.metrics import Metrics
from expertide.server.record import Record
from expertide.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from expertide.settings import Settings
from expertide.units import MIB

Body = TypeVar("Body", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    400: "The request cannot be done as it is; `error.param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The Host or Origin header is not allowed.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "The queue is full.",
    500: "The disk or the engine failed this request.",
    503: "The model is being loaded, the engine is gone, or the server shuts down.",
}


@dataclass(slots=True)
class Served:
    """What the routes need."""

    client: EngineClient
    name: str
    max_queue: int
    bodies: Bodies
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, asked: str | None) -> None:
        """
        Raises:
            ApiError: another model is asked for.
        """
        if asked is not None and asked != self.name:
            raise ApiError(
                404,
                f"model: {asked[:200]!r} is not served here; {self.name!r} is",
                param="model",
                code="model_not_found",
            )

    def check_room(self) -> None:
        """
        Raises:
            ApiError: the engine is not there, or the queue is full.
        """
        self.client.check()
        if self.client.num_open >= self.max_queue:
            raise ApiError.of("full", f"{self.max_queue} requests are being answered or wait already; try again later")


def max_body_bytes(context: int) -> int:
    """Of a prompt that fits: about 16 characters a token at most, in JSON 6 bytes each where all are escaped."""
    return max(MIB, 96 * context)


def make_app(
    served: Served, *, api_key: str | None, is_loopback: bool, allowed_origins: frozenset[str] = frozenset()
) -> FastAPI:
    """Routes, door, errors, document."""
    # The documentation pages would load scripts from other hosts.
    app = FastAPI(title="Expertide", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    _add_routes(app, served)
    _add_errors(app)
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=sorted(allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Guard, api_key=api_key, is_loopback=is_loopback, allowed_origins=allowed_origins)
    return app


def _add_routes(app: FastAPI, served: Served) -> None:
    client, metrics = served.client, served.metrics

    @app.get("/health", responses=_responses(503), summary="Whether the engine can answer.")
    async def health() -> Response:
        is_ready = client.state == "ready"
        body: dict[str, Any] = {"status": "ok" if is_ready else client.state, "waiting": client.num_waiting}
        body["open"] = client.num_open
        if client.state == "dead":
            body["error"] = client.why
        if client.state == "loading" and client.progress is not None:
            body["loaded_bytes"], body["total_bytes"] = client.progress
        return JSONResponse(body, 200 if is_ready else 503)

    @app.get("/metrics", summary="Figures for Prometheus.", response_class=Response)
    async def show_metrics() -> Response:
        metrics.up.set(client.state == "ready")
        metrics.open.set(client.num_open)
        metrics.waiting.set(client.num_waiting)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", summary="The one model.")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(served)]})

    @app.get("/v1/models/{model:path}", responses=_responses(404), summary="The one model.")
    async def model(model: str) -> Response:
        served.check_model(model)
        return JSONResponse(_model(served))

    @app.post("/v1/completions", **_documented(CompletionRequest), summary="Continue a text.")
    async def completions(request: Request) -> Response:
        return await _compute(request, served, CompletionRequest, CompletionJob)

    @app.post("/v1/chat/completions", **_documented(ChatRequest), summary="Answer a conversation.")
    async def chat(request: Request) -> Response:
        return await _compute(request, served, ChatRequest, ChatJob)

    @app.post("/tokenize", **_documented(TokenizeRequest), summary="Token ids of a text or a conversation.")
    async def tokenize(request: Request) -> Response:
        with closing(served.bodies.lease()) as lease:
            body = await _body(request, served, TokenizeRequest, lease)
            arguments = body.model_dump(include={"prompt", "messages", "add_special_tokens", "return_token_strs"})
            return JSONResponse(await client.call("tokenize", arguments))

    @app.post("/detokenize", **_documented(DetokenizeRequest), summary="The text of token ids.")
    async def detokenize(request: Request) -> Response:
        with closing(served.bodies.lease()) as lease:
            body = await _body(request, served, DetokenizeRequest, lease)
            return JSONResponse(await client.call("detokenize", {"tokens": body.tokens}))

    @app.get("/tokenizer_info", responses=_responses(503), summary="Special tokens and the chat template.")
    async def tokenizer_info() -> Response:
        return JSONResponse(await client.call("tokenizer_info", {}))

    document: dict[str, Any] = {}

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        if not document:
            document.update(_document(app, served.name))
        return JSONResponse(document)


def _model(served: Served) -> dict[str, Any]:
    facts = served.client.facts
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "expertide",
        "max_model_len": facts.get("context"),
    }


async def _compute(
    request: Request, served: Served, kind: type[Any], job_kind: type[CompletionJob] | type[ChatJob]
) -> Response:
    """Run one request, with its log line whatever happens."""
    lease = served.bodies.lease()
    record = Record(new_id(job_kind.id_prefix), request.url.path, served.metrics, on_close=lease.close)
    try:
        # Before the body is read: a full queue must not cost memory.
        served.check_room()
        body = await _body(request, served, kind, lease)
        served.check_room()
        response = await job_kind(body, served.name, record, served.client).respond(request)
        # Nobody is there to read it; the server wants some response all the same.
        return Response(status_code=499) if response is None else response
    except ApiError as error:
        record.status, record.error = error.status, error.message
        record.close("error")
        raise
    except Exception as error:  # the outermost loop of a request
        if Settings.from_env().traceback:
            traceback.print_exc()
        found = ApiError.of("internal", f"internal error: {type(error).__name__}: {error}")
        record.status, record.error = found.status, found.message
        record.close("error")
        raise found from error
    except BaseException:  # a server that ends cancels what runs
        record.close("cancelled")
        raise


async def _body(request: Request, served: Served, kind: type[Body], lease: BodyLease) -> Body:
    """
    Raises:
        ApiError: the body is not what this route expects.
    """
    value = await served.bodies.read_json(request, lease)
    if not isinstance(value, dict):
        raise ApiError(400, f"the body: found {type(value).__name__}, expected a JSON object")
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        message, param = schemas.sentence(error)
        raise ApiError(400, message[:1000], param=param) from None
    served.check_model(body.model)
    body.check()
    return body


def _add_errors(app: FastAPI) -> None:
    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.body(), error.status, error.headers)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        texts = {404: f"{request.url.path[:200]}: no such path", 405: f"{request.method}: not allowed for this path"}
        found = ApiError(error.status_code, texts.get(error.status_code, str(error.detail)))
        return JSONResponse(found.body(), found.status, dict(error.headers or {}))

    async def on_bug(request: Request, error: Exception) -> Response:
        found = ApiError.of("internal", f"internal error: {type(error).__name__}")
        return JSONResponse(found.body(), found.status)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)


def _responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": _STATUSES[status], "content": error} for status in (*statuses, 401, 403)}


def _documented(kind: type[Any]) -> dict[str, Any]:
    """The request's schema, which FastAPI does not see: bodies are read by our own bounds."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {
        "responses": _responses(400, 404, 408, 413, 429, 500, 503),
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    }


def _document(app: FastAPI, name: str) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    found = document.setdefault("components", {}).setdefault("schemas", {})
    for kind in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest):
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        found.update(schema.pop("$defs", {}))
        # The one model, by name: whoever fills a form from the document, or tests with it, gets past the first check.
        schema["properties"]["model"] |= {"enum": [name, None]}
        found[kind.__name__] = schema
    found["Error"] = _ERROR_SCHEMA
    return document
