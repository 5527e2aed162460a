"""Predicted speed: what is counted, and where the measured rates are kept."""

from __future__ import annotations

import json

import pytest

from expertide.cli import estimate
from expertide.memory import machine_rates
from expertide.memory.machine_rates import MachineRates

RATES = MachineRates(
    memory_bytes_per_s=10e9,
    values_per_s={1: {"Q4_K": 20e9, "Q8_0": 4e9}, 4: {"Q4_K": 60e9, "Q8_0": 12e9}},
    layer_s=1e-3,
    disks={"/dev/a (ext4)": 1e9},
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def seconds(num_bytes: int, missing: int, disk: float | None, threads: int = 1) -> float:
    return estimate.seconds_per_token(
        {"Q4_K": 2_000_000_000, "Q6_K": 400_000_000}, num_bytes, missing, num_layers=20, num_threads=threads,
        rates=RATES, disk_bytes_per_s=disk,
    )  # fmt: skip


def test_computing_reading_and_layers_all_count():
    assert seconds(1_500_000_000, 500_000_000, 1e9) == pytest.approx(0.1 + 0.1 + 0.5 + 0.02)
    # Memory counts where it is slower than the multiplications that read it.
    assert seconds(5_000_000_000, 0, 1e9) == pytest.approx(0.5 + 0.02)
    assert seconds(0, 500_000_000, None) == pytest.approx(0.2 + 0.02)


@pytest.mark.parametrize(("threads", "expected"), [(1, 0.2), (3, 0.2), (4, 0.2 / 3), (64, 0.2 / 3)])
def test_the_largest_measured_thread_count_that_is_not_above_counts(threads: int, expected: float):
    assert seconds(0, 0, None, threads) == pytest.approx(expected + 0.02)


def test_each_disk_and_each_machine_keeps_its_rates(monkeypatch):
    assert machine_rates.load() is None
    machine_rates.save(RATES)
    machine_rates.save(MachineRates(11e9, RATES.values_per_s, 2e-3, {"/dev/b (xfs)": 3e9}))
    loaded = machine_rates.load()
    assert loaded is not None and loaded.memory_bytes_per_s == 11e9 and loaded.values_per_s == RATES.values_per_s
    assert loaded.disks == {"/dev/a (ext4)": 1e9, "/dev/b (xfs)": 3e9}
    monkeypatch.setattr("platform.node", lambda: "another")
    assert machine_rates.load() is None
    machine_rates.save(RATES)
    assert len(json.loads(machine_rates.path().read_text())["machines"]) == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"host": "vm", "memory_bytes_per_s": 1}', '{"machines": 5}'])
def test_rates_that_cannot_be_read_are_none_and_are_replaced(content: str):
    machine_rates.path().parent.mkdir(parents=True)
    machine_rates.path().write_text(content)
    assert machine_rates.load() is None
    machine_rates.save(RATES)
    assert machine_rates.load() == RATES
