"""Compiles GPU kernels for a card that is not there, exactly as they would be launched.

    TRITON_INTERPRET=0 python -m tests.gpu.cross_compile [--capability 86] [--types Q4_K Q5_0 ...]

prints one JSON line per kernel. While `recorded_launches` is active, a launch runs nothing: it is noted, with the types
and the divisibility that its arguments have, and `compile_for` makes machine code of it with the assembler inside the
triton package.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from expertide.formats.quants import by_name
from expertide.kernels.gpu import attention, experts, products, rows
from expertide.kernels.gpu.experts import ExpertShape
from expertide.kernels.gpu.matrix import GpuMatrix
from expertide.kernels.router import RouterSpec

_TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int8: "*i8",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


@dataclass
class Launch:
    """One distinct way to compile a kernel."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def key(self) -> str:
        return repr((self.name, self.signature, self.constants, sorted(self.attributes), self.options))


@dataclass(frozen=True)
class Compiled:
    name: str
    constants: dict[str, Any]
    shared_bytes: int
    registers: int
    stack_bytes: int  # local memory of a thread: what did not fit into registers
    ptx: str


@contextmanager
def recorded_launches() -> Iterator[dict[str, Launch]]:
    launches: dict[str, Launch] = {}

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = _describe(self, args, kwargs)
        launches.setdefault(launch.key, launch)

    original = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = original


def _describe(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    given = dict(zip(kernel.arg_names, args, strict=False))
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
    given.update(kwargs)
    launch = Launch(kernel, {}, {}, {}, options)
    for index, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr:
            launch.signature[parameter.name] = "constexpr"
            launch.constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            launch.signature[parameter.name] = _TYPES[value.dtype]
            launch.attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            launch.signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            launch.signature[parameter.name] = "constexpr"
            launch.constants[parameter.name] = 1
        else:
            launch.signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                launch.attributes[(index,)] = [["tt.divisibility", 16]]
    return launch


def compile_for(capability: int, launch: Launch) -> Compiled:
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    registers, stack = _resources(compiled.asm["cubin"])
    constants = {name: value for name, value in launch.constants.items() if str(name).isupper()}
    return Compiled(launch.name, constants, compiled.metadata.shared, registers, stack, compiled.asm["ptx"])


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = dict(item.split(":")[:2] for item in text.split("Function")[1].split() if item.count(":") == 1)
    return int(usage["REG"]), int(usage["STACK"])


def launch_everything(type_names: list[str]) -> None:
    """Every kernel in the shapes of DeepSeek-V2-Lite and Qwen3; the weights are never read, so one row's bytes do."""
    for name in type_names:
        _launch_products(name)
    _launch_attention()
    _launch_rows()


def _launch_products(name: str) -> None:
    quant = by_name(name)
    w = GpuMatrix(torch.zeros(2048 * quant.row_bytes(2048), dtype=torch.uint8), quant, 2048, 2048, 2048)
    products.dequantise(w)
    products.embedding(torch.zeros(3, dtype=torch.int64), w)
    joint = w.heads(8, rows=128, stride=256, is_transposed=True)
    for num_tokens in (1, 64):
        products.linear(torch.zeros(num_tokens, 2048), w)
        products.head_linear(torch.zeros(num_tokens, 8, 128), joint)
        # 1,408 columns do not divide into blocks of 256: such files store down in blocks of 32.
        inner = 1408 if quant.block_size <= 32 else 1536
        shape = ExpertShape(2048, inner, quant, quant, quant)
        table = torch.zeros((64, 3), dtype=torch.int64)
        experts.expert_mlp(torch.zeros(num_tokens, 2048), torch.zeros((num_tokens, 6), dtype=torch.int32), table, shape)


def _launch_attention() -> None:
    first = torch.zeros(1, dtype=torch.int32)
    pages = torch.zeros(16, dtype=torch.int32)
    for dtype in (torch.float16, torch.float32):
        for num_tokens in (1, 64):
            given = {"scale": 0.1, "first_position": first, "max_length": 4096}
            attention.latent_attention(
                torch.zeros(num_tokens, 16, 512), torch.zeros(num_tokens, 16, 64),
                torch.zeros(4096, 512, dtype=dtype), torch.zeros(4096, 64, dtype=dtype), **given,
            )  # fmt: skip
            keys = torch.zeros(4, 4096, 128, dtype=dtype)
            attention.gqa_attention(torch.zeros(num_tokens, 32, 128), keys, keys, **given)
            attention.gqa_attention(torch.zeros(num_tokens, 32, 128), keys, keys, **given, pages=pages, page_size=256)


def _launch_rows() -> None:
    x = torch.zeros(2, 2048)
    rows.rms_norm(x, x[0], 1e-6)
    rows.rope(torch.zeros(2, 16, 64), torch.zeros(2, 32), torch.zeros(2, 32))
    rows.rope(torch.zeros(2, 16, 64), torch.zeros(2, 32), torch.zeros(2, 32), pairs="halves")
    rows.swiglu(x, x)
    rows.gate_rows(x, x, x[0])
    experts.moe_sum(torch.zeros(2, 6, 2048), torch.zeros(2, 6))
    rows.route(torch.zeros(2, 64), RouterSpec(64, 6), bias_E=None)
    spec = RouterSpec(
        256, 8, score="sigmoid", has_bias=True, num_groups=8, top_groups=4, group_score="top2_sum", renormalize=True
    )
    rows.route(torch.zeros(2, 256), spec, bias_E=torch.zeros(256))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--capability", type=int, default=86)
    parser.add_argument("--types", nargs="+", default=["Q4_K"])
    arguments = parser.parse_args()
    with recorded_launches() as launches:
        launch_everything(arguments.types)
    for launch in launches.values():
        compiled = compile_for(arguments.capability, launch)
        row = asdict(compiled)
        row["has_fp8"] = "e4m3" in compiled.ptx or "e5m2" in compiled.ptx
        del row["ptx"]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
