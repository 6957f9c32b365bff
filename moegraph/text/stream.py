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
        safe = before_open(text, self.stops)
        self._held = text[len(safe) :]
        return safe

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


def before_open(text: str, tags: SequenceOf[str]) -> str:
    """Return text without the longest end that may begin one of the tags, but is not all of it."""
    for n in range(min(max(map(len, tags), default=1) - 1, len(text)), 0, -1):
        end = text[-n:]
        if any(len(tag) > n and tag.startswith(end) for tag in tags):
            return text[:-n]
    return text
