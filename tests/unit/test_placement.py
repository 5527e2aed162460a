"""The plan: shares sum to the prediction, the prediction stays under the budget, refusals carry every number."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertide.errors import BudgetError, RequestError
from expertide.formats.quants import by_name
from expertide.formats.tensors import ByteRange, ExpertCatalog, ExpertPart
from expertide.memory.placement import ModelNeeds, Plan, expert_window_bytes, plan
from expertide.units import GIB, MIB

# DeepSeek-V2-Lite in Q4_K_M, rounded.
V2_LITE = ModelNeeds(
    interpreter_bytes=235 * MIB,
    tokenizer_bytes=60 * MIB,
    resident_bytes=790 * MIB,
    kv_bytes_per_token=31_104,
    workspace_bytes=lambda chunk: 40 * MIB + chunk * 100_000,
    max_context=163_840,
    prefill_chunk=512,
    expert_window_bytes={layer: 5_234_688 if layer % 2 else 6_316_032 for layer in range(1, 27)},
    num_experts=64,
    num_experts_per_tok=6,
)
DENSE = dataclasses.replace(V2_LITE, expert_window_bytes={}, num_experts=0, num_experts_per_tok=0)


def check(result: Plan, needs: ModelNeeds) -> None:
    assert sum(result.shares.values()) == result.predicted_bytes <= result.budget_bytes
    assert all(size >= 0 for size in result.shares.values())
    assert result.expert_cache_bytes <= needs.all_experts_bytes
    if needs.expert_window_bytes:
        assert result.expert_cache_bytes >= needs.smallest_cache_bytes


def test_the_expert_cache_takes_what_the_budget_leaves() -> None:
    small, large = plan(V2_LITE, 4 * GIB), plan(V2_LITE, 6 * GIB)
    for result in (small, large):
        check(result, V2_LITE)
        # Within the margin of one hundredth the whole budget is used: more would break it, less would waste it.
        assert result.predicted_bytes >= result.budget_bytes * 0.98
    assert large.expert_cache_bytes - small.expert_cache_bytes >= 2 * GIB * 0.98
    assert small.kv_bytes == large.kv_bytes and small.workspace_bytes == large.workspace_bytes


def test_with_room_for_every_expert_the_cache_is_no_larger_than_they_are() -> None:
    result = plan(V2_LITE, 64 * GIB)
    assert result.expert_cache_bytes == V2_LITE.all_experts_bytes
    assert result.cached_share == 1.0


def test_the_chunk_does_not_depend_on_the_budget() -> None:
    assert {plan(V2_LITE, gib * GIB).prefill_chunk for gib in (3, 4, 8, 32)} == {512}


def test_the_default_context_is_the_smaller_of_the_models_and_8192() -> None:
    assert plan(V2_LITE, 4 * GIB).context == 8192
    short = dataclasses.replace(V2_LITE, max_context=2048)
    assert plan(short, 4 * GIB).context == 2048
    assert plan(V2_LITE, 8 * GIB, context=32_768).context == 32_768


def test_a_model_without_routed_experts_has_no_expert_cache() -> None:
    result = plan(DENSE, 4 * GIB)
    check(result, DENSE)
    assert result.expert_cache_bytes == 0 and result.cached_share == 1.0


def test_a_given_cache_size_is_a_ceiling_and_is_kept() -> None:
    assert plan(V2_LITE, 16 * GIB, expert_cache=GIB).expert_cache_bytes == GIB
    assert plan(V2_LITE, 32 * GIB, expert_cache=30 * GIB).expert_cache_bytes == V2_LITE.all_experts_bytes


def test_a_given_cache_that_does_not_fit_is_refused_not_shrunk() -> None:
    with pytest.raises(BudgetError, match=r"(?s)expert cache 6\.00 GiB \(as asked\).*lower --expert-cache"):
        plan(V2_LITE, 4 * GIB, expert_cache=6 * GIB)


def test_a_cache_below_the_smallest_is_refused_with_the_minimum() -> None:
    least = V2_LITE.smallest_cache_bytes
    assert least == 8 * 6_316_032
    assert plan(V2_LITE, 4 * GIB, expert_cache=least).expert_cache_bytes == least
    with pytest.raises(BudgetError, match=r"works, 49344KiB: 8 experts \(6 per token and 2 in flight\)$"):
        plan(V2_LITE, 4 * GIB, expert_cache=least - 1)


def test_a_cache_for_a_dense_model_is_an_error_not_ignored() -> None:
    with pytest.raises(RequestError, match="no routed experts"):
        plan(DENSE, 4 * GIB, expert_cache=GIB)


def test_a_refusal_names_every_share_and_what_would_help_in_three_lines() -> None:
    with pytest.raises(BudgetError) as refusal:
        plan(V2_LITE, GIB, context=65_536)
    text = str(refusal.value)
    for words in ("the budget is 1.00 GiB", "interpreter 235 MiB", "tokenizer 60.0 MiB", "weights 790 MiB"):
        assert words in text
    for words in ("kv cache 1.90 GiB", "workspace 88.8 MiB", "expert cache 48.2 MiB (8 experts)", "lower --context"):
        assert words in text
    assert len(text.splitlines()) == 3


def test_the_budget_that_a_refusal_names_is_enough() -> None:
    with pytest.raises(BudgetError) as refusal:
        plan(V2_LITE, GIB)
    asked = int(str(refusal.value).split("raise --ram to ")[1].split("MiB")[0])
    check(plan(V2_LITE, asked * MIB), V2_LITE)
    with pytest.raises(BudgetError):
        plan(V2_LITE, (asked - 2) * MIB)


@pytest.mark.parametrize("context", [0, -1, 163_841])
def test_a_context_the_model_was_not_made_for_is_refused_with_the_limit(context: int) -> None:
    with pytest.raises(RequestError, match=r"expected 1 to 163,840 tokens"):
        plan(V2_LITE, 64 * GIB, context=context)


@given(
    budget=st.integers(1, 1 << 38),
    context=st.none() | st.integers(1, 163_840),
    chunk=st.none() | st.integers(1, 4096),
    cache=st.none() | st.integers(1, 1 << 36),
    windows=st.dictionaries(st.integers(0, 80), st.integers(1, 8000).map(lambda pages: pages * 4096), max_size=6),
    num_experts=st.integers(1, 256),
)
def test_any_request_ends_in_a_plan_that_holds_or_in_a_refusal(
    budget: int, context: int | None, chunk: int | None, cache: int | None, windows: dict[int, int], num_experts: int
) -> None:
    needs = dataclasses.replace(V2_LITE, expert_window_bytes=windows, num_experts=num_experts)
    try:
        result = plan(needs, budget, context=context, chunk=chunk, expert_cache=cache)
    except (BudgetError, RequestError):
        return
    check(result, needs)
    assert cache is None or result.expert_cache_bytes <= cache


def catalog(offsets: list[int], nbytes: int) -> ExpertCatalog:
    part = ExpertPart("gate", by_name("Q8_0"), 1, nbytes, tuple(ByteRange(0, offset, nbytes) for offset in offsets))
    return ExpertCatalog(len(offsets), {3: (part,)})


@pytest.mark.parametrize(
    ("offsets", "nbytes", "expected"),
    [
        ([0, 4096], 4096, 4096),
        ([32, 4128], 4096, 8192),  # every expert straddles a page border
        ([0, 4095], 2, 8192),  # only the second one does: the layer's largest window counts
        ([32], 1, 4096),
    ],
)
def test_a_window_encloses_the_part_in_whole_pages(offsets: list[int], nbytes: int, expected: int) -> None:
    assert expert_window_bytes(catalog(offsets, nbytes)) == {3: expected}


def test_no_catalog_means_no_windows() -> None:
    assert expert_window_bytes(None) == {}
