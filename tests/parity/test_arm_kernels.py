"""The kernels for 64-bit ARM, run by an emulator: the same program and the same bits as here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.native_programs import (
    KERNEL_SOURCES,
    KERNELS_TEST,
    ROOT,
    Toolchain,
    aarch64_toolchain,
    digest,
    native_toolchain,
)

# Half a minute on two cores when nothing else runs.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def arm() -> Toolchain:
    toolchain = aarch64_toolchain()
    if toolchain is None:
        pytest.skip(
            "aarch64-linux-gnu-g++ or qemu-aarch64 is not installed "
            "(Debian: apt install g++-aarch64-linux-gnu qemu-user): the NEON kernels go unproven"
        )
    return toolchain


@pytest.fixture(scope="module")
def program(arm: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return arm.build(KERNELS_TEST, KERNEL_SOURCES, tmp_path_factory.mktemp("arm"))


def test_arm_gets_the_bits_of_this_machine_from_neon_and_from_the_baseline(
    arm: Toolchain, program: Path, tmp_path: Path
) -> None:
    # A76: the first Cortex of many boards that has the dot products.
    emulated = Toolchain(arm.compiler, arm.machine, arm.flags, (*arm.emulator, "-cpu", "cortex-a76"))
    done = emulated.run(program, "--short", timeout=500)
    assert done.returncode == 0 and done.stdout.startswith("fine: neon base,"), done.stderr[:4000]
    here = native_toolchain(optimise=False)
    assert here is not None  # a cross compiler without a compiler?
    ours = here.run(here.build(KERNELS_TEST, KERNEL_SOURCES, tmp_path), "--short", "base", timeout=500)
    assert ours.returncode == 0, ours.stderr[:4000]
    assert digest(done.stdout) == digest(ours.stdout)


def test_an_arm_processor_without_dot_products_runs_the_baseline_and_refuses_neon(
    arm: Toolchain, program: Path
) -> None:
    old = Toolchain(arm.compiler, arm.machine, arm.flags, (*arm.emulator, "-cpu", "cortex-a53"))
    done = old.run(program, "--short", timeout=500)
    assert done.returncode == 0 and done.stdout.startswith("fine: base,"), done.stderr[:4000]
    refused = old.run(program, "--short", "neon", timeout=500)
    assert refused.returncode == 1
    assert "instruction set neon: this processor lacks the dot-product instructions" in refused.stderr


@pytest.mark.parametrize("unit", ["isa_neon", "attention_neon"])
def test_a_neon_unit_shares_no_symbol_with_the_baseline(arm: Toolchain, unit: str, tmp_path: Path) -> None:
    """A shared inline function has one copy in the program: if that is this unit's, old processors crash."""
    nm = shutil.which("aarch64-linux-gnu-nm") or shutil.which("nm")
    if nm is None:
        pytest.skip("no nm: the units' symbols go unchecked")
    # Without optimisation nothing is inlined away: what could be shared, shows.
    built = tmp_path / "unit.o"
    Toolchain(arm.compiler, arm.machine, ("-O0",)).compile(ROOT / f"csrc/kernels/{unit}.cpp", built)
    command = [nm, "-C", "--extern-only", "--defined-only", str(built)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    symbols = [line.split(maxsplit=2)[2] for line in listed.stdout.splitlines()]
    assert symbols in (["expertide::kNeonTable"], ["expertide::kNeonAttention"])
