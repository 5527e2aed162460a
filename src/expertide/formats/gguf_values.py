"""The metadata values of a GGUF file: thirteen types, of which arrays and long strings are read only when asked for.

    value    scalar: its bytes                                 (types 0..7, 10..12)
             string: u64 length, then UTF-8 bytes              (type 8)
             array:  u32 item type, u64 count, then the items  (type 9; items may be arrays)

`read_value` goes past a value and bounds every count by the bytes that are left; `GgufMetadata` decodes it when asked.

Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from expertide.errors import FormatError, StorageError
from expertide.formats.header_reader import HeaderReader, shown, shown_path

UINT32, BOOL, STRING, ARRAY, UINT64 = 4, 7, 8, 9, 10

_SCALARS: Mapping[int, np.dtype[np.generic]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    UINT32: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("<u1"),
    UINT64: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

# The largest vocabularies in use bring 850,000 items in all (201,000 tokens, as many types, 446,000 merges). Walking
# this many strings takes 0.3 s, so even a file that claims them is refused or read in under a second.
MAX_ITEMS = 1 << 21
_MAX_DEPTH = 8
# Arrays up to this size are decoded at once, so that small ones (one number per layer) are checked with the header.
_EAGER_ARRAY_BYTES = 4096
# All values decoded at once, together: names, licences and a chat template have 20 KB. What exceeds this waits in the
# file, so that no header can fill the memory; small integers take eight times their bytes in a list.
_EAGER_BYTES = 4 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class _Unread:
    """A value still in the file: `value_type` as GGUF numbers it, its bytes at `offset`."""

    value_type: int
    offset: int
    nbytes: int


class GgufMetadata(Mapping[str, object]):
    """Key-values of one GGUF file. Large arrays are decoded at first access and then kept.

    Values are bool, int, float, str and (nested) lists of them.

    Raises, from access to a key:
        FormatError: the value's bytes are not what its type says (text that is not UTF-8).
        StorageError: the file is gone or became shorter.
    """

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self._path = path
        self._values = dict(values)
        self._decoded: dict[str, object] = {}

    def __getitem__(self, key: str) -> object:
        value = self._values[key]
        if not isinstance(value, _Unread):
            return value
        if key not in self._decoded:
            self._decoded[key] = self._read(key, value)
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def forget_decoded(self) -> None:
        """Give back the memory of arrays that were decoded; the next access reads them from the file again."""
        self._decoded.clear()

    def _read(self, key: str, unread: _Unread) -> object:
        name = f"{shown_path(self._path)}: {shown(key)}"
        try:
            with self._path.open("rb", buffering=0) as file:
                raw = _read_exactly(file.fileno(), unread.offset, unread.nbytes)
        except OSError as error:
            raise StorageError(f"{name}: {error.strerror}") from None
        if len(raw) != unread.nbytes:
            raise StorageError(
                f"{name}: got {len(raw):,} of {unread.nbytes:,} bytes at offset {unread.offset:,};"
                " the file became shorter since it was opened"
            )
        try:
            return _decode(raw, unread.value_type)
        except _ValueFault as fault:
            raise FormatError(f"{name}: {fault}") from None


class ValueReader:
    """Reads the values of one file and keeps count of what they cost."""

    def __init__(self, reader: HeaderReader) -> None:
        self._reader = reader
        self._num_walked = 0
        self._eager_bytes_left = _EAGER_BYTES

    def read_value(self, key: str) -> object:
        """The value at the reader's position: ready, or a note of where it lies.

        Raises:
            FormatError: unknown type, a count or length beyond the file, or a damaged scalar.
        """
        reader = self._reader
        what = f"metadata {shown(key)}"
        value_type = reader.u32(what)
        begin = reader.position
        if value_type == STRING:
            length = reader.u64(what)
            if self._can_spend(length):
                # Names and licences in other encodings are no reason to refuse a model: lossy, but readable.
                return reader.take(length, what).decode("utf-8", "replace")
            reader.skip(length, what)
        elif value_type == ARRAY:
            self._skip_array(what, depth=1)
        elif value_type in _SCALARS:
            try:
                return _decode(reader.take(_SCALARS[value_type].itemsize, what), value_type)
            except _ValueFault as fault:
                raise reader.fail(f"{what}: {fault}") from None
        else:
            raise reader.fail(f"{what}: value type {value_type} is unknown; GGUF has types 0 to 12")
        unread = _Unread(value_type, begin, reader.position - begin)
        if value_type == ARRAY and unread.nbytes <= _EAGER_ARRAY_BYTES and self._can_spend(unread.nbytes):
            try:
                return _decode(reader.peek(begin, unread.nbytes), value_type)
            except _ValueFault as fault:
                raise reader.fail(f"{what}: {fault}") from None
        return unread

    def _can_spend(self, num_bytes: int) -> bool:
        if num_bytes > self._eager_bytes_left:
            return False
        self._eager_bytes_left -= num_bytes
        return True

    def _skip_array(self, what: str, depth: int) -> None:
        reader = self._reader
        if depth > _MAX_DEPTH:
            raise reader.fail(f"{what}: arrays are nested more than {_MAX_DEPTH} deep")
        item_type = reader.u32(what)
        count = reader.u64(what)
        # The smallest item: a scalar of its size, a string's length field, an array's type and count.
        smallest = {STRING: 8, ARRAY: 12}.get(item_type) or (
            _SCALARS[item_type].itemsize if item_type in _SCALARS else 0
        )
        if not smallest:
            raise reader.fail(f"{what}: array of item type {item_type}, which is unknown; GGUF has types 0 to 12")
        if count * smallest > reader.num_left:
            raise reader.fail(
                f"{what}: claims {count:,} items of at least {smallest} bytes, but only {reader.num_left:,} bytes are"
                " left in the file"
            )
        if count > MAX_ITEMS:
            raise reader.fail(f"{what}: claims {count:,} items; at most {MAX_ITEMS:,} are accepted")
        if item_type in _SCALARS:
            reader.skip(count * smallest, what)
            return
        self._num_walked += count
        if self._num_walked > MAX_ITEMS:
            raise reader.fail(f"{what}: more than {MAX_ITEMS:,} strings in the metadata; it is damaged")
        if item_type == STRING:
            reader.skip_strings(count, what)
            return
        for _ in range(count):
            self._skip_array(what, depth + 1)


class _ValueFault(Exception):
    """What is wrong with a value; the caller knows file and key."""


def _decode(raw: bytes, value_type: int) -> object:
    if value_type == ARRAY:
        items, _ = _decode_array(raw, 0)
        return items
    if value_type == STRING:
        return raw[8:].decode("utf-8", "replace")
    return _decode_scalars(raw, value_type)[0]


def _decode_array(raw: bytes, at: int) -> tuple[list[object], int]:
    """The array whose type field is at `at`, and the offset after it. The bounds were checked by `_skip_array`, but the
    file may have changed since: every length is checked again."""
    if at + 12 > len(raw):
        raise _ValueFault("the array changed since the file was opened")
    (item_type,) = _U32.unpack_from(raw, at)
    (count,) = _U64.unpack_from(raw, at + 4)
    at += 12
    if item_type in _SCALARS:
        end = at + count * _SCALARS[item_type].itemsize
        if end > len(raw):
            raise _ValueFault("the array changed since the file was opened")
        return _decode_scalars(raw[at:end], item_type), end
    items: list[object] = []
    if item_type == STRING:
        for index in range(count):
            begin = at + 8
            end = begin + _U64.unpack_from(raw, at)[0] if begin <= len(raw) else begin
            if end > len(raw):
                raise _ValueFault("the array changed since the file was opened")
            try:
                items.append(raw[begin:end].decode())
            except UnicodeDecodeError as error:
                raise _ValueFault(f"item {index:,} is not UTF-8 text ({error.reason})") from None
            at = end
        return items, at
    if item_type != ARRAY:
        raise _ValueFault("the array changed since the file was opened")
    for _ in range(count):
        nested, at = _decode_array(raw, at)
        items.append(nested)
    return items, at


def _decode_scalars(raw: bytes, value_type: int) -> list[object]:
    numbers = np.frombuffer(raw, _SCALARS[value_type])
    if value_type != BOOL:
        return list(numbers.tolist())
    if numbers.size and numbers.max() > 1:
        raise _ValueFault(f"a bool holds {numbers.max()}; expected 0 or 1")
    return list(numbers.astype(bool).tolist())


def _read_exactly(fd: int, offset: int, num_bytes: int) -> bytes:
    pieces, got = [], 0
    while got < num_bytes and (piece := os.pread(fd, num_bytes - got, offset + got)):
        pieces.append(piece)
        got += len(piece)
    return b"".join(pieces)
