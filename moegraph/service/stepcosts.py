"""What the steps of a sweep take, learned from rounds of several steps."""

from __future__ import annotations

from collections.abc import Sequence

from ..kinds import SweepStep

# How much a measurement counts beside those before it, if it is longer and if it is shorter: a
# step that takes too long is what must not happen again.
_LONGER, _SHORTER = 0.5, 0.4
# A round changes what is known of a step by this factor at most.
_FACTOR = 8.0
# What of a chunk's time does not depend on its rows, unless more is known.
_FIXED = 0.5
_CHUNKS = ("recurrent", "attention")

# A kind, and powers of two that rows and positions do not exceed.
Key = tuple[str, int, int]


def _key(step: SweepStep) -> Key:
    return step.kind, _octave(step.n_rows), _octave(step.n_kv)


def _octave(n: int) -> int:
    return max(n - 1, 0).bit_length()


class StepCosts:
    """Seconds of steps: by kind, rows and positions, of which similar numbers count as equal."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[float, int]] = {}  # seconds, and rows of the last step

    def seconds(self, step: SweepStep) -> float | None:
        """Return what a step takes; None if no step like it was measured.

        Half of what the most similar chunk takes is taken to be the same for any number of rows,
        and the other half to grow with them.
        """
        key = _key(step)
        near = key if key in self._known else self._most_similar(key)
        if near is None:
            return None
        seconds, n_rows = self._known[near]
        if step.kind in _CHUNKS:
            seconds *= _FIXED + (1.0 - _FIXED) * step.n_rows / n_rows
        return seconds

    def _most_similar(self, key: Key) -> Key | None:
        """Return a key that was measured, of the same kind or, for a chunk, of another layer."""
        kinds = _CHUNKS if key[0] in _CHUNKS else key[:1]
        found = (known for known in self._known if known[0] in kinds)

        def distance(known: Key) -> tuple[bool, int, int]:
            return known[0] != key[0], abs(known[1] - key[1]), abs(known[2] - key[2])

        return min(found, key=distance, default=None)

    def note(self, steps: Sequence[SweepStep], seconds: float, at_most: bool = False) -> None:
        """Learn from some steps that took so many seconds together.

        at_most: something else took part of the time, so what is known only can be too much.
        """
        expected = [self.seconds(step) for step in steps]
        known = [one for one in expected if one is not None]
        if not known:
            n_rows = sum(step.n_rows for step in steps)
            for step in steps:
                self._known[_key(step)] = seconds * step.n_rows / n_rows, step.n_rows
            return
        usual = sum(known) / len(known)
        total = sum(known) + usual * (len(expected) - len(known))
        factor = seconds / total if total else 1.0
        if at_most and factor >= 1.0:
            return
        factor = min(max(factor, 1 / _FACTOR), _FACTOR)
        weight = _LONGER if factor > 1.0 else _SHORTER
        for step, before in zip(steps, expected):
            key, now = _key(step), usual if before is None else before
            share = weight if key in self._known else 1.0
            self._known[key] = now * (1.0 + share * (factor - 1.0)), step.n_rows
