"""GGUF files are read as the `gguf` package writes and reads them; large arrays wait until they are wanted."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from broken_files import (
    ARRAY,
    ENTRIES,
    F64,
    I8,
    STRING,
    U8,
    U16,
    entry,
    gguf_bytes,
    tensor,
    text,
    value,
    write_split_set,
)
from expertide.errors import FormatError, StorageError, UnsupportedError
from expertide.formats import open_model
from expertide.formats.gguf_values import GgufMetadata

SCALARS = {
    "u8": (gguf.GGUFValueType.UINT8, 255),
    "i8": (gguf.GGUFValueType.INT8, -128),
    "u16": (gguf.GGUFValueType.UINT16, 65535),
    "i16": (gguf.GGUFValueType.INT16, -32768),
    "u32": (gguf.GGUFValueType.UINT32, 2**32 - 1),
    "i32": (gguf.GGUFValueType.INT32, -(2**31)),
    "f32": (gguf.GGUFValueType.FLOAT32, 0.5),
    "bool": (gguf.GGUFValueType.BOOL, True),
    "string": (gguf.GGUFValueType.STRING, "straße 東京"),
    "u64": (gguf.GGUFValueType.UINT64, 2**64 - 1),
    "i64": (gguf.GGUFValueType.INT64, -(2**63)),
    "f64": (gguf.GGUFValueType.FLOAT64, 0.1),
}


def write(path: Path, *, scalars: bool = True, alignment: int | None = None) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "deepseek2")
    if alignment:
        writer.add_custom_alignment(alignment)
    if scalars:
        for name, (value_type, content) in SCALARS.items():
            writer.add_key_value(f"test.{name}", content, value_type)
        writer.add_array("test.words", ["a", "", "ü" * 40])
        writer.add_array("test.numbers", [3, 1, 2])
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensors(writer: gguf.GGUFWriter) -> None:
    rows = np.random.default_rng(0).standard_normal((2, 3, 256), np.float32)
    writer.add_tensor("first.weight", rows[0])
    writer.add_tensor("norm.weight", rows[0, 0, :7])
    for quant in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.MXFP4, gguf.GGMLQuantizationType.BF16):
        writer.add_tensor(f"{quant.name}.weight", gguf.quants.quantize(rows, quant), raw_dtype=quant)


@pytest.mark.parametrize("alignment", [None, 8, 1024])
def test_a_file_of_the_gguf_package_reads_as_that_package_reads_it(tmp_path: Path, alignment: int | None) -> None:
    path = tmp_path / "m.gguf"
    writer = write(path, alignment=alignment)
    add_tensors(writer)
    finish(writer)

    model = open_model(path)
    theirs = gguf.GGUFReader(path)
    assert list(model.tensors) == [tensor.name for tensor in theirs.tensors]
    for reference in theirs.tensors:
        ours = model.tensors[reference.name]
        assert ours.quant.name == reference.tensor_type.name
        assert ours.shape == tuple(reversed(reference.shape.tolist()))
        assert (ours.offset, ours.nbytes) == (reference.data_offset, reference.n_bytes)
        raw = np.frombuffer(path.read_bytes(), np.uint8)[ours.offset : ours.offset + ours.nbytes]
        assert raw.tobytes() == reference.data.tobytes()
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert dict(model.metadata) == expected
    assert {key: type(model.metadata[key]) for key in expected} == {key: type(value) for key, value in expected.items()}
    assert model.parts[0].alignment == (alignment or 32)
    assert model.parts[0].version == 3
    assert model.warnings == ()


def test_version_2_and_offset_0_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(version=2))
    model = open_model(path)
    assert model.parts[0].version == 2
    first = model.tensors["token_embd.weight"]
    assert first.offset == model.parts[0].data_start
    assert first.shape == (4, 64)


def test_all_thirteen_value_types_come_back_also_in_nested_arrays(tmp_path: Path) -> None:
    nested = (ARRAY, [(U8, [1, 2]), (ARRAY, [(STRING, ["x", "ü"]), (F64, [])]), (I8, [-1])])
    path = tmp_path / "m.gguf"
    path.write_bytes(
        gguf_bytes(entries=(*ENTRIES, entry("nested", ARRAY, nested), entry("empty", ARRAY, (STRING, []))))
    )
    metadata = open_model(path).metadata
    assert metadata["nested"] == [[1, 2], [["x", "ü"], []], [-1]]
    assert metadata["empty"] == []


def test_large_nested_arrays_come_back(tmp_path: Path) -> None:
    words = [f"word {n}" for n in range(900)]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(entries=(*ENTRIES, entry("nested", ARRAY, (ARRAY, [(STRING, words), (U16, [7])])))))
    assert open_model(path).metadata["nested"] == [words, [7]]


# Lengths around the reader's window of 1 MiB, so that strings, and length fields, lie across its edge.
@pytest.mark.parametrize("length", [1, 7, 300, 65_521, 1_048_560, 1_048_576, 3_000_000])
def test_strings_of_any_length_cross_the_reading_window(tmp_path: Path, length: int) -> None:
    count = max(3, 2_500_000 // (length + 8))
    words = [chr(97 + n % 26) * (length + n % 5) for n in range(count)]
    path = tmp_path / "m.gguf"
    path.write_bytes(
        gguf_bytes(entries=(*ENTRIES, entry("words", ARRAY, (STRING, words)), entry("after", STRING, "here")))
    )
    model = open_model(path)
    assert model.metadata["after"] == "here"
    assert model.metadata["words"] == words
    assert len(model.tensors) == 2


def test_a_long_text_is_read_when_it_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(entries=(*ENTRIES, entry("long", STRING, "ü" * 3_000_000), entry("after", U8, 1))))
    metadata = open_model(path).metadata
    assert metadata["after"] == 1
    assert metadata["long"] == "ü" * 3_000_000


def test_large_arrays_are_decoded_at_first_access_kept_and_given_back(tmp_path: Path) -> None:
    words = [f"token {n}" for n in range(2000)]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(entries=(*ENTRIES, entry("words", ARRAY, (STRING, words)))))
    metadata = open_model(path).metadata
    assert isinstance(metadata, GgufMetadata)
    first = metadata["words"]
    assert first == words
    assert metadata["words"] is first
    metadata.forget_decoded()
    assert metadata["words"] is not first
    metadata.forget_decoded()
    os.truncate(path, 1000)
    with pytest.raises(StorageError, match=r"words: got \d+ of .* the file became shorter since it was opened"):
        metadata["words"]
    path.unlink()
    with pytest.raises(StorageError, match="No such file"):
        metadata["words"]


def test_an_array_that_is_no_text_is_named_when_it_is_wanted(tmp_path: Path) -> None:
    words: list[str | bytes] = ["good"] * 900
    words[700] = b"\xff\xff"
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(entries=(*ENTRIES, entry("words", ARRAY, (STRING, words)))))
    metadata = open_model(path).metadata
    with pytest.raises(FormatError, match=r"m\.gguf: words: item 700 is not UTF-8"):
        metadata["words"]


def test_a_name_in_another_encoding_is_no_reason_to_refuse_a_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    author = text("general.author") + struct.pack("<I", STRING) + value(STRING, b"Andr\xe9")
    path.write_bytes(gguf_bytes(entries=(*ENTRIES, author)))
    assert open_model(path).metadata["general.author"] == "Andr�"


def test_a_header_with_a_large_vocabulary_is_read_in_well_under_a_second(tmp_path: Path) -> None:
    """650,000 strings; the promise is 0.3 s for the 205,000 of a usual tokenizer."""
    words = [f"t{n}" for n in range(325_000)]
    both = (entry("tokens", ARRAY, (STRING, words)), entry("merges", ARRAY, (STRING, words)))
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(entries=(*ENTRIES, *both)))
    begin = time.process_time()
    open_model(path)
    assert time.process_time() - begin < 0.9


def test_types_without_a_decoder_are_listed_and_refuse_when_used(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tensors=(tensor("table", (8,), 26, 0), tensor("iq2", (256,), 16, 32)), data_bytes=98))
    tensors = open_model(path).tensors
    assert (tensors["table"].quant.name, tensors["iq2"].quant.name) == ("I32", "IQ2_XXS")
    assert not tensors["iq2"].quant.can_decode
    with pytest.raises(UnsupportedError, match="IQ2_XXS has no decoder"):
        tensors["iq2"].quant.decode(np.zeros(66, np.uint8))


def test_bytes_after_the_last_tensor_are_worth_a_word(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes() + bytes(5000))
    assert open_model(path).warnings == ("m.gguf: 5,000 bytes after the last tensor are not used",)


def test_a_file_without_tensors_opens(tmp_path: Path) -> None:
    """The first part of some sets, and vocabulary files; that a model needs tensors is the model's affair."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tensors=(), data_bytes=0))
    assert not open_model(path).tensors


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_a_split_set_opens_from_any_part(tmp_path: Path, opened: int) -> None:
    paths = write_split_set(tmp_path)
    model = open_model(paths[opened])
    assert model.files == tuple(paths)
    assert model.metadata["general.architecture"] == "deepseek2"
    assert [tensor.file_id for tensor in model.tensors.values()] == [0, 1, 2]
    for file_id, tensor_info in enumerate(model.tensors.values()):
        assert tensor_info.offset == model.parts[file_id].data_start


