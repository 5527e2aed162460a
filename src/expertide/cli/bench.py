"""`expertide bench MODEL`: prefill and decode rates, beside the bound that memory and disk set.

Three figures that are never mixed, because each has other experts in the cache:

    first-run    the first prompt after the load, cache empty: one sample per process
    rotating     different prompts in turn: the cache holds what earlier ones left
    repeated     one prompt again and again: the cache holds just what it needs

With `--against llama.cpp` the same prompts go to llama.cpp as well, in processes that take turns (`versus.py`).
"""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from expertide import __version__
from expertide.cli import versus
from expertide.cli.flags import JsonFlag, ModelName, with_flags
from expertide.cli.output import JsonTarget, ProgressBars, emit, note, table
from expertide.cli.plan import touched_bytes
from expertide.cli.reports import load_line, machine_facts, settings_facts, topology_facts
from expertide.cli.run import INTERRUPTED, prompt_ids
from expertide.engine.sampling import SamplingParams
from expertide.errors import RequestError
from expertide.llm import LLM
from expertide.memory import rates
from expertide.options import Options, size_of
from expertide.prepare import Prepared, prepare
from expertide.settings import Settings
from expertide.units import format_size

# Everyday requests of different kinds, so that rotating ones visit different experts.
PROMPTS = (
    "Tell me a story about a fox.",
    "What is the capital of France?",
    "中国的首都是哪里？",
    "Work step by step: start with 12, halve it, then add 9, then double it.",
    "Explain what a cache is.",
    "Translate to English: 我的爸爸喜欢鸟。",
)
_HEAD_BYTES = 1 << 20
# Smaller than torch, so that the model's peak does not come from here.
_MEMORY_BYTES = 128 << 20


@with_flags
def command(
    model: ModelName,
    options: Options,
    prompt: Annotated[
        list[str] | None, typer.Option("-p", "--prompt", metavar="TEXT", help="A prompt; may be given again.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    num_tokens: Annotated[
        int,
        typer.Option("-n", "--max-tokens", metavar="N", min=2, help="Tokens of each answer; end tokens are ignored."),
    ] = 64,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Make every prompt N tokens long, by repeating or cutting it."),
    ] = None,
    random_ids: Annotated[
        bool,
        typer.Option(
            "--random-prompts", help="With --against: random token ids, for a file without a real vocabulary."
        ),
    ] = False,
    warmup: Annotated[int, typer.Option(metavar="N", min=0, help="Answers before anything counts as repeated.")] = 1,
    repeat: Annotated[
        int, typer.Option(metavar="N", min=0, help="Samples of rotating and of repeated prompts; 0: first run only.")
    ] = 3,
    against: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Take turns with another engine: {', '.join(versus.PEERS)}."),
    ] = None,
    peer_python: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The Python that has llama-cpp-python; by default EXPERTIDE_PEER_PYTHON names it."
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="With --against: run each process in a memory control group of this size."),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="With --against: processes of each engine.")] = 3,
    json: JsonFlag = None,
) -> None:
    """Measure prefill and decode: first-run, rotating and repeated prompts apart."""
    target = JsonTarget(json)
    if prompt is not None and not all(prompt):
        raise typer.BadParameter("-p: the prompt is empty")
    if against is not None and against not in versus.PEERS:
        raise typer.BadParameter(f"--against {against}: known: {', '.join(versus.PEERS)}")
    if against is None and (peer_python is not None or memory_limit is not None or random_ids):
        raise typer.BadParameter("--peer-python, --memory-limit and --random-prompts have no effect without --against")
    if random_ids and prompt_tokens is None:
        raise typer.BadParameter("--random-prompts needs --prompt-tokens")
    limit = None if memory_limit is None else size_of("memory_limit", memory_limit)
    texts = prompt or list(PROMPTS)
    if against is not None:
        facts = _compare(
            model, options, texts, raw=raw, num_tokens=num_tokens, prompt_tokens=prompt_tokens, limit=limit,
            peer_python=peer_python, rounds=rounds, warmup=warmup, repeat=repeat, random_ids=random_ids,
        )  # fmt: skip
        if facts is not None and target:
            target.write(facts)
        if facts is not None and not target.is_stdout:
            emit(table(versus.rows(facts)) + "\n")
        return
    bound = _measure_bound(prepare(model, options))
    with ProgressBars() as progress, LLM.from_options(model, options, progress) as llm:
        for warning in llm.warnings:
            note(f"note: {warning}")
        note(load_line(llm))
        prompts = [_cut(prompt_ids(llm, text, raw=raw), prompt_tokens) for text in texts]
        with llm.interrupt:
            llm.interrupt.clear()
            kinds = _measure(llm, prompts, num_tokens=num_tokens, warmup=warmup, repeat=repeat, progress=progress)
        facts = {
            "version": __version__,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "model": _model_facts(llm.prepared),
            "machine": machine_facts(llm) | bound,
            "settings": settings_facts(llm)
            | {"max_tokens": num_tokens, "warmup": warmup, "repeat": repeat, "prompt_tokens": prompt_tokens},
            "placement": llm.placement(),
            "load_s": llm.load_s,
            "memory": llm.memory(),
            "bound": _bound_facts(llm, bound),
            **kinds,
        }
    if target:
        target.write(facts)
    if not target.is_stdout:
        emit(table(_rows(facts)) + "\n")


