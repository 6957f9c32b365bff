"""The requests that a loop is answering: their slots, their memory, their tokens and their ends.

Every method is called on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from ..draft.race import Odds
from ..errors import Cancelled, DeviceLost, InternalError, ModelFileError, MoegraphError, PoolFull
from ..ggml.device import Device
from ..passes.passes import Passes
from ..resident.layout import PAGE
from ..runner import Output
from .answer import Answer, Core
from .costs import Tally
from .requests import SlotStatus

# Failures of the device one after another, without any success between them, after which nothing
# more is tried.
_MOST_FAILURES = 3
# Seconds that a pass waits for a grammar; then the others go on without that request.
_LATE_S = 0.002


class Answers:
    """Requests by slot, and what is to be told of them.

    sweeping: the requests whose prompts a sweep reads. One that ends meanwhile keeps its slot until
    the sweep has ended, unless it is alone in it. read, left: requests whose prompts were read, and
    that need no more work, of which the scheduler was not told yet. full: requests whose context is
    to be shifted. worthless: idle slots that hold what nobody is to go on from. n_failures: how
    often the device failed since it last did some work.
    """

    def __init__(
        self, passes: Passes, devices: Sequence[Device], n_slots: int, tally: Tally
    ) -> None:
        self._passes, self._devices, self.tally = passes, devices, tally
        self.sweeping: list[Answer] = []
        self._slots: list[Answer | None] = [None] * n_slots
        self._given_back = [0] * n_slots  # when, as a running number
        self._clock = self._n_entered = 0
        self.worthless: set[int] = set()
        self._to_tell: list[Answer] = []
        self.read: list[Answer] = []
        self.left: list[Answer] = []
        self.full: list[Answer] = []
        self.n_failures = 0

    def idle_slots(self) -> list[int]:
        """Return the slots without a request, the one unused for longest first."""
        found = [slot for slot, answer in enumerate(self._slots) if answer is None]
        return sorted(found, key=lambda slot: self._given_back[slot])

    @property
    def n_busy(self) -> int:
        """Return how many slots have a request."""
        return sum(answer is not None for answer in self._slots)

    def enter_slot(self, answer: Answer, slot: int) -> None:
        """Give an idle slot to a request."""
        self._slots[slot], answer.slot = answer, slot
        if not answer.number:
            self._n_entered += 1
            answer.number = self._n_entered
        self.worthless.discard(slot)

    def leave_slot(self, answer: Answer) -> None:
        """Take the slot of a request back, if it has one; what the slot holds stays."""
        slot = answer.slot
        if slot >= 0 and self._slots[slot] is answer:
            self._clock += 1
            self._slots[slot], self._given_back[slot] = None, self._clock
            if not answer.request.reuse:
                self.worthless.add(slot)

    # tokens

    def draw(self, answer: Answer, output: Output, row: int) -> None:
        """Draw the next token of a request from a row of results; `tell` delivers it."""
        self.guard(answer, partial(self.pick, answer, output, row))
        self.note_drawn(answer)

    def is_late(self, answer: Answer, output: Output, row: int, node: int = 0) -> bool:
        """Return whether a grammar does not know yet what may follow a row; then keep the row.

        Arguments as in `pick`. `draw_late` draws from it.
        """
        if not answer.choice.constraint or answer.choice.is_ready(_LATE_S):
            return False
        logits = self._passes.runner.logits(row) if output.logits is None else output.logits[row]
        answer.late = logits.copy(), node
        return True

    def draw_late(self, answer: Answer) -> None:
        """Draw from a row that was kept, if the grammar is ready."""
        if answer.late and answer.choice.is_ready(0):
            (logits, node), answer.late = answer.late, None
            self.guard(answer, partial(self.pick, answer, Output(logits=logits[None]), 0, node))
            self.note_drawn(answer)

    def pick(
        self, answer: Answer, output: Output, row: int, node: int = 0,
        offered: Odds | None = None, forced: int | None = None,
    ) -> int:  # fmt: skip
        """Return the next token, which the text has taken.

        row: of the pass; -1 for that of a prompt. node, offered: as in `TokenChoice.pick`. forced:
        the token, whatever would be drawn.
        """
        if forced is not None:
            token = forced
        elif answer.choice.greedy and output.argmax is not None:
            token = int(output.argmax[row])
        else:
            token = answer.choice.pick(output, row, node, offered)
        answer.append(token, self._rows(answer, output, row) if answer.wants_logits else None)
        return token

    def _rows(self, answer: Answer, output: Output, row: int) -> npt.NDArray[np.float32]:
        """Return logits for the caller: of a row, or of all rows of a prompt."""
        if output.logits is None:
            return self._passes.runner.logits(max(row, 0)).copy()
        return output.logits if answer.choice.keep_logits and row < 0 else output.logits[row]

    def note_drawn(self, answer: Answer) -> None:
        """Have the next `tell` say what was drawn; a text that has ended gives its slot back."""
        if not answer.is_over:
            self._to_tell.append(answer)
            if answer.generated.finish_reason:
                self.leave(answer)
            elif answer.generated.is_full:
                self.full.append(answer)

    def guard(self, answer: Answer, work: Callable[[], object]) -> None:
        """Do something for one request; if it fails, only that request ends."""
        if answer.is_over:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a grammar's too
            if not isinstance(error, MoegraphError):  # of a grammar, which is not ours
                error = InternalError(f"{type(error).__name__}: {error}")
            self.end(answer, "error", error)

    def tell(self) -> None:
        """Deliver what was drawn."""
        waiting, self._to_tell = self._to_tell, []
        for answer in waiting:
            if answer.is_over:
                continue
            answer.tell()
            if answer.is_over:
                self.tally.ended(answer, answer.generated.finish_reason or "")
            elif answer.problem:
                self.end(answer, "cancelled")

    # ends

    def end(self, answer: Answer, reason: str, error: MoegraphError | None = None) -> None:
        """End a request, wherever it is; its sequence keeps what it holds."""
        if answer.is_over:
            return
        is_undone = answer not in self.sweeping or self._undo(answer)
        answer.end(reason, error)
        self.tally.ended(answer, answer.generated.finish_reason or reason)
        if is_undone:
            for one in [answer, *(one for one in self.sweeping if one.is_over)]:
                self.leave(one)

    def _undo(self, answer: Answer) -> bool:
        """Have a sequence be what it was before the prompt that is under way; False: not yet."""
        answer.cancel.set()
        sweep = answer.sweep
        try:
            if sweep and sweep.is_open and len(sweep.prompts) > 1:
                return self._passes.prompts.leave(sweep, answer.slot)
            if sweep and sweep.is_open:
                self._passes.step_prompt(sweep, answer.cancel)
        except MoegraphError:
            pass  # that was asked for; anything else comes up again with the next work
        return True

    def swept(self, answer: Answer) -> None:
        """Note that the sweep of a request's prompt is over."""
        if answer in self.sweeping:
            self.sweeping.remove(answer)
            answer.sweep = answer.swept = None
            if not self.sweeping:
                self.tally.costs.upcoming = None

    def leave(self, answer: Answer) -> None:
        """Note that a request needs no more work, and that nothing of it is under way."""
        self.swept(answer)
        if answer.swapped:
            answer.swapped.close()
            answer.swapped = None
        self.leave_slot(answer)
        self.left.append(answer)

    def failed(self, answers: Sequence[Answer], error: MoegraphError) -> None:
        """End the requests of some work that failed."""
        for answer in answers:
            if isinstance(error, Cancelled):
                self.end(answer, "deadline" if answer.is_late else "cancelled")
            else:
                self.end(answer, "error", error)
        self.tally.begin_round()
        if isinstance(error, Cancelled):
            return
        self.n_failures += 1
        is_lost = isinstance(error, ModelFileError | InternalError | DeviceLost)
        if is_lost or self.n_failures >= _MOST_FAILURES:
            raise error

    @contextmanager
    def cancelling(self, *answers: Answer) -> Iterator[None]:
        """Let the cancellation of a single request stop CPU threads in the middle of a graph."""
        if len(answers) != 1:
            yield
            return
        for device in self._devices:
            device.bind_cancel(answers[0].cancel.flag)
        try:
            yield
        finally:
            for device in self._devices:
                if not device.compute.is_closed:
                    device.bind_cancel(None)

    def slots(self) -> tuple[SlotStatus, ...]:
        """Return what each slot is doing."""
        found = list[SlotStatus]()
        for slot, answer in enumerate(self._slots):
            status = SlotStatus(slot, n_held=len(self._passes.held(slot)))
            if answer:
                status = SlotStatus(
                    slot, "reading" if answer in self.sweeping else "answering", status.n_held,
                    len(answer.ids), answer.n_read, answer.n_cached, answer.generated.n_generated,
                    answer.number, answer.request, "\n" in answer.generated.text,
                )  # fmt: skip
            found.append(status)
        return tuple(found)


class Swapping:
    """Memory for the KV rows of requests: who has it, and who must give it up.

    It empties idle slots and moves requests to host memory, so that others have pages.
    """

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
