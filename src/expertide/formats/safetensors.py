"""safetensors files: one file, or a set of shards with an index, beside the config.json that gives the metadata.

    bytes 0..7     n, length of the header, u64 little-endian
    n bytes        JSON: {"name": {"dtype": "BF16", "shape": […], "data_offsets": [begin, end]}, …, "__metadata__": …}
    data           tensors; the offsets count from here

    model.safetensors.index.json: {"weight_map": {"name": "file", …}}

Promises: as for GGUF, a `ModelFiles` that exists is complete. Lenient where files in the world are: empty tensors, any
alignment of the data, bytes after the last tensor (a warning).

Source: the format description in the README of the safetensors project.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from expertide.errors import FormatError
from expertide.formats.header_reader import HeaderReader, shown, shown_path
from expertide.formats.places import check_no_overlap, occurs_twice
from expertide.formats.quants import QuantType, by_name
from expertide.formats.quants.opaque import OpaqueType
from expertide.formats.sniff import container_of
from expertide.formats.splits import check_all_present, split_name
from expertide.formats.tensors import FilePart, ModelFiles, TensorInfo
from expertide.units import MIB

# The reference implementation refuses longer headers.
_MAX_HEADER_BYTES = 100_000_000
_MAX_CONFIG_BYTES = 16 * MIB
_MAX_RANK = 8
_MAX_AXIS = 1 << 40
# Commas and brackets bound what the JSON parser builds (some 200 bytes each) before it builds it. A tensor needs about
# seven, so this admits 70,000 tensors in one file; the largest shards in use hold a few thousand.
_MAX_JSON_ITEMS = 500_000

_INDEX_SUFFIX = ".safetensors.index.json"

_DTYPES: Mapping[str, QuantType] = {
    **{name: by_name(name) for name in ("F32", "F16", "BF16")},
    **{
        name: OpaqueType(name, -1, block_size, block_bytes)
        for name, block_size, block_bytes in (
            ("BOOL", 1, 1),
            ("U8", 1, 1),
            ("I8", 1, 1),
            ("U16", 1, 2),
            ("I16", 1, 2),
            ("U32", 1, 4),
            ("I32", 1, 4),
            ("U64", 1, 8),
            ("I64", 1, 8),
            ("F64", 1, 8),
            ("C64", 1, 8),
            ("F8_E4M3", 1, 1),
            ("F8_E5M2", 1, 1),
            ("F8_E4M3FNUZ", 1, 1),
            ("F8_E5M2FNUZ", 1, 1),
            ("F8_E8M0", 1, 1),
            ("F4", 2, 1),
            ("F6_E2M3", 4, 3),
            ("F6_E3M2", 4, 3),
        )
    },
}


@dataclass(frozen=True)
class _Shard:
    """One file, checked on its own; offsets are absolute."""

    path: Path
    size: int
    layout: FilePart
    tensors: tuple[TensorInfo, ...]
    warnings: tuple[str, ...]


def open_safetensors(path: Path) -> ModelFiles:
    """The model in a directory, in one file, or in the set of shards that this file is part of.

    Raises:
        FormatError: damaged, incomplete, or no model.
        StorageError: a file cannot be opened or read.
    """
    directory = path if path.is_dir() else path.parent
    paths, weight_map, warnings = _set_of(path)
    metadata = _config(directory, is_required=path.is_dir())
    if not metadata:
        warnings.append(f"{path.name}: there is no config.json beside it, so nothing says which model this is")
    shards = [_read_shard(shard) for shard in paths]
    tensors: dict[str, TensorInfo] = {}
    for file_id, shard in enumerate(shards):
        for tensor in shard.tensors:
            if tensor.name in tensors:
                raise occurs_twice(tensor.name, shard.path, shards[tensors[tensor.name].file_id].path)
            tensors[tensor.name] = TensorInfo(
                tensor.name, tensor.shape, tensor.quant, file_id, tensor.offset, tensor.nbytes
            )
        warnings += shard.warnings
    _check_weight_map(weight_map, tensors, shards)
    return ModelFiles(
        container="safetensors",
        files=tuple(shard.path for shard in shards),
        file_sizes=tuple(shard.size for shard in shards),
        metadata=metadata,
        tensors=tensors,
        warnings=tuple(warnings),
        parts=tuple(shard.layout for shard in shards),
    )


# Which files


def _set_of(path: Path) -> tuple[tuple[Path, ...], dict[str, str], list[str]]:
    """The shards in order, the index's weight map (empty without an index), warnings."""
    if path.is_dir():
        return _set_in(path)
    index = _index_listing(path)
    if index is not None:
        weight_map = _read_index(index)
        return _shards_of(index, weight_map), weight_map, []
    name = split_name(path)
    if name is None:
        return (path,), {}, []
    check_all_present(name)
    return name.all_parts(), {}, [f"{path.name}: the set has no index; all its parts are read"]


