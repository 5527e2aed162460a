"""An answer's text, split into what it is: reasoning, content, tool calls. One splitter for whole and streamed replies.

    <think> reasoning </think> content <tool_call> call </tool_call> …

A marker may be cut anywhere between two pieces, so a tail that could become one is held back. White space around
markers belongs to nobody. A call that is not complete, or not readable, comes out as the content that it is.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from expertide.text.conventions import THINK, THINK_END, Thinking, ToolFormat

_CALL, _CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of content, or of reasoning."""

    text: str
    is_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call; `arguments` is a JSON object as text."""

    index: int
    id: str
    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Part = Text | ToolCall


class Splitter:
    """Splits one answer.

    Args:
        thinking: whether a thought is open, or may come first.
        tool_format: how calls look; None: there are none, and what looks like one is content.
        tools: the request's; xml calls need to know which arguments are texts.
        max_calls: further ones are dropped.
    """

    def __init__(
        self,
        *,
        thinking: Thinking = "none",
        tool_format: ToolFormat | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        max_calls: int | None = None,
    ) -> None:
        self._format = tool_format
        self._types = {tool["function"]["name"]: _types_of(tool) for tool in tools}
        self._max_calls = max_calls
        self.num_calls = 0
        # "start": before a thought that may come; then "think", "content", "call".
        self._state = {"none": "content", "possible": "start", "open": "think"}[thinking]
        self._held = ""
        # White space at the beginning of a section, and before a marker, is dropped where markers are looked for.
        self._is_at_start = self._state != "content"

    def push(self, text: str) -> list[Part]:
        """More of the answer; what is certain now."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """The answer has ended."""
        held, self._held = self._held, ""
        if self._state == "call":
            held = _CALL + held
        parts: list[Part] = []
        self._emit(parts, held.rstrip() if self._state == "think" else held)
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Take one marker, or what comes before the next; False when more text is needed."""
        if self._state == "start":
            return self._begin()
        if self._state == "call":
            return self._end_call(parts)
        marker = THINK_END if self._state == "think" else _CALL if self._format is not None else None
        if marker is None:
            text, self._held = self._held, ""
            self._emit(parts, text)
            return False
        before, found, after = self._held.partition(marker)
        if found:
            self._emit(parts, before.rstrip())
            self._held, self._is_at_start = after, True
            self._state = "content" if self._state == "think" else "call"
            return True
        keep = _num_held(self._held, marker)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._emit(parts, text)
        return False

    def _begin(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held, self._state = text[len(THINK) :], "think"
            return True
        if THINK.startswith(text):
            return False
        # No thought: then white space in front is the answer's own.
        self._state, self._is_at_start = "content", False
        return True

    def _end_call(self, parts: list[Part]) -> bool:
        body, found, after = self._held.partition(_CALL_END)
        if not found:
            return False
        self._held, self._state, self._is_at_start = after, "content", True
        call = _read_json(body) if self._format == "json" else _read_xml(body, self._types)
        if call is None:
            self._is_at_start = False
            self._emit(parts, _CALL + body + _CALL_END)
        elif self._max_calls is None or self.num_calls < self._max_calls:
            name, arguments = call
            text = json.dumps(arguments, ensure_ascii=False)
            parts.append(ToolCall(self.num_calls, f"call_{uuid.uuid4().hex[:24]}", name, text))
            self.num_calls += 1
        return True

    def _emit(self, parts: list[Part], text: str) -> None:
        if self._is_at_start:
            text = text.lstrip()
        if text:
            self._is_at_start = False
            parts.append(Text(text, is_reasoning=self._state == "think"))


def _num_held(text: str, marker: str) -> int:
    """Length of the tail that may belong to a marker: white space, and a beginning of it."""
    start = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-n:])), 0)
    before = text[: len(text) - start]
    return start + len(before) - len(before.rstrip())


def _read_json(body: str) -> tuple[str, dict[str, Any]] | None:
    """(name, arguments) of a call; None if it is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get("arguments", {}) if isinstance(value, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    return (name, arguments or {}) if isinstance(name, str) and isinstance(arguments or {}, dict) else None


def _read_xml(body: str, types: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    found = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", body, re.DOTALL)
    if found is None:
        return None
    name = found[1].strip()
    known = types.get(name, {})
    arguments: dict[str, Any] = {}
    for key, value in re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", found[2], re.DOTALL):
        arguments[key] = _typed(value, known.get(key))
    return name, arguments


def _typed(value: str, kind: Any) -> Any:
    """A parameter's value: text where the tool says so, else JSON if it is any."""
    if kind == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _types_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = tool["function"].get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: entry.get("type") for name, entry in properties.items() if isinstance(entry, dict)}
