"""Everything that is decided before a weight is read: which files, which architecture, which machine, what lies where.

    name -> path -> files (checked) -> architecture (checked) -> topology -> budget -> plan

No torch: `expertide plan` ends here, and so does a refusal of the file, the machine, the budget or an option.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from expertide import _native
from expertide.errors import RequestError
from expertide.formats import open_model
from expertide.formats.tensors import ExpertCatalog, ModelFiles
from expertide.hub import names, store
from expertide.kernels import tiles
from expertide.memory import budget, machine_rates, placement, topology
from expertide.memory.budget import RamBudget
from expertide.memory.placement import ModelNeeds, Plan
from expertide.memory.topology import Topology
from expertide.models import registry
from expertide.models.architecture import Architecture
from expertide.options import Options
from expertide.settings import Settings
from expertide.text.sizes import grammar_bytes, tokenizer_bytes
from expertide.units import MIB

# Peak resident set of Python with torch, numpy, tokenizers and jinja2 imported and one small operation run, as
# `python tools/interpreter_size.py` prints it, x86-64 Linux. Builds of torch for CPUs: 226-241 MiB (Python 3.11-3.13,
# torch 2.6-2.13). For CUDA: 503 MiB (Python 3.12, torch 2.11 with CUDA 13.0); such builds bring their own libraries,
# used or not.
INTERPRETER_BYTES = 240 * MIB
CUDA_INTERPRETER_BYTES = 500 * MIB
# Stack, allocator arena and scratch of a worker.
THREAD_BYTES = 1 * MIB
_DEMO_MODEL = Path(__file__).parent / "data" / "demo-q4_k_m.gguf"


@dataclass(frozen=True)
class Prepared:
    """A model and a machine that fit together, and how.

    Attributes:
        num_threads: compute threads.
        kv_dtype: "float16", or "float32" with the reference kernels.
        prediction: predictive prefetch, "auto" resolved.
        pin_cpus: a CPU of its own for each compute thread; none when threads are not bound.
        warnings: sentences worth telling the user; none stops anything.
    """

    name: str
    files: ModelFiles
    architecture: Architecture
    catalog: ExpertCatalog | None
    topology: Topology
    budget: RamBudget
    needs: ModelNeeds
    plan: Plan
    options: Options
    settings: Settings
    num_threads: int
    kv_dtype: str
    prediction: str
    pin_cpus: tuple[int, ...]
    warnings: tuple[str, ...]


def model_path(name: str | Path) -> Path:
    """The file or directory meant by MODEL.

    Raises:
        RequestError: an empty name, or a hub's name of which nothing was pulled.
    """
    if str(name) == "demo":
        return _DEMO_MODEL
    if not isinstance(name, str | Path):
        raise RequestError(f"MODEL: got {type(name).__name__}, expected the path of a .gguf file or directory, or demo")
    if not str(name):
        raise RequestError("MODEL is empty; expected a .gguf file, a directory, or demo")
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~somebody without a home: then it is a name like any other
        path = Path(name)
    hub_name = names.parse(str(name))
    return path if hub_name is None or path.exists() else store.find(hub_name)


def prepare(
    model: str | Path, options: Options, settings: Settings | None = None, *, server_bytes: int = 0
) -> Prepared:
    """Look at the file and the machine, and plan.

    Args:
        server_bytes: what other processes of this program take of the budget; not 0 means that this process will
            hold answers to grammars, which are then planned for too.

    Raises:
        FormatError, UnsupportedError, StorageError: the file.
        BudgetError: it does not fit.
        RequestError: an option that cannot take effect.
    """
    settings = Settings.from_env() if settings is None else settings
    if settings.kernels == "reference" and settings.cpu_isa != "auto":
        raise RequestError(f"EXPERTIDE_CPU_ISA={settings.cpu_isa} has no effect with EXPERTIDE_KERNELS=reference")
    if settings.kernels == "reference" and settings.activation_bits != 16:
        raise RequestError("EXPERTIDE_ACTIVATION_BITS has no effect with EXPERTIDE_KERNELS=reference")
    if settings.kernels == "reference" and settings.pin:
        raise RequestError("EXPERTIDE_PIN=1 has no effect with EXPERTIDE_KERNELS=reference: it runs on torch's threads")
    path = model_path(model)
    if options.pre_tokenizer is not None:
        # Here, because only this option needs the tokenizers package before the plan is made.
        from expertide.text import pre_tokenizers

        pre_tokenizers.find_asked(options.pre_tokenizer)
    files = open_model(path)
    architecture = registry.find(files)
    machine = topology.probe(files.files[0])
    catalog = architecture.expert_catalog()
    if catalog is None and options.cache_policy != "auto":
        raise RequestError(f"--cache-policy {options.cache_policy}: this model has no routed experts to cache")
    if catalog is None and options.startup_fill != "auto":
        raise RequestError(f"--startup-fill {options.startup_fill}: this model has no routed experts to load")
    can_predict = catalog is not None and not settings.serial_io
    if options.predictive_prefetch not in ("auto", "off") and not can_predict:
        why = "this model has no routed experts" if catalog is None else "EXPERTIDE_SERIAL_IO=1 awaits each read"
        raise RequestError(f"--predictive-prefetch {options.predictive_prefetch}: has no effect, {why}")
    ram = budget.resolve(options.ram, machine)
    num_threads = options.threads or machine.default_threads
    pin_cpus = machine.pin_cpus(num_threads) if settings.pin else ()
    kv_dtype = "float32" if settings.kernels == "reference" else "float16"
    needs = needs_of(
        architecture,
        catalog,
        num_merges=_num_merges(files),
        num_threads=num_threads,
        kv_dtype=kv_dtype,
        decodes_tiles=settings.kernels == "reference" or bool(types_without_native_kernels(architecture, catalog)),
        server_bytes=server_bytes + grammar_bytes(architecture.config.vocab_size) if server_bytes else 0,
    )
    return Prepared(
        name="demo" if str(model) == "demo" else str(path),
        files=files,
        architecture=architecture,
        catalog=catalog,
        topology=machine,
        budget=ram,
        needs=needs,
        plan=_plan(needs, ram, options),
        options=options,
        settings=settings,
        num_threads=num_threads,
        kv_dtype=kv_dtype,
        pin_cpus=pin_cpus,
        prediction=_prediction(options, machine) if can_predict else "off",
        warnings=(
            *files.warnings,
            *ram.warnings,
            *_warnings(machine, options),
            *_pin_warnings(settings, num_threads, pin_cpus),
        ),
    )


def with_measured_interpreter(prepared: Prepared, interpreter_bytes: int) -> Prepared:
    """The plan once more, when the process turns out to be larger than was assumed before its libraries were loaded.

    A build of torch for GPUs takes more than one for CPUs, and so does a program that has other things in memory; the
    experts get what is left, so that the budget stays a ceiling.

    Raises:
        BudgetError: it does not fit any more.
    """
    if interpreter_bytes <= prepared.needs.interpreter_bytes:
        return prepared
    needs = replace(prepared.needs, interpreter_bytes=interpreter_bytes)
    return replace(prepared, needs=needs, plan=_plan(needs, prepared.budget, prepared.options))


def _prediction(options: Options, machine: Topology) -> str:
    if options.predictive_prefetch != "auto":
        return options.predictive_prefetch
    rates = machine_rates.load()
    return "off" if rates is None else rates.predictions.get(machine_rates.disk_key(machine.disk), "off")


def _plan(needs: ModelNeeds, ram: RamBudget, options: Options) -> Plan:
    return placement.plan(
        needs,
        ram.budget_bytes,
        context=options.context,
        chunk=options.prefill_chunk,
        expert_cache=options.expert_cache_bytes,
    )


def needs_of(
    architecture: Architecture,
    catalog: ExpertCatalog | None,
    *,
    num_merges: int,
    num_threads: int,
    kv_dtype: str,
    decodes_tiles: bool,
    server_bytes: int = 0,
) -> ModelNeeds:
    """What this model asks of memory, for `placement.plan`.

    Args:
        server_bytes: what the program's other processes and this one's grammars take.
        decodes_tiles: some matrix runs on the reference kernels, which decode it in tiles.
    """
    config = architecture.config
    dtype_bytes = 4 if kv_dtype == "float32" else 2
    resident = sum(tensor.nbytes for tensor in architecture.resident_tensors())
    # Every op of the architecture's bound counts these tiles once.
    unused_bytes = 0 if decodes_tiles else tiles.decoding_bytes()
    return ModelNeeds(
        interpreter_bytes=_interpreter_bytes() + num_threads * THREAD_BYTES,
        tokenizer_bytes=tokenizer_bytes(config.vocab_size, num_merges),
        resident_bytes=resident,
        kv_bytes_per_token=architecture.kv_bytes_per_token(dtype_bytes),
        workspace_bytes=lambda chunk: architecture.workspace_bytes(chunk) - unused_bytes,
        max_context=config.context_length,
        prefill_chunk=architecture.default_prefill_chunk,
        expert_window_bytes=placement.expert_window_bytes(catalog),
        num_experts=catalog.num_experts if catalog else 0,
        num_experts_per_tok=config.num_experts_per_tok if catalog else 0,
        server_bytes=server_bytes,
    )


def types_without_native_kernels(architecture: Architecture, catalog: ExpertCatalog | None) -> list[str]:
    """Names of this file's quant types that only the reference kernels can multiply with."""
    used = {tensor.quant for tensor in architecture.resident_tensors()}
    if catalog is not None:
        used |= {part.quant for parts in catalog.layers.values() for part in parts}
    native = frozenset(_native.quant_types())
    return sorted(quant.name for quant in used if quant.ggml_id not in native)


