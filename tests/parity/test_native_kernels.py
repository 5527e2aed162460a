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
    if quant.block_size > 1:
        # Activations are rounded to 1/127 of their block's largest, 4.5 sigma at most here: an error of up to half a
        # step per value, even and independent, so it grows like the root of the sum of squares. Six sigma of that.
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
    x = _activations(67, cols)
    with samples.isa("base"):
        base = samples.linear(pool, quant, packed, x)
    for name in samples.available_isas():
        with samples.isa(name):
            for num_tokens in range(1, 68):
                assert_same_bits(samples.linear(pool, quant, packed, x[:num_tokens]), base[:num_tokens])


@every_type
@pytest.mark.parametrize("cols_in_blocks", [1, 2, 7, 8, 9, 17])
def test_short_and_odd_rows_give_the_same_bits_on_every_instruction_set(pool, quant, cols_in_blocks) -> None:
    cols = cols_in_blocks * quant.block_size
    for rows in (1, 2, 8, 15, 16, 17):
        packed = samples.random_weights(quant, rows, cols, seed=rows)
        x = _activations(11, cols)
        with samples.isa("base"):
            base = samples.linear(pool, quant, packed, x)
        for name in samples.available_isas():
            with samples.isa(name):
                assert_same_bits(samples.linear(pool, quant, packed, x), base)
                assert_same_bits(samples.linear(pool, quant, packed, x[:1]), base[:1])


@every_type
def test_weights_that_are_not_numbers_give_the_same_results_on_every_instruction_set(pool, quant) -> None:
    """Every bit random: infinities and NaNs among the scales. Not a useful matrix, but a defined one."""
    cols = _odd_cols(quant)
    packed = np.random.default_rng(5).integers(0, 256, (40, quant.row_bytes(cols)), dtype=np.uint8)
    x = _activations(9, cols)
    with samples.isa("base"):
        base = samples.linear(pool, quant, packed, x)
    for name in samples.available_isas():
        with samples.isa(name):
            assert_same_bits(samples.linear(pool, quant, packed, x), base)
            assert_same_bits(samples.linear(pool, quant, packed, x[:2]), base[:2])


@every_type
@pytest.mark.parametrize("isa", samples.available_isas())
def test_a_token_is_not_changed_by_its_neighbours(pool, quant, isa) -> None:
    cols = 512 + (32 if quant.block_size == 32 else 0)
    packed = samples.random_weights(quant, 131, cols)
    x = _activations(300, cols)  # more than share one unpacking
    with samples.isa(isa):
        together = samples.linear(pool, quant, packed, x)
        for num_tokens in (1, 2, 3, 7, 64, 65, 257):
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
    for quant in ALL_TYPES:
        packed = samples.random_weights(quant, 20, 512)
        x = _activations(9, 512)
        x[1, 300] = bad
        for count in (2, 9):
            with samples.isa(isa):
                y = samples.linear(pool, quant, packed, x[:count])
            assert np.isfinite(np.delete(y, 1, axis=0)).all() and not np.isfinite(y[1]).any(), quant.name