def test_a_directory_with_one_split_set_is_one_model(tmp_path: Path) -> None:
    paths = write_split_set(tmp_path)
    (tmp_path / "README.md").write_text("about")
    assert open_model(str(tmp_path)).files == tuple(paths)


def test_a_set_written_by_the_gguf_package_opens(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "deepseek2", split_max_tensors=2)
    add_tensors(writer)
    finish(writer)
    paths = sorted(tmp_path.glob("*.gguf"))
    assert len(paths) == 3
    model = open_model(paths[1])
    assert model.files == tuple(paths)
    assert len(model.tensors) == 5


def test_a_whole_model_named_like_a_part_opens_with_a_word(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00004.gguf"
    path.write_bytes(gguf_bytes())
    assert open_model(path).warnings == ("m-00001-of-00004.gguf is named like part 1 of 4, but is not split",)


def test_a_similar_name_is_offered_for_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "deepseek-v2-lite.Q4_K_M.gguf").write_bytes(gguf_bytes())
    with pytest.raises(StorageError, match=r"no such file or directory \(is it deepseek-v2-lite\.Q4_K_M\.gguf\?\)"):
        open_model(tmp_path / "deepseek-v2-lite.Q4_K.gguf")


def test_names_with_control_characters_stay_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "line\nbreak.gguf"
    path.write_bytes(gguf_bytes(tensors=(tensor("evil\n\x1b[2Jname", (8,), 0, 2**40),)))
    with pytest.raises(FormatError) as caught:
        open_model(path)
    assert str(caught.value).isprintable()
    assert r"evil\n\x1b[2Jname" in str(caught.value)
