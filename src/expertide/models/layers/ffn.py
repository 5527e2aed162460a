"""The feed-forward half of a layer: one dense SwiGLU, or routed experts beside a shared SwiGLU."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from expertide.kernels.fused import FeedForwardSpec, FusedFeedForward, RouterWeights
from expertide.kernels.ops import Kernels
from expertide.kernels.qtensor import QTensor
from expertide.kernels.router import RouterSpec
from expertide.models.architecture import ExpertExecutor
from expertide.models.layers.step import Step
from expertide.models.trace import NO_LAYER


class FeedForward(Protocol):
    def forward(self, x_TH: Tensor, step: Step) -> Tensor: ...

    def fuse(self, norm: Tensor, norm_eps: float) -> FeedForwardHalf | None:
        """norm, forward and residual sum with fused ops, where the kernels have them."""
        ...


class FeedForwardHalf:
    """The second half of a layer on fused ops, in place on the residual stream."""

    def __init__(self, ops: FusedFeedForward, layer_id: int, executor: ExpertExecutor | None) -> None:
        self._ops = ops
        self._layer_id = layer_id
        self._executor = executor

    def add_to(self, x_TH: Tensor, step: Step) -> bool:
        """x_TH += feed_forward(norm(x)); says whether every value is finite."""
        normed_TH, ids_TK, weights_TK = self._ops.begin(x_TH)
        if self._executor is None:
            return self._ops.end(x_TH, normed_TH, None)
        if step.phase == "prefill":  # a result of its own would come on top of the experts' workspace
            routed_TH = self._executor.run(self._layer_id, normed_TH, ids_TK, weights_TK, step.phase)
            return self._ops.end(x_TH, normed_TH, routed_TH)
        shared: list[Tensor | None] = []
        routed_TH = self._executor.run(
            self._layer_id,
            normed_TH,
            ids_TK,
            weights_TK,
            step.phase,
            meanwhile=lambda: shared.append(self._ops.shared(normed_TH)),
        )
        return self._ops.end(x_TH, normed_TH, routed_TH, shared[0] if shared else None)


class SwiGLU:
    """down · (silu(gate · x) * (up · x)); a dense layer's whole MLP, or the shared experts fused into one."""

    share_H: Tensor | None = None

    def __init__(self, gate: QTensor, up: QTensor, down: QTensor, kernels: Kernels) -> None:
        self._gate, self._up, self._down = gate, up, down
        self._kernels = kernels

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        kernels = self._kernels
        inner_TF = kernels.swiglu(kernels.linear(x_TH, self._gate), kernels.linear(x_TH, self._up))
        return kernels.linear(inner_TF, self._down)

    @property
    def weights(self) -> tuple[QTensor, QTensor, QTensor]:
        return self._gate, self._up, self._down

    def fuse(self, norm: Tensor, norm_eps: float) -> FeedForwardHalf | None:
        ops = self._kernels.fuse_feed_forward(FeedForwardSpec(norm, norm_eps, None, self.weights))
        return None if ops is None else FeedForwardHalf(ops, NO_LAYER, None)


class GatedSwiGLU:
    """sigmoid(gate · x) * mlp(x): a shared expert whose share each token decides.

    Source: Qwen2MoeSparseMoeBlock in transformers.
    """

    def __init__(self, mlp: SwiGLU, gate_H: Tensor, kernels: Kernels) -> None:
        self._mlp = mlp
        self.share_H = gate_H
        self._kernels = kernels

    @property
    def weights(self) -> tuple[QTensor, QTensor, QTensor]:
        return self._mlp.weights

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        return self._kernels.gate_rows(self._mlp.forward(x_TH, step), x_TH, self.share_H)


class RoutedExperts:
    """y = Σ_k weight_k * expert_k(x) + shared(x). The experts live elsewhere; `executor` runs them."""

    def __init__(
        self,
        layer_id: int,
        spec: RouterSpec,
        *,
        router: QTensor,
        bias_E: Tensor | None,
        shared: SwiGLU | GatedSwiGLU | None,
        executor: ExpertExecutor,
        kernels: Kernels,
    ) -> None:
        self._layer_id = layer_id
        self._spec = spec
        self._router = router
        self._bias_E = bias_E
        self._shared = shared
        self._executor = executor
        self._kernels = kernels

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        logits_TE = self._kernels.linear(x_TH, self._router)
        topk_ids_TK, topk_weights_TK = self._kernels.route(
            logits_TE, self._spec, bias_E=self._bias_E, token_ids_T=step.token_ids_T
        )
        y_TH = self._executor.run(self._layer_id, x_TH, topk_ids_TK, topk_weights_TK, step.phase)
        if step.trace is not None:
            step.record(self._layer_id, "router_logits", logits_TE)
            step.record(self._layer_id, "topk_ids", topk_ids_TK)
            step.record(self._layer_id, "topk_weights", topk_weights_TK)
            step.record(self._layer_id, "routed_experts", y_TH)
        if self._shared is None:
            return y_TH
        shared_TH = self._shared.forward(x_TH, step)
        step.record(self._layer_id, "shared_experts", shared_TH)
        return y_TH + shared_TH

    def fuse(self, norm: Tensor, norm_eps: float) -> FeedForwardHalf | None:
        router = RouterWeights(self._router, self._bias_E, self._spec)
        mlp, share_H = (None, None) if self._shared is None else (self._shared.weights, self._shared.share_H)
        ops = self._kernels.fuse_feed_forward(FeedForwardSpec(norm, norm_eps, router, mlp, share_H))
        return None if ops is None else FeedForwardHalf(ops, self._layer_id, self._executor)
