"""Packed products and decoding on the GPU, and the reference."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.samples import FLOAT16_PRODUCTS, FLOAT32_SUMS, WHOLE_PRODUCTS, assert_close, matrix, normal, width
from tests.packed_samples import TYPE_NAMES

from expertide.kernels import select
from expertide.kernels.gpu import products
from expertide.kernels.gpu.matrix import GpuMatrix
from expertide.kernels.qtensor import QTensor

REFERENCE = select("reference", num_threads=1)

# On a GPU a product and a subtraction may be one rounding instead of two; the values here are below 20.
DECODED = 1e-5


@pytest.mark.parametrize("name", TYPE_NAMES)
@pytest.mark.parametrize(("rows", "num_blocks", "odd"), [(1, 1, 1), (3, 5, 19)])
def test_decoding_agrees_with_the_formats(device, name, rows, num_blocks, odd) -> None:
    w, held = matrix(name, rows, width(name, num_blocks, odd), device)
    expected = torch.from_numpy(held.decode())
    decoded = products.dequantise(w)
    assert (decoded.cpu() - expected).abs().max() <= DECODED
    assert torch.equal(decoded, products.dequantise(w))
    half = products.dequantise(w, dtype=torch.float16)
    assert torch.equal(half, decoded.to(torch.float16))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_0", "F32"])
def test_rows_are_looked_up_by_id_and_an_id_outside_gives_zeros(device, name) -> None:
    w, held = matrix(name, 7, 256, device)
    ids = torch.tensor([0, 6, 3, 3])
    found = products.embedding(ids.to(device), w)
    assert (found.cpu() - REFERENCE.embedding(ids, held)).abs().max() <= DECODED
    assert not products.embedding(torch.tensor([-1, 7]).to(device), w).any()


@pytest.mark.parametrize("name", TYPE_NAMES)
@pytest.mark.parametrize(("rows", "num_blocks", "odd", "num_tokens"), [(7, 1, 3, 1), (11, 3, 77, 3)])
def test_few_tokens_agree_with_the_reference(device, name, rows, num_blocks, odd, num_tokens) -> None:
    w, held = matrix(name, rows, width(name, num_blocks, odd), device)
    x = normal(num_tokens, w.cols)
    tolerance = FLOAT32_SUMS if w.quant.block_size == 1 else WHOLE_PRODUCTS
    assert_close(products.linear(x.to(device), w), REFERENCE.linear(x, held), tolerance)


def test_rows_longer_than_one_step_agree_with_the_reference(device) -> None:
    w, held = matrix("Q4_0", 5, 65 * 32, device)
    x = normal(2, w.cols)
    assert_close(products.linear(x.to(device), w), REFERENCE.linear(x, held), WHOLE_PRODUCTS)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q5_0", "Q8_0", "F16"])
def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it(device, name) -> None:
    w, _ = matrix(name, 5, 256, device)
    x = normal(16, w.cols).to(device)
    alone = torch.cat([products.linear(x[t : t + 1].contiguous(), w) for t in range(16)])
    for num_tokens in (2, 16):
        assert torch.equal(products.linear(x[:num_tokens], w), alone[:num_tokens])


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_many_tokens_agree_with_the_reference(device, name) -> None:
    w, held = matrix(name, 21, width(name, 3, 77), device)
    x = normal(17, w.cols)
    tolerance = FLOAT32_SUMS if name == "F32" else FLOAT16_PRODUCTS
    assert_close(products.linear(x.to(device), w), REFERENCE.linear(x, held), tolerance)


def test_activations_beyond_float16_are_scaled_by_token(device) -> None:
    w, held = matrix("Q8_0", 9, 64, device)
    x = normal(17, w.cols)
    x[3] *= 1e6
    x[4] *= 1e-9
    x[5] = 0
    found, expected = products.linear(x.to(device), w), REFERENCE.linear(x, held)
    for t in range(17):
        if t == 5:
            assert not found[t].any()
        else:
            assert_close(found[t], expected[t], FLOAT16_PRODUCTS)


@pytest.mark.parametrize("num_tokens", [2, 17])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q2_K", "F16"])
def test_heads_agree_also_where_they_lie_apart_or_are_transposed(device, name, num_tokens) -> None:
    """The joint matrix of keys and values: per head 3 rows for the keys, 2 for the values."""
    w, held = matrix(name, 4 * 5, 256, device)
    tolerance = WHOLE_PRODUCTS if num_tokens <= 16 else FLOAT16_PRODUCTS
    values = w.heads(4, rows=2, first_row=3, stride=5)
    held_values = QTensor(held.address + 3 * held.row_bytes, held.quant, (4, 2, 256), held, 5 * held.row_bytes)
    x = normal(num_tokens, 4, 256)
    assert_close(products.head_linear(x.to(device), values), REFERENCE.head_linear(x, held_values), tolerance)
    keys = w.heads(4, rows=3, stride=5, is_transposed=True)
    held_keys = QTensor(held.address, held.quant, (4, 3, 256), held, 5 * held.row_bytes, is_transposed=True)
    x = normal(num_tokens, 4, 3)
    assert_close(products.head_linear(x.to(device), keys), REFERENCE.head_linear(x, held_keys), tolerance)


def test_a_range_of_rows_is_a_matrix_of_its_own(device) -> None:
    w, held = matrix("Q6_K", 12, 256, device)
    x = normal(2, 256)
    expected = REFERENCE.linear(x, held.row_range(3, 10))
    assert_close(products.linear(x.to(device), w.row_range(3, 10)), expected, WHOLE_PRODUCTS)


def test_matrices_with_heads_in_host_memory_arrive_as_heads(device) -> None:
    _, held = matrix("Q5_0", 6, 64, device)
    three = QTensor(held.address, held.quant, (3, 2, 64), held)
    w = GpuMatrix.from_qtensor(three, device)
    x = normal(2, 3, 64)
    assert_close(products.head_linear(x.to(device), w), REFERENCE.head_linear(x, three), WHOLE_PRODUCTS)
