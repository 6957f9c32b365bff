"""Which resident expert of a layer is the next victim: the one of lowest score that may leave."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from .policy import LayerPolicy

# `_find` sorts all slots of a layer, so it lists enough residents for several misses.
_N_LISTED = 16


class Ranking:
    """The evictable residents of lowest score in a layer.

    owner, resident: those of the layer, which changes them in place.
    """

    def __init__(self, policy: LayerPolicy, owner: list[int], resident: set[int]) -> None:
        self._policy, self._owner, self._resident = policy, owner, resident
        # (score, expert) of the residents of lowest score, the lowest last. Scores only rise, so an
        # entry whose score has not changed is still below all residents that are not listed.
        self._worst: list[tuple[float, int]] = []
        self._scores_of_worst = policy.score

    def clear(self) -> None:
        """Forget the ranking: residents or scores have changed in other ways than `add` says."""
        self._worst.clear()

    def add(self, expert: int) -> None:
        """Note that an expert has become resident."""
        score = self._score()[expert]
        worst = self._worst
        if worst and score <= worst[0][0] and expert in self._resident:
            worst.append((score, expert))
            worst.sort(reverse=True)

    def lowest(self, n: int) -> list[int]:
        """Return up to n evictable residents of lowest score, the lowest first."""
        score, worst = self._score(), self._worst
        if n <= 0:
            return []
        if n > _N_LISTED:  # most of so many would have been chosen since, or have left
            resident = self._resident
            ranked = sorted(self._owner[self._policy.n_static :], key=score.__getitem__)
            return [expert for expert in ranked if expert in resident][:n]
        if worst:
            # an expert whose score rose above the list may be above residents that are not listed
            bound = worst[0][0]
            known = {e for _, e in worst if e in self._resident and score[e] <= bound}
            worst[:] = sorted(((score[e], e) for e in known), reverse=True)
        if len(worst) < n:
            self._find(_N_LISTED)
        return [expert for _, expert in reversed(worst[max(0, len(worst) - n) :])]

    def victim(
        self, expert: int, working_set: Collection[int], fresh: Collection[int]
    ) -> int | None:
        """Return the resident that should give its slot to expert, or None.

        It is in neither working_set nor fresh. None: the policy declines, or nothing may leave.
        """
        score, worst = self._score(), self._worst
        while worst:
            value, lowest = worst[-1]
            if lowest in self._resident and score[lowest] == value:
                break
            self.add(worst.pop()[1])
        if not worst:
            self._find(_N_LISTED)
        if not worst:
            return None
        lowest = worst[-1][1]
        if lowest in working_set or lowest in fresh:
            candidates = [
                e
                for e in self._owner[self._policy.n_static :]
                if e in self._resident and e not in working_set and e not in fresh
            ]
            if not candidates:
                return None
            lowest = min(candidates, key=score.__getitem__)
        return lowest if self._policy.accepts(expert, lowest) else None

    def _score(self) -> list[float]:
        """Return the policy's scores; forget the ranking if the policy has scaled them back."""
        score = self._policy.score
        if score is not self._scores_of_worst:
            self._scores_of_worst = score
            self._worst.clear()
        return score

    def _find(self, n: int) -> None:
        """Rank the n evictable residents of lowest score."""
        score = self._score()
        ranked = sorted(self._owner[self._policy.n_static :], key=score.__getitem__)
        # -1, the owner of an empty slot, is never resident
        lowest = list(islice((expert for expert in ranked if expert in self._resident), n))
        self._worst[:] = [(score[expert], expert) for expert in reversed(lowest)]
