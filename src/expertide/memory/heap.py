"""How the C library's heap deals with the large buffers of a prefill chunk."""

from __future__ import annotations

import ctypes

# Activations of a decode step are below this and stay on the heap; those of a chunk are 1 MiB and more.
MAPPED_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3  # malloc.h of glibc


def return_large_buffers() -> bool:
    """Have every buffer of `MAPPED_BYTES` and more go back to the system once freed; False where that cannot be set.

    glibc maps large buffers one by one, but the first one freed raises its limit up to 32 MiB, and from then on they
    come from the heap, where holes between them stay resident: with activations of 31 MiB a process of 740 MiB took
    1,190 MiB. Holds for the whole process.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES) == 1
