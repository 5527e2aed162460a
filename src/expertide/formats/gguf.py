"""GGUF files: header, metadata, tensor directory; split sets as one model. Nothing is believed before it is checked.

    bytes 0..3    "GGUF"
    u32           version, 2 or 3
    u64           number of tensors
    u64           number of metadata entries
    entries       key: u64 length, UTF-8 bytes; u32 value type; the value            (gguf_values.py)
    directory     per tensor: name (u64 length, bytes); u32 rank 1..4; u64 sizes, fastest axis first;
                  u32 type; u64 offset from the data start
    padding       to a multiple of `general.alignment` (32 when absent): the data start
    data          tensors, each at a multiple of the alignment

Promises: a `ModelFiles` that exists is complete: every tensor lies inside its file, none overlaps another, no name
occurs twice, all parts of the set are there. Does not know what any model needs.

Source: docs/gguf.md of ggml; `split.*` keys from tools/gguf-split of llama.cpp.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

from expertide.errors import FormatError, UnsupportedError
from expertide.formats.gguf_values import GgufMetadata, ValueReader
from expertide.formats.header_reader import HeaderReader, shown, shown_path
from expertide.formats.metadata import Metadata
from expertide.formats.places import check_no_overlap, occurs_twice
from expertide.formats.quants import QuantType, by_id
from expertide.formats.quants.opaque import GGML_OPAQUE
from expertide.formats.sniff import GGUF_MAGIC, container_of, piece_hint
from expertide.formats.splits import SplitName, check_all_present, split_name
from expertide.formats.tensors import FilePart, ModelFiles, TensorInfo
from expertide.units import round_up

_DEFAULT_ALIGNMENT = 32
_MAX_RANK = 4
# The longest names in use have 64 bytes.
_MAX_NAME_BYTES = 256
# An axis of 2**40 values is beyond every model; the product of four axes is checked against the file all the same.
_MAX_AXIS = 1 << 40
# A trillion-parameter model with one tensor per expert and matrix has about 70,000 tensors.
_MAX_TENSORS = 1 << 17
_MAX_METADATA = 1 << 16
# Smallest possible directory entry: name length, rank, one axis, type, offset. Smallest metadata entry: key length,
# value type, one byte.
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_HEADER_BYTES = 24


@dataclass(frozen=True)
class _Part:
    """One file, checked on its own."""

    path: Path
    size: int
    layout: FilePart
    metadata: GgufMetadata
    tensors: tuple[TensorInfo, ...]
    data_end: int
    warnings: tuple[str, ...]

    def split_int(self, key: str, default: int) -> int:
        return Metadata(self.metadata, str(self.path)).int(f"split.{key}", default)


def open_gguf(path: Path) -> ModelFiles:
    """The model in this file, or in the split set that this file is any part of.

    Raises:
        FormatError: the content is damaged, incomplete, or not this container.
        StorageError: a file cannot be opened or read.
    """
    given = _read_part(path)
    name = split_name(path)
    count = given.split_int("count", 1)
    warnings: list[str] = []
    if count <= 1:
        if name is not None:
            warnings.append(f"{path.name} is named like part {name.number} of {name.count}, but is not split")
        return _joined([given], warnings)
    if name is None:
        raise FormatError(_renamed(given, count))
    if name.count != count:
        raise FormatError(
            f"{shown_path(path)}: the name says {name.count} parts, split.count says {count}; rename the files back"
        )
    check_all_present(name)
    return _joined(_read_set(given, name), warnings)


def _read_set(given: _Part, name: SplitName) -> list[_Part]:
    """All parts in order, each checked to be the part its name says."""
    parts = []
    for number, path in enumerate(name.all_parts(), 1):
        if number == name.number:
            part = given
        else:
            container_of(path)
            part = _read_part(path)
        found_count, found_number = part.split_int("count", 1), part.split_int("no", 0) + 1
        if found_count != name.count or found_number != number:
            raise FormatError(
                f"{shown_path(path)}: its metadata says part {found_number} of {found_count}, its name part {number} of"
                f" {name.count}"
            )
        parts.append(part)
    total = parts[0].split_int("tensors.count", -1) if "split.tensors.count" in parts[0].metadata else None
    found = sum(len(part.tensors) for part in parts)
    if total is not None and total != found:
        raise FormatError(
            f"{shown_path(parts[0].path)}: split.tensors.count says {total:,} tensors, the {name.count} parts hold"
            f" {found:,}; some part belongs to another model"
        )
    return parts


def _joined(parts: list[_Part], warnings: list[str]) -> ModelFiles:
    """One model from its parts; metadata is the first part's."""
    tensors: dict[str, TensorInfo] = {}
    for file_id, part in enumerate(parts):
        for tensor in part.tensors:
            if tensor.name in tensors:
                raise occurs_twice(tensor.name, part.path, parts[tensors[tensor.name].file_id].path)
            tensors[tensor.name] = _in_file(tensor, file_id)
        warnings += part.warnings
    return ModelFiles(
        container="gguf",
        files=tuple(part.path for part in parts),
        file_sizes=tuple(part.size for part in parts),
        metadata=parts[0].metadata,
        tensors=tensors,
        warnings=tuple(warnings),
        parts=tuple(part.layout for part in parts),
    )


