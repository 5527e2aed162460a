"""Dumps of two runs, and where they part."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import memory_model
from expertide.errors import FormatError, StorageError
from expertide.kernels import select
from expertide.models.deepseek_v2 import tiny_config
from expertide.models.trace import FILE_NAME, Tracer, first_difference
from hf_reference import write_tiny_gguf


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    """Dumps of one prompt on two files that differ in one weight of layer 1's shared experts."""
    dumps = (tmp_path / "a", tmp_path / "b")
    for index, dump in enumerate(dumps):
        path = tmp_path / f"{index}.gguf"
        write_tiny_gguf(path, tiny_config(), seed=0)
        if index:
            weight = memory_model.open_model(path).tensors["blk.1.ffn_up_shexp.weight"]
            with path.open("r+b") as file:
                file.seek(weight.offset)
                file.write(b"\x00\x00\x80\x3f")
        _run(path, dump)
    return dumps


def test_the_first_difference_names_step_layer_and_op(two_runs: tuple[Path, Path]) -> None:
    found = first_difference(*two_runs)
    assert found is not None
    assert found.what.startswith("step 0 (prefill at position 0), layer 1, shared_experts: largest difference")


def test_equal_runs_do_not_differ_and_a_tolerance_hides_small_gaps(two_runs: tuple[Path, Path]) -> None:
    assert first_difference(two_runs[0], two_runs[0]) is None
    assert first_difference(*two_runs, tolerance=10.0) is None


def test_a_shorter_run_and_other_steps_are_differences(two_runs: tuple[Path, Path]) -> None:
    trace = two_runs[0] / FILE_NAME
    lines = trace.read_text(encoding="utf-8").splitlines(keepends=True)
    trace.write_text("".join(lines[:5]), encoding="utf-8")
    found = first_difference(*two_runs)
    assert found is not None and found.line == 6 and "ends after 5 lines" in found.what
    trace.write_text("".join(lines[1:]), encoding="utf-8")
    found = first_difference(*two_runs)
    assert found is not None and found.line == 1 and "different steps" in found.what


def test_no_trace_and_a_broken_trace_are_named(two_runs: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no trace there"):
        first_difference(two_runs[0], tmp_path)
    (two_runs[1] / FILE_NAME).write_text("{}\n", encoding="utf-8")
    with pytest.raises(FormatError, match="line 1 is no trace line"):
        first_difference(*two_runs)


def _run(path: Path, dump: Path) -> None:
    _, model = memory_model.load(path, select("reference", num_threads=1), kv_dtype="float32")
    tracer = Tracer(dump)
    cache = model.new_cache(8)
    model.forward(torch.tensor([3, 1, 4, 1, 5]), cache, "prefill", tracer)
    model.forward(torch.tensor([9]), cache, "decode", tracer)
    tracer.close()


@pytest.mark.parametrize(
    "change",
    [{"mean": "1"}, {"absmax": None}, {"first": [None]}, {"first": 5}, {"shape": 5}, {"sha256": 5}, {"layer": "a"}],
)
def test_a_line_with_a_field_of_the_wrong_type_is_no_trace_line(
    two_runs: tuple[Path, Path], change: dict[str, object]
) -> None:
    trace = two_runs[1] / FILE_NAME
    first, *rest = trace.read_text(encoding="utf-8").splitlines(keepends=True)
    trace.write_text("".join([json.dumps(json.loads(first) | change) + "\n", *rest]), encoding="utf-8")
    with pytest.raises(FormatError, match="line 1 is no trace line"):
        first_difference(*two_runs)


def test_numbers_that_one_trace_lacks_are_a_difference(two_runs: tuple[Path, Path]) -> None:
    trace = two_runs[1] / FILE_NAME
    first, *rest = trace.read_text(encoding="utf-8").splitlines(keepends=True)
    line = json.loads(first) | {"sha256": "0", "first": []}
    trace.write_text("".join([json.dumps(line) + "\n", *rest]), encoding="utf-8")
    found = first_difference(*two_runs, tolerance=1.0)
    assert found is not None and found.line == 1


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"[" * 100_000, b"\0" * 200_000, b"{" + b" " * 200_000 + b"}"])
def test_what_is_no_text_or_without_lines_is_no_trace(two_runs: tuple[Path, Path], content: bytes) -> None:
    (two_runs[1] / FILE_NAME).write_bytes(content)
    with pytest.raises(FormatError, match="line 1 is no trace line"):
        first_difference(*two_runs)


def test_a_pipe_in_place_of_a_trace_is_refused_without_waiting(two_runs: tuple[Path, Path]) -> None:
    (two_runs[1] / FILE_NAME).unlink()
    os.mkfifo(two_runs[1] / FILE_NAME)
    with pytest.raises(FormatError, match="is no regular file"):
        first_difference(*two_runs)
