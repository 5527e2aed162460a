"""The Python door on the demo model: what it promises when the disk fails, threads meet, streams are dropped."""

from __future__ import annotations

import errno
import gc
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from expertide import LLM, SamplingParams
from expertide.errors import BudgetError, RequestError, StorageError

PROMPT = "User: What is the capital of France?\n\nAssistant:"
STORY = "User: Tell me a story about a fox.\n\nAssistant:"
SMALL = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """A cache of a quarter of the experts, so that every answer reads from the file."""
    with LLM("demo", expert_cache="4MiB", context=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def right(llm: LLM) -> dict[str, str]:
    """What undisturbed runs say."""
    return {prompt: llm.generate(prompt, SMALL).text for prompt in (PROMPT, STORY)}


def test_the_demo_model_knows_the_capital_of_france(right: dict[str, str]):
    assert "Paris" in right[PROMPT]


def test_an_injected_read_error_fails_that_answer_and_the_next_one_is_right(llm: LLM, right: dict[str, str]):
    assert llm._runtime is not None and llm._runtime.cache is not None
    reader, cache = llm._runtime.reader, llm._runtime.cache
    for layer_id, parts in llm.prepared.catalog.layers.items():
        cache.clear()
        first, last = parts[0].ranges[0], parts[0].ranges[-1]
        reader.inject_fault(0, first.offset, last.offset + last.nbytes - first.offset, errno.EIO)
        with pytest.raises(StorageError, match=rf"demo-q4_k_m.gguf: .*layer {layer_id}.* at offset [\d,]+ \(Input/out"):
            llm.generate(PROMPT, SMALL)
        cache.check()
        assert llm.generate(PROMPT, SMALL).text == right[PROMPT]
        assert llm.generate(STORY, SMALL).text == right[STORY]


def test_a_read_error_in_the_middle_of_a_stream_keeps_what_was_shown(llm: LLM, right: dict[str, str]):
    stream = llm.stream(STORY, SMALL)
    shown = next(stream)
    assert llm._runtime is not None and llm._runtime.cache is not None
    llm._runtime.cache.clear()
    size = llm.prepared.files.file_sizes[0]
    llm._runtime.reader.inject_fault(0, 0, size, errno.EIO)
    with pytest.raises(StorageError):
        list(stream)
    assert right[STORY].startswith(shown)
    with pytest.raises(RequestError, match="has not ended"):
        _ = stream.output
    assert llm.generate(STORY, SMALL).text == right[STORY]


def test_pieces_of_a_stream_concatenate_to_the_text_and_the_tokens_to_its_bytes(llm: LLM, right: dict[str, str]):
    stream = llm.stream(STORY, SMALL)
    pieces = list(stream)
    assert len(pieces) > 3
    assert "".join(pieces) == stream.output.text == right[STORY]
    assert llm.tokenizer.decode(stream.output.token_ids) == stream.output.text


def test_a_list_of_prompts_gives_a_list_of_answers_and_token_ids_are_used_as_they_are(llm: LLM, right: dict[str, str]):
    outputs = llm.generate([PROMPT, STORY], SMALL)
    assert [output.text for output in outputs] == [right[PROMPT], right[STORY]]
    assert llm.generate(outputs[0].prompt_token_ids, SMALL).token_ids == outputs[0].token_ids
    assert llm.generate([], SMALL) == []


def test_the_statistics_of_an_answer_are_its_own(llm: LLM):
    outputs = [llm.generate(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True)) for _ in range(2)]
    for output in outputs:
        decode = output.stats["experts"]["decode"]
        assert decode["requests"] == 5 * 4 * 4 == decode["hits_host"] + decode["misses"]
        assert output.stats["timings"]["decode_tokens"] == 4


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_stream_that_is_left_makes_room_for_the_next_request(llm: LLM, right: dict[str, str], end: str):
    stream = llm.stream(STORY, SMALL)
    next(stream)
    with pytest.raises(RequestError, match="still open"):
        llm.generate(PROMPT, SMALL)
    if end == "close":
        stream.close()
        assert stream.output.finish_reason == "abort"
    del stream
    gc.collect()
    assert llm.generate(PROMPT, SMALL).text == right[PROMPT]


def test_threads_take_turns_and_get_their_own_answers(llm: LLM, right: dict[str, str]):
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = llm.generate([PROMPT, STORY][number % 2], SMALL).text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {number: right[[PROMPT, STORY][number % 2]] for number in range(4)}


