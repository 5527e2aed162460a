"""Made-up machines: trees that look like /proc and /sys, and what must be read out of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from expertide.memory.topology import probe
from expertide.units import GIB, MIB

HOST = "MemTotal:       16777216 kB\nMemFree:         1000000 kB\nMemAvailable:   12582912 kB\n"
V1_MOUNT = "40 30 0:35 {root} /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory\n"
V1_CPU_MOUNT = "41 30 0:36 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
V2_MOUNT = "42 30 0:37 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": HOST} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_groups_the_host_numbers_count(tmp_path: Path) -> None:
    topology = probe(root=machine(tmp_path, {}), cpus=frozenset({0, 1}))
    assert (topology.ram_total_bytes, topology.ram_available_bytes) == (16 * GIB, 12 * GIB)
    assert topology.limit is None and topology.disk is None


def test_a_version_1_limit_counts_and_page_cache_is_available(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/jobs/one"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/jobs/one\n1:cpu:/\n",
            "proc/self/mountinfo": V1_MOUNT.format(root="/"),
            f"{group}/memory.limit_in_bytes": f"{4 * GIB}\n",
            f"{group}/memory.usage_in_bytes": f"{3 * GIB}\n",
            f"{group}/memory.stat": f"cache 5\ntotal_inactive_file {2 * GIB}\ntotal_active_file {512 * MIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    topology = probe(root=root, cpus=frozenset({0}))
    assert topology.ram_total_bytes == 4 * GIB
    assert topology.ram_available_bytes == 4 * GIB - (3 * GIB - 2 * GIB - 512 * MIB)
    assert topology.limit is not None and topology.limit.version == 1


def test_a_limit_of_a_group_further_up_counts_too(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/job\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/slice/memory.max": f"{3 * GIB}\n",
            "sys/fs/cgroup/slice/memory.current": f"{1 * GIB}\n",
            "sys/fs/cgroup/slice/job/memory.max": "max\n",
            "sys/fs/cgroup/slice/job/memory.current": "0\n",
        },
    )
    topology = probe(root=root, cpus=frozenset({0}))
    assert (topology.ram_total_bytes, topology.ram_available_bytes) == (3 * GIB, 2 * GIB)


def test_in_a_container_the_mounted_group_is_the_own_one(tmp_path: Path) -> None:
    # The path in /proc/self/cgroup is the host's; the mount shows only this container's subtree.
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/abc\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/docker/abc"),
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{1536 * MIB}\n",
            "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file 0\nslab_reclaimable {256 * MIB}\n",
        },
    )
    assert probe(root=root, cpus=frozenset({0})).ram_available_bytes == 2 * GIB - 256 * MIB


def test_a_version_1_limit_above_what_a_container_sees_counts(tmp_path: Path) -> None:
    """A pod's limit lies on a group outside the container: its own group has none, yet the kernel kills."""
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/pod/abc\n",
            "proc/self/mountinfo": V1_MOUNT.format(root="/pod/abc"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {4 * GIB}\ntotal_inactive_file 0\n",
        },
    )
    topology = probe(root=root, cpus=frozenset({0}))
    assert (topology.ram_total_bytes, topology.ram_available_bytes) == (4 * GIB, 3 * GIB)


