"""What is decided before a weight is read, and once more when the process is larger than was assumed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import spec_from_file_location

import pytest

from expertide import _native
from expertide.errors import BudgetError
from expertide.formats.quants import by_name
from expertide.kernels import tiles
from expertide.options import Options
from expertide.prepare import (
    CUDA_INTERPRETER_BYTES,
    INTERPRETER_BYTES,
    THREAD_BYTES,
    prepare,
    with_measured_interpreter,
)
from expertide.settings import Settings
from expertide.units import MIB


def test_a_process_larger_than_assumed_leaves_less_for_experts():
    everything = prepare("demo", Options())
    assert everything.plan.cached_share == 1.0
    # Room for all experts but 4 MiB; the planner keeps a margin of 16 MiB.
    tight = prepare("demo", Options(ram=everything.plan.predicted_bytes + 16 * MIB - 4 * MIB))
    assert tight.plan.cached_share < 1.0
    assumed = tight.needs.interpreter_bytes

    assert with_measured_interpreter(tight, assumed - MIB) is tight
    grown = with_measured_interpreter(tight, assumed + 2 * MIB)
    assert grown.plan.expert_cache_bytes == tight.plan.expert_cache_bytes - 2 * MIB
    assert grown.plan.predicted_bytes == tight.plan.predicted_bytes
    with pytest.raises(BudgetError, match=r"interpreter 4\d\d MiB"):
        with_measured_interpreter(tight, assumed + 200 * MIB)


def test_what_the_caller_has_in_memory_counts_into_the_budget():
    def load(ballast_bytes: int, ram: str) -> subprocess.CompletedProcess[str]:
        code = (
            f"import numpy; ballast = numpy.ones({ballast_bytes}, numpy.uint8)\n"
            "from expertide import LLM\n"
            f"print(LLM('demo', ram={ram!r}).prepared.plan.predicted_bytes)"
        )
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    enough = int(load(1, "auto").stdout) // MIB + 32
    assert load(1, f"{enough}MiB").returncode == 0
    refused = load(300 * MIB, f"{enough}MiB")
    assert "BudgetError: what must stay in RAM needs" in refused.stderr


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("cuda: Optional[str] = '13.0'\n", CUDA_INTERPRETER_BYTES),
        ("cuda = '12.4'\n", CUDA_INTERPRETER_BYTES),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", INTERPRETER_BYTES),
    ],
)
def test_a_torch_built_for_gpus_is_known_without_importing_it(tmp_path, monkeypatch, version, expected):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('the plan must not import torch')")
    (package / "version.py").write_text(version)
    spec = spec_from_file_location("torch", package / "__init__.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert prepare("demo", Options(threads=1)).needs.interpreter_bytes == expected + THREAD_BYTES


def test_tiles_of_the_reference_kernels_are_planned_only_where_they_are_decoded(monkeypatch):
    native = prepare("demo", Options()).plan.workspace_bytes
    reference = prepare("demo", Options(), Settings(kernels="reference")).plan.workspace_bytes
    assert reference - native == tiles.decoding_bytes()
    # One type that only the reference knows is enough.
    known = _native.quant_types()
    monkeypatch.setattr("expertide._native.quant_types", lambda: [i for i in known if i != by_name("Q4_K").ggml_id])
    assert prepare("demo", Options()).plan.workspace_bytes == reference
