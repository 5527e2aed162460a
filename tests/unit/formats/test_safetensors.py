"""safetensors models open from a directory, from one file, or from any shard; lenient where real files are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from broken_files import f32, safetensors_bytes, write_shards
from expertide.errors import UnsupportedError
from expertide.formats import open_model


def test_a_file_of_the_safetensors_package_reads_back(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    content = {"a": rows, "b": rows.astype(np.float16), "ids": np.arange(4), "scalar": np.array(2.5, np.float32)}
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(content, path, {"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v2"}')

    model = open_model(path)
    assert model.container == "safetensors"
    assert model.metadata == {"model_type": "deepseek_v2"}
    assert set(model.tensors) == set(content)
    raw = np.frombuffer(path.read_bytes(), np.uint8)
    for name in ("a", "b", "scalar"):
        tensor = model.tensors[name]
        assert tensor.shape == content[name].shape
        decoded = tensor.quant.decode(raw[tensor.offset : tensor.offset + tensor.nbytes].copy())
        np.testing.assert_array_equal(decoded, content[name].astype(np.float32).ravel())
    assert model.tensors["ids"].quant.name == "I64"
    with pytest.raises(UnsupportedError, match="I64 has no decoder"):
        model.tensors["ids"].quant.decode(np.zeros(8, np.uint8))
    assert model.warnings == ()


@pytest.mark.parametrize("target", ["", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_a_sharded_model_opens_from_the_directory_or_any_shard(tmp_path: Path, target: str, index: bool) -> None:
    paths = write_shards(tmp_path, index=index)
    model = open_model(tmp_path / target)
    assert model.files == tuple(paths)
    assert [tensor.file_id for tensor in model.tensors.values()] == [0, 1]
    assert model.metadata["num_hidden_layers"] == 2
    assert bool(model.warnings) is not index


def test_empty_tensors_odd_alignment_and_trailing_bytes_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"none": f32((0, 4), 8, 8), "two": f32((2,), 0, 8), "__metadata__": {"a": "b"}}).encode()
    path.write_bytes(safetensors_bytes(header + b" " * (8 - len(header) % 8 + 3), 8 + 100))
    model = open_model(path)
    assert (model.tensors["two"].offset % 8, model.tensors["none"].nbytes) == (3, 0)
    assert [warning for warning in model.warnings if "after the last" in warning] == [
        "model.safetensors: 100 bytes after the last tensor are not used"
    ]


def test_a_header_with_metadata_only_opens(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"__metadata__": {"format": "pt"}}))
    assert not open_model(path).tensors


def test_a_file_under_another_name_is_recognised_by_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(safetensors_bytes({"a": f32((1,), 0, 4)}, 4))
    assert open_model(path).container == "safetensors"


def test_types_smaller_than_a_byte_have_their_size_checked(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"a": {"dtype": "F4", "shape": [2, 32], "data_offsets": [0, 32]}}, 32))
    assert open_model(path).tensors["a"].nbytes == 32


def test_the_bytes_of_a_tensor_begin_after_the_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    content = safetensors_bytes({"a": f32((1,), 0, 4)})
    path.write_bytes(content + np.float32(7).tobytes())
    tensor = open_model(path).tensors["a"]
    assert tensor.offset == len(content)
    assert np.frombuffer(path.read_bytes()[tensor.offset :], np.float32) == [7]
