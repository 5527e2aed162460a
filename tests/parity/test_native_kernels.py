"""The C++ kernels against the Python decoders, against float64, and against themselves in every other circumstance."""

from __future__ import annotations

import numpy as np
import pytest
from tests import native_samples as samples
from tests.native_samples import ALL_TYPES, TYPE_NAMES, assert_same_bits

from expertide import _native
from expertide.formats import quants
from expertide.formats.quants.base import QuantType

every_type = pytest.mark.parametrize("quant", ALL_TYPES, ids=TYPE_NAMES)


@pytest.fixture(scope="module")
def pool():
    pool = _native.ThreadPool(2)
    yield pool
    pool.close()


def _activations(num_tokens: int, cols: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_tokens, cols), dtype=np.float32)


def _odd_cols(quant: QuantType) -> int:
    """A width with a remainder everywhere it can have one."""
    return 1003 if quant.block_size == 1 else 7 * 256 if quant.block_size == 256 else 33 * 32


@every_type
@pytest.mark.parametrize("isa", samples.available_isas())
def test_decoded_rows_equal_the_python_decoder(pool, quant, isa) -> None:
    rng = np.random.default_rng(5)
    cols = _odd_cols(quant)
    # Every bit random: infinities, NaNs and subnormals among the scales.
    packed = rng.integers(0, 256, (40, quant.row_bytes(cols)), dtype=np.uint8)
    ids = [39, 0, 7, 7, 22]
    with samples.isa(isa), np.errstate(all="ignore"):
        assert_same_bits(samples.decode_rows(pool, quant, packed, ids), quant.decode(packed[ids]))


@pytest.mark.parametrize("isa", samples.available_isas())
def test_every_half_decodes_exactly(pool, isa) -> None:
    halves = np.arange(65536, dtype=np.uint16)[None, :]
    with samples.isa(isa):
        got = samples.decode_rows(pool, quants.by_name("F16"), halves.view(np.uint8), [0])
    assert_same_bits(got, halves.view(np.float16).astype(np.float32))


@every_type
@pytest.mark.parametrize("isa", samples.available_isas())
def test_linear_is_close_to_float64(pool, quant, isa) -> None:
    cols = _odd_cols(quant)
    packed = samples.random_weights(quant, 70, cols)
    x = _activations(5, cols)
    weights = quant.decode(packed).astype(np.float64)
    truth = x.astype(np.float64) @ weights.T
    with samples.isa(isa):
        error = np.abs(samples.linear(pool, quant, packed, x) - truth)
    magnitude = np.abs(x).astype(np.float64) @ np.abs(weights).T
    if quant.name == "Q4_K":
        # Activations are rounded to 1/127 of the block's largest (about 3.2 sigma here): an error of up to half a step
        # per value, independent, so it grows like the root of the sum of squares. Six sigma of that.
        step = 4.5 / 127
        bound = 6 * step / np.sqrt(12) * np.sqrt((weights**2).sum(axis=1))[None, :]
    else:
        # 32 lanes: each sum has cols / 32 + 5 roundings of half a unit, and the products one.
        bound = magnitude * (cols / 32 + 6) * 2.0**-24
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert (error <= bound).all(), (worst, error[worst], np.broadcast_to(bound, error.shape)[worst])


@every_type
def test_linear_gives_the_same_bits_on_every_instruction_set(pool, quant) -> None:
    cols = _odd_cols(quant)
    packed = samples.random_weights(quant, 67, cols)
    x = _activations(9, cols)
    with samples.isa("base"):
        base = samples.linear(pool, quant, packed, x)
    for name in samples.available_isas():
        with samples.isa(name):
            assert_same_bits(samples.linear(pool, quant, packed, x), base)


@every_type
@pytest.mark.parametrize("isa", samples.available_isas())
def test_a_token_is_not_changed_by_its_neighbours(pool, quant, isa) -> None:
    cols = 512
    packed = samples.random_weights(quant, 131, cols)
    x = _activations(130, cols)
    with samples.isa(isa):
        together = samples.linear(pool, quant, packed, x)
        for num_tokens in (1, 2, 3, 7, 64, 65):
            assert_same_bits(samples.linear(pool, quant, packed, x[:num_tokens]), together[:num_tokens])
        assert_same_bits(samples.linear(pool, quant, packed, x[77:78]), together[77:78])


@every_type
def test_a_row_is_not_changed_by_its_neighbours_nor_by_threads(quant) -> None:
    cols = 768
    packed = samples.random_weights(quant, 257, cols)
    x = _activations(3, cols)
    results = []
    for num_threads in (1, 2, 3):
        pool = _native.ThreadPool(num_threads)
        results.append(samples.linear(pool, quant, packed, x))
        for row in (0, 1, 100, 256):
            alone = samples.linear(pool, quant, packed[row : row + 1], x)
            assert_same_bits(alone, np.ascontiguousarray(results[-1][:, row : row + 1]))
        pool.close()
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


