"""The GPU kernels: are they right on this GPU, and how fast are they beside its memory and its matrix units.

    python benchmarks/gpu_kernels.py [--json FILE] [--no-checks] [--only NAME...]

Checks are the tests of tests/gpu on this GPU. Times are those of replayed CUDA graphs that go through more weights
than the second-level cache holds, so that every byte counted comes from memory; `eager` is one call from Python,
launches included. Shapes are DeepSeek-V2-Lite's. Bounds are measured here: a copy (bytes read and written) and a
float16 product.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.packed_samples import TYPE_NAMES, random_weights  # noqa: E402

from expertide.formats.quants import by_name  # noqa: E402
from expertide.kernels.gpu import attention, experts, products, rows  # noqa: E402
from expertide.kernels.gpu.activations import Activations  # noqa: E402
from expertide.kernels.gpu.experts import ExpertShape  # noqa: E402
from expertide.kernels.gpu.matrix import GpuMatrix  # noqa: E402
from expertide.kernels.router import RouterSpec  # noqa: E402

ROTATED_BYTES = 384 << 20  # several times the second-level cache of any card so far
MAX_COPIES = 400
HIDDEN, INNER, NUM_EXPERTS, K = 2048, 1408, 64, 6
HEADS, RANK, ROPE = 16, 512, 64
DEVICE = "cuda"

Call = Callable[[], object]


class Report:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.copy_gbps = 0.0

    def add(self, name: str, calls: list[Call], *, num_bytes: int = 0, flops: float = 0.0, **extra: Any) -> None:
        samples = graph_seconds(calls)
        seconds = statistics.median(samples)
        row = {
            "name": name,
            "us": round(seconds * 1e6, 2),
            "spread": round(max(samples) / min(samples) - 1, 3),
            **extra,
        }
        if num_bytes:
            row["gbps"] = round(num_bytes / seconds / 1e9, 1)
            row["share_of_copy"] = round(row["gbps"] / self.copy_gbps, 3) if self.copy_gbps else None
        if flops:
            row["tflops"] = round(flops / seconds / 1e12, 2)
        self.rows.append(row)
        print(json.dumps(row), flush=True)


def graph_seconds(calls: list[Call], repeats: int = 7) -> list[float]:
    """Seconds of one call, one sample per replay of a graph of all `calls`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        calls[-1]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    samples = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return samples


