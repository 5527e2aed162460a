"""Every kernel is machine code for a card of compute capability 8.6, without such a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 99 << 10  # what one program may have on 8.6 and 8.9

# The types of a Q4_K_M file of DeepSeek-V2-Lite's experts; `python -m tests.gpu.cross_compile --types ...` does others.
TYPES = ("Q4_K", "Q5_0")


@pytest.mark.skipif(
    not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists(),
    reason="this triton package has no assembler for NVIDIA cards: the kernels are not compiled for one",
)
def test_every_kernel_fits_a_card_of_capability_8_6(tmp_path) -> None:
    # In a process of its own: this one may have triton as an interpreter.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.gpu.cross_compile", "--capability", "86", "--types", *TYPES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    names = {kernel["name"] for kernel in compiled}
    assert names >= {
        "linear_kernel", "transposed_kernel", "dequantise_kernel", "pack_kernel", "to_half_kernel", "gemm_kernel",
        "transposed_gemm_kernel", "decode_gate_up_kernel", "decode_down_kernel", "sum_kernel", "prefill_kernel",
        "attention_kernel", "merge_kernel", "rms_norm_kernel", "rope_kernel", "swiglu_kernel", "gate_rows_kernel",
        "route_kernel",
    }  # fmt: skip
    for kernel in compiled:
        assert kernel["shared_bytes"] <= SHARED_BYTES, kernel
        assert not kernel["has_fp8"], kernel
    # Decode is as fast as memory: its kernels keep everything in registers.
    spilling = [
        kernel for kernel in compiled
        if kernel["stack_bytes"] and kernel["name"] in ("linear_kernel", "decode_gate_up_kernel", "decode_down_kernel")
    ]  # fmt: skip
    assert not spilling, spilling
