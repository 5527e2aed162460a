"""What every architecture file offers: to the planner before weights are read, to the loader, and to the engine.

    registry.find(files) -> Architecture      config read and checked, every needed tensor found, shapes right
        .resident_tensors(), .expert_catalog(), .kv_bytes_per_token(), …     numbers for the plan; no torch
        .build(weights, …) -> Model                                          torch from here on
            .new_cache(max_tokens) -> KVCache;  .forward(ids, cache, …) -> hidden;  .logits(hidden) -> [n, V]

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from expertide.experts.stats import Phase as Phase
from expertide.formats.tensors import ExpertCatalog, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from expertide.kernels.ops import Kernels
    from expertide.kernels.qtensor import QTensor
    from expertide.kv import KVCache
    from expertide.models.trace import Tracer


class Config(Protocol):
    """What the floors above may ask of any model's configuration; the concrete class has more fields."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int:
        """Tokens the model was made for; prompt and answer together."""
        ...

    @property
    def num_experts(self) -> int:
        """E; 0 for a model without routed experts."""
        ...

    @property
    def num_experts_per_tok(self) -> int:
        """K; 0 for a model without routed experts."""
        ...


class ExpertExecutor(Protocol):
    """Runs the routed experts of one layer wherever they lie (`experts.executor.MoEExecutor`)."""

    def run(
        self,
        layer_id: int,
        x_TH: Tensor,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        phase: Phase,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """y_TH = Σ_k weights[t, k] * expert ids[t, k] (x[t]); float32, summed in k order.

        Args:
            meanwhile: other work of this layer, called once, or not at all, when the disk has enough to do.

        Raises:
            StorageError: an expert could not be read; nothing stays leased.
        """
        ...


class Model(Protocol):
    """A model whose weights are in memory. One thread at a time."""

    @property
    def vocab_size(self) -> int: ...

    def new_cache(self, max_tokens: int) -> KVCache:
        """Empty state of one sequence, all of its memory taken (zero-filled) now."""
        ...

    def forward(
        self,
        token_ids_T: Tensor,
        cache: KVCache,
        phase: Phase,
        trace: Tracer | None = None,
        *,
        before_layer: Callable[[], None] | None = None,
    ) -> Tensor:
        """Run tokens at positions cache.length … and append them to the cache.

        Args:
            token_ids_T: int64 [T], T >= 1, ids below vocab_size.
            phase: which statistics the expert requests count in.
            before_layer: called before each layer; what it raises ends the pass. The cache length is unchanged then.

        Returns:
            The state after the last layer; axis 0 is T, the rest the model's own affair ([T, H], or [T, streams, H]).
            Pick rows along axis 0 and hand them to `logits`.

        Raises:
            RequestError: more tokens than the cache has room for, or an id outside the vocabulary.
            NumericsError: a layer gave values that are not finite; names the layer. The cache length is unchanged.
            StorageError: an expert could not be read. The cache length is unchanged.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [n, V] for n rows of what `forward` returned.

        Raises:
            NumericsError: a logit is not finite.
        """
        ...


class Architecture(Protocol):
    """One model file, understood and checked, before any weight is read."""

    @property
    def name(self) -> str:
        """As the file calls it: "deepseek2", "qwen3moe"."""
        ...

    @property
    def config(self) -> Config: ...

    @property
    def default_prefill_chunk(self) -> int:
        """Tokens per forward pass in prefill; depends on the model only, never on the budget."""
        ...

    def resident_tensors(self) -> list[TensorInfo]:
        """Tensors every token needs, in file order; what the loader reads into memory, packed as they are."""
        ...

    def expert_catalog(self) -> ExpertCatalog | None:
        """Where the routed experts lie; None for a model without any (no expert store is created)."""
        ...

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of cached state per token, all layers; dtype_bytes 2 (float16) or 4 (float32)."""
        ...

    def workspace_bytes(self, chunk: int) -> int:
        """Upper bound of the temporary memory of one forward pass over `chunk` tokens, without experts' own scratch."""
        ...

    def describe(self) -> dict[str, object]:
        """Facts for `inspect`: plain values, in the order they are shown."""
        ...

    def build(
        self,
        weights: Mapping[str, QTensor],
        kernels: Kernels,
        executor: ExpertExecutor | None,
        *,
        context: int,
        kv_dtype: str,
    ) -> Model:
        """Put the model together; imports torch.

        Args:
            weights: every name of `resident_tensors()`; their owners keep the bytes alive.
            executor: None exactly when `expert_catalog()` is None.
            context: largest cache that will be asked for (sizes the rope tables).
            kv_dtype: "float16" or "float32".
        """
        ...