def _in_file(tensor: TensorInfo, file_id: int) -> TensorInfo:
    if tensor.file_id == file_id:
        return tensor
    return TensorInfo(tensor.name, tensor.shape, tensor.quant, file_id, tensor.offset, tensor.nbytes)


def _renamed(part: _Part, count: int) -> str:
    number = part.split_int("no", 0) + 1
    return (
        f"{shown_path(part.path)}: this is part {number} of {count} of a split model, but its name does not say so, and"
        f" the other parts cannot be found: name them NAME-{number:05d}-of-{count:05d}.gguf and so on, in one folder"
    )


def _read_part(path: Path) -> _Part:
    with HeaderReader(path) as reader:
        version, num_tensors, num_metadata = _read_counts(reader)
        metadata = _read_metadata(reader, num_metadata)
        alignment = _alignment(metadata, path)
        directory = [_read_tensor(reader) for _ in range(num_tensors)]
        data_start = round_up(reader.position, alignment)
        tensors = tuple(_placed(reader, entry, data_start, alignment) for entry in directory)
        data_end = _check_places(reader, tensors, data_start, _incomplete_hint(path, metadata))
        warnings = _check_rest(reader, data_end, alignment)
        return _Part(
            path=path,
            size=reader.size,
            layout=FilePart(version, alignment, data_start, num_tensors, num_metadata),
            metadata=metadata,
            tensors=tensors,
            data_end=data_end,
            warnings=warnings,
        )


def _read_counts(reader: HeaderReader) -> tuple[int, int, int]:
    reader.need(_MIN_HEADER_BYTES, "the GGUF header")
    magic = reader.take(4, "the GGUF header")
    if magic != GGUF_MAGIC:
        raise reader.fail(f"it begins with bytes {magic.hex(' ')}; expected GGUF (47 47 55 46)")
    version = reader.u32("the GGUF version")
    if version & 0xFFFF == 0 and version:
        raise reader.fail("this is a big-endian GGUF file; only little-endian files are read")
    if version not in (2, 3):
        raise reader.fail(f"GGUF version {version:,}; versions 2 and 3 are read")
    num_tensors = reader.u64("the number of tensors")
    num_metadata = reader.u64("the number of metadata entries")
    for count, smallest, most, what in (
        (num_tensors, _MIN_TENSOR_BYTES, _MAX_TENSORS, "tensors"),
        (num_metadata, _MIN_METADATA_BYTES, _MAX_METADATA, "metadata entries"),
    ):
        if count * smallest > reader.num_left:
            raise reader.fail(
                f"the header claims {count:,} {what}, but only {reader.num_left:,} bytes follow (truncated or damaged)"
            )
        if count > most:
            raise reader.fail(f"the header claims {count:,} {what}; at most {most:,} are accepted")
    return version, num_tensors, num_metadata


def _read_metadata(reader: HeaderReader, num_metadata: int) -> GgufMetadata:
    values: dict[str, object] = {}
    value_reader = ValueReader(reader)
    for index in range(num_metadata):
        key = _read_name(reader, f"key of metadata entry {index:,}")
        if key in values:
            raise reader.fail(f"metadata {shown(key)} occurs twice")
        values[key] = value_reader.read_value(key)
    return GgufMetadata(reader.path, values)


