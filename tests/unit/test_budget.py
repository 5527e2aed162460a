"""`--ram`: what people write, what `auto` means, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertide.errors import BudgetError, RequestError
from expertide.memory.budget import resolve
from expertide.memory.topology import MemoryLimit, Topology
from expertide.units import GIB, MIB


def topology(total: int, available: int, limit: MemoryLimit | None = None) -> Topology:
    return Topology(
        ram_total_bytes=total,
        ram_available_bytes=available,
        limit=limit,
        num_physical_cores=2,
        num_cpus=2,
        cpu_quota=None,
        cpu_model="",
        cpu_flags=frozenset(),
        machine="x86_64",
        disk=None,
    )


@pytest.mark.parametrize(
    ("available", "budget"),
    [
        (12 * GIB, 10 * GIB),  # the 2 GiB
        (100 * GIB, 90 * GIB),  # the tenth
        (3 * GIB, 3 * GIB // 2),  # the half: 2 GiB would leave too little
    ],
)
def test_auto_is_what_is_free_minus_a_reserve(available: int, budget: int) -> None:
    resolved = resolve("auto", topology(128 * GIB, available))
    assert resolved.is_auto and resolved.budget_bytes == budget


def test_a_given_size_is_taken_as_it_is() -> None:
    resolved = resolve("4GiB", topology(16 * GIB, 12 * GIB))
    assert (resolved.budget_bytes, resolved.is_auto) == (4 * GIB, False)
    assert not resolved.warnings
    assert resolve(4 * GIB, topology(16 * GIB, 12 * GIB)) == resolved


def test_more_than_is_free_is_taken_with_a_warning() -> None:
    (warning,) = resolve("14GiB", topology(16 * GIB, 12 * GIB)).warnings
    assert "14.0 GiB" in warning and "12.0 GiB" in warning


def test_more_than_there_is_is_refused_with_both_numbers() -> None:
    with pytest.raises(BudgetError, match=r"--ram 64\.0 GiB: this machine has 16\.0 GiB, 12\.0 GiB of it free now"):
        resolve("64GiB", topology(16 * GIB, 12 * GIB))


def test_in_a_container_the_refusal_names_the_container() -> None:
    limit = MemoryLimit(2, Path("/sys/fs/cgroup"), 2 * GIB, 0, 0)
    with pytest.raises(BudgetError, match=r"this container \(its memory control group\) has 2\.00 GiB"):
        resolve("3GiB", topology(2 * GIB, 2 * GIB, limit))


@pytest.mark.parametrize("ram", ["4", "12MiB", 63 * MIB])
def test_a_forgotten_unit_is_refused(ram: str | int) -> None:
    with pytest.raises(RequestError, match="expected at least 64"):
        resolve(ram, topology(16 * GIB, 12 * GIB))


@pytest.mark.parametrize("ram", ["", "much", "-4GiB", "0"])
def test_what_is_no_size_is_refused(ram: str) -> None:
    with pytest.raises(RequestError, match="write it like 4GiB"):
        resolve(ram, topology(16 * GIB, 12 * GIB))