@every_type
def test_heads_lying_apart_equal_one_product_per_head(pool, quant) -> None:
    num_heads, rows, gap_rows, cols, num_tokens = 3, 10, 4, 256, 5
    packed = samples.random_weights(quant, num_heads * (rows + gap_rows), cols)
    row_bytes = packed.shape[1]
    x = _activations(num_tokens * num_heads, cols).reshape(num_tokens, num_heads, cols)
    y = np.empty((num_tokens, num_heads, rows), dtype=np.float32)
    stride = (rows + gap_rows) * row_bytes
    _native.head_linear(
        pool,
        packed.ctypes.data,
        quant.ggml_id,
        num_heads,
        stride,
        rows,
        cols,
        x.ctypes.data,
        num_tokens,
        y.ctypes.data,
    )
    for head in range(num_heads):
        begin = head * (rows + gap_rows)
        alone = samples.linear(pool, quant, packed[begin : begin + rows], np.ascontiguousarray(x[:, head]))
        assert_same_bits(np.ascontiguousarray(y[:, head]), alone)


@pytest.mark.parametrize("isa", samples.available_isas())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_reaches_every_result(pool, isa, bad) -> None:
    """Rounding a NaN to an integer would be undefined: it must show up as a NaN, not as a number."""
    for name in ("Q4_K", "Q8_0", "F16"):
        quant = quants.by_name(name)
        packed = samples.random_weights(quant, 20, 512)
        x = _activations(2, 512)
        x[1, 300] = bad
        with samples.isa(isa):
            y = samples.linear(pool, quant, packed, x)
        assert np.isfinite(y[0]).all() and not np.isfinite(y[1]).any(), name


def _quantize(x: np.ndarray) -> np.ndarray:
    block = np.dtype(
        [("scale", "<f4"), ("unused", "<i4", 3), ("sums", "<i2", 8), ("q", "i1", 256)],
    )
    assert block.itemsize == _native.Q8_K_BLOCK_BYTES
    out = np.empty(x.size // 256, dtype=block)
    _native.quantize_q8_k(x.ctypes.data, x.size, out.ctypes.data)
    return out


@pytest.mark.parametrize("isa", samples.available_isas())
def test_activations_are_rounded_to_the_nearest_of_255_levels(isa) -> None:
    x = _activations(1, 1024)[0]
    x[256:512] = 0
    x[512:768] *= np.float32(1e30)
    x[768:] *= np.float32(1e-39)  # subnormal: as good as nothing
    with samples.isa(isa):
        blocks = _quantize(x)
    assert list(blocks["scale"] == 0) == [False, True, False, True]
    for block, values in zip(blocks, x.reshape(-1, 256), strict=True):
        q = block["q"].astype(np.int64)
        assert np.array_equal(q.reshape(8, 32).sum(axis=1), block["sums"])
        if block["scale"] == 0:
            assert not q.any()
            continue
        assert np.abs(q).max() == 127
        # Half a step, and the rounding of scale and product.
        assert np.abs(q * float(block["scale"]) - values).max() <= float(block["scale"]) * (0.5 + 127 * 2.0**-22)


@pytest.mark.parametrize("isa", samples.available_isas())
def test_q4_k_is_exact_for_activations_that_are_whole_numbers(pool, isa) -> None:
    """With a largest value of 127 the rounding of activations is exact; what is left are a few float operations."""
    quant = quants.by_name("Q4_K")
    packed = samples.random_weights(quant, 50, 256)
    x = np.random.default_rng(3).integers(-127, 128, (4, 256)).astype(np.float32)
    x[:, 17] = 127
    truth = x.astype(np.float64) @ quant.decode(packed).astype(np.float64).T
    with samples.isa(isa):
        y = samples.linear(pool, quant, packed, x)
    # Six float32 roundings of terms no larger than the sum of magnitudes; the decoded weights themselves carry three.
    bound = 9 * 2.0**-24 * (np.abs(x).astype(np.float64) @ (np.abs(quant.decode(packed)) + 2).T)
    assert (np.abs(y - truth) <= bound).all()


def _silu_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    out = np.empty_like(gate)
    _native.silu_mul(gate.ctypes.data, up.ctypes.data, gate.size, out.ctypes.data)
    return out


@pytest.mark.parametrize("isa", samples.available_isas())
def test_swiglu_is_within_a_few_units_of_float64(isa) -> None:
    gate = np.concatenate(
        [np.linspace(-100, 100, 20_001), [0.0, -0.0, 1e-30, -1e-30, 1e37, -1e37], np.linspace(-1, 1, 999)]
    ).astype(np.float32)
    up = np.random.default_rng(2).standard_normal(gate.size, dtype=np.float32)
    wide = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        truth = wide / (1 + np.exp(-wide)) * up
    with samples.isa(isa):
        got = _silu_mul(gate, up)
    # e^x is good to two units in the last place, four more operations follow; beyond e^±87 exp is clamped.
    assert (np.abs(got - truth) <= np.abs(truth) * 8 * 2.0**-24 + 1e-35).all()


def test_swiglu_gives_the_same_bits_on_every_instruction_set_and_length() -> None:
    rng = np.random.default_rng(4)
    gate = rng.standard_normal(1003, dtype=np.float32) * np.float32(20)
    up = rng.standard_normal(1003, dtype=np.float32)
    gate[5] = np.nan
    with samples.isa("base"):
        whole = _silu_mul(gate, up)
    assert np.isnan(whole[5]) and np.isfinite(np.delete(whole, 5)).all()
    for name in samples.available_isas():
        with samples.isa(name):
            for begin, end in ((0, 1003), (0, 1), (3, 20), (501, 1003)):
                assert_same_bits(_silu_mul(gate[begin:end].copy(), up[begin:end].copy()), whole[begin:end])
