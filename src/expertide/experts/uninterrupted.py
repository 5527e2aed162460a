"""A stretch of code that a Ctrl-C does not tear apart, whoever handles it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Uninterrupted:
    """While entered, a SIGINT is only counted; on leaving, the handler that was there before gets it.

    Python runs signal handlers between any two instructions, so one that raises (as Python's own does, and the second
    Ctrl-C under `engine.interrupt`) can part a resource from the line that writes down who owns it. Only the main
    thread runs handlers: in others this does nothing. Nor does it where SIGINT is ignored or left to the system, which
    raise nothing. For short stretches: nothing else sees the Ctrl-C until the end.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._num_held = 0

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._hold)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is None:
            return
        signal.signal(signal.SIGINT, self._previous)
        # As often as it came: what a second one means is the handler's to say.
        for _ in range(self._num_held):
            signal.raise_signal(signal.SIGINT)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._num_held += 1
