"""The executor: right sums in every cache, each needed expert read once, leases and reads all back, also on failure."""

from __future__ import annotations

import errno
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np
import pytest
import torch
from torch import Tensor

from chaos_reader import ChaosReader, chaos
from expert_world import ExpertFile, World, all_windows_bytes, smallest_cache_bytes, write_experts
from expertide._native import quant_types
from expertide.errors import StorageError
from expertide.experts.executor import MAX_READS_IN_FLIGHT, MoEExecutor
from expertide.experts.layer_step import NativeLayer, ReferenceLayer
from expertide.experts.policies import POLICY_NAMES
from expertide.formats.quants import by_name
from expertide.kernels import select
from expertide.kernels.ops import Kernels

K = 2


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    return write_experts(tmp_path_factory.mktemp("experts") / "experts.bin")


@pytest.fixture(scope="module", params=["native", "reference"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    kernels = select(request.param, num_threads=2)
    yield kernels
    kernels.close()


@contextmanager
def executor_of(file: ExpertFile, kernels: Kernels, **options: object) -> Iterator[tuple[World, MoEExecutor]]:
    with World(file, k=K, **options) as world:  # type: ignore[arg-type]
        yield world, MoEExecutor(file.catalog, world.cache, world.residency, world.reader, kernels)
        assert world.residency.total_leases() == 0
        world.cache.check()


def batch(num_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((num_tokens, 64)).astype(np.float32))
    ids = np.stack([rng.permutation(8)[:K] for _ in range(num_tokens)]).astype(np.int32)
    weights = rng.random((num_tokens, K)).astype(np.float32)
    return x, torch.from_numpy(ids), torch.from_numpy(weights)


def session(executor: MoEExecutor, world: World) -> list[bytes]:
    """A prompt of two chunks and some tokens; the bytes of every output."""
    outputs = []
    for step, num_tokens in enumerate((13, 13, 1, 1, 1, 1, 1, 1, 1, 1)):
        for layer_id in (1, 2, 3):
            x, ids, weights = batch(num_tokens, seed=step * 10 + layer_id)
            y = executor.run(layer_id, x, ids, weights, "prefill" if num_tokens > 1 else "decode")
            outputs.append(y.numpy().tobytes())
            assert world.residency.total_leases() == 0
            world.cache.check()
    return outputs


def truth(file: ExpertFile, layer_id: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Float64, expert by expert."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    gate, up, down = (torch.from_numpy(file.weights[layer_id, n]).double() for n in ("gate", "up", "down"))
    for t in range(x.shape[0]):
        for k in range(K):
            e, v = int(ids[t, k]), x[t].double()
            y[t] += weights[t, k].double() * (down[e] @ (torch.nn.functional.silu(gate[e] @ v) * (up[e] @ v)))
    return y


def test_outputs_are_right(file: ExpertFile, kernels: Kernels) -> None:
    with executor_of(file, kernels) as (_, executor):
        for layer_id in (1, 2, 3):
            x, ids, weights = batch(9, layer_id)
            y = executor.run(layer_id, x, ids, weights, "prefill")
            # Float32 sums of up to 96 products: 1e-5 is some 50 roundings.
            torch.testing.assert_close(y.double(), truth(file, layer_id, x, ids, weights), atol=1e-5, rtol=1e-5)


def test_bits_do_not_depend_on_cache_policy_or_reads(
    file: ExpertFile, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest, everything = smallest_cache_bytes(file.catalog, K), all_windows_bytes(file.catalog)
    with executor_of(file, kernels, cache_bytes=everything) as (world, executor):
        expected = session(executor, world)
    for policy in POLICY_NAMES:
        for serial in (False, True):
            with executor_of(file, kernels, policy=policy, serial=serial) as (world, executor):
                assert session(executor, world) == expected
                assert session(executor, world) == expected, "again in the same process"
    for seed in range(4):
        monkeypatch.setattr("expertide.memory.reader.FileReader", chaos(seed))
        size = smallest + (everything - smallest) * seed // 4
        with executor_of(file, kernels, policy=POLICY_NAMES[seed], cache_bytes=size) as (world, executor):
            assert session(executor, world) == expected


def test_statistics_add_up(file: ExpertFile, kernels: Kernels) -> None:
    with executor_of(file, kernels) as (world, executor):
        before = executor.stats()
        session(executor, world)
        stats = executor.stats() - before
        assert stats.decode.requests == 3 * K * 8
        for phase in (stats.prefill, stats.decode):
            assert phase.hits_host + phase.misses == phase.requests == phase.computed_on_cpu
            assert phase.read_s > 0
        needed = sum(file.catalog.expert_nbytes(layer_id) * K * 8 for layer_id in (1, 2, 3))
        assert stats.decode.needed_bytes == needed
        assert stats.prefill.read_bytes + stats.decode.read_bytes == world.reader.stats().read_bytes
        assert stats.prefill.evictions + stats.decode.evictions == world.cache.num_evictions
        assert stats.to_json()["decode"]["hit_rate"] == pytest.approx(stats.decode.hits_host / stats.decode.requests)


def test_prefill_reads_each_needed_expert_once_per_layer_and_chunk(file: ExpertFile, kernels: Kernels) -> None:
    # The last layer: after it nothing is read ahead.
    with executor_of(file, kernels) as (world, executor):
        for step in range(3):
            x, ids, weights = batch(30, step)
            before, stats = world.reader.stats().read_bytes, executor.stats().prefill
            executor.run(3, x, ids, weights, "prefill")
            after = executor.stats().prefill - stats
            assert after.requests == len(ids.unique()) == 8
            windows = sum(
                world.reader.window(part.ranges[e]).nbytes for part in file.catalog.layers[3] for e in range(8)
            )
            assert world.reader.stats().read_bytes - before <= windows + 3 * 4096
            if step:
                assert after.hits_host > 0, "residents of the layer are used in place first"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_a_prompt_reads_each_absent_expert_once_although_reads_run_ahead(
    file: ExpertFile, kernels: Kernels, share: float
) -> None:
    smallest, everything = smallest_cache_bytes(file.catalog, K), all_windows_bytes(file.catalog)
    with executor_of(file, kernels, cache_bytes=int(smallest + share * (everything - smallest))) as (world, executor):
        for chunk in range(3):
            before = world.reader.stats().num_reads
            absent = int(np.count_nonzero(world.residency.table[1:] < 0))
            for layer_id in (1, 2, 3):
                x, ids, weights = batch(30, chunk)
                assert len(ids.unique()) == 8
                executor.run(layer_id, x, ids, weights, "prefill")
            world.residency.wait_idle()
            # What was in memory when the chunk began may be evicted before its layer comes; nothing goes twice.
            assert 3 * absent <= world.reader.stats().num_reads - before <= 3 * 24 + 3
        ahead = executor.stats().ahead
        assert ahead.loads > 0 and ahead.useful == ahead.loads and ahead.wasted == 0


def test_the_next_layer_is_under_way_when_a_layer_ends(file: ExpertFile, kernels: Kernels) -> None:
    with executor_of(file, kernels, cache_bytes=all_windows_bytes(file.catalog)) as (world, executor):
        executor.run(1, *batch(30, 1), "prefill")
        assert np.count_nonzero(world.residency.table[2] >= 0) == 8
        assert np.count_nonzero(world.residency.table[3] >= 0) == 0
        before = executor.stats().prefill
        executor.run(2, *batch(30, 2), "prefill")
        after = executor.stats().prefill - before
        assert (after.requests, after.hits_host) == (8, 8)


def test_nothing_runs_ahead_where_it_may_be_in_vain(file: ExpertFile, kernels: Kernels) -> None:
    with executor_of(file, kernels, cache_bytes=all_windows_bytes(file.catalog)) as (world, executor):
        executor.run(1, *batch(2, 1), "prefill")  # at most 4 of 8 experts
        executor.run(1, *batch(30, 1), "decode")
        assert np.count_nonzero(world.residency.table[2] >= 0) == 0
    with World(file, k=K, cache_bytes=all_windows_bytes(file.catalog)) as world:
        off = MoEExecutor(file.catalog, world.cache, world.residency, world.reader, kernels, reads_ahead=False)
        off.run(1, *batch(30, 1), "prefill")
        assert np.count_nonzero(world.residency.table[2] >= 0) == 0


def test_a_read_ahead_that_fails_is_read_again_or_named(file: ExpertFile, kernels: Kernels) -> None:
    x, ids, weights = batch(30, 2)
    with executor_of(file, kernels, cache_bytes=all_windows_bytes(file.catalog)) as (world, executor):
        broken = file.catalog.layers[2][1].ranges[4]
        world.reader.inject_fault(0, broken.offset + 4096, 1, errno.EIO)
        executor.run(1, *batch(30, 1), "prefill")
        world.residency.wait_idle()
        assert world.residency.slot_of(2, 4) == -1, "its reader has not come yet: it is absent again"
        y = executor.run(2, x, ids, weights, "prefill")
        torch.testing.assert_close(y.double(), truth(file, 2, x, ids, weights), atol=1e-5, rtol=1e-5)


def test_reads_in_flight_are_bounded(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_experts(tmp_path_factory.mktemp("many") / "x.bin", num_layers=1, num_experts=24, hidden=32, inner=32)
    monkeypatch.setattr("expertide.memory.reader.FileReader", chaos(1, 0.001))
    kernels = select("reference", num_threads=1)
    with executor_of(file, kernels, cache_bytes=all_windows_bytes(file.catalog)) as (world, executor):
        ids = torch.arange(24, dtype=torch.int32).reshape(12, 2)
        executor.run(1, torch.ones(12, 32), ids, torch.ones(12, 2), "prefill")
        native = world.reader.native
        assert isinstance(native, ChaosReader)
        assert MAX_READS_IN_FLIGHT - 3 < native.max_in_flight <= MAX_READS_IN_FLIGHT


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_read_error_fails_the_step_with_file_and_offset_and_the_next_step_works(
    file: ExpertFile, kernels: Kernels, phase: str, serial: bool
) -> None:
    x, ids, weights = batch(12 if phase == "prefill" else 1, 5)
    with executor_of(file, kernels, cache_bytes=all_windows_bytes(file.catalog)) as (world, executor):
        expected = executor.run(2, x, ids, weights, phase)
    with executor_of(file, kernels, serial=serial) as (world, executor):
        executor.run(2, *batch(1, 77), "decode")
        for part in range(3):
            for expert in sorted(set(ids.flatten().tolist()))[-2:]:
                if world.residency.slot_of(2, expert) >= 0:
                    continue
                broken = file.catalog.layers[2][part].ranges[expert]
                world.reader.inject_fault(0, broken.offset + 4096, 1, errno.EIO)
                with pytest.raises(
                    StorageError, match=r"experts\.bin: an expert of layer 2: got [\d,]+ of [\d,]+ bytes"
                ):
                    executor.run(2, x, ids, weights, phase)
                assert world.residency.total_leases() == 0
                assert world.residency.slot_of(2, expert) == -1
                world.cache.check()
                assert not (world.residency.state == 1).any(), "no read of the failed step is under way"
        assert torch.equal(executor.run(2, x, ids, weights, phase), expected)


@pytest.mark.parametrize("call", range(12))
def test_an_interrupt_in_mid_step_leaves_nothing_behind(
    file: ExpertFile, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Also between a reservation and its submission: such a slot would be loading for ever."""
    kernels = select("reference", num_threads=1)
    monkeypatch.setattr("expertide.memory.reader.FileReader", chaos(3, 0.003))
    x, ids, weights = batch(12, 5)
    with executor_of(file, kernels) as (world, executor):
        calls = iter(range(1000))

        def interrupted(real: Callable[..., object], is_late: bool) -> Callable[..., object]:
            def wrapper(*args: object, **options: object) -> object:
                is_hit = next(calls) == call
                if is_hit and not is_late:
                    raise KeyboardInterrupt
                result = real(*args, **options)
                if is_hit:
                    raise KeyboardInterrupt
                return result

            return wrapper

        monkeypatch.setattr(world.cache, "reserve", interrupted(world.cache.reserve, is_late=False))
        monkeypatch.setattr(world.reader, "submit", interrupted(world.reader.submit, is_late=call % 2 == 0))
        with pytest.raises(KeyboardInterrupt):
            executor.run(1, x, ids, weights, "prefill")
        assert world.residency.total_leases() == 0 and not (world.residency.state == 1).any()
        world.cache.check()
        torch.testing.assert_close(
            executor.run(1, x, ids, weights, "prefill").double(), truth(file, 1, x, ids, weights), atol=1e-5, rtol=1e-5
        )


class CtrlCAtLine:
    """A trace function that sends SIGINT before the n-th line that the expert floor runs."""

    def __init__(self, n: int) -> None:
        self.num_left = n

    def __call__(self, frame: FrameType, event: str, arg: object) -> CtrlCAtLine | None:
        if "/expertide/experts/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.num_left -= 1
            if self.num_left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


@pytest.mark.timeout(120)
def test_a_ctrl_c_at_any_line_leaves_nothing_behind(file: ExpertFile, kernels: Kernels) -> None:
    """Between `cache.reserve` and the list of reads it once left a slot loading for ever, and the clean-up with it."""
    x, ids, weights = batch(3, 5)
    with executor_of(file, kernels) as (world, executor):
        expected = executor.run(1, x, ids, weights, "decode").numpy().tobytes()
        for n in range(1, 5000):
            world.cache.clear()
            tracer = CtrlCAtLine(n)
            previous = sys.gettrace()
            sys.settrace(tracer)
            try:
                executor.run(1, x, ids, weights, "decode")
                was_interrupted = False
            except KeyboardInterrupt:
                was_interrupted = True
            finally:
                sys.settrace(previous)
            assert was_interrupted == (tracer.num_left <= 0)
            assert world.residency.total_leases() == 0 and not (world.residency.state == 1).any()
            world.cache.check()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if tracer.num_left > 0:
                break
        else:
            pytest.fail("the step never ran to its end: more numbers are needed")
        assert executor.run(1, x, ids, weights, "decode").numpy().tobytes() == expected


def test_each_ctrl_c_of_a_step_reaches_its_handler_afterwards(file: ExpertFile) -> None:
    seen: list[str] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append("handled"))
    try:
        with executor_of(file, select("reference", num_threads=1)) as (_, executor):

            def observe(layer_id: int, ids: Tensor) -> None:
                for _ in range(2):
                    signal.raise_signal(signal.SIGINT)
                seen.append("in the step")

            executor.set_router_observer(observe)
            executor.run(1, *batch(1, 1), "decode")
            assert seen == ["in the step", "handled", "handled"]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_step_in_another_thread_leaves_the_handler_alone(file: ExpertFile) -> None:
    handlers: list[object] = []
    with executor_of(file, select("reference", num_threads=1)) as (_, executor):
        executor.set_router_observer(lambda *_: handlers.append(signal.getsignal(signal.SIGINT)))
        thread = threading.Thread(target=executor.run, args=(1, *batch(1, 1), "decode"))
        thread.start()
        thread.join()
    assert handlers == [signal.default_int_handler]


def test_a_layer_whose_quant_type_has_no_native_kernel_runs_on_the_reference(
    file: ExpertFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 1 and 3 keep `down` in float16, layer 2 all in float32."""
    native = select("native", num_threads=2)
    without_f16 = [quant for quant in quant_types() if quant != by_name("F16").ggml_id]
    monkeypatch.setattr("expertide.experts.executor.quant_types", lambda: without_f16)
    with executor_of(file, native) as (_, executor):
        kinds = {layer_id: type(layer) for layer_id, layer in executor._layers.items()}
        assert kinds == {1: ReferenceLayer, 2: NativeLayer, 3: ReferenceLayer}
        for layer_id in (1, 2):
            x, ids, weights = batch(9, layer_id)
            y = executor.run(layer_id, x, ids, weights, "prefill")
            torch.testing.assert_close(y.double(), truth(file, layer_id, x, ids, weights), atol=1e-5, rtol=1e-5)
    native.close()


def test_the_router_observer_sees_every_choice(file: ExpertFile, kernels: Kernels) -> None:
    seen: list[tuple[int, list[list[int]]]] = []
    with executor_of(file, kernels) as (_, executor):
        executor.set_router_observer(lambda layer_id, ids: seen.append((layer_id, ids.tolist())))
        x, ids, weights = batch(3, 1)
        executor.run(2, x, ids, weights, "decode")
        executor.set_router_observer(None)
        executor.run(3, x, ids, weights, "decode")
    assert seen == [(2, ids.tolist())]
