"""The experts of one layer, computed where they lie. Two ways with the same surface and the same order of sums:

    NativeLayer      one native call when everything is resident (`csrc/kernels/moe.cpp`)
    ReferenceLayer   torch, expert by expert, with any kernels; the definition of what the native one computes

    begin --> []                          done, the output is written
    begin --> misses --> finish(some) ... finish(rest, last=True) --> done
    an exception anywhere --> abort --> as if nothing had been asked

Each (token, k) result goes to its own place and a token's results are summed in the order of k, so neither slots nor
arrival nor waves show in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from expertide._native import MoeLayer, Residency, ThreadPool
from expertide.errors import UnsupportedError
from expertide.formats.quants.base import QuantType
from expertide.formats.tensors import ExpertPart
from expertide.kernels.ops import Kernels
from expertide.kernels.qtensor import QTensor


class LayerStep(Protocol):
    """One layer's experts; one step at a time.

    Attributes:
        owns_its_leases: at no moment of `begin` is a lease known to a Python variable only.
    """

    owns_its_leases: bool

    def begin(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, out_TH: Tensor, *, defer: bool = False
    ) -> list[int]:
        """Lease what is resident or loading; with no misses compute everything.

        Args:
            x_TH, topk_weights_TK: float32; topk_ids_TK: int32; all contiguous, and in place until the step ends.
            out_TH: float32, written when the step ends.
            defer: compute nothing yet, also with no misses; `finish` must follow.

        Returns:
            Missing experts, ascending.

        Raises:
            ReadFailed: a load under way failed; call abort.
        """
        ...

    def finish(self, experts: Sequence[int], *, last: bool, max_experts: int = 0) -> int:
        """Compute what is leased, then `experts` (misses with one lease each, handed over) as they arrive.

        Args:
            max_experts: above 0, return after about as many, so that more reads can be issued; the rest stays leased.

        Returns:
            Nanoseconds spent waiting for reads.

        Raises:
            ReadFailed: a load failed; call abort.
        """
        ...

    @property
    def num_waiting(self) -> int:
        """Experts leased by this step and not computed yet."""
        ...

    def abort(self) -> None:
        """End the step early; releases everything this object still holds."""
        ...


class PartPlace:
    """Where a matrix of an expert lies: part number, bytes into it, how its rows are stored."""

    def __init__(self, part: int, offset: int, quant: QuantType) -> None:
        self.part = part
        self.offset = offset
        self.quant = quant

    @property
    def native(self) -> tuple[int, int, int]:
        return (self.part, self.offset, self.quant.ggml_id)


class ExpertShape:
    """Sizes of a layer's experts and the places of their three matrices: gate, up [F, H], down [H, F]."""

    def __init__(self, layer_id: int, parts: Sequence[ExpertPart]) -> None:
        """
        Raises:
            UnsupportedError: the layer's experts are not made of gate, up and down.
        """
        by_name = {part.name: (number, part) for number, part in enumerate(parts)}
        if set(by_name) == {"gate_up", "down"}:
            number, stacked = by_name["gate_up"]
            self.inner, self.hidden = stacked.rows // 2, stacked.cols
            self.gate = PartPlace(number, 0, stacked.quant)
            self.up = PartPlace(number, self.inner * stacked.quant.row_bytes(stacked.cols), stacked.quant)
        elif set(by_name) == {"gate", "up", "down"}:
            number, gate = by_name["gate"]
            self.inner, self.hidden = gate.rows, gate.cols
            self.gate = PartPlace(number, 0, gate.quant)
            number, up = by_name["up"]
            self.up = PartPlace(number, 0, up.quant)
        else:
            raise UnsupportedError(
                f"layer {layer_id}: experts made of {', '.join(sorted(by_name))}; expected gate, up and down"
            )
        number, down = by_name["down"]
        self.down = PartPlace(number, 0, down.quant)

    @property
    def quants(self) -> tuple[QuantType, ...]:
        return (self.gate.quant, self.up.quant, self.down.quant)


