"""The native half under the compiler's race and memory detectors."""

from __future__ import annotations

import platform
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


# As in CMakeLists.txt: one set of flags per instruction set.
ISA_FLAGS = {
    "_avx2": ["-mavx2", "-mf16c", "-mfma"],
    "_avx512": ["-mavx2", "-mf16c", "-mfma"] + [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")],
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("detector", ["thread", "address,undefined"])
def test_attention_has_no_race_and_no_bad_access(detector: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    common = [compiler, "-std=c++17", "-O1", "-g", "-ffp-contract=off", f"-fsanitize={detector}", f"-I{ROOT / 'csrc'}"]
    sources = [ROOT / "tests/fault/attention_stress.cpp", ROOT / "csrc/thread_pool.cpp", ROOT / "csrc/residency.cpp"]
    sources += sorted((ROOT / "csrc/kernels").glob("*.cpp"))
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    for suffix in ("", *ISA_FLAGS):
        group = [source for source in sources if _isa_suffix(source) == suffix]
        flags = ISA_FLAGS[suffix] if suffix and on_x86 else []
        built = subprocess.run(
            [*common, *flags, "-c", *map(str, group)], cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert built.returncode == 0, built.stderr
    program = tmp_path / "stress"
    objects = [str(path) for path in tmp_path.glob("*.o")]
    built = subprocess.run([*common, *objects, "-pthread", "-o", str(program)], capture_output=True, text=True)
    if built.returncode and ("cannot find" in built.stderr or "unsupported option" in built.stderr):
        pytest.skip(f"this compiler has no {detector} detector")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=200)
    if "unexpected memory mapping" in done.stderr or "ReserveShadowMemoryRange failed" in done.stderr:
        pytest.skip(f"the {detector} detector does not run on this kernel")
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr[:4000]


def _isa_suffix(source: Path) -> str:
    return next((suffix for suffix in ISA_FLAGS if source.stem.endswith(suffix)), "")
