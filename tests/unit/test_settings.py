"""The diagnosis variables: read once, and never without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertide import settings
from expertide.errors import RequestError
from expertide.settings import Settings


def test_without_variables_everything_has_its_default() -> None:
    assert Settings.from_env({"PATH": "/bin", "XEXPERTIDE_KERNEL": "reference"}) == Settings()


def test_every_variable_is_read_and_described() -> None:
    env = {
        "EXPERTIDE_KERNELS": "reference",
        "EXPERTIDE_CPU_ISA": "base",
        "EXPERTIDE_ACTIVATION_BITS": "8",
        "EXPERTIDE_SERIAL_IO": "1",
        "EXPERTIDE_POISON": "1",
        "EXPERTIDE_DUMP": "folder",
        "EXPERTIDE_TRACEBACK": "1",
    }
    assert Settings.from_env(env) == Settings("reference", "base", 8, True, True, Path("folder"), True)
    assert settings.__doc__ is not None and set(env) <= set(settings.__doc__.split())


@pytest.mark.parametrize("name", ["EXPERTIDE_KERNEL", "EXPERTIDE_", "EXPERTIDE_kernels", "EXPERTIDE_RAM"])
@pytest.mark.parametrize("value", ["reference", ""])
def test_an_unknown_variable_is_refused_with_the_known_ones(name: str, value: str) -> None:
    """A typing error would run the very kernels that somebody wanted out of the question."""
    with pytest.raises(RequestError, match=f"^{name}: no such environment variable; known: EXPERTIDE_KERNELS, "):
        Settings.from_env({name: value})
