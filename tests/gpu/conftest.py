"""Kernels for a GPU, on a GPU where there is one, else in triton's interpreter (tests/conftest.py turns it on)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install triton, Linux only): GPU kernels untested")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