def _compare(
    model: str,
    options: Options,
    texts: list[str],
    *,
    raw: bool,
    num_tokens: int,
    prompt_tokens: int | None,
    limit: int | None,
    peer_python: str | None,
    rounds: int,
    warmup: int,
    repeat: int,
    random_ids: bool,
) -> dict[str, Any] | None:
    """Both engines on the same token ids; None where nothing could be measured."""
    python = versus.check_peer(peer_python or Settings.from_env().peer_python)
    options = versus.limited_options(options, limit)
    prepared = prepare(model, options)
    if random_ids:
        assert prompt_tokens is not None
        prompts = _random_prompts(prepared.architecture.config.vocab_size, prompt_tokens)
    else:
        prompts = [_cut(ids, prompt_tokens) for ids in _encoded(prepared, options, texts, raw=raw)]
    comparison = versus.Comparison(
        model=model,
        options=options,
        peer_python=python,
        prompts=prompts,
        num_tokens=num_tokens,
        memory_limit=limit,
        rounds=rounds,
        warmup=warmup,
        repeat=repeat,
    )
    facts = versus.compare(comparison)
    if facts is None:
        return None
    return {
        "version": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": _model_facts(prepared),
        "machine": topology_facts(prepared),
        **facts,
    }


def _random_prompts(vocab_size: int, num_tokens: int) -> list[list[int]]:
    """As many as there are texts; the same every time."""
    draw = random.Random(num_tokens)
    return [[draw.randrange(vocab_size) for _ in range(num_tokens)] for _ in PROMPTS]


def _encoded(prepared: Prepared, options: Options, texts: list[str], *, raw: bool) -> list[list[int]]:
    """Token ids of prompts without loading a model."""
    from expertide.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_files(prepared.files, pre_tokenizer=options.pre_tokenizer)
    if raw or not tokenizer.has_chat_template:
        return [tokenizer.encode(text) for text in texts]
    messages = [[{"role": "user", "content": text}] for text in texts]
    return [tokenizer.encode(tokenizer.apply_chat_template(m, add_generation_prompt=True)) for m in messages]


def _measure(
    llm: LLM, prompts: list[list[int]], *, num_tokens: int, warmup: int, repeat: int, progress: ProgressBars
) -> dict[str, Any]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    total = 1 + (warmup if repeat else 0) + repeat + (repeat if len(prompts) > 1 else 0)
    done = 0

    def sample(ids: list[int]) -> dict[str, Any]:
        nonlocal done
        output = llm.generate(ids, params)
        if output.finish_reason == "abort":
            raise typer.Exit(INTERRUPTED)
        done += 1
        progress("measuring", done, total)
        stats = output.stats
        return {"prompt_tokens": len(ids), "timings": stats["timings"], "experts": stats["experts"]}

    first = [sample(prompts[0])]
    # Rotating starts at the second prompt: the first one's experts are the ones the cache has just seen.
    rotating = [sample(prompts[(1 + i) % len(prompts)]) for i in range(repeat)] if len(prompts) > 1 else []
    for _ in range(warmup if repeat else 0):
        sample(prompts[0])
    repeated = [sample(prompts[0]) for _ in range(repeat)]
    return {"first_run": _summary(first), "rotating": _summary(rotating), "repeated": _summary(repeated)}


