"""Sampling: ranges, greedy ties, the filters' exact edges, penalties, seeds."""

from __future__ import annotations

import numpy as np
import pytest

from expertide.engine.sampling import Sampler, SamplingParams, TokenLogprobs
from expertide.errors import FormatError, RequestError


def logits_of(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities, dtype=np.float32))


def drawn(params: SamplingParams, logits: np.ndarray, times: int = 400) -> set[int]:
    sampler = Sampler(params, [])
    return {sampler.pick(logits) for _ in range(times)}


def test_greedy_takes_the_lowest_id_of_equal_logits():
    assert Sampler(SamplingParams(), []).pick(np.array([0, 3, 3, 1], dtype=np.float32)) == 1


def test_top_k_keeps_exactly_k_and_prefers_low_ids_at_a_tie():
    logits = np.array([1, 2, 2, 2, 0], dtype=np.float32)
    assert drawn(SamplingParams(temperature=1, top_k=2, seed=1), logits) == {1, 2}


def test_top_p_keeps_the_token_that_crosses_the_threshold():
    logits = logits_of(0.5, 0.3, 0.15, 0.05)
    assert drawn(SamplingParams(temperature=1, top_p=0.6, seed=1), logits) == {0, 1}
    assert drawn(SamplingParams(temperature=1, top_p=1e-9, seed=1), logits) == {0}


def test_min_p_is_a_share_of_the_likeliest_probability():
    logits = logits_of(0.5, 0.3, 0.15, 0.05)
    assert drawn(SamplingParams(temperature=1, min_p=0.5, seed=1), logits) == {0, 1}


def test_draws_follow_the_probabilities():
    logits = logits_of(0.7, 0.2, 0.1)
    sampler = Sampler(SamplingParams(temperature=1, seed=7), [])
    counts = np.bincount([sampler.pick(logits) for _ in range(4000)], minlength=3) / 4000
    # Four standard deviations of a share at 4,000 draws: 4 * sqrt(0.7 * 0.3 / 4000) = 0.029.
    assert np.abs(counts - [0.7, 0.2, 0.1]).max() < 0.029


def test_a_tiny_temperature_is_greedy_and_not_a_nan():
    assert drawn(SamplingParams(temperature=1e-300, seed=1), np.array([5, -3, 4.9], dtype=np.float32)) == {0}


def test_the_same_seed_draws_the_same_tokens_and_another_one_does_not():
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    runs = []
    for seed in (3, 3, 4):
        sampler = Sampler(SamplingParams(temperature=1, seed=seed), [])
        runs.append([sampler.pick(logits) for _ in range(20)])
    assert runs[0] == runs[1] != runs[2]


def test_repetition_penalty_counts_prompt_tokens_and_moves_both_signs_down():
    params = SamplingParams(repetition_penalty=2)
    assert Sampler(params, [0]).pick(np.array([2.0, 1.5], dtype=np.float32)) == 1
    assert Sampler(params, [0]).pick(np.array([-1.0, -1.5], dtype=np.float32)) == 1


def test_presence_and_frequency_penalties_count_answered_tokens_only():
    logits = np.array([1.0, 0.5], dtype=np.float32)
    sampler = Sampler(SamplingParams(presence_penalty=1), [0])
    assert [sampler.pick(logits) for _ in range(3)] == [0, 1, 0]
    sampler = Sampler(SamplingParams(frequency_penalty=0.3), [0])
    assert [sampler.pick(logits) for _ in range(4)] == [0, 0, 1, 0]


def test_logit_bias_bans_a_token_and_an_unknown_id_is_an_error():
    logits = np.array([1.0, 0.5], dtype=np.float32)
    assert Sampler(SamplingParams(logit_bias={0: -100}), []).pick(logits) == 1
    with pytest.raises(RequestError, match="token 9 is outside the vocabulary of 2"):
        Sampler(SamplingParams(logit_bias={9: 1}), []).pick(logits)


def test_the_logits_handed_in_are_not_changed():
    logits = np.array([1.0, 0.5], dtype=np.float32)
    before = logits.copy()
    Sampler(SamplingParams(temperature=1, repetition_penalty=2, presence_penalty=1, seed=0), [0]).pick(logits)
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_never_sampled(bad: float):
    with pytest.raises(FormatError, match="not finite"):
        Sampler(SamplingParams(), []).pick(np.array([1.0, bad], dtype=np.float32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", 2),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("presence_penalty", "1"),
        ("frequency_penalty", float("inf")),
        ("seed", -1),
        ("stop", ("",)),
        ("logit_bias", {-1: 0.0}),
    ],
)
def test_a_value_out_of_range_names_its_field(field: str, value: object):
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


def test_one_stop_text_may_be_given_plainly():
    assert SamplingParams(stop="\n").stop == ("\n",)


class OnlyEven:
    """Even ids may come, and each only once."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def allowed(self, num_logits: int) -> np.ndarray:
        ids = np.arange(num_logits)
        return (ids % 2 == 0) & ~np.isin(ids, self.taken)

    def accept(self, token_id: int) -> None:
        self.taken.append(token_id)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_constraint_is_asked_at_each_place_and_nothing_else_is_drawn(temperature: float):
    constraint = OnlyEven()
    params = SamplingParams(temperature=temperature, seed=1, top_k=3, top_p=0.9)
    sampler = Sampler(params, [], constraint)
    drawn = [sampler.pick(np.array([1, 9, 3, 8, 2], dtype=np.float32)) for _ in range(3)]
    assert sorted(drawn) == [0, 2, 4] and drawn == constraint.taken
    if temperature == 0:
        assert drawn == [2, 4, 0]


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_logprobs_sum_to_one_and_come_likeliest_first(num_top: int):
    logits = np.array([1.0, 3.0, 3.0, -2.0], dtype=np.float32)
    found = [TokenLogprobs.of(logits, token_id, num_top) for token_id in range(4)]
    assert sum(np.exp(entry.logprob) for entry in found) == pytest.approx(1, abs=1e-12)
    assert [token_id for token_id, _ in found[0].top] == [1, 2, 0][:num_top]
    assert all(logprob == found[token_id].logprob for token_id, logprob in found[0].top)
