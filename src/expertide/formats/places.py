"""What all containers share about where tensors lie: none over another in one file, none twice in a set of files."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from expertide.errors import FormatError
from expertide.formats.header_reader import HeaderReader, shown, shown_path
from expertide.formats.tensors import TensorInfo


def check_no_overlap(reader: HeaderReader, tensors: Iterable[TensorInfo]) -> None:
    """Refuse two tensors that claim the same byte; empty tensors claim none.

    Raises:
        FormatError: naming both.
    """
    in_order = sorted((tensor for tensor in tensors if tensor.nbytes), key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(in_order):
        end = before.offset + before.nbytes
        if end > after.offset:
            raise reader.fail(
                f"tensors {shown(before.name)} and {shown(after.name)} overlap: the first ends at {end:,}, the second"
                f" begins at {after.offset:,}"
            )


def occurs_twice(name: str, here: Path, there: Path) -> FormatError:
    """The refusal of a tensor that two files of one model hold."""
    return FormatError(
        f"{shown_path(here)}: tensor {shown(name)} occurs twice: here and in {shown_path(Path(there.name))}"
    )
