"""The two kernels that are held against each other here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from expertide.kernels import select
from expertide.kernels.ops import Kernels


@pytest.fixture(scope="module")
def native() -> Iterator[Kernels]:
    kernels = select("native", num_threads=2)
    yield kernels
    kernels.close()


@pytest.fixture(scope="module")
def reference() -> Kernels:
    return select("reference", num_threads=1)
