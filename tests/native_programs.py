"""Builds and runs the C++ programs under tests/: the compiled half alone, without Python, torch or nanobind.

    python -m tests.native_programs [--detector thread|address,undefined] [--target aarch64] [--short] [--jobs N]

`make sanitize` and `make test-neon` call it; the tests in fault/ and parity/ import it. A program for another processor
is run here too, and both must arrive at the same digest of the baseline's results.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS_TEST = ROOT / "tests/native/kernels_test.cpp"
# What a program of kernels is linked with; the reader stays out, it is Linux's own affair and has its own program.
KERNEL_SOURCES = (
    ROOT / "csrc/thread_pool.cpp",
    ROOT / "csrc/residency.cpp",
    *sorted((ROOT / "csrc/kernels").glob("*.cpp")),
)

# As in CMakeLists.txt: one set of flags per instruction set.
_AVX2 = ("-mavx2", "-mf16c", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
ISA_FLAGS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "x86_64": {"_avx2": _AVX2, "_avx512": _AVX512},
    "aarch64": {"_neon": ("-march=armv8.2-a+dotprod",)},
}


class BuildError(Exception):
    """The compiler or the linker refused; the message is theirs."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler, what it compiles for, and the program that runs the result (none: the machine itself)."""

    compiler: str
    machine: str
    flags: tuple[str, ...] = ()
    emulator: tuple[str, ...] = ()

    def compile(self, source: Path, output: Path) -> None:
        flags = next((flags for end, flags in ISA_FLAGS.get(self.machine, {}).items() if source.stem.endswith(end)), ())
        command = [self.compiler, "-std=c++17", "-ffp-contract=off", "-Wno-psabi", f"-I{ROOT / 'csrc'}", *self.flags]
        _run([*command, *flags, "-c", str(source), "-o", str(output)])

    def link(self, objects: Sequence[Path], output: Path) -> None:
        _run([self.compiler, *self.flags, *map(str, objects), "-pthread", "-o", str(output)])

    def build(self, program: Path, sources: Sequence[Path], folder: Path, *, jobs: int = 1) -> Path:
        """Compile what has no object in `folder` yet, and link. Returns the program's path."""
        objects = {source: folder / f"{source.stem}.o" for source in (*sources, program)}
        missing = [source for source, output in objects.items() if not output.exists()]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda source: self.compile(source, objects[source]), missing))
        built = folder / program.stem
        self.link(list(objects.values()), built)
        return built

    def run(self, program: Path, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        command = [*self.emulator, str(program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def native_toolchain(detector: str | None = None, *, optimise: bool = True) -> Toolchain | None:
    """This machine's compiler, with one of its detectors; None when there is no compiler.

    Without optimisation the baseline is compiled in a third of the time, and gives the same bits.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    flags: tuple[str, ...] = ("-O1",) if optimise else ("-O0",)
    if detector is not None:
        flags = ("-O1", "-g1", f"-fsanitize={detector}", "-fno-sanitize-recover=all")
    if detector is not None and "address" in detector and "g++" in Path(compiler).name:
        # Checks as calls: the unrolled kernels compile three times faster.
        flags += ("--param", "asan-instrumentation-with-call-threshold=0")
    return Toolchain(compiler, machine, flags)


def aarch64_toolchain() -> Toolchain | None:
    """A cross compiler for 64-bit ARM and an emulator for what it makes; None when either is missing."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        return None
    # Static: the emulator then needs no ARM libraries.
    return Toolchain(compiler, "aarch64", ("-O2", "-static"), (emulator,))


def digest(output: str) -> str:
    """What the kernels program says last: the digest of the baseline's results, the same on every processor."""
    return output.rsplit("digest", 1)[-1].strip()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(done.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--detector", choices=("thread", "address,undefined"))
    parser.add_argument("--target", choices=("native", "aarch64"), default="native")
    parser.add_argument("--short", action="store_true", help="fewer shapes")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at the same time")
    args = parser.parse_args()
    toolchain = aarch64_toolchain() if args.target == "aarch64" else native_toolchain(args.detector)
    if toolchain is None:
        needs = "aarch64-linux-gnu-g++ and qemu-aarch64" if args.target == "aarch64" else "g++ or clang++"
        print(f"native_programs: this needs {needs}", file=sys.stderr)
        return 1
    arguments = ["--short"] if args.short else []
    if args.detector == "thread":
        arguments.append("--threads")  # the rest is one thread's work, and takes ten times as long under this detector
    done = _build_and_run(toolchain, arguments, jobs=args.jobs)
    label = args.detector or (args.target if args.target != "native" else "no detector")
    print(f"{KERNELS_TEST.name} ({label}): {done.stdout.strip() or 'failed'}")
    print(done.stderr[:8000], file=sys.stderr, end="")
    here = native_toolchain(optimise=False)
    if done.returncode or args.target == "native" or here is None:
        return done.returncode
    ours = _build_and_run(here, [*arguments, "base"], jobs=args.jobs)
    print(f"{KERNELS_TEST.name} (this machine): {ours.stdout.strip() or 'failed'}")
    if digest(ours.stdout) != digest(done.stdout):
        print("the two processors' results differ", file=sys.stderr)
        return 1
    return 0


def _build_and_run(toolchain: Toolchain, arguments: Sequence[str], *, jobs: int) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            program = toolchain.build(KERNELS_TEST, KERNEL_SOURCES, Path(folder), jobs=jobs)
        except BuildError as error:
            return subprocess.CompletedProcess([], 1, "", str(error))
        return toolchain.run(program, *arguments)


if __name__ == "__main__":
    sys.exit(main())