def eager_us(call: Call, repeats: int = 200) -> float:
    """Microseconds of Python per call."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    found = (time.perf_counter() - start) / repeats * 1e6
    torch.cuda.synchronize()
    return round(found, 1)


def copies_for(num_bytes: int) -> int:
    return max(3, min(MAX_COPIES, -(-ROTATED_BYTES // num_bytes)))


def matrices(name: str, num_rows: int, cols: int, count: int) -> list[GpuMatrix]:
    """Equal in content, apart in memory."""
    quant = by_name(name)
    # A tenth of the rows repeated: random numbers for a large head would take longer than all the measuring.
    few = min(num_rows, 256)
    raw = torch.from_numpy(random_weights(quant, few, cols)).repeat(-(-num_rows // few), 1)[:num_rows].contiguous()
    first = GpuMatrix.from_file_bytes(raw.to(DEVICE), quant, num_rows, cols)
    made = [first]
    for _ in range(count - 1):
        made.append(GpuMatrix(first.data.clone(), quant, num_rows, cols, num_rows))
    return made


def bounds(report: Report) -> dict[str, float]:
    source = torch.randint(-(2**31), 2**31 - 1, (1 << 28,), dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    # A kernel that copies; the copy engine is slower.
    copy = statistics.median(graph_seconds([lambda: torch.add(source, 0, out=target)] * 3))
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.float16) for _ in range(2))
    product = statistics.median(graph_seconds([lambda: a @ b] * 3))
    report.copy_gbps = round(8 * source.numel() / copy / 1e9, 1)
    found = {"copy_gbps": report.copy_gbps, "float16_tflops": round(2 * 8192**3 / product / 1e12, 1)}
    print(json.dumps(found), flush=True)
    return found


def linear_calls(name: str, num_rows: int, cols: int, num_tokens: int) -> tuple[list[Call], int]:
    num_bytes = num_rows * by_name(name).row_bytes(cols)
    made = matrices(name, num_rows, cols, copies_for(num_bytes))
    # Packed once, as a layer does for the matrices that read the same activations.
    x = Activations(torch.randn(num_tokens, cols, device=DEVICE))
    return [lambda w=w: products.linear(x, w) for w in made], num_bytes


def time_linear(report: Report) -> None:
    for name in TYPE_NAMES:
        calls, num_bytes = linear_calls(name, 1408, 2048, 1)
        report.add(f"linear {name} 1408x2048", calls, num_bytes=num_bytes)
    shapes = [
        ("Q4_K", 576, 2048), ("Q4_K", 2048, 2048), ("Q4_K", 3072, 2048), ("Q4_K", 2816, 2048), ("Q4_K", 10944, 2048),
        ("Q5_0", 2048, 1408), ("Q8_0", 2048, 1408), ("Q8_0", 2048, 2816), ("Q5_0", 2048, 10944), ("Q6_K", 102400, 2048),
    ]  # fmt: skip
    for name, num_rows, cols in shapes:
        calls, num_bytes = linear_calls(name, num_rows, cols, 1)
        eager = eager_us(calls[0]) if (num_rows, cols) == (2048, 2048) else None
        report.add(f"linear {name} {num_rows}x{cols}", calls, num_bytes=num_bytes, eager=eager)
    x = torch.randn(1, HIDDEN, device=DEVICE)
    report.add("packing an activation of 2048", [lambda: Activations(x).row_operand(by_name("Q4_K"))] * 50)
    for num_tokens in (2, 4, 8, 16):
        calls, num_bytes = linear_calls("Q4_K", 2048, 2048, num_tokens)
        report.add(f"linear Q4_K 2048x2048, {num_tokens} tokens", calls, num_bytes=num_bytes)


def time_gemm(report: Report) -> None:
    for name, num_rows, cols in [("Q4_K", 2048, 2048), ("Q4_K", 3072, 2048), ("Q6_K", 2048, 2048), ("Q8_0", 2048, 2048),
                                 ("Q5_0", 2048, 10944), ("F16", 2048, 2048), ("F32", 64, 2048)]:  # fmt: skip
        calls, _ = linear_calls(name, num_rows, cols, 512)
        report.add(f"linear {name} {num_rows}x{cols}, 512 tokens", calls[:20], flops=2.0 * 512 * num_rows * cols)


def routed_experts(down: str) -> tuple[ExpertShape, list[tuple[GpuMatrix, GpuMatrix, GpuMatrix]], torch.Tensor]:
    shape = ExpertShape(HIDDEN, INNER, by_name("Q4_K"), by_name("Q4_K"), by_name(down))
    gate, up = (matrices("Q4_K", INNER, HIDDEN, NUM_EXPERTS) for _ in range(2))
    made = list(zip(gate, up, matrices(down, HIDDEN, INNER, NUM_EXPERTS), strict=True))
    return shape, made, experts.address_table(list(made))


def time_experts(report: Report) -> None:
    for down in ("Q5_0", "Q8_0"):
        shape, made, table = routed_experts(down)
        expert_bytes = sum(part.nbytes for part in made[0])
        for num_tokens in (1, 4):
            per_call = num_tokens * K
            calls = routed_calls(shape, table, num_tokens)
            report.add(
                f"experts Q4_K/{down}, {num_tokens} token(s) x {K}", calls, num_bytes=per_call * expert_bytes,
                eager=eager_us(calls[0]),
            )  # fmt: skip
    results, weights = torch.randn(1, K, HIDDEN, device=DEVICE), torch.rand(1, K, device=DEVICE)
    report.add("ordered sum, 1 token x 6", [lambda: experts.moe_sum(results, weights)] * 50)


def routed_calls(shape: ExpertShape, table: torch.Tensor, num_tokens: int) -> list[Call]:
    """Calls that go through all experts in turn, each token with its own."""
    x = torch.randn(num_tokens, HIDDEN, device=DEVICE) * 0.1
    weights = torch.rand(num_tokens, K, device=DEVICE)
    every = torch.randperm(NUM_EXPERTS, device=DEVICE).to(torch.int32)
    per_call = num_tokens * K
    turns = [
        every.roll(turn * per_call)[:per_call].view(num_tokens, K).contiguous()
        for turn in range(NUM_EXPERTS // per_call * 4)
    ]
    return [lambda ids=ids: experts.moe_sum(experts.expert_mlp(x, ids, table, shape), weights) for ids in turns]


def time_prefill_experts(report: Report) -> None:
    shape, _made, table = routed_experts("Q5_0")
    x = torch.randn(512, HIDDEN, device=DEVICE) * 0.1
    ids = torch.rand(512, NUM_EXPERTS, device=DEVICE).topk(K).indices.to(torch.int32)
    weights = torch.rand(512, K, device=DEVICE)
    flops = 2.0 * 3 * 512 * K * HIDDEN * INNER
    report.add(
        "experts Q4_K/Q5_0, 512 tokens x 6 of 64",
        [lambda: experts.moe_sum(experts.expert_mlp(x, ids, table, shape), weights)] * 5, flops=flops,
    )  # fmt: skip
    report.add("grouping of 512 x 6", [lambda: experts.group_by_expert(ids, NUM_EXPERTS, 64)] * 5)


def latent_calls(num_tokens: int, length: int, count: int) -> list[Call]:
    q, q_rope = (torch.randn(num_tokens, HEADS, size, device=DEVICE) for size in (RANK, ROPE))
    first = torch.tensor([length - num_tokens], dtype=torch.int32, device=DEVICE)
    calls: list[Call] = []
    for _ in range(count):
        latent, rope = (torch.randn(length, size, device=DEVICE).half() for size in (RANK, ROPE))
        calls.append(
            lambda latent=latent, rope=rope: attention.latent_attention(
                q, q_rope, latent, rope, scale=0.1, first_position=first, max_length=length
            )
        )
    return calls


def grouped_calls(num_tokens: int, length: int, count: int) -> list[Call]:
    heads, groups, dim = 32, 4, 128
    q = torch.randn(num_tokens, heads, dim, device=DEVICE)
    first = torch.tensor([length - num_tokens], dtype=torch.int32, device=DEVICE)
    calls: list[Call] = []
    for _ in range(count):
        k, v = (torch.randn(groups, length, dim, device=DEVICE).half() for _ in range(2))
        calls.append(
            lambda k=k, v=v: attention.gqa_attention(q, k, v, scale=0.1, first_position=first, max_length=length)
        )
    return calls


def time_attention(report: Report) -> None:
    for length in (512, 4096):
        for name, calls_of, width in (("latent", latent_calls, RANK + ROPE), ("grouped 32/4x128", grouped_calls, 1024)):
            num_bytes = length * width * 2
            calls = calls_of(1, length, copies_for(num_bytes) // 2)
            report.add(
                f"{name} attention, 1 token, {length} keys", calls, num_bytes=num_bytes, eager=eager_us(calls[0])
            )
    for length in (512, 4096):
        pairs = 512 * (length - 512) + 512 * 513 / 2
        report.add(
            f"latent attention, 512 tokens, {length} keys", latent_calls(512, length, 4),
            flops=2 * pairs * HEADS * (2 * RANK + ROPE),
        )  # fmt: skip
        report.add(
            f"grouped 32/4x128 attention, 512 tokens, {length} keys", grouped_calls(512, length, 4),
            flops=2 * pairs * 32 * 256,
        )  # fmt: skip


def time_heads(report: Report) -> None:
    """k_b and v_b of a layer, apart and joint."""
    for num_tokens in (1, 512):
        q, mean = (torch.randn(num_tokens, HEADS, size, device=DEVICE) for size in (128, RANK))
        k_b = [w.heads(HEADS, rows=RANK) for w in matrices("Q8_0", HEADS * RANK, 128, 100)]
        v_b = [w.heads(HEADS, rows=128) for w in matrices("Q8_0", HEADS * 128, RANK, 100)]
        joint = [w.heads(HEADS, rows=128, stride=256, is_transposed=True) for w in matrices("Q8_0", 4096, RANK, 100)]
        named = (("k_b", q, k_b), ("v_b", mean, v_b), ("joint k_b, transposed", q, joint))
        for name, x, made in named:
            report.add(
                f"{name} Q8_0, {num_tokens} token(s)", [lambda w=w, x=x: products.head_linear(x, w) for w in made],
                num_bytes=made[0].nbytes if num_tokens == 1 else 0,
            )  # fmt: skip


def time_rows(report: Report) -> None:
    x, weight = torch.randn(1, HIDDEN, device=DEVICE), torch.randn(HIDDEN, device=DEVICE)
    q = torch.randn(1, HEADS, ROPE, device=DEVICE)
    cos, sin = (torch.randn(1, ROPE // 2, device=DEVICE) for _ in range(2))
    logits, spec = torch.randn(1, NUM_EXPERTS, device=DEVICE), RouterSpec(NUM_EXPERTS, K)
    call: Call
    for name, call in (
        ("norm of 2048", lambda: rows.rms_norm(x, weight, 1e-6)),
        ("rope of 16x64", lambda: rows.rope(q, cos, sin)),
        ("router, 6 of 64", lambda: rows.route(logits, spec, bias_E=None)),
    ):
        report.add(name, [call] * 50, eager=eager_us(call))


def run_checks() -> dict[str, Any]:
    """The tests of tests/gpu in a process of their own, on as many workers as there are cores: they mostly compile."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", "--tb=short"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(14, os.cpu_count() or 1))]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TRITON_INTERPRET": "0"}
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    print("\n".join(lines[-60:]), flush=True)
    counts = [line for line in lines if " passed" in line or " failed" in line]
    summary = counts[-1].strip("= ") if counts else "no count"
    return {"ok": done.returncode == 0, "summary": summary, "s": round(time.monotonic() - start, 1)}


