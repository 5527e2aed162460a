"""The native half under the compiler's race and memory detectors."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("file_reader.cpp", "residency.cpp", "thread_pool.cpp")


@pytest.mark.parametrize("detector", ["thread", "address,undefined"])
def test_reader_table_and_pool_have_no_race_and_no_bad_access(detector: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "stress"
    command = [compiler, "-std=c++17", "-O1", "-g", f"-fsanitize={detector}", f"-I{ROOT / 'csrc'}"]
    command += [str(ROOT / "tests/fault/native_stress.cpp"), *(str(ROOT / "csrc" / name) for name in SOURCES)]
    built = subprocess.run([*command, "-pthread", "-o", str(program)], capture_output=True, text=True, timeout=200)
    if built.returncode and ("cannot find" in built.stderr or "unsupported option" in built.stderr):
        pytest.skip(f"this compiler has no {detector} detector")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program), str(tmp_path / "file")], capture_output=True, text=True, timeout=200)
    if "unexpected memory mapping" in done.stderr or "ReserveShadowMemoryRange failed" in done.stderr:
        pytest.skip(f"the {detector} detector does not run on this kernel")
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr[:4000]
