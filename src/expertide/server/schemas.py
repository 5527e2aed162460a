"""What clients may send: OpenAI's fields, and a few of other servers. Values are checked here as far as that needs no
model; the rest is `SamplingParams`' and the tokenizer's affair. docs/server.md lists every field.

A field is honoured, ignored (`IGNORED`: it says something about the client, or about other machines), or refused with
400 where ignoring it would give another answer than was asked for. A field that nobody knows is named in the reply's
`expertide.unknown_fields`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from expertide.server.errors import ApiError

MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_TOKENS = 1 << 24
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_TOOLS = 128
_MAX_SEED = (1 << 63) - 1

# Taken and without effect.
IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prediction", "verbosity",
    }
)  # fmt: skip

_PROMPT_WORDS = "expected a text, a list of texts, a list of token ids, or a list of such lists"
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
_STOP_SCHEMA = {
    "oneOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOPS},
        {"type": "null"},
    ]
}
_MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "oneOf": [
                {"type": "string"},
                {"type": "null"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        },
    },
}


def _prompts(value: object) -> list[str | list[int]]:
    """One prompt or several, as a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(_PROMPT_WORDS)
    if _is_ids(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"found {len(value):,} prompts, expected at most {MAX_PROMPTS}")
    if all(isinstance(entry, str) for entry in value) or all(_is_ids(entry) for entry in value):
        return value
    raise ValueError(_PROMPT_WORDS)


def _ids(value: object) -> list[int]:
    if not isinstance(value, list) or not (value == [] or _is_ids(value)):
        raise ValueError("expected a list of token ids")
    return value


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(entry) is int and entry >= 0 for entry in value)


def _stops(value: object) -> list[str]:
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(t, str) and t for t in texts):
        raise ValueError(f"expected a text or a list of at most {MAX_STOPS} texts, none of them empty")
    return texts


def _bias(value: object) -> dict[str, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("expected an object of token ids and numbers from -100 to 100")
    for key, amount in value.items():
        is_number = isinstance(amount, int | float) and not isinstance(amount, bool) and -100 <= amount <= 100
        if not (key.isascii() and key.isdigit() and len(key) <= 9 and is_number):
            raise ValueError("expected an object of token ids and numbers from -100 to 100")
    return {str(int(key)): amount for key, amount in value.items()}


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise ValueError(f"expected a list of 1 to {MAX_MESSAGES:,} messages")
    for position, message in enumerate(value):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ValueError(f"[{position}]: expected an object with a role of {', '.join(_ROLES)}")
    return value


_ROLES = ("system", "developer", "user", "assistant", "tool")
Prompts = Annotated[list[Any], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
TokenIds = Annotated[list[int], BeforeValidator(_ids), WithJsonSchema({**_IDS_SCHEMA, "minItems": 0})]
Stops = Annotated[list[str], BeforeValidator(_stops), WithJsonSchema(_STOP_SCHEMA)]
Bias = Annotated[
    dict[str, float] | None,
    BeforeValidator(_bias),
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
Messages = Annotated[
    list[dict[str, Any]],
    BeforeValidator(_messages),
    WithJsonSchema({"type": "array", "items": _MESSAGE_SCHEMA, "minItems": 1, "maxItems": MAX_MESSAGES}),
]


def _response_schema(value: object) -> dict[str, Any] | None:
    """The JSON schema that is asked for; None for plain text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if isinstance(value, dict) and kind == "json_schema":
        named = value.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if isinstance(schema, dict):
            return schema
        raise ValueError("json_schema.schema: expected an object, a JSON schema")
    raise ValueError("expected an object with type text, json_object or json_schema")


ResponseFormat = Annotated[
    dict[str, Any] | None,
    BeforeValidator(_response_schema),
    WithJsonSchema(
        {
            "oneOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "required": ["type"],
                    "properties": {"type": {"type": "string", "enum": ["text", "json_object"]}},
                },
                {
                    "type": "object",
                    "required": ["type", "json_schema"],
                    "properties": {
                        "type": {"const": "json_schema"},
                        "json_schema": {
                            "type": "object",
                            "required": ["schema"],
                            "properties": {
                                "name": {"type": "string"},
                                "schema": {"type": "object", "maxProperties": 0},
                            },
                        },
                    },
                },
            ]
        }
    ),
]


def _tools(value: object) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise ValueError(f"expected a list of at most {MAX_TOOLS} tools")
    for position, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"[{position}]: expected type function, and a function with a name")
    return value


Tools = Annotated[
    list[dict[str, Any]],
    BeforeValidator(_tools),
    WithJsonSchema(
        {
            "type": ["array", "null"],
            "items": {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"type": "string", "minLength": 1}, "parameters": {"type": "object"}},
                    },
                },
            },
        }
    ),
]


class _Body(BaseModel):
    # Strict: "5" is no number and true no 1. Extra fields are kept, to be named.
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = Field(None, description="The id that /v1/models shows; may be left out.")

    def unknown_fields(self) -> list[str]:
        """Names that this server does not know, at most 16 of them."""
        return sorted(set(self.model_extra or {}) - IGNORED)[:16]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False


class _Sampled(_Body):
    """What completions and chat have in common."""

    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS, description="0 and -1 keep all.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-_MAX_SEED, le=_MAX_SEED)
    stop: Stops = Field(default_factory=list)
    logit_bias: Bias = None
    n: int | None = Field(None, ge=1, le=MAX_PROMPTS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat = None
    ignore_eos: bool | None = Field(None, description="Go on past the end token, for measurements.")
    return_token_ids: bool | None = Field(None, description="Add token_ids to each choice.")

    @property
    def num_answers(self) -> int:
        return self.n or 1

    def _common_params(self) -> dict[str, Any]:
        """Fields of `SamplingParams`; only those that were given, over OpenAI's defaults."""
        params: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "stop": self.stop,
            "logit_bias": self.logit_bias,
            "ignore_eos": bool(self.ignore_eos),
            # Clients of other languages send signed numbers.
            "seed": None if self.seed is None else self.seed % (1 << 64),
        }
        for name in ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if getattr(self, name) is not None:
                params[name] = getattr(self, name)
        if self.top_k is not None and self.top_k > 0:
            params["top_k"] = self.top_k
        return params

    def _check_common(self) -> None:
        if self.response_format is not None and self.ignore_eos:
            raise ApiError(400, "ignore_eos: JSON has an end", param="ignore_eos")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: has an effect only with stream: true", param="stream_options")


class CompletionRequest(_Sampled):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS, description="Default 16.")
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_PROMPTS, description="Only the value of n is possible.")
    suffix: str | None = Field(None, description="Refused unless empty.")

    def check(self) -> None:
        """
        Raises:
            ApiError: a combination that cannot be done.
        """
        self._check_common()
        if self.best_of is not None and self.best_of != self.num_answers:
            raise ApiError(
                400, f"best_of: got {self.best_of}, expected the value of n ({self.num_answers})", param="best_of"
            )
        if self.suffix:
            raise ApiError(400, "suffix: text after the answer is not supported", param="suffix")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens: 0 has a meaning only with echo: true", param="max_tokens")
        if len(self.prompt) * self.num_answers > MAX_PROMPTS:
            raise ApiError(400, f"n: prompts x n is more than {MAX_PROMPTS}", param="n")

    def params(self) -> dict[str, Any]:
        params = self._common_params()
        params["max_tokens"] = 16 if self.max_tokens is None else self.max_tokens
        params["logprobs"] = self.logprobs
        if self.echo:
            params["prompt_logprobs"] = self.logprobs
        return params


