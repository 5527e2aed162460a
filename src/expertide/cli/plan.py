"""`expertide plan MODEL`: what would lie where, predicted speed, without reading weights."""

from __future__ import annotations

from typing import Any

from expertide.cli import estimate
from expertide.cli.flags import JsonFlag, ModelName, with_flags
from expertide.cli.output import JsonTarget, emit, note, table
from expertide.formats.tensors import ExpertCatalog
from expertide.memory import machine_rates
from expertide.options import Options
from expertide.prepare import Prepared, prepare
from expertide.units import format_size


@with_flags
def command(
    model: ModelName,
    options: Options,
    json: JsonFlag = None,
) -> None:
    """Say what would lie where, and how fast it may be. No weight is read."""
    target = JsonTarget(json)
    prepared = prepare(model, options)
    facts = facts_of(prepared)
    if target:
        target.write(facts)
    if not target.is_stdout:
        _print(facts)
    for warning in prepared.warnings:
        note(f"note: {warning}")


def facts_of(prepared: Prepared) -> dict[str, Any]:
    """The plan as plain values: sizes in bytes."""
    plan = prepared.plan
    facts: dict[str, Any] = {
        "model": prepared.name,
        "architecture": prepared.architecture.name,
        "file_bytes": prepared.files.total_bytes,
        "ram_budget_bytes": plan.budget_bytes,
        "ram_budget_is_auto": prepared.budget.is_auto,
        "ram_available_bytes": prepared.topology.ram_available_bytes,
        "context": plan.context,
        "prefill_chunk": plan.prefill_chunk,
        "threads": prepared.num_threads,
        "kv_type": prepared.kv_dtype,
        "shares": plan.shares,
        "predicted_bytes": plan.predicted_bytes,
        "all_experts_bytes": plan.all_experts_bytes,
        "num_experts": plan.num_all_experts,
        "cached_share": plan.cached_share,
        "fits": True,
    }
    facts["decode"] = _decode(prepared)
    return facts


def touched_bytes(prepared: Prepared) -> tuple[int, int]:
    """Bytes of weights that one decoded token reads from memory: (all, of these routed experts)."""
    resident = sum(tensor.nbytes for tensor in prepared.architecture.resident_tensors())
    embedding = prepared.files.tensors.get("token_embd.weight")
    # One row of the embedding is read per token, unless it is the head as well.
    if embedding is not None and "output.weight" in prepared.files.tensors:
        resident -= embedding.nbytes
    experts = active_expert_bytes(prepared.catalog, prepared.architecture.config.num_experts_per_tok)
    return resident + experts, experts


def _decode(prepared: Prepared) -> dict[str, Any]:
    """What a decoded token touches, and tokens per second where `expertide doctor` has measured this machine."""
    total, experts = touched_bytes(prepared)
    missing = int(experts * (1 - prepared.plan.cached_share))
    facts: dict[str, Any] = {
        "memory_bytes_per_token": total,
        "expert_bytes_per_token": experts,
        "disk_bytes_per_token": missing,
        "tokens_per_s": None,
    }
    rates = machine_rates.load()
    if rates is not None:
        disk = rates.disks.get(machine_rates.disk_key(prepared.topology.disk))
        seconds = estimate.seconds_per_token(
            estimate.touched_values(prepared),
            total,
            missing,
            num_layers=prepared.architecture.config.num_layers,
            num_threads=prepared.num_threads,
            rates=rates,
            disk_bytes_per_s=disk,
        )
        facts["tokens_per_s"] = 1 / seconds
        # Without the disk's share the figure is only a bound.
        facts["is_upper_bound"] = disk is None and missing > 0
        facts["measured"] = {
            "memory_bytes_per_s": rates.memory_bytes_per_s,
            "values_per_s": {str(threads): dict(by_type) for threads, by_type in rates.values_per_s.items()},
            "layer_s": rates.layer_s,
            "disk_bytes_per_s": disk,
        }
    return facts


def active_expert_bytes(catalog: ExpertCatalog | None, num_experts_per_tok: int) -> int:
    """Bytes of routed experts that one token visits."""
    if catalog is None:
        return 0
    return sum(catalog.expert_nbytes(layer_id) for layer_id in catalog.layers) * num_experts_per_tok


def _print(facts: dict[str, Any]) -> None:
    how = "free now minus a reserve" if facts["ram_budget_is_auto"] else "as asked"
    rows = [
        ("model", f"{facts['model']}  {format_size(facts['file_bytes'])}, {facts['architecture']}"),
        ("RAM budget", f"{format_size(facts['ram_budget_bytes'])} ({how})"),
    ]
    rows += [(f"  {name}", format_size(size)) for name, size in facts["shares"].items() if size]
    rows.append(("  in all", format_size(facts["predicted_bytes"])))
    if facts["num_experts"]:
        rows.append(
            (
                "experts in RAM",
                f"{100 * facts['cached_share']:.0f} % of {facts['num_experts']:,} "
                f"({format_size(facts['all_experts_bytes'])})"
                f"{'' if facts['cached_share'] >= 1 else '; the rest stays on disk'}",
            )
        )
    rows.append(("context", f"{facts['context']:,} tokens, prefill in chunks of {facts['prefill_chunk']:,}"))
    rows.append(("threads", str(facts["threads"])))
    decode = facts["decode"]
    missing = decode["disk_bytes_per_token"]
    rows.append(
        (
            "a decoded token",
            f"touches {format_size(decode['memory_bytes_per_token'])}, "
            + (f"reads about {format_size(missing)} from disk" if missing else "reads nothing from disk"),
        )
    )
    rows.append(("decode speed", _speed(decode, facts["model"])))
    emit(table(rows) + "\n")


def _speed(decode: dict[str, Any], model: str) -> str:
    speed = decode["tokens_per_s"]
    if speed is None:
        return "unknown; `expertide doctor` measures this machine once"
    figure = f"{speed:,.0f}" if speed >= 100 else f"{speed:,.1f}" if speed >= 1 else f"{speed:,.2g}"
    if decode["is_upper_bound"]:
        return f"at most {figure} tokens/s, reads not counted; `expertide doctor {model}` measures this disk"
    return f"about {figure} tokens/s by what doctor measured; half or double is possible"