def _set_in(directory: Path) -> tuple[tuple[Path, ...], dict[str, str], list[str]]:
    indexes = sorted(directory.glob(f"*{_INDEX_SUFFIX}"))
    if len(indexes) > 1:
        raise FormatError(
            f"{shown_path(directory)}: holds {len(indexes):,} index files"
            f" ({shown(', '.join(entry.name for entry in indexes))}); expected one"
        )
    if indexes:
        weight_map = _read_index(indexes[0])
        return _shards_of(indexes[0], weight_map), weight_map, []
    files = sorted(directory.glob("*.safetensors"))
    whole = directory / "model.safetensors"
    if whole in files:
        return (whole,), {}, []
    sets = {(name.stem, name.count): name for name in map(split_name, files) if name is not None}
    if len(sets) == 1:
        name = next(iter(sets.values()))
        check_all_present(name)
        return name.all_parts(), {}, [f"{directory.name}: the set has no index; all its parts are read"]
    if len(files) == 1:
        return (files[0],), {}, []
    raise FormatError(
        f"{shown_path(directory)}: holds {len(files):,} safetensors files without an index; give the path of one"
    )


def _index_listing(path: Path) -> Path | None:
    """The index beside this file that names it as a shard."""
    try:
        indexes = sorted(path.parent.glob(f"*{_INDEX_SUFFIX}"))
    except OSError:
        return None
    return next((index for index in indexes if path.name in _read_index(index).values()), None)


def _read_index(index: Path) -> dict[str, str]:
    content = _read_json(index, _MAX_HEADER_BYTES)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{shown_path(index)}: weight_map is missing or empty; expected tensor names and file names")
    for name, file_name in weight_map.items():
        if (
            not isinstance(file_name, str)
            or not file_name.endswith(".safetensors")
            or Path(file_name).name != file_name
        ):
            raise FormatError(
                f"{shown_path(index)}: weight_map gives {shown(name)} the file {shown(file_name)!r}; expected the name"
                " of a .safetensors file in the same folder"
            )
    return weight_map


def _shards_of(index: Path, weight_map: Mapping[str, str]) -> tuple[Path, ...]:
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not _is_there(index.parent / name)]
    if missing:
        listed = ", ".join(shown(name) for name in missing[:8])
        more = f" and {len(missing) - 8:,} more" if len(missing) > 8 else ""
        raise FormatError(
            f"{shown_path(index)}: {len(missing):,} of {len(names):,} shards are missing: {listed}{more}"
            " (expected in the same folder)"
        )
    return tuple(index.parent / name for name in names)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _check_weight_map(weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo], shards: list[_Shard]) -> None:
    for name, file_name in weight_map.items():
        tensor = tensors.get(name)
        if tensor is None or shards[tensor.file_id].path.name != file_name:
            raise FormatError(
                f"{shown_path(shards[0].path.parent)}: the index says tensor {shown(name)} is in {shown(file_name)},"
                " which does not hold it; download this shard and the index again"
            )


def _config(directory: Path, *, is_required: bool) -> dict[str, object]:
    path = directory / "config.json"
    if not _is_there(path):
        if is_required:
            raise FormatError(f"{shown_path(directory)}: there are safetensors files, but no config.json beside them")
        return {}
    return _read_json(path, _MAX_CONFIG_BYTES)


# What is in one file


