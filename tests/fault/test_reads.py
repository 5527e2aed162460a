"""The disk misbehaves: short reads, EINTR, errors, files that shrink, a reader that is closed in mid-flight."""

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
from expertide.memory.arena import Arena
from expertide.memory.reader import Reader

SIZE = 3_000_017


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8).tobytes()


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    return path


class Slots:
    """Windows of one file, each in its own slot of a table with one expert per slot."""

    def __init__(self, reader: Reader, ranges: list[ByteRange]) -> None:
        self.reader, self.ranges = reader, ranges
        windows = [reader.window(where) for where in ranges]
        self.arena = Arena(sum(-(-w.nbytes // 4096) for w in windows) * 4096)
        self.residency = Residency(1, len(ranges), 1, len(ranges))
        reader.keep(self.arena)
        self.addresses, reads = [], []
        for number, (where, window) in enumerate(zip(ranges, windows, strict=True)):
            start = self.arena.runs.try_allocate(-(-window.nbytes // 4096))
            assert start is not None
            dest = self.arena.address_of(start)
            self.addresses.append(dest + window.shift)
            self.residency.reserve(number, 0, number, [dest + window.shift], 1, False)
            reads.append((number, 0, window.offset, window.nbytes, window.shift + where.nbytes, dest))
        self.reads = reads

    def submit(self) -> None:
        self.reader.submit(self.residency, self.reads)

    def bytes_of(self, number: int) -> bytes:
        self.residency.wait(0, number)
        return ctypes.string_at(self.addresses[number], self.ranges[number].nbytes)


def random_ranges(count: int, seed: int) -> list[ByteRange]:
    rng = random.Random(seed)
    ranges = [ByteRange(0, SIZE - 70_000, 70_000)]
    for _ in range(count - 1):
        start = rng.randrange(SIZE - 300_000)
        ranges.append(ByteRange(0, start, rng.randrange(1, 300_000)))
    return ranges


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("error", [0, errno.EINTR])
def test_short_and_interrupted_reads_are_resumed(path: Path, content: bytes, error: int, serial: bool) -> None:
    reader = Reader([path], [SIZE], serial=serial)
    slots = Slots(reader, random_ranges(30, seed=4))
    reader.inject_fault(0, 0, SIZE, error, count=200)
    slots.submit()
    for number, where in enumerate(slots.ranges):
        assert slots.bytes_of(number) == content[where.offset : where.offset + where.nbytes]
    reader.inject_fault(0, 0, SIZE, error, count=50)
    assert reader.read_bytes(ByteRange(0, 77, 2_000_000)) == content[77:2_000_077]
    reader.close()


def test_a_read_error_names_file_offset_and_bytes_and_spares_the_others(path: Path, content: bytes) -> None:
    reader = Reader([path], [SIZE])
    slots = Slots(reader, [ByteRange(0, i * 200_000 + 5, 100_000) for i in range(10)])
    reader.inject_fault(0, 600_000, 4096, errno.EIO)
    slots.submit()
    for number, where in enumerate(slots.ranges):
        if number != 3:
            assert slots.bytes_of(number) == content[where.offset : where.offset + where.nbytes]
    with pytest.raises(ReadFailed) as caught:
        slots.residency.wait(0, 3)
    assert str(reader.storage_error(caught.value, "expert 3")) == (
        "model.bin: expert 3: got 0 of 101,989 bytes at offset 598,016 (Input/output error)"
    )
    slots.residency.release(0, 3)
    assert slots.residency.collect_failed() == [3]
    reader.close()


def test_a_resident_read_error_names_file_and_offset(path: Path, content: bytes) -> None:
    reader = Reader([path], [SIZE])
    reader.inject_fault(0, 1_500_000, 1, errno.EIO)
    with pytest.raises(
        StorageError, match=r"model\.bin: got [\d,]+ of 3,000,016 bytes at offset 1 \(Input/output error\)"
    ):
        reader.read_bytes(ByteRange(0, 1, SIZE - 1))
    assert reader.read_bytes(ByteRange(0, 1, SIZE - 1)) == content[1:]
    reader.close()


def test_a_file_that_shrank_after_it_was_opened_is_an_error_and_no_stale_bytes(path: Path) -> None:
    reader = Reader([path], [SIZE])
    slots = Slots(reader, [ByteRange(0, SIZE - 500_000, 500_000)])
    with path.open("r+b") as file:
        file.truncate(SIZE - 200_000)
    slots.submit()
    with pytest.raises(ReadFailed) as caught:
        slots.residency.wait(0, 0)
    error = caught.value
    assert error.errno == 0 and error.wanted - error.got == 200_000
    assert str(reader.storage_error(error)).endswith("(the file ends there)")
    with pytest.raises(StorageError, match="the file ends there"):
        reader.read_bytes(ByteRange(0, SIZE - 300_000, 300_000))
    reader.close()


def test_end_of_file_in_the_middle_is_an_error(path: Path) -> None:
    reader = Reader([path], [SIZE])
    reader.inject_fault(0, 0, SIZE, -1, count=1000)
    with pytest.raises(StorageError, match="the file ends there"):
        reader.read_bytes(ByteRange(0, 0, 1_000_000))
    reader.close()


@pytest.mark.parametrize("seed", range(5))
def test_close_with_reads_in_flight_wakes_every_waiter_and_writes_nothing_afterwards(path: Path, seed: int) -> None:
    reader = Reader([path], [SIZE], num_threads=2)
    slots = Slots(reader, random_ranges(60, seed))
    outcomes: list[str] = []

    def wait(number: int) -> None:
        try:
            slots.residency.wait(0, number)
            outcomes.append("resident")
        except ReadFailed as error:
            outcomes.append(str(reader.storage_error(error)))

    waiters = [threading.Thread(target=wait, args=(number,)) for number in range(0, 60, 6)]
    slots.submit()
    for waiter in waiters:
        waiter.start()
    reader.close()
    before = ctypes.string_at(slots.arena.address, slots.arena.capacity_bytes)
    for waiter in waiters:
        waiter.join(10)
        assert not waiter.is_alive()
    slots.residency.wait_idle()
    assert all(o == "resident" or o.endswith("cancelled: the reader is closed") for o in outcomes)
    assert ctypes.string_at(slots.arena.address, slots.arena.capacity_bytes) == before
    assert set(slots.residency.state) <= {2, 3}


def test_reads_submitted_after_close_fail_instead_of_hanging(path: Path) -> None:
    reader = Reader([path], [SIZE])
    slots = Slots(reader, random_ranges(3, 1))
    reader.close()
    slots.submit()
    with pytest.raises(ReadFailed) as caught:
        slots.residency.wait(0, 1)
    assert caught.value.errno == errno.ECANCELED


def test_a_reader_that_is_dropped_without_close_ends_its_reads_first(path: Path) -> None:
    residency = Residency(1, 40, 1, 40)
    arena = Arena(40 * 262_144)
    reader = FileReader(2)
    reader.open(str(path))
    reader.keep(arena)
    for number in range(40):
        residency.reserve(number, 0, number, [0], 1, False)
    reader.submit(residency, [(n, 0, n * 65_536, 262_144, 262_144, arena.address + n * 262_144) for n in range(40)])
    del reader
    residency.wait_idle()
    assert set(residency.state) <= {2, 3}
    arena.close()
