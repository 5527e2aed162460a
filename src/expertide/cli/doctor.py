"""`expertide doctor`: what this machine can do, what limits it, and what would help."""

from __future__ import annotations

import mmap
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from expertide import __version__
from expertide.cli import estimate, prediction_trial
from expertide.cli.flags import JsonFlag
from expertide.cli.output import JsonTarget, count, emit, table
from expertide.errors import ExpertideError, StorageError
from expertide.formats import open_model
from expertide.memory import machine_rates, topology
from expertide.memory.machine_rates import MachineRates
from expertide.memory.topology import Topology
from expertide.prepare import model_path
from expertide.units import GIB, MIB, format_size

# As large as the part of an expert that one read fetches in a V2-Lite file; eight in flight saturate a good disk.
_READ_BYTES = 2 * MIB
_NUM_READERS = 8
_DISK_SECONDS = 2.0
# Larger than most last-level caches, so that memory answers; smaller than torch, so that `bench` can measure before it
# loads a model and its peak does not come from here.
_COPY_BYTES = 128 * MIB
_SLOW_DISK = 500e6
# [rows, cols] of 33.5 million weights: larger than most last-level caches in either type.
_ROWS, _COLS = 8192, 4096
_DECODED_TOKENS = 24
# Of a layer at decode where it cannot be measured: demo model, 2 cores of an x86-64 virtual machine.
_USUAL_LAYER_S = 1.5e-3


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Measure the disk under this model, and whether predictive prefetch pays with it; by default the disk "
            "of the temporary directory.",
        ),
    ] = None,
    json: JsonFlag = None,
) -> None:
    """Measure this machine once, name its limits and how to lift them."""
    target = JsonTarget(json)
    path = None if model is None else model_path(model)
    facts = examine(None if path is None else _largest_file(path), path)
    if target:
        target.write(facts)
    if not target.is_stdout:
        emit(table(_rows(facts)) + "\n")
        for hint in facts["hints"]:
            emit(f"- {hint}\n")


def examine(file: Path | None, model: Path | None = None) -> dict[str, Any]:
    """Everything as plain values; also saves the measured rates for `plan`.

    Args:
        file: whose disk is measured.
        model: what predictive prefetch is measured with.
    """
    # A file too small to measure is stood in for by a scratch file, perhaps on another disk.
    place = file if file is not None and _is_large(file) else Path(tempfile.gettempdir())
    machine = topology.probe(place)
    memory_rate = measure_memory()
    disk_rate, is_direct = measure_disk(file)
    compute = measure_compute(machine.default_threads)
    layer_s = measure_layer(compute) if compute else None
    prediction = prediction_trial.measure(model) if model is not None and compute else None
    facts: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": machine.cpu_model,
        "physical_cores": machine.num_physical_cores,
        "logical_cpus": machine.num_cpus,
        "cpu_quota": machine.cpu_quota,
        "default_threads": machine.default_threads,
        "isa": native_isa(),
        "ram_total_bytes": machine.ram_total_bytes,
        "ram_available_bytes": machine.ram_available_bytes,
        "memory_limit": str(machine.limit.group) if machine.limit is not None else None,
        "locked_memory_limit_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "open_files_limit": _limit(resource.RLIMIT_NOFILE),
        "memory_bytes_per_s": memory_rate,
        "values_per_s": {str(threads): by_type for threads, by_type in compute.items()},
        "layer_s": layer_s,
        "disk": machine.disk.device if machine.disk else None,
        "filesystem": machine.disk.filesystem if machine.disk else None,
        "disk_bytes_per_s": disk_rate,
        "disk_reads_are_direct": is_direct,
        "prediction": prediction,
        "gpus": gpus(),
    }
    facts["hints"] = hints(facts, machine)
    key, before = machine_rates.disk_key(machine.disk), machine_rates.load()
    # Rates of a cached read would promise what the disk cannot do.
    disks = {key: disk_rate} if disk_rate is not None and is_direct else {}
    predictions = {key: str(prediction["kind"])} if prediction is not None else {}
    saved = machine_rates.save(MachineRates(memory_rate, compute, layer_s or _USUAL_LAYER_S, disks, predictions))
    facts["saved_to"] = str(saved) if saved else None
    facts["replaced_disk_bytes_per_s"] = before.disks.get(key) if before is not None and disks else None
    facts["replaced"] = before is not None
    return facts


def _largest_file(path: Path) -> Path:
    """The file to read from: of whatever `run` accepts, the largest part."""
    if path.is_file():
        return path
    files = open_model(path)
    return max(zip(files.file_sizes, files.files, strict=True))[1]


def native_isa() -> str | None:
    """The instruction set of the native kernels, or None when the extension does not load."""
    try:
        from expertide import _native
    except ImportError:
        return None
    isa = getattr(_native, "isa", None)
    return str(isa()) if callable(isa) else "unknown"


