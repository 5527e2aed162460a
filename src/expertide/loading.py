"""From a plan to a running model: arenas, reads, executor, engine, in this order; and back again in `Runtime.close`.

Importing this module imports torch: it is the first step after every refusal that needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from expertide import _native, kernels
from expertide._native import Residency
from expertide.engine.engine import Engine
from expertide.errors import RequestError
from expertide.experts import popularity
from expertide.experts.cache import ExpertCache, make_residency
from expertide.experts.executor import MoEExecutor
from expertide.experts.fill import Activity, FillStats, StartupFill
from expertide.experts.learning import Learning
from expertide.experts.policies import make_policy
from expertide.experts.prediction import NextRouter, Predictor, make_predictor
from expertide.experts.stats import ExpertStats
from expertide.formats.tensors import TensorInfo
from expertide.kernels.qtensor import QTensor
from expertide.kernels.router import RouterSpec
from expertide.memory import heap
from expertide.memory.arena import PAGE_BYTES, Arena
from expertide.memory.peak import peak_resident_bytes
from expertide.memory.populate import Populator
from expertide.memory.reader import Reader
from expertide.models.trace import Tracer
from expertide.prepare import Prepared, types_without_native_kernels
from expertide.units import MIB

Progress = Callable[[str, int, int], None]
# Between two looks of the progress bar; small enough to move, large enough to keep the disk busy.
_LOAD_BATCH_BYTES = 64 * MIB
# What the first request may wait for pages of the expert cache once all else is loaded; the rest come with the reads.
_POPULATE_S = 5.0


class Runtime:
    """A loaded model. Made by `load`; `close` gives everything back. One thread at a time, but for `memory`."""

    def __init__(self, prepared: Prepared, progress: Progress | None) -> None:
        self.prepared = prepared
        # What is entered here is closed in reverse order, also when a later step of loading fails.
        self._stack = ExitStack()
        try:
            self._build(progress)
        except BaseException:
            self._stack.close()
            raise

    def _build(self, progress: Progress | None) -> None:
        prepared, settings = self.prepared, self.prepared.settings
        heap.return_large_buffers()
        # Reference ops run on torch's threads; the native kernels have a pool of the same size.
        torch.set_num_threads(prepared.num_threads)
        if settings.kernels == "native":
            _choose_isa(settings.cpu_isa)
            _native.set_activation_bits(settings.activation_bits)
        self._kernels = kernels.select(
            settings.kernels,
            num_threads=prepared.num_threads,
            cpus=prepared.pin_cpus,
        )
        self._close_later(self._kernels)
        files = prepared.files
        self.reader = Reader(files.files, files.file_sizes, serial=settings.serial_io)
        expert_arena, populator = self._reserve_expert_memory()
        self._weights, self._weights_arena = load_resident(
            prepared.architecture.resident_tensors(), self.reader, progress
        )
        self._stack.callback(self._weights_arena.close)
        self.cache: ExpertCache | None = None
        self._policy_name: str | None = None
        self.fill: StartupFill | None = None
        self._fill_kind = "off"
        self.executor = self._make_executor(expert_arena)
        self._prediction = "off"
        if prepared.prediction != "off":
            self._start_prediction(prepared.prediction)
        # Closed before the memory that its threads write to.
        self._stack.callback(self.reader.close)
        tracer = None
        if settings.dump is not None:
            tracer = Tracer(settings.dump)
            self._stack.callback(tracer.close)
        model = prepared.architecture.build(
            self._weights, self._kernels, self.executor, context=prepared.plan.context, kv_dtype=prepared.kv_dtype
        )
        self.engine = Engine(model, chunk=prepared.plan.prefill_chunk, context=prepared.plan.context, tracer=tracer)
        if populator is not None:
            populator.wait(_POPULATE_S)
            populator.close()
        if self.executor is not None:
            self._start_fill(self.executor)

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*self.reader.notes, *self._kernel_notes())

    def _kernel_notes(self) -> tuple[str, ...]:
        """One sentence on the quant types that the native kernels lack."""
        if self._kernels.name != "native":
            return ()
        slow = types_without_native_kernels(self.prepared.architecture, self.prepared.catalog)
        return (f"no native kernel for {', '.join(slow)}: such tensors run on the reference kernels",) if slow else ()

    def close(self) -> None:
        """Give everything back. The engine must not be used any more."""
        self._stack.close()
        # Tensors of the KV cache and views into the arenas go with the model.
        del self.engine, self.executor, self.cache, self.fill, self._weights

    def set_activity(self, activity: Activity) -> None:
        """Tell the fill what the engine does from now on."""
        if self.fill is not None:
            self.fill.set_activity(activity)

    def wait_for_fill(self, timeout_s: float | None) -> bool:
        return self.fill is None or self.fill.wait(timeout_s)

    def memory(self) -> dict[str, Any]:
        """The "memory" object of the statistics: bytes, planned and measured."""
        plan = self.prepared.plan
        return {
            "ram_budget_bytes": plan.budget_bytes,
            "ram_peak_bytes": peak_resident_bytes(),
            "vram_budget_bytes": 0,
            "vram_peak_bytes": 0,
            "vram_allocated_peak_bytes": 0,
            "vram_reserved_peak_bytes": 0,
            "resident_bytes": self._weights_arena.capacity_bytes,
            "expert_cache_bytes": plan.expert_cache_bytes,
            "expert_cache_used_bytes": self.cache.used_bytes if self.cache is not None else 0,
            "all_experts_bytes": plan.all_experts_bytes,
            "kv_bytes": self.engine.kv_bytes,
            "planned": {**plan.shares, "total": plan.predicted_bytes},
        }

    def placement(self) -> dict[str, Any]:
        """The "placement" object of the statistics."""
        prepared = self.prepared
        return {
            "compute_placement": "fixed",
            "device": "cpu",
            "kernels": self._kernels.name,
            "isa": _native.isa() if self._kernels.name == "native" else None,
            "activation_bits": prepared.settings.activation_bits if self._kernels.name == "native" else None,
            "threads": prepared.num_threads,
            "pinned_cpus": list(prepared.pin_cpus),
            "context": prepared.plan.context,
            "prefill_chunk": prepared.plan.prefill_chunk,
            "kv_type": prepared.kv_dtype,
            "cache_policy": self._policy_name,
            "startup_fill": self._fill_kind,
            "prefill_prefetch": prepared.options.prefill_prefetch,
            "predictive_prefetch": self._prediction,
            "serial_io": prepared.settings.serial_io,
            "direct_io": not self.reader.notes,
        }

    def expert_stats(self) -> ExpertStats:
        """Sums since the load."""
        return self.executor.stats() if self.executor is not None else ExpertStats()

    def expert_stats_since(self, before: ExpertStats) -> dict[str, Any]:
        """The "experts" object of the statistics: prefill and decode after `before`, the fill since the load."""
        fill = self.fill.stats() if self.fill is not None else FillStats()
        return {**(self.expert_stats() - before).to_json(), "fill": fill.to_json()}

    def _start_prediction(self, kind: str) -> None:
        try:
            self.set_prediction(kind)
        except RequestError:
            # Another model on the same disk may be one whose routers can be asked; only a wish must be refused.
            if self.prepared.options.predictive_prefetch != "auto":
                raise

    def _reserve_expert_memory(self) -> tuple[Arena | None, Populator | None]:
        """The expert cache's memory, on its way from the system; None for a model without routed experts."""
        if self.prepared.catalog is None:
            return None, None
        arena = Arena(self.prepared.plan.expert_cache_bytes)
        self._stack.callback(arena.close)
        populator = Populator(arena, self.prepared.num_threads)
        self._stack.callback(populator.close)
        populator.start()
        return arena, populator

    def _make_executor(self, arena: Arena | None) -> MoEExecutor | None:
        """The expert store; None for a model without routed experts."""
        prepared = self.prepared
        catalog = prepared.catalog
        if catalog is None or arena is None:
            return None
        self.reader.keep(arena)
        residency = make_residency(catalog, arena)
        policy = make_policy(prepared.options.cache_policy)
        self._policy_name = policy.name
        self.cache = ExpertCache(
            catalog,
            arena,
            residency,
            policy,
            file_sizes=prepared.files.file_sizes,
            num_experts_per_tok=prepared.architecture.config.num_experts_per_tok,
            poison=prepared.settings.poison,
        )
        return MoEExecutor(
            catalog,
            self.cache,
            residency,
            self.reader,
            self._kernels,
            reads_ahead=prepared.options.prefill_prefetch,
        )

    def set_prediction(self, kind: str) -> None:
        """As `LLM.set_predictive_prefetch`."""
        if self.executor is None or self.cache is None:
            raise RequestError(f"--predictive-prefetch {kind}: has no effect, this model has no routed experts")
        self.executor.set_predictor(self._make_predictor(kind, self.cache.residency))
        self._prediction = kind

    def forget_experts(self) -> None:
        """As `LLM.forget_experts`."""
        if self.cache is not None:
            self.cache.settle()
            self.cache.clear()

    def _make_predictor(self, kind: str, residency: Residency) -> Predictor | None:
        prepared = self.prepared
        if kind != "router":
            return make_predictor(kind, residency)
        assert prepared.catalog is not None
        spec = getattr(prepared.architecture.config, "router", None)
        routers = {}
        for layer_id in prepared.catalog.layers:
            matrix = self._weights.get(f"blk.{layer_id}.ffn_gate_inp.weight")
            if not isinstance(spec, RouterSpec) or spec.has_bias or matrix is None:
                raise RequestError("--predictive-prefetch router: this model's routers cannot be asked ahead of time")
            routers[layer_id] = matrix
        assert isinstance(spec, RouterSpec)
        return NextRouter(routers, spec, self._kernels)

    def _start_fill(self, executor: MoEExecutor) -> None:
        """Begin to load what the cache has room for, and to learn what is asked for."""
        prepared = self.prepared
        catalog, cache = prepared.catalog, self.cache
        assert catalog is not None and cache is not None
        # One read at a time, each awaited, is what serial mode promises.
        if prepared.options.startup_fill == "off" or prepared.settings.serial_io:
            return
        learning = Learning(prepared.files, catalog, cache.residency)
        self._stack.callback(learning.save)
        profile = learning.saved if prepared.options.startup_fill == "auto" else None
        if profile is not None:
            cache.expect(profile)
        self._fill_kind = "even" if profile is None else "profile"
        self.fill = StartupFill(cache, cache.residency, self.reader, popularity.fill_order(catalog, profile))
        self._stack.callback(self.fill.close)
        executor.set_fill(self.fill)
        self.fill.start()

    def _close_later(self, thing: object) -> None:
        close = getattr(thing, "close", None)
        if close is not None:
            self._stack.callback(close)


