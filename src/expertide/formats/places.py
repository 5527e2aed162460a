"""The check that all containers share: tensors of one file must not lie over one another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from expertide.formats.header_reader import HeaderReader, shown
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
