"""Its presence puts this folder on the import path, so that tests can share the modules that lie here."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

# A shell starts its background jobs with Ctrl-C ignored, and so do some CI machines. The tests of Ctrl-C, and the
# programs they start, need it as a terminal has it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What a run learns about hot experts is kept for the next one: tests neither read nor write the user's.
_CACHE = tempfile.TemporaryDirectory(prefix="expertide-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

# Without an NVIDIA driver the kernels for GPUs run in triton's interpreter. Triton decides when it is imported, and any
# module of any test may be the first to import it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
