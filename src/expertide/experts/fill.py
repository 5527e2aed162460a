"""The start-up fill: free room of the expert cache is loaded at disk speed while nobody else needs the disk.

    start --> [reserve_free, submit in the background, give the lease back] ... --> done: all loaded, or no free room
                 paused while a prompt is computed; a trickle while tokens are decoded; full speed in between

Promises:
- The first token is never delayed by it: no read begins while a prompt is computed, and those under way give way to
  demand reads piece by piece (csrc/file_reader.h).
- It evicts nobody, and leaves the ring that prefill streams through.
- `close` ends it within one piece of a read per I/O thread; then nothing of it is under way.
- A read that fails is left to whoever asks for that expert: the fill goes on with the next one and counts it.

A thread of its own does the bookkeeping, some 50 µs per expert; the reads are the native reader's.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from expertide._native import Residency
from expertide.experts.cache import FILL, ExpertCache
from expertide.experts.submission import submit_in_background

if TYPE_CHECKING:
    from expertide.memory.reader import Reader

Activity = Literal["idle", "prefill", "decode"]

# Background reads running at once, and queued or running at most. Idle: what saturates a disk, and the next ones ready.
# Decode: two pieces of half a MiB are a millisecond of disk, the most that a miss then waits.
_DEPTH = {"idle": (8, 24), "decode": (2, 6)}
_POLL_MS = 100


@dataclass(frozen=True, slots=True)
class FillStats:
    """What the fill has done since the load; bytes and seconds.

    Attributes:
        num_experts: loads begun.
        useful, wasted: of these, asked for before they were evicted; evicted without having been asked for.
        read_s: time during which at least one background read was queued or running.
        is_done: everything is loaded, or there is no free room any more.
    """

    num_experts: int = 0
    useful: int = 0
    wasted: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    is_done: bool = True

    def to_json(self) -> dict[str, int | float | bool]:
        return {name: getattr(self, name) for name in self.__slots__}


# Fills that nobody has closed. A thread that the interpreter ends in the middle of a native call takes the process
# with it, so these are closed before that.
_open: weakref.WeakSet[StartupFill] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for fill in list(_open):
        fill.close()


class StartupFill:
    """One fill of one cache. `close` before the reader is closed."""

    def __init__(
        self, cache: ExpertCache, residency: Residency, reader: Reader, order: Iterable[tuple[int, int]]
    ) -> None:
        """Args:
        order: (layer_id, expert), first to be loaded first; those in memory by then are passed over.
        """
        self._cache = cache
        self._residency = residency
        self._reader = reader
        self._order = iter(order)
        self._changed = threading.Condition()
        self._activity: Activity = "idle"
        self._is_closed = False
        self._is_done = False
        self._thread = threading.Thread(target=self._run, name="expertide-fill", daemon=True)

    def start(self) -> None:
        self._set_limit()
        _open.add(self)
        self._thread.start()

    def set_activity(self, activity: Activity) -> None:
        """Tell what the engine does from now on; called by the thread that computes, per request and phase."""
        if activity == self._activity:
            return
        with self._changed:
            self._activity = activity
            self._set_limit()
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the fill is done and its reads have ended; False when the time is over first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            is_done = self._changed.wait_for(lambda: self._is_done or self._is_closed, timeout_s)
        while is_done and self._reader.wait_background(0, _POLL_MS) > 0:
            is_done = deadline is None or time.monotonic() < deadline
        return is_done

    def stats(self) -> FillStats:
        loads, useful, _, wasted = self._residency.origins(FILL)
        read = self._reader.stats(background=True)
        return FillStats(loads, useful, wasted, read.read_bytes, read.busy_s, self._is_done)

    def close(self) -> None:
        """Cancel what has not begun and wait for the rest. May be called twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        _open.discard(self)
        self._reader.cancel_background()
        if self._thread.ident is not None:
            self._thread.join()
        # What the thread has submitted between the two.
        self._reader.cancel_background()
        self._cache.settle()

    def _run(self) -> None:
        try:
            while self._wait_for_turn() and self._load_next():
                pass
        finally:
            with self._changed:
                self._is_done = True
                self._changed.notify_all()

    def _wait_for_turn(self) -> bool:
        """Block until another expert may be loaded; False once closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._activity != "prefill")
                if self._is_closed:
                    return False
                most = _DEPTH[self._activity][1]
            if self._reader.wait_background(most - 1, _POLL_MS) < most:
                with self._changed:
                    if not self._is_closed and self._activity != "prefill":
                        return True

    def _load_next(self) -> bool:
        """Begin to load one expert; False when none is left, or no room."""
        for layer_id, expert in self._order:
            # Held until the reads are issued: a slot that is loading without a read would be waited for in vain.
            with self._cache.lock:
                if not self._cache.is_absent(layer_id, expert):
                    continue
                self._cache.recover()
                reservation = self._cache.reserve_free(layer_id, expert)
                if reservation is None:
                    return False
                submit_in_background(self._reader, self._residency, reservation, layer_id, expert)
            return True
        return False

    def _set_limit(self) -> None:
        # While a prompt is computed nothing new begins; what is queued may trickle on when no demand read waits.
        running, _ = _DEPTH["idle" if self._activity == "idle" else "decode"]
        self._reader.set_background_limit(running)
