"""File bytes to addresses: the Python face of the native reader.

    window    a ByteRange widened to whole 4 KiB pages, which a direct read can fetch; `shift` leads from the window's
              start to the range's first byte

              |....####|########|##......|      offset, nbytes: multiples of 4 KiB (clipped at the end of the file)
               <-> shift

Bytes bypass the page cache (O_DIRECT) where the file system allows it; `notes` says where it does not. Nothing here
maps a file. Errors name file, offset, wanted and got.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from expertide._native import FileReader, ReadFailed, Residency
from expertide.errors import StorageError
from expertide.formats.tensors import ByteRange
from expertide.memory.arena import PAGE_BYTES
from expertide.units import round_down, round_up

# An SSD is saturated by 8 expert-sized reads in flight (measured, DESIGN section 9).
DEFAULT_IO_THREADS = 8

# slot, file_id, offset, window_nbytes, need_nbytes, dest
WindowRead = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Window:
    """What a direct read fetches to get a range."""

    offset: int
    nbytes: int
    shift: int


@dataclass(frozen=True, slots=True)
class ReadStats:
    """Sums since the reader was made.

    Attributes:
        read_bytes: what the system handed over, whole windows included.
        busy_s: time during which at least one read of the kind was queued or running.
    """

    read_bytes: int
    num_reads: int
    busy_s: float


class Reader:
    """The files of one model, open for reading. Any thread may call; `close` ends it."""

    def __init__(
        self,
        files: Sequence[Path],
        file_sizes: Sequence[int],
        *,
        num_threads: int = DEFAULT_IO_THREADS,
        serial: bool = False,
    ) -> None:
        """Open every file; its position in `files` is its file_id.

        Args:
            serial: one read at a time, inside the call that asks for it (`EXPERTIDE_SERIAL_IO`).

        Raises:
            StorageError: a file cannot be opened.
        """
        self.files = tuple(files)
        self.file_sizes = tuple(file_sizes)
        self.is_serial = serial
        self.native = FileReader(num_threads, serial)
        self._memory: list[object] = []
        for number, path in enumerate(self.files):
            try:
                file_id = self.native.open(str(path))
            except ReadFailed as error:
                self.native.close()
                raise StorageError(f"{path}: cannot be opened: {os.strerror(error.errno)}") from error
            assert file_id == number

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for every file that is read through the page cache."""
        return tuple(
            f"{path.name}: the file system refuses direct reads; reading through the page cache"
            for file_id, path in enumerate(self.files)
            if not self.native.is_direct(file_id)
        )

    def window(self, where: ByteRange) -> Window:
        """The pages around a range, clipped at the end of the file."""
        return window_of(where, self.file_sizes[where.file_id])

    def read_into(self, where: ByteRange, address: int) -> None:
        """Read one range to any address and return when it is there.

        Raises:
            StorageError: the disk did not deliver.
        """
        self.read_many([(where, address)])

    def read_many(self, ranges: Sequence[tuple[ByteRange, int]]) -> None:
        """Read ranges to their addresses, in parallel; returns when all of them are there.

        Raises:
            StorageError: the disk did not deliver; all reads have ended by then.
        """
        try:
            self.native.read_many([(r.file_id, r.offset, r.nbytes, address) for r, address in ranges])
        except ReadFailed as error:
            raise self.storage_error(error) from error

    def read_bytes(self, where: ByteRange) -> bytes:
        """A range as bytes; for small things.

        Raises:
            StorageError: the disk did not deliver.
        """
        buffer = ctypes.create_string_buffer(max(where.nbytes, 1))
        self.read_into(where, ctypes.addressof(buffer))
        return buffer.raw[: where.nbytes]

    def submit(self, residency: Residency, windows: Sequence[WindowRead], *, background: bool = False) -> None:
        """Start reads into slots that are loading; each one's end is told to `residency`.

        Args:
            background: nobody computes with them yet; they go behind every read that somebody waits for.
        """
        self.native.submit(residency, windows, background)

    @property
    def num_submitted(self) -> int:
        """Windows that `submit` has taken on for demand so far: each of them the reader owes one complete or fail."""
        return self.native.num_submitted

    def set_background_limit(self, limit: int) -> None:
        """Most background reads that run at once, at least 1."""
        self.native.set_background_limit(limit)

    def wait_background(self, max_pending: int, timeout_ms: int) -> int:
        """Wait until at most `max_pending` background reads are queued or running; how many are, in any case."""
        return self.native.wait_background(max_pending, timeout_ms)

    def cancel_background(self) -> None:
        """Queued background reads fail with ECANCELED; running ones finish."""
        self.native.cancel_background()

    def keep(self, memory: object) -> None:
        """Keep the owner of read destinations alive until the I/O threads have ended."""
        self._memory.append(memory)
        self.native.keep(memory)

    def storage_error(self, error: ReadFailed, what: str = "") -> StorageError:
        """The error for people: file, what was read, got and wanted bytes, offset, reason."""
        subject = f"{self.files[error.file_id].name}: {what + ': ' if what else ''}"
        if error.errno == errno.ECANCELED:
            return StorageError(f"{subject}read at offset {error.offset:,} cancelled: the reader is closed")
        reason = os.strerror(error.errno) if error.errno else "the file ends there"
        return StorageError(
            f"{subject}got {error.got:,} of {error.wanted:,} bytes at offset {error.offset:,} ({reason})"
        )

    def stats(self, *, background: bool = False) -> ReadStats:
        """What was read on demand, or in the background."""
        read_bytes, num_reads, busy_ns = self.native.stats(background)
        return ReadStats(read_bytes, num_reads, busy_ns / 1e9)

    def inject_fault(self, file_id: int, offset: int, nbytes: int, error: int, count: int = 1) -> None:
        """For tests: let the next `count` kernel reads that touch the range misbehave.

        Args:
            error: an errno (EINTR included); 0: only a third of the bytes come; -1: end of file.
        """
        self.native.inject_fault(file_id, offset, nbytes, error, count)

    def close(self) -> None:
        """Cancel queued reads, let running ones end, close the files. May be called twice."""
        self.native.close()
        self._memory.clear()


def window_of(where: ByteRange, file_size: int) -> Window:
    """The pages around a range, clipped at the end of the file."""
    offset = round_down(where.offset, PAGE_BYTES)
    end = min(round_up(where.offset + where.nbytes, PAGE_BYTES), file_size)
    return Window(offset, end - offset, where.offset - offset)
