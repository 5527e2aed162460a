"""Model files made on the spot: sound ones, and a table of the ways in which files in the world are broken.

`gguf_bytes` writes whatever it is told, true or not; the writer of the `gguf` package would refuse most of these.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_SCALARS = {
    U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", I64: "<q",
    F64: "<d",
}  # fmt: skip


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(value_type: int, content: object) -> bytes:
    """Payload of a metadata value, without its type. An array is (item type, [items])."""
    if value_type == STRING:
        assert isinstance(content, str | bytes)
        return text(content)
    if value_type == ARRAY:
        assert isinstance(content, tuple)
        item_type, items = content
        return struct.pack("<IQ", item_type, len(items)) + b"".join(value(item_type, item) for item in items)
    return struct.pack(_SCALARS[value_type], content)


def entry(key: str, value_type: int, content: object) -> bytes:
    return text(key) + struct.pack("<I", value_type) + value(value_type, content)


def tensor(name: str | bytes, sizes: Sequence[int], type_id: int, offset: int) -> bytes:
    """A directory line; `sizes` fastest axis first, as in the file."""
    return (
        text(name) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
        + struct.pack("<IQ", type_id, offset)
    )  # fmt: skip


ENTRIES = (entry("general.architecture", STRING, "deepseek2"), entry("general.name", STRING, "tiny"))
TENSORS = (tensor("token_embd.weight", (64, 4), 0, 0), tensor("blk.0.ffn_up.weight", (256, 2), 12, 1024))
DATA_BYTES = 1024 + 2 * 144


def gguf_bytes(
    *,
    entries: Sequence[bytes] = ENTRIES,
    tensors: Sequence[bytes] = TENSORS,
    data_bytes: int = DATA_BYTES,
    version: int = 3,
    num_entries: int | None = None,
    num_tensors: int | None = None,
    order: str = "<",
    alignment: int = 32,
) -> bytes:
    head = b"GGUF" + struct.pack(
        order + "IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    front = head + b"".join(entries) + b"".join(tensors)
    return front + bytes(-len(front) % alignment) + bytes(data_bytes)


def split_part(number: int, count: int, num_total: int, tensors: Sequence[bytes], data_bytes: int) -> bytes:
    """Part `number` (from 1) of a set."""
    own = (
        entry("split.no", U16, number - 1),
        entry("split.count", U16, count),
        entry("split.tensors.count", I32, num_total),
    )
    return gguf_bytes(entries=own + (ENTRIES if number == 1 else ()), tensors=tensors, data_bytes=data_bytes)


def write_split_set(folder: Path, stem: str = "model", count: int = 3, num_total: int | None = None) -> list[Path]:
    """A sound set with one tensor of 4 x 64 float32 per part."""
    paths = []
    for number in range(1, count + 1):
        path = folder / f"{stem}-{number:05d}-of-{count:05d}.gguf"
        tensors = (tensor(f"blk.{number - 1}.ffn_norm.weight", (64, 4), 0, 0),)
        path.write_bytes(split_part(number, count, count if num_total is None else num_total, tensors, 1024))
        paths.append(path)
    return paths


def safetensors_bytes(header: object, data_bytes: int = 0, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data_bytes)


def f32(shape: Sequence[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}


def write_shards(folder: Path, *, index: bool = True, config: bool = True) -> list[Path]:
    """A sound set of two shards with one tensor each."""
    paths, weight_map = [], {}
    for number in (1, 2):
        path = folder / f"model-{number:05d}-of-00002.safetensors"
        path.write_bytes(safetensors_bytes({f"layer.{number}": f32((2, 3), 0, 24)}, 24))
        weight_map[f"layer.{number}"] = path.name
        paths.append(path)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if config:
        (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v2", "num_hidden_layers": 2}))
    return paths


@dataclass(frozen=True)
class Broken:
    """One row of the table.

    Attributes:
        make: writes it into an empty folder and returns the path to open.
        says: regular expression that the error message must contain.
        is_everyday: also run through the command line (a process each).
    """

    name: str
    make: Callable[[Path], Path]
    says: str
    is_everyday: bool = False


def _file(content: bytes | Callable[[], bytes], name: str = "model.gguf") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content())
        return path

    return make


def _with_entry(*entries: bytes) -> Callable[[Path], Path]:
    return _file(gguf_bytes(entries=(*ENTRIES, *entries)))


def _with_tensor(*tensors: bytes, data_bytes: int = DATA_BYTES) -> Callable[[Path], Path]:
    return _file(gguf_bytes(tensors=(*TENSORS, *tensors), data_bytes=data_bytes))


def _nested(depth: int) -> bytes:
    levels = struct.pack("<IQ", ARRAY, 1) * (depth - 1) + struct.pack("<IQ", U8, 1) + b"\0"
    return text("deep") + struct.pack("<I", ARRAY) + levels


def _claim(key: str, item_type: int, count: int) -> bytes:
    return text(key) + struct.pack("<IIQ", ARRAY, item_type, count)


def _sparse(content: bytes, size: int, name: str = "model.gguf") -> Callable[[Path], Path]:
    """A file that claims `size` bytes on disk without using them."""

    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content)
        os.truncate(path, size)
        return path

    return make


def _missing_part(folder: Path) -> Path:
    paths = write_split_set(folder, count=4)
    paths[1].unlink()
    paths[3].unlink()
    return paths[2]


def _truncated_part(folder: Path) -> Path:
    paths = write_split_set(folder)
    os.truncate(paths[1], paths[1].stat().st_size - 1)
    return paths[0]


def _foreign_part(folder: Path) -> Path:
    paths = write_split_set(folder)
    paths[1].write_bytes(split_part(1, 3, 3, (), 0))
    return paths[0]


def _duplicate_across_parts(folder: Path) -> Path:
    paths = write_split_set(folder)
    paths[2].write_bytes(split_part(3, 3, 3, (tensor("blk.0.ffn_norm.weight", (64, 4), 0, 0),), 1024))
    return paths[0]


def _miscounted_set(folder: Path) -> Path:
    return write_split_set(folder, num_total=7)[0]


def _renamed_part(folder: Path) -> Path:
    return write_split_set(folder)[1].rename(folder / "download.gguf")


def _other_count(folder: Path) -> Path:
    path = write_split_set(folder)[0]
    return path.rename(folder / "model-00001-of-00005.gguf")


def _joined_parts(folder: Path) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(b"".join(part.read_bytes() for part in write_split_set(folder)))
    return path


def _raw_pieces(folder: Path, opened: int) -> Path:
    whole = gguf_bytes()
    names = [folder / f"model-{number:05d}-of-00002.gguf" for number in (1, 2)]
    names[0].write_bytes(whole[:700])
    names[1].write_bytes(whole[700:])
    return names[opened]


def _directory(*files: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for name in files:
            (folder / name).write_bytes(b"x")
        return folder

    return make


def _two_models(folder: Path) -> Path:
    (folder / "a.gguf").write_bytes(gguf_bytes())
    (folder / "b.gguf").write_bytes(gguf_bytes())
    return folder


def _dangling_link(folder: Path) -> Path:
    (folder / "model.gguf").symlink_to(folder / "blob")
    return folder / "model.gguf"


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "model.gguf")
    return folder / "model.gguf"


def _missing_shard(folder: Path) -> Path:
    write_shards(folder)[1].unlink()
    return folder


def _lone_shard(folder: Path) -> Path:
    first, second = write_shards(folder, index=False)
    first.unlink()
    return second


def _lying_index(folder: Path) -> Path:
    write_shards(folder)
    name = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"layer.9": name}}))
    return folder


def _index_outside(folder: Path) -> Path:
    write_shards(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    return folder


def _duplicate_across_shards(folder: Path) -> Path:
    for path in write_shards(folder, index=False):
        path.write_bytes(safetensors_bytes({"same": f32((2, 3), 0, 24)}, 24))
    return folder


def _shards_without_config(folder: Path) -> Path:
    write_shards(folder, config=False)
    return folder


def _shard_is_html(folder: Path) -> Path:
    write_shards(folder)[0].write_bytes(b"<!DOCTYPE html><html>")
    return folder


def _safetensors(header: object, data_bytes: int = 0, length: int | None = None) -> Callable[[Path], Path]:
    return _file(safetensors_bytes(header, data_bytes, length), "model.safetensors")


_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 10364416\n"
_GIB = 1 << 30

BROKEN: tuple[Broken, ...] = (
    # No model at all.
    Broken("missing file", lambda folder: folder / "model.gguf", "no such file", True),
    Broken("empty file", _file(b""), "the file is empty", True),
    Broken("HTML page", _file(b"\n<!DOCTYPE html>\n<html><body>404</body></html>"), "HTML page", True),
    Broken("LFS pointer", _file(_LFS), "Git LFS pointer", True),
    Broken("hub's error text", _file(b"Entry not found"), "a text beginning with 'Entry not found'", True),
    Broken("XML error", _file(b"<?xml version='1.0'?><Error/>"), "an XML document"),
    Broken("zeros", _file(bytes(100_000)), "begins with zeros", True),
    Broken("zip archive", _file(b"PK\x03\x04rest"), "zip archive or a PyTorch checkpoint"),
    Broken("old GGML file", _file(b"tjgg" + bytes(100)), "older than GGUF"),
    Broken("noise", _file(b"\x91\x02\xf3\x44" * 100), r"begins with bytes 91 02 f3 44 .*expected GGUF", True),
    Broken("raw piece by name", _file(b"\x91\x02" * 50, "m.gguf.part2of3"), "join all pieces in order with `cat`"),
    Broken("unfinished download", _file(b"\x91\x02" * 50, "m.gguf.incomplete"), "unfinished download"),
    Broken("empty directory", lambda folder: folder, "a directory without a model; it is empty", True),
    Broken("directory with something else", _directory("notes.txt"), "a directory without a model; expected", True),
    Broken("directory with a PyTorch checkpoint", _directory("pytorch_model.bin"), "holds a PyTorch checkpoint"),
    Broken("directory with two models", _two_models, "holds 2 models, give one of them: a.gguf, b.gguf"),
    Broken("dangling link", _dangling_link, "a link to .*blob, which is gone"),
    Broken("pipe", _pipe, "a device, pipe or socket", True),
    # The header.
    Broken("3 bytes", _file(b"GGU"), "a text beginning with 'GGU'"),
    Broken(
        "cut after the magic", _file(b"GGUF"), "GGUF header needs 24 bytes at offset 0, but the file ends at 4", True
    ),
    Broken("version 1", _file(gguf_bytes(version=1)), "GGUF version 1; versions 2 and 3 are read"),
    Broken("version 9", _file(gguf_bytes(version=9)), "GGUF version 9; versions 2 and 3 are read", True),
    Broken("big-endian", _file(gguf_bytes(order=">")), "big-endian GGUF file; only little-endian", True),
    Broken(
        "huge tensor count", _file(gguf_bytes(num_tensors=2**63)), r"claims 9,223,372,036,854,775,808 tensors", True
    ),
    Broken("huge entry count", _file(gguf_bytes(num_entries=2**40)), r"claims 1,099,511,627,776 metadata entries"),
    Broken("count beyond reason in a big file", _sparse(gguf_bytes(num_tensors=2**20), _GIB), "at most 131,072"),
    Broken("one tensor too many", _file(gguf_bytes(num_tensors=3, data_bytes=0)), "truncated or damaged|has 0 bytes"),
    # Metadata.
    Broken(
        "cut in the metadata",
        _file(gguf_bytes(entries=(entry("general.name", STRING, "n" * 500),))[:300]),
        "metadata general.name needs 500 bytes at offset 56, but the file ends at 300",
        True,
    ),
    Broken(
        "unknown value type",
        _with_entry(text("x") + struct.pack("<I", 13)),
        "metadata x: value type 13 is unknown",
        True,
    ),
    Broken("unknown item type", _with_entry(_claim("x", 99, 0)), "metadata x: array of item type 99"),
    Broken(
        "array longer than the file",
        _with_entry(_claim("x", STRING, 2**61)),
        "claims 2,305,843,009,213,693,952 items",
        True,
    ),
    Broken("array of numbers longer than the file", _with_entry(_claim("x", F64, 2**60)), "items of at least 8 bytes"),
    Broken(
        "a billion empty strings",
        _sparse(gguf_bytes(entries=(_claim("x", STRING, 2**30),), tensors=()), 12 * _GIB),
        "claims 1,073,741,824 items; at most 2,097,152 are accepted",
        True,
    ),
    Broken(
        "a string of gigabytes",
        _sparse(gguf_bytes(entries=(text("x") + struct.pack("<IQ", STRING, 8 * _GIB),), tensors=()), 12 * _GIB),
        "larger than 256 MiB",
        True,
    ),
    Broken(
        "string longer than the file",
        _with_entry(text("x") + struct.pack("<IQ", STRING, 2**63)),
        "metadata x needs 9,223",
    ),
    Broken("arrays without end", _with_entry(_nested(5000)), "nested more than 8 deep", True),
    Broken("bool of 7", _with_entry(text("x") + struct.pack("<IB", BOOL, 7)), "a bool holds 7; expected 0 or 1"),
    Broken("duplicate key", _with_entry(ENTRIES[1]), "metadata general.name occurs twice", True),
    Broken("key without a name", _with_entry(entry("", U8, 1)), "key of metadata entry 2 has 0 bytes"),
    Broken("key that is no text", _with_entry(text(b"\xff\xfe") + struct.pack("<IB", U8, 1)), "entry 2 is not UTF-8"),
    Broken("alignment of 0", _with_entry(entry("general.alignment", U32, 0)), "found 0, expected a power of two"),
    Broken(
        "alignment of 48", _with_entry(entry("general.alignment", U32, 48)), "found 48, expected a power of two", True
    ),
    Broken(
        "alignment as text",
        _with_entry(entry("general.alignment", STRING, "32")),
        "found the text '32', expected a whole",
    ),
    # The tensor directory.
    Broken("cut in the data", _file(gguf_bytes()[:-1]), r"blk\.0\.ffn_up\.weight ends at .*but the file ends at", True),
    Broken("cut in the directory", _file(gguf_bytes()[:150]), "but the file ends at 150", True),
    Broken("rank 5", _with_tensor(tensor("x", (1,) * 5, 0, 1312)), "tensor x has rank 5; expected 1 to 4", True),
    Broken("rank 0", _with_tensor(tensor("x", (), 0, 1312)), "tensor x has rank 0"),
    Broken("rank 4 billion", _with_tensor(text("x") + b"\xff" * 4), "tensor x has rank 4,294,967,295"),
    Broken("axis of 0", _with_tensor(tensor("x", (4, 0), 0, 1312)), "an axis has 0 values"),
    Broken(
        "product that wraps to 0 in 64 bits",
        _with_tensor(tensor("x", (2**32, 2**32), 0, 1312)),
        "tensor x ends at 73,786,976,294,838",
        True,
    ),
    Broken(
        "offset that wraps in 64 bits", _with_tensor(tensor("x", (8,), 0, 2**64 - 32)), "tensor x ends at 18,446,744"
    ),
    Broken(
        "row of half a block", _with_tensor(tensor("x", (128, 2), 12, 1312)), "128 values do not divide into Q4_K", True
    ),
    Broken("unknown tensor type", _with_tensor(tensor("x", (32,), 4242, 1312)), "tensor x has type 4,242", True),
    Broken("removed tensor type", _with_tensor(tensor("x", (32,), 4, 1312)), "tensor x has type 4, which"),
    Broken("duplicate tensor", _with_tensor(TENSORS[0]), "tensor token_embd.weight occurs twice", True),
    Broken("overlapping tensors", _with_tensor(tensor("x", (8,), 0, 512)), "token_embd.weight and x overlap", True),
    Broken(
        "unaligned tensor", _with_tensor(tensor("x", (8,), 0, 1313)), "offset 1,313, not a multiple of the alignment 32"
    ),
    Broken("tensor without a name", _with_tensor(tensor("", (8,), 0, 1312)), "tensor's name has 0 bytes"),
    Broken("name that is no text", _with_tensor(tensor(b"\xff", (8,), 0, 1312)), "name is not UTF-8"),
    # Split sets.
    Broken(
        "missing parts", _missing_part, "2 of 4 parts .* missing: model-00002-of-00004.gguf, model-00004-of-00004", True
    ),
    Broken("truncated part", _truncated_part, r"model-00002-of-00003\.gguf: tensor blk\.1\.ffn_norm", True),
    Broken("part of another place", _foreign_part, "metadata says part 1 of 3, its name part 2 of 3"),
    Broken(
        "duplicate across parts", _duplicate_across_parts, "00003-of-00003.gguf: .*occurs twice: here and in .*00001"
    ),
    Broken("set with tensors missing", _miscounted_set, "says 7 tensors, the 3 parts hold 3", True),
    Broken("renamed part", _renamed_part, "this is part 2 of 3 of a split model, but its name does not say so"),
    Broken("name with another count", _other_count, "the name says 5 parts, split.count says 3"),
    Broken("part 7 of 5", _file(gguf_bytes(), "m-00007-of-00005.gguf"), "the name says part 7 of 5"),
    Broken("parts joined with cat", _joined_parts, "joined with `cat`; keep the parts as separate files"),
    Broken("first raw piece", lambda folder: _raw_pieces(folder, 0), "cut into raw pieces.*`cat`"),
    Broken("second raw piece", lambda folder: _raw_pieces(folder, 1), "cut into raw pieces.*`cat`"),
    # safetensors.
    Broken(
        "safetensors of 5 bytes", _file(b"\x01\x02\x03\x04\x05", "model.safetensors"), "header length needs 8 bytes"
    ),
    Broken(
        "safetensors header cut", _safetensors({"a": f32((8,), 0, 32)}, length=999), "header claims 999 bytes", True
    ),
    Broken("safetensors header of exabytes", _safetensors({}, length=2**62), "header claims 4,611,686"),
    Broken(
        "safetensors data cut", _safetensors({"a": f32((8,), 0, 32)}, 31), "tensor a ends at .* the file ends at", True
    ),
    Broken("no JSON", _safetensors(b"{nonsense"), "not valid JSON"),
    Broken("JSON list", _safetensors(b"[1, 2]"), "the JSON is a list; expected an object"),
    Broken("JSON without end", _safetensors(b'{"a":' + b"[" * 100_000), "nested too deeply|not valid JSON", True),
    Broken("JSON bomb", _safetensors(b'{"a":[' + b"0," * 5_000_000 + b"0]}"), "JSON with 5,000,0.. items; at most"),
    Broken("number of a million digits", _safetensors(b'{"a":' + b"9" * 1_000_000 + b"}"), "not valid JSON"),
    Broken("duplicate in the header", _safetensors(b'{"a": 1, "a": 2}'), "the JSON names a twice"),
    Broken(
        "unknown dtype",
        _safetensors({"a": {"dtype": "Q9", "shape": [], "data_offsets": [0, 0]}}),
        "dtype 'Q9' is unknown",
    ),
    Broken("negative axis", _safetensors({"a": f32((-1,), 0, 4)}, 4), r"tensor a: shape \[-1\]; expected"),
    Broken("offsets reversed", _safetensors({"a": f32((1,), 4, 0)}, 4), r"data_offsets \[4, 0\]; expected"),
    Broken("shape and bytes disagree", _safetensors({"a": f32((2,), 0, 4)}, 4), "4 bytes, but shape .* takes 8"),
    Broken("overlap", _safetensors({"a": f32((2,), 0, 8), "b": f32((2,), 4, 12)}, 12), "tensors a and b overlap"),
    Broken("shard missing", _missing_shard, "1 of 2 shards are missing: model-00002-of-00002.safetensors", True),
    Broken("lone shard", _lone_shard, "1 of 2 parts of this model are missing"),
    Broken("index that lies", _lying_index, "the index says tensor layer.9 is in model-00001"),
    Broken(
        "index that leaves the folder", _index_outside, "expected the name of a .safetensors file in the same folder"
    ),
    Broken("duplicate across shards", _duplicate_across_shards, "tensor same occurs twice"),
    Broken("no config.json", _shards_without_config, "no config.json beside them"),
    Broken("shard that is HTML", _shard_is_html, "model-00001-of-00002.safetensors: this is an HTML page"),
)
