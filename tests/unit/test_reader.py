"""The native reader delivers exactly the bytes asked for, whatever the alignment, and counts what it transferred."""

from __future__ import annotations

import ctypes
import errno
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from expertide._native import FileReader, ReadFailed, Residency
from expertide.errors import StorageError
from expertide.formats.tensors import ByteRange
from expertide.memory.arena import PAGE_BYTES, Arena
from expertide.memory.reader import Reader

SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def content() -> bytes:
    # Ends inside a page; larger than two pieces of the parallel read.
    return np.random.default_rng(1).integers(0, 256, 9_000_123, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> Path:
    path = tmp_path_factory.mktemp("reader") / "model.bin"
    path.write_bytes(content)
    return path


def read_window(reader: Reader, where: ByteRange) -> bytes:
    """One window into an arena, through the residency table."""
    arena = Arena(where.nbytes + 3 * PAGE_BYTES)
    residency = Residency(1, 1, 1, 1)
    window = reader.window(where)
    ctypes.memset(arena.address, 0xAB, arena.capacity_bytes)
    residency.reserve(0, 0, 0, [arena.address + window.shift], 1, False)
    need = window.shift + where.nbytes
    reader.submit(residency, [(0, where.file_id, window.offset, window.nbytes, need, arena.address)])
    try:
        residency.wait(0, 0)
        pages = -(-window.nbytes // PAGE_BYTES)
        beyond = ctypes.string_at(arena.address + pages * PAGE_BYTES, PAGE_BYTES)
        assert beyond == b"\xab" * PAGE_BYTES, "bytes were written outside of the window's pages"
        return ctypes.string_at(arena.address + window.shift, where.nbytes)
    finally:
        residency.wait_idle()
        arena.close()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("serial", [False, True])
def test_a_window_of_many_pieces_fails_once_where_its_first_bad_piece_stopped(
    path: Path, content: bytes, serial: bool, background: bool
) -> None:
    """Two pieces fail; the slot hears of it when none is under way any more, and a second attempt is right."""
    reader = Reader([path], [len(content)], serial=serial)
    where = ByteRange(0, 12_345, 5_000_000)
    window = reader.window(where)
    need = window.shift + where.nbytes
    bad = [window.offset + 1_600_000, window.offset + 3_300_000]
    arena = Arena(where.nbytes + 3 * PAGE_BYTES)
    residency = Residency(1, 1, 1, 1)
    try:
        for attempt in range(2):
            if attempt == 0:
                for offset in bad[:1] if serial else reversed(bad):
                    reader.native.inject_fault(0, offset, 1, errno.EIO, 1)
            residency.reserve(0, 0, 0, [arena.address + window.shift], 1, False)
            reader.submit(residency, [(0, 0, window.offset, window.nbytes, need, arena.address)], background=background)
            if attempt == 0:
                with pytest.raises(ReadFailed) as failed:
                    residency.wait(0, 0)
                error = failed.value
                assert (error.errno, error.offset, error.wanted) == (errno.EIO, window.offset, need)
                # What stands before the first bad piece; in one piece, nothing is known to have come.
                assert error.got <= bad[0] - window.offset and (
                    serial or error.got >= bad[0] - window.offset - (512 << 10)
                )
                if not serial:
                    assert reader.stats(background=background).num_reads >= 8, "other pieces went on"
            else:
                residency.wait(0, 0)
                assert ctypes.string_at(arena.address + window.shift, where.nbytes) == content[12_345:5_012_345]
            residency.release(0, 0)
            reader.wait_background(0, 10_000)
            assert residency.collect_failed() == ([0] if attempt == 0 else [])
    finally:
        reader.close()
        arena.close()


@pytest.mark.parametrize("serial", [False, True])
def test_windows_and_exact_reads_of_any_alignment_are_right(path: Path, content: bytes, serial: bool) -> None:
    rng = random.Random(5)
    size = len(content)
    reader = Reader([path], [size], serial=serial)
    places = [(0, 1), (0, size), (size - 1, 1), (size - 5000, 5000), (4096, 4096), (4095, 2), (8192, 300_000)]
    places += [(start := rng.randrange(size), rng.randrange(1, min(size - start, 400_000) + 1)) for _ in range(40)]
    for offset, nbytes in places:
        where = ByteRange(0, offset, nbytes)
        expected = content[offset : offset + nbytes]
        assert read_window(reader, where) == expected, where
        assert reader.read_bytes(where) == expected, where
        # Destinations that fit the file's alignment from the second page on, and ones that never do.
        for shift in (offset % PAGE_BYTES, 13):
            buffer = ctypes.create_string_buffer(nbytes + 3 * PAGE_BYTES)
            base = -(-ctypes.addressof(buffer) // PAGE_BYTES) * PAGE_BYTES + shift
            reader.read_into(where, base)
            assert ctypes.string_at(base, nbytes) == expected, (where, shift)
    reader.close()


def test_a_file_system_without_direct_reads_is_read_through_the_page_cache_and_says_so(content: bytes) -> None:
    if not SHM.is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    path = SHM / "expertide-test-reader.bin"
    path.write_bytes(content)
    try:
        reader = Reader([path], [len(content)])
        reader.native.inject_fault(0, 0, len(content), errno.EINVAL, 1)
        got = read_window(reader, ByteRange(0, 100, 1_000_000))
        if reader.native.is_direct(0):
            pytest.skip("this kernel reads tmpfs directly")
        assert got == content[100:1_000_100]
        assert reader.notes == (
            "expertide-test-reader.bin: the file system refuses direct reads; reading through the page cache",
        )
        reader.close()
    finally:
        path.unlink()


def test_read_bytes_count_whole_windows(path: Path, content: bytes) -> None:
    reader = Reader([path], [len(content)])
    if not reader.native.is_direct(0):
        pytest.skip("no direct reads on this file system")
    read_window(reader, ByteRange(0, 5000, 10_000))
    stats = reader.stats()
    assert stats.read_bytes == 12_288, "pages 1..3"
    assert stats.num_reads == 1 and stats.busy_s > 0
    reader.close()


def test_read_bytes_match_what_the_system_counts(path: Path, content: bytes) -> None:
    reader = Reader([path], [len(content)])
    if not reader.native.is_direct(0) or not Path("/proc/self/io").exists():
        pytest.skip("needs direct reads and /proc/self/io")

    def from_disk() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])

    before = from_disk()
    for part in range(8):
        read_window(reader, ByteRange(0, 1000 + part * 1_000_000, 1_000_000))
    counted = from_disk() - before
    if counted == 0:
        pytest.skip("this file system does not account reads")
    # Two per cent is what the project promises; metadata blocks of the file system are the difference.
    assert reader.stats().read_bytes == pytest.approx(counted, rel=0.02)
    reader.close()


def test_many_reads_at_once_all_arrive(path: Path, content: bytes) -> None:
    reader = Reader([path], [len(content)])
    buffer = np.empty(len(content), np.uint8)
    cuts = sorted(random.Random(2).sample(range(1, len(content)), 200))
    ranges = [
        (ByteRange(0, begin, end - begin), buffer.ctypes.data + begin)
        for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True)
    ]
    reader.read_many(ranges)
    assert buffer.tobytes() == content
    reader.close()


