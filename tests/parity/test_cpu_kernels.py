"""The native ops and the reference ops, through the protocol that models use."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests import native_samples as samples

from expertide.formats import quants
from expertide.formats.quants.base import QuantType
from expertide.kernels.ops import Kernels
from expertide.kernels.qtensor import QTensor


def _weights(name: str, *shape: int) -> QTensor:
    quant = quants.by_name(name)
    rows = int(np.prod(shape[:-1]))
    return QTensor.from_array(samples.random_weights(quant, rows, shape[-1]), quant, shape)


def _normal(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(7).standard_normal(shape, dtype=np.float32))


def _assert_close(native: torch.Tensor, reference: torch.Tensor, relative: float) -> None:
    assert native.shape == reference.shape and native.dtype == torch.float32
    difference = (native - reference).abs().max().item()
    scale = reference.abs().max().item()
    assert difference <= relative * scale, (difference, scale)


# Float32 products of a few hundred terms differ by their order of summation: some units in the sixth decimal.
ROUNDING = 2e-6
# Activations of packed types are rounded to 1/127 of a block's largest: 0.7 % of a typical output (test_native_kernels)
# and an unlucky one in some thousand is off by four times that; the largest output is three times a typical one.
ACTIVATIONS_ROUNDED = 0.02

TYPES = [("F32", ROUNDING), ("F16", ROUNDING)]
TYPES += [(name, ACTIVATIONS_ROUNDED) for name in ("Q5_0", "Q6_K", "Q4_K", "Q8_0", "MXFP4")]


def test_both_follow_the_protocol(native, reference) -> None:
    assert isinstance(native, Kernels) and isinstance(reference, Kernels)
    assert (native.name, reference.name) == ("native", "reference")


@pytest.mark.parametrize(("name", "relative"), TYPES)
def test_linear_agrees(native, reference, name, relative) -> None:
    w, x = _weights(name, 130, 512), _normal(5, 512)
    _assert_close(native.linear(x, w), reference.linear(x, w), relative)
    # A view with gaps between its rows is read as what it says.
    wide = _normal(5, 600)
    assert torch.equal(native.linear(wide[:, :512], w), native.linear(wide[:, :512].contiguous(), w))


@pytest.mark.parametrize(("name", "relative"), TYPES)
def test_head_linear_agrees_also_for_heads_lying_apart(native, reference, name, relative) -> None:
    x = _normal(3, 4, 256)
    w = _weights(name, 4, 20, 256)
    _assert_close(native.head_linear(x, w), reference.head_linear(x, w), relative)
    apart = QTensor(w.address, w.quant, (4, 12, 256), w, lead_stride=20 * w.row_bytes)
    _assert_close(native.head_linear(x, apart), reference.head_linear(x, apart), relative)


@pytest.mark.parametrize("name", [name for name, _ in TYPES])
def test_embedding_is_exact(native, reference, name) -> None:
    w = _weights(name, 50, 256)
    ids = torch.tensor([0, 49, 3, 3], dtype=torch.int64)
    assert torch.equal(native.embedding(ids, w), reference.embedding(ids, w))
    with pytest.raises(IndexError):
        native.embedding(torch.tensor([50]), w)


def test_swiglu_and_the_sum_over_experts_agree(native, reference) -> None:
    gate, up = _normal(3, 77) * 5, _normal(3, 77)
    _assert_close(native.swiglu(gate, up), reference.swiglu(gate, up), ROUNDING)
    results, weights = _normal(4, 6, 100), _normal(4, 6)
    # The same float32 operations in the same order: exactly equal.
    assert torch.equal(native.moe_sum(results, weights), reference.moe_sum(results, weights))


@pytest.mark.parametrize(("name", "relative"), TYPES)
def test_expert_mlp_agrees(native, reference, name, relative) -> None:
    gate, up, down = _weights(name, 256, 512), _weights(name, 256, 512), _weights(name, 512, 256)
    x = _normal(6, 512)
    # Three products after one another.
    _assert_close(native.expert_mlp(x, gate, up, down), reference.expert_mlp(x, gate, up, down), 3 * relative)


class _Unknown(QuantType):
    """Pairs of float32: a type that no native kernel knows."""

    name, ggml_id, block_size, block_bytes = "UNKNOWN", 38, 2, 8

    def _decode_blocks(self, blocks: np.ndarray, values: np.ndarray) -> None:
        values[:] = blocks.view(np.float32)


def test_a_type_without_a_native_kernel_runs_on_the_reference(native, reference) -> None:
    values = np.random.default_rng(1).standard_normal((30, 30), dtype=np.float32)
    w = QTensor.from_array(values.view(np.uint8), _Unknown(), (30, 30))
    x = _normal(2, 30)
    assert torch.equal(native.linear(x, w), reference.linear(x, w))
    _assert_close(native.expert_mlp(x, w, w, w), reference.expert_mlp(x, w, w, w), ROUNDING)
    ids = torch.tensor([4, 1])
    assert torch.equal(native.embedding(ids, w), reference.embedding(ids, w))
