"""A model with all weights in plain memory: no arena, no cache, no native reads. For tests of models and kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from expertide.formats import open_model
from expertide.formats.tensors import ByteRange, ExpertCatalog, ModelFiles
from expertide.kernels.ops import Kernels
from expertide.kernels.qtensor import QTensor
from expertide.models import registry
from expertide.models.architecture import Architecture, Model


class MemoryExecutor:
    """Implements `architecture.ExpertExecutor` with the meaning of routed experts, and nothing else.

    Attributes:
        calls: (layer_id, topk_ids, topk_weights) of every run, for tests that look at the routing.
    """

    def __init__(self, files: ModelFiles, catalog: ExpertCatalog, kernels: Kernels) -> None:
        self._files = files
        self._catalog = catalog
        self._kernels = kernels
        self._parts: dict[tuple[int, int], dict[str, QTensor]] = {}
        self.calls: list[tuple[int, Tensor, Tensor]] = []

    def run(
        self,
        layer_id: int,
        x_TH: Tensor,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        phase: str,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        self.calls.append((layer_id, topk_ids_TK.clone(), topk_weights_TK.clone()))
        results_TKH = x_TH.new_empty((*topk_ids_TK.shape, x_TH.shape[1]))
        for expert in topk_ids_TK.unique().tolist():
            tokens, places = torch.where(topk_ids_TK == expert)
            parts = self._expert(layer_id, expert)
            y = self._kernels.expert_mlp(x_TH[tokens], parts["gate"], parts["up"], parts["down"])
            results_TKH[tokens, places] = y
        return self._kernels.moe_sum(results_TKH, topk_weights_TK)

    def _expert(self, layer_id: int, expert: int) -> dict[str, QTensor]:
        if (layer_id, expert) not in self._parts:
            parts = {}
            for part in self._catalog.layers[layer_id]:
                raw = read_range(self._files, part.ranges[expert])
                parts[part.name] = QTensor.from_array(raw, part.quant, (part.rows, part.cols))
            if "gate_up" in parts:
                both = parts.pop("gate_up")
                half = both.shape[0] // 2
                parts |= {"gate": both.row_range(0, half), "up": both.row_range(half, 2 * half)}
            self._parts[layer_id, expert] = parts
        return self._parts[layer_id, expert]


def read_range(files: ModelFiles, where: ByteRange) -> np.ndarray:
    return np.fromfile(files.files[where.file_id], np.uint8, count=where.nbytes, offset=where.offset)


def load(path: Path, kernels: Kernels, *, kv_dtype: str, context: int = 1024) -> tuple[Architecture, Model]:
    """Open, check and build a model."""
    files = open_model(path)
    architecture = registry.find(files)
    weights = {
        info.name: QTensor.from_array(read_range(files, info.where), info.quant, info.shape)
        for info in architecture.resident_tensors()
    }
    catalog = architecture.expert_catalog()
    executor = MemoryExecutor(files, catalog, kernels) if catalog else None
    return architecture, architecture.build(weights, kernels, executor, context=context, kv_dtype=kv_dtype)
