"""The order of bytes on a device: a rearrangement and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.packed_samples import ALL_TYPES, TYPE_NAMES

from expertide.errors import UnsupportedError
from expertide.formats.quants import by_name
from expertide.formats.quants.opaque import GGML_OPAQUE
from expertide.kernels.gpu import layout


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_planes_cover_every_byte_of_a_block_once(name) -> None:
    covered = sorted(byte for first, end in layout.planes_of(by_name(name)) for byte in range(first, end))
    assert covered == list(range(by_name(name).block_bytes))


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_every_plane_starts_at_a_multiple_of_its_element_size(name) -> None:
    """Plane p of n blocks starts at n * (bytes of the planes before): aligned for any n if that sum is."""
    before = 0
    for first, end in layout.planes_of(by_name(name)):
        alignment = min(16, (end - first) & -(end - first))
        assert before % alignment == 0, (name, first)
        before += end - first


@pytest.mark.parametrize("num_blocks", [0, 1, 7, 33])
@pytest.mark.parametrize("name", TYPE_NAMES)
def test_the_device_layout_is_a_bijection(name, num_blocks) -> None:
    quant = by_name(name)
    # Each byte's place as its value, in as many bytes as that takes: no two places can be confused.
    size = num_blocks * quant.block_bytes
    places = np.arange(size, dtype=np.uint32)
    targets = sum(
        layout.to_device_layout(torch.from_numpy((places >> shift).astype(np.uint8)), quant).to(torch.int64) << shift
        for shift in (0, 8, 16)
    )
    assert sorted(targets.tolist()) == list(range(size))
    raw = torch.from_numpy(np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8))
    assert torch.equal(layout.to_file_layout(layout.to_device_layout(raw, quant), quant), raw)
    assert torch.equal(layout.to_device_layout(layout.to_file_layout(raw, quant), quant), raw)


def test_a_layout_can_be_written_into_a_given_place() -> None:
    quant = by_name("Q6_K")
    raw = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 5 * 210, dtype=np.uint8))
    arena = torch.zeros(4096, dtype=torch.uint8)
    layout.to_device_layout(raw, quant, out=arena[16 : 16 + 5 * 210])
    assert torch.equal(arena[16 : 16 + 5 * 210], layout.to_device_layout(raw, quant))
    assert not arena[:16].any() and not arena[16 + 5 * 210 :].any()


def test_blocks_of_whole_16_bytes_stay_as_they_are() -> None:
    as_in_file = {quant.name for quant in ALL_TYPES if layout.is_as_in_file(quant)}
    assert as_in_file == {"F32", "F16", "BF16", "Q4_K", "Q5_K"}


def test_a_type_without_kernels_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"type IQ2_XXS has no layout on a GPU; known: F32, F16"):
        layout.planes_of(GGML_OPAQUE[16])