class NativeLayer:
    """Adapter from tensors to addresses."""

    owns_its_leases = True

    def __init__(self, residency: Residency, layer_id: int, shape: ExpertShape, pool: ThreadPool) -> None:
        self._pool = pool
        self._layer = MoeLayer(
            residency, layer_id, shape.hidden, shape.inner, shape.gate.native, shape.up.native, shape.down.native
        )

    def begin(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, out_TH: Tensor, *, defer: bool = False
    ) -> list[int]:
        num_tokens, k = topk_ids_TK.shape
        return self._layer.run(
            self._pool,
            x_TH.data_ptr(),
            topk_ids_TK.data_ptr(),
            topk_weights_TK.data_ptr(),
            num_tokens,
            k,
            out_TH.data_ptr(),
            defer,
        )

    def finish(self, experts: Sequence[int], *, last: bool, max_experts: int = 0) -> int:
        return self._layer.finish(self._pool, experts, last, max_experts)

    @property
    def num_waiting(self) -> int:
        return self._layer.num_waiting

    def abort(self) -> None:
        self._layer.abort()


class ReferenceLayer:
    """The same in torch."""

    owns_its_leases = False

    def __init__(self, residency: Residency, layer_id: int, shape: ExpertShape, kernels: Kernels) -> None:
        self._residency = residency
        self._layer_id = layer_id
        self._shape = shape
        self._kernels = kernels
        self._leased: list[int] = []  # by this step, not computed yet; ascending within a call

    def begin(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, out_TH: Tensor, *, defer: bool = False
    ) -> list[int]:
        assert not self._leased
        self._x_TH, self._topk_ids_TK = x_TH, topk_ids_TK
        self._topk_weights_TK, self._out_TH = topk_weights_TK, out_TH
        hits, misses = self._residency.acquire(self._layer_id, topk_ids_TK.data_ptr(), topk_ids_TK.numel())
        self._leased = hits
        self._results_TKH = torch.empty(*topk_ids_TK.shape, x_TH.shape[1], dtype=torch.float32)
        if not misses and not defer:
            self.finish((), last=True)
        return misses

    def finish(self, experts: Sequence[int], *, last: bool, max_experts: int = 0) -> int:
        self._leased.extend(experts)
        waited_ns = num_computed = 0
        while self._leased and (last or max_experts <= 0 or num_computed < max_experts):
            num_computed += 1
            expert = self._leased[0]
            waited_ns += self._residency.wait(self._layer_id, expert)
            self._compute(expert)
            del self._leased[0]
            self._residency.release(self._layer_id, expert)
        if last:
            self._out_TH.copy_(self._kernels.moe_sum(self._results_TKH, self._topk_weights_TK))
            self._forget()
        return waited_ns

    @property
    def num_waiting(self) -> int:
        return len(self._leased)

    def abort(self) -> None:
        while self._leased:
            self._residency.release(self._layer_id, self._leased.pop())
        self._forget()

    def _compute(self, expert: int) -> None:
        shape = self._shape
        slot = self._residency.slot_of(self._layer_id, expert)
        tokens, ks = torch.nonzero(self._topk_ids_TK == expert, as_tuple=True)
        self._results_TKH[tokens, ks] = self._kernels.expert_mlp(
            self._x_TH[tokens],
            self._matrix(slot, shape.gate, shape.inner, shape.hidden),
            self._matrix(slot, shape.up, shape.inner, shape.hidden),
            self._matrix(slot, shape.down, shape.hidden, shape.inner),
        )

    def _matrix(self, slot: int, place: PartPlace, rows: int, cols: int) -> QTensor:
        # The lease keeps the bytes in place; it is held until the result is written.
        address = int(self._residency.pointers[slot, place.part]) + place.offset
        return QTensor(address, place.quant, (rows, cols), self._residency)

    def _forget(self) -> None:
        """Keep no tensor of a step that is over."""
        empty = torch.empty(0)
        self._x_TH = self._topk_ids_TK = self._topk_weights_TK = self._out_TH = self._results_TKH = empty
