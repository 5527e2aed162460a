"""Reasoning, content and tool calls come apart the same way however the text is cut into pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from expertide.server.parts import Splitter, Text, ToolCall
from expertide.text.conventions import thinking_of, tool_format_of

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)

ULM = ("weather", {"city": "Ulm", "days": 2})

# (text, how it is read, reasoning, content, calls)
CASES: list[tuple[str, dict[str, Any], str, str, list[tuple[str, dict[str, Any]]]]] = [
    (" Paris.", {}, "", " Paris.", []),
    ("<think>x</think> y", {}, "", "<think>x</think> y", []),
    ("hm\n\n</think>\n\nYes. ", {"thinking": "open"}, "hm", "Yes. ", []),
    ("\n<think>\na < b\n</think>\n\nYes", {"thinking": "possible"}, "a < b", "Yes", []),
    (" No thought <think>", {"thinking": "possible"}, "", " No thought <think>", []),
    ("<thin", {"thinking": "possible"}, "", "<thin", []),
    ("never ends <", {"thinking": "open"}, "never ends <", "", []),
    (CALL, {"tool_format": "json"}, "", "", [ULM]),
    (
        f"I look.\n{CALL}\n{CALL}\n",
        {"tool_format": "json"},
        "",
        "I look.",
        [ULM] * 2,
    ),
    (f"{CALL}{CALL}", {"tool_format": "json", "max_calls": 1}, "", "", [ULM]),
    (
        f"t</think>{CALL}",
        {"tool_format": "json", "thinking": "open"},
        "t",
        "",
        [ULM],
    ),
    (f"x {CALL}", {}, "", f"x {CALL}", []),
    ('<tool_call>{"name": "now"}</tool_call>', {"tool_format": "json"}, "", "", [("now", {})]),
    ('<tool_call>{"name": "now", "arguments": ""}</tool_call>', {"tool_format": "json"}, "", "", [("now", {})]),
    ("<tool_call>{broken}</tool_call> a", {"tool_format": "json"}, "", "<tool_call>{broken}</tool_call> a", []),
    ('<tool_call>\n{"name": "wea', {"tool_format": "json"}, "", '<tool_call>\n{"name": "wea', []),
    (XML, {"tool_format": "xml"}, "", "", [("weather", {"city": "12", "days": 2})]),
    ("a <b> c  ", {"tool_format": "xml"}, "", "a <b> c  ", []),
]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case[0][:24]))
def test_the_parts_do_not_depend_on_how_the_text_is_cut(case: Any, seed: int):
    text, options, reasoning, content, calls = case
    splitter = Splitter(tools=[WEATHER], **options)
    draw = random.Random(seed)
    parts, rest = [], text
    while rest:
        size = draw.choice((1, 2, 3, 7, 100)) if seed else len(rest)
        parts += splitter.push(rest[:size])
        rest = rest[size:]
    parts += splitter.flush()
    texts = [part for part in parts if isinstance(part, Text)]
    assert "".join(part.text for part in texts if part.is_reasoning) == reasoning
    assert "".join(part.text for part in texts if not part.is_reasoning) == content
    found = [part for part in parts if isinstance(part, ToolCall)]
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert [call.index for call in found] == list(range(len(found)))
    assert len({call.id for call in found}) == len(found)


def test_text_that_is_certain_is_not_held_back():
    splitter = Splitter(thinking="open", tool_format="json")
    assert splitter.push("so it is") == [Text("so it is", is_reasoning=True)]
    assert splitter.push(" <") == []
    assert splitter.push("b") == [Text(" <b", is_reasoning=True)]


def test_the_prompt_says_whether_a_thought_is_open():
    template = "{% if tools %}<tool_call>{% endif %}<think>"
    assert thinking_of(template, "User: x\n<think>\n") == "open"
    assert thinking_of(template, "User: x\n<think>\n\n</think>\n\n") == "none"
    assert thinking_of(template, "User: x\nAssistant:") == "possible"
    assert thinking_of("{{ messages }}", "<think>") == "none"
    assert tool_format_of(template) == "json"
    assert tool_format_of(template + "<function=") == "xml"
    assert tool_format_of("<tool_call>") is None
    assert tool_format_of("{{ tools }}") is None
