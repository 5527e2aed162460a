"""No content may cause anything but success or FormatError: structured lies, mutated real files, noise.

The hypothesis tests build files whose every field may lie; the mutation tests damage real ones (the demo model's front,
a file of the `gguf` package's writer, a safetensors file) at random, with seeds that repeat.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import struct
from collections.abc import Callable
from importlib.resources import files as package_files
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from broken_files import ENTRIES, TENSORS, gguf_bytes, safetensors_bytes, text, write_shards, write_split_set
from expertide.errors import FormatError
from expertide.formats import open_model

# The folder of a function-scoped fixture is shared by the examples of a test; each overwrites the same file.
FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def open_and_use(path: Path) -> bool:
    """Open, then touch everything a model could offer; true when all of it worked.

    Beyond "no other error", a file that was accepted must keep its promises.
    """
    try:
        model = open_model(path)
    except FormatError as error:
        message = str(error)
        assert message.isprintable() and len(message) < 1500, message
        return False
    per_file: dict[int, list[tuple[int, int]]] = {}
    for tensor in model.tensors.values():
        assert tensor.offset >= 0 and tensor.offset + tensor.nbytes <= model.file_sizes[tensor.file_id]
        assert tensor.nbytes * tensor.quant.block_size == tensor.num_values * tensor.quant.block_bytes
        per_file.setdefault(tensor.file_id, []).append((tensor.offset, tensor.nbytes))
    for places in per_file.values():
        places = sorted(place for place in places if place[1])
        assert all(begin + size <= after for (begin, size), (after, _) in itertools.pairwise(places))
    try:
        for key in model.metadata:
            assert model.metadata[key] is not None or model.container == "safetensors"
    except FormatError:
        return False
    return True


# Numbers that sit on edges: of fields, of signs, of sums.
edges = st.sampled_from(
    [
        0,
        1,
        2,
        3,
        4,
        7,
        31,
        32,
        255,
        256,
        2**16,
        2**20,
        2**31 - 1,
        2**31,
        2**32 - 1,
        2**32,
        2**40,
        2**61,
        2**63,
        2**64 - 1,
    ]
)
u64 = st.one_of(edges, st.integers(0, 300), st.integers(0, 2**64 - 1)).map(lambda n: struct.pack("<Q", n))
u32 = st.one_of(st.integers(0, 14), st.integers(0, 2**32 - 1)).map(lambda n: struct.pack("<I", n))
names = st.one_of(st.text(max_size=12).map(text), st.binary(max_size=12).map(text), u64)
scalars = st.binary(max_size=8)


def joined(*parts: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.tuples(*parts).map(b"".join)


arrays = st.recursive(
    joined(u32, u64, st.binary(max_size=40)),
    lambda inner: joined(st.just(struct.pack("<I", 9)), u64, st.lists(inner, max_size=3).map(b"".join)),
    max_leaves=4,
)
values = st.one_of(
    joined(u32, scalars),
    joined(st.just(struct.pack("<I", 8)), names),
    joined(st.just(struct.pack("<I", 9)), arrays),
)
entries = st.one_of(
    joined(names, values),
    joined(st.just(text("general.alignment") + struct.pack("<I", 4)), st.binary(min_size=4, max_size=4)),
    joined(st.sampled_from([text("split.count"), text("split.no")]), values),
)
shapes = st.lists(u64, max_size=6).flatmap(lambda sizes: st.just(struct.pack("<I", len(sizes)) + b"".join(sizes)))
tensors = joined(names, st.one_of(shapes, joined(u32, st.binary(max_size=32))), u32, u64)


@FUZZ
@given(
    entries=st.lists(st.one_of(st.sampled_from(ENTRIES), entries), max_size=5),
    tensors=st.lists(st.one_of(st.sampled_from(TENSORS), tensors), max_size=4),
    num_entries=st.one_of(st.none(), st.integers(0, 6)),
    num_tensors=st.one_of(st.none(), st.integers(0, 6)),
    version=st.sampled_from([2, 3, 3, 3, 1, 4, 2**24]),
    data_bytes=st.integers(0, 3000),
)
@example(list(ENTRIES), list(TENSORS), None, None, 3, 1312)
def test_gguf_files_whose_every_field_may_lie(
    tmp_path: Path,
    entries: list[bytes],
    tensors: list[bytes],
    num_entries: int | None,
    num_tensors: int | None,
    version: int,
    data_bytes: int,
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(
        gguf_bytes(
            entries=entries,
            tensors=tensors,
            num_entries=num_entries,
            num_tensors=num_tensors,
            version=version,
            data_bytes=data_bytes,
        )
    )
    open_and_use(path)


json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-2, 80), st.integers(), st.floats(), st.text(max_size=8),
        st.sampled_from(["F32", "BF16", "F4", "I64"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=6,
)  # fmt: skip
sizes = st.one_of(st.lists(st.integers(0, 9), max_size=4), json_values)
json_tensors = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.sampled_from(["F32", "F16", "BF16", "F4", "F8_E4M3", "I64"]), json_values),
            "shape": sizes,
            "data_offsets": st.one_of(st.tuples(st.integers(0, 64), st.integers(0, 64)).map(sorted), sizes),
        }
    ),
    json_values,
)


@FUZZ
@given(
    header=st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", "__metadata__", "ü"]), json_tensors, max_size=3),
        json_values,
        st.binary(max_size=40),
    ),
    length=st.one_of(st.none(), st.integers(0, 400), edges),
    data_bytes=st.integers(0, 100),
)
@example({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, None, 0)
def test_safetensors_files_whose_every_field_may_lie(
    tmp_path: Path, header: object, length: int | None, data_bytes: int
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(header, data_bytes, length))
    open_and_use(path)


@FUZZ
@given(content=st.binary(max_size=600), start=st.sampled_from([b"", b"GGUF", b"GGUF\3\0\0\0", b"{", b"<", b"version "]))
def test_noise_behind_a_likely_beginning(tmp_path: Path, content: bytes, start: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(start + content)
    open_and_use(path)


@FUZZ
@given(index=st.one_of(json_values, st.fixed_dictionaries({"weight_map": json_values})), config=json_values)
def test_indexes_and_configs_of_any_shape(tmp_path: Path, index: object, config: object) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(config))
    open_and_use(tmp_path)


# Damage to real files.


def written_by_the_gguf_package(folder: Path) -> Path:
    path = folder / "written.gguf"
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_uint32("deepseek2.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", [f"token{n}" for n in range(300)])
    writer.add_array("tokenizer.ggml.scores", [float(n) for n in range(300)])
    writer.add_array("deepseek2.attention.head_count_kv", [1, 2])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    rows = np.random.default_rng(1).standard_normal((4, 64), np.float32)
    writer.add_tensor("token_embd.weight", rows)
    q8 = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.ffn_up.weight", gguf.quants.quantize(rows, q8), raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def front_of_the_demo_model(folder: Path) -> Path:
    """The demo model's header with its data left out: a hole of the same size."""
    source = Path(str(package_files("expertide") / "data" / "demo-q4_k_m.gguf"))
    model = open_model(source)
    path = folder / "demo.gguf"
    with source.open("rb") as file:
        path.write_bytes(file.read(model.parts[0].data_start))
    os.truncate(path, model.file_sizes[0])
    return path