def _alignment(metadata: GgufMetadata, path: Path) -> int:
    known = Metadata(metadata, str(path))
    alignment = known.int("general.alignment", _DEFAULT_ALIGNMENT)
    if alignment < 1 or alignment & (alignment - 1):
        raise known.fail("general.alignment", f"found {alignment:,}, expected a power of two")
    return alignment


def _read_name(reader: HeaderReader, what: str) -> str:
    length = reader.u64(what)
    if not 1 <= length <= _MAX_NAME_BYTES:
        raise reader.fail(f"{what} has {length:,} bytes; expected 1 to {_MAX_NAME_BYTES:,}")
    try:
        return reader.take(length, what).decode()
    except UnicodeDecodeError:
        raise reader.fail(f"{what} is not UTF-8 text") from None


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of the directory, with the offset not yet checked."""

    name: str
    shape: tuple[int, ...]
    quant: QuantType
    nbytes: int
    offset: int


def _read_tensor(reader: HeaderReader) -> _Entry:
    name = _read_name(reader, "a tensor's name")
    what = f"tensor {shown(name)}"
    rank = reader.u32(what)
    if not 1 <= rank <= _MAX_RANK:
        raise reader.fail(f"{what} has rank {rank:,}; expected 1 to {_MAX_RANK}")
    *sizes, type_id, offset = struct.unpack(f"<{rank}QIQ", reader.take(8 * rank + 12, what))
    shape = tuple(reversed(sizes))
    for size in shape:
        if not 1 <= size <= _MAX_AXIS:
            raise reader.fail(f"{what}: an axis has {size:,} values; expected 1 to {_MAX_AXIS:,}")
    quant = _type_of(reader, what, type_id)
    try:
        row_bytes = quant.row_bytes(shape[-1])
    except FormatError as error:
        raise reader.fail(f"{what}: {error}") from None
    return _Entry(name, shape, quant, math.prod(shape[:-1]) * row_bytes, offset)


def _type_of(reader: HeaderReader, what: str, type_id: int) -> QuantType:
    try:
        return by_id(type_id)
    except UnsupportedError:
        pass
    # Only what has no decoder: a type that gets one needs no second edit.
    opaque = GGML_OPAQUE.get(type_id)
    if opaque is None:
        raise reader.fail(
            f"{what} has type {type_id:,}, which this version does not know (a newer file, or a damaged one)"
        )
    return opaque


def _placed(reader: HeaderReader, entry: _Entry, data_start: int, alignment: int) -> TensorInfo:
    if entry.offset % alignment:
        raise reader.fail(
            f"tensor {shown(entry.name)} is at offset {entry.offset:,}, not a multiple of the alignment {alignment:,}"
        )
    return TensorInfo(entry.name, entry.shape, entry.quant, 0, data_start + entry.offset, entry.nbytes)


def _incomplete_hint(path: Path, metadata: GgufMetadata) -> str:
    if "split.count" not in metadata and split_name(path) is not None:
        return "one file cut into raw pieces? Then join all of them in order with `cat` and open the result"
    return piece_hint(path) or "truncated or unfinished: download it again"


def _check_places(reader: HeaderReader, tensors: tuple[TensorInfo, ...], data_start: int, hint: str) -> int:
    """Every tensor inside the file, none over another, no name twice. Returns the end of the last one."""
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise reader.fail(f"tensor {shown(tensor.name)} occurs twice in the directory")
        names.add(tensor.name)
    data_end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=min(data_start, reader.size))
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset + tensor.nbytes > reader.size:
            raise reader.fail(
                f"tensor {shown(tensor.name)} ends at {tensor.offset + tensor.nbytes:,}, but the file ends at"
                f" {reader.size:,}; all tensors together need {data_end:,} bytes ({hint})"
            )
    check_no_overlap(reader, tensors)
    return data_end


def _check_rest(reader: HeaderReader, data_end: int, alignment: int) -> tuple[str, ...]:
    """What follows the last tensor: padding, or something worth a word."""
    end = round_up(data_end, alignment)
    for begin in {data_end, end}:
        if begin < reader.size and reader.peek(begin, 4) == GGUF_MAGIC:
            raise reader.fail(
                f"another GGUF file begins at offset {begin:,}: parts of a split model were joined with `cat`; keep the"
                " parts as separate files with their own names"
            )
    if reader.size > end:
        return (f"{reader.path.name}: {reader.size - end:,} bytes after the last tensor are not used",)
    return ()
