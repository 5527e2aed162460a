"""Speed of attention: decode at a depth and prefill of a chunk, beside torch and the bounds.

    python benchmarks/attention.py [--shape v2-lite] [--threads 2] [--json FILE]

Both bounds are measured here: memory reads, and multiply-adds a second as a large float32 product in torch, which may
use wider vectors than our kernels (ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 hold it to AVX2). One layer.
Of latent attention the part on latents: absorbed queries in, weighted latents out. Grouped-query attention is measured
whole: queries and cached rows in, weighted values out. With one thread CPU time is taken, which a busy machine disturbs
less.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from expertide import _native
from expertide.kernels.reference.attention import _attend
from expertide.kernels.reference.grouped_attention import gqa_attention

HEADS, RANK, ROPE = 16, 512, 64
GROUPED = {"qwen3": (32, 4, 128), "olmoe": (16, 16, 128)}  # heads, key/value heads, head size
CASES = [(1000, 1), (4000, 1), (8000, 1), (0, 512), (3500, 512)]  # tokens before, tokens at once
TORCH_QUERIES = 128  # as tiles.queries_per_tile(16)


def seconds(run: Callable[[], object], samples: int, clock: Callable[[], float]) -> list[float]:
    run()
    found = []
    for _ in range(samples):
        start = clock()
        run()
        found.append(clock() - start)
    return found


class LatentCase:
    def __init__(self, past: int, tokens: int) -> None:
        self.past, self.tokens = past, tokens
        generator = torch.Generator().manual_seed(past + tokens)
        self.rows = torch.randn(past + tokens, RANK + ROPE, generator=generator).half()
        self.qa = torch.randn(tokens, HEADS, RANK, generator=generator) / 5
        self.q_rope = torch.randn(tokens, HEADS, ROPE, generator=generator)
        self.out = torch.empty_like(self.qa)
        keys = sum(past + t + 1 for t in range(tokens))
        self.multiply_adds = keys * HEADS * (2 * RANK + ROPE)

    def native(self, pool: _native.ThreadPool) -> None:
        address = self.rows.data_ptr()
        rows = (address, address + 2 * RANK, RANK + ROPE, RANK + ROPE, True)
        _native.latent_mean(
            pool, HEADS, RANK, ROPE, rows, self.qa.data_ptr(), self.q_rope.data_ptr(), self.tokens, self.past, 0.1,
            self.out.data_ptr(),
        )  # fmt: skip

    def torch(self) -> None:
        for begin in range(0, self.tokens, TORCH_QUERIES):
            end = min(begin + TORCH_QUERIES, self.tokens)
            rows = self.rows[: self.past + end]
            _attend(
                self.qa[begin:end], self.q_rope[begin:end], rows[:, :RANK], rows[:, RANK:], scale=0.1,
                first_position=self.past + begin,
            )  # fmt: skip


class GroupedCase:
    def __init__(self, past: int, tokens: int, sizes: tuple[int, int, int]) -> None:
        self.past, self.tokens, self.sizes = past, tokens, sizes
        heads, kv_heads, dim = sizes
        generator = torch.Generator().manual_seed(past + tokens)
        self.keys, self.values = (
            torch.randn(kv_heads, past + tokens, dim, generator=generator).half() for _ in range(2)
        )
        self.q = torch.randn(tokens, heads, dim, generator=generator)
        self.out = torch.empty_like(self.q)
        self.multiply_adds = sum(past + t + 1 for t in range(tokens)) * heads * 2 * dim

    def native(self, pool: _native.ThreadPool) -> None:
        dim, head = self.sizes[2], self.keys.stride(0)
        rows = (self.keys.data_ptr(), self.values.data_ptr(), dim, dim, head, head, True)
        _native.gqa_attention(
            pool, self.sizes, rows, self.q.data_ptr(), self.tokens, self.past, 0.1, self.out.data_ptr()
        )  # fmt: skip

    def torch(self) -> None:
        gqa_attention(self.q, self.keys, self.values, scale=0.1, first_position=self.past)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=["v2-lite", *GROUPED], default="v2-lite")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    pool = _native.ThreadPool(arguments.threads)

    square = torch.randn(2048, 2048)
    peak = 2048**3 / min(seconds(lambda: square @ square, 7, clock))
    big = np.ones(64 << 20, dtype=np.float32)
    memory = big.nbytes / min(seconds(big.sum, 5, clock))
    print(f"float32 product {peak / 1e9:.1f} GMAC/s, one thread reads {memory / 1e9:.1f} GB/s, isa {_native.isa()}")
    report: dict[str, object] = {
        "shape": arguments.shape, "machine": platform.processor() or platform.machine(),
        "isa": _native.isa(), "threads": arguments.threads,
        "float32_product_gmacs": peak / 1e9, "memory_gbps_one_thread": memory / 1e9, "cases": [],
    }  # fmt: skip
    results = []
    with torch.inference_mode():
        for past, tokens in CASES:
            grouped = GROUPED.get(arguments.shape)
            case = LatentCase(past, tokens) if grouped is None else GroupedCase(past, tokens, grouped)
            ours: list[float] = []
            theirs: list[float] = []
            for _ in range(3):  # alternating
                ours += seconds(lambda case=case: case.native(pool), arguments.samples // 3, clock)
                theirs += seconds(case.torch, arguments.samples // 3, clock)
            us, them = statistics.median(ours), statistics.median(theirs)
            print(
                f"{tokens:4d} tokens after {past:5d}: {us * 1e3:8.2f} ms, {case.multiply_adds / us / 1e9:6.1f} GMAC/s"
                f" ({case.multiply_adds / us / peak:4.0%} of the product's), torch {them * 1e3:8.2f} ms"
                f" ({them / us:.2f} x)"
            )
            results.append({"past": past, "tokens": tokens, "native_s": ours, "torch_s": theirs})
    report["cases"] = results
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
