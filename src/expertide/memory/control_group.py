"""A memory control group for one command: version 1, version 2 or systemd-run, whichever this machine lets us use.

The page cache counts in such a group, so a file larger than its limit cannot hide there: "larger than memory" is true
and not simulated. Used by `expertide bench --memory-limit` and tools/check_large.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryGroup:
    """How to start a command inside the group.

    Attributes:
        kind: for people: "cgroup v1", "cgroup v2" or "systemd-run".
        prefix: words to put before the command.
        folder: the group, or None where only systemd knows it.
    """

    kind: str
    prefix: tuple[str, ...]
    folder: Path | None

    def was_killed(self) -> bool:
        """True when the kernel killed a process of the group for memory."""
        if self.folder is None:
            return False
        for name in ("memory.events", "memory.oom_control"):
            path = self.folder / name
            rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
            if any(len(row) == 2 and row[0] == "oom_kill" and row[1] != "0" for row in rows):
                return True
        return False

    def peak_bytes(self) -> int | None:
        """The most memory the group ever held, page cache included; None where the kernel does not say."""
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            path = self.folder / name if self.folder is not None else None
            if path is not None and path.exists():
                return int(path.read_text())
        return None


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup | None]:
    """A group with this limit and no swap; None where this process may not make one."""
    folder = _make_v1(limit_bytes) or _make_v2(limit_bytes)
    if folder is not None:
        kind = "cgroup v1" if (folder / "memory.limit_in_bytes").exists() else "cgroup v2"
        # The shell moves itself, then becomes the command: everything the command ever allocates is charged here.
        prefix = ("sh", "-c", f'echo $$ > "{folder}/cgroup.procs" && exec "$@"', "sh")
        try:
            yield MemoryGroup(kind, prefix, folder)
        finally:
            folder.rmdir()
        return
    scope = ("systemd-run", "--scope", "--quiet", "-p", f"MemoryMax={limit_bytes}", "-p", "MemorySwapMax=0", "--")
    can_scope = shutil.which("systemd-run") and subprocess.run((*scope, "true"), capture_output=True).returncode == 0
    yield MemoryGroup("systemd-run", scope, None) if can_scope else None


def _make_v1(limit_bytes: int) -> Path | None:
    mount = _mount_point("cgroup", "memory")
    if mount is None:
        return None
    folder = _make_folder(mount)
    if folder is None:
        return None
    (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
    swap = folder / "memory.memsw.limit_in_bytes"
    if swap.exists():
        swap.write_text(str(limit_bytes))
    return folder


def _make_v2(limit_bytes: int) -> Path | None:
    mount = _mount_point("cgroup2", None)
    if mount is None or "memory" not in (mount / "cgroup.subtree_control").read_text().split():
        return None
    folder = _make_folder(mount)
    if folder is None:
        return None
    (folder / "memory.max").write_text(str(limit_bytes))
    swap = folder / "memory.swap.max"
    if swap.exists():
        swap.write_text("0")
    return folder


def _make_folder(mount: Path) -> Path | None:
    folder = mount / f"expertide-check-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        return None
    return folder


def _mount_point(filesystem: str, option: str | None) -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == filesystem and (option is None or option in options.split(",")):
            return Path(point)
    return None
