"""What this machine has to give: RAM, cores, the disk under the model. Read once, never changed.

Inside a container the kernel's own numbers describe the host, so the control groups are asked too: a process in a
4 GiB group on a 64 GiB machine has 4 GiB. Page cache that the kernel would drop on demand counts as available; a
program that reads a large model twice would otherwise be told the second time that memory is full.

Linux is read from /proc and /sys; elsewhere psutil gives what it can and there are no limits to find.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# A version 1 group without a limit shows the largest page-aligned int64; anything near it is none.
_NO_LIMIT = 1 << 62
_NETWORK_FILESYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "drvfs", "fuse.sshfs", "virtiofs", "ceph"})


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A memory control group above this process.

    Attributes:
        version: 1 or 2.
        group: its folder.
        limit_bytes: what all its processes may take, page cache included.
        used_bytes: what they take now.
        reclaimable_bytes: the part of it that is page cache the kernel drops before it kills anyone.
    """

    version: int
    group: Path
    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - max(0, self.used_bytes - self.reclaimable_bytes))


@dataclass(frozen=True, slots=True)
class Disk:
    """Where a model file lies.

    Attributes:
        device: as the mount table names it ("/dev/nvme0n1p2"), or "unknown".
        filesystem: "ext4", "overlay", "9p", …
        direct_alignment: what offsets, lengths and addresses of O_DIRECT reads divide by; None when it is refused.
    """

    device: str
    filesystem: str
    direct_alignment: int | None

    @property
    def is_network(self) -> bool:
        """True where reads cross a network or a virtual machine's border, and are slow for that reason."""
        return self.filesystem in _NETWORK_FILESYSTEMS


@dataclass(frozen=True, slots=True)
class Topology:
    """The machine as this process may use it.

    Attributes:
        ram_total_bytes: of the machine, or the control group's limit where that is less.
        ram_available_bytes: what could be taken now without swapping or being killed.
        limit: the control group that decides, when one is tighter than the machine.
        num_physical_cores: cores behind the CPUs this process may run on; hyperthreads of one core count once.
        num_cpus: logical CPUs this process may run on.
        cpu_quota: CPUs' worth of time the control groups allow, or None.
        cpu_flags: as /proc/cpuinfo spells them ("avx2", "asimd").
        disk: under the model that was asked about.
        core_cpus: one logical CPU of each of the physical cores, the lowest; none where the system does not tell.
        is_shared_out: this process may not run on every CPU of the machine: somebody has divided it.
    """

    ram_total_bytes: int
    ram_available_bytes: int
    limit: MemoryLimit | None
    num_physical_cores: int
    num_cpus: int
    cpu_quota: float | None
    cpu_model: str
    cpu_flags: frozenset[str]
    machine: str
    disk: Disk | None
    core_cpus: tuple[int, ...] = ()
    is_shared_out: bool = False

    @property
    def default_threads(self) -> int:
        """Threads worth starting: one per physical core, no more than the quota pays for."""
        # Two hyperthreads share the units that decode and multiply; a second thread there only adds contention.
        if self.cpu_quota is None:
            return self.num_physical_cores
        return max(1, min(self.num_physical_cores, math.floor(self.cpu_quota)))

    def pin_cpus(self, num_threads: int) -> tuple[int, ...]:
        """A CPU of its own for each compute thread; none where binding them would do harm.

        Harm: in a machine that is divided, or under a quota, others sit on the same CPUs and a bound thread cannot
        step aside; with more threads than cores some would share one for ever.
        """
        if self.is_shared_out or self.cpu_quota is not None or not 1 < num_threads <= len(self.core_cpus):
            return ()
        return self.core_cpus[:num_threads]


