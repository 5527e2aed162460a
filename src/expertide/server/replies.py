"""OpenAI's response objects, made from what the engine says. Plain dictionaries: they go straight to JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from expertide.server.messages import Delta, Done


@dataclass(slots=True)
class Choice:
    """One answer as it grows."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    prompt: dict[str, Any] | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish = delta.finish or self.finish
        self.prompt = delta.prompt or self.prompt


def usage(done: Done) -> dict[str, Any]:
    """Every token counts, the one that ended an answer too; a prompt counts once, however many answers it gets."""
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    }


def extension(done: Done, unknown_fields: list[str], server_peak_bytes: int) -> dict[str, Any]:
    """The reply's `expertide` object: the statistics of `run --json`, answers added up."""
    if not done.stats:
        return {"unknown_fields": unknown_fields}
    stats = {**done.stats[-1]}
    stats["timings"] = _timings([entry["timings"] for entry in done.stats])
    stats["experts"] = _experts([entry["experts"] for entry in done.stats])
    # The ceiling is on both processes.
    memory = dict(stats["memory"])
    memory["server_peak_bytes"] = server_peak_bytes
    memory["ram_peak_bytes"] += server_peak_bytes
    stats["memory"] = memory
    stats["unknown_fields"] = unknown_fields
    return stats


def _timings(parts: list[dict[str, float]]) -> dict[str, float]:
    found = {**parts[0]}
    for name in ("prefill_tokens", "prefill_s", "decode_tokens", "decode_s"):
        found[name] = sum(part[name] for part in parts)
    for phase in ("prefill", "decode"):
        seconds = found[f"{phase}_s"]
        found[f"{phase}_tps"] = found[f"{phase}_tokens"] / seconds if seconds > 0 else 0.0
    return found


def _experts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    # The fill counts since the load.
    found: dict[str, Any] = {"fill": parts[-1]["fill"]}
    for phase in parts[0]:
        if phase == "fill":
            continue
        found[phase] = {name: sum(part[phase][name] for part in parts) for name in parts[0][phase]}
        if "hit_rate" in found[phase]:
            found[phase]["hit_rate"] = hit_rate(found[phase])
    return found


def hit_rate(phase: dict[str, Any]) -> float:
    hits = phase["hits_device"] + phase["hits_host"]
    return float(hits / phase["requests"]) if phase["requests"] else 0.0


def token_string(entry: dict[str, Any]) -> str:
    """A token by its text; bytes that are no whole characters by their values, so that two tokens never look alike."""
    if entry["text"] is not None:
        return str(entry["text"])
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"])


def completion_logprobs(entries: list[dict[str, Any]], *, has_top: bool) -> dict[str, Any]:
    """The older shape: four parallel lists."""
    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry["logprob"] is None:  # the first token of a prompt
            top.append(None)
            continue
        best = {token_string(other): other["logprob"] for other in entry["top"]}
        best.setdefault(token_string(entry), entry["logprob"])
        top.append(best)
    return {
        "tokens": [token_string(entry) for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": top if has_top else None,
        "text_offset": [entry["offset"] for entry in entries],
    }


def chat_logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The newer shape: an object per token."""
    return {
        "content": [
            {**_chat_token(entry), "top_logprobs": [_chat_token(other) for other in entry["top"]]} for entry in entries
        ],
        "refusal": None,
    }


def _chat_token(entry: dict[str, Any]) -> dict[str, Any]:
    return {"token": token_string(entry), "logprob": entry["logprob"], "bytes": entry["bytes"]}
