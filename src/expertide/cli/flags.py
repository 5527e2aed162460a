"""Flags from dataclasses: the fields of `Options` and `SamplingParams` become options of a command."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from expertide.engine.sampling import SamplingParams
from expertide.errors import RequestError
from expertide.options import Options, flags_of

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A .gguf file (any part of a split set), a directory, a pulled ORG/NAME, or demo."
    ),
]
JsonFlag = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON; - is stdout.")]

# Filters of a draw: at temperature 0 there is no draw, so a value other than "off" could not take effect.
_DRAW_ONLY = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def with_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Replace parameters annotated `Options` or `SamplingParams` by one flag per field.

    A value out of range is a usage error: exit 2, before any file is opened.
    """
    signature = inspect.signature(function, eval_str=True)
    plain: list[inspect.Parameter] = []
    classes: dict[str, type] = {}
    for parameter in signature.parameters.values():
        if parameter.annotation in (Options, SamplingParams):
            classes[parameter.name] = parameter.annotation
        else:
            plain.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    for kind in classes.values():
        plain.extend(_flag(entry, typing.get_type_hints(kind)) for entry in _flag_fields(kind))

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, kind in classes.items():
            given = {entry.name: values.pop(entry.name) for entry in _flag_fields(kind)}
            values[name] = _build(kind, {key: value for key, value in given.items() if value is not None})
        function(**values)

    command.__signature__ = signature.replace(parameters=plain)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in plain}
    return command


def _flag_fields(kind: type) -> list[dataclasses.Field[Any]]:
    return [entry for entry in dataclasses.fields(kind) if entry.metadata.get("help")]


def _flag(entry: dataclasses.Field[Any], hints: dict[str, Any]) -> inspect.Parameter:
    shown = "" if entry.default is None or entry.default == () else f"  [{_default_text(entry.default)}]"
    option = typer.Option(
        *flags_of(entry), help=entry.metadata["help"] + shown, metavar=entry.metadata["metavar"], show_default=False
    )
    return inspect.Parameter(
        entry.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[typing.Optional[_plain_type(hints[entry.name])], option],  # noqa: UP045
    )


def _default_text(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _plain_type(hint: Any) -> Any:
    """What the parser reads: `str | int` sizes are text, `int | None` is int, a tuple of texts may be given again."""
    if typing.get_origin(hint) is tuple:
        return list[str]
    if isinstance(hint, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        return str if str in members else members[0]
    return hint


def _build(kind: type, values: dict[str, Any]) -> Any:
    try:
        built = kind(**values)
    except RequestError as error:
        raise typer.BadParameter(_by_flag(kind, str(error))) from None
    if isinstance(built, SamplingParams) and built.is_greedy:
        for name, off in _DRAW_ONLY.items():
            if values.get(name, off) != off:
                flag = "--" + name.replace("_", "-")
                raise typer.BadParameter(f"{flag} has no effect at temperature 0; set --temperature above 0")
    return built


def _by_flag(kind: type, text: str) -> str:
    """A message that begins with a field's name, as the Python door words it, begins with the flag instead."""
    name, colon, rest = text.partition(":")
    for entry in _flag_fields(kind):
        if colon and entry.name == name:
            return f"{flags_of(entry)[0]}:{rest}"
    return text
