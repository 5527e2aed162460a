"""What `bench --against` makes of its samples: pure arithmetic, and a peer that does not live to be measured."""

from __future__ import annotations

from typing import Any

import pytest

from expertide.cli import versus


def process(number: int, engine: str, *, ttft_s: float = 0.0, decode_s: float = 0.0) -> dict[str, Any]:
    """One process; without times it was killed before it measured anything."""
    run: dict[str, Any] = {
        "kind": "first_run", "prompt_tokens": 32, "ttft_s": ttft_s, "decode_tokens": 8, "decode_s": decode_s,
    }  # fmt: skip
    if engine == versus.OURS:
        phase = {"requests": 10, "hits_host": 5, "read_bytes": 2_000_000_000, "stall_s": 0.5}
        run["experts"] = {"prefill": phase, "decode": phase}
    return {
        "round": number,
        "engine": engine,
        "bounds": {"memory_bytes_per_s": 20e9, "disk_bytes_per_s": 2e9, "load_average": 0.0},
        "load_s": 1.0 if ttft_s else None,
        "was_killed": not ttft_s,
        "runs": [run] if ttft_s else [],
    }


def test_ratios_are_those_of_medians_and_shares_those_of_their_own_process() -> None:
    samples = [(4.0, 4.0), (2.0, 2.0), (8.0, 8.0)]
    processes = [process(i, versus.OURS, ttft_s=t, decode_s=d) for i, (t, d) in enumerate(samples)]
    processes += [process(i, versus.PEER, ttft_s=16.0, decode_s=16.0) for i in range(3)]
    summary = versus.summarize(processes, 10**9, 10**9)
    assert summary["first_run"]["ratio"] == {"prefill_tps": pytest.approx(4.0), "decode_tps": pytest.approx(4.0)}
    # 1 s of disk in 4, 2 and 8 s.
    assert summary["first_run"][versus.OURS]["decode_share_of_disk"]["median"] == pytest.approx(0.25)
    assert summary["decode_tps_bound_in_ram"] == pytest.approx(20.0)
    assert summary["num_peer_processes_killed"] == 0 and summary["rotating"] is None


def test_a_peer_that_is_killed_for_memory_is_a_result_and_not_the_end() -> None:
    processes = [process(i, engine, ttft_s=2.0 if engine == versus.OURS else 0.0, decode_s=2.0)
                 for i in range(2) for engine in (versus.OURS, versus.PEER)]  # fmt: skip
    summary = versus.summarize(processes, 10**9, 10**9)
    assert summary["num_peer_processes_killed"] == 2
    assert versus.OURS in summary["first_run"] and "ratio" not in summary["first_run"]
    rows = dict(versus.rows({"summary": summary, "processes": processes}))
    assert rows[versus.PEER] == "killed for memory in 2 of 2 rounds"
