"""Figures for Prometheus, in a registry of our own: two servers in one process do not meet."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

# From a cached follow-up on a fast machine to a cold prompt on a slow one.
_TTFT_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """What /metrics shows."""

    def __init__(self) -> None:
        # When a counter began says nothing here: all begin with the process.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"expertide_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"expertide_{name}", text, registry=registry)

        self.requests = counter("requests", "Requests that have ended.", "path", "status", "finish")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter("prompt_tokens_cached", "Of these, found in the prefix cache.")
        self.completion_tokens = counter("completion_tokens", "Tokens of answers.")
        self.expert_requests = counter(
            "expert_requests", "Experts asked for, once per layer and step.", "phase", "found"
        )
        self.expert_bytes = counter("expert_read_bytes", "Bytes of experts read from disk.", "phase")
        self.expert_stall = counter("expert_stall_seconds", "Time that computing waited for the disk.", "phase")
        self.ttft = Histogram(
            "expertide_time_to_first_token_seconds", "From a request to its first token.", buckets=_TTFT_S,
            registry=registry,
        )  # fmt: skip
        self.token_s = Histogram(
            "expertide_time_per_output_token_seconds", "Decode time per token.", buckets=_TOKEN_S, registry=registry
        )
        self.up = gauge("engine_up", "1 while the engine can answer.")
        self.open = gauge("requests_open", "Requests that have not ended.")
        self.waiting = gauge("requests_waiting", "Of these, not begun.")
        self.peak = gauge("ram_peak_bytes", "Peak resident set of both processes.")
        self.budget = gauge("ram_budget_bytes", "The ceiling.")

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def count(self, stats: dict[str, Any]) -> None:
        """Add what one request cost (the reply's `expertide` object)."""
        timings = stats["timings"]
        if timings["decode_tokens"]:
            self.token_s.observe(timings["decode_s"] / timings["decode_tokens"])
        for phase in ("prefill", "decode"):
            experts = stats["experts"][phase]
            self.expert_requests.labels(phase, "ram").inc(experts["hits_host"])
            self.expert_requests.labels(phase, "disk").inc(experts["misses"])
            self.expert_bytes.labels(phase).inc(experts["read_bytes"])
            self.expert_stall.labels(phase).inc(experts["stall_s"])
        self.peak.set(stats["memory"]["ram_peak_bytes"])
        self.budget.set(stats["memory"]["ram_budget_bytes"])
