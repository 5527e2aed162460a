"""`expertide list`: the models that are here, and whether they fit."""

from __future__ import annotations

from typing import Any

from expertide.cli.flags import JsonFlag
from expertide.cli.output import JsonTarget, emit, table
from expertide.errors import ExpertideError
from expertide.hub import store
from expertide.options import Options
from expertide.prepare import prepare
from expertide.units import format_size


def command(json: JsonFlag = None) -> None:
    """List the models that are here, with size, type, and whether they fit into the RAM that is free now."""
    target = JsonTarget(json)
    facts = [_facts("demo")]
    for repo in store.repositories():
        found = store.pulled(repo)
        facts += [_facts(f"{repo}:{candidate.quant or candidate.first}") for candidate in found]
    if target:
        target.write({"models": facts})
    if not target.is_stdout:
        emit(table((entry["name"], _line(entry)) for entry in facts) + "\n")


def _facts(name: str) -> dict[str, Any]:
    try:
        prepared = prepare(name, Options())
    except ExpertideError as error:
        return {"name": name, "fits": False, "why": str(error).splitlines()[0]}
    return {
        "name": name,
        "path": str(prepared.files.files[0]),
        "architecture": prepared.architecture.name,
        "file_bytes": prepared.files.total_bytes,
        "fits": True,
        "cached_share": prepared.plan.cached_share,
        "ram_budget_bytes": prepared.plan.budget_bytes,
    }


def _line(entry: dict[str, Any]) -> str:
    if not entry["fits"]:
        return f"cannot be run: {entry['why']}"
    share = 100 * entry["cached_share"]
    fits = "fits" if share >= 100 else f"fits, {share:.0f} % of the experts in RAM"
    return f"{format_size(entry['file_bytes'])}  {entry['architecture']}  {fits}"
