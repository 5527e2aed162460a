#!/usr/bin/env python3
"""`make check-large`: a 10.4 GB model answers inside 4 GiB, and every number about it is true.

    python tools/check_large.py --model build/large/v2lite.gguf

Makes the file if it is not there (tools/synth_gguf.py, DeepSeek-V2-Lite's shapes with random weights), then runs

    expertide inspect      under a second, warm
    expertide plan         what it predicts is kept for the comparison
    expertide run          32 tokens with --ram 4GiB, inside a memory control group of 4.25 GiB

and watches the run from outside: resident set and mappings of the process tree, bytes read from storage. Needs the
right to make a control group (root, or systemd-run); without it nothing is checked, and it says so. Routing of random
weights is no model's routing: the hit rate printed here means nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from expertide.memory.control_group import MemoryGroup, memory_group

GIB = 1 << 30
MIB = 1 << 20
RAM = 4 * GIB
LIMIT = RAM + GIB // 4
FILE_BYTES = 10_363_198_848
NUM_TOKENS = 32
MOE_LAYERS, EXPERTS_PER_TOKEN = 26, 6
# The vocabulary is bytes and five merges: this is more than one whole prefill chunk, so the workspace reaches its peak.
PROMPT = "the inner thing and the other thing are in there, and then on and on. " * 12
# Reading smaps of a 4 GiB process takes about a millisecond: a sample every 20 costs a twentieth of one core.
SAMPLE_S = 0.02

PROGRAM = (sys.executable, "-c", "import sys; from expertide.cli.main import main; main(sys.argv[1:])")
# Shares that cannot be told apart from outside: what the tokenizer and its package add to a process that has all else
# imported, and what putting the model together adds to the packed weights.
PROBE = """
import json, sys
from pathlib import Path
def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
import expertide.loading
from expertide.formats import open_model
begin = rss()
from expertide.text.tokenizer import Tokenizer
files = open_model(Path(sys.argv[1]))
tokenizer = Tokenizer.from_files(files)
shares = {"tokenizer": rss() - begin}
print(json.dumps(shares))
"""


@dataclass(frozen=True)
class Sample:
    """One look at the process tree from outside, in bytes."""

    resident: int
    arenas: int
    storage_read: int
    maps_model: bool


@dataclass(frozen=True)
class Mapping:
    """One entry of smaps; `file` is empty for anonymous memory."""

    resident: int
    file: str
    flags: frozenset[str]


class Checks:
    """Prints each check as it is made and remembers what failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def __call__(self, name: str, holds: bool, found: str) -> None:
        print(f"{'ok  ' if holds else 'FAIL'}  {name}: {found}", flush=True)
        if not holds:
            self.failed.append(name)

    def within(self, name: str, found: float, expected: float, tolerance: float) -> None:
        off = found / expected - 1 if expected else float("inf")
        text = f"{found:,.0f}, expected {expected:,.0f}, {100 * off:+.2f} % (allowed {100 * tolerance:.0f} %)"
        self(name, abs(off) <= tolerance, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="write every number here")
    args = parser.parse_args()
    with memory_group(LIMIT) as group:
        if group is None:
            print("SKIPPED: no right to make a memory control group (root, or systemd-run); NOTHING WAS CHECKED")
            return 0
        model: Path = args.model.resolve()
        make_model(model)
        print(f"{model.name}, {group.kind} of {LIMIT / GIB:.2f} GiB, --ram {RAM / GIB:.0f}GiB", flush=True)
        return check(model, group, args.json)


def make_model(model: Path) -> None:
    if model.exists() and model.stat().st_size == FILE_BYTES:
        return
    model.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(model.parent).free
    if free < FILE_BYTES + GIB:
        sys.exit(f"{model.parent}: {free / GIB:.1f} GiB are free, the model needs {FILE_BYTES / GIB:.1f} GiB")
    print(f"making {model}: 10.4 GB, some minutes", flush=True)
    subprocess.run(
        (sys.executable, Path(__file__).with_name("synth_gguf.py"), "deepseek-v2-lite", str(model)), check=True
    )
    if model.stat().st_size != FILE_BYTES:
        sys.exit(f"{model}: {model.stat().st_size:,} bytes, expected {FILE_BYTES:,}")


def check(model: Path, group: MemoryGroup, record: Path | None) -> int:
    checks = Checks()
    check_inspect(model, checks)
    plan = json.loads(output_of(*PROGRAM, "plan", str(model), "--ram", f"{RAM // GIB}GiB", "--json", "-"))
    shares = json.loads(output_of(sys.executable, "-c", PROBE, str(model), str(RAM)))
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder) / "run.json"
        command = (
            *(*group.prefix, *PROGRAM, "run", str(model), "--raw", "-p", PROMPT, "-n", str(NUM_TOKENS)),
            *("--temperature", "0", "--ram", f"{RAM // GIB}GiB", "--json", str(result_file)),
        )
        begin = time.monotonic()
        code, samples = watch(command, model)
        print(f"run took {time.monotonic() - begin:.0f} s, {len(samples)} samples", flush=True)
        checks("the run ends well", code == 0 and not group.was_killed(), f"exit code {code}")
        if code != 0:
            return 1
        run = json.loads(result_file.read_text())
    chunk, prompt = plan["prefill_chunk"], run["timings"]["prefill_tokens"]
    checks("the prompt fills a prefill chunk", prompt >= chunk, f"{prompt} tokens, chunk {chunk}")
    check_counts(run, checks)
    check_bytes(run, samples, checks)
    check_memory(run, samples, checks)
    measured = measured_shares(run, samples, shares)
    for name, predicted in plan["shares"].items():
        if predicted or measured[name]:
            checks.within(f"planned {name}", measured[name], predicted, 0.10)
    if record is not None:
        record.write_text(
            json.dumps({"plan": plan, "run": run, "measured": measured, "failed": checks.failed}, indent=1)
        )
    print(f"{len(checks.failed)} checks failed: {', '.join(checks.failed)}" if checks.failed else "all checks hold")
    return 1 if checks.failed else 0


