"""How much of a file lies in the page cache, and getting it out: a cold run must be cold."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_PAGE_BYTES = mmap.PAGESIZE
_PIECE_BYTES = 1 << 30


def drop(files: Iterable[Path]) -> None:
    """Ask the system to forget the files' pages; pages that are mapped by a running process stay."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())  # only clean pages can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def drop_everything() -> bool:
    """Forget all clean pages of this machine; False without the right to."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
        return True
    return False


def cached_bytes(files: Iterable[Path]) -> int:
    """Bytes of the files that lie in the page cache now."""
    return sum(_cached_bytes_of(path) for path in files)


def _cached_bytes_of(path: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    c_int = ctypes.c_int
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, c_int, c_int, c_int, ctypes.c_long)
    size, found = path.stat().st_size, 0
    with path.open("rb", buffering=0) as file:
        for begin in range(0, size, _PIECE_BYTES):
            nbytes = min(_PIECE_BYTES, size - begin)
            # PROT_NONE: this mapping is only asked about, never read.
            address = libc.mmap(None, nbytes, 0, mmap.MAP_SHARED, file.fileno(), begin)
            if address in (None, ctypes.c_void_p(-1).value):
                continue
            pages = (ctypes.c_ubyte * (-(-nbytes // _PAGE_BYTES)))()
            if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0:
                found += sum(page & 1 for page in bytes(pages)) * _PAGE_BYTES
            libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    return found
