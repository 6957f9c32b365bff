"""The requests that a loop is answering: their slots, their tokens and their ends.

Every method is called on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from ..draft.race import Odds
from ..errors import (
    Cancelled,
    DeviceLost,
    InternalError,
    ModelFileError,
    MoegraphError,
)
from ..ggml.device import Device
from ..passes.passes import Passes
from ..runner import Output
from .answer import Answer
from .status import SlotStatus
from .tally import Tally

# Failures of the device one after another, without any success between them, after which nothing
# more is tried.
_MOST_FAILURES = 3
# Seconds that a pass waits for a grammar; then the others go on without that request.
_LATE_S = 0.002


class Answers:
    """Requests by slot, and what is to be told of them.

    sweeping: the requests whose prompts a sweep reads. One that ends meanwhile keeps its slot until
    the sweep has ended, unless it is alone in it. worthless: idle slots that hold what nobody is to
    go on from. n_failures: how often the device failed since it last did some work.
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
        self.left: list[Answer] = []  # since the last `take_left`
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

    def take_left(self) -> list[Answer]:
        """Return the requests that need no more work since the last call."""
        found, self.left = self.left, []
        return found

    # tokens

    def draw(self, answer: Answer, output: Output, row: int) -> None:
        """Draw the next token of a request from a row of results; `tell` delivers it."""
        try:
            self.pick(answer, output, row)
        except Exception as error:  # noqa: BLE001 - a grammar's too
            self._spoiled(answer, error)
        self.keep(answer)

    def is_late(self, answer: Answer, output: Output, row: int, node: int = 0) -> bool:
        """Return whether a grammar does not know yet what may follow a row; then keep the row.

        Arguments as in `pick`. `draw_late` draws from it.
        """
        if not answer.drawing.constraint or answer.drawing.is_ready(_LATE_S):
            return False
        logits = self._passes.runner.logits(row) if output.logits is None else output.logits[row]
        answer.late = logits.copy(), node
        return True

    def draw_late(self, answer: Answer) -> None:
        """Draw from a row that was kept, if the grammar is ready."""
        if answer.late and answer.drawing.is_ready(0):
            (logits, node), answer.late = answer.late, None
            self.guard(answer, lambda: self.pick(answer, Output(logits=logits[None]), 0, node))
            self.keep(answer)

    def pick(
        self,
        answer: Answer,
        output: Output,
        row: int,
        node: int = 0,
        offered: Odds | None = None,
    ) -> int:
        """Return the next token, which the text has taken.

        row: of the pass; -1 for that of a prompt. node, offered: as in `Drawing.pick`.
        """
        if answer.drawing.greedy and output.argmax is not None:
            token = int(output.argmax[row])
        else:
            token = answer.drawing.pick(output, row, node, offered)
        answer.take(token, self._rows(answer, output, row) if answer.wants_logits else None)
        return token

    def put(self, answer: Answer, output: Output, row: int, token: int) -> None:
        """Have the text of a request go on with a token."""
        answer.take(token, self._rows(answer, output, row) if answer.wants_logits else None)

    def _rows(self, answer: Answer, output: Output, row: int) -> npt.NDArray[np.float32]:
        """Return logits for the caller: of a row, or of all rows of a prompt."""
        if output.logits is None:
            return self._passes.runner.logits(max(row, 0)).copy()
        return output.logits if answer.drawing.keep_logits and row < 0 else output.logits[row]

    def keep(self, answer: Answer) -> None:
        """Have the next `tell` say what was drawn; a text that has ended gives its slot back."""
        if not answer.is_over:
            self._to_tell.append(answer)
            if answer.sequence.finish_reason:
                self.leave(answer)

    def guard(self, answer: Answer, work: Callable[[], object]) -> None:
        """Do something for one request; if it fails, only that request ends."""
        if answer.is_over:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a grammar's too
            self._spoiled(answer, error)

    def _spoiled(self, answer: Answer, error: Exception) -> None:
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
                self.tally.ended(answer, answer.sequence.finish_reason or "")
            elif answer.problem:
                self.end(answer, "cancelled")

    # ends

    def end(self, answer: Answer, reason: str, error: MoegraphError | None = None) -> None:
        """End a request, wherever it is; its sequence keeps what it holds."""
        if answer.is_over:
            return
        is_undone = answer not in self.sweeping or self._undo(answer)
        answer.end(reason, error)
        self.tally.ended(answer, answer.sequence.finish_reason or reason)
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
        return tuple(self._slot(slot) for slot in range(len(self._slots)))

    def _slot(self, slot: int) -> SlotStatus:
        answer, n_held = self._slots[slot], len(self._passes.held(slot))
        if answer is None:
            return SlotStatus(slot, n_held=n_held)
        state = "reading" if answer in self.sweeping else "answering"
        return SlotStatus(
            slot, state, n_held, len(answer.ids), answer.n_read, answer.n_cached,
            answer.sequence.n_generated, answer.number, answer.request,
            "\n" in answer.sequence.text,
        )  # fmt: skip
