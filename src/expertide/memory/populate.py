"""Takes an arena's pages from the system before reads need them.

A page costs a fault and zeroing when it is first written: 0.1 to 0.3 s per GB of one core on plain hardware, 1.8 s in a
virtual machine whose host gives memory only then. Left to the reads, that is paid by their threads in the middle of the
first prompt, and on two cores by the kernels beside them. Here it is paid while the resident weights come from the
disk, which leaves the cores idle.

Linux 5.14 and later; elsewhere nothing happens, and pages come when they are first written.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

from expertide.memory.arena import Arena
from expertide.units import MIB

_MADV_POPULATE_WRITE = 23
# Between two looks at whether to stop: some milliseconds of work.
_STEP_BYTES = 16 * MIB


class Populator:
    """Populates one arena from its beginning on, in the background. `close` before the arena is closed."""

    def __init__(self, arena: Arena, num_threads: int) -> None:
        self._end = arena.address + arena.capacity_bytes
        self._next = arena.address
        self._lock = threading.Lock()
        self._is_closed = False
        self._populated_bytes = 0
        self._madvise = _find_madvise()
        self._threads = [
            threading.Thread(target=self._run, name="expertide-populate", daemon=True) for _ in range(num_threads)
        ]

    def start(self) -> None:
        if self._madvise is not None:
            for thread in self._threads:
                thread.start()

    @property
    def populated_bytes(self) -> int:
        return self._populated_bytes

    def wait(self, timeout_s: float) -> bool:
        """Wait until all is done, or the time is over; says which."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Stop after the step in progress. May be called twice."""
        self._is_closed = True
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        assert self._madvise is not None
        while not self._is_closed:
            with self._lock:
                begin = self._next
                nbytes = min(_STEP_BYTES, self._end - begin)
                self._next += nbytes
            # A refusal (an old kernel, no memory) is no fault: the reads take the pages then, or fail with a name.
            if nbytes <= 0 or self._madvise(begin, nbytes, _MADV_POPULATE_WRITE) != 0:
                return
            with self._lock:
                self._populated_bytes += nbytes


def _find_madvise() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
