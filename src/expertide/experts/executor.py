"""One layer's experts for one step, in three stages: issue reads for the misses, compute the hits, then wait for the
misses and compute them as they arrive.

    run ---- all hits: one native call ----------------------------------------------------> y
     |
     +- misses -> [reserve, submit] -> compute hits -> wait, compute, release -+-----------> y
                        ^                                                      |
                        +----- more misses than room or than reads in flight --+

At most `MAX_READS_IN_FLIGHT` reads are under way; in prefill the window slides over the misses in file order, so each
needed expert is read once per layer and chunk. When nothing more fits, what is leased is computed and released first:
the smallest cache (`placement.smallest_cache_bytes`) still goes on, one expert at a time.

A failed read ends the step with StorageError, naming file and offset. By then no lease of the step is held, no read of
it is under way, and the next step works.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from expertide._native import ReadFailed, Residency, ThreadPool, quant_types
from expertide.errors import StorageError
from expertide.experts.cache import ExpertCache
from expertide.experts.layer_step import ExpertShape, LayerStep, NativeLayer, ReferenceLayer
from expertide.experts.stats import ExpertStats, Phase, PhaseStats
from expertide.experts.uninterrupted import Uninterrupted
from expertide.formats.tensors import ExpertCatalog

if TYPE_CHECKING:
    from expertide.kernels.ops import Kernels
    from expertide.memory.reader import Reader, WindowRead

RouterObserver = Callable[[int, Tensor], None]

# Ten experts of three parts: more hides nothing (8 threads saturate the disk) and takes slots from residents.
MAX_READS_IN_FLIGHT = 32
_PHASES: tuple[Phase, Phase] = ("prefill", "decode")


class _HasPool(Protocol):
    pool: ThreadPool


class MoEExecutor:
    """Runs the routed experts of one model. One thread at a time; owns nothing but its books."""

    def __init__(
        self,
        catalog: ExpertCatalog,
        cache: ExpertCache,
        residency: Residency,
        reader: Reader,
        kernels: Kernels,
    ) -> None:
        """
        Args:
            kernels: with the name "native" the layers run in C++ on its `pool`, except those whose experts are of a
                quant type that has no native kernel; else in torch, through its ops.

        Raises:
            UnsupportedError: experts of a kind that nobody here can compute.
        """
        self._cache = cache
        self._residency = residency
        self._reader = reader
        self._observer: RouterObserver | None = None
        self._layers: dict[int, LayerStep] = {}
        self._file_order: dict[int, list[tuple[int, int]]] = {}
        self._num_parts: dict[int, int] = {}
        native_types = frozenset(quant_types()) if kernels.name == "native" else frozenset()
        for layer_id, parts in catalog.layers.items():
            shape = ExpertShape(layer_id, parts)
            if native_types.issuperset(quant.ggml_id for quant in shape.quants):
                self._layers[layer_id] = NativeLayer(residency, layer_id, shape, cast(_HasPool, kernels).pool)
            else:
                self._layers[layer_id] = ReferenceLayer(residency, layer_id, shape, kernels)
            self._file_order[layer_id] = [(r.file_id, r.offset) for r in parts[0].ranges]
            self._num_parts[layer_id] = len(parts)
        # Serial: everything that fits is loaded, read by read, before anything is computed.
        self._max_reads = 1 << 30 if reader.is_serial else MAX_READS_IN_FLIGHT
        self._phase: Phase = "prefill"
        self._residency.set_phase(0)
        self._stall_ns = dict.fromkeys(_PHASES, 0)
        self._read_bytes = dict.fromkeys(_PHASES, 0)
        self._busy_s = dict.fromkeys(_PHASES, 0.0)
        self._evictions = dict.fromkeys(_PHASES, 0)

    def set_router_observer(self, observer: RouterObserver | None) -> None:
        """Have every (layer_id, topk_ids_TK) shown to `observer` before it is served; None ends that."""
        self._observer = observer

    def run(self, layer_id: int, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, phase: Phase) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            x_TH: float32 [T, H].
            topk_ids_TK: int32 [T, K], below the number of experts.
            topk_weights_TK: float32 [T, K].
            phase: which statistics and which eviction rules apply.

        Returns:
            y_TH: float32 [T, H], a new tensor.

        Raises:
            StorageError: an expert could not be read. Nothing stays leased; the next call works.
            KeyboardInterrupt: a Ctrl-C came meanwhile. It is held back until the layer is done: a lease or a slot that
                nobody has written down yet would be lost for ever.
        """
        with Uninterrupted():
            return self._run(layer_id, x_TH, topk_ids_TK, topk_weights_TK, phase)

    def _run(self, layer_id: int, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, phase: Phase) -> Tensor:
        if self._observer is not None:
            self._observer(layer_id, topk_ids_TK)
        if phase != self._phase:
            self._residency.set_phase(_PHASES.index(phase))
            self._phase = phase
        x_TH, topk_ids_TK, topk_weights_TK = _ready(x_TH), topk_ids_TK.contiguous(), _ready(topk_weights_TK)
        assert topk_ids_TK.dtype == torch.int32 and topk_ids_TK.shape == topk_weights_TK.shape
        y_TH = torch.empty_like(x_TH)
        step = self._layers[layer_id]
        try:
            misses = step.begin(x_TH, topk_ids_TK, topk_weights_TK, y_TH)
        except ReadFailed as error:
            self._abandon(step, layer_id, ())
            raise self._storage_error(error, layer_id) from error
        except BaseException:
            self._abandon(step, layer_id, ())
            raise
        if misses:
            self._serve(step, layer_id, misses)
        return y_TH

    def _serve(self, step: LayerStep, layer_id: int, misses: list[int]) -> None:
        """Read and compute what is missing, and end the step."""
        order = self._file_order[layer_id]
        waiting = deque(sorted(misses, key=order.__getitem__))
        # Reserved by this call and still its own: given back here when something fails.
        reading: deque[int] = deque()
        most = max(1, self._max_reads // self._num_parts[layer_id])
        num_stuck = 0
        before = self._reader.stats()
        evictions = self._cache.num_evictions
        try:
            while True:
                self._start_reads(layer_id, waiting, reading, most)
                if not waiting:
                    # From here on the step owns these leases.
                    rest = list(reading)
                    reading.clear()
                    self._stall(step.finish(rest, last=True))
                    break
                if reading:
                    num_stuck = 0
                    self._stall(step.finish((reading.popleft(),), last=False))
                    continue
                num_stuck += 1
                if num_stuck == 1:
                    # Hits hold what room there is: computing them frees it.
                    self._stall(step.finish((), last=False))
                else:
                    # Only loads that nobody waits for any more can be in the way.
                    assert num_stuck == 2, (
                        f"no room for expert {waiting[0]} of layer {layer_id}, and nothing to wait for"
                    )
                    self._residency.wait_idle()
                    self._cache.recover()
        except ReadFailed as error:
            self._abandon(step, layer_id, reading)
            raise self._storage_error(error, layer_id) from error
        except BaseException:
            self._abandon(step, layer_id, reading)
            raise
        finally:
            after = self._reader.stats()
            self._read_bytes[self._phase] += after.read_bytes - before.read_bytes
            self._busy_s[self._phase] += after.busy_s - before.busy_s
            self._evictions[self._phase] += self._cache.num_evictions - evictions

    def _start_reads(self, layer_id: int, waiting: deque[int], reading: deque[int], most: int) -> None:
        """Move experts from `waiting` to `reading` while there is room, and submit all of their reads in one call."""
        reads: list[WindowRead] = []
        num_submitted = self._reader.num_submitted
        try:
            while waiting and len(reading) < most:
                reservation = self._cache.reserve(layer_id, waiting[0], is_prefill=self._phase == "prefill")
                if reservation is None:
                    break
                reading.append(waiting.popleft())
                reads.extend(reservation.reads)
            if reads:
                self._reader.submit(self._residency, reads)
        except BaseException:
            # A slot whose reads nobody has begun would be loading for ever, and whoever waits for it too.
            if self._reader.num_submitted == num_submitted:
                for slot, file_id, offset, _, need_nbytes, _ in reads:
                    self._residency.fail(slot, errno.ECANCELED, file_id, offset, need_nbytes, 0)
            raise

    def _stall(self, waited_ns: int) -> None:
        self._stall_ns[self._phase] += waited_ns

    def _abandon(self, step: LayerStep, layer_id: int, experts: Iterable[int]) -> None:
        """Give back every lease of the step and wait until no read writes into a slot of it."""
        step.abort()
        for expert in experts:
            self._residency.release(layer_id, expert)
        self._residency.wait_idle()
        self._cache.recover()

    def _storage_error(self, error: ReadFailed, layer_id: int) -> StorageError:
        return self._reader.storage_error(error, f"an expert of layer {layer_id}")

    def stats(self) -> ExpertStats:
        """Sums since the executor was made."""
        return ExpertStats(*(self._phase_stats(phase) for phase in _PHASES))

    def _phase_stats(self, phase: Phase) -> PhaseStats:
        requests, hits, misses, needed_bytes = self._residency.counters(_PHASES.index(phase))
        return PhaseStats(
            requests=requests,
            hits_host=hits,
            misses=misses,
            needed_bytes=needed_bytes,
            read_bytes=self._read_bytes[phase],
            computed_on_cpu=requests,
            read_s=self._busy_s[phase],
            stall_s=self._stall_ns[phase] / 1e9,
            evictions=self._evictions[phase],
        )


def _ready(values: Tensor) -> Tensor:
    assert values.dtype == torch.float32
    return values.contiguous()
