"""Does predictive prefetch win with this model on this machine? `doctor MODEL` answers, and "auto" follows.

    without, with, without, with     the same answer each time, from an empty expert cache, half of the experts fit

Reads of a wrong guess take the disk from demand, so whether guessing pays depends on disk, cores and model. It is said
to win only when every run with it beats every run without: noise alone does that once in six times, and "off" is safe.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from expertide.cli import page_cache
from expertide.errors import BudgetError, ExpertideError
from expertide.options import Options
from expertide.prepare import prepare
from expertide.units import MIB

# The one kind that knows the token; guesses from counts are in docs/experiments.md.
KIND = "router"
# Below this the experts tell of the computing, not of the disk.
_LEAST_EXPERTS_BYTES = 256 * MIB
_PROMPT = "Tell me a story about a fox."
_CONTEXT = 256
_DECODED_TOKENS = 16
_ROUNDS = 2


def measure(model: Path) -> dict[str, Any] | None:
    """Tokens per second without and with, what came of the guesses, and the kind that "auto" shall mean here.

    None where it cannot be said: experts too small or none, no room for half of them, routers that cannot be asked, a
    file that cannot be run.
    """
    try:
        options = _options(model)
        return None if options is None else _trial(model, options)
    except ExpertideError:
        return None


def _options(model: Path) -> Options | None:
    options = Options(context=_CONTEXT, startup_fill="off", predictive_prefetch="off")
    try:
        plan = prepare(model, options).plan
    except BudgetError:
        return None
    half = plan.all_experts_bytes // 2
    if half < _LEAST_EXPERTS_BYTES // 2 or not plan.expert_cache_bytes:
        return None
    return replace(options, expert_cache=min(half, plan.expert_cache_bytes))


def _trial(model: Path, options: Options) -> dict[str, Any]:
    # Torch loads here.
    from expertide.engine.sampling import SamplingParams
    from expertide.llm import LLM

    params = SamplingParams(max_tokens=_DECODED_TOKENS, ignore_eos=True)
    rates: dict[str, list[float]] = {"off": [], KIND: []}
    counts = {"loads": 0, "useful": 0, "late": 0, "wasted": 0}
    with LLM.from_options(model, options) as llm:
        prompt = llm.encode(_PROMPT)
        llm.generate(prompt, params)  # threads, memory and code are touched for the first time
        for kind in (*rates,) * _ROUNDS:
            llm.set_predictive_prefetch(kind)
            llm.forget_experts()
            page_cache.drop(llm.prepared.files.files)  # where reads go through it
            stats = llm.generate(prompt, params).stats
            rates[kind].append(float(stats["timings"]["decode_tps"]))
            for name in counts:
                counts[name] += stats["experts"]["predicted"][name]
    wins = min(rates[KIND]) > max(rates["off"])
    return {
        "kind": KIND if wins else "off",
        "tried": KIND,
        "without_tps": rates["off"],
        "with_tps": rates[KIND],
        **counts,
    }
