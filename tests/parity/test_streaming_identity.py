"""Where weights lie, and in which order they come, never changes what the model says: same token ids, same logits, bit
for bit, whatever the cache size, the policy, the way of reading, and how often.

All runs but the baseline read through `ChaosReader`, which delays, splits and reorders, with slots filled with 0xFF
when they are freed. Computing before a load is complete, or on a slot that was given away, meets NaN or another
expert's numbers; `tools/mutants.py` shows that this test then fails.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos_reader import chaos
from comparisons import recorded_logits
from expertide import LLM, SamplingParams, _native
from expertide.errors import RequestError
from expertide.memory.placement import expert_window_bytes
from expertide.options import Options
from expertide.prepare import prepare
from expertide.settings import Settings
from expertide.units import round_down

# 70 tokens of prompt need most experts of every layer in prefill; sampling would hide differences in the logits.
PROMPT = (
    "User: Once upon a time there was a fox who counted 17 apples, 4 pears and 23 plums under an old tree. "
    "中国的首都是哪里？ How many pieces of fruit did the fox count?\n\nAssistant:"
)
# Short chunks: later ones find experts of the earlier ones, and prefill evicts what was used last. Only leases keep the
# hits of a layer from going to make room for its misses.
CHUNK = 16
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
# From K + 2 slots of the largest expert up to everything.
SMALLEST, QUARTER, HALF, ALL = "smallest", 0.25, 0.5, 1.0
CASES = [
    (SMALLEST, "lfu", False),
    (SMALLEST, "lru", True),
    (SMALLEST, "random", False),
    (SMALLEST, "second-miss", False),
    (QUARTER, "lfu", True),
    (QUARTER, "lru", False),
    (QUARTER, "random", True),
    (QUARTER, "second-miss", False),
    (HALF, "lfu", False),
    (HALF, "second-miss", True),
    (HALF, "lru", False),
    (ALL, "lfu", False),
]


def _cache_bytes(size: str | float, kernels: str) -> int:
    prepared = prepare("demo", Options(context=256), Settings(kernels=kernels))
    if size == SMALLEST:
        largest = max(expert_window_bytes(prepared.catalog).values())
        return (prepared.architecture.config.num_experts_per_tok + 2) * largest
    return round_down(int(prepared.plan.all_experts_bytes * float(size)), 4096)


def _answers(num_times: int, *, prompt: str = PROMPT, **options) -> list[tuple[list[int], list[bytes]]]:
    """Token ids and the bytes of every logit row, for each repetition in one process."""
    answers = []
    options = {"context": 256, "prefill_chunk": CHUNK, **options}
    with LLM("demo", **options) as llm:
        for _ in range(num_times):
            with recorded_logits(llm) as rows:
                output = llm.generate(prompt, PARAMS)
            if llm._runtime.cache is not None:
                llm._runtime.cache.check()
            answers.append((output.token_ids, rows))
    return answers


@pytest.fixture(scope="module")
def baselines() -> dict[str, tuple[list[int], list[bytes]]]:
    """Everything in memory, read by the real reader."""
    return {kernels: _answers(1, settings=Settings(kernels=kernels))[0] for kernels in ("native", "reference")}


@pytest.mark.parametrize(
    ("kernels", "size", "policy", "serial"),
    # The reference kernels run the same cache and the same reads, five times slower: every third setting will do.
    [("native", *case) for case in CASES] + [("reference", *case) for case in CASES[::3]],
)
def test_token_ids_and_logits_do_not_depend_on_where_experts_lie(baselines, monkeypatch, kernels, size, policy, serial):
    token_ids, logits = baselines[kernels]
    seed = CASES.index((size, policy, serial))
    monkeypatch.setattr("expertide.memory.reader.FileReader", chaos(seed, max_delay_s=0.0005))
    settings = replace(Settings(), kernels=kernels, serial_io=serial, poison=True)
    answers = _answers(2, settings=settings, expert_cache=_cache_bytes(size, kernels), cache_policy=policy)
    for again, (ids, rows) in enumerate(answers):
        assert ids == token_ids, f"token ids differ in repetition {again}"
        different = [step for step, (a, b) in enumerate(zip(rows, logits, strict=True)) if a != b]
        assert not different, f"logits differ in repetition {again}, first at step {different[0]}"


# A long prompt, so that chunks of 512 and of 64 differ: three borders of 64 and many of 7 lie inside.
LONG_PROMPT = PROMPT.removesuffix("\n\nAssistant:") + " " + PROMPT * 3


@pytest.fixture(scope="module")
def long_answer() -> tuple[list[int], list[bytes]]:
    return _answers(1, prompt=LONG_PROMPT, context=512, threads=2, prefill_chunk=100)[0]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_token_ids_and_logits_do_not_depend_on_threads_and_chunk_size(long_answer, chunk, threads):
    token_ids, logits = long_answer
    ((ids, rows),) = _answers(1, prompt=LONG_PROMPT, context=512, threads=threads, prefill_chunk=chunk)
    assert ids == token_ids
    assert len(rows) == PARAMS.max_tokens
    different = [step for step, (a, b) in enumerate(zip(rows, logits, strict=True)) if a != b]
    assert not different, f"logits differ, first at step {different[0]}"


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512"])
def test_token_ids_and_logits_do_not_depend_on_the_instruction_set(long_answer, isa):
    try:
        found = _answers(1, prompt=LONG_PROMPT, context=512, settings=Settings(cpu_isa=isa))
    except RequestError as error:
        pytest.skip(f"{error}")
    finally:
        _native.set_isa("auto")
    assert found == [long_answer]


def test_tracing_every_op_changes_no_bit(long_answer, tmp_path):
    # A trace calls the ops one by one where a layer is otherwise two fused halves.
    assert _answers(1, prompt=LONG_PROMPT, context=512, settings=Settings(dump=tmp_path)) == [long_answer]
