"""Lines about a loaded model and a finished answer, made from the statistics' JSON."""

from __future__ import annotations

import json
import os
from typing import Any

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
        parts.append(f"expert cache {format_size(plan.expert_cache_bytes)} of {format_size(plan.all_experts_bytes)}")
    parts.append(f"planned {format_size(plan.predicted_bytes)}, peak so far {format_size(memory['ram_peak_bytes'])}")
    return ", ".join(parts)


def stats_line(stats: dict[str, Any]) -> str:
    """One line of expert statistics and rates."""
    timings, memory = stats["timings"], stats["memory"]
    rates = []
    if timings["prefill_s"] > 0:
        rates.append(f"prefill {timings['prefill_tokens']:,} tokens at {timings['prefill_tps']:,.1f}/s")
    if timings["decode_s"] > 0:
        rates.append(f"decode {timings['decode_tokens']:,} at {timings['decode_tps']:,.1f}/s")
    tail = "; " + ", ".join(rates) if rates else ""
    phases = stats["experts"]
    requests, hits, read = (
        sum(phases[phase][key] for phase in ("prefill", "decode")) for key in ("requests", "hits_host", "read_bytes")
    )
    if not requests:
        return "experts: none in this model" + tail
    stall = sum(phases[phase]["stall_s"] for phase in ("prefill", "decode"))
    return (
        f"experts: {requests:,} requests, {100 * hits / requests:.1f} % hits, {format_size(read)} read, "
        f"{stall:.2f} s stalled, {format_size(memory['expert_cache_used_bytes'])} in cache of "
        f"{format_size(memory['all_experts_bytes'])}{tail}"
    )


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
