"""What `pip install` gives a user is the program of this checkout: the wheel is built, looked into, installed and run.

Nothing is downloaded: the build tools and the dependencies are those of the environment that runs the tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AVX2_FLAGS = {"-mavx2", "-mf16c", "-mfma"}
AVX512_FLAGS = AVX2_FLAGS | {"-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"}

NEON_FLAGS = {"-march=armv8.2-a+dotprod"}


def flags_of(source: str) -> set[str]:
    """The machine flags that a source file may be compiled with."""
    if not sysconfig.get_platform().endswith("x86_64"):
        return NEON_FLAGS if source.endswith("_neon.cpp") else set()
    return AVX512_FLAGS if source.endswith("_avx512.cpp") else AVX2_FLAGS if source.endswith("_avx2.cpp") else set()


# Two minutes on two cores when nothing else runs; CI machines are slower.
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Built:
    wheel: Path
    build_dir: Path


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Stdout of a command that must succeed; on failure the test shows everything it said."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EXPERTIDE_"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=inherited | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist"),
        *("--config-setting", f"build-dir={folder / 'build'}"),
        *("--config-setting", "cmake.define.CMAKE_EXPORT_COMPILE_COMMANDS=ON"),
        ROOT,
        cwd=folder,
    )
    (wheel,) = (folder / "dist").glob("*.whl")
    return Built(wheel, folder / "build")


def test_the_wheel_holds_the_package_its_model_and_its_licence(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
    shipped = {name.removeprefix("expertide/") for name in names if name.startswith("expertide/")}
    sources = {str(path.relative_to(ROOT / "src/expertide")) for path in (ROOT / "src/expertide").rglob("*.py")}
    assert sources <= shipped
    assert "data/demo-q4_k_m.gguf" in shipped and "py.typed" in shipped
    natives = [name for name in shipped if re.fullmatch(r"_native\..*so", name)]
    assert len(natives) == 1, natives
    assert any(name.endswith("LICENSE") for name in names)
    # Neither tests nor tools nor a second copy of anything.
    assert all(name.startswith(("expertide/", "expertide-")) for name in names), names


def test_an_install_asks_for_nothing_that_the_package_does_not_import(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    asked = {
        re.split(r"[^\w-]", text)[0]
        for text in fields.get_all("Requires-Dist", [])
        if not re.search(r"extra\s*==\s*['\"]test['\"]", text)
    }
    source = "\n".join(path.read_text() for path in (ROOT / "src/expertide").rglob("*.py"))
    modules = {name: name.replace("-", "_") for name in asked}
    unused = {name for name in asked if not re.search(rf"^\s*(from|import) {modules[name]}\b", source, re.MULTILINE)}
    assert asked and not unused


def test_only_named_objects_are_compiled_for_newer_processors_and_none_for_this_very_machine(built: Built) -> None:
    commands = json.loads((built.build_dir / "compile_commands.json").read_text())
    ours = [entry for entry in commands if Path(entry["file"]).is_relative_to(ROOT / "csrc")]
    assert ours
    for entry in ours:
        flags = set(entry["command"].split())
        machine_flags = {flag for flag in flags if flag.startswith("-m")}
        assert machine_flags == flags_of(entry["file"]), entry["file"]
        assert "-ffp-contract=off" in flags, entry["file"]
        assert not flags & {"-ffast-math", "-Ofast", "-funsafe-math-optimizations"}, entry["file"]
    for ending in ("_avx2.cpp", "_avx512.cpp") if sysconfig.get_platform().endswith("x86_64") else ():
        assert any(entry["file"].endswith(ending) for entry in ours)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed: machine code is not looked at")
@pytest.mark.skipif(not sysconfig.get_platform().endswith("x86_64"), reason="AVX exists on x86-64 only")
def test_no_object_of_the_baseline_holds_an_avx_instruction(built: Built) -> None:
    objects = list(built.build_dir.rglob("*.o"))
    assert objects
    for path in objects:
        if flags_of(path.name.removesuffix(".o")):
            continue
        code = run("objdump", "-d", "--no-show-raw-insn", path, cwd=ROOT)
        # AVX encodings are the mnemonics that begin with v (verr and verw aside), or use the wide registers.
        found = re.findall(r"^\s+[0-9a-f]+:\s+(v(?!err|erw)\w+\s.*|.*%[yz]mm.*)$", code, re.MULTILINE)
        assert not found, f"{path.name}: {found[:3]}"


def test_an_object_for_newer_processors_shares_no_inline_function_with_the_baseline(built: Built) -> None:
    # The linker keeps one copy of a weak symbol: were it the AVX2 one, an old machine would run it.
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed: symbols are not looked at")
    weak: dict[bool, set[str]] = {True: set(), False: set()}
    for path in built.build_dir.rglob("*.o"):
        rows = (line.split() for line in run("nm", "--defined-only", path, cwd=ROOT).splitlines())
        weak[bool(flags_of(path.name.removesuffix(".o")))] |= {
            row[2] for row in rows if len(row) == 3 and row[1] in "WwVu"
        }
    assert not weak[True] & weak[False]


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a fresh environment that holds the wheel; torch and the rest come from the outer one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # A plain path, behind the environment's own: .pth files over there, such as an editable install's, are not read.
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built.wheel, cwd=folder)
    return folder / "bin"


def test_the_installed_package_is_the_wheel_and_not_the_checkout(installed: Path, tmp_path: Path) -> None:
    program = "import expertide, expertide._native as native; print(expertide.__file__); print(native.__file__)"
    for place in run(installed / "python", "-c", program, cwd=tmp_path).splitlines():
        assert Path(place).is_relative_to(installed.parent)


def test_the_installed_program_says_what_the_checkout_says(installed: Path, tmp_path: Path) -> None:
    flags = ("-p", "Tell me a story about a fox.", "-n", "24", "--temperature", "0", "--expert-cache", "4MiB")
    from_wheel = json.loads(run(installed / "expertide", "run", "demo", *flags, "--json", "-", cwd=tmp_path))
    program = "import sys; from expertide.cli.main import main; main(sys.argv[1:])"
    from_checkout = json.loads(run(sys.executable, "-c", program, "run", "demo", *flags, "--json", "-", cwd=tmp_path))
    assert from_wheel["token_ids"] == from_checkout["token_ids"] and len(from_wheel["token_ids"]) == 24
    assert from_wheel["text"] == from_checkout["text"]
