"""The model's chat template: jinja2, in a sandbox, with what real templates use.

Templates are programs from a stranger's file. They run in jinja2's immutable sandbox (no attributes of Python's inner
parts, no changes to what they are given), products and powers are bounded, and so is the text that comes out.
Whatever goes wrong in one ends in a RequestError with the template's own message.

Beyond jinja2 itself, as in transformers: `tojson` without HTML escapes, `strftime_now`, `raise_exception`, `break` and
`continue`, and the `{% generation %}` mark, which training uses and which here changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from expertide.errors import RequestError

# Rendered prompts of a million tokens are about 4 MB; beyond this a template is broken or hostile.
MAX_RENDERED_CHARS = 32 << 20
_MAX_POWER_BITS = 4096


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
        import jinja2  # here, because `expertide --help` and `plan` read tokenizers but render nothing

        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment(now).from_string(template)
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
        names = {
            **self._tokens,
            "tools": tools,
            "documents": None,
            **variables,
            "messages": [_message(message, position) for position, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(names):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise _TemplateRefusedError(f"gives more than {MAX_RENDERED_CHARS:,} characters")
        # The template is foreign code: it can raise anything that Python's own types raise.
        except Exception as error:
            raise RequestError(f"chat template: {_sentence(error)}") from None
        return "".join(pieces)


class _TemplateRefusedError(Exception):
    """A bound of the sandbox was reached, or the template called raise_exception."""


def _sentence(error: Exception) -> str:
    import jinja2

    if isinstance(error, jinja2.TemplateError | _TemplateRefusedError) and str(error):
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


def _environment(now: Callable[[], datetime]) -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationMark(Extension):
        """`{% generation %}…{% endgeneration %}` marks what training learns from; only its body counts here."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        """The sandbox, with bounds on the two operators that turn a short template into gigabytes."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "*":
                _check_product(left, right)
            else:
                _check_power(left, right)
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return now().strftime(form)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own filter escapes <, >, & and ' for HTML; models were trained on plain JSON.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMark, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _check_product(left: Any, right: Any) -> None:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            if len(sequence) * max(count, 0) > MAX_RENDERED_CHARS:
                raise _TemplateRefusedError(f"repeats a sequence {count:,} times")
            return


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_POWER_BITS:
        raise _TemplateRefusedError(f"computes a number of more than {_MAX_POWER_BITS} bits")
