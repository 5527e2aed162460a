"""Times candidates for kernels/gpu/launch_table.py on this GPU and prints the best of each entry.

    python benchmarks/gpu_tune.py

A candidate's time is the geometric mean over its cases, in the shapes of benchmarks/gpu_kernels.py; an entry is tuned
with the best of those before it. What is printed is for a person to weigh: a large GPU likes other tiles than a small
one.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))

import gpu_kernels as bench
from expertide.kernels.gpu import experts, launch_table, products
from expertide.kernels.gpu.launch_table import AttentionLaunch, RowLaunch, TileLaunch

Calls = Sequence[Callable[[], object]]


def microseconds(candidate: dict[str, Any], cases: Sequence[Calls]) -> list[float]:
    with ExitStack() as patched:
        for name, value in candidate.items():
            patched.enter_context(mock.patch.object(launch_table, name, value))
        return [round(statistics.median(bench.graph_seconds(list(calls))) * 1e6, 2) for calls in cases]


def choose(candidates: Sequence[dict[str, Any]], cases: Sequence[Calls]) -> None:
    """Leave the fastest candidate in the table."""
    best: tuple[float, dict[str, Any]] | None = None
    for candidate in candidates:
        try:
            found = microseconds(candidate, cases)
        except Exception as error:  # a tile that does not fit this GPU is no candidate
            print(candidate, type(error).__name__, str(error)[:120])
            continue
        print(candidate, found, flush=True)
        score = math.prod(found)
        if best is None or score < best[0]:
            best = score, candidate
    assert best is not None
    for name, value in best[1].items():
        setattr(launch_table, name, value)
    print("best:", best[1], flush=True)


def row_launches(name: str, *launches: tuple[int, int, int]) -> list[dict[str, Any]]:
    return [{name: RowLaunch(*launch)} for launch in launches]


def tile_launches(name: str, *launches: tuple[int, int, int, int, int]) -> list[dict[str, Any]]:
    return [{name: TileLaunch(*launch)} for launch in launches]


def tune_linear() -> None:
    shapes = (("Q4_K", 2048, 2048), ("Q4_K", 2816, 2048), ("Q5_0", 2048, 1408), ("Q6_K", 20480, 2048))
    cases = [bench.linear_calls(*shape, 1)[0] for shape in shapes]
    launches = (
        (1, 32, 1),
        (2, 32, 1),
        (4, 32, 1),
        (8, 32, 1),
        (4, 16, 1),
        (8, 32, 4),
        (4, 64, 2),
        (2, 64, 2),
        (4, 64, 4),
    )
    choose(row_launches("LINEAR", *launches), cases)
    joint = [w.heads(16, rows=128, stride=256, is_transposed=True) for w in bench.matrices("Q8_0", 4096, 512, 40)]
    q = torch.randn(1, 16, 128, device=bench.DEVICE)
    calls = [lambda w=w: products.head_linear(q, w) for w in joint]
    launches = ((16, 4, 4), (64, 4, 4), (32, 4, 4), (64, 2, 4), (128, 2, 4), (128, 1, 4))
    choose(row_launches("TRANSPOSED", *launches), [calls])
    cases = [bench.linear_calls(name, 2048, 2048, 512)[0][:8] for name in ("Q4_K", "Q8_0")]
    tiles = ((64, 64, 4, 4, 1), (64, 64, 4, 4, 2), (128, 64, 4, 8, 1), (128, 64, 4, 8, 2), (128, 64, 4, 8, 3),
             (128, 64, 4, 4, 2), (128, 128, 4, 8, 2), (64, 64, 8, 4, 2))  # fmt: skip
    choose(tile_launches("GEMM", *tiles), cases)


def tune_experts() -> None:
    shape, _held, table = bench.routed_experts("Q5_0")
    x = torch.randn(1, bench.HIDDEN, device=bench.DEVICE)
    every = torch.arange(bench.NUM_EXPERTS, dtype=torch.int32, device=bench.DEVICE)
    turns = [every.roll(6 * turn)[:6].view(1, 6).contiguous() for turn in range(40)]
    calls = [lambda ids=ids: experts.expert_mlp(x, ids, table, shape) for ids in turns]
    launches = ((1, 32, 1), (2, 32, 1), (4, 32, 1), (2, 64, 2), (4, 64, 4), (4, 16, 1), (8, 16, 1))
    choose(row_launches("EXPERT_GATE_UP", *launches), [calls])
    choose(row_launches("EXPERT_DOWN", *launches), [calls])
    chunk = torch.randn(512, bench.HIDDEN, device=bench.DEVICE) * 0.1
    ids = torch.rand(512, bench.NUM_EXPERTS, device=bench.DEVICE).topk(6).indices.to(torch.int32)
    tiles = ((64, 64, 4, 4, 1), (64, 64, 4, 4, 2), (64, 32, 4, 4, 1), (64, 64, 4, 8, 1), (64, 128, 4, 8, 1),
             (32, 64, 4, 4, 1), (128, 64, 4, 8, 1))  # fmt: skip
    calls = [lambda: experts.expert_mlp(chunk, ids, table, shape)] * 3
    choose(tile_launches("EXPERT_GEMM", *tiles), [calls])


def tune_attention() -> None:
    candidates = [
        {
            "MIN_SPLIT_KEYS": least,
            "MAX_KEY_SPLITS": most,
            "DECODE_ATTENTION_WIDE": AttentionLaunch(16, keys, warps, stages),
        }
        for least, most in ((16, 64), (32, 64), (64, 64), (32, 128), (64, 128))
        for keys, warps, stages in ((16, 4, 2), (16, 8, 2), (32, 4, 1))
        if keys <= least
    ]
    choose(candidates, [bench.latent_calls(1, length, 40) for length in (512, 4096)])


if __name__ == "__main__":
    tune_linear()
    tune_experts()
    tune_attention()
