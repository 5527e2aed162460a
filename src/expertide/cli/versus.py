"""`expertide bench MODEL --against llama.cpp`: the same file, threads and prompts, in processes that take turns.

    round 1   measure bounds, drop caches, [ours]   measure bounds, drop caches, [peer]
    round 2   …                                     medians and spread over all rounds

Never two engines at once, never both in one process. With a memory limit each process runs in a control group that is
made for it: the page cache counts there, so "larger than memory" is true. Without one, everything lies in RAM before
the first prompt: ours in the cache, the peer's weights in anonymous memory (a mapped file could be dropped meanwhile).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from expertide.cli import page_cache
from expertide.cli.output import note
from expertide.cli.plan import touched_bytes
from expertide.errors import ExpertideError, RequestError
from expertide.memory import rates
from expertide.memory.control_group import memory_group
from expertide.options import Options
from expertide.prepare import Prepared, prepare
from expertide.units import MIB, format_size

PEERS = ("llama.cpp",)
OURS, PEER = "expertide", "llama.cpp"
KINDS = ("first_run", "rotating", "repeated")
# What the group holds beside the process's own memory: page cache of Python, torch and other libraries.
GROUP_MARGIN_BYTES = 256 * MIB
# llama.cpp's own default, and its fastest setting for long prompts on a CPU.
_PEER_BATCH = 512
# More than this of the file in the page cache, and a run does not count as cold.
_COLD_SHARE = 0.01


class PeerError(ExpertideError):
    """A process of the comparison failed."""


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how often.

    Attributes:
        prompts: token ids; the first one is "first run" and "repeated", the others rotate.
        memory_limit: bytes of the control group each process runs in; None: everything in RAM.
        rounds: processes of each engine.
        repeat: rotating prompts, and repeated ones, per process; 0: only the first run.
    """

    model: str
    options: Options
    peer_python: str
    prompts: Sequence[Sequence[int]]
    num_tokens: int
    memory_limit: int | None
    rounds: int
    warmup: int
    repeat: int

    def runs(self) -> list[dict[str, Any]]:
        kinds = [("first_run", 0)]
        if len(self.prompts) > 1:
            kinds += [("rotating", (1 + i) % len(self.prompts)) for i in range(self.repeat)]
        if self.repeat:
            kinds += [("warmup", 0)] * self.warmup + [("repeated", 0)] * self.repeat
        return [{"kind": kind, "ids": list(self.prompts[at]), "num_tokens": self.num_tokens} for kind, at in kinds]