def _summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Every sample, and of each rate median, least and most. No samples: None, never a zero."""
    summary: dict[str, Any] = {"samples": samples}
    for name in ("prefill_tps", "decode_tps", "ttft_s"):
        values = [sample["timings"][name] for sample in samples]
        summary[name] = (
            {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None
        )
    decode = [sample["experts"]["decode"] for sample in samples]
    requests = sum(phase["requests"] for phase in decode)
    summary["decode_hit_rate"] = sum(phase["hits_host"] for phase in decode) / requests if requests else None
    summary["decode_read_bytes"] = sum(phase["read_bytes"] for phase in decode)
    return summary


def _measure_bound(prepared: Prepared) -> dict[str, Any]:
    """What memory and disk give right now; before the load, so that nothing of it counts in the model's peak."""
    catalog = prepared.catalog
    return {
        "memory_bytes_per_s": rates.memory_read_rate(prepared.num_threads, nbytes=_MEMORY_BYTES),
        "disk_bytes_per_s": rates.expert_read_rate(prepared.files, catalog) if catalog is not None else None,
    }


def _bound_facts(llm: LLM, measured: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second if reading were all that mattered: with everything in RAM, and with every expert on disk."""
    num_bytes, experts = touched_bytes(llm.prepared)
    return {
        "bytes_per_token": num_bytes,
        "expert_bytes_per_token": experts,
        "decode_tps_in_ram": measured["memory_bytes_per_s"] / num_bytes,
        "decode_tps_nothing_cached": measured["disk_bytes_per_s"] / experts
        if measured["disk_bytes_per_s"] and experts
        else None,
    }


def _model_facts(prepared: Prepared) -> dict[str, Any]:
    """Name, size and a fingerprint: SHA-256 of the first MiB, which holds the header of most files."""
    files = prepared.files
    with Path(files.files[0]).open("rb") as file:
        digest = hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()
    return {"name": prepared.name, "total_bytes": files.total_bytes, "sha256_of_first_mib": digest}


def _cut(ids: list[int], num_tokens: int | None) -> list[int]:
    if num_tokens is None:
        return ids
    if not ids:
        raise RequestError("a prompt has no tokens to repeat")
    # The first token (begin of sequence) stays the first one and is not repeated.
    head, rest = ids[:1], ids[1:] or ids
    times = -(-num_tokens // len(rest))
    return (head + rest * times)[:num_tokens]


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, title in (("first_run", "first run"), ("rotating", "rotating"), ("repeated", "repeated")):
        kind = facts[name]
        if not kind["samples"]:
            rows.append((title, "not measured"))
            continue
        hits = "" if kind["decode_hit_rate"] is None else f", {100 * kind['decode_hit_rate']:.1f} % hits"
        tokens = "/".join(f"{count:,}" for count in sorted({sample["prompt_tokens"] for sample in kind["samples"]}))
        prefill = f"prefill {_range(kind['prefill_tps'])} tok/s ({tokens} tokens)"
        decode = f"decode {_range(kind['decode_tps'])} tok/s{hits}"
        rows.append((title, f"{prefill}, {decode}, {format_size(kind['decode_read_bytes'])} read"))
    bound = facts["bound"]
    rows.append(("bound", f"{bound['decode_tps_in_ram']:,.1f} tok/s decode (all threads reading RAM)"))
    if bound["decode_tps_nothing_cached"]:
        rows.append(("", f"{bound['decode_tps_nothing_cached']:,.1f} tok/s decode (every expert from disk)"))
    return rows


def _range(rate: dict[str, float]) -> str:
    if rate["min"] == rate["max"]:
        return f"{rate['median']:,.1f}"
    return f"{rate['median']:,.1f} ({rate['min']:,.1f}-{rate['max']:,.1f})"
