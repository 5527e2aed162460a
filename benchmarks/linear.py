"""Speed of `linear` per quant type, for one token and many: GB/s of packed weights, multiply-adds a second.

    python benchmarks/linear.py [--types Q4_K,Q8_0] [--isas avx512,avx2] [--tokens 1,64,512] [--threads 1]
                                [--ggml FOLDER] [--json FILE]

Two sizes of matrix. `memory`: larger than a core's caches, so one token measures reading and many measure arithmetic.
`cached`: half a million weights that stay in the second cache, where one token measures instructions; beside it --ggml
times ggml's own row product (FOLDER holds libggml-cpu.so, as site-packages/llama_cpp/lib does).

The best of all samples counts, and with one thread its processor time for calls above a millisecond: on a machine that
others use, the clock and the median tell about them. Only like machines compare.

--bits 8 multiplies one plane of activations, as ggml does; 16, the program's default, two.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from expertide import _native
from expertide.formats import quants
from peer_ggml import GgmlRows

COLS = 2048
CACHED_ROWS = 256
FEW_ROWS = 16


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


def best_seconds(call: Callable[[], object], samples: int, clock: Callable[[], float] = time.perf_counter) -> float:
    call()
    best = float("inf")
    for _ in range(samples):
        start = clock()
        call()
        best = min(best, clock() - start)
    return best


def product(pool: object, name: str, rows: int, num_tokens: int, rng: np.random.Generator) -> Callable[[], object]:
    """A call of `linear` on a random matrix; what it needs stays alive in it."""
    quant = quants.by_name(name)
    w = random_rows(name, rows, COLS, rng)
    x = rng.standard_normal((num_tokens, COLS), dtype=np.float32)
    y = np.empty((num_tokens, rows), dtype=np.float32)
    # Looking up an address takes a microsecond in numpy: as long as forty rows.
    w_at, x_at, y_at = w.ctypes.data, x.ctypes.data, y.ctypes.data

    def call(_alive: object = (w, x, y)) -> None:
        _native.linear(pool, w_at, quant.ggml_id, rows, COLS, x_at, num_tokens, y_at)

    return call


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--types", default=",".join(q.name for q in quants.QUANT_TYPES.values()))
    parser.add_argument("--isas", default="", help="default: all that this processor has")
    parser.add_argument("--tokens", default="1,64,512")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--bits", type=int, default=16, choices=(8, 16), help="of activations")
    parser.add_argument("--ggml", type=Path, help="folder of ggml's libraries")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pool = _native.ThreadPool(args.threads)
    _native.set_activation_bits(args.bits)
    ggml = GgmlRows(args.ggml) if args.ggml else None
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    records = []

    def report(name: str, isa: str, size: str, num_tokens: int, rows: int, seconds: float) -> None:
        quant = quants.by_name(name)
        weights = rows * COLS
        gbs = weights * quant.block_bytes / quant.block_size / seconds / 1e9
        gmacs = num_tokens * weights / seconds / 1e9
        print(f"{name:7} {isa:12} {size:6} {num_tokens:6} {gbs:7.2f} {gmacs:8.2f}", flush=True)
        records.append(
            {"type": name, "isa": isa, "size": size, "tokens": num_tokens, "gb_per_s": gbs, "gmac_per_s": gmacs}
        )

    print(f"{'type':7} {'isa':12} {'size':6} {'tokens':>6} {'GB/s':>7} {'Gmac/s':>8}")
    for name in args.types.split(","):
        for isa in args.isas.split(",") if args.isas else _native.available_isas():
            _native.set_isa(isa)
            rng = np.random.default_rng(0)
            # A matrix rounds its activations once, whatever its rows: the difference of two sizes leaves that out, as
            # ggml's row product does, and the call as well.
            seconds = best_seconds(product(pool, name, CACHED_ROWS, 1, rng), 40 * args.samples)
            seconds -= best_seconds(product(pool, name, FEW_ROWS, 1, rng), 40 * args.samples)
            report(name, isa, "cached", 1, CACHED_ROWS - FEW_ROWS, seconds)
            for num_tokens in (int(word) for word in args.tokens.split(",")):
                rows = 32768 if num_tokens == 1 else 2048
                seconds = best_seconds(product(pool, name, rows, num_tokens, rng), args.samples, clock)
                report(name, isa, "memory", num_tokens, rows, seconds)
        if ggml is not None:
            rng = np.random.default_rng(0)
            w = random_rows(name, CACHED_ROWS, COLS, rng)
            x = rng.standard_normal(CACHED_ROWS * COLS, dtype=np.float32)
            call, _ = ggml.product(quants.by_name(name).ggml_id, w, x)
            report(name, f"ggml-{ggml.isa}", "cached", 1, CACHED_ROWS, best_seconds(call, 40 * args.samples))
    if args.json:
        about = {
            "command": "benchmarks/linear.py",
            "commit": commit(),
            "processor": processor(),
            "threads": args.threads,
            "activation_bits": args.bits,
            "cols": COLS,
            "statistic": f"best of {args.samples}",
        }
        args.json.write_text(json.dumps({**about, "samples": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