def _quantize(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q, scales, sums over 32 and (for blocks of 256) sums over 16 of one row."""
    cols = x.size
    scale_at, sums32_at, sums16_at, nbytes = _native.quantized_layout(block, cols)
    out = np.full(nbytes, 0xAA, dtype=np.uint8)
    _native.quantize(x.ctypes.data, block, cols, out.ctypes.data)
    # Products read whole vectors: what lies behind the row's own numbers must be zero, not left over.
    assert not out[cols:scale_at].any() and not out[scale_at + cols // block * 4 : sums32_at].any()
    assert not out[sums32_at + cols // 32 * 2 : sums16_at].any()
    q = out[:cols].view(np.int8)
    scales = out[scale_at : scale_at + cols // block * 4].view(np.float32)
    sums32 = out[sums32_at : sums32_at + cols // 32 * 2].view(np.int16)
    sums16 = out[sums16_at : sums16_at + (cols // 16 * 2 if block == 256 else 0)].view(np.int16)
    return q, scales, sums32, sums16


@pytest.mark.parametrize("block", [32, 256])
@pytest.mark.parametrize("isa", samples.available_isas())
def test_activations_are_rounded_to_the_nearest_of_255_levels(isa, block) -> None:
    cols = 1024 + (32 if block == 32 else 0)
    x = _activations(1, cols)[0]
    x[256:512] = 0
    x[512:768] *= np.float32(1e30)
    x[768:1024] *= np.float32(1e-39)  # subnormal: as good as nothing
    with samples.isa(isa):
        q, scales, sums32, sums16 = _quantize(x, block)
    with samples.isa("base"):
        assert all(np.array_equal(a, b) for a, b in zip(_quantize(x, block), (q, scales, sums32, sums16), strict=True))
    assert np.array_equal(q.astype(np.int64).reshape(-1, 32).sum(axis=1), sums32)
    if block == 256:
        assert np.array_equal(q.astype(np.int64).reshape(-1, 16).sum(axis=1), sums16)
    for number, (values, scale) in enumerate(zip(x.reshape(-1, block), scales, strict=True)):
        rounded = q[number * block : (number + 1) * block].astype(np.int64)
        is_nothing = number * block // 256 in (1, 3)
        assert (scale == 0) == is_nothing
        if is_nothing:
            assert not rounded.any()
            continue
        assert np.abs(rounded).max() == 127
        # Half a step, and the rounding of scale and product.
        assert np.abs(rounded * float(scale) - values).max() <= float(scale) * (0.5 + 127 * 2.0**-22)


packed_types = pytest.mark.parametrize("quant", [q for q in ALL_TYPES if q.block_size > 1], ids=lambda q: q.name)


@packed_types
@pytest.mark.parametrize("isa", samples.available_isas())
def test_whole_number_activations_leave_only_float_rounding(pool, isa, quant) -> None:
    """With a largest value of 127 in every block the rounding of activations is exact, and so are the integer sums."""
    packed = samples.random_weights(quant, 50, 512)
    x = np.random.default_rng(3).integers(-127, 128, (4, 512)).astype(np.float32)
    x[:, 17::32] = 127
    truth = x.astype(np.float64) @ quant.decode(packed).astype(np.float64).T
    with samples.isa(isa):
        y = samples.linear(pool, quant, packed, x)
    # A block's sum passes through four float32 roundings (conversion, scale, minimum, subtraction) and the addition of
    # 2 or 16 blocks through a few more, of terms no larger than the sum of magnitudes; the decoded weights carry three.
    # A type with minimums subtracts two numbers larger than their difference: 2 stands for the minimum.
    bound = 12 * 2.0**-24 * (np.abs(x).astype(np.float64) @ (np.abs(quant.decode(packed)) + 2).T)
    assert (np.abs(y - truth) <= bound).all()


@packed_types
@pytest.mark.parametrize("isa", samples.available_isas())
def test_extreme_bytes_do_not_overflow_the_narrow_sums(pool, isa, quant) -> None:
    """Vector units add products in 16 bits for a while: the largest weights times the largest activations must fit."""
    cols, num_tokens = 512, 9
    x = np.ones((num_tokens, cols), dtype=np.float32)
    x[1::3] = -1
    x[2::3, ::2] = -1
    for fill in (0x00, 0x08, 0x77, 0x7F, 0x80, 0x88, 0xF0, 0xFF):
        packed = samples.constant_weights(quant, 20, cols, fill)
        weights = quant.decode(packed).astype(np.float64)
        truth = x.astype(np.float64) @ weights.T
        for count in (1, num_tokens):
            with samples.isa(isa):
                y = samples.linear(pool, quant, packed, x[:count])
            # 127 * (1 / 127) is 1 to within a unit in the last place; sums as above. A saturated one is off by a tenth.
            bound = 64 * 2.0**-24 * np.abs(weights).sum(axis=1)
            assert (np.abs(y - truth[:count]) <= bound).all(), hex(fill)


@packed_types
@pytest.mark.parametrize("isa", samples.available_isas())
def test_int8_activations_cost_less_than_a_hundredth(pool, isa, quant) -> None:
    """The promise to users: relative error <= 1e-2 against float products of the same packed weights.

    A block's step is its largest magnitude / 127. For normal values that is about 2.1 / 127 sigma in 32 values and
    2.8 / 127 in 256; an even error of one step has a deviation of step / sqrt(12): 0.5 % and 0.65 % of the activations'
    own. Products with weights that do not know the error keep that ratio. Random blocks of a type with minimums have a
    common part: one number per token, so the ratio is taken over many tokens; each has the same bits alone (above).
    """
    cols, num_tokens = 2048, 200
    packed = samples.random_weights(quant, 100, cols)
    x = _activations(num_tokens, cols)
    truth = x.astype(np.float64) @ quant.decode(packed).astype(np.float64).T
    with samples.isa(isa), samples.activation_bits(8):
        y = samples.linear(pool, quant, packed, x)
    relative = np.linalg.norm(y - truth) / np.linalg.norm(truth)
    expected = 0.005 if quant.block_size == 32 else 0.0065
    assert 0.7 * expected <= relative <= min(1e-2, 1.3 * expected), relative


@packed_types
def test_sixteen_bit_activations_follow_the_float_product(pool, quant) -> None:
    """The rest of the first rounding is as large as its steps; rounded to 1/127 of that, 0.7 % of 0.7 % is left."""
    cols = 2048 + (32 if quant.block_size == 32 else 0)
    packed = samples.random_weights(quant, 35, cols)
    x = _activations(150, cols)
    truth = x.astype(np.float64) @ quant.decode(packed).astype(np.float64).T
    with samples.activation_bits(16):
        y = samples.linear(pool, quant, packed, x)
        assert np.linalg.norm(y - truth) <= 6e-5 * np.linalg.norm(truth)
        for name in samples.available_isas():
            with samples.isa(name):
                for num_tokens in (1, 2, 64, 65):
                    assert_same_bits(samples.linear(pool, quant, packed, x[:num_tokens]), y[:num_tokens])
        x[3, 5] = np.inf
        y = samples.linear(pool, quant, packed, x)
        assert np.isfinite(y[:3]).all() and not np.isfinite(y[3]).any()


def test_activations_have_eight_or_sixteen_bits() -> None:
    with pytest.raises(ValueError, match="8 or 16"):
        _native.set_activation_bits(12)
    assert _native.activation_bits() == 16


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
