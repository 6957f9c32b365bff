"""Memory for the KV rows of a service's requests: who has it, and who must give it up.

Every method is called on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import MoegraphError, PoolFull
from ..resident.layout import PAGE
from .answer import Answer
from .answers import Answers
from .core import Core


class Swapping:
    """Empties idle slots and moves requests to host memory, so that others have pages."""

    def __init__(self, core: Core, answers: Answers) -> None:
        self._passes, self._prefixes, self._copies = core.passes, core.prefixes, core.copies
        self._pool = core.runner.sequences.pool
        self._answers = answers

    def _pages(self, n_rows: int) -> int:
        return min(-(-n_rows // PAGE), self._pool.n_pages)

    def fits(self, answer: Answer) -> bool:
        """Return whether there are pages for a request without a slot, if idle slots give theirs.

        Requests that have a slot keep one page more each, for their next tokens. Without any, a
        request begins, or fails, whatever there is.
        """
        if not self._answers.n_busy:
            return True
        idle = self._answers.idle_slots()
        n_usable = self._passes.room.n_free_pages + sum(len(self._pool.pages(s)) for s in idle)
        n_needed = self._pages(self._n_rows(answer)) + self._answers.n_busy
        return n_usable >= min(n_needed, self._pool.n_pages)

    def _n_rows(self, answer: Answer) -> int:
        """Return the positions of a request without a slot, its next token's included."""
        return 1 + (len(answer.swapped.ids) if answer.swapped else len(answer.ids))

    def make_room(self, answer: Answer, slot: int) -> None:
        """Have an idle slot be able to take the positions of a request."""
        n_needed = self._pages(self._n_rows(answer) - 1) - len(self._pool.pages(slot))
        if not self._reclaim(n_needed, slot):
            raise PoolFull(n_needed, self._passes.room.n_free_pages)

    def reserve(self, answer: Answer) -> None:
        """Give a slot pages for the whole prompt, of which it may read one part after another."""
        self._pool.grow(answer.slot, len(answer.ids))

    def has_room(self, batch: Iterable[Answer]) -> bool:
        """Return whether some requests can take a row each; idle slots give up pages for that."""
        room = self._passes.room
        return self._reclaim(sum(room.pages_for(answer.slot, 1) for answer in batch))

    def _reclaim(self, n_pages: int, kept: int = -1) -> bool:
        """Empty idle slots, those unused for longest first, until so many pages are free."""
        idle = [slot for slot in self._answers.idle_slots() if slot != kept]
        for slot in idle:
            if slot in self._answers.worthless and self._passes.room.n_free_pages < n_pages:
                self.empty(slot)
        return self._prefixes.free(n_pages, idle)

    def empty(self, slot: int) -> None:
        """Empty an idle slot; nothing is enqueued if it is empty."""
        self._answers.worthless.discard(slot)
        if self._pool.pages(slot):
            self._passes.reset(slot)

    def swap_out(self, answer: Answer) -> bool:
        """Move a request to host memory; it ends with an error if that fails.

        Return whether it was moved.
        """
        try:
            answer.swapped = self._copies.swap_out(answer.slot)
        except MoegraphError as error:
            self._answers.end(answer, "error", error)
            return False
        self._answers.leave_slot(answer)
        self._answers.tally.preempted()
        return True

    def swap_in(self, answer: Answer) -> None:
        """Give a request that was moved to host memory a slot again."""
        slot, swapped = self._answers.idle_slots()[0], answer.swapped
        try:
            if swapped:
                self.make_room(answer, slot)
                self._copies.swap_in(slot, swapped)
                self._prefixes.own(slot, answer.request.owner)
        except PoolFull as error:
            if self._answers.n_busy:
                raise
            self._answers.end(answer, "error", error)
        except MoegraphError as error:
            self._answers.end(answer, "error", error)
        else:
            answer.swapped = None
            self._answers.enter_slot(answer, slot)