def test_memory_high_is_a_limit(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory.high": f"{1 * GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )
    assert probe(root=root, cpus=frozenset({0})).ram_total_bytes == GIB


def test_a_limit_above_the_host_changes_nothing(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/memory.max": f"{64 * GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )
    topology = probe(root=root, cpus=frozenset({0}))
    assert topology.limit is None and topology.ram_available_bytes == 12 * GIB


@pytest.mark.parametrize("text", ["", "garbage", "0::", "4:memory", "x:y:z:\n\n", "4:memory:/../..\n"])
def test_group_tables_that_make_no_sense_are_read_as_no_limit(tmp_path: Path, text: str) -> None:
    root = machine(tmp_path, {"proc/self/cgroup": text, "proc/self/mountinfo": V1_MOUNT.format(root="/") + "\n - \n"})
    assert probe(root=root, cpus=frozenset({0})).limit is None


CPUINFO = "".join(
    f"processor\t: {cpu}\nmodel name\t: Test CPU\nphysical id\t: 0\ncore id\t\t: {cpu // 2}\nflags\t\t: sse2 avx2\n\n"
    for cpu in range(8)
)


def test_hyperthreads_of_one_core_count_once_and_affinity_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/cpuinfo": CPUINFO})
    all_of_it = probe(root=root, cpus=frozenset(range(8)))
    assert (all_of_it.num_cpus, all_of_it.num_physical_cores, all_of_it.default_threads) == (8, 4, 4)
    assert all_of_it.cpu_model == "Test CPU" and "avx2" in all_of_it.cpu_flags
    part = probe(root=root, cpus=frozenset({0, 1, 2}))
    assert (part.num_cpus, part.num_physical_cores) == (3, 2)
    assert all_of_it.core_cpus == (0, 2, 4, 6) and part.core_cpus == (0, 2)


def test_threads_are_bound_to_cores_only_where_nobody_else_was_given_them(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/cpuinfo": CPUINFO})
    whole = probe(root=root, cpus=frozenset(range(8)))
    assert whole.pin_cpus(4) == (0, 2, 4, 6) and whole.pin_cpus(3) == (0, 2, 4)
    assert whole.pin_cpus(5) == (), "two would share a core for ever"
    assert whole.pin_cpus(1) == (), "the caller is never bound"
    assert probe(root=root, cpus=frozenset(range(6))).pin_cpus(2) == (), "a cpuset: others may be given the same CPUs"
    assert replace(whole, cpu_quota=8.0).pin_cpus(4) == ()


def test_cpus_without_core_numbers_are_cores(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/cpuinfo": "processor : 0\nFeatures : asimd\n\nprocessor : 1\nFeatures : asimd\n"})
    topology = probe(root=root, cpus=frozenset({0, 1}))
    assert topology.num_physical_cores == 2 and topology.cpu_flags == {"asimd"}


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n"}, 1.5, 1),
        ({"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n"}, 0.5, 1),
        ({"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n"}, None, 4),
    ],
)
def test_a_version_1_cpu_quota_bounds_the_threads(
    tmp_path: Path, files: dict[str, str], quota: float | None, threads: int
) -> None:
    period = {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n", "proc/cpuinfo": CPUINFO}
    tables = {"proc/self/cgroup": "3:cpu,cpuacct:/\n", "proc/self/mountinfo": V1_CPU_MOUNT}
    topology = probe(root=machine(tmp_path, files | period | tables), cpus=frozenset(range(8)))
    assert (topology.cpu_quota, topology.default_threads) == (quota, threads)


def test_a_version_2_cpu_quota_bounds_the_threads(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/cpuinfo": CPUINFO,
            "proc/self/cgroup": "0::/a\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
        },
    )
    topology = probe(root=root, cpus=frozenset(range(8)))
    assert (topology.cpu_quota, topology.default_threads) == (2.0, 2)


def test_the_disk_is_the_mount_that_the_file_lies_on(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x" * 100)
    table = f"1 0 0:1 / / rw - ext4 /dev/root rw\n2 1 0:2 / {tmp_path} rw - nfs4 server:/models rw\n"
    disk = probe(model, root=machine(tmp_path / "tree", {"proc/self/mountinfo": table}), cpus=frozenset({0})).disk
    assert disk is not None
    assert (disk.device, disk.filesystem, disk.is_network) == ("server:/models", "nfs4", True)


def test_this_machine_can_be_probed(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x" * 8192)
    topology = probe(model)
    assert 0 < topology.ram_available_bytes <= topology.ram_total_bytes
    assert 1 <= topology.default_threads <= topology.num_cpus
    assert topology.disk is not None
    alignment = topology.disk.direct_alignment
    assert alignment is None or (alignment & (alignment - 1) == 0 and alignment <= 65536)