def test_a_missing_file_is_named() -> None:
    with pytest.raises(StorageError, match=r"/nowhere/model.gguf: cannot be opened: No such file"):
        Reader([Path("/nowhere/model.gguf")], [1])


def test_windows_are_checked_before_anything_is_queued(path: Path) -> None:
    reader = FileReader(1)
    reader.open(str(path))
    residency = Residency(1, 1, 1, 1)
    residency.reserve(0, 0, 0, [0], 1, False)
    for window in ((0, 0, 1, 4096, 10, 4096), (0, 0, 0, 4096, 10, 4097), (0, 0, 0, 10, 4096, 4096)):
        with pytest.raises(ValueError, match="aligned"):
            reader.submit(residency, [window])
    with pytest.raises(IndexError, match="never opened"):
        reader.submit(residency, [(0, 1, 0, 4096, 10, 4096)])
    with pytest.raises(IndexError, match="never opened"):
        reader.read(3, 0, 1, 4096)
    reader.close()
    with pytest.raises(ReadFailed):
        reader.read(0, 0, 1, 4096)


@pytest.mark.parametrize("serial", [False, True])
def test_close_waits_for_running_reads_whoever_runs_them(path: Path, content: bytes, serial: bool) -> None:
    """A second close, or one beside a serial read, took the descriptors from under the reads: errno 9."""
    for _ in range(20):
        reader = Reader([path], [len(content)], num_threads=4, serial=serial)
        outcomes: list[int] = []
        has_begun = threading.Event()

        def read(reader: Reader = reader, outcomes: list[int] = outcomes, begun: threading.Event = has_begun) -> None:
            dest = np.zeros(len(content), np.uint8)
            begun.set()
            try:
                reader.native.read_many([(0, 0, len(content), dest.ctypes.data)] * 3)
                outcomes.append(0 if dest.tobytes() == content else -1)
            except ReadFailed as error:
                outcomes.append(error.errno)

        threads = [threading.Thread(target=read)] + [threading.Thread(target=reader.native.close) for _ in range(2)]
        threads[0].start()
        has_begun.wait()
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes[0] in (0, errno.ECANCELED)
