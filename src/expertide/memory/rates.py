"""What memory and disk of this machine give right now: the bounds that speeds are held against. No torch.

    memory    every compute thread reads RAM, nothing else
    disk      whole windows of expert parts, in random order, as many in flight as the reader has threads

Both change from minute to minute on a shared machine, so they are measured beside each run.
"""

from __future__ import annotations

import ctypes
import random
import time

from expertide._native import ThreadPool, xor_words
from expertide.formats.tensors import ByteRange, ExpertCatalog, ModelFiles
from expertide.memory.arena import Arena
from expertide.memory.reader import DEFAULT_IO_THREADS, Reader, window_of
from expertide.units import MIB

# Larger than most last-level caches, so that memory answers. A server's cache may be larger still: the best of several
# passes would then tell of the cache, which is why the median counts.
MEMORY_BYTES = 512 * MIB
_PASSES = 7
DISK_SECONDS = 2.0


def memory_read_rate(num_threads: int, nbytes: int = MEMORY_BYTES) -> float:
    """Bytes per second that `num_threads` threads read from RAM together; the median of several passes."""
    arena, pool = Arena(nbytes), ThreadPool(num_threads)
    try:
        # The system gives pages as they are first written.
        ctypes.memset(arena.address, 1, nbytes)
        seconds = []
        for _ in range(_PASSES):
            begin = time.perf_counter()
            xor_words(pool, arena.address, nbytes)
            seconds.append(time.perf_counter() - begin)
    finally:
        pool.close()
        arena.close()
    return nbytes / sorted(seconds)[_PASSES // 2]


def expert_read_rate(
    files: ModelFiles, catalog: ExpertCatalog, *, seconds: float = DISK_SECONDS, seed: int | None = None
) -> float | None:
    """Bytes per second of expert-sized direct reads at scattered places of the model's files.

    Args:
        seed: of the order; by default another one each time, since a virtual disk may keep what was just read.

    Returns:
        None where the file system refuses direct reads: a rate through the page cache would promise what the disk
        cannot do.

    Raises:
        StorageError: the disk did not deliver.
    """
    windows = []
    for parts in catalog.layers.values():
        for part in parts:
            for where in part.ranges:
                window = window_of(where, files.file_sizes[where.file_id])
                windows.append(ByteRange(where.file_id, window.offset, window.nbytes))
    random.Random(seed).shuffle(windows)
    largest = max(window.nbytes for window in windows)
    # Enough of them in one call that its beginning and end, when the queue is not full, do not count.
    batch_size = 8 * DEFAULT_IO_THREADS
    stride = -(-largest // 4096) * 4096
    reader = Reader(files.files, files.file_sizes)
    arena = Arena(stride * batch_size)
    reader.keep(arena)
    try:
        if reader.notes:
            return None
        done, at = 0, 0
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            batch = [windows[(at + i) % len(windows)] for i in range(batch_size)]
            reader.read_many([(window, arena.address + stride * i) for i, window in enumerate(batch)])
            done += sum(window.nbytes for window in batch)
            at += batch_size
        return done / (time.perf_counter() - begin)
    finally:
        reader.close()
        arena.close()
