"""`make bench-cpu`: every figure of the README's table, each by one `expertide bench … --against llama.cpp`.

    python benchmarks/cpu.py --model build/large/v2lite.gguf --peer-python peer/bin/python
    python benchmarks/cpu.py --model … --peer-python … --only limit-6gib-decode     # one scenario
    python benchmarks/cpu.py --table                                                # the table from what was measured

Writes benchmarks/results/NAME.json: commit, machine, bounds, every sample. Run it on a machine that does nothing else:
load average and bounds stand in the file, so that a disturbed run can be told.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
OURS, PEER = "expertide", "llama.cpp"


@dataclass(frozen=True)
class Scenario:
    """One row group of the table.

    Attributes:
        flags: of `expertide bench`, besides model and peer.
        about: what it shows.
    """

    name: str
    flags: str
    about: str


# Random ids, as llama-bench draws them: the large file has no real vocabulary, and its routing is no model's either.
SCENARIOS = (
    Scenario(
        "ram-512",
        "--prompt-tokens 512 -n 48 --rounds 3 --repeat 0",
        "everything in RAM, 512 tokens of prompt",
    ),
    Scenario("ram-256", "--prompt-tokens 256 -n 2 --rounds 2 --repeat 0", "everything in RAM, 256 tokens of prompt"),
    Scenario("ram-4000", "--prompt-tokens 4000 -n 32 --rounds 1 --repeat 0", "everything in RAM, 4,000 tokens deep"),
    Scenario(
        "limit-6gib-decode",
        "--memory-limit 6GiB --prompt-tokens 32 -n 16 --rounds 3 --repeat 1 --warmup 0",
        "6 GiB, short prompt",
    ),
    Scenario(
        "limit-6gib-prefill",
        "--memory-limit 6GiB --prompt-tokens 256 -n 2 --rounds 3 --repeat 1 --warmup 0",
        "6 GiB, 256 tokens of prompt",
    ),
    Scenario(
        "limit-3gib",
        "--memory-limit 3GiB --prompt-tokens 32 -n 8 --rounds 2 --repeat 0",
        "3 GiB, short prompt",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--peer-python", help="a Python with llama-cpp-python; else EXPERTIDE_PEER_PYTHON")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", action="append", choices=[s.name for s in SCENARIOS], help="may be given again")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table")
    args = parser.parse_args()
    if not args.table:
        if args.model is None:
            parser.error("--model is needed to measure")
        for scenario in SCENARIOS:
            if not args.only or scenario.name in args.only:
                measure(scenario, args.model, args.peer_python, args.threads)
    print(table())
    return 0


def measure(scenario: Scenario, model: Path, peer_python: str | None, threads: int | None) -> None:
    RESULTS.mkdir(exist_ok=True)
    flags = [*shlex.split(scenario.flags), "--random-prompts", "--against", "llama.cpp"]
    flags += ["--threads", str(threads)] if threads else []
    peer = ["--peer-python", peer_python] if peer_python else []
    target = RESULTS / f"{scenario.name}.json"
    print(f"{scenario.name}: {scenario.about}", flush=True)
    program = (sys.executable, "-m", "expertide", "bench", str(model))
    subprocess.run((*program, *flags, *peer, "--json", str(target)), check=True)
    if target.exists():
        facts = json.loads(target.read_text())
        # Names of this machine's folders say nothing to anybody else.
        facts["model"]["name"] = facts["comparison"]["model"] = model.name
        facts["command"] = shlex.join(["expertide", "bench", model.name, *flags])
        target.write_text(json.dumps(facts, indent=1) + "\n")


def table() -> str:
    """Markdown from the files in benchmarks/results."""
    found = {s.name: load(s) for s in SCENARIOS}
    lines = [
        "| | kind | expertide | llama.cpp | ratio | bound |",
        "|---|---|---|---|---|---|",
    ]
    for scenario in SCENARIOS:
        facts = found[scenario.name]
        if facts is None:
            continue
        for kind in ("first_run", "rotating", "repeated"):
            figures = facts["summary"][kind]
            if figures and OURS in figures and (PEER in figures or facts["summary"].get("num_peer_processes_killed")):
                lines += rows(scenario, kind, figures, facts, found.get("ram-256"))
    if len(lines) == 2:
        return "nothing measured yet"
    commands = [f"- {s.name}: `{found[s.name]['command']}`" for s in SCENARIOS if found[s.name]]
    return "\n".join([*lines, "", *commands])


def rows(
    scenario: Scenario, kind: str, figures: dict[str, Any], facts: dict[str, Any], in_ram: dict[str, Any] | None
) -> list[str]:
    limited = facts["comparison"]["memory_limit_bytes"] is not None
    wanted = {"limit-6gib-prefill": ("prefill_tps",), "ram-256": ("prefill_tps",)}.get(
        scenario.name, ("prefill_tps", "decode_tps")
    )
    lines = []
    for name in wanted:
        ours, peer = figures[OURS], figures.get(PEER)
        if not ours[name] or (peer and not peer[name]):
            continue
        theirs, ratio = "killed for memory", ""
        if peer:
            theirs, ratio = f"{shown(peer[name])} tok/s", f"**{figures['ratio'][name]:.2f} ×**"
        bound = prefill_bound(facts, ours, in_ram) if name == "prefill_tps" else decode_bound(facts, ours, limited)
        lines.append(
            f"| {scenario.about}: {name.split('_')[0]} | {kind.replace('_', ' ')} | {shown(ours[name])} tok/s "
            f"| {theirs} | {ratio} | {bound} |"
        )
    return lines


def decode_bound(facts: dict[str, Any], ours: dict[str, Any], limited: bool) -> str:
    summary = facts["summary"]
    if limited and ours.get("decode_share_of_disk"):
        return f"{100 * ours['decode_share_of_disk']['median']:.0f} % of the disk rate"
    share = ours["decode_tps"]["median"] / summary["decode_tps_bound_in_ram"]
    return f"{100 * share:.0f} % of the memory read rate"


def prefill_bound(facts: dict[str, Any], ours: dict[str, Any], in_ram: dict[str, Any] | None) -> str:
    """The larger of reading and computing alone, over the time it took."""
    share = ours.get("prefill_share_of_disk")
    if facts["comparison"]["memory_limit_bytes"] is None or not share:
        return ""
    best = share["median"]
    if in_ram is not None and facts["comparison"]["prompt_tokens"] == in_ram["comparison"]["prompt_tokens"]:
        computing = in_ram["summary"]["first_run"][OURS]["ttft_s"]["median"]
        best = max(best, computing / ours["ttft_s"]["median"])
    return f"{100 * best:.0f} % of the slower of reading and computing"


def load(scenario: Scenario) -> dict[str, Any] | None:
    path = RESULTS / f"{scenario.name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def shown(figure: dict[str, float]) -> str:
    return f"{figure['median']:.2f} ({figure['min']:.2f}-{figure['max']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