def check_inspect(model: Path, checks: Checks) -> None:
    seconds = []
    for _ in range(4):
        begin = time.monotonic()
        output_of(*PROGRAM, "inspect", str(model))
        seconds.append(time.monotonic() - begin)
    # The first is cold. The best of the others: what another program does meanwhile is not inspect's time.
    checks("inspect, warm", min(seconds[1:]) < 1.0, f"{min(seconds[1:]):.2f} s, allowed 1 s")


def check_counts(run: dict, checks: Checks) -> None:
    decode, tokens = run["experts"]["decode"], run["timings"]["decode_tokens"]
    answered = len(run["token_ids"])
    checks("tokens", answered == NUM_TOKENS == tokens + 1, f"{answered}, of them {tokens} decoded")
    expected = MOE_LAYERS * EXPERTS_PER_TOKEN * tokens
    hits = decode["hits_host"] + decode["hits_device"]
    checks(
        "decode requests = 26 x 6 x tokens = hits + misses",
        decode["requests"] == expected == hits + decode["misses"],
        f"{decode['requests']:,} requests, {hits:,} hits, {decode['misses']:,} misses, expected {expected:,}",
    )


def check_bytes(run: dict, samples: list[Sample], checks: Checks) -> None:
    reported = run["memory"]["resident_bytes"] + sum(
        run["experts"][kind]["read_bytes"] for kind in ("prefill", "decode", "fill")
    )
    # The libraries are in the page cache since the probe ran them, so what is left is weights and experts.
    checks.within("bytes read, against /proc/PID/io", reported, max(s.storage_read for s in samples), 0.02)
    checks("streamed tensors are not mapped", not any(s.maps_model for s in samples), "mappings of the process tree")


def check_memory(run: dict, samples: list[Sample], checks: Checks) -> None:
    reported, sampled = run["memory"]["ram_peak_bytes"], max(s.resident for s in samples)
    checks("reported peak <= budget", reported <= RAM, f"{reported / MIB:,.0f} of {RAM / MIB:,.0f} MiB")
    checks("sampled peak <= budget", sampled <= RAM, f"{sampled / MIB:,.0f} of {RAM / MIB:,.0f} MiB")
    checks.within("reported peak, against the sampled one", reported, sampled, 0.05)


def measured_shares(run: dict, samples: list[Sample], probed: dict[str, int]) -> dict[str, float]:
    """What each share of the plan really took.

    The arenas (weights first, then experts) carry a flag that shows from outside, and the KV cache is written when it
    is made, so its size is its resident set. While the weights are read there is nothing else but interpreter and
    tokenizer; what comes on top of all that is the workspace at its peak.
    """
    memory = run["memory"]
    weights, kv = memory["resident_bytes"], memory["kv_bytes"]
    base = statistics.median(s.resident - s.arenas for s in samples if 0.2 * weights < s.arenas < 0.98 * weights)
    # A tenth of a percent: ends of pages that no tensor covers are never touched.
    loaded = [s for s in samples if s.arenas >= 0.999 * weights]
    return {
        "interpreter": base - probed["tokenizer"],
        "tokenizer": probed["tokenizer"],
        "weights": min(s.arenas for s in loaded),
        "kv cache": kv,
        "workspace": max(s.resident - s.arenas for s in loaded) - base - kv,
        "expert cache": max(s.arenas for s in loaded) - weights,
    }


# --- watching from outside --------------------------------------------------------------------------------------------


def watch(command: tuple[str, ...], model: Path) -> tuple[int, list[Sample]]:
    """Run a command; its exit code and what could be seen of it meanwhile."""
    process = subprocess.Popen(command)
    samples: list[Sample] = []
    while process.poll() is None:
        sample = look(process.pid, model)
        if sample is not None:
            samples.append(sample)
        time.sleep(SAMPLE_S)
    return process.returncode, samples


def look(root_pid: int, model: Path) -> Sample | None:
    resident = arenas = storage = 0
    maps_model = False
    for pid in tree(root_pid):
        try:
            mappings = read_smaps(pid)
            storage += int(Path(f"/proc/{pid}/io").read_text().split("\nread_bytes: ")[1].split()[0])
        except (OSError, IndexError):
            continue
        resident += sum(mapping.resident for mapping in mappings)
        # Arenas are the mappings that are left out of core dumps ("dd").
        arenas += sum(mapping.resident for mapping in mappings if "dd" in mapping.flags)
        maps_model |= any(mapping.file == str(model) for mapping in mappings)
    return Sample(resident, arenas, storage, maps_model) if resident else None


def tree(root_pid: int) -> list[int]:
    """The process and all below it."""
    pids = [root_pid]
    for pid in pids:
        try:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                pids.extend(int(child) for child in (thread / "children").read_text().split())
        except OSError:
            continue
    return pids


def read_smaps(pid: int) -> list[Mapping]:
    found: list[Mapping] = []
    file, resident = "", 0
    with Path(f"/proc/{pid}/smaps").open() as lines:
        for line in lines:
            words = line.split()
            if not words[0].endswith(":"):
                file = " ".join(words[5:])
            elif words[0] == "Rss:":
                resident = int(words[1]) << 10
            elif words[0] == "VmFlags:":
                found.append(Mapping(resident, file, frozenset(words[1:])))
    return found


def output_of(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command[:6])} … ended with code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