def test_ctrl_c_ends_an_answer_with_abort_and_the_text_so_far(llm: LLM, right: dict[str, str]):
    stream = llm.stream(STORY, SMALL)
    shown = next(stream)
    with llm.interrupt:
        signal.raise_signal(signal.SIGINT)
        shown += "".join(stream)
    assert stream.output.finish_reason == "abort"
    assert stream.output.text == shown
    assert right[STORY].startswith(shown) and shown != right[STORY]
    assert llm.generate(STORY, SMALL).text == right[STORY]


def test_a_stop_text_over_several_tokens_is_cut_exactly(llm: LLM, right: dict[str, str]):
    text = right[STORY]
    stop = text[len(text) // 3 : len(text) // 3 + 7]
    output = llm.generate(STORY, SamplingParams(max_tokens=12, stop=stop))
    assert output.text == text[: text.index(stop)]
    assert output.finish_reason == "stop"


def test_loglikelihood_prefers_the_right_city_and_agrees_with_its_tokens(llm: LLM):
    paris, london = (llm.loglikelihood(PROMPT, f" The capital of France is {city}.") for city in ("Paris", "London"))
    assert 0 > paris > london
    ids = llm.tokenizer.encode(PROMPT)
    whole = llm.tokenizer.encode(PROMPT + " The capital of France is Paris.")
    assert paris == pytest.approx(sum(llm.token_logprobs(ids, whole[len(ids) :])), abs=1e-9)
    assert llm.loglikelihood("", "One day") < 0


def test_chat_renders_the_template_once_and_begins_with_one_begin_token(llm: LLM, right: dict[str, str]):
    output = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SMALL)
    assert output.prompt_token_ids == llm.tokenizer.encode(PROMPT)
    assert output.prompt_token_ids.count(llm.tokenizer.bos_id) == 1
    assert output.text == right[PROMPT]


def test_requests_that_cannot_run_are_refused_and_name_both_numbers(llm: LLM):
    with pytest.raises(RequestError, match=r"the prompt has [\d,]+ tokens, the context is 256 "):
        llm.generate("one two three " * 200, SMALL)
    with pytest.raises(RequestError, match="no tokens"):
        llm.generate([[]], SMALL)
    with pytest.raises(RequestError, match="token id 4096: expected a whole number from 0 to 4,095"):
        llm.generate([1, 4096], SMALL)
    with pytest.raises(RequestError, match="got NoneType"):
        llm.generate(None, SMALL)


@pytest.mark.parametrize(
    "prompts", [5, b"bytes", [b"bytes"], [None], ["a", None], [1.5], {"a": 1}, [{"a": 1}], iter("a"), {1, 2}, [True]]
)
def test_what_is_no_prompt_is_refused_by_its_type(llm: LLM, prompts: Any):
    with pytest.raises(RequestError, match=r"^(prompt: got|token id)"):
        llm.generate(prompts, SMALL)


@pytest.mark.parametrize("messages", [None, 5, "hi", {"role": "user", "content": "hi"}, [], iter([])])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any):
    with pytest.raises(RequestError, match=r"^messages: "):
        llm.chat(messages, SMALL)


@pytest.mark.parametrize(
    "fields",
    [{"stop": 5}, {"stop": {"a": 1}}, {"logit_bias": [1]}, {"logit_bias": 5}, {"ignore_eos": "no"}]
    + [{"temperature": value} for value in (10**400, float("nan"), "0", None, True)],
)
def test_sampling_parameters_of_the_wrong_type_are_refused_by_name(fields: dict[str, Any]):
    with pytest.raises(RequestError, match=rf"^{next(iter(fields))}: "):
        SamplingParams(**fields)


def test_parameters_and_models_of_the_wrong_type_are_refused(llm: LLM):
    with pytest.raises(RequestError, match="params: got dict, expected SamplingParams"):
        llm.generate(PROMPT, {"max_tokens": 3})  # type: ignore[call-overload]
    for model in (None, 5, b"demo"):
        with pytest.raises(RequestError, match=f"MODEL: got {type(model).__name__}"):
            LLM(model)  # type: ignore[arg-type]


def test_an_empty_continuation_has_no_likelihood(llm: LLM):
    """The last token of the context was scored in its place."""
    with pytest.raises(RequestError, match="the continuation is empty"):
        llm.loglikelihood("The capital of France is", "")
    with pytest.raises(RequestError, match="expected two texts"):
        llm.loglikelihood(None, "a")  # type: ignore[arg-type]


def test_a_dropped_stream_ends_at_once_without_the_garbage_collector(llm: LLM, right: dict[str, str]):
    gc.disable()
    try:
        stream = llm.stream(STORY, SMALL)
        next(stream)
        del stream
        assert llm.generate(PROMPT, SMALL).text == right[PROMPT]
    finally:
        gc.enable()


