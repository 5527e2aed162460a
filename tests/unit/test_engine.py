"""The engine with a fake model: chunks, ends of a generation, log-likelihood, prefix reuse."""

from __future__ import annotations

import math

import pytest
import torch

from expertide.engine.engine import Engine, Generation
from expertide.engine.interrupt import Interrupt
from expertide.engine.sampling import SamplingParams
from expertide.errors import RequestError, StorageError

VOCAB = 32


class FakeCache:
    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.ids: list[int] = []

    @property
    def length(self) -> int:
        return len(self.ids)

    def truncate(self, length: int) -> None:
        assert length <= len(self.ids)
        del self.ids[length:]


class FakeModel:
    """The likeliest next token is (sum of all tokens so far + 1) mod VOCAB: it depends on the whole prefix."""

    vocab_size = VOCAB

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.fail_at: int | None = None

    def new_cache(self, max_tokens: int) -> FakeCache:
        return FakeCache(max_tokens)

    def forward(self, token_ids_T, cache, phase, trace=None, *, before_layer=None):
        if before_layer is not None:
            before_layer()
        if self.fail_at is not None and len(self.calls) == self.fail_at:
            self.fail_at = None
            raise StorageError("demo.gguf: expert 3 of layer 1: got 0 of 10 bytes at offset 20")
        assert token_ids_T.dtype == torch.int64
        assert cache.length + len(token_ids_T) <= cache.max_tokens
        self.calls.append((phase, len(token_ids_T)))
        rows = []
        for token_id in token_ids_T.tolist():
            cache.ids.append(token_id)
            rows.append((sum(cache.ids) + 1) % VOCAB)
        return torch.tensor(rows, dtype=torch.float32)[:, None]

    def logits(self, hidden):
        out = torch.zeros(len(hidden), VOCAB)
        out[torch.arange(len(hidden)), hidden[:, 0].long()] = 3.0
        return out


def expected_ids(prompt: list[int], n: int) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        ids.append((sum(ids) + 1) % VOCAB)
    return ids[len(prompt) :]


def run(engine: Engine, prompt: list[int], n: int, **more) -> Generation:
    generation = engine.generate(prompt, SamplingParams(max_tokens=n), **more)
    assert list(generation) == generation.token_ids
    return generation


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
def test_every_chunk_size_computes_each_prompt_token_once(chunk: int):
    model = FakeModel()
    generation = run(Engine(model, chunk=chunk, context=64), [3, 1, 4, 1, 5], 6)
    assert generation.token_ids == expected_ids([3, 1, 4, 1, 5], 6)
    assert sum(n for phase, n in model.calls if phase == "prefill") == 5
    assert max(n for phase, n in model.calls) == min(chunk, 5)
    assert [n for phase, n in model.calls if phase == "decode"] == [1] * 5
    assert generation.finish_reason == "length"
    assert (generation.timings.prefill_tokens, generation.timings.decode_tokens) == (5, 5)


def test_a_stop_id_ends_the_answer_and_is_its_last_token():
    ids = expected_ids([3], 4)
    generation = run(Engine(FakeModel(), chunk=8, context=64), [3], 50, stop_ids={ids[3]})
    assert generation.token_ids == ids[: ids.index(ids[3]) + 1]
    assert generation.finish_reason == "stop"


def test_the_context_is_usable_to_the_last_token_and_then_the_reason_is_length():
    generation = run(Engine(FakeModel(), chunk=3, context=16), [1] * 10, 1000)
    # 16 tokens have state, and one more is drawn from the last of them.
    assert len(generation.token_ids) == 7
    assert generation.finish_reason == "length"
    assert len(run(Engine(FakeModel(), chunk=3, context=16), [1] * 16, 9).token_ids) == 1


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers():
    with pytest.raises(RequestError, match=r"17 tokens, the context is 16 "):
        run(Engine(FakeModel(), chunk=3, context=16), [1] * 17, 1)


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="empty"):
        run(Engine(FakeModel(), chunk=3, context=16), [], 1)


def test_a_failed_step_fails_that_generation_and_the_next_one_is_right():
    model = FakeModel()
    engine = Engine(model, chunk=2, context=64)
    for fail_at in range(5):  # three prefill chunks, then decode steps
        model.calls.clear()
        model.fail_at = fail_at
        generation = engine.generate([3, 1, 4, 1, 5], SamplingParams(max_tokens=6))
        with pytest.raises(StorageError):
            list(generation)
        assert generation.finish_reason == "error"
        assert run(engine, [3, 1, 4, 1, 5], 6).token_ids == expected_ids([3, 1, 4, 1, 5], 6)