class ChatRequest(_Sampled):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Default: what the context leaves.")
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools = Field(default_factory=list)
    tool_choice: Any = Field(None, description="auto or none; a call cannot be forced.")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More names for the chat template.")
    reasoning_effort: str | None = Field(None, description="Handed to the chat template.")

    def check(self) -> None:
        """
        Raises:
            ApiError: a combination or a value that cannot be done.
        """
        self._check_common()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: has an effect only with logprobs: true", param="top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one", param="max_tokens")
        if self.tool_choice not in (None, "auto", "none"):
            message = "tool_choice: expected auto or none; a call cannot be forced"
            raise ApiError(400, message, param="tool_choice", code="unsupported")
        if self.tool_choice == "auto" and not self.tools:
            raise ApiError(400, "tool_choice: there are no tools", param="tool_choice")
        if self.active_tools and self.response_format is not None:
            message = "response_format: cannot be combined with tools; use tool_choice none"
            raise ApiError(400, message, param="response_format", code="unsupported")
        for name, accepted in REFUSED_IN_CHAT.items():
            value = (self.model_extra or {}).get(name)
            if value not in accepted:
                raise ApiError(400, f"{name}: is not supported", param=name, code="unsupported")

    def unknown_fields(self) -> list[str]:
        return [name for name in super().unknown_fields() if name not in REFUSED_IN_CHAT]

    def params(self) -> dict[str, Any]:
        params = self._common_params()
        params["max_tokens"] = self.max_completion_tokens or self.max_tokens
        if self.logprobs:
            params["logprobs"] = self.top_logprobs or 0
        return params

    @property
    def active_tools(self) -> list[dict[str, Any]]:
        """What the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    def variables(self) -> dict[str, Any]:
        """More names for the chat template.

        Raises:
            ApiError: a name that the server sets itself.
        """
        found = dict(self.chat_template_kwargs or {})
        for name in ("messages", "add_generation_prompt", "tools", "self"):
            if name in found:
                raise ApiError(400, f"chat_template_kwargs.{name}: is set by the server", param="chat_template_kwargs")
        if self.active_tools:
            found["tools"] = self.active_tools
        if self.reasoning_effort is not None:
            found.setdefault("reasoning_effort", self.reasoning_effort)
        return found


# Field -> values that ask for nothing; any other one is refused.
REFUSED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "modalities": (None, ["text"]),
    "functions": (None, []),
    "function_call": (None, "none"),
    "web_search_options": (None,),
}


class TokenizeRequest(_Body):
    """POST /tokenize: a prompt, or messages for the chat template."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})

    prompt: str | None = None
    messages: Annotated[Messages | None, Field()] = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "prompt: expected either prompt or messages", param="prompt")


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    tokens: TokenIds

    def check(self) -> None:
        return


def sentence(error: ValidationError) -> tuple[str, str | None]:
    """(what is wrong in one sentence, the field)."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = [str(part) for part in first["loc"]]
    param = where[0] if where else None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{param}: is missing", param
    if first["type"] in ("model_type", "dict_type") and not where:
        return "the body: expected a JSON object", None
    return f"{'.'.join(where)}: {message[:1].lower()}{message[1:]}", param
