"""Steps whose graphs are new: a device builds and records them, and no later step pays for that.

A graph is built when it is first launched, and a CUDA device records it in one of the launches
after that. Such a step may take several times as long as later ones. So its time says nothing of
what they cost, and it is not held against drafting, as long as there are not too many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

# Launches of a graph that may take longer than later ones, where graphs are dear.
_N_NEW = 3
# A step of a new graph is excused if it takes so many times as long as was expected.
_DEAR = 1.3
# What may be excused, in plain steps: at first and at most; more with each step, and a share of
# what drafts gain.
_CREDIT, _MOST, _MORE, _SHARE = 30.0, 72.0, 0.03, 0.3
# What a new graph may cost that is used from now on.
_GRAPH = 26.0


@dataclass(frozen=True)
class Excused:
    """What of a step's time does not count, because graphs were new; seconds.

    draft, verify: of making the draft, and of all else.
    """

    draft: float = 0.0
    verify: float = 0.0


class FirstTimes:
    """Counts how often graphs were launched; tells what time is theirs alone."""

    def __init__(self, are_dear: bool = True) -> None:
        """are_dear: the device records graphs; otherwise only the first launch builds one."""
        self._n_new = _N_NEW if are_dear else 1
        self._seen = Counter[Hashable]()
        self._credit = _CREDIT

    def know(self, n_rows: int) -> None:
        """Note that the graphs of verify passes of this width, and of their commits, exist."""
        for key in [("verify", n_rows), *(("commit", n) for n in range(1, n_rows + 1))]:
            self._seen[key] = _N_NEW

    def observe(
        self, source: str, n_draft: int, n_rows: int, n_taken: int, spent: tuple[float, float],
        expected: tuple[float, float], plain_s: float,
    ) -> Excused:  # fmt: skip
        """Count a step with a draft, and return what of its time is excused.

        n_draft: tokens drafted. n_rows: of the verify pass, 1 without. n_taken: rows that were
        accepted. spent, expected: seconds of the draft, and of all else. plain_s: of a plain step.
        """
        drafts: list[Hashable] = [("draft", source, n_draft)]
        passes: list[Hashable] = [("verify", n_rows), ("commit", n_taken)] if n_rows > 1 else []
        found = []
        for keys, seconds, usual in zip((drafts, passes), spent, expected):
            may_be_new = any(self._seen[key] < self._n_new for key in keys)
            is_dear = seconds > _DEAR * usual and seconds - usual > 0.1 * plain_s
            found.append(seconds - usual if may_be_new and is_dear else 0.0)
            self._seen.update(keys)
        if sum(found) > self._credit * plain_s:
            return Excused()
        self._credit -= sum(found) / plain_s
        return Excused(*found)

    def earn(self, gained: float) -> None:
        """Note a step that gained so many plain steps."""
        self._credit = min(self._credit + _MORE + _SHARE * max(gained, 0.0), _MOST)

    @property
    def has_credit(self) -> bool:
        """Whether another graph may be built, and its first launches be excused."""
        return self._credit >= _GRAPH
