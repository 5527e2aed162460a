"""The native half under the compiler's race and memory detectors."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.native_programs import KERNEL_SOURCES, KERNELS_TEST, BuildError, native_toolchain

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


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a detector's objects lie: both programs below are linked with the same kernels."""
    folders: dict[str, Path] = {}

    def folder(detector: str) -> Path:
        if detector not in folders:
            folders[detector] = tmp_path_factory.mktemp("objects")
        return folders[detector]

    return folder


def _check_program(program: Path, detector: str, folder: Path, *arguments: str) -> None:
    toolchain = native_toolchain(detector)
    if toolchain is None:
        pytest.skip("no C++ compiler")
    try:
        built = toolchain.build(program, KERNEL_SOURCES, folder)
    except BuildError as error:
        if "cannot find" in str(error) or "unsupported option" in str(error):
            pytest.skip(f"this compiler has no {detector} detector")
        raise
    done = toolchain.run(built, *arguments, timeout=600)
    if "unexpected memory mapping" in done.stderr or "ReserveShadowMemoryRange failed" in done.stderr:
        pytest.skip(f"the {detector} detector does not run on this kernel")
    assert done.returncode == 0 and done.stdout.startswith("fine"), done.stderr[:4000]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("detector", ["thread", "address,undefined"])
def test_attention_has_no_race_and_no_bad_access(detector: str, folder_of: Callable[[str], Path]) -> None:
    _check_program(ROOT / "tests/fault/attention_stress.cpp", detector, folder_of(detector))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("detector", ["thread", "address,undefined"])
def test_kernels_have_no_race_and_no_bad_access(detector: str, folder_of: Callable[[str], Path]) -> None:
    # All shapes: make sanitize.
    arguments = ["--short", "--threads"] if detector == "thread" else ["--short"]
    _check_program(KERNELS_TEST, detector, folder_of(detector), *arguments)