def _interpreter_bytes() -> int:
    """By the kind of torch that is installed, as its version file says: the plan does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return INTERPRETER_BYTES
    try:
        version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return INTERPRETER_BYTES
    is_cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]", version, re.MULTILINE) is not None
    return CUDA_INTERPRETER_BYTES if is_cuda else INTERPRETER_BYTES


def _num_merges(files: ModelFiles) -> int:
    """Merge rules of the vocabulary; 0 where the file has none (whether that is a fault is the tokenizer's to say)."""
    merges = files.metadata.get("tokenizer.ggml.merges", ())
    return len(merges) if isinstance(merges, Sequence) else 0


def _pin_warnings(settings: Settings, num_threads: int, pin_cpus: tuple[int, ...]) -> list[str]:
    if not settings.pin or pin_cpus or num_threads == 1:
        return []
    return ["EXPERTIDE_PIN=1: threads are not bound, since this process does not have each of its cores to itself"]


def _warnings(machine: Topology, options: Options) -> list[str]:
    found = []
    if machine.disk is not None and machine.disk.is_network:
        found.append(
            f"the model lies on a {machine.disk.filesystem} file system; experts will be read slowly from there"
        )
    if options.threads is not None and options.threads > (os.cpu_count() or 1):
        found.append(f"--threads {options.threads} is more than the {os.cpu_count()} CPUs of this machine")
    return found
