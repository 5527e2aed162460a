"""One stretch of anonymous memory, handed out as runs of whole pages.

    Arena           the bytes: page-aligned, taken from the system at first touch, given back by close()
    RunAllocator    the books: which pages are taken; numbers only

    page   0   1   2   3   4   5   6   7
         [ run A   ][ free ][ run B     ]        best fit: the shortest free run that is long enough

Every expert part lies in a run of its own, because a direct read needs one contiguous aligned window. Runs of the same
size dominate, so best fit reuses holes exactly and fragmentation stays small.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from bisect import bisect_left, insort

from expertide.errors import BudgetError
from expertide.units import format_size

PAGE_BYTES = 4096
# Large pages of every system we know are this or a part of it.
_LARGE_PAGE_BYTES = 2 << 20
_POISON = 0xFF


class RunAllocator:
    """Which pages of [0, num_pages) are taken. Not thread-safe: its owner calls it from one thread."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 0
        self.num_pages = num_pages
        self._taken: dict[int, int] = {}  # start -> length
        self._free: dict[int, int] = {}  # start -> length
        self._free_by_end: dict[int, int] = {}  # one past the last page -> start
        self._free_by_length: list[tuple[int, int]] = []  # (length, start), sorted
        self.num_free_pages = 0
        if num_pages:
            self._add_free(0, num_pages)

    @property
    def largest_free_run(self) -> int:
        return self._free_by_length[-1][0] if self._free_by_length else 0

    @property
    def num_runs(self) -> int:
        """Runs handed out and not freed yet."""
        return len(self._taken)

    def try_allocate(self, num_pages: int) -> int | None:
        """First page of a run of `num_pages`, or None when no free run is long enough."""
        assert num_pages > 0
        at = bisect_left(self._free_by_length, (num_pages, -1))
        if at == len(self._free_by_length):
            return None
        length, start = self._free_by_length[at]
        self._remove_free(start, length)
        if length > num_pages:
            self._add_free(start + num_pages, length - num_pages)
        self._taken[start] = num_pages
        return start

    def free(self, start: int) -> int:
        """Give a run back; returns its pages. Neighbouring free runs become one."""
        length = self._taken.pop(start)
        freed = length
        before = self._free_by_end.get(start)
        if before is not None:
            gap = self._free[before]
            self._remove_free(before, gap)
            start, length = before, length + gap
        after = self._free.get(start + length)
        if after is not None:
            self._remove_free(start + length, after)
            length += after
        self._add_free(start, length)
        return freed

    def length_of(self, start: int) -> int:
        """Pages of a run that is handed out."""
        return self._taken[start]

    def _add_free(self, start: int, length: int) -> None:
        self._free[start] = length
        self._free_by_end[start + length] = start
        insort(self._free_by_length, (length, start))
        self.num_free_pages += length

    def _remove_free(self, start: int, length: int) -> None:
        del self._free[start]
        del self._free_by_end[start + length]
        del self._free_by_length[bisect_left(self._free_by_length, (length, start))]
        self.num_free_pages -= length

    def check(self) -> None:
        """Assert that the books are whole: every page belongs to one run, and no two free runs touch."""
        position = 0
        was_free = False
        runs = [(start, length, True) for start, length in self._free.items()]
        runs += [(start, length, False) for start, length in self._taken.items()]
        for start, length, is_free in sorted(runs):
            assert start == position and length > 0, f"page {position}: the next run starts at {start}"
            assert not (is_free and was_free), f"two free runs meet at page {start}"
            position, was_free = start + length, is_free
        assert position == self.num_pages
        assert sorted((length, start) for start, length in self._free.items()) == self._free_by_length
        assert {start + length: start for start, length in self._free.items()} == self._free_by_end
        assert self.num_free_pages == sum(self._free.values())


class Arena:
    """Memory for experts. Its owner must stop all readers before `close`."""

    def __init__(self, capacity_bytes: int) -> None:
        """Reserve address space; the system gives pages as they are first written.

        Raises:
            BudgetError: the system refuses even the address space (a limit on virtual memory).
        """
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self.runs = RunAllocator(self.capacity_bytes // PAGE_BYTES)
        # Room to begin at a multiple of a large page; what lies before is never touched.
        slack = _LARGE_PAGE_BYTES if self.capacity_bytes >= _LARGE_PAGE_BYTES else 0
        nbytes = max(self.capacity_bytes, PAGE_BYTES) + slack
        try:
            self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise BudgetError(
                f"the system refuses {format_size(self.capacity_bytes)} for the expert cache: {error.strerror}"
            ) from error
        # A core dump needs no gigabytes of weights. The flag also keeps this mapping apart from its neighbours in
        # /proc/PID/smaps, which is how tools/check_large.py tells the arenas from everything else.
        if hasattr(mmap, "MADV_DONTDUMP"):
            self._memory.madvise(mmap.MADV_DONTDUMP)
        # Products walk experts of megabytes at scattered places: with small pages a good part of the time goes into
        # address translation. docs/experiments.md. A system without large pages refuses, and loses nothing.
        if slack and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._first = ctypes.c_char.from_buffer(self._memory)
        first = ctypes.addressof(self._first)
        self.address = -(-first // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES if slack else first

    def address_of(self, start_page: int) -> int:
        return self.address + start_page * PAGE_BYTES

    def poison(self, start_page: int) -> None:
        """Fill a run that is handed out with 0xFF: whoever still reads it gets NaN, not yesterday's expert."""
        ctypes.memset(self.address_of(start_page), _POISON, self.runs.length_of(start_page) * PAGE_BYTES)

    def close(self) -> None:
        """Give the memory back; addresses into it are invalid from now on. May be called twice."""
        if self._memory.closed:
            return
        del self._first
        self._memory.close()
