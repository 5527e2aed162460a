"""What is decided before a weight is read, and once more when the process is larger than was assumed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from expertide.errors import BudgetError
from expertide.options import Options
from expertide.prepare import prepare, with_measured_interpreter
from expertide.units import MIB


def test_a_process_larger_than_assumed_leaves_less_for_experts():
    everything = prepare("demo", Options())
    assert everything.plan.holds_all_experts
    # Room for all experts but 4 MiB; the planner keeps a margin of 16 MiB.
    tight = prepare("demo", Options(ram=everything.plan.predicted_bytes + 16 * MIB - 4 * MIB))
    assert not tight.plan.holds_all_experts
    assumed = tight.needs.interpreter_bytes

    assert with_measured_interpreter(tight, assumed - MIB) is tight
    grown = with_measured_interpreter(tight, assumed + 2 * MIB)
    assert grown.plan.expert_cache_bytes == tight.plan.expert_cache_bytes - 2 * MIB
    assert grown.plan.predicted_bytes == tight.plan.predicted_bytes
    with pytest.raises(BudgetError, match=r"interpreter 0\.4\d GiB"):
        with_measured_interpreter(tight, assumed + 200 * MIB)


def test_what_the_caller_has_in_memory_counts_into_the_budget():
    code = (
        "import numpy; ballast = numpy.ones(300 << 20, numpy.uint8)\n"
        "from expertide import LLM\n"
        "LLM('demo', ram='400MiB')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "BudgetError: what must stay in RAM needs" in done.stderr
    without = code.replace("300 << 20", "1")
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
