"""The model's chat template: jinja2, in a sandbox, with what real templates use.

Templates are programs from a stranger's file. They run in a sandbox that bounds their time and the size of what they
make (template_sandbox.py). Whatever goes wrong in one ends in a RequestError with the template's own message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from expertide.errors import RequestError


class ChatTemplate:
    """One compiled template.

    Args:
        template: jinja2 source, as in `tokenizer.chat_template`.
        bos_token, eos_token: their texts, or "" where the model has none.
        now: the clock behind `strftime_now`.

    Raises:
        RequestError: the template does not parse.
    """

    def __init__(
        self, template: str, *, bos_token: str, eos_token: str, now: Callable[[], datetime] = datetime.now
    ) -> None:
        # Here, because `expertide --help` and `plan` read tokenizers but render nothing.
        import jinja2

        from expertide.text.template_sandbox import BoundedEnvironment

        self._environment = BoundedEnvironment(now)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = self._environment.from_string(template)
        except jinja2.TemplateError as error:
            raise RequestError(f"chat template: {error}") from None
        except RecursionError:
            raise RequestError("chat template: nested too deeply") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: each with `role` and `content`: a string, None, or a list of text parts.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: more names for the template, such as `enable_thinking`.

        Raises:
            RequestError: a message has the wrong shape, or the template fails or refuses.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise RequestError(f"messages: got {type(messages).__name__}, expected a list of messages")
        names = {
            **self._tokens,
            "tools": tools,
            "documents": None,
            **variables,
            "messages": [_message(message, position) for position, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        from expertide.text.template_sandbox import MAX_RENDERED_CHARS, TemplateRefusedError

        pieces: list[str] = []
        num_chars = 0
        self._environment.start_clock()
        try:
            for piece in self._template.generate(names):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise TemplateRefusedError(f"gives more than {MAX_RENDERED_CHARS:,} characters")
        # The template is foreign code: it can raise anything that Python's own types raise.
        except Exception as error:
            raise RequestError(f"chat template: {_sentence(error)}") from None
        return "".join(pieces)


def _sentence(error: Exception) -> str:
    import jinja2

    from expertide.text.template_sandbox import TemplateRefusedError

    if isinstance(error, jinja2.TemplateError | TemplateRefusedError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _message(message: Mapping[str, Any], position: int) -> dict[str, Any]:
    """A message as templates expect it: content a string, or None next to tool calls."""
    where = f"messages[{position}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: found {type(message).__name__}, expected an object with role and content")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where}.role: expected a string such as 'user'")
    content = message.get("content")
    if isinstance(content, str):
        return dict(message)
    if content is None:
        # Templates tell a call without text by `content is none`; anywhere else None would break their concatenations.
        return {**message, "content": None if message.get("tool_calls") else ""}
    if isinstance(content, list | tuple):
        return {**message, "content": "".join(_text_of_part(part, where) for part in content)}
    raise RequestError(f"{where}.content: found {type(content).__name__}, expected a string or a list of text parts")


def _text_of_part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RequestError(f"{where}.content: part of type {kind!r} is not supported; only text parts are")
