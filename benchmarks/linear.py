"""Speed of `linear` per quant type: GB/s of packed weights and multiply-adds a second, one token and many.

    python benchmarks/linear.py [--threads 2] [--types Q4_K,Q8_0] [--json FILE]

F32 with one token is nearly pure memory reading: the bound for all. The matrix is larger than a core's caches, so one
token measures memory and 64 tokens measure arithmetic. Run it alone; only like machines compare.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from expertide import _native
from expertide.formats import quants

ROWS, COLS = 65536, 2048


def random_rows(name: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Random packed rows whose scales are finite and ordinary: every 16-bit word that could be a float16 is masked."""
    quant = quants.by_name(name)
    nbytes = rows * quant.row_bytes(cols)
    if name in ("F32", "F16", "BF16"):
        values = rng.standard_normal(rows * cols, dtype=np.float32)
        if name == "F32":
            return values.view(np.uint8)
        return (
            values.astype(np.float16).view(np.uint8)
            if name == "F16"
            else values.view(np.uint8).reshape(-1, 4)[:, 2:].ravel()
        )
    raw = rng.integers(0, 256, nbytes + (-nbytes) % 2, dtype=np.uint8)
    raw = (raw.view(np.uint16) & np.uint16(0xBFFF)).view(np.uint8)[:nbytes]
    if name == "MXFP4":
        raw.reshape(-1, quant.block_bytes)[:, 0] = 120
    return raw


def measure(pool: object, name: str, num_tokens: int, samples: int) -> list[float]:
    rng = np.random.default_rng(0)
    quant = quants.by_name(name)
    rows = ROWS if num_tokens == 1 else ROWS // 16
    w = random_rows(name, rows, COLS, rng)
    x = rng.standard_normal((num_tokens, COLS), dtype=np.float32)
    y = np.empty((num_tokens, rows), dtype=np.float32)
    seconds = []
    for _ in range(samples + 1):
        start = time.perf_counter()
        _native.linear(pool, w.ctypes.data, quant.ggml_id, rows, COLS, x.ctypes.data, num_tokens, y.ctypes.data)
        seconds.append(time.perf_counter() - start)
    return [s / (rows * COLS) for s in seconds[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", default=",".join(q.name for q in quants.QUANT_TYPES.values()))
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pool = _native.ThreadPool(args.threads)
    records = []
    print(f"{'type':8} {'isa':5} {'tokens':>6} {'GB/s':>7} {'Gmac/s':>7}")
    for name in args.types.split(","):
        quant = quants.by_name(name)
        for isa in ("avx2", "base"):
            _native.set_isa(isa)
            for num_tokens in (1, 64):
                per_weight = measure(pool, name, num_tokens, args.samples)
                median = statistics.median(per_weight)
                gbs = quant.block_bytes / quant.block_size / median / 1e9
                print(f"{name:8} {isa:5} {num_tokens:6} {gbs:7.2f} {num_tokens / median / 1e9:7.2f}", flush=True)
                records.append({"type": name, "isa": isa, "tokens": num_tokens, "seconds_per_weight": per_weight})
    if args.json:
        machine = {"processor": platform.processor(), "machine": platform.machine(), "threads": args.threads}
        args.json.write_text(json.dumps({"machine": machine, "rows": ROWS, "cols": COLS, "samples": records}, indent=1))


if __name__ == "__main__":
    main()