SECTIONS: dict[str, Callable[[Report], None]] = {
    "linear": time_linear,
    "gemm": time_gemm,
    "experts": time_experts,
    "prefill": time_prefill_experts,
    "attention": time_attention,
    "heads": time_heads,
    "rows": time_rows,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: the kernels' tests run in the interpreter (pytest tests/gpu), but nothing can be timed")
        return 1
    properties = torch.cuda.get_device_properties(0)
    machine = {
        "gpu": properties.name, "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
        "host": platform.machine(),
    }  # fmt: skip
    print(json.dumps(machine), flush=True)
    start = time.monotonic()
    checks = None if arguments.no_checks else run_checks()
    report = Report()
    found = {"machine": machine, "checks": checks, "bounds": bounds(report), "rows": report.rows}
    failures = []
    for name in arguments.only:
        try:
            SECTIONS[name](report)
        except Exception as error:  # one section that fails must not cost the others' figures
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            print(failures[-1], flush=True)
        torch.cuda.empty_cache()
    found |= {"failures": failures, "s": round(time.monotonic() - start, 1)}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{'':55} {'us':>9} {'GB/s':>8} {'of copy':>8} {'TFLOP/s':>8} {'eager us':>9}")
    for row in report.rows:
        cells = (row["us"], row.get("gbps"), row.get("share_of_copy"), row.get("tflops"), row.get("eager"))
        widths = (9, 8, 8, 8, 9)
        line = " ".join(f"{'' if cell is None else cell:>{size}}" for cell, size in zip(cells, widths, strict=True))
        print(f"{row['name']:55} {line}")
    print(json.dumps({"checks": checks, "failures": failures, "s": found["s"]}))
    return 0 if not failures and (checks is None or checks["ok"]) else 1


if __name__ == "__main__":
    sys.exit(main())
