"""Stop strings in a text that arrives in pieces.

A stop string may be spread over several pieces, so the tail that could still become one is held back; everything
before it leaves at once. The text is cut exactly before the stop string. Where several match, the one that is
complete first counts (of two complete at the same character, the longer): so the cut does not depend on how the text
was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from expertide.errors import RequestError


class StopMatcher:
    """Watches one text for stop strings. One per request; not for several threads at once.

    Raises:
        RequestError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise RequestError("stop: expected a list of strings, found one string")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop: {stop!r} is not a string of at least one character")
        self._stops = tuple(stops)
        self._held = ""
        self._is_stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take in more text.

        Returns:
            What can be shown now, and whether a stop string was found. After that nothing more comes out.
        """
        if self._is_stopped:
            return "", True
        text = self._held + text
        cut = self._first_match(text)
        if cut is not None:
            self._held, self._is_stopped = "", True
            return text[:cut], True
        num_held = self._num_possible(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """End of the text: the tail held back, which now can no longer become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Where the first completed stop string begins."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _num_possible(self, text: str) -> int:
        """Length of the longest tail that some stop string begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
