"""Compiles GPU kernels for a card that is not there, exactly as they would be launched.

While `recorded_launches` is active, a launch runs nothing: it is noted, with the types and the divisibility that its
arguments have, and `compile_for` makes machine code of it with the assembler inside the triton package.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

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
    constants = {name: value for name, value in launch.constants.items() if name.isupper()}
    return Compiled(launch.name, constants, compiled.metadata.shared, registers, stack, compiled.asm["ptx"])


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = dict(item.split(":")[:2] for item in text.split("Function")[1].split() if item.count(":") == 1)
    return int(usage["REG"]), int(usage["STACK"])
