"""The jinja2 environment of chat templates: programs from a stranger's file, run with bounds on time and size.

jinja2's immutable sandbox keeps a template away from Python's inner parts. What it does not do is added here:

    time    every turn of a loop, call of a macro and call of a function looks at the clock
    size    what makes a long value from short ones (*, **, +, ~, %, padding, joining, replacing) is bounded beforehand

Beyond jinja2 itself, as in transformers: `tojson` without HTML escapes, `strftime_now`, `raise_exception`, `break` and
`continue`, and the `{% generation %}` mark, which training uses and which here changes nothing. `lipsum` is left out.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# Rendered prompts of a million tokens are about 4 MB; beyond this a template is broken or hostile.
MAX_RENDERED_CHARS = 32 << 20
# Of processor time. Real templates take milliseconds, and a second for conversations of a million tokens.
MAX_RENDER_S = 10.0
_MAX_ITEMS = 1 << 20
_MAX_POWER_BITS = 4096
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_SIZED_FILTERS = ("batch", "center", "indent", "round", "slice", "wordwrap")
# Widths of seven digits, or computed ones, in "%…" and "{:…}".
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\d{7}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\d{7}|\{)")


class TemplateRefusedError(Exception):
    """A bound of the sandbox was reached."""


class GenerationMark(Extension):
    """`{% generation %}…{% endgeneration %}` marks what training learns from; only its body counts here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with bounds. Call `start_clock` before each rendering, in the thread that renders."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMark, loopcontrols])
        self._deadline = threading.local()
        for name in _SIZED_FILTERS:
            self.filters[name] = _sized(self.filters[name])
        for name, check in (("join", _check_join), ("replace", _check_replace), ("format", _check_percent)):
            self.filters[name] = _checked(self.filters[name], check)
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        del self.globals["lipsum"]

    def start_clock(self) -> None:
        """From now on this thread may render for MAX_RENDER_S."""
        self._deadline.cpu_s = time.thread_time() + MAX_RENDER_S

    def look_at_clock(self) -> None:
        """
        Raises:
            TemplateRefusedError: this rendering has taken too long.
        """
        if time.thread_time() > self._deadline.cpu_s:
            raise TemplateRefusedError(f"computes for more than {MAX_RENDER_S:g} s")

    def concat_bounded(self, *parts: Any) -> str:
        """`a ~ b ~ …`"""
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)), "")
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%":
            _check_percent(left)
        elif isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_length(len(left) + len(right), left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.look_at_clock()
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str):
            if name in _PADDING_METHODS:
                _check_sizes(args, kwargs)
            elif name == "join":
                _check_join(*args, owner)
            elif name == "replace":
                _check_replace(owner, *args)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        if isinstance(getattr(value, "__self__", None), str) and _WIDE_BRACES.search(value.__self__):
            raise TemplateRefusedError("formats with a width that is computed or above a million")
        return super().wrap_str_format(value)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Bounds().visit(source), *args, **kwargs)


class _Bounds(NodeTransformer):
    """Looks at the clock where a body can run again, and sends `~` through the bounded form."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_clock(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_clock(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _environment_call("concat_bounded", node.nodes, node.lineno)

    def _with_clock(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_environment_call("look_at_clock", [], node.lineno), lineno=node.lineno))
        return node


def _environment_call(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=lineno)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, >, & and ' for HTML; models were trained on plain JSON.
    _check_sizes((indent,), {})
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _sized(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose whole-number arguments size its result."""

    def check(*args: Any, **kwargs: Any) -> None:
        _check_sizes(args[1:], kwargs)

    return _checked(function, check)


def _checked(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """`function` behind `check`, which sees the template's own arguments."""
    # jinja2 marks filters that want the context or the environment in front of their arguments.
    is_passed = hasattr(function, "jinja_pass_arg")

    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*(args[1:] if is_passed else args), **kwargs)
        return function(*args, **kwargs)

    if is_passed:
        checked.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return checked


def _check_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _MAX_ITEMS:
            raise TemplateRefusedError(f"asks for a width or count of {_shown(value)}")


def _check_length(length: int, like: Any) -> None:
    if length > (MAX_RENDERED_CHARS if isinstance(like, str) else _MAX_ITEMS):
        raise TemplateRefusedError(f"makes a {'text' if isinstance(like, str) else 'list'} of {length:,} elements")


def _check_join(values: Any = (), separator: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(values, str | list | tuple):
        total = sum(len(value) if isinstance(value, str) else 0 for value in values)
        _check_length(total + len(str(separator)) * len(values), "")


def _check_replace(text: Any = "", old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        _check_length(len(text) + text.count(old) * len(new), "")


def _check_percent(form: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(form, str) and _WIDE_PERCENT.search(form):
        raise TemplateRefusedError("formats with a width that is computed or above a million")


def _check_product(left: Any, right: Any) -> None:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            most = MAX_RENDERED_CHARS if isinstance(sequence, str) else _MAX_ITEMS
            if len(sequence) * max(count, 0) > most:
                raise TemplateRefusedError(f"repeats a sequence {_shown(count)} times")
            return


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_POWER_BITS:
        raise TemplateRefusedError(f"computes a number of more than {_MAX_POWER_BITS} bits")


def _shown(number: int) -> str:
    return f"{number:,}" if number.bit_length() < 128 else "a huge number"
