"""One package for every machine: the baseline runs without AVX, and no AVX2 code can get into its path."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests import native_samples as samples

from expertide import _native
from expertide.formats import quants

is_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AVX2 is x86's")

# Imports the extension alone: numpy's and torch's own needs are not the question. Prints the bits of a few results.
_WITHOUT_AVX = """
import array, ctypes, importlib.util, sys
spec = importlib.util.spec_from_file_location("expertide._native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
assert native.isa() == "base", native.isa()
assert native.available_isas() == ["base"]
for name in ("avx2", "avx512"):
    try:
        native.set_isa(name)
    except ValueError:
        pass
    else:
        raise SystemExit(name + " accepted")
raw = sys.stdin.buffer.read()
rows, cols, type_id, num_tokens = (int(word) for word in sys.argv[2:])
x = array.array("f")
x.frombytes(raw[: 4 * cols * num_tokens])
weights = raw[4 * cols * num_tokens :]
w = ctypes.create_string_buffer(weights, len(weights))
y = array.array("f", bytes(4 * rows * num_tokens))
pool = native.ThreadPool(2)
native.linear(
    pool, ctypes.addressof(w), type_id, rows, cols, x.buffer_info()[0], num_tokens, y.buffer_info()[0]
)
pool.close()
print(y.tobytes().hex())
"""


@is_x86
@pytest.mark.parametrize("name", ["Q4_K", "Q5_0", "F16"])
def test_the_baseline_runs_on_a_processor_without_avx_and_gives_the_same_bits(name) -> None:
    qemu = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if qemu is None:
        pytest.skip("qemu-x86_64 is not installed (Debian: apt install qemu-user): the AVX-free baseline goes unproven")
    quant = quants.by_name(name)
    rows, cols, num_tokens = 21, 512, 3
    packed = samples.random_weights(quant, rows, cols)
    x = np.random.default_rng(1).standard_normal((num_tokens, cols), dtype=np.float32)
    # Nehalem: SSE4.2, before AVX.
    command = [qemu, "-cpu", "Nehalem", sys.executable, "-c", _WITHOUT_AVX, _native.__file__]
    done = subprocess.run(
        [*command, str(rows), str(cols), str(quant.ggml_id), str(num_tokens)],
        input=x.tobytes() + packed.tobytes(),
        capture_output=True,
        timeout=120,
        env={key: value for key, value in os.environ.items() if key != "LD_PRELOAD"},
    )
    assert done.returncode == 0, done.stderr.decode()
    got = np.frombuffer(bytes.fromhex(done.stdout.decode()), dtype=np.float32).reshape(num_tokens, rows)
    pool = _native.ThreadPool(2)
    samples.assert_same_bits(got, samples.linear(pool, quant, packed, x))
    pool.close()


_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]


@is_x86
@pytest.mark.parametrize(
    ("unit", "table", "flags"),
    [("isa_avx2.cpp", "kAvx2Table", _AVX2), ("isa_avx512.cpp", "kAvx512Table", _AVX2 + _AVX512)],
)
def test_a_unit_for_newer_processors_shares_no_symbol_with_the_baseline(tmp_path, unit, table, flags) -> None:
    """A shared inline function has one copy in the program: if that is the AVX2 one, old machines crash."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    nm = shutil.which("nm")
    if compiler is None or nm is None:
        pytest.skip("no C++ compiler: the units' symbols go unchecked")
    csrc = Path(__file__).parents[3] / "csrc"
    built = tmp_path / "unit.o"
    # Without optimisation nothing is inlined away: what could be shared, shows.
    command = [compiler, "-std=c++17", "-O0", "-fPIC", *flags, "-ffp-contract=off", f"-I{csrc}"]
    subprocess.run([*command, "-c", str(csrc / "kernels" / unit), "-o", str(built)], check=True)
    listed = subprocess.run([nm, "-C", "--extern-only", "--defined-only", str(built)], capture_output=True, check=True)
    symbols = [line.split(maxsplit=2)[1:] for line in listed.stdout.decode().splitlines()]
    assert symbols in ([["D", f"expertide::{table}"]], [["R", f"expertide::{table}"]]), symbols


def test_an_unknown_or_missing_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'sse9' is not known; known: auto, (avx512, avx2, |neon, )?base"):
        _native.set_isa("sse9")
    assert _native.isa() == _native.available_isas()[0] and _native.available_isas()[-1] == "base"
