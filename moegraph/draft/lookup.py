"""Prompt look-up: drafts what followed the last time that the text had the same tokens.

Two things tell how likely the text goes on as it did at an earlier place. How many tokens before it
are those at the end of the text: three are often chance, twenty are a copy under way. And what
followed the last three of them the time before: the same token, as in what all records of a list
have in common, or another one. So it is counted by both how often the next token was right, at each
token of the text, whether it was drafted or not. The probabilities of a draft follow, and nothing
else must be learned of look-up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .drafter import Draft, Drafter, Ids, Race, Taken
from .estimates import FEW, STEADY

if TYPE_CHECKING:
    from ..runner.sweep_batch import HiddenReader

# So many tokens before a place must be the last ones of the text.
_N_MIN = 3
_MASK = (1 << 32 * _N_MIN) - 1  # 32 bits of each token
# Classes of matches by their first length. Below _N_MIN tokens, the copy goes on after a token that
# was another one. How often the next token is right by belief: if there was no time before, if it
# was the same token then, and if it was another one.
_CLASSES = (0, 1, 2, 3, 4, 6, 9, 16, 32)
_BELIEVED = (
    (0.4, 0.6, 0.7, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97),
    (0.7, 0.8, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.98),
    (0.2, 0.2, 0.2, 0.2, 0.3, 0.4, 0.6, 0.6, 0.8),
)
_LONGEST = _CLASSES[-1]  # of a match that is compared
_CLASS = [bisect_right(_CLASSES, n) - 1 for n in range(_LONGEST + 1)]


class Matches:
    """How often the next token was right, by the number of tokens that matched before it.

    before: what followed the last of these the time before; 0: there was no such time, 1: the same
    token, 2: another one.
    """

    def __init__(self) -> None:
        self._rates = [[*rates] for rates in _BELIEVED]
        self._seen = [[FEW] * len(_CLASSES) for _ in _BELIEVED]

    def count(self, n_match: int, before: int, is_right: bool) -> None:
        """Count a token that was foretold."""
        rates, seen, at = self._rates[before], self._seen[before], _CLASS[min(n_match, _LONGEST)]
        seen[at] = STEADY * seen[at] + 1.0
        rates[at] += (is_right - rates[at]) / seen[at]

    def forget(self) -> None:
        """Have what was counted weigh less: another text begins."""
        self._seen = [[min(n, FEW) for n in seen] for seen in self._seen]

    def rate(self, n_match: int, before: int) -> float:
        """Return how likely a token is right if those before it are."""
        return self._rates[before][_CLASS[min(n_match, _LONGEST)]]


class LookUp(Drafter):
    """A drafter that needs no model; it works well where the answer repeats the prompt.

    The latest place counts that follows the same tokens. From then on the text is expected to go on
    as there, until a token is wrong; after a single wrong one it may still.
    """

    name = "lookup"
    max_draft = 16
    is_free = True

    def __init__(self, n_seq: int = 1) -> None:
        self._matches = Matches()
        self._texts = [_Text() for _ in range(n_seq)]

    def restart(self, slot: int, ids: Ids) -> None:
        """Have a sequence hold ids."""
        self._texts[slot] = _Text(ids.tolist())
        self._matches.forget()

    def prompt_readers(self, slot: int, ids: Ids, first: int) -> dict[int, HiddenReader]:
        """Add the tokens of a prompt; nothing of its rows is needed."""
        self.truncate(slot, first)
        self._texts[slot].extend(ids.tolist())
        return {}

    def committed(self, taken: Sequence[Taken]) -> None:
        """Add tokens to sequences."""
        for slot, _, tokens in taken:
            for token in tokens:
                self._texts[slot].follow(token, self._matches)

    def draft(self, slot: int, anchor: int, n: int, n_top: int, race: Race | None = None) -> Draft:
        """Return what followed the same tokens, one at each depth; nothing if there is none.

        Where that runs into the end of the text, it goes on with the draft: so a text that repeats
        a few tokens goes on repeating them.
        """
        text = self._texts[slot]
        ids, (at, n_match) = text.ids, text.after(anchor)
        if not at:
            return Draft.empty()
        back = len(ids) + 1 - at  # how far the draft looks back
        drafted = [*ids[at : at + n], anchor][:n]
        while len(drafted) < n:
            drafted.append(drafted[-back])
        rates = [self._matches.rate(n_match + i, text.agrees(at + i % back)) for i in range(n)]
        tokens, sure = np.array(drafted, dtype=np.int32), np.array(rates, dtype=np.float32)
        return Draft(tokens[:, None], confidence=sure)

    def pays(self, slot: int, anchor: int, least: Mapping[int, float]) -> bool:
        """Return whether `draft` may be worth a pass, in few microseconds.

        least: tokens that a pass must give for that, by its rows, in order.
        """
        text = self._texts[slot]
        at, n_match = text.after(anchor)
        if not at:
            return False
        n, reach, tokens, back = 0, 1.0, 1.0, len(text.ids) + 1 - at
        for n_rows, needed in least.items():
            # even if all that follows is right
            while n < n_rows - 1 and tokens + reach * (n_rows - 1 - n) > needed:
                reach *= self._matches.rate(n_match + n, text.agrees(at + n % back))
                tokens, n = tokens + reach, n + 1
            if n == n_rows - 1 and tokens > needed:
                return True
        return False

    def truncate(self, slot: int, n_past: int) -> None:
        """Forget the tokens of a sequence from position n_past on; others are added anew."""
        text = self._texts[slot]
        if n_past < len(text.ids):
            self._texts[slot] = _Text(text.ids[:n_past])


class _Text:
    """Tokens, where each run of _N_MIN of them occurred, and the copy under way.

    The copy: the position of the token that is expected next, 0 if there is none, and how many
    tokens before it are those at the end of the text.
    """

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids: list[int] = []
        self._key = 0  # of the last tokens
        self._last: dict[int, int] = {}  # key -> where the latest run ends
        self._before: list[int] = [0]  # where the run ends that occurred before the one ending at i
        self._copy = (0, 0)
        self._after: tuple[int, tuple[int, int]] | None = None  # a token, and the copy after it
        self.extend(ids)

    def follow(self, token: int, matches: Matches) -> None:
        """Add a token, and count whether it was the expected one."""
        at, n_match = self._copy
        if at:
            matches.count(n_match, self.agrees(at), self.ids[at] == token)
        copy = self.after(token)
        self.extend((token,))
        self._copy = copy

    def agrees(self, at: int) -> int:
        """Return what followed the tokens before a place the time before (`Matches`)."""
        ids, before = self.ids, self._before[at]
        if not before:
            return 0
        return 1 if at < len(ids) and ids[before] == ids[at] else 2

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens; no copy is under way."""
        ids, last, before, key = self.ids, self._last, self._before, self._key
        for token in tokens:
            ids.append(token)
            key = ((key << 32) | token) & _MASK
            end = len(ids)
            if end < _N_MIN:
                before.append(0)
                continue
            before.append(last.get(key, 0))
            last[key] = end
        self._key, self._copy, self._after = key, (0, 0), None

    def after(self, anchor: int) -> tuple[int, int]:
        """Return the copy under way once the anchor is added."""
        if self._after and self._after[0] == anchor:
            return self._after[1]
        at, n_match = self._copy
        is_right = at > 0 and self.ids[at] == anchor
        found = at + 1, n_match + 1
        if not is_right or n_match + 1 < _N_MIN:
            best = self.find(anchor)
            if best[0] or not (is_right or n_match >= _N_MIN):
                found = best
            elif not is_right:
                found = at + 1, 0
        self._after = anchor, found
        return found

    def find(self, anchor: int) -> tuple[int, int]:
        """Return the copy that begins after the last tokens and the anchor; (0, 0): none."""
        ids, n = self.ids, _N_MIN
        if len(ids) < n:
            return 0, 0
        end = self._last.get(((self._key << 32) | anchor) & _MASK, 0)
        if not end:
            return 0, 0
        at = end - 1 - n  # before the run there
        offset = len(ids) - n - at
        while n < _N_MIN + _LONGEST and at >= 0 and ids[at] == ids[at + offset]:
            n += 1
            at -= 1
        return end, n
