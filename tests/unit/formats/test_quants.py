"""Quant types: names, numbers, sizes; what decode() refuses. That values are right is in parity/."""

from __future__ import annotations

import numpy as np
import pytest

from expertide.errors import FormatError, UnsupportedError
from expertide.formats.quants import QUANT_TYPES, QuantType, by_id, by_name

ALL = [pytest.param(quant, id=quant.name) for quant in QUANT_TYPES.values()]


@pytest.mark.parametrize("quant", ALL)
def test_a_type_is_found_by_number_and_name(quant: QuantType) -> None:
    assert by_id(quant.ggml_id) is quant
    assert by_name(quant.name) is quant
    assert quant.can_decode


def test_types_without_a_decoder_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"tensor type 16 has no decoder; known: F32, F16"):
        by_id(16)
    with pytest.raises(UnsupportedError, match="tensor type 'Q9_K' has no decoder"):
        by_name("Q9_K")


@pytest.mark.parametrize("quant", ALL)
def test_decode_makes_a_copy_of_the_callers_and_leaves_the_bytes_alone(quant: QuantType) -> None:
    raw = np.random.default_rng(1).integers(0, 128, (2, 3 * quant.block_bytes), np.uint8)
    before = raw.copy()
    values = quant.decode(raw)
    assert values.shape == (2, 3 * quant.block_size)
    assert values.flags.owndata or values.base.flags.owndata
    values[:] = 0
    np.testing.assert_array_equal(raw, before)


@pytest.mark.parametrize("quant", ALL)
def test_decode_reads_views_with_gaps_between_rows_and_readonly_memory(quant: QuantType) -> None:
    wide = np.random.default_rng(2).integers(0, 256, (4, 5 * quant.block_bytes), np.uint8)
    view = wide[::2, quant.block_bytes : 3 * quant.block_bytes]
    view.flags.writeable = False
    np.testing.assert_array_equal(
        quant.decode(view).view(np.uint32), quant.decode(np.ascontiguousarray(view)).view(np.uint32)
    )


@pytest.mark.parametrize("quant", ALL)
def test_nothing_decodes_to_nothing(quant: QuantType) -> None:
    assert quant.decode(np.empty((3, 0), np.uint8)).shape == (3, 0)
    assert quant.decode(np.empty((0, quant.block_bytes), np.uint8)).shape == (0, quant.block_size)


@pytest.mark.parametrize("quant", ALL)
def test_half_a_block_is_refused(quant: QuantType) -> None:
    with pytest.raises(FormatError, match=f"do not divide into {quant.name} blocks of {quant.block_bytes} bytes"):
        quant.decode(np.zeros(quant.block_bytes + 1, np.uint8))


def test_rows_have_whole_blocks() -> None:
    q4_k = by_name("Q4_K")
    assert q4_k.row_bytes(512) == 288
    with pytest.raises(FormatError, match=r"rows of 2,880 values do not divide into Q4_K blocks of 256"):
        q4_k.row_bytes(2880)