def _read_shard(path: Path) -> _Shard:
    if container_of(path) != "safetensors":
        raise FormatError(f"{shown_path(path)}: this is a GGUF file; expected safetensors")
    with HeaderReader(path) as reader:
        length = reader.u64("the header length")
        if length > min(_MAX_HEADER_BYTES, reader.num_left):
            raise reader.fail(
                f"the header claims {length:,} bytes; the file has {reader.size:,} and headers at most"
                f" {_MAX_HEADER_BYTES:,} (truncated or damaged; download this shard again)"
            )
        header = _parse(reader.take(length, "the header"), path)
        header.pop("__metadata__", None)
        data_start = reader.position
        tensors = tuple(_read_tensor(reader, name, entry, data_start) for name, entry in header.items())
        check_no_overlap(reader, tensors)
        warnings = _check_rest(reader, tensors, data_start)
        layout = FilePart(0, 1, data_start, len(tensors), 0)
        return _Shard(path, reader.size, layout, tensors, warnings)


def _read_tensor(reader: HeaderReader, name: str, entry: object, data_start: int) -> TensorInfo:
    what = f"tensor {shown(name)}"
    if not isinstance(entry, dict):
        raise reader.fail(f"{what}: expected an object with dtype, shape and data_offsets")
    dtype = entry.get("dtype")
    quant = _DTYPES.get(dtype) if isinstance(dtype, str) else None
    if quant is None:
        raise reader.fail(f"{what}: dtype {shown(dtype)!r} is unknown")
    shape = _sizes(entry.get("shape"), _MAX_AXIS)
    if shape is None or len(shape) > _MAX_RANK:
        raise reader.fail(
            f"{what}: shape {shown(entry.get('shape'))}; expected at most {_MAX_RANK} whole numbers, none above"
            f" {_MAX_AXIS:,}"
        )
    offsets = _sizes(entry.get("data_offsets"), reader.size)
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise reader.fail(
            f"{what}: data_offsets {shown(entry.get('data_offsets'))}; expected begin and end within the file's"
            f" {reader.size:,} bytes (truncated or damaged; download this shard again)"
        )
    begin, end = offsets
    try:
        expected = quant.row_bytes(math.prod(shape))
    except FormatError as error:
        raise reader.fail(f"{what}: {error}") from None
    if end - begin != expected:
        raise reader.fail(
            f"{what}: data_offsets give it {end - begin:,} bytes, but shape {shown(list(shape))} in {quant} takes"
            f" {expected:,}"
        )
    if data_start + end > reader.size:
        raise reader.fail(
            f"{what} ends at {data_start + end:,}, but the file ends at {reader.size:,} (truncated or unfinished;"
            " download this shard again)"
        )
    return TensorInfo(name, shape, quant, 0, data_start + begin, expected)


def _sizes(value: object, most: int) -> tuple[int, ...] | None:
    """A JSON list of whole numbers from 0 to `most`; None for anything else."""
    if not isinstance(value, list):
        return None
    for size in value:
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= most:
            return None
    return tuple(value)


def _check_rest(reader: HeaderReader, tensors: tuple[TensorInfo, ...], data_start: int) -> tuple[str, ...]:
    data_end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=data_start)
    if reader.size > data_end:
        return (f"{reader.path.name}: {reader.size - data_end:,} bytes after the last tensor are not used",)
    return ()


# JSON that may be hostile


def _read_json(path: Path, max_bytes: int) -> dict[str, object]:
    with HeaderReader(path) as reader:
        if reader.size > max_bytes:
            raise reader.fail(f"{reader.size:,} bytes; expected at most {max_bytes:,}")
        if not reader.size:
            raise reader.fail("the file is empty: download it again")
        return _parse(reader.take(reader.size, "the JSON text"), path)


def _parse(raw: bytes, path: Path) -> dict[str, object]:
    num_items = sum(raw.count(mark) for mark in (b",", b"[", b"{"))
    if num_items > _MAX_JSON_ITEMS:
        raise FormatError(
            f"{shown_path(path)}: JSON with {num_items:,} items; at most {_MAX_JSON_ITEMS:,} are accepted"
        )
    try:
        content = json.loads(raw.decode(), object_pairs_hook=_unique)
    except _DuplicateKey as duplicate:
        raise FormatError(f"{shown_path(path)}: the JSON names {shown(duplicate)} twice") from None
    except RecursionError:
        raise FormatError(f"{shown_path(path)}: the JSON is nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{shown_path(path)}: not valid JSON: {shown(error)}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{shown_path(path)}: the JSON is a {type(content).__name__}; expected an object")
    return content


class _DuplicateKey(Exception):
    pass


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return found
