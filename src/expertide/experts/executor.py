"""One layer's experts for one step, in three stages: issue reads for the misses, compute the hits, then wait for the
misses and compute them as they arrive.

    run ---- all hits: one native call ----------------------------------------------------> y
     |
     +- misses -> [reserve, submit] -> compute hits -> wait, compute, release -+-----------> y
                        ^                                                      |
                        +----- more misses than room or than reads in flight --+

At most `MAX_READS_IN_FLIGHT` reads of a layer are under way. In prefill the window slides over misses in file order,
so each needed expert is read once per layer and chunk; and on into the next layer, where that will need (nearly) every
expert as well: its reads begin while this one computes, and go on during the attention between them.

When nothing more fits, what is leased is computed and released first:
the smallest cache (`sizes.smallest_cache_bytes`) still goes on, one expert at a time.

A failed read ends the step with StorageError, naming file and offset. By then no lease of the step is held, no read of
it is under way, and the next step works.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from expertide._native import ReadFailed, Residency, ThreadPool, quant_types
from expertide.errors import StorageError
from expertide.experts.cache import AHEAD, PREDICTED, ExpertCache
from expertide.experts.layer_step import ExpertShape, LayerStep, NativeLayer, ReferenceLayer
from expertide.experts.stats import EarlyStats, ExpertStats, Phase, PhaseStats
from expertide.experts.submission import fail_reads, submit_in_background
from expertide.experts.uninterrupted import Uninterrupted
from expertide.formats.tensors import ExpertCatalog

if TYPE_CHECKING:
    from expertide.experts.fill import StartupFill
    from expertide.experts.prediction import Predictor
    from expertide.kernels.ops import Kernels
    from expertide.memory.reader import Reader, WindowRead

RouterObserver = Callable[[int, Tensor], None]

# Ten experts of three parts: more hides nothing (8 threads saturate the disk) and takes slots from residents.
MAX_READS_IN_FLIGHT = 32
# A portion is computed between two looks at the reads: some milliseconds, and never so few rows that kernels starve.
_PORTION_ASSIGNMENTS = 64
_MAX_PORTION = 8
# Where a layer needed so large a part of its experts, the next one will: at most an eighth of the reads is in vain.
_CERTAIN_SHARE = 7 / 8
# Predicted reads queued or running at most: what the disk delivers during one layer's attention.
MAX_PREDICTED_READS = 12
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
        *,
        reads_ahead: bool = True,
        predictor: Predictor | None = None,
    ) -> None:
        """
        Args:
            reads_ahead: in prefill, begin the next layer's reads while this one computes.
            predictor: in decode, says what the next layer may ask for; that is then read in the background.
            kernels: with the name "native" the layers run in C++ on its `pool`, except those whose experts are of a
                quant type that has no native kernel; else in torch, through its ops.

        Raises:
            UnsupportedError: experts of a kind that nobody here can compute.
        """
        self._cache = cache
        self._residency = residency
        self._reader = reader
        self._observer: RouterObserver | None = None
        self._fill: StartupFill | None = None
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
        self._num_experts = catalog.num_experts
        layer_ids = list(catalog.layers)
        self._next_layer = dict(itertools.pairwise(layer_ids))
        self._predictor = predictor
        self._reads_ahead = reads_ahead and not reader.is_serial
        self._phase: Phase = "prefill"
        self._residency.set_phase(0)
        self._stall_ns = dict.fromkeys(_PHASES, 0)
        self._read_bytes = dict.fromkeys(_PHASES, 0)
        self._busy_s = dict.fromkeys(_PHASES, 0.0)
        self._evictions = dict.fromkeys(_PHASES, 0)
        self._seen, self._seen_evictions = reader.stats(), cache.num_evictions

    def set_fill(self, fill: StartupFill | None) -> None:
        """Have `fill` told which phase is computed."""
        self._fill = fill

    def set_predictor(self, predictor: Predictor | None) -> None:
        """From the next layer on, have `predictor` say what to read early in decode; None ends that."""
        self._predictor = predictor

    def set_router_observer(self, observer: RouterObserver | None) -> None:
        """Have every (layer_id, topk_ids_TK) shown to `observer` before it is served; None ends that."""
        self._observer = observer

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
        """The weighted sum of each token's experts.

        Args:
            x_TH: float32 [T, H].
            topk_ids_TK: int32 [T, K], below the number of experts.
            topk_weights_TK: float32 [T, K].
            phase: which statistics and which eviction rules apply.
            meanwhile: called once reads are under way and what was in memory has been computed; not when nothing is
                missing.

        Returns:
            y_TH: float32 [T, H], a new tensor.

        Raises:
            StorageError: an expert could not be read. Nothing stays leased; the next call works.
            KeyboardInterrupt: a Ctrl-C came meanwhile. Where leases and slots pass through Python it is held back until
                the layer is done: what nobody has written down yet would be lost for ever.
        """
        step = self._layers[layer_id]
        is_plain = phase == self._phase == "decode" and self._observer is None and self._predictor is None
        if not (is_plain and step.owns_its_leases):
            with Uninterrupted():
                return self._run(layer_id, x_TH, topk_ids_TK, topk_weights_TK, phase, meanwhile)
        # The way of most decode steps: what a Ctrl-C interrupts here, `abort` undoes.
        if self._fill is not None:
            self._fill.set_activity(phase)
        x_TH, topk_ids_TK, topk_weights_TK = _ready(x_TH), topk_ids_TK.contiguous(), _ready(topk_weights_TK)
        y_TH = torch.empty_like(x_TH)
        try:
            misses = step.begin(x_TH, topk_ids_TK, topk_weights_TK, y_TH)
            if misses:
                with Uninterrupted():
                    self._serve(step, layer_id, misses, meanwhile)
        except ReadFailed as error:
            self._abandon(step, layer_id, ())
            raise self._storage_error(error, layer_id) from error
        except BaseException:
            self._abandon(step, layer_id, ())
            raise
        return y_TH

    def _run(
        self,
        layer_id: int,
        x_TH: Tensor,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        phase: Phase,
        meanwhile: Callable[[], None] | None,
    ) -> Tensor:
        if self._observer is not None:
            self._observer(layer_id, topk_ids_TK)
        if phase != self._phase:
            self._account()
            self._residency.set_phase(_PHASES.index(phase))
            self._phase = phase
        if self._fill is not None:
            self._fill.set_activity(phase)
        x_TH, topk_ids_TK, topk_weights_TK = _ready(x_TH), topk_ids_TK.contiguous(), _ready(topk_weights_TK)
        assert topk_ids_TK.dtype == torch.int32 and topk_ids_TK.shape == topk_weights_TK.shape
        y_TH = torch.empty_like(x_TH)
        if self._predictor is not None and phase == "decode":
            self._read_predicted(self._predictor, layer_id, x_TH)
        step = self._layers[layer_id]
        streams = phase == "prefill" and self._reads_ahead and len(x_TH) > 0 and not self._cache.holds_everything
        try:
            misses = step.begin(x_TH, topk_ids_TK, topk_weights_TK, y_TH, defer=streams)
        except ReadFailed as error:
            self._abandon(step, layer_id, ())
            raise self._storage_error(error, layer_id) from error
        except BaseException:
            self._abandon(step, layer_id, ())
            raise
        if streams:
            self._stream(step, layer_id, misses, topk_ids_TK.numel())
        elif misses:
            self._serve(step, layer_id, misses, meanwhile)
        return y_TH

    def _serve(self, step: LayerStep, layer_id: int, misses: list[int], meanwhile: Callable[[], None] | None) -> None:
        """Read and compute what is missing, and end the step."""
        order = self._file_order[layer_id]
        waiting = deque(sorted(misses, key=order.__getitem__))
        # Reserved by this call and still its own: given back here when something fails.
        reading: deque[int] = deque()
        most = max(1, self._max_reads // self._num_parts[layer_id])
        num_stuck = 0
        try:
            while True:
                self._start_reads(layer_id, waiting, reading, most)
                if meanwhile is not None and reading:
                    self._stall(step.finish((), last=False))
                    meanwhile()
                    meanwhile = None
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
                    # Only loads that nobody waits for can be in the way.
                    self._settle_and_start(layer_id, waiting, reading, most)
        except ReadFailed as error:
            self._abandon(step, layer_id, reading)
            raise self._storage_error(error, layer_id) from error
        except BaseException:
            self._abandon(step, layer_id, reading)
            raise

    def _account(self) -> None:
        """Book what was read and evicted since the last time under the phase that goes on."""
        read, evictions = self._reader.stats(), self._cache.num_evictions
        self._read_bytes[self._phase] += read.read_bytes - self._seen.read_bytes
        self._busy_s[self._phase] += read.busy_s - self._seen.busy_s
        self._evictions[self._phase] += evictions - self._seen_evictions
        self._seen, self._seen_evictions = read, evictions

    def _stream(self, step: LayerStep, layer_id: int, misses: Sequence[int], num_assignments: int) -> None:
        """`_serve` for a prompt: computes in portions, so that reads go on, into the next layer too."""
        order = self._file_order[layer_id]
        waiting = deque(sorted(misses, key=order.__getitem__))
        reading: deque[int] = deque()
        most = max(1, self._max_reads // self._num_parts[layer_id])
        portion = max(1, min(_MAX_PORTION, _PORTION_ASSIGNMENTS * self._num_experts // max(num_assignments, 1)))
        ahead = self._certain_reads(layer_id, step.num_waiting + len(misses))
        try:
            self._cache.recover()
            while True:
                self._start_reads(layer_id, waiting, reading, most)
                if not waiting:
                    self._read_ahead(layer_id, ahead)
                if step.num_waiting:
                    self._stall(step.finish((), last=False, max_experts=portion))
                elif reading:
                    some = [reading.popleft() for _ in range(min(portion, len(reading)))]
                    self._stall(step.finish(some, last=False))
                elif waiting:
                    # Only loads that nobody waits for can be in the way: of the fill, of reading ahead.
                    self._settle_and_start(layer_id, waiting, reading, most)
                else:
                    break
            self._stall(step.finish((), last=True))
            # The last portion has left room.
            self._read_ahead(layer_id, ahead)
        except ReadFailed as error:
            self._abandon(step, layer_id, reading)
            raise self._storage_error(error, layer_id) from error
        except BaseException:
            self._abandon(step, layer_id, reading)
            raise

    def _certain_reads(self, layer_id: int, num_needed: int) -> deque[int]:
        """Absent experts of the next layer, in file order; none unless (nearly) all of them will be needed."""
        next_layer = self._next_layer.get(layer_id)
        if next_layer is None or num_needed < _CERTAIN_SHARE * self._num_experts:
            return deque()
        absent = (e for e in range(self._num_experts) if self._cache.is_absent(next_layer, e))
        return deque(sorted(absent, key=self._file_order[next_layer].__getitem__))

    def _read_ahead(self, layer_id: int, ahead: deque[int]) -> None:
        """Begin reads of the next layer while there is room."""
        if not ahead:
            return
        next_layer = self._next_layer[layer_id]
        reads: list[WindowRead] = []
        leased: list[int] = []
        num_submitted = self._reader.num_submitted
        try:
            while ahead:
                with self._cache.lock:
                    if not self._cache.is_absent(next_layer, ahead[0]):  # the fill has taken it since
                        ahead.popleft()
                        continue
                    reservation = self._cache.reserve_ahead(next_layer, ahead[0], is_prefill=True)
                if reservation is None:
                    break
                leased.append(ahead.popleft())
                reads.extend(reservation.reads)
            if reads:
                self._reader.submit(self._residency, reads)
        except BaseException:
            self._fail_unsubmitted(reads, num_submitted)
            raise
        finally:
            # Loading slots are nobody's victims, and nothing is reserved before the next layer leases its own.
            for expert in leased:
                self._residency.release(next_layer, expert)

    def _read_predicted(self, predictor: Predictor, layer_id: int, x_TH: Tensor) -> None:
        """Begin background reads of what the next layer may ask for, a few at a time."""
        next_layer = self._next_layer.get(layer_id)
        if next_layer is None:
            return
        room = MAX_PREDICTED_READS - self._reader.wait_background(0, 0)
        if room <= 0:  # the disk has enough to do: what comes too late is of no use
            return
        self._cache.recover()
        for expert in predictor.predict(next_layer, x_TH):
            if room <= 0:
                break
            with self._cache.lock:
                if not self._cache.is_absent(next_layer, expert):
                    continue
                reservation = self._cache.reserve_ahead(
                    next_layer, expert, is_prefill=False, origin=PREDICTED, spared_layer=layer_id
                )
                if reservation is None:
                    break
                submit_in_background(self._reader, self._residency, reservation, next_layer, expert)
            room -= len(reservation.reads)

    def _fail_unsubmitted(self, reads: Iterable[WindowRead], num_submitted: int) -> None:
        if self._reader.num_submitted == num_submitted:
            fail_reads(self._residency, reads)

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
            self._fail_unsubmitted(reads, num_submitted)
            raise

    def _settle_and_start(self, layer_id: int, waiting: deque[int], reading: deque[int], most: int) -> None:
        # Under one lock: the fill could otherwise take the room that has just become free.
        with self._cache.lock:
            self._cache.settle()
            self._start_reads(layer_id, waiting, reading, most)
        assert reading, f"no room for expert {waiting[0]} of layer {layer_id}, and nothing to wait for"

    def _stall(self, waited_ns: int) -> None:
        self._stall_ns[self._phase] += waited_ns

    def _abandon(self, step: LayerStep, layer_id: int, experts: Iterable[int]) -> None:
        """Give back every lease of the step and wait until no read writes into a slot of it."""
        step.abort()
        for expert in experts:
            self._residency.release(layer_id, expert)
        self._cache.settle()

    def _storage_error(self, error: ReadFailed, layer_id: int) -> StorageError:
        return self._reader.storage_error(error, f"an expert of layer {layer_id}")

    def stats(self) -> ExpertStats:
        """Sums since the executor was made."""
        self._account()
        prefill, decode = (self._phase_stats(phase) for phase in _PHASES)
        ahead, predicted = (EarlyStats(*self._residency.origins(origin)) for origin in (AHEAD, PREDICTED))
        return ExpertStats(prefill, decode, ahead, predicted)

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
