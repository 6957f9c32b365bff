"""Prompt look-up: drafts what followed the last time that the text had the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .drafter import Draft, Ids, KeepsNoRows, Race, empty_draft

if TYPE_CHECKING:
    from ..runner.sweep_batch import Tap

_BITS = 32  # of a token in a key
# Earlier places that a draft compares, and how many tokens of each.
_MOST_PLACES, _MOST_TOKENS = 16, 32


class LookUp(KeepsNoRows):
    """A drafter that needs no model; it works well where the answer repeats the prompt.

    n_min: so many tokens before a place must be the last ones of the text. Of the latest such
    places, the one with the longest match counts, the latest of equal ones.
    """

    name = "lookup"
    n_bytes = 0
    taps: tuple[int, ...] = ()

    def __init__(self, n_seq: int = 1, max_draft: int = 16, n_min: int = 3) -> None:
        self.max_draft = max_draft
        self._n_min = n_min
        self._texts = [_Text(n_min) for _ in range(n_seq)]

    def restart(self, slot: int, ids: Ids) -> None:
        """Have a sequence hold ids."""
        self._texts[slot] = _Text(self._n_min, ids.tolist())

    def prompt_taps(self, slot: int, ids: Ids, first: int) -> dict[int, Tap]:
        """Add the tokens of a prompt; nothing of its rows is needed."""
        self.truncate(slot, first)
        self._texts[slot].extend(ids.tolist())
        return {}

    def committed(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Add tokens to a sequence."""
        self._texts[slot].extend(tokens)

    def draft(self, slot: int, anchor: int, n: int, n_top: int, race: Race | None = None) -> Draft:
        """Return what followed the same tokens, one at each depth; nothing if there were none.

        Where that runs into the end of the text, it goes on with the draft: so a text that repeats
        a few tokens goes on repeating them.
        """
        text = self._texts[slot]
        at = text.find(anchor)
        if at is None:
            return empty_draft()
        ids = text.ids
        back = len(ids) + 1 - at  # how far the draft looks back
        drafted = [*ids[at : at + n], anchor][:n]
        while len(drafted) < n:
            drafted.append(drafted[-back])
        return Draft(np.array(drafted, dtype=np.int32)[:, None])

    def has(self, slot: int, anchor: int) -> bool:
        """Return whether `draft` would return a draft; it takes a microsecond."""
        return self._texts[slot].latest(anchor) > 0

    def truncate(self, slot: int, n_past: int) -> None:
        """Forget the tokens of a sequence from position n_past on; others are added anew."""
        text = self._texts[slot]
        if n_past < len(text.ids):
            self._texts[slot] = _Text(self._n_min, text.ids[:n_past])

    def close(self) -> None:
        """Forget everything."""
        self._texts = []


class _Text:
    """Tokens, and where each run of n of them occurred."""

    def __init__(self, n: int, ids: Sequence[int] = ()) -> None:
        self.ids: list[int] = []
        self._n = n
        self._mask = (1 << _BITS * n) - 1
        self._key = 0  # of the last n tokens
        self._last: dict[int, int] = {}  # key -> where the latest run ends
        self._before: list[int] = [0]  # where the run ends that occurred before the one ending at i
        self.extend(ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens."""
        ids, last, before, key, mask, n = (
            self.ids, self._last, self._before, self._key, self._mask, self._n,
        )  # fmt: skip
        for token in tokens:
            ids.append(token)
            key = ((key << _BITS) | token) & mask
            end = len(ids)
            if end < n:
                before.append(0)
                continue
            before.append(last.get(key, 0))
            last[key] = end
        self._key = key

    def latest(self, anchor: int) -> int:
        """Return where the run of the last tokens and the anchor ended before; 0 if nowhere."""
        if len(self.ids) < self._n:
            return 0
        return self._last.get(((self._key << _BITS) | anchor) & self._mask, 0)

    def find(self, anchor: int) -> int | None:
        """Return the position after the best match of the last tokens and the anchor, or None."""
        n, end = self._n, self.latest(anchor)
        best, longest = None, 0
        for _ in range(_MOST_PLACES):
            if not end:
                break
            length = self._match(end - 1 - n)
            if length > longest or best is None:
                best, longest = end, length
            if longest == _MOST_TOKENS:
                break
            end = self._before[end]
        return best

    def _match(self, at: int) -> int:
        """Return how many tokens up to position `at` are those before the last n - 1 tokens."""
        ids = self.ids
        offset = len(ids) - self._n - at
        length = 0
        while length < _MOST_TOKENS and at >= 0 and ids[at] == ids[at + offset]:
            length += 1
            at -= 1
        return length
