"""Typed metadata: the value, or one sentence with file, key, found and expected."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from expertide.errors import FormatError
from expertide.formats.metadata import Metadata

META = Metadata(
    {
        "n": 7,
        "negative": -1,
        "huge": 2**63,
        "x": 0.5,
        "inf": float("inf"),
        "name": "yarn",
        "flag": True,
        "layers": [1, 2, 3],
        "mixed": [1, "two", 3],
        "none": None,
        "object": {"a": 1},
    },
    "m.gguf",
)


def test_values_come_with_their_types() -> None:
    assert META.int("n") == 7
    assert META.int("negative", minimum=-1) == -1
    assert META.float("x") == 0.5
    assert META.str("name") == "yarn"
    assert META.bool("flag") is True
    whole = META.float("n")
    assert (whole, type(whole)) == (7.0, float)
    assert "n" in META and "m" not in META


def test_defaults_serve_absent_keys_only() -> None:
    assert META.int("absent", 3) == 3
    assert META.float("absent", 1.5) == 1.5
    assert META.str("absent", "") == ""
    assert META.bool("absent", False) is False
    assert META.per_layer_int("absent", 2, 9) == (9, 9)
    with pytest.raises(FormatError):
        META.int("name", 3)


def test_one_number_or_an_array_serves_every_layer() -> None:
    assert META.per_layer_int("n", 3) == (7, 7, 7)
    assert META.per_layer_int("layers", 3) == (1, 2, 3)
    assert META.per_layer_float("layers", 3) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: META.int("absent"), "m.gguf: metadata has no absent, which this model needs"),
        (lambda: META.int("x"), "m.gguf: x: found float 0.5, expected a whole number"),
        (lambda: META.int("flag"), "m.gguf: flag: found true, expected a whole number"),
        (lambda: META.int("layers"), "m.gguf: layers: found an array of 3 values, expected a whole number"),
        (lambda: META.int("none"), "m.gguf: none: found null, expected a whole number"),
        (lambda: META.int("negative"), "m.gguf: negative: found -1, expected 0 to 2,147,483,647"),
        (lambda: META.int("huge"), "m.gguf: huge: found 9,223,372,036,854,775,808, expected 0 to 2,147,483,647"),
        (lambda: META.int("n", minimum=8, maximum=9), "m.gguf: n: found 7, expected 8 to 9"),
        (lambda: META.float("name"), "m.gguf: name: found the text 'yarn', expected a number"),
        (lambda: META.float("inf"), "m.gguf: inf: found inf, expected a finite number"),
        (lambda: META.str("n"), "m.gguf: n: found int 7, expected text"),
        (lambda: META.str("object"), "m.gguf: object: found an object, expected text"),
        (lambda: META.bool("n"), "m.gguf: n: found int 7, expected true or false"),
        (lambda: META.per_layer_int("layers", 4), "m.gguf: layers: an array of 3 values; expected one per layer, 4"),
        (lambda: META.per_layer_int("mixed", 3), "m.gguf: mixed: found the text 'two', expected a whole number"),
    ],
)
def test_a_wrong_value_is_described(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(FormatError) as caught:
        ask()
    assert str(caught.value) == message
