"""The fused experts of a layer: whatever the slots, the arrival and the waves, the same bits and no lease left."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from tests import native_samples as samples
from tests.native_samples import assert_same_bits

from expertide import _native
from expertide.formats import quants

NUM_LAYERS, LAYER, NUM_EXPERTS, HIDDEN, INNER, K = 3, 2, 8, 512, 256, 3


class World:
    """Eight experts of one layer in numpy arrays, a residency table and the layer under test."""

    def __init__(self, gate: str = "Q4_K", up: str = "Q4_K", down: str = "Q5_0", seed: int = 0) -> None:
        self.pool = _native.ThreadPool(2)
        self.residency = _native.Residency(NUM_LAYERS, NUM_EXPERTS, 3, NUM_EXPERTS)
        self.quants = tuple(quants.by_name(name) for name in (gate, up, down))
        shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        self.weights = [
            [
                samples.random_weights(quant, rows, cols, seed=seed + 31 * expert + number)
                for number, (quant, (rows, cols)) in enumerate(zip(self.quants, shapes, strict=True))
            ]
            for expert in range(NUM_EXPERTS)
        ]
        parts = [(number, 0, quant.ggml_id) for number, quant in enumerate(self.quants)]
        self.layer = _native.MoeLayer(self.residency, LAYER, HIDDEN, INNER, *parts)
        self.free_slots = list(range(NUM_EXPERTS))

    def reserve(self, expert: int, num_reads: int) -> int:
        """absent -> loading (resident for 0 reads), with one lease for the caller."""
        slot = self.free_slots.pop()
        parts = [array.ctypes.data for array in self.weights[expert]]
        self.residency.reserve(slot, LAYER, expert, parts, num_reads, False)
        return slot

    def load(self, *experts: int) -> None:
        for expert in experts:
            self.reserve(expert, 0)
            self.residency.release(LAYER, expert)

    def run(self, step: Step) -> list[int]:
        return self.layer.run(
            self.pool,
            step.x.ctypes.data,
            step.ids.ctypes.data,
            step.weights.ctypes.data,
            len(step.x),
            step.ids.shape[1],
            step.out.ctypes.data,
        )

    def mlp(self, expert: int, x: np.ndarray) -> np.ndarray:
        specs = [
            (array.ctypes.data, quant.ggml_id, array.shape[0], cols)
            for array, quant, cols in zip(self.weights[expert], self.quants, (HIDDEN, HIDDEN, INNER), strict=True)
        ]
        y = np.empty_like(x)
        _native.expert_mlp(self.pool, *specs, x.ctypes.data, len(x), y.ctypes.data)
        return y

    def expected(self, step: Step) -> np.ndarray:
        """Token by token, expert by expert, summed in the order of k."""
        out = np.empty_like(step.out)
        for token, (ids, weights) in enumerate(zip(step.ids, step.weights, strict=True)):
            results = [self.mlp(expert, step.x[token : token + 1])[0] for expert in ids]
            total = weights[0] * results[0]
            for weight, result in zip(weights[1:], results[1:], strict=True):
                total = total + weight * result
            out[token] = total
        return out


class Step:
    def __init__(self, num_tokens: int, k: int = K, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.x = rng.standard_normal((num_tokens, HIDDEN), dtype=np.float32)
        chosen = [rng.choice(NUM_EXPERTS, k, replace=False) for _ in range(num_tokens)]
        self.ids = np.array(chosen, dtype=np.int32).reshape(num_tokens, k)
        self.weights = rng.uniform(0.05, 1, (num_tokens, k)).astype(np.float32)
        self.out = np.full((num_tokens, HIDDEN), np.nan, dtype=np.float32)


@pytest.mark.parametrize("num_tokens", [1, 7, 70])
@pytest.mark.parametrize("isa", samples.available_isas())
def test_a_resident_layer_equals_its_experts_one_by_one(num_tokens, isa) -> None:
    world, step = World(), Step(num_tokens)
    world.load(*range(NUM_EXPERTS))
    with samples.isa(isa):
        assert world.run(step) == []
        assert_same_bits(step.out, world.expected(step))
    assert world.residency.total_leases() == 0 and not world.layer.is_pending


def test_sixteen_bit_activations_reach_the_experts() -> None:
    world, step = World(), Step(70)
    world.load(*range(NUM_EXPERTS))
    with samples.activation_bits(8):
        assert world.run(step) == []
    rounded = step.out.copy()
    with samples.activation_bits(16):
        assert world.run(step) == []
        assert_same_bits(step.out, world.expected(step))
    # Three int8 roundings of 0.5 to 0.7 % are what the second plane takes away.
    difference = np.linalg.norm(step.out - rounded) / np.linalg.norm(rounded)
    assert 2e-3 < difference < 2e-2


@pytest.mark.parametrize(
    "types",
    [("Q4_K", "Q6_K", "Q8_0"), ("Q8_0", "Q8_0", "Q4_K"), ("F32", "BF16", "F16"), ("MXFP4", "IQ4_XS", "Q2_K")],
    ids="-".join,
)
def test_gate_up_and_down_may_have_any_types(types) -> None:
    world, step = World(*types), Step(5)
    world.load(*range(NUM_EXPERTS))
    assert world.run(step) == []
    assert_same_bits(step.out, world.expected(step))


def test_the_experts_agree_with_float64() -> None:
    world, step = World("F32", "F32", "F32"), Step(4)
    world.load(*range(NUM_EXPERTS))
    world.run(step)
    truth = np.zeros((4, HIDDEN))
    for token, k in itertools.product(range(4), range(K)):
        gate, up, down = (array.view(np.float32).astype(np.float64) for array in world.weights[step.ids[token, k]])
        x = step.x[token].astype(np.float64)
        g = gate @ x
        truth[token] += step.weights[token, k] * (down @ (g / (1 + np.exp(-g)) * (up @ x)))
    # Float32 sums of 512 and 256 terms in 32 lanes: some twenty roundings of values of this size, and some room.
    assert np.abs(step.out - truth).max() <= 40 * 2.0**-24 * np.abs(truth).max()


def test_gate_and_up_may_share_a_part() -> None:
    world, step = World(), Step(6)
    q4_k, _, down = world.quants
    stacked = [np.concatenate(expert[:2]) for expert in world.weights]
    offset = INNER * q4_k.row_bytes(HIDDEN)
    layer = _native.MoeLayer(
        world.residency, 0, HIDDEN, INNER, (0, 0, q4_k.ggml_id), (0, offset, q4_k.ggml_id), (1, 0, down.ggml_id)
    )
    for expert in range(NUM_EXPERTS):
        parts = [stacked[expert].ctypes.data, world.weights[expert][2].ctypes.data, 0]
        world.residency.reserve(expert, 0, expert, parts, 0, False)
        world.residency.release(0, expert)
    world.layer = layer
    assert world.run(step) == []
    assert_same_bits(step.out, world.expected(step))


@pytest.mark.parametrize("wave", [1, 2, 8])
@pytest.mark.parametrize("descending", [False, True])
def test_waves_of_misses_in_any_order_give_the_same_bits(wave, descending) -> None:
    world, step = World(), Step(9)
    world.load(1, 4)
    misses = world.run(step)
    assert misses == sorted(set(step.ids.ravel().tolist()) - {1, 4})
    assert world.layer.is_pending and np.isnan(step.out).all()
    arriving = misses[::-1] if descending else misses
    for begin in range(0, len(arriving), wave):
        experts = arriving[begin : begin + wave]
        for expert in experts:
            world.reserve(expert, 0)
        world.layer.finish(world.pool, experts, begin + wave >= len(arriving))
    assert_same_bits(step.out, world.expected(step))
    assert world.residency.total_leases() == 0


def test_experts_still_loading_are_waited_for() -> None:
    world, step = World(), Step(9)
    wanted = sorted(set(step.ids.ravel().tolist()))
    slots = [world.reserve(expert, 1) for expert in wanted]
    for expert in wanted:
        world.residency.release(LAYER, expert)  # the load goes on without the one that asked for it

    def arrive() -> None:
        for slot in slots[::-1]:
            time.sleep(0.002)
            world.residency.complete(slot)

    thread = threading.Thread(target=arrive)
    thread.start()
    assert world.run(step) == []
    thread.join()
    assert_same_bits(step.out, world.expected(step))
    assert world.residency.total_leases() == 0


def test_the_wait_for_a_miss_is_reported() -> None:
    world, step = World(), Step(1)
    misses = world.run(step)
    slots = [world.reserve(expert, 1) for expert in misses]
    timer = threading.Timer(0.05, lambda: [world.residency.complete(slot) for slot in slots])
    timer.start()
    stall_ns = world.layer.finish(world.pool, misses, True)
    timer.join()
    assert 20_000_000 < stall_ns < 5_000_000_000
    assert_same_bits(step.out, world.expected(step))


def test_a_failed_read_ends_the_step_and_the_next_one_works() -> None:
    world, step = World(), Step(9)
    world.load(step.ids[0, 0])
    misses = world.run(step)
    slots = [world.reserve(expert, 1) for expert in misses]
    for slot in slots[1:]:
        world.residency.complete(slot)
    world.residency.fail(slots[0], 5, 1, 4096, 100, 10)
    with pytest.raises(_native.ReadFailed):
        world.layer.finish(world.pool, misses, True)
    assert world.layer.is_pending
    world.layer.abort()
    world.layer.abort()  # harmless
    assert world.residency.total_leases() == 0
    assert world.residency.collect_failed() == [slots[0]]

    world.free_slots.append(slots[0])
    assert world.run(step) == [misses[0]]
    world.reserve(misses[0], 0)
    world.layer.finish(world.pool, misses[:1], True)
    assert_same_bits(step.out, world.expected(step))


def test_misuse_is_refused_and_leases_nothing_more() -> None:
    world, step = World(), Step(2)
    with pytest.raises(RuntimeError, match="no step"):
        world.layer.finish(world.pool, [], True)
    misses = world.run(step)
    with pytest.raises(RuntimeError, match="has not ended"):
        world.run(step)
    absent = next(expert for expert in range(NUM_EXPERTS) if expert not in misses)
    with pytest.raises(ValueError, match="not a miss"):
        world.layer.finish(world.pool, [absent], False)
    with pytest.raises(ValueError, match="not reserved"):
        world.layer.finish(world.pool, misses[:1], False)
    with pytest.raises(RuntimeError, match="never given"):
        world.layer.finish(world.pool, [], True)
    world.layer.abort()
    assert world.residency.total_leases() == 0


@pytest.mark.parametrize("bad", [-1, NUM_EXPERTS])
def test_an_expert_outside_the_table_is_refused(bad) -> None:
    world, step = World(), Step(2)
    world.load(*range(NUM_EXPERTS))
    step.ids[1, 1] = bad
    with pytest.raises(IndexError):
        world.run(step)
    assert world.residency.total_leases() == 0 and not world.layer.is_pending


def test_shapes_that_do_not_fit_the_types_are_refused() -> None:
    residency = _native.Residency(1, 2, 2, 2)
    q4_k = quants.by_name("Q4_K").ggml_id
    f32 = quants.by_name("F32").ggml_id
    with pytest.raises(ValueError, match="blocks of 256"):
        _native.MoeLayer(residency, 0, 512, 100, (0, 0, f32), (0, 0, f32), (1, 0, q4_k))
    with pytest.raises(ValueError, match="part 2"):
        _native.MoeLayer(residency, 0, 512, 256, (0, 0, f32), (0, 0, f32), (2, 0, f32))
    with pytest.raises(ValueError, match="layer 1"):
        _native.MoeLayer(residency, 1, 512, 256, (0, 0, f32), (0, 0, f32), (1, 0, f32))
    with pytest.raises(ValueError, match="quant type 5"):
        _native.MoeLayer(residency, 0, 512, 256, (0, 0, 5), (0, 0, f32), (1, 0, f32))