def whole_split_set(folder: Path) -> Path:
    return write_split_set(folder)[1]


def sharded_safetensors(folder: Path) -> Path:
    return write_shards(folder)[1]


def flip_bits(raw: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 2, 8])):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)


def set_an_edge(raw: bytearray, rng: random.Random) -> None:
    at = rng.randrange(max(1, len(raw) - 8))
    number = rng.choice([0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**61, 2**63, 2**64 - 1])
    raw[at : at + 8] = struct.pack("<Q", number)


def delete_a_run(raw: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(raw))
    del raw[at : at + rng.choice([1, 4, 8, 100])]


def insert_noise(raw: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(raw))
    raw[at:at] = rng.randbytes(rng.choice([1, 4, 8, 100]))


def cut(raw: bytearray, rng: random.Random) -> None:
    del raw[rng.randrange(len(raw)) :]


def repeat_a_run(raw: bytearray, rng: random.Random) -> None:
    at, size = rng.randrange(len(raw)), rng.choice([8, 40, 200])
    raw[at:at] = raw[at : at + size]


MUTATIONS = [flip_bits, set_an_edge, delete_a_run, insert_noise, cut, repeat_a_run]
# Mutations fall on the header, where they can do harm; the data is whatever it is.
FRONT_BYTES = 4096


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize(
    "make",
    [written_by_the_gguf_package, front_of_the_demo_model, whole_split_set, sharded_safetensors],
    ids=lambda function: function.__name__,
)
def test_mutated_real_files_open_or_are_refused(
    make: Callable[[Path], Path], mutate: Callable[[bytearray, random.Random], None], tmp_path: Path
) -> None:
    path = make(tmp_path)
    assert open_and_use(path), "the file must be sound before it is damaged"
    original = path.read_bytes()
    rng = random.Random(f"{make.__name__} {mutate.__name__}")
    num_refused = 0
    for _ in range(60):
        front = bytearray(original[:FRONT_BYTES])
        mutate(front, rng)
        path.write_bytes(bytes(front))
        if mutate is not cut:
            with path.open("r+b") as file:
                file.truncate(max(len(front), len(original)))
                # The demo's front is longer than what is mutated; the rest of it follows at its new place.
                file.seek(len(front))
                file.write(original[FRONT_BYTES : 1 << 18])
        num_refused += not open_and_use(path)
    assert num_refused > 0


def test_every_possible_cut_of_a_small_file_is_refused(tmp_path: Path) -> None:
    """A prefix is never a model: the last tensor would be incomplete."""
    content = gguf_bytes()
    path = tmp_path / "model.gguf"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        assert not open_and_use(path), f"accepted when cut to {size} of {len(content)} bytes"
    path.write_bytes(content)
    assert open_and_use(path)