def probe(model: Path | None = None, *, root: Path = Path("/"), cpus: frozenset[int] | None = None) -> Topology:
    """Look at the machine.

    Args:
        model: a file whose disk is of interest.
        root: where `proc` and `sys` hang; tests put a made-up tree here.
        cpus: the logical CPUs this process may run on; asked from the kernel when None.
    """
    if cpus is None:
        cpus = _affinity()
    total, available = _host_memory(root)
    limits = [limit for limit in _memory_limits(root) if limit.limit_bytes < total]
    total = min([total, *(limit.limit_bytes for limit in limits)])
    available = min([available, *(limit.available_bytes for limit in limits)])
    core_cpus, num_known, cpu_model, flags = _cpu_info(root, cpus)
    cores = len(core_cpus) or len(cpus)
    return Topology(
        ram_total_bytes=total,
        ram_available_bytes=available,
        limit=min(limits, key=lambda limit: limit.available_bytes, default=None),
        num_physical_cores=cores,
        core_cpus=core_cpus,
        is_shared_out=num_known > len(cpus),
        num_cpus=len(cpus),
        cpu_quota=_cpu_quota(root),
        cpu_model=cpu_model,
        cpu_flags=flags,
        machine=platform.machine(),
        disk=None if model is None else _disk_under(model, root),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def _host_memory(root: Path) -> tuple[int, int]:
    fields = _fields(_read(root / "proc/meminfo") or "")
    if "MemTotal:" in fields and "MemAvailable:" in fields:
        return fields["MemTotal:"] << 10, fields["MemAvailable:"] << 10
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _fields(text: str) -> dict[str, int]:
    """First word to the number after it, line by line; lines of another form are left out."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}


# --- control groups ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mount:
    """One line of mountinfo: the part `root` of a filesystem appears at `point`."""

    device_id: str
    root: str
    point: str
    filesystem: str
    source: str
    options: frozenset[str]


def _mounts(root: Path) -> list[_Mount]:
    mounts = []
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        # 36 35 98:0 /root /point rw,noatime master:1 - ext4 /dev/sda rw,errors=continue
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) >= 5 and len(right) >= 3:
            names = [field.replace("\\040", " ").replace("\\134", "\\") for field in (left[3], left[4], right[1])]
            mounts.append(_Mount(left[2], names[0], names[1], right[0], names[2], frozenset(right[2].split(","))))
    return mounts


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of every control group that bounds this process for `controller`, innermost first."""
    mounts = _mounts(root)
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        names, _, group = rest.partition(":")
        if controller in names.split(","):
            version = 1
            mount = next((m for m in mounts if m.filesystem == "cgroup" and controller in m.options), None)
        elif hierarchy == "0" and not names:
            version = 2
            mount = next((m for m in mounts if m.filesystem == "cgroup2"), None)
        else:
            continue
        if mount is None:
            continue
        top = root / mount.point.lstrip("/")
        # In a container the mount may show only the container's own group; then its root is cut from the path.
        if PurePosixPath(group).is_relative_to(mount.root):
            folder = top / PurePosixPath(group).relative_to(mount.root)
        else:
            folder = top
        if not folder.is_dir():
            folder = top
        while True:
            yield version, folder
            if folder == top:
                break
            folder = folder.parent


def _memory_limits(root: Path) -> list[MemoryLimit]:
    return [limit for version, group in _groups(root, "memory") if (limit := _limit_of(version, group)) is not None]


def _limit_of(version: int, group: Path) -> MemoryLimit | None:
    stat = _fields(_read(group / "memory.stat") or "")
    if version == 1:
        # The second one is the least of all groups above, some of which a container may not see.
        bounds = [_read_int(group / "memory.limit_in_bytes"), stat.get("hierarchical_memory_limit")]
        used = _read_int(group / "memory.usage_in_bytes")
        # `total_` counts the groups below too, as the usage does.
        cache = ["total_inactive_file", "total_active_file"]
    else:
        # Over memory.high the kernel throttles a process until it stands still: as good as a limit.
        bounds = [_read_int(group / "memory.max"), _read_int(group / "memory.high")]
        used = _read_int(group / "memory.current")
        cache = ["inactive_file", "active_file", "slab_reclaimable"]
    known = [bound for bound in bounds if bound is not None and bound < _NO_LIMIT]
    if not known:
        return None
    return MemoryLimit(version, group, min(known), used or 0, sum(stat.get(name, 0) for name in cache))


def _cpu_quota(root: Path) -> float | None:
    quotas = []
    for version, group in _groups(root, "cpu"):
        if version == 1:
            quota, period = _read_int(group / "cpu.cfs_quota_us"), _read_int(group / "cpu.cfs_period_us")
        else:
            words = (_read(group / "cpu.max") or "").split()
            numbers = [int(word) if word.isdecimal() else None for word in words]
            quota, period = numbers if len(numbers) == 2 else (None, None)
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


# --- processors -------------------------------------------------------------------------------------------------------


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _cpu_info(root: Path, cpus: frozenset[int]) -> tuple[tuple[int, ...], int, str, frozenset[str]]:
    """(a CPU of each physical core behind `cpus`, CPUs of the machine, model name, flags)."""
    cores: dict[tuple[str, str], int] = {}
    num_known = 0
    model, flags = "", frozenset[str]()
    for paragraph in (_read(root / "proc/cpuinfo") or "").split("\n\n"):
        pairs = (line.partition(":") for line in paragraph.splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        number = fields.get("processor", "")
        if not number.isdecimal():
            continue
        num_known += 1
        model = model or fields.get("model name", "")
        flags = flags or frozenset((fields.get("flags") or fields.get("Features") or "").split())
        if int(number) in cpus:
            # Machines that do not tell which CPUs share a core (ARM, many virtual ones): every CPU is a core.
            core = fields.get("core id", "")
            cores.setdefault((fields.get("physical id", ""), core) if core else (number, ""), int(number))
    return tuple(sorted(cores.values())), num_known, model or platform.processor(), flags


# --- disks ------------------------------------------------------------------------------------------------------------


def _disk_under(model: Path, root: Path) -> Disk:
    try:
        device = model.stat().st_dev
    except OSError:
        return Disk("unknown", "unknown", None)
    device_id = f"{os.major(device)}:{os.minor(device)}"
    mounts = _mounts(root)
    # The device number decides; overlay and btrfs give files another one than their mount, then the path does.
    same = [mount for mount in mounts if mount.device_id == device_id]
    above = [mount for mount in mounts if model.resolve().is_relative_to(mount.point)]
    mount = max(same or above, key=lambda mount: len(mount.point) if mount in above else -1, default=None)
    source, filesystem = ("unknown", "unknown") if mount is None else (mount.source, mount.filesystem)
    return Disk(source, filesystem, _direct_alignment(model))


def _direct_alignment(model: Path) -> int | None:
    flag = getattr(os, "O_DIRECT", None)
    if flag is None or not model.is_file():
        return None
    try:
        os.close(os.open(model, os.O_RDONLY | flag))
    except OSError:
        return None
    return _statx_alignment(model) or 4096


def _statx_alignment(model: Path) -> int | None:
    """The kernel's own word on O_DIRECT alignment (Linux 6.1), or None.

    Source: struct statx in linux/stat.h: stx_mask at byte 0, stx_dio_mem_align at 152, stx_dio_offset_align at 156.
    """
    statx_dioalign, at_fdcwd = 0x2000, -100
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return None
    answer = (ctypes.c_uint32 * 64)()
    if statx(at_fdcwd, os.fsencode(model), 0, statx_dioalign, ctypes.byref(answer)) != 0:
        return None
    alignment = max(answer[38], answer[39])
    return int(alignment) if answer[0] & statx_dioalign and alignment else None