def test_a_stream_is_read_by_one_thread_and_may_be_closed_by_another(llm: LLM, right: dict[str, str]):
    stream = llm.stream(STORY, SamplingParams(max_tokens=200, ignore_eos=True))
    entered, go_on = threading.Event(), threading.Event()
    llm._progress = lambda *_: (entered.set(), go_on.wait(30))
    pieces: list[str] = []
    reader = threading.Thread(target=lambda: pieces.extend(stream))
    try:
        reader.start()
        assert entered.wait(30)
        with pytest.raises(RequestError, match="is being read already"):
            next(stream)
        stream.close()
    finally:
        llm._progress = None
        go_on.set()
    reader.join(30)
    assert not reader.is_alive()
    assert stream.output.finish_reason == "abort"
    assert len(pieces) <= 1
    assert llm.generate(PROMPT, SMALL).text == right[PROMPT]


def test_a_closed_llm_says_so_and_closing_twice_is_fine():
    llm = LLM("demo", context=64, prefill_chunk=16, threads=1)
    stream = llm.stream(PROMPT, SMALL)
    next(stream)
    llm.close()
    llm.close()
    assert stream.output.finish_reason == "abort"
    with pytest.raises(RequestError, match="closed"):
        llm.generate(PROMPT, SMALL)


def test_an_empty_text_is_answered_from_the_begin_token_alone(llm: LLM):
    """The docstring said it was refused."""
    output = llm.generate("", SMALL)
    assert output.prompt_token_ids == [llm.tokenizer.bos_id]
    assert output.text


def test_raising_the_context_is_advised_only_where_it_can_be_raised(llm: LLM):
    with pytest.raises(RequestError, match=r"the context is 256 \(shorten it, or raise --context\)"):
        llm.generate("one two three " * 200, SMALL)
    with LLM("demo", context=2048) as whole, pytest.raises(RequestError, match=r"2,048 \(the model's own limit; sho"):
        whole.generate([1] * 2049, SMALL)


def test_what_before_load_raises_ends_the_load_before_a_weight_is_read():
    seen: list[str] = []

    def refuse(llm: LLM) -> None:
        llm.check_prompt(llm.encode("Hello"))
        raise RequestError("not this one")

    with pytest.raises(RequestError, match="not this one"):
        LLM("demo", progress=lambda what, done, total: seen.append(what), before_load=refuse)
    assert seen == []


def test_a_budget_that_cannot_hold_the_model_is_refused_with_every_share_in_a_unit_that_fits():
    with pytest.raises(BudgetError, match=r"weights [\d.]+ MiB, kv cache [\d.]+ MiB"):
        LLM("demo", ram="128MiB")


def test_logprobs_agree_with_loglikelihood_and_change_no_token(llm: LLM):
    plain = llm.generate(PROMPT, SMALL)
    params = SamplingParams(max_tokens=12, logprobs=3, prompt_logprobs=1)
    output = llm.generate(PROMPT, params)
    assert output.token_ids == plain.token_ids and output.text == plain.text
    assert [entry.token_id for entry in output.logprobs] == plain.token_ids
    # Greedy: the token drawn is the likeliest.
    assert all(entry.top[0] == (entry.token_id, entry.logprob) and len(entry.top) == 3 for entry in output.logprobs)
    ids = output.prompt_token_ids
    scores = llm.score(ids[:1], [*ids[1:], *output.token_ids])
    found = [entry.logprob for entry in (*output.prompt_logprobs[1:], *output.logprobs)]
    # The same float32 logits in the native kernels; what may differ is the order of one float64 sum.
    assert found == pytest.approx([score.logprob for score in scores], abs=1e-9)
    assert llm.generate(PROMPT, SMALL).logprobs == []


@pytest.mark.parametrize("num_calls", [0, 1, 5, 9])
def test_a_stop_request_is_heard_before_every_layer_and_the_next_answer_is_right(
    llm: LLM, right: dict[str, str], num_calls: int
):
    calls: list[int] = []

    def should_stop() -> bool:
        calls.append(1)
        return len(calls) > num_calls

    stream = llm.stream(STORY, SMALL, should_stop=should_stop)
    list(stream)
    assert stream.output.finish_reason == "abort"
    # Six layers: one of the prompt's, or of the first decoded token's, was the last to be asked for.
    assert len(calls) == num_calls + 1
    assert len(stream.output.token_ids) == num_calls // 6
    assert llm.generate(STORY, SMALL).text == right[STORY]
