"""Typed access to the metadata of a model file: the value or one sentence that names file, key, found, expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

from expertide.errors import FormatError
from expertide.formats.header_reader import shown, shown_path
from expertide.formats.tensors import ModelFiles

# The methods are named after the types they return; inside the class these names are the methods.
_Int: TypeAlias = int
_Float: TypeAlias = float
_Str: TypeAlias = str
_Bool: TypeAlias = bool

_MAX_INT = 2**31 - 1


class _Required:
    """Type of the default that means: there is none."""


REQUIRED: Final = _Required()


class Metadata:
    """The metadata of one model, with checked types.

    Args:
        values: as `ModelFiles.metadata`.
        source: what error messages begin with, normally the file's path.
    """

    def __init__(self, values: Mapping[_Str, object], source: _Str) -> None:
        self.values = values
        self.source = shown_path(Path(source))

    @classmethod
    def of(cls, files: ModelFiles) -> Metadata:
        """The metadata of these files; messages name the first of them."""
        return cls(files.metadata, str(files.files[0]))

    def __contains__(self, key: object) -> _Bool:
        return key in self.values

    def int(
        self, key: _Str, default: _Int | _Required = REQUIRED, *, minimum: _Int = 0, maximum: _Int = _MAX_INT
    ) -> _Int:
        """A whole number between `minimum` and `maximum`, both included; `default` when the key is absent.

        Raises:
            FormatError: absent without a default, another type, or out of range.
        """
        if key not in self.values and not isinstance(default, _Required):
            return default
        return self._checked_int(key, self._value(key), minimum, maximum)

    def float(self, key: _Str, default: _Float | _Required = REQUIRED) -> _Float:
        """A number; whole numbers are accepted. Finite.

        Raises:
            FormatError: absent without a default, another type, infinite or NaN.
        """
        if key not in self.values and not isinstance(default, _Required):
            return default
        return self._checked_float(key, self._value(key))

    def str(self, key: _Str, default: _Str | _Required = REQUIRED) -> _Str:
        """A text.

        Raises:
            FormatError: absent without a default, or another type.
        """
        if key not in self.values and not isinstance(default, _Required):
            return default
        value = self._value(key)
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def bool(self, key: _Str, default: _Bool | _Required = REQUIRED) -> _Bool:
        """True or false.

        Raises:
            FormatError: absent without a default, or another type.
        """
        if key not in self.values and not isinstance(default, _Required):
            return default
        value = self._value(key)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def per_layer_int(
        self,
        key: _Str,
        num_layers: _Int,
        default: _Int | _Required = REQUIRED,
        *,
        minimum: _Int = 0,
        maximum: _Int = _MAX_INT,
    ) -> tuple[_Int, ...]:
        """One whole number per layer; a file may give one number for all layers, or an array.

        Raises:
            FormatError: absent without a default, another type, out of range, or an array of another length.
        """
        if key not in self.values and not isinstance(default, _Required):
            return (default,) * num_layers
        return tuple(self._checked_int(key, value, minimum, maximum) for value in self._per_layer(key, num_layers))

    def per_layer_float(
        self, key: _Str, num_layers: _Int, default: _Float | _Required = REQUIRED
    ) -> tuple[_Float, ...]:
        """One number per layer, as `per_layer_int`."""
        if key not in self.values and not isinstance(default, _Required):
            return (default,) * num_layers
        return tuple(self._checked_float(key, value) for value in self._per_layer(key, num_layers))

    def fail(self, key: _Str, message: _Str) -> FormatError:
        """The error to raise about a key whose value has the right type but makes no sense."""
        return FormatError(f"{self.source}: {shown(key)}: {message}")

    def _per_layer(self, key: _Str, num_layers: _Int) -> list[object]:
        value = self._value(key)
        if not isinstance(value, list):
            return [value] * num_layers
        if len(value) != num_layers:
            raise self.fail(key, f"an array of {len(value):,} values; expected one per layer, {num_layers:,}")
        return value

    def _value(self, key: _Str) -> object:
        if key not in self.values:
            raise FormatError(f"{self.source}: metadata has no {shown(key)}, which this model needs")
        return self.values[key]

    def _checked_int(self, key: _Str, value: object, minimum: _Int, maximum: _Int) -> _Int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "a whole number")
        if not minimum <= value <= maximum:
            raise self.fail(key, f"found {shown(format(value, ','))}, expected {minimum:,} to {maximum:,}")
        return value

    def _checked_float(self, key: _Str, value: object) -> _Float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            raise self._wrong(key, value, "a number") from None
        if not math.isfinite(number):
            raise self.fail(key, f"found {number}, expected a finite number")
        return number

    def _wrong(self, key: _Str, value: object, expected: _Str) -> FormatError:
        return self.fail(key, f"found {_described(value)}, expected {expected}")


def _described(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"an array of {len(value):,} values"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, str):
        return f"the text {shown(value)!r}"
    return f"{type(value).__name__} {shown(value)}"
