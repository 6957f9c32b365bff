"""Drafts that no pass verifies: the text goes on one token at a time, and shows what was right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .drafter import Draft, confidence


@dataclass(frozen=True)
class Watched:
    """How right a draft was; ranks, log_p: as in `Step`."""

    source: str
    ranks: tuple[int, ...]
    log_p: tuple[float, ...]


class Watch:
    """The drafts of sequences whose texts have not come to their ends yet."""

    def __init__(self) -> None:
        self._open: dict[int, list[tuple[str, int, Draft]]] = {}

    def add(self, slot: int, source: str, first: int, draft: Draft) -> None:
        """Watch a draft. first: the position of its first token in the sequence."""
        self._open.setdefault(slot, []).append((source, first, draft))

    def seen(self, slot: int, held: Sequence[int]) -> Iterator[Watched]:
        """Yield the drafts of which a sequence, that holds these tokens, shows how right they were.

        They are not watched any more.
        """
        waiting = self._open.pop(slot, [])
        for source, first, draft in waiting:
            ranks = draft.ranks(held[first : first + draft.n_depth])
            if len(ranks) == draft.n_depth or (ranks and ranks[-1]):
                yield Watched(source, ranks, confidence(draft)[: len(ranks)])
            else:
                self.add(slot, source, first, draft)

    def forget(self, slot: int) -> None:
        """Watch nothing of a sequence any more."""
        self._open.pop(slot, None)
