"""What the steps of a sweep take, learned from rounds of several steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..kinds import SweepStep
from ..units import octave

# How much a measurement counts beside those before it, if it is longer and if it is shorter: a
# step that takes too long is what must not happen again.
_LONGER, _SHORTER = 0.5, 0.4
# A round changes what was measured of a step by this factor at most.
_FACTOR = 8.0
# What of a chunk's time does not depend on its rows, unless more is known.
_FIXED = 0.5
_CHUNKS = ("recurrent", "attention")

# A kind, and powers of two that rows and positions do not exceed.
Key = tuple[str, int, int]


class _Known(NamedTuple):
    """What steps like one another take; n_rows: of the last one; at: its round, as a number."""

    seconds: float
    n_rows: int
    at: int


def _key(step: SweepStep) -> Key:
    return step.kind, octave(step.n_rows), octave(step.n_kv)


class StepCosts:
    """Seconds of steps: by kind, rows and positions, of which similar numbers count as equal."""

    def __init__(self) -> None:
        self._known: dict[Key, _Known] = {}
        self._n_rounds = 0

    def seconds(self, step: SweepStep) -> float | None:
        """Return what a step takes; None if no step like it was measured.

        A chunk takes what lies between similar chunks of fewer and of more rows. Without these,
        half of what the most similar chunk takes is taken to be the same for any number of rows,
        and the other half to grow with them. But it takes no longer than a later one of more rows
        did, nor, a row, than a later one of fewer: what took too long by chance is tried again.
        """
        key = _key(step)
        near = key if key in self._known else self._most_similar(key)
        if near is None:
            return None
        if step.kind not in _CHUNKS:
            return self._known[near].seconds
        limits = (
            one.seconds * max(1.0, step.n_rows / one.n_rows)
            for known, one in self._known.items()
            if known[::2] == key[::2] and one.at > self._known[near].at
        )
        return min((self._between(near, step.n_rows), *limits))

    def _between(self, near: Key, n_rows: int) -> float:
        """Return what a chunk of n_rows rows takes that is like the chunk `near`."""
        seconds, n, _ = self._known[near]
        others = [
            (abs(key[1] - near[1]), one)
            for key, one in self._known.items()
            if key[::2] == near[::2] and (n_rows - n) * (one.n_rows - n_rows) >= 0 != n - one.n_rows
        ]
        if n_rows == n or not others:
            return seconds * (_FIXED + (1.0 - _FIXED) * n_rows / n)
        other = min(others)[1]
        return seconds + (n_rows - n) / (other.n_rows - n) * (other.seconds - seconds)

    def _most_similar(self, key: Key) -> Key | None:
        """Return a key that was measured, of the same kind or, for a chunk, of another layer."""
        kinds = _CHUNKS if key[0] in _CHUNKS else key[:1]
        found = (known for known in self._known if known[0] in kinds)

        def distance(known: Key) -> tuple[bool, int, int]:
            return known[0] != key[0], abs(known[1] - key[1]), abs(known[2] - key[2])

        return min(found, key=distance, default=None)

    def note(self, steps: Sequence[SweepStep], seconds: float, at_most: bool = False) -> None:
        """Learn from some steps that took so many seconds together.

        seconds: nothing is learned if there are none. at_most: something else took part of the
        time, so what is known only can be too much.
        """
        if seconds <= 0.0:
            return
        self._n_rounds += 1
        expected = [self.seconds(step) for step in steps]
        known = [one for one in expected if one is not None]
        if not known:
            n_rows = sum(step.n_rows for step in steps)
            for step in steps:
                self._note(step, seconds * step.n_rows / n_rows)
            return
        usual = sum(known) / len(known)
        total = sum(known) + usual * (len(expected) - len(known))
        if at_most and seconds >= total:
            return
        # never zero: nothing would bring it back, and similar steps would seem to cost nothing too
        factor = max(1 / _FACTOR**2, min(seconds / total, _FACTOR))
        change = max(factor, 1 / _FACTOR) - 1.0
        change *= _LONGER if change > 0.0 else _SHORTER
        for step, before in zip(steps, expected):
            now = usual if before is None else before
            self._note(step, now * (1.0 + change if _key(step) in self._known else factor))

    def _note(self, step: SweepStep, seconds: float) -> None:
        self._known[_key(step)] = _Known(seconds, step.n_rows, self._n_rounds)
