"""Our decoders and those of the `gguf` package give the same bits."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import gguf
import numpy as np
import pytest

from expertide.formats import open_model
from expertide.formats.quants import QUANT_TYPES, QuantType
from expertide.formats.quants.opaque import GGML_OPAQUE

ALL = [pytest.param(quant, id=quant.name) for quant in QUANT_TYPES.values()]

# Bit patterns of float16 that exercise every path of a scale: zeros, subnormals, largest, infinities, NaNs.
SPECIAL_HALVES = np.array(
    [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 0xFDFF], np.uint16
)
# Where a block keeps its float16 numbers.
HALF_OFFSETS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip


def expected(quant: QuantType, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(quant.ggml_id))


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    different = np.flatnonzero(ours.view(np.uint32).ravel() != theirs.view(np.uint32).ravel())
    if different.size:
        i = int(different[0])
        pytest.fail(f"{different.size} values differ, first at {i}: {ours.ravel()[i]!r} against {theirs.ravel()[i]!r}")


@pytest.mark.parametrize("quant", ALL)
def test_sizes_are_those_of_the_gguf_package(quant: QuantType) -> None:
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(quant.ggml_id)]
    assert (quant.block_size, quant.block_bytes) == sizes
    assert gguf.GGMLQuantizationType(quant.ggml_id).name == quant.name


def test_every_other_ggml_type_is_known_by_name_and_size() -> None:
    for quant in GGML_OPAQUE.values():
        theirs = gguf.GGMLQuantizationType(quant.ggml_id)
        assert (quant.name, (quant.block_size, quant.block_bytes)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])
        assert quant.ggml_id not in QUANT_TYPES


@pytest.mark.parametrize("quant", ALL)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 2), (17, 31)])
def test_random_blocks_decode_to_the_same_bits(quant: QuantType, shape: tuple[int, ...]) -> None:
    raw = np.random.default_rng(quant.ggml_id).integers(0, 256, (*shape[:-1], shape[-1] * quant.block_bytes), np.uint8)
    assert_same_bits(quant.decode(raw), expected(quant, raw))


@pytest.mark.parametrize("quant", ALL)
def test_more_blocks_than_one_group_decode_to_the_same_bits(quant: QuantType) -> None:
    num_blocks = (1 << 18) // quant.block_size + 3
    raw = np.random.default_rng(7).integers(0, 256, (1, num_blocks * quant.block_bytes), np.uint8)
    assert_same_bits(quant.decode(raw), expected(quant, raw))


@pytest.mark.parametrize("quant", [p for p in ALL if p.id in HALF_OFFSETS])
def test_infinite_and_nan_scales_decode_to_the_same_bits(quant: QuantType) -> None:
    offsets = HALF_OFFSETS[quant.name]
    pairs = [(a, b) for a in SPECIAL_HALVES for b in SPECIAL_HALVES]
    raw = np.random.default_rng(3).integers(0, 256, (len(pairs), quant.block_bytes), np.uint8)
    for row, pair in zip(raw, pairs, strict=True):
        for offset, half in zip(offsets, pair, strict=False):
            row[offset : offset + 2] = np.frombuffer(half.tobytes(), np.uint8)
    assert_same_bits(quant.decode(raw), expected(quant, raw))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_16_bit_pattern_decodes_to_the_same_bits(name: str) -> None:
    quant = next(quant for quant in QUANT_TYPES.values() if quant.name == name)
    raw = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(1, -1)
    assert_same_bits(quant.decode(raw), expected(quant, raw))


def test_every_mxfp4_exponent_and_code_decodes_to_the_same_bits() -> None:
    quant = QUANT_TYPES[39]
    codes = np.arange(256, dtype=np.uint8)
    raw = np.empty((256, 16, 17), np.uint8)
    raw[:, :, 0] = codes[:, None]
    raw[:, :, 1:] = codes.reshape(16, 16)
    raw = raw.reshape(256, -1)
    assert_same_bits(quant.decode(raw), expected(quant, raw))


# The gguf package has no quantiser for the others.
@pytest.mark.parametrize("quant", [p for p in ALL if p.id.endswith(("_0", "_1", "16", "32", "MXFP4"))])
def test_what_the_gguf_package_quantises_comes_back_close(quant: QuantType) -> None:
    """Guards the drawing as a whole: two decoders with the same mistake would not survive real data."""
    x = np.random.default_rng(5).standard_normal((4, 512), np.float32)
    raw = gguf.quants.quantize(x, gguf.GGMLQuantizationType(quant.ggml_id))
    error = np.abs(quant.decode(np.ascontiguousarray(raw).view(np.uint8)) - x).max()
    # Largest step of 4-bit types on numbers within about 4: 4 / 7 between levels, half of it lost; MXFP4's widest
    # step is 2 of 6, and its power-of-two scale may cut the largest values by a third.
    assert error < 1.4


def test_the_demo_model_is_read_and_decoded_as_the_gguf_package_does() -> None:
    path = Path(str(files("expertide") / "data" / "demo-q4_k_m.gguf"))
    model, theirs = open_model(path), gguf.GGUFReader(path)
    assert dict(model.metadata) == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(model.tensors) == [tensor.name for tensor in theirs.tensors]
    decoded = set()
    for reference in theirs.tensors:
        ours = model.tensors[reference.name]
        assert (ours.offset, ours.nbytes) == (reference.data_offset, reference.n_bytes)
        assert ours.shape == tuple(reversed(reference.shape.tolist()))
        if ours.quant.name not in decoded:
            decoded.add(ours.quant.name)
            raw = np.fromfile(path, np.uint8, ours.nbytes, offset=ours.offset).reshape(*ours.shape[:-1], -1)
            assert_same_bits(ours.quant.decode(raw), expected(ours.quant, raw).reshape(ours.shape))
    assert {"F32", "Q4_K", "Q5_0", "Q6_K"} <= decoded
