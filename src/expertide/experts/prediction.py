"""What the next layer may ask for, guessed while this one computes: off unless asked for, or measured to win here.

    last      what the last token asked that layer for
    average   what it was asked for most often lately (the decayed counts that lfu uses)
    router    that layer's own router, on this layer's input: the residual stream changes little from layer to layer

A guess costs disk time and a slot, never a bit: predicted reads go behind demand, and their slots are the first to be
recycled. `ExpertStats.predicted` counts what came of them. docs/experiments.md holds the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from expertide._native import Residency

if TYPE_CHECKING:
    from torch import Tensor

    from expertide.kernels.ops import Kernels
    from expertide.kernels.qtensor import QTensor
    from expertide.kernels.router import RouterSpec

# Guesses per layer from counts; beyond that the next one is hardly likelier than any other.
_MOST = 8


class Predictor(Protocol):
    def predict(self, layer_id: int, x_TH: Tensor) -> Sequence[int]:
        """Experts that `layer_id`, the next one to be computed, may ask for; the likeliest first.

        Args:
            x_TH: input of the experts of the layer before it.
        """
        ...


class LastToken:
    def __init__(self, residency: Residency) -> None:
        self._last_use = residency.last_use

    def predict(self, layer_id: int, x_TH: Tensor) -> Sequence[int]:
        row = self._last_use[layer_id]
        latest = int(row.max())
        return [int(e) for e in np.flatnonzero(row == latest)] if latest > 0 else []


class Average:
    def __init__(self, residency: Residency) -> None:
        self._frequency = residency.frequency

    def predict(self, layer_id: int, x_TH: Tensor) -> Sequence[int]:
        row = self._frequency[layer_id]
        order = np.argsort(-row, kind="stable")[:_MOST]
        return [int(e) for e in order if row[e] > 0]


class NextRouter:
    def __init__(self, routers: Mapping[int, QTensor], spec: RouterSpec, kernels: Kernels) -> None:
        self._routers = routers
        self._spec = spec
        self._kernels = kernels

    def predict(self, layer_id: int, x_TH: Tensor) -> Sequence[int]:
        logits_TE = self._kernels.linear(x_TH, self._routers[layer_id])
        # Routers that look at the token's id are refused when this is made.
        no_ids_T = x_TH.new_zeros(x_TH.shape[0]).long()
        ids_TK, _ = self._kernels.route(logits_TE, self._spec, bias_E=None, token_ids_T=no_ids_T)
        return list(dict.fromkeys(ids_TK.flatten().tolist()))


def make_predictor(kind: str, residency: Residency) -> Predictor | None:
    """A predictor from counts; None for "off"."""
    makers: dict[str, Callable[[Residency], Predictor]] = {"last": LastToken, "average": Average}
    return makers[kind](residency) if kind in makers else None