def test_a_stop_request_in_prefill_or_decode_ends_with_abort_and_keeps_what_there_is():
    engine = Engine(FakeModel(), chunk=2, context=64)
    assert run(engine, [1, 2, 3], 5, should_stop=lambda: True).finish_reason == "abort"
    answers = iter([False, False, False, True])
    generation = run(engine, [1, 2, 3], 5, should_stop=lambda: next(answers))
    assert generation.finish_reason == "abort"
    assert generation.token_ids == expected_ids([1, 2, 3], 2)
    assert run(engine, [1, 2, 3], 5).token_ids == expected_ids([1, 2, 3], 5)


def test_two_generations_cannot_share_the_one_sequence_state():
    engine = Engine(FakeModel(), chunk=2, context=64)
    first = engine.generate([1], SamplingParams())
    next(first)
    with pytest.raises(RequestError, match="still running"):
        engine.generate([1], SamplingParams())
    first.finish("abort")
    assert first.finish_reason == "abort"
    assert run(engine, [1], 2).token_ids == expected_ids([1], 2)


def test_a_kept_prefix_is_whole_chunks_of_the_same_tokens_and_never_the_last_prompt_token():
    model = FakeModel()
    engine = Engine(model, chunk=4, context=64)
    run(engine, [1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
    for prompt, computed in [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 2),  # two chunks reused
        ([1, 2, 3, 4, 5, 6, 7, 8], 4),  # all of it is there, but its last token must be computed
        ([1, 2, 3, 4, 5, 6, 0, 8, 9], 5),  # differs inside the second chunk
        ([9, 2, 3], 3),
    ]:
        model.calls.clear()
        generation = run(engine, prompt, 3, keep_prefix=True)
        assert generation.token_ids == expected_ids(prompt, 3)
        assert sum(n for phase, n in model.calls if phase == "prefill") == computed
        assert generation.timings.prefill_tokens == computed


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_each_continuation_token_is_scored_given_all_before_it(chunk: int):
    engine = Engine(FakeModel(), chunk=chunk, context=64)
    likely = expected_ids([5, 6], 3)
    hit = 3.0 - math.log(math.exp(3.0) + VOCAB - 1)
    miss = -math.log(math.exp(3.0) + VOCAB - 1)
    scores = engine.score([5, 6], likely)
    assert [score.logprob for score in scores] == pytest.approx([hit] * 3, abs=1e-12)
    assert all(score.is_greedy for score in scores)
    wrong = engine.score([5, 6], [likely[0], (likely[1] + 1) % VOCAB])
    assert [score.logprob for score in wrong] == pytest.approx([hit, miss], abs=1e-12)
    assert [score.is_greedy for score in wrong] == [True, False]
    assert run(engine, [5, 6], 3).token_ids == likely


def test_the_first_ctrl_c_sets_a_flag_and_the_second_one_raises():
    import signal

    with Interrupt() as stopped:
        assert not stopped.hit
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        with stopped:  # a generation inside a command: the command's handler stays
            assert stopped.hit
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_logprobs_are_of_the_models_own_distribution_and_the_first_prompt_token_has_none():
    prompt, likely = [5, 6, 7], expected_ids([5, 6, 7], 2)
    hit = 3.0 - math.log(math.exp(3.0) + VOCAB - 1)
    miss = -math.log(math.exp(3.0) + VOCAB - 1)
    params = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1, logit_bias={likely[0]: 50.0})
    for chunk in (1, 2, 64):
        generation = Engine(FakeModel(), chunk=chunk, context=64).generate(prompt, params, keep_prefix=True)
        drawn = list(generation)
        assert drawn[0] == likely[0]
        assert [entry.token_id for entry in generation.logprobs] == generation.token_ids
        first = generation.logprobs[0]
        assert first.logprob == pytest.approx(hit, abs=1e-12)
        assert first.top[0] == (likely[0], pytest.approx(hit, abs=1e-12))
        # All others are equally unlikely: then the lowest id comes first.
        assert first.top[1] == (0 if likely[0] != 0 else 1, pytest.approx(miss, abs=1e-12))
        assert generation.prompt_logprobs[0] is None
        assert [entry.token_id for entry in generation.prompt_logprobs[1:]] == prompt[1:]
        scores = Engine(FakeModel(), chunk=chunk, context=64).score(prompt[:1], prompt[1:])
        found = [entry.logprob for entry in generation.prompt_logprobs[1:]]
        assert found == pytest.approx([score.logprob for score in scores], abs=1e-12)


def test_without_being_asked_for_no_logprobs_are_kept():
    generation = run(Engine(FakeModel(), chunk=2, context=64), [5, 6, 7], 2)
    assert generation.logprobs == [] and generation.prompt_logprobs == []
