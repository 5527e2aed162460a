"""Memory of large buffers goes back to the system when they are freed: the plan counts what is in use, not what was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from expert_world import World, write_experts
from expertide.experts.executor import MoEExecutor
from expertide.kernels import select
from expertide.memory import heap
from expertide.units import MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="resident sets are read from /proc")

# In a fresh process, as the setting holds for a whole one. Small blocks between the large ones hold the heap's end up.
_FREE_LARGE_BUFFERS = """
import torch
from pathlib import Path
from expertide.memory import heap

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if not heap.return_large_buffers():
    raise SystemExit("no mallopt")
torch.ones(31 << 18)  # freed at once: from here on glibc by itself would keep buffers of up to 31 MiB on the heap
before = resident_bytes()
buffers = [(torch.ones(20 << 18), torch.ones(4096)) for _ in range(8)]
small = [pair[1] for pair in buffers]
assert resident_bytes() - before > 150 << 20
del buffers
print(resident_bytes() - before)
"""


def test_freed_buffers_of_a_chunk_leave_the_resident_set() -> None:
    """The heap kept them: a prefill chunk of 4,000 tokens took 1,190 MiB of a budget of 767."""
    run = subprocess.run([sys.executable, "-c", _FREE_LARGE_BUFFERS], capture_output=True, text=True, check=False)
    if "no mallopt" in run.stderr:
        pytest.skip("the C library is not glibc")
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 16 * MIB, f"{int(run.stdout) / MIB:.0f} MiB of 160 stayed resident"


@pytest.mark.parametrize("kernels_name", ["native", "reference"])
def test_results_of_a_chunk_go_back_when_its_layer_is_done(tmp_path: Path, kernels_name: str) -> None:
    """Kept for the next layer, they came on top of its attention, which the plan does not add up."""
    heap.return_large_buffers()
    num_tokens, k, hidden = 16384, 8, 64  # results of 32 MiB
    file = write_experts(tmp_path / "experts.bin", hidden=hidden, inner=8)
    kernels = select(kernels_name, num_threads=2)
    with World(file, k=k) as world:
        executor = MoEExecutor(file.catalog, world.cache, world.residency, world.reader, kernels)
        ids_TK = torch.arange(k, dtype=torch.int32).repeat(num_tokens, 1)
        x_TH, weights_TK = torch.ones(num_tokens, hidden), torch.ones(num_tokens, k)
        executor.run(1, x_TH[:1], ids_TK[:1], weights_TK[:1], "prefill")
        before = _resident_bytes()
        executor.run(1, x_TH, ids_TK, weights_TK, "prefill")
        left = _resident_bytes() - before
    kernels.close()
    assert left < 16 * MIB, f"{left / MIB:.0f} MiB stayed resident"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
