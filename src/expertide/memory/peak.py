"""The most memory this process ever had resident."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_resident_bytes() -> int:
    """The most memory this process ever had resident: VmHWM, or what getrusage says elsewhere."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The one figure of getrusage whose unit differs: bytes on macOS, KiB elsewhere.
    return peak if sys.platform == "darwin" else peak << 10
