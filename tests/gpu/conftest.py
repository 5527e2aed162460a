"""Kernels for a GPU, on a GPU where there is one, else in triton's interpreter (tests/conftest.py turns it on)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install triton, Linux only): GPU kernels untested")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def few_programs(device) -> Iterator[None]:
    """The interpreter takes some milliseconds a program and hardly longer for a larger one."""
    from expertide.kernels.gpu import launch_table
    from expertide.kernels.gpu.launch_table import RowLaunch

    names = ("LINEAR", "EXPERT_GATE_UP", "EXPERT_DOWN") if device == "cpu" else ()
    before = {name: getattr(launch_table, name) for name in names}
    for name, launch in before.items():
        setattr(launch_table, name, RowLaunch(4 * launch.rows, launch.chunks, launch.num_warps))
    yield
    for name, launch in before.items():
        setattr(launch_table, name, launch)
