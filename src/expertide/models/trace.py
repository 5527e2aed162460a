"""`EXPERTIDE_DUMP`: what every op of every layer gave, as checksums, so that two runs can be laid side by side.

One JSON line per recorded tensor, in the order of computing, in `DIR/trace.jsonl`:

    {"step": 0, "phase": "prefill", "position": 0, "layer": 3, "op": "latent", "shape": [5, 512], "sha256": "9f…",
     "mean": …, "absmax": …, "first": […8 values…]}

`layer` is -1 for what belongs to no layer. `first_difference` names the first line where two such files part. Runs can
be compared when they made the same steps (same prompt, same chunks).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import UnionType
from typing import IO, TYPE_CHECKING, cast

from expertide.errors import FormatError, StorageError

if TYPE_CHECKING:
    from torch import Tensor

FILE_NAME = "trace.jsonl"
NO_LAYER = -1
NUM_FIRST = 8
# A line has about 400 bytes.
_MAX_LINE_BYTES = 1 << 16
_FIELDS: dict[str, type | UnionType] = {
    "step": int, "phase": str, "position": int, "layer": int, "op": str, "shape": list, "sha256": str,
    "mean": int | float, "absmax": int | float, "first": list,
}  # fmt: skip


class Tracer:
    """Writes the lines. One per process and folder; an existing trace in the folder is replaced."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            StorageError: the folder cannot be made or written.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = (directory / FILE_NAME).open("w", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"EXPERTIDE_DUMP={directory}: cannot be written: {error.strerror}") from None
        self._step = -1
        self._phase = ""
        self._position = 0

    def begin_step(self, phase: str, position: int) -> None:
        """A forward pass starts with a token at this position."""
        self._step += 1
        self._phase, self._position = phase, position

    def record(self, layer_id: int, op: str, tensor: Tensor) -> None:
        """Write one line about a tensor; the tensor is not kept."""
        values = tensor.detach().contiguous()
        numbers = values.float().flatten()
        line = {
            "step": self._step,
            "phase": self._phase,
            "position": self._position,
            "layer": layer_id,
            "op": op,
            "shape": list(values.shape),
            "sha256": hashlib.sha256(values.numpy().tobytes()).hexdigest()[:32],
            "mean": float(numbers.mean()),
            "absmax": float(numbers.abs().max()),
            "first": [float(value) for value in numbers[:NUM_FIRST]],
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two traces part.

    Attributes:
        line: number of the line, from 1.
        what: one sentence, naming step, layer and op.
    """

    line: int
    what: str


def first_difference(dir_a: Path, dir_b: Path, *, tolerance: float = 0.0) -> Difference | None:
    """The first line where two traces differ, or None.

    Args:
        tolerance: 0 compares checksums: any bit counts. Above 0, numbers (mean, absmax, first values) may differ by
            this share of the larger absmax; for runs on different kernels.

    Raises:
        StorageError: a folder holds no trace.
        FormatError: a line is no trace line.
    """
    lines_a, lines_b = _lines(dir_a), _lines(dir_b)
    number = 0
    while True:
        number += 1
        a, b = next(lines_a, None), next(lines_b, None)
        if a is None and b is None:
            return None
        if a is None or b is None:
            ended, longer = (dir_a, b) if a is None else (dir_b, a)
            return Difference(
                number, f"{ended} ends after {number - 1:,} lines; the other goes on with {_place(longer)}"
            )
        if (sentence := _compare(a, b, tolerance)) is not None:
            return Difference(number, sentence)


def _compare(a: dict[str, object], b: dict[str, object], tolerance: float) -> str | None:
    if _place(a) != _place(b):
        return f"different steps: {_place(a)} against {_place(b)}"
    if a["shape"] != b["shape"]:
        return f"{_place(a)}: shape {a['shape']} against {b['shape']}"
    if a["sha256"] == b["sha256"]:
        return None
    numbers_a, numbers_b = _numbers(a), _numbers(b)
    # Of equal shapes there are equally many numbers; a file that lies about it differs at the one that is missing.
    gaps = [abs(x - y) for x, y in zip_longest(numbers_a, numbers_b, fillvalue=math.nan)]
    gap = max((g if math.isfinite(g) else math.inf for g in gaps), default=0.0)
    size = max(abs(numbers_a[1]), abs(numbers_b[1]))
    if tolerance > 0 and gap <= tolerance * size:
        return None
    worst = gaps.index(max(gaps)) if math.isfinite(gap) else 0
    return (
        f"{_place(a)}: largest difference {gap:.3g} (absmax {numbers_a[1]:.6g} against {numbers_b[1]:.6g}; "
        f"{numbers_a[worst]:.6g} against {numbers_b[worst]:.6g})"
    )


def _place(line: dict[str, object] | None) -> str:
    assert line is not None
    where = "" if line["layer"] == NO_LAYER else f"layer {line['layer']}, "
    return f"step {line['step']} ({line['phase']} at position {line['position']}), {where}{line['op']}"


def _numbers(line: dict[str, object]) -> list[float]:
    return [cast(float, line["mean"]), cast(float, line["absmax"]), *cast("list[float]", line["first"])]


def _lines(directory: Path) -> Iterator[dict[str, object]]:
    path = directory / FILE_NAME
    try:
        if path.exists() and not path.is_file():  # a pipe would wait for ever
            raise FormatError(f"{path}: is no regular file, expected a trace")
        file = path.open("rb")
    except OSError as error:
        raise StorageError(f"{path}: no trace there: {error.strerror}") from None
    with file:
        for number, text in enumerate(_bounded_lines(file, path), start=1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if not _is_trace_line(line):
                raise FormatError(f"{path}: line {number:,} is no trace line")
            yield line


def _bounded_lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    try:
        while text := file.readline(_MAX_LINE_BYTES):
            yield text
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from None


def _is_trace_line(line: object) -> bool:
    if not isinstance(line, dict) or any(not isinstance(line.get(key), kind) for key, kind in _FIELDS.items()):
        return False
    return all(isinstance(value, int | float) for value in line["first"])
