"""Text that arrives in pieces: the cut before a stop string."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from ..errors import RequestError

MAX_STOPS = 64
MAX_STOP_CHARS = 1024


class StopMatcher:
    """Cut a stream of text before the first stop string.

    The match that ends first wins; of those that end at the same place, the longest. So the result
    does not depend on how the text was split. Only text that may begin a stop string is held back.
    """

    def __init__(self, stops: SequenceOf[str] = ()) -> None:
        self.stops = _checked_stops((stops,) if isinstance(stops, str) else stops)
        self.matched: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that is certainly before any stop string."""
        if not self.stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = [(at + len(s), at, s) for s in self.stops if (at := text.find(s)) >= 0]
        if ends:
            _, start, self.matched = min(ends)
            self._held = ""
            return text[:start]
        n_held = max((_open_length(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """Return the held-back text; call it at the end of the stream."""
        held, self._held = self._held, ""
        return held


def _checked_stops(stops: SequenceOf[str]) -> tuple[str, ...]:
    if not isinstance(stops, SequenceOf) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError(f"stop is {stops!r:.80}; allowed: a string, or a list of strings")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{len(stops)} stop strings; at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not stop:
            raise RequestError("a stop string is empty; every text contains it")
        if len(stop) > MAX_STOP_CHARS:
            raise RequestError(
                f"a stop string has {len(stop)} characters; at most {MAX_STOP_CHARS} are allowed"
            )
    return tuple(stops)


def _open_length(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of stop that ends text."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
