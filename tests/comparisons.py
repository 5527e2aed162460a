"""Results of models and kernels, recorded and compared. Tolerances are their callers' business."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from expertide import LLM


def chunked_logits(model: Any, ids: torch.Tensor, *, chunk: int) -> torch.Tensor:
    """Logits of every position, the prompt taken in chunks."""
    cache = model.new_cache(len(ids))
    pieces = [model.logits(model.forward(piece, cache, "prefill")) for piece in ids.split(chunk)]
    assert cache.length == len(ids)
    return torch.cat(pieces)


def hf_logits(reference: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return reference(ids[None]).logits[0]


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[list[bytes]]:
    """The bytes of every row of logits that is computed meanwhile."""
    model = llm._runtime.engine._model
    original, rows = model.logits, []

    def recorded(hidden: torch.Tensor) -> torch.Tensor:
        logits = original(hidden)
        rows.append(logits.numpy().tobytes())
        return logits

    model.logits = recorded
    try:
        yield rows
    finally:
        model.logits = original


def assert_logits_within(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    gap = (found - expected).abs()
    if gap.max() > tolerance:
        token, entry = divmod(int(gap.argmax()), expected.shape[1])
        raise AssertionError(
            f"token {token}, logit {entry}: {found[token, entry]:.6f}, expected {expected[token, entry]:.6f}; "
            f"difference {gap.max():.2e} > {tolerance:.0e}"
        )


def assert_within_share(found: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    """No difference above `relative` times the largest expected value."""
    assert found.shape == expected.shape
    difference = (found - expected).abs()
    worst = int(difference.argmax())
    assert difference.max() <= relative * expected.abs().max(), (
        f"worst at {np.unravel_index(worst, found.shape)}: {found.flatten()[worst]} against {expected.flatten()[worst]}"
    )
