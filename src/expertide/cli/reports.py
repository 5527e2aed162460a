"""Lines about a loaded model and a finished answer, made from the statistics' JSON."""

from __future__ import annotations

import json
import os
from typing import Any

from expertide.cli.output import count
from expertide.llm import LLM
from expertide.prepare import Prepared
from expertide.units import format_size


def load_line(llm: LLM) -> str:
    """What was loaded, and the plan against what was measured."""
    plan = llm.prepared.plan
    memory = llm.memory()
    parts = [
        f"loaded in {llm.load_s:.1f} s",
        f"context {plan.context:,} tokens",
        f"weights {format_size(memory['resident_bytes'])}",
        f"KV {format_size(memory['kv_bytes'])}",
    ]
    if plan.num_all_experts:
        parts.append(
            f"expert cache {format_size(plan.expert_cache_bytes)} ({_percent(plan.cached_share)} of all experts)"
        )
    parts.append(f"planned {format_size(plan.predicted_bytes)}, peak so far {format_size(memory['ram_peak_bytes'])}")
    return ", ".join(parts)


def stats_lines(llm: LLM, stats: dict[str, Any]) -> str:
    """Two lines about an answer: speed and memory; then what the experts cost."""
    timings, memory = stats["timings"], stats["memory"]
    parts = []
    if timings["prefill_s"] > 0:
        parts.append(f"prompt: {count(timings['prefill_tokens'], 'token')} at {timings['prefill_tps']:,.1f}/s")
    if timings["decode_s"] > 0:
        parts.append(f"answer: {count(timings['decode_tokens'], 'token')} at {timings['decode_tps']:,.1f}/s")
    budget = format_size(memory["ram_budget_bytes"])
    limit = f"--ram auto ({budget})" if llm.prepared.budget.is_auto else f"--ram {budget}"
    parts.append(f"peak {format_size(memory['ram_peak_bytes'])} of {limit}")
    return "; ".join(parts) + "\n" + experts_line(stats)


def experts_line(stats: dict[str, Any]) -> str:
    """What was asked for, where it was found and what that cost, prefill and decode together."""
    phases, memory = stats["experts"], stats["memory"]
    requests, hits, read_bytes, stall_s = (
        sum(phases[phase][key] for phase in ("prefill", "decode"))
        for key in ("requests", "hits_host", "read_bytes", "stall_s")
    )
    if not requests:
        return "experts: none in this model" if not memory["all_experts_bytes"] else "experts: none looked up"
    predicted = phases["predicted"]
    guesses = f", {predicted['useful']:,} of {predicted['loads']:,} guesses useful" if predicted["loads"] else ""
    share = memory["expert_cache_bytes"] / memory["all_experts_bytes"]
    return (
        f"experts: {requests:,} looked up (each once per layer and step), {100 * hits / requests:.1f} % found in RAM, "
        f"{format_size(read_bytes)} read, {stall_s:.2f} s spent waiting for the disk{guesses}; "
        f"RAM has room for {_percent(share)} of all experts"
    )


def _percent(share: float) -> str:
    # Rounded to whole per cent, but never up to "all of them".
    return "100 %" if share >= 1 else f"{min(99.0, 100 * share):.0f} %"


def machine_facts(llm: LLM) -> dict[str, Any]:
    """What a measurement depends on, beside the model: for JSON that is compared later."""
    return topology_facts(llm.prepared)


def topology_facts(prepared: Prepared) -> dict[str, Any]:
    """The same without a loaded model."""
    topology = prepared.topology
    return {
        "cpu": topology.cpu_model,
        "physical_cores": topology.num_physical_cores,
        "ram_total_bytes": topology.ram_total_bytes,
        "disk": topology.disk.device if topology.disk else None,
        "filesystem": topology.disk.filesystem if topology.disk else None,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def settings_facts(llm: LLM) -> dict[str, Any]:
    """Options as asked, in JSON's own types."""
    options = llm.prepared.options
    facts: dict[str, Any] = json.loads(json.dumps({name: getattr(options, name) for name in type(options).__slots__}))
    return facts
