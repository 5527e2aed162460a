"""Predicted reads: counted as useful or wasted, behind demand, and never visible in a result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from expert_world import ExpertFile, World, all_windows_bytes, write_experts
from expertide import LLM, SamplingParams
from expertide.experts.executor import MoEExecutor
from expertide.experts.prediction import Average, LastToken
from expertide.kernels import select
from expertide.kernels.ops import Kernels
from expertide.memory.placement import expert_window_bytes
from expertide.options import PREDICTIONS

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