def load(prepared: Prepared, progress: Progress | None = None) -> Runtime:
    """Read the resident weights and put the model together.

    Raises:
        StorageError: the disk did not deliver.
        BudgetError: the system refused memory that was planned.
        RequestError: a diagnosis variable that this machine cannot honour.
    """
    return Runtime(prepared, progress)


def load_resident(
    tensors: list[TensorInfo], reader: Reader, progress: Progress | None
) -> tuple[dict[str, QTensor], Arena]:
    """Read tensors into one arena, packed as they are.

    Each keeps its offset modulo the page size, so that direct reads go straight to their place; neighbours in the file
    stay neighbours in memory, so next to nothing is lost between them.
    """
    places: list[int] = []
    end = 0
    for tensor in tensors:
        end += (tensor.offset - end) % PAGE_BYTES
        places.append(end)
        end += tensor.nbytes
    arena = Arena(end + PAGE_BYTES)
    weights = {
        tensor.name: QTensor(arena.address + place, tensor.quant, tensor.shape, arena)
        for tensor, place in zip(tensors, places, strict=True)
    }
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    batch: list[TensorInfo] = []
    reader.keep(arena)
    try:
        for number, tensor in enumerate(tensors):
            batch.append(tensor)
            waiting = sum(entry.nbytes for entry in batch)
            if waiting >= _LOAD_BATCH_BYTES or number == len(tensors) - 1:
                reader.read_many([(entry.where, weights[entry.name].address) for entry in batch])
                done += waiting
                batch.clear()
                if progress is not None:
                    progress("loading", done, total)
    except BaseException:
        # The reader's threads may still write: they end first.
        reader.close()
        arena.close()
        raise
    return weights, arena


def _choose_isa(name: str) -> None:
    try:
        _native.set_isa(name)
    except (RuntimeError, ValueError) as error:
        raise RequestError(f"EXPERTIDE_CPU_ISA={name}: {error}") from None
