"""Predicted reads: counted as useful or wasted, behind demand, and never visible in a result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from expert_world import ExpertFile, World, all_windows_bytes, write_experts
from expertide import LLM, SamplingParams
from expertide.cli import prediction_trial
from expertide.errors import RequestError
from expertide.experts.executor import MoEExecutor
from expertide.experts.prediction import Average, LastToken
from expertide.kernels import select
from expertide.kernels.ops import Kernels
from expertide.memory import machine_rates
from expertide.memory.machine_rates import MachineRates
from expertide.memory.placement import expert_window_bytes
from expertide.options import PREDICTIONS, Options
from expertide.prepare import model_path, prepare

K = 2


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    return write_experts(tmp_path_factory.mktemp("experts") / "experts.bin")


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    kernels = select("native", num_threads=1)
    yield kernels
    kernels.close()


class Fixed:
    """Always says the same."""

    def __init__(self, experts: Sequence[int]) -> None:
        self._experts = experts

    def predict(self, layer_id: int, x_TH: Tensor) -> Sequence[int]:
        return self._experts


def token(experts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32))
    return x, torch.tensor([experts], dtype=torch.int32), torch.full((1, K), 0.5)


def executor_of(world: World, kernels: Kernels, predictor: object) -> MoEExecutor:
    return MoEExecutor(world.file.catalog, world.cache, world.residency, world.reader, kernels, predictor=predictor)  # type: ignore[arg-type]


def test_what_came_of_a_prediction_is_counted(file: ExpertFile, kernels: Kernels) -> None:
    with World(file, k=K, cache_bytes=all_windows_bytes(file.catalog)) as world:
        executor = executor_of(world, kernels, Fixed([3, 5]))
        executor.run(1, *token([0, 1]), "decode")
        world.reader.wait_background(0, 10_000)
        world.residency.wait_idle()
        executor.run(2, *token([3, 4]), "decode")
        predicted = executor.stats().predicted
        # 3 and 5 for layer 2, then for layer 3: of these only (2, 3) was asked for so far.
        assert (predicted.loads, predicted.useful, predicted.wasted) == (4, 1, 0)
        assert executor.stats().decode.hits_host == 1
        world.reader.wait_background(0, 10_000)
        world.cache.settle()
        world.cache.clear()
        assert executor.stats().predicted.wasted == 3


def test_predictions_take_no_slot_of_the_layers_at_work(file: ExpertFile, kernels: Kernels) -> None:
    largest = max(expert_window_bytes(file.catalog).values())
    with World(file, k=K, cache_bytes=4 * largest) as world:
        plain = executor_of(world, kernels, None)
        plain.run(1, *token([0, 1]), "decode")
        plain.run(2, *token([2, 3]), "decode")
        executor = executor_of(world, kernels, Fixed(range(8)))
        executor.run(1, *token([0, 1]), "decode")
        world.reader.wait_background(0, 10_000)
        world.cache.settle()
        table = world.residency.table
        assert (table[1, :2] >= 0).all() and (table[2, 2:4] >= 0).all()
        world.cache.check()
        assert world.residency.total_leases() == 0


def test_counts_predict_what_was_asked_for(file: ExpertFile, kernels: Kernels) -> None:
    with World(file, k=K, cache_bytes=all_windows_bytes(file.catalog)) as world:
        executor = executor_of(world, kernels, None)
        x = token([0, 0])[0]
        assert list(LastToken(world.residency).predict(2, x)) == []
        for experts in ([1, 6], [1, 6], [2, 3]):
            executor.run(2, *token(experts), "decode")
        assert list(LastToken(world.residency).predict(2, x)) == [2, 3]
        assert list(Average(world.residency).predict(2, x))[:2] == [1, 6]


def test_no_prediction_changes_an_answer() -> None:
    answers = []
    for kind in PREDICTIONS:
        with LLM("demo", context=256, expert_cache="2MiB", predictive_prefetch=kind) as llm:
            output = llm.generate("User: What is the capital of France?\n\nAssistant:", SamplingParams(max_tokens=24))
            answers.append(output.token_ids)
            loads = output.stats["experts"]["predicted"]["loads"]
            assert (loads > 0) == (kind == "router") or kind in ("last", "average")
    assert answers == [answers[0]] * len(PREDICTIONS)


def save_answer(kind: str) -> None:
    disk = machine_rates.disk_key(prepare("demo", Options()).topology.disk)
    machine_rates.save(MachineRates(10e9, {1: {"Q4_K": 1e9}}, 1e-3, {}, {disk: kind, "another disk": "last"}))


def test_auto_follows_what_was_measured_here_and_is_off_where_nothing_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert prepare("demo", Options()).prediction == "off"
    save_answer("router")
    assert prepare("demo", Options()).prediction == "router"
    assert prepare("demo", Options(predictive_prefetch="last")).prediction == "last", "what is asked for is done"
    with LLM("demo", context=256, expert_cache="2MiB") as llm:
        stats = llm.generate("User: What is the capital of France?", SamplingParams(max_tokens=12)).stats
    assert stats["placement"]["predictive_prefetch"] == "router" and stats["experts"]["predicted"]["loads"] > 0
    save_answer("off")
    assert prepare("demo", Options()).prediction == "off"
    assert machine_rates.load().predictions["another disk"] == "last"  # type: ignore[union-attr]


def test_an_answer_from_elsewhere_loads_also_where_it_cannot_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers with a bias cannot be asked ahead; that is an error only for whoever asks for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("expertide.loading.RouterSpec", type("Other", (), {}))
    save_answer("router")
    with LLM("demo", context=256) as llm:
        assert llm.placement()["predictive_prefetch"] == "off"
        with pytest.raises(RequestError, match="cannot be asked ahead"):
            llm.set_predictive_prefetch("router")
    with pytest.raises(RequestError, match="cannot be asked ahead"):
        LLM("demo", context=256, predictive_prefetch="router")


@pytest.mark.parametrize(("with_it", "kind"), [((5.0, 6.0), "router"), ((5.0, 3.9), "off")])
def test_it_wins_only_when_every_run_with_it_beats_every_run_without(
    with_it: tuple[float, float], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction_trial, "_LEAST_EXPERTS_BYTES", 0)
    rates = iter([1.0, 4.0, with_it[0], 3.0, with_it[1]])  # the first is the warm-up
    generate = LLM.generate

    def timed(self: LLM, *args: object) -> object:
        output = generate(self, *args)  # type: ignore[call-overload]
        output.stats["timings"]["decode_tps"] = next(rates)
        return output

    monkeypatch.setattr(LLM, "generate", timed)
    trial = prediction_trial.measure(model_path("demo"))
    assert trial is not None and trial["kind"] == kind
    assert trial["without_tps"] == [4.0, 3.0] and tuple(trial["with_tps"]) == with_it
    assert trial["loads"] > 0 and trial["useful"] > 0 and trial["late"] <= trial["useful"]


def test_nothing_is_said_where_experts_are_small_or_the_file_does_not_run(tmp_path: Path) -> None:
    assert prediction_trial.measure(model_path("demo")) is None
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    assert prediction_trial.measure(tmp_path / "x.gguf") is None
