#!/usr/bin/env python3
"""Take a safeguard out of the native code, build that, and show that the tests notice.

    python tools/mutants.py            # every mutant: builds a copy of the tree, runs the streaming identity test on it
    python tools/mutants.py no-wait    # one of them

A mutant that survives means a test that cannot fail: exit code 1. The working tree is not touched. Needs the packages
of `make setup`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST = "tests/parity/test_streaming_identity.py"

# Name -> what it does, and (file, text found there exactly once, text instead of it).
MUTANTS: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    "no-wait": (
        "an expert counts as loaded the moment its read is issued",
        [
            (
                "csrc/residency.h",
                "bool is_resident(int slot) const { return state(slot) == SlotState::kResident; }",
                "bool is_resident(int slot) const { return state(slot) >= SlotState::kLoading; }",
            ),
        ],
    ),
    "no-lease": (
        "asking for an expert does not lease it: the next load may take its slot before it is computed",
        [
            ("csrc/residency.cpp", "    ++leases_[slot];\n", ""),
            (
                "csrc/residency.cpp",
                """  if (slot < 0 || leases_[slot] < 1) {
    throw std::logic_error("releasing""",
                """  if (slot < 0 || leases_[slot] < 1) {
    return;
    throw std::logic_error("releasing""",
            ),
        ],
    ),
    "evict-leased": (
        "a lease does not keep a slot from being evicted",
        [
            ("csrc/residency.cpp", "kResident || leases_[slot] != 0) return false", "kResident) return false"),
            ("src/expertide/experts/cache.py", "(self._state == _RESIDENT) & (self._num_leases == 0)",
             "self._state == _RESIDENT"),
        ],
    ),
}  # fmt: skip

# An editable install (`make setup`) finds the package before PYTHONPATH does; the mutant must be what is tested.
LAUNCH = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
import expertide, pytest
from expertide import _native
for module in (expertide, _native):
    if not module.__file__.startswith(sys.argv[1]):
        print(f"tests {module.__file__}, not the mutant in {sys.argv[1]}")
        sys.exit(99)
sys.exit(pytest.main(sys.argv[2:]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "mutant", nargs="*", help=f"one of {', '.join(MUTANTS)}; none: all, and the unchanged tree first"
    )
    args = parser.parse_args()
    unknown = set(args.mutant) - set(MUTANTS)
    if unknown:
        parser.error(f"no mutant {', '.join(sorted(unknown))}; known: {', '.join(MUTANTS)}")
    survivors = []
    if not args.mutant and not _is_test_green([]):
        sys.exit("the unchanged tree fails its test: nothing can be said about mutants")
    for name in args.mutant or MUTANTS:
        what, edits = MUTANTS[name]
        print(f"{name}: {what}", flush=True)
        if _is_test_green(edits):
            survivors.append(name)
    print(f"survived: {', '.join(survivors) or 'none'}")
    sys.exit(1 if survivors else 0)


def _is_test_green(edits: list[tuple[str, str, str]]) -> bool:
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in ("csrc", "src", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        for name in ("CMakeLists.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, copy / name)
        for name, old, new in edits:
            path = copy / name
            text = path.read_text(encoding="utf-8")
            if text.count(old) != 1:
                sys.exit(f"{name}: found {text.count(old)} times, expected once: {old!r}")
            path.write_text(text.replace(old, new), encoding="utf-8")
        _build(copy)
        return _run_test(copy)


def _build(copy: Path) -> None:
    build = copy / "build"
    subprocess.run(
        ["cmake", "-S", copy, "-B", build, f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    subprocess.run(["cmake", "--build", build, "-j2"], check=True, stdout=subprocess.DEVNULL)
    (library,) = build.glob("_native*.so")
    shutil.copy(library, copy / "src" / "expertide")


def _run_test(copy: Path) -> bool:
    result = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(copy), "-x", "-q", "--no-header", "--timeout=120", TEST],
        cwd=copy, env={**os.environ, "PYTHONPATH": str(copy / "src")}, capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    if result.returncode == 99:
        sys.exit(result.stdout)
    lines = [line for line in result.stdout.splitlines() if line.startswith(("E  ", "FAILED", "ERROR"))]
    closing = (result.stdout.strip().splitlines() or ["no output"])[-1]
    for line in lines[:4]:
        print(f"    {line[:160]}")
    print(f"    exit code {result.returncode}: {closing[:160]}", flush=True)
    return result.returncode == 0


if __name__ == "__main__":
    main()
