"""A reader that keeps every promise of the native one and is as nasty as they allow: it delays, splits and reorders.

Same surface as `expertide._native.FileReader`. Bytes that have not come yet are 0xFF, so whoever computes too early
computes with NaN. Use: `monkeypatch.setattr("expertide.memory.reader.FileReader", chaos(seed))`.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Sequence

from expertide._native import ReadFailed, Residency

_MAX_PIECES = 4


class ChaosReader:
    """Python threads take pieces of windows in random order."""

    def __init__(
        self, num_threads: int = 4, serial: bool = False, *, seed: int = 0, max_delay_s: float = 0.002
    ) -> None:
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._fds: list[int] = []
        self._lock = threading.Condition()
        self._pieces: list[Callable[[], None]] = []
        self._is_closed = False
        self._is_serial = serial
        self._sums = {False: [0, 0], True: [0, 0]}  # is background -> bytes, reads
        self._num_background = 0
        self.max_in_flight = 0
        self.num_submitted = 0
        self._in_flight = 0
        self._faults: list[list[int]] = []
        self._threads = [] if serial else [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def open(self, path: str) -> int:
        self._fds.append(os.open(path, os.O_RDONLY))
        return len(self._fds) - 1

    def is_direct(self, file_id: int) -> bool:
        return True

    def keep(self, memory: object) -> None:
        pass

    def inject_fault(self, file_id: int, offset: int, nbytes: int, error: int, count: int) -> None:
        with self._lock:
            self._faults.append([file_id, offset, nbytes, error, count])

    def submit(
        self, residency: Residency, windows: Sequence[tuple[int, int, int, int, int, int]], background: bool = False
    ) -> None:
        # Background reads are promised nothing but an end: here they mix with all the others.
        pieces = []
        for window in windows:
            pieces += self._split(residency, *window, background)
        with self._lock:
            self.num_submitted += 0 if background else len(windows)
            self._num_background += len(windows) if background else 0
            self._in_flight += len(windows)
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
            if self._is_serial:
                self._random.shuffle(pieces)
            else:
                self._pieces += pieces
                self._lock.notify_all()
        if self._is_serial:
            for piece in pieces:
                piece()

    def _split(
        self,
        residency: Residency,
        slot: int,
        file_id: int,
        offset: int,
        window: int,
        need: int,
        dest: int,
        background: bool,
    ) -> list[Callable[[], None]]:
        assert offset % 4096 == 0 and dest % 4096 == 0 and 0 <= need <= window
        ctypes.memset(dest, 0xFF, need)
        num_cuts = min(self._random.randrange(_MAX_PIECES), need - 1)
        cuts = sorted({0, need, *(self._random.randrange(1, need) for _ in range(num_cuts))})
        failure = self._fault_in(file_id, offset, need)
        left = [len(cuts) - 1]

        def piece(begin: int, end: int) -> Callable[[], None]:
            def read() -> None:
                time.sleep(self._random.random() * self._max_delay_s)
                if failure is None:
                    data = os.pread(self._fds[file_id], end - begin, offset + begin)
                    assert len(data) == end - begin
                    ctypes.memmove(dest + begin, data, end - begin)
                with self._lock:
                    self._count(end - begin, background)
                    left[0] -= 1
                    is_last = left[0] == 0
                    self._in_flight -= is_last
                    self._num_background -= is_last and background
                if not is_last:
                    return
                if failure is None:
                    residency.complete(slot)
                else:
                    residency.fail(slot, failure, file_id, offset, need, 0)

            return read

        return [piece(begin, end) for begin, end in itertools.pairwise(cuts)]

    def _fault_in(self, file_id: int, offset: int, nbytes: int) -> int | None:
        with self._lock:
            for fault in self._faults:
                if fault[0] == file_id and offset < fault[1] + fault[2] and fault[1] < offset + nbytes:
                    fault[4] -= 1
                    if fault[4] <= 0:
                        self._faults.remove(fault)
                    return fault[3] or errno.EIO
        return None

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._pieces and not self._is_closed:
                    self._lock.wait()
                if not self._pieces:
                    return
                piece = self._pieces.pop(self._random.randrange(len(self._pieces)))
            piece()

    def read_many(self, ranges: Sequence[tuple[int, int, int, int]]) -> None:
        for file_id, offset, nbytes, dest in ranges:
            data = os.pread(self._fds[file_id], nbytes, offset)
            if len(data) != nbytes:
                error = ReadFailed(f"got {len(data)} of {nbytes} bytes")
                error.errno, error.file_id, error.offset, error.wanted, error.got = (
                    0,
                    file_id,
                    offset,
                    nbytes,
                    len(data),
                )
                raise error
            ctypes.memmove(dest, data, nbytes)
            with self._lock:
                self._count(nbytes, False)

    def read(self, file_id: int, offset: int, nbytes: int, dest: int) -> None:
        self.read_many([(file_id, offset, nbytes, dest)])

    def _count(self, nbytes: int, background: bool) -> None:
        self._sums[background][0] += nbytes
        self._sums[background][1] += 1

    def stats(self, background: bool = False) -> tuple[int, int, int]:
        with self._lock:
            return self._sums[background][0], self._sums[background][1], 0

    def set_background_limit(self, limit: int) -> None:
        pass

    def wait_background(self, max_pending: int, timeout_ms: int) -> int:
        deadline = time.monotonic() + timeout_ms / 1000
        while self._num_background > max_pending and time.monotonic() < deadline:
            time.sleep(0.0002)
        return self._num_background

    def cancel_background(self) -> None:
        pass  # they end by themselves

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()
        while self._fds:
            os.close(self._fds.pop())


def chaos(seed: int, max_delay_s: float = 0.002) -> Callable[..., ChaosReader]:
    """A stand-in for the class FileReader whose readers all start from this seed."""

    def make(num_threads: int = 4, serial: bool = False) -> ChaosReader:
        return ChaosReader(num_threads, serial, seed=seed, max_delay_s=max_delay_s)

    return make
