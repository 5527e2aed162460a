"""One log line per request, and what Prometheus gets of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from expertide.server.messages import Delta, Done
from expertide.server.metrics import Metrics


def log(text: str) -> None:
    """A line on stderr; what a client has put into it cannot drive the terminal."""
    safe = text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
    print(safe, file=sys.stderr, flush=True)


class Record:
    """A request from its first byte to its end."""

    def __init__(self, request_id: str, path: str, metrics: Metrics, *, on_close: Callable[[], None]) -> None:
        self.id = request_id
        self.path = path
        self.status = 500
        self.prompt_tokens: int | None = None
        self.error = ""
        self._metrics = metrics
        self._on_close = on_close
        self._begin = time.perf_counter()
        self._ttft_s: float | None = None
        self._num_tokens = 0
        self._done: Done | None = None
        self._stats: dict[str, Any] = {}
        self._finish = ""
        self._is_closed = False

    def add(self, delta: Delta) -> None:
        if delta.token_ids and self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self._begin
            self._metrics.ttft.observe(self._ttft_s)
        self._num_tokens += len(delta.token_ids)
        self._finish = delta.finish or self._finish

    def end(self, done: Done, stats: dict[str, Any]) -> None:
        """It was computed to its end; `stats` is the reply's extension."""
        self._done, self._stats = done, stats

    def close(self, finish: str = "") -> None:
        """Write the line, once.

        Args:
            finish: "cancelled" when the client left, or "error"; otherwise what ended the last answer.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._on_close()
        finish = finish or self._finish or "-"
        metrics, done = self._metrics, self._done
        metrics.requests.labels(self.path, str(self.status), finish).inc()
        metrics.prompt_tokens.inc(self.prompt_tokens or 0)
        metrics.completion_tokens.inc(self._num_tokens)
        if done is not None and done.stats:
            metrics.cached_tokens.inc(done.cached_tokens)
            metrics.count(self._stats)
        log(" ".join(f"{name}={value}" for name, value in self._fields(finish).items()))

    def _fields(self, finish: str) -> dict[str, str]:
        stats, done = self._stats, self._done
        fields = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "id": self.id, "path": self.path}
        fields["status"] = str(self.status)
        if self.prompt_tokens is not None:
            fields["prompt"] = str(self.prompt_tokens)
            fields["cached"] = "-" if done is None else str(done.cached_tokens)
            fields["ttft_s"] = "-" if self._ttft_s is None else f"{self._ttft_s:.3f}"
            fields["out"] = str(self._num_tokens)
        if "experts" in stats:
            phases = [stats["experts"][phase] for phase in ("prefill", "decode")]
            requests = sum(phase["requests"] for phase in phases)
            hits = sum(phase["hits_device"] + phase["hits_host"] for phase in phases)
            fields["tok_s"] = f"{stats['timings']['decode_tps']:.2f}"
            fields["hit_rate"] = f"{hits / requests:.3f}" if requests else "-"
            fields["read_bytes"] = str(sum(phase["read_bytes"] for phase in phases))
        fields["total_s"] = f"{time.perf_counter() - self._begin:.3f}"
        fields["finish"] = finish
        if self.error:
            fields["error"] = f'"{self.error[:300]}"'
        return fields