def check_peer(python: str | None) -> str:
    """The peer's Python, or a refusal that says how to name one.

    Raises:
        RequestError: none named, or it does not run llama-cpp-python.
    """
    if not python:
        raise RequestError(
            "--against llama.cpp: name a Python that has llama-cpp-python, by --peer-python or EXPERTIDE_PEER_PYTHON"
        )
    program = shutil.which(python)
    if program is None:
        raise RequestError(f"--peer-python {python}: no such program")
    command = (program, "-I", "-c", "import llama_cpp")
    done = subprocess.run(command, capture_output=True, text=True, env=_peer_environment(), check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RequestError(f"--peer-python {python}: cannot import llama_cpp: {last}")
    return program


def limited_options(options: Options, memory_limit: int | None) -> Options:
    """With a limit and no --ram of the user's, the budget is what the group leaves."""
    if memory_limit is None or options.ram != "auto":
        return options
    return replace(options, ram=memory_limit - GROUP_MARGIN_BYTES)


def compare(comparison: Comparison) -> dict[str, Any] | None:
    """Run all rounds; every sample, medians, ratios and bounds. None, after saying so, where no group can be made.

    Raises:
        PeerError: one of the processes failed.
        ExpertideError: the model does not load or does not fit.
    """
    prepared = prepare(comparison.model, comparison.options)
    if comparison.memory_limit is None and not (prepared.plan.expert_cache_bytes >= prepared.plan.all_experts_bytes):
        note("note: the RAM budget does not hold every expert: our side streams, the peer does not")
    processes: list[dict[str, Any]] = []
    for number in range(comparison.rounds):
        for engine in (OURS, PEER):
            bounds = _measure_bounds(prepared)
            process = _run_one(comparison, prepared, engine)
            if process is None:
                note("SKIPPED: no right to make a memory control group (root, or systemd-run); NOTHING WAS MEASURED")
                return None
            processes.append({"round": number, "bounds": bounds, **process})
            _say(processes[-1])
    return {
        "comparison": {
            "model": prepared.name,
            "memory_limit_bytes": comparison.memory_limit,
            "threads": prepared.num_threads,
            "rounds": comparison.rounds,
            "prompt_tokens": sorted({len(ids) for ids in comparison.prompts}),
            "num_tokens": comparison.num_tokens,
            "commit": _commit(),
        },
        "processes": processes,
        "summary": summarize(processes, *_touched(comparison, prepared)),
    }


def summarize(processes: list[dict[str, Any]], bytes_per_token: int, expert_bytes_per_token: int) -> dict[str, Any]:
    """Medians and spread per engine and kind, ratios of medians, shares of the bounds. Pure arithmetic."""
    summary: dict[str, Any] = {
        "num_peer_processes_killed": sum(bool(p.get("was_killed")) for p in processes),
        "bytes_per_token": bytes_per_token,
        "expert_bytes_per_token": expert_bytes_per_token,
        "memory_bytes_per_s": spread([p["bounds"]["memory_bytes_per_s"] for p in processes]),
        "disk_bytes_per_s": spread([p["bounds"]["disk_bytes_per_s"] for p in processes]),
    }
    memory_rate = summary["memory_bytes_per_s"]["median"]
    summary["decode_tps_bound_in_ram"] = memory_rate / bytes_per_token
    for kind in KINDS:
        found: dict[str, Any] = {}
        for engine in (OURS, PEER):
            runs = [(p, run) for p in processes if p["engine"] == engine for run in p["runs"] if run["kind"] == kind]
            if runs:
                found[engine] = _figures(runs)
        if len(found) == 2:
            found["ratio"] = {
                name: found[OURS][name]["median"] / found[PEER][name]["median"]
                for name in ("prefill_tps", "decode_tps")
                if found[OURS][name] and found[PEER][name]
            }
        summary[kind] = found or None
    return summary


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median, least and most of what was measured; None when nothing was."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known), "samples": len(known)}


def _figures(runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Of one engine and kind. Prefill rates count up to the first token: both engines then did the same work."""
    figures: dict[str, Any] = {
        "prefill_tps": spread([run["prompt_tokens"] / run["ttft_s"] for _, run in runs]),
        "decode_tps": spread([_rate(run["decode_tokens"], run["decode_s"]) for _, run in runs]),
        "ttft_s": spread([run["ttft_s"] for _, run in runs]),
    }
    if all("experts" in run for _, run in runs):
        decode = [run["experts"]["decode"] for _, run in runs]
        requests = sum(phase["requests"] for phase in decode)
        figures["decode_hit_rate"] = sum(phase["hits_host"] for phase in decode) / requests if requests else None
        # Against the disk rate measured just before this very process.
        figures["decode_share_of_disk"] = spread([_disk_share(p, run, "decode", "decode_s") for p, run in runs])
        figures["prefill_share_of_disk"] = spread([_disk_share(p, run, "prefill", "ttft_s") for p, run in runs])
        figures["stall_share"] = spread(
            [_rate(run["experts"]["decode"]["stall_s"], run["decode_s"]) for _, run in runs]
        )
    return figures


def _disk_share(process: dict[str, Any], run: dict[str, Any], phase: str, seconds: str) -> float | None:
    """Seconds that the bytes of a phase take at the measured disk rate, over the seconds it took; 1: disk-bound."""
    rate, nbytes = process["bounds"]["disk_bytes_per_s"], run["experts"][phase]["read_bytes"]
    return nbytes / rate / run[seconds] if rate and nbytes and run[seconds] > 0 else None


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _touched(comparison: Comparison, prepared: Prepared) -> tuple[int, int]:
    """Bytes one decoded token reads: weights, and the KV cache at the prompt's depth; and the experts' part of it."""
    total, experts = touched_bytes(prepared)
    dtype_bytes = 4 if prepared.kv_dtype == "float32" else 2
    depth = max(len(ids) for ids in comparison.prompts)
    return total + depth * prepared.architecture.kv_bytes_per_token(dtype_bytes), experts


def _measure_bounds(prepared: Prepared) -> dict[str, Any]:
    disk = rates.expert_read_rate(prepared.files, prepared.catalog) if prepared.catalog is not None else None
    return {
        "memory_bytes_per_s": rates.memory_read_rate(prepared.num_threads),
        "disk_bytes_per_s": disk,
        "load_average": os.getloadavg()[0],
    }


def _run_one(comparison: Comparison, prepared: Prepared, engine: str) -> dict[str, Any] | None:
    """One process from start to end; None where its control group cannot be made."""
    files = prepared.files.files
    cached = _make_cold(files)
    job = _job(comparison, prepared)
    with ExitStack() as stack:
        prefix: tuple[str, ...] = ()
        group = None
        if comparison.memory_limit is not None:
            group = stack.enter_context(memory_group(comparison.memory_limit))
            if group is None:
                return None
            prefix = group.prefix
        # An empty folder of its own: what an earlier process learnt about hot experts must not show.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="expertide-bench-"))
        if engine == OURS:
            command = (*prefix, sys.executable, "-m", "expertide.cli.bench_worker")
            environment = os.environ | {"XDG_CACHE_HOME": folder}
        else:
            # Isolated: the modules beside the script (inspect, trace) must not stand in for the standard library.
            command = (*prefix, comparison.peer_python, "-I", str(Path(__file__).with_name("peer_llama_cpp.py")))
            environment = _peer_environment()
        done = subprocess.run(
            command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, env=environment, check=False
        )
        was_killed = group is not None and group.was_killed()
        peak = group.peak_bytes() if group is not None else None
        kind = group.kind if group is not None else None
    facts = {"cached_bytes_before": cached, "group": kind, "group_peak_bytes": peak, "was_killed": was_killed}
    if was_killed and engine == PEER:
        # That it does not run where ours does is a result, not a failure of the comparison.
        return {"engine": engine, "load_s": None, "runs": []} | facts
    if done.returncode != 0 or was_killed:
        how = "was killed for memory" if was_killed else f"ended with code {done.returncode}"
        raise PeerError(f"{engine}: the measured process {how}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result | facts


def _job(comparison: Comparison, prepared: Prepared) -> dict[str, Any]:
    options = comparison.options
    longest = max(len(ids) for ids in comparison.prompts) + comparison.num_tokens
    context = prepared.plan.context if options.context is not None else min(prepared.plan.context, max(longest, 64))
    ours = replace(options, threads=prepared.num_threads, context=context)
    return {
        "model": str(prepared.files.files[0]) if prepared.files.container == "gguf" else prepared.name,
        "options": {name: getattr(ours, name) for name in Options.__slots__},
        "threads": prepared.num_threads,
        "context": context,
        "peer_batch": _PEER_BATCH,
        "peer_mmap": comparison.memory_limit is not None,
        "everything_in_ram": comparison.memory_limit is None,
        "runs": comparison.runs(),
    }


def _make_cold(files: Sequence[Path]) -> int:
    """Get the model out of the page cache; bytes of it that stayed, which is said when it is much."""
    page_cache.drop(files)
    total = sum(path.stat().st_size for path in files)
    cached = page_cache.cached_bytes(files)
    if cached > _COLD_SHARE * total and page_cache.drop_everything():
        cached = page_cache.cached_bytes(files)
    if cached > _COLD_SHARE * total:
        note(f"note: NOT COLD: {format_size(cached)} of the model stay in the page cache")
    return cached


def _peer_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _commit() -> str | None:
    """The commit this runs from, with + for changes; None for an installed package."""
    folder = Path(__file__).parent
    try:
        command = ("git", "-C", str(folder), "describe", "--always", "--dirty=+")
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _say(process: dict[str, Any]) -> None:
    bounds = process["bounds"]
    disk = f", disk {bounds['disk_bytes_per_s'] / 1e9:.2f} GB/s" if bounds["disk_bytes_per_s"] else ""
    how = "killed for memory" if process["was_killed"] else f"loaded in {process['load_s']:.1f} s"
    note(f"{process['engine']}: {how}; memory {bounds['memory_bytes_per_s'] / 1e9:.1f} GB/s{disk} just before")
    for run in process["runs"]:
        decode = _rate(run["decode_tokens"], run["decode_s"])
        text = f"  {run['kind']:<10} prefill {run['prompt_tokens'] / run['ttft_s']:8.2f} tok/s"
        note(text + (f", decode {decode:7.2f} tok/s" if decode else ""))


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The comparison as a table."""
    summary = facts["summary"]
    found = []
    for kind in KINDS:
        figures = summary[kind]
        if figures is None:
            continue
        for engine in (OURS, PEER):
            if engine in figures:
                found.append((f"{kind.replace('_', ' ')}, {engine}", _engine_line(figures[engine])))
        if "ratio" in figures:
            ratio = ", ".join(f"{name.split('_')[0]} {value:.2f} ×" for name, value in figures["ratio"].items())
            found.append(("  ratio of medians", ratio))
    if summary["num_peer_processes_killed"]:
        found.append(
            (PEER, f"killed for memory in {summary['num_peer_processes_killed']} of {_num_rounds(facts)} rounds")
        )
    found.append(
        (
            "bound",
            f"decode {summary['decode_tps_bound_in_ram']:.1f} tok/s in RAM "
            f"({summary['memory_bytes_per_s']['median'] / 1e9:.1f} GB/s, "
            f"{summary['bytes_per_token'] / 1e9:.2f} GB a token)",
        )
    )
    if summary["disk_bytes_per_s"]:
        disk = summary["disk_bytes_per_s"]
        found.append(("", f"disk {disk['median'] / 1e9:.2f} GB/s ({disk['min'] / 1e9:.2f}-{disk['max'] / 1e9:.2f})"))
    return found


def _num_rounds(facts: dict[str, Any]) -> int:
    return len({process["round"] for process in facts["processes"]})


def _engine_line(figures: dict[str, Any]) -> str:
    parts = [f"prefill {_shown(figures['prefill_tps'])} tok/s", f"decode {_shown(figures['decode_tps'])} tok/s"]
    if figures.get("decode_hit_rate") is not None:
        parts.append(f"{100 * figures['decode_hit_rate']:.0f} % hits")
    for name in ("prefill", "decode"):
        share = figures.get(f"{name}_share_of_disk")
        if share:
            parts.append(f"{name} at {100 * share['median']:.0f} % of the disk rate")
    return ", ".join(parts)


def _shown(figure: dict[str, float] | None) -> str:
    if figure is None:
        return "-"
    if figure["min"] == figure["max"]:
        return f"{figure['median']:.2f}"
    return f"{figure['median']:.2f} ({figure['min']:.2f}-{figure['max']:.2f})"
