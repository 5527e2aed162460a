"""Shapes and a budget in; what lies where, or a refusal with numbers, out. Pure arithmetic: nothing is allocated.

A plan divides the budget into named shares that sum to the predicted peak resident set:

    interpreter      Python, torch and the other libraries, before any model
    server           the HTTP process, and grammars of answers, where there is a server
    tokenizer        vocabulary, merges, chat template, and the metadata they come from
    weights          what every token needs, as packed in the file
    kv cache         one row per token of context and layer
    workspace        activations and decoded tiles of one prefill chunk
    expert cache     all the rest, up to the size of all experts

The expert cache must hold the experts of one token plus two: one being read while another waits to be freed. Below
that a decode step could not go on, so the plan refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from expertide.errors import BudgetError, RequestError
from expertide.formats.tensors import ByteRange, ExpertCatalog, ExpertPart
from expertide.memory.arena import PAGE_BYTES
from expertide.units import MIB, exact_size, format_size, round_down, round_up

DEFAULT_CONTEXT = 8192
# Beside the experts of one token: one being read while another waits to be freed.
SPARE_SLOTS = 2

# Kept free of every share: allocators round, thread stacks and page tables grow. One hundredth, at least 16 MiB.
_MARGIN_DIVISOR = 100
_MIN_MARGIN_BYTES = 16 * MIB


@dataclass(frozen=True)
class ModelNeeds:
    """What a model asks of memory.

    Attributes:
        interpreter_bytes: resident set of the process before it opens the model.
        tokenizer_bytes: vocabulary, merges and the like.
        resident_bytes: weights that every token needs, packed.
        kv_bytes_per_token: all layers together.
        workspace_bytes: prefill chunk in tokens -> bytes of activations and decoded tiles at the peak.
        max_context: what the model was made for, in tokens.
        prefill_chunk: tokens per prefill step unless someone asks otherwise.
        expert_window_bytes: MoE layer_id -> what one expert of it takes in the arena; empty for dense-only models.
        num_experts: routed experts of each MoE layer.
        num_experts_per_tok: K.
        server_bytes: what other processes of this program, and grammars, take.
    """

    interpreter_bytes: int
    tokenizer_bytes: int
    resident_bytes: int
    kv_bytes_per_token: int
    workspace_bytes: Callable[[int], int]
    max_context: int
    prefill_chunk: int
    expert_window_bytes: Mapping[int, int]
    num_experts: int
    num_experts_per_tok: int
    server_bytes: int = 0

    @property
    def smallest_cache_bytes(self) -> int:
        return smallest_cache_bytes(self.expert_window_bytes, self.num_experts, self.num_experts_per_tok)

    @property
    def all_experts_bytes(self) -> int:
        """Arena bytes that hold every routed expert at once."""
        return sum(self.expert_window_bytes.values()) * self.num_experts


@dataclass(frozen=True, slots=True)
class Plan:
    """What lies where. The shares sum to `predicted_bytes`, which is at most `budget_bytes`."""

    budget_bytes: int
    context: int
    prefill_chunk: int
    interpreter_bytes: int
    tokenizer_bytes: int
    resident_bytes: int
    kv_bytes: int
    workspace_bytes: int
    expert_cache_bytes: int
    all_experts_bytes: int
    num_all_experts: int
    server_bytes: int = 0

    @property
    def shares(self) -> dict[str, int]:
        """Name of the share -> bytes, in the order people read them."""
        return {
            "interpreter": self.interpreter_bytes,
            **({"server": self.server_bytes} if self.server_bytes else {}),
            "tokenizer": self.tokenizer_bytes,
            "weights": self.resident_bytes,
            "kv cache": self.kv_bytes,
            "workspace": self.workspace_bytes,
            "expert cache": self.expert_cache_bytes,
        }

    @property
    def predicted_bytes(self) -> int:
        return sum(self.shares.values())

    @property
    def cached_share(self) -> float:
        """Which part of all routed experts fits into the cache, 0..1; 1 for dense-only models."""
        return self.expert_cache_bytes / self.all_experts_bytes if self.all_experts_bytes else 1.0


def window_pages(where: ByteRange) -> int:
    """Pages of arena that the aligned window around a range takes."""
    end = round_up(where.offset + where.nbytes, PAGE_BYTES)
    return (end - round_down(where.offset, PAGE_BYTES)) // PAGE_BYTES


def expert_window_bytes(catalog: ExpertCatalog | None) -> dict[int, int]:
    """What one expert of each MoE layer takes in the arena: an aligned window around every part.

    The largest expert of the layer counts: where a part begins inside its first page differs from expert to expert.
    """
    if catalog is None:
        return {}
    return {
        layer_id: PAGE_BYTES * max(_expert_pages(parts, expert) for expert in range(catalog.num_experts))
        for layer_id, parts in catalog.layers.items()
    }


def smallest_window_bytes(catalog: ExpertCatalog) -> int:
    """Arena bytes of the smallest expert: capacity divided by this bounds the number of slots."""
    return PAGE_BYTES * min(
        _expert_pages(parts, expert) for parts in catalog.layers.values() for expert in range(catalog.num_experts)
    )


def _expert_pages(parts: Sequence[ExpertPart], expert: int) -> int:
    return sum(window_pages(part.ranges[expert]) for part in parts)


def smallest_cache_bytes(window_bytes: Mapping[int, int], num_experts: int, num_experts_per_tok: int) -> int:
    """Arena bytes below which a step could not go on: K + 2 of the largest experts, or all of them if that is less.

    0 when there are no routed experts.
    """
    slots = (num_experts_per_tok + SPARE_SLOTS) * max(window_bytes.values(), default=0)
    return min(slots, sum(window_bytes.values()) * num_experts)


def plan(
    needs: ModelNeeds,
    budget_bytes: int,
    *,
    context: int | None = None,
    chunk: int | None = None,
    expert_cache: int | None = None,
) -> Plan:
    """Divide the budget.

    Args:
        context: tokens of prompt and answer together; None: the smaller of the model's and 8,192.
        chunk: tokens per prefill step; None: the model's own.
        expert_cache: ceiling of the expert cache in bytes; None: whatever the budget leaves.

    Raises:
        RequestError: a context the model was not made for, or no tokens at all.
        BudgetError: the shares, with the smallest expert cache that works, do not fit.
    """
    context = min(needs.max_context, DEFAULT_CONTEXT) if context is None else context
    chunk = needs.prefill_chunk if chunk is None else chunk
    if not 1 <= context <= needs.max_context:
        raise RequestError(f"--context {context:,}: expected 1 to {needs.max_context:,} tokens, the model's own limit")
    if chunk < 1:
        raise RequestError(f"--prefill-chunk {chunk:,}: expected at least 1 token")
    # A chunk never holds more tokens than the context does.
    chunk = min(chunk, context)

    _check_wish(needs, expert_cache)
    most = min(needs.all_experts_bytes, expert_cache) if expert_cache is not None else needs.all_experts_bytes
    fixed = Plan(
        budget_bytes=budget_bytes,
        context=context,
        prefill_chunk=chunk,
        interpreter_bytes=needs.interpreter_bytes,
        tokenizer_bytes=needs.tokenizer_bytes,
        resident_bytes=needs.resident_bytes,
        kv_bytes=context * needs.kv_bytes_per_token,
        workspace_bytes=needs.workspace_bytes(chunk),
        expert_cache_bytes=0,
        all_experts_bytes=needs.all_experts_bytes,
        num_all_experts=needs.num_experts * len(needs.expert_window_bytes),
        server_bytes=needs.server_bytes,
    )
    left = budget_bytes - max(_MIN_MARGIN_BYTES, budget_bytes // _MARGIN_DIVISOR) - fixed.predicted_bytes
    # A size that someone gave is kept or refused, never shrunk in silence.
    least = needs.smallest_cache_bytes if expert_cache is None else most
    if left < least:
        raise BudgetError(_refusal(fixed, least, needs))
    return replace(fixed, expert_cache_bytes=round_down(min(left, most), PAGE_BYTES))


def _check_wish(needs: ModelNeeds, expert_cache: int | None) -> None:
    """A cache size that someone gave must be able to take effect."""
    if expert_cache is None:
        return
    if not needs.expert_window_bytes:
        raise RequestError(
            f"--expert-cache {exact_size(expert_cache)}: this model has no routed experts: nothing to cache"
        )
    if expert_cache < needs.smallest_cache_bytes:
        slots = needs.num_experts_per_tok + SPARE_SLOTS
        raise BudgetError(
            f"--expert-cache {exact_size(expert_cache)} is below the smallest that works, "
            f"{exact_size(needs.smallest_cache_bytes)}: {slots} experts "
            f"({needs.num_experts_per_tok} per token and {SPARE_SLOTS} in flight)"
        )


def _refusal(fixed: Plan, least: int, needs: ModelNeeds) -> str:
    """Three lines: the two sums, every share, what would help."""
    taken = fixed.predicted_bytes + least
    # The smallest budget whose margin leaves `taken`, in whole MiB.
    total = round_up(max(taken + _MIN_MARGIN_BYTES, -(-taken * _MARGIN_DIVISOR // (_MARGIN_DIVISOR - 1))), MIB)
    is_chosen = least > needs.smallest_cache_bytes
    shares = [f"{name} {format_size(size)}" for name, size in fixed.shares.items() if size]
    if needs.expert_window_bytes:
        slots = "as asked" if is_chosen else f"{needs.num_experts_per_tok + SPARE_SLOTS} experts"
        shares.append(f"expert cache {format_size(least)} ({slots})")
    shares.append(f"margin {format_size(total - taken)}")
    hints = [f"raise --ram to {total // MIB}MiB"]
    if is_chosen:
        hints.append("lower --expert-cache")
    # A hint must be worth following: shares under a twentieth cannot make the difference.
    if fixed.kv_bytes > total // 20:
        hints.append(f"lower --context (now {fixed.context:,})")
    if fixed.workspace_bytes > total // 20:
        hints.append(f"lower --prefill-chunk (now {fixed.prefill_chunk:,})")
    return (
        f"what must stay in RAM needs {format_size(total)}, the budget is {format_size(fixed.budget_bytes)}\n"
        f"  {', '.join(shares)}\n"
        f"  {', or '.join(hints)}"
    )
