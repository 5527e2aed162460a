"""Ctrl-C as a flag that is looked at between steps, so that no half-done step is torn apart."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interrupt:
    """While entered, the first Ctrl-C sets a flag and the second one raises KeyboardInterrupt
    at once (while a layer's experts are under way: after them, `experts.uninterrupted`).

    Entering again (from a caller above) is allowed: the outermost one owns the signal. In a thread other than the main
    one, or where the program has its own handler for SIGINT, nothing is installed and the flag stays down.
    """

    def __init__(self) -> None:
        self._hit = False
        self._depth = 0
        self._installed = False

    @property
    def hit(self) -> bool:
        return self._hit

    def __call__(self) -> bool:
        return self._hit

    def clear(self) -> None:
        """Take the flag down, before a new answer begins; ignored inside a caller that has entered it before us."""
        if _is_main() and self._depth <= 1:
            self._hit = False

    def __enter__(self) -> Interrupt:
        # Only the main thread gets signals, so only it counts; other threads just look at the flag.
        if _is_main():
            self._depth += 1
            if self._depth == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._handle)
                self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not _is_main():
            return
        self._depth -= 1
        if self._depth == 0 and self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._hit:
            raise KeyboardInterrupt
        self._hit = True


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
