"""What a chat template says about a model's own conventions: where it thinks, and how it calls tools.

Read from the template's text, since no file names them elsewhere; what is not recognised counts as absent.
"""

from __future__ import annotations

import re
from typing import Literal

THINK, THINK_END = "<think>", "</think>"
# "open": the prompt ends inside a thought; "possible": the answer may begin with one.
Thinking = Literal["none", "possible", "open"]
# "json": <tool_call>{"name": …, "arguments": {…}}</tool_call> (Hermes, Qwen2.5, Qwen3);
# "xml": <tool_call><function=…><parameter=…>…</parameter></function></tool_call> (Qwen3-Coder).
ToolFormat = Literal["json", "xml"]


def thinking_of(template: str | None, prompt: str) -> Thinking:
    """Whether an answer to this rendered prompt thinks first."""
    if template is None or (THINK not in template and THINK_END not in template):
        return "none"
    end = prompt.rstrip()
    if end.endswith(THINK):
        return "open"
    # Templates switch thinking off by an empty thought.
    return "none" if end.endswith(THINK_END) else "possible"


def has_tools(template: str | None) -> bool:
    """Whether the template shows tools to the model."""
    return template is not None and re.search(r"\btools\b", template) is not None


def tool_format_of(template: str | None) -> ToolFormat | None:
    """How the model calls tools; None where the template does not say so in a form that is known here."""
    if template is None or not has_tools(template) or "<tool_call>" not in template:
        return None
    return "xml" if "<function=" in template else "json"