def measure_memory() -> float:
    """Bytes per second that one thread reads from RAM; the best of five."""
    import numpy as np

    values = np.ones(_COPY_BYTES // 8, dtype=np.int64)
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        values.sum()
        best = max(best, _COPY_BYTES / (time.perf_counter() - begin))
    return best


def measure_compute(max_threads: int) -> dict[int, dict[str, float]]:
    """Threads -> quant type -> packed weights that the native kernels multiply per second, for one token.

    The best of five, for 1, 2, 4, … threads and `max_threads`; nothing where the extension does not load.
    """
    import numpy as np

    try:
        from expertide import _native
    except ImportError:
        return {}
    from expertide.formats.quants import by_name

    x, y = np.ones(_COLS, dtype=np.float32), np.empty(_ROWS, dtype=np.float32)
    counts = sorted({1 << i for i in range(max_threads.bit_length()) if 1 << i <= max_threads} | {max_threads})
    found: dict[int, dict[str, float]] = {threads: {} for threads in counts}
    for name in estimate.MEASURED_TYPES:
        quant = by_name(name)
        # Any bytes do, but for scales so small that they are slow to multiply: as float16 this is 0.0007.
        data = np.full(_ROWS * _COLS // quant.block_size * quant.block_bytes, 0x11, dtype=np.uint8)
        for threads in counts:
            pool, best = _native.ThreadPool(threads), float("inf")
            try:
                for _ in range(5):
                    begin = time.perf_counter()
                    _native.linear(pool, data.ctypes.data, quant.ggml_id, _ROWS, _COLS, x.ctypes.data, 1, y.ctypes.data)
                    best = min(best, time.perf_counter() - begin)
            finally:
                pool.close()
            found[threads][name] = _ROWS * _COLS / best
    return found


def measure_layer(compute: dict[int, dict[str, float]]) -> float | None:
    """Seconds of a layer at decode beside its multiplications, from the demo model with all experts in RAM.

    None when it cannot run here.
    """
    # Torch loads here: this is the one measurement that needs a running model.
    from expertide.engine.sampling import SamplingParams
    from expertide.llm import LLM

    try:
        with LLM("demo", context=256) as llm:
            params = SamplingParams(max_tokens=_DECODED_TOKENS, ignore_eos=True)
            prompt = llm.encode("Tell me a story about a fox.")
            # The first answer reads the experts; the others find them.
            rate = max(float(llm.generate(prompt, params).stats["timings"]["decode_tps"]) for _ in range(3))
            prepared = llm.prepared
    except ExpertideError:
        return None
    multiplying = estimate.multiply_seconds(estimate.touched_values(prepared), compute, prepared.num_threads)
    return max(1 / rate - multiplying, 1e-6) / prepared.architecture.config.num_layers


def measure_disk(model: Path | None) -> tuple[float | None, bool]:
    """(bytes per second of expert-sized reads at scattered places, whether they bypassed the page cache)."""
    with _file_to_read(model) as path:
        size = path.stat().st_size
        if size < 4 * _READ_BYTES:
            return None, False
        flag = getattr(os, "O_DIRECT", 0)
        try:
            descriptor = os.open(path, os.O_RDONLY | flag)
        except OSError:
            flag, descriptor = 0, os.open(path, os.O_RDONLY)
        try:
            return _read_rate(descriptor, size), flag != 0
        except OSError as error:
            raise StorageError(f"{path}: read error: {error.strerror}") from None
        finally:
            os.close(descriptor)


def _read_rate(descriptor: int, size: int) -> float:
    num_places = size // _READ_BYTES
    # A stride coprime to the number of places visits each once before any twice, never two neighbours in a row.
    stride = next(step for step in range(num_places * 5 // 8 + 1, 2 * num_places) if _coprime(step, num_places))
    deadline = time.perf_counter() + _DISK_SECONDS

    def reads(first: int) -> int:
        done = 0
        with mmap.mmap(-1, _READ_BYTES) as buffer:  # page aligned, as O_DIRECT asks
            for index in range(first, num_places, _NUM_READERS):
                done += os.preadv(descriptor, [buffer], index * stride % num_places * _READ_BYTES)
                if time.perf_counter() >= deadline:
                    break
        return done

    begin = time.perf_counter()
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        total = sum(pool.map(reads, range(_NUM_READERS)))
    return total / (time.perf_counter() - begin)


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


def _is_large(model: Path) -> bool:
    return model.stat().st_size >= 4 * _READ_BYTES


@contextmanager
def _file_to_read(model: Path | None) -> Iterator[Path]:
    """The model's file, or a scratch file where there is room for one."""
    if model is not None and _is_large(model):
        yield model
        return
    folder = Path(tempfile.gettempdir())
    size = min(256 * MIB, shutil.disk_usage(folder).free // 8)
    with tempfile.NamedTemporaryFile(prefix="expertide-doctor-", dir=folder) as file:
        try:
            piece = os.urandom(_READ_BYTES)
            for _ in range(size // _READ_BYTES):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(f"{file.name}: cannot be written: {error.strerror}") from None
        yield Path(file.name)


def gpus() -> list[dict[str, Any]]:
    """NVIDIA GPUs as nvidia-smi names them; this version does not compute on them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = ["--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run([program, *query], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in answer.splitlines():
        fields = [field.strip() for field in line.rsplit(",", 2)]
        if len(fields) == 3 and fields[1].isdecimal() and fields[2].isdecimal():
            found.append({"name": fields[0], "total_bytes": int(fields[1]) * MIB, "free_bytes": int(fields[2]) * MIB})
    return found


def hints(facts: dict[str, Any], machine: Topology) -> list[str]:
    """What would help, one sentence each."""
    found = []
    if facts["isa"] is None:
        found.append("the native extension does not load: install the package again with a C++17 compiler present")
    elif facts["isa"] == "base" and machine.machine in ("x86_64", "AMD64"):
        found.append("this processor has no AVX2: the portable kernels run, several times slower")
    rate = facts["disk_bytes_per_s"]
    if rate is not None and rate < _SLOW_DISK:
        found.append(f"the disk gives {rate / 1e6:,.0f} MB/s: move the model to an NVMe disk, or give --ram more")
    if machine.disk is not None and machine.disk.is_network:
        found.append(f"{machine.disk.filesystem} is a network file system: copy the model to a local disk")
    if not facts["disk_reads_are_direct"]:
        found.append("O_DIRECT is refused here: reads go through the page cache, which then competes with the experts")
    if machine.limit is not None:
        found.append(
            f"a memory control group ({machine.limit.group}) limits this process to "
            f"{format_size(machine.limit.limit_bytes)}"
        )
    if machine.ram_available_bytes < 2 * GIB:
        found.append(f"only {format_size(machine.ram_available_bytes)} of RAM are free: close other programs")
    if machine.cpu_quota is not None and machine.cpu_quota < machine.num_physical_cores:
        found.append(f"a CPU quota of {machine.cpu_quota:g} is below the {machine.num_physical_cores} cores seen")
    if facts["gpus"]:
        found.append("a GPU is present; this version computes on the CPU only")
    return found


def _limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    disk_rate = facts["disk_bytes_per_s"]
    direct = "past the page cache" if facts["disk_reads_are_direct"] else "through the page cache"
    speed = f"{disk_rate / 1e9:,.2f} GB/s in reads of 2 MiB, {direct}" if disk_rate else "not measured"
    locked = facts["locked_memory_limit_bytes"]
    rows = [
        ("expertide", f"{facts['version']}, Python {facts['python']}, {facts['system']}"),
        ("CPU", f"{facts['cpu']}: {facts['physical_cores']} cores, {facts['logical_cpus']} logical"),
        ("threads", f"{facts['default_threads']} by default"),
        ("kernels", f"native, {facts['isa']}" if facts["isa"] else "the native extension does not load"),
        (
            "RAM",
            f"{format_size(facts['ram_total_bytes'])}, {format_size(facts['ram_available_bytes'])} free now, "
            f"{facts['memory_bytes_per_s'] / 1e9:,.1f} GB/s read by one thread",
        ),
        ("compute", _compute(facts)),
        ("disk", f"{facts['disk']} ({facts['filesystem']}): {speed}"),
        ("prediction", _prediction(facts["prediction"])),
        ("limits", f"locked memory {format_size(locked) if locked is not None else 'unlimited'} (not needed)"),
    ]
    if not facts["gpus"]:
        rows.append(("GPU", "none found"))
    rows += [("GPU", f"{gpu['name']}, {format_size(gpu['total_bytes'])}") for gpu in facts["gpus"]]
    if facts["saved_to"]:
        rows.append(("saved to", facts["saved_to"] + _replaced(facts)))
    return rows


def _compute(facts: dict[str, Any]) -> str:
    if not facts["values_per_s"]:
        return "not measured"
    threads, by_type = list(facts["values_per_s"].items())[-1]
    rates = ", ".join(f"{rate / 1e9:,.1f} billion {name} weights/s" for name, rate in by_type.items())
    layer = f"; {1e3 * facts['layer_s']:,.2f} ms a layer besides" if facts["layer_s"] else ""
    return f"{rates} with {count(int(threads), 'thread')}{layer}"


def _prediction(trial: dict[str, Any] | None) -> str:
    if trial is None:
        return "not measured (give doctor a large MODEL)"
    without, with_it = (", ".join(f"{rate:,.2f}" for rate in trial[name]) for name in ("without_tps", "with_tps"))
    verdict = "on" if trial["kind"] != "off" else "off"
    return (
        f"{verdict}: {with_it} tokens/s with {trial['tried']}, {without} without; of {trial['loads']:,} guesses "
        f"{trial['useful']:,} useful ({trial['late']:,} of them late), {trial['wasted']:,} wasted"
    )


def _replaced(facts: dict[str, Any]) -> str:
    """What of an earlier measurement is gone."""
    if not facts["replaced"]:
        return ""
    rate = facts["replaced_disk_bytes_per_s"]
    disk = f", and {rate / 1e9:,.2f} GB/s of this disk; other disks are kept" if rate else "; all disks are kept"
    return f" (in place of earlier rates of processor and memory{disk})"
