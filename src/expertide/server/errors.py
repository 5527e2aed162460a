"""Errors as OpenAI's clients know them: a status and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

# What went wrong (the `kind` of messages.Failed) -> status, OpenAI's type, code.
STATUS: dict[str, tuple[int, str, str | None]] = {
    "request": (400, "invalid_request_error", None),
    "context": (400, "invalid_request_error", "context_length_exceeded"),
    "unsupported": (400, "invalid_request_error", "unsupported"),
    "storage": (500, "server_error", "storage_error"),
    "model": (500, "server_error", "model_error"),
    "internal": (500, "server_error", "internal_error"),
    "memory": (500, "server_error", "out_of_memory"),
    "full": (429, "rate_limit_error", "queue_full"),
    "busy": (503, "server_error", "busy"),
    "loading": (503, "server_error", "model_loading"),
    "closing": (503, "server_error", "shutting_down"),
    "dead": (503, "server_error", "engine_dead"),
}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Ends a request with a status and OpenAI's envelope."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type_: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type_ or _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = headers or {}

    @classmethod
    def of(cls, kind: str, message: str, details: dict[str, Any] | None = None) -> ApiError:
        """From what the engine process reports."""
        status, type_, code = STATUS.get(kind, STATUS["internal"])
        headers = {"Retry-After": "1"} if status in (429, 503) else {}
        return cls(status, message, param=(details or {}).get("param"), code=code, type_=type_, headers=headers)

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
