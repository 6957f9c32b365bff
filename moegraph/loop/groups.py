"""Decode passes of several groups of requests at once, each in another stage.

While a group's results are drawn from, the others compute. The passes in flight stay there from one
call to the next; whatever else is to be done with sequences waits until they have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt

from ..errors import MoegraphError
from ..passes.grouppasses import GroupPasses
from ..runner import NotFinite, Output
from .answer import Answer
from .answers import Answers
from .groupchoice import GroupChoice

AnswerBatch = Sequence[Answer]
Draws = Callable[[AnswerBatch], tuple[bool, npt.NDArray[np.int32] | None]]


class Groups:
    """Runs passes of groups and draws from their results, on the engine's thread.

    choice: in how many groups requests decode.
    """

    def __init__(
        self,
        passes: GroupPasses,
        answers: Answers,
        draws: Draws,
        draw: Callable[[AnswerBatch, Output], object],
    ) -> None:
        """draws: what a pass needs to list candidates. draw: draws from its results."""
        self._passes, self._answers = passes, answers
        self._draws, self._draw = draws, draw
        self.choice = GroupChoice(passes.most)
        self._pending: deque[list[Answer]] = deque()  # the oldest first
        self._to_save: list[Callable[[], object]] = []

    @property
    def is_busy(self) -> bool:
        """Whether passes are in flight."""
        return bool(self._pending)

    def when_idle(self, work: Callable[[], object]) -> None:
        """Have something done when no pass is in flight; none starts before."""
        self._to_save.append(work)

    def has_room(self, batch: AnswerBatch) -> bool:
        """Whether there are pages for a row in flight and one more of each request."""
        room = self._passes.room
        return sum(room.pages_for(answer.slot, 2) for answer in batch) <= room.n_free_pages

    def decode(self, batch: AnswerBatch, n_groups: int) -> None:
        """Run the next row of each request, and start the one after it."""
        most = -(-len(batch) // n_groups)
        pending = {id(answer) for group in self._pending for answer in group}
        waiting = deque(answer for answer in batch if id(answer) not in pending)
        for _ in range(n_groups):
            self._fill(waiting, most, n_groups)
            if self._pending:
                waiting.extend(self._collect())
        self._fill(waiting, most, n_groups)
        if self._to_save:
            self.finish_passes()

    def _fill(self, waiting: deque[Answer], most: int, n_groups: int) -> None:
        """Start passes of requests that have none in flight."""
        while waiting and len(self._pending) < n_groups and not self._to_save:
            group = [waiting.popleft() for _ in range(min(most, len(waiting)))]
            self._submit([answer for answer in group if _goes_on(answer)])

    def _submit(self, group: list[Answer]) -> None:
        if not group:
            return
        answers = self._answers
        rows = np.array([[answer.generated.anchor] for answer in group], dtype=np.int32)
        greedy, draws = self._draws(group)
        keeps = any(not answer.choice.greedy or answer.wants_logits for answer in group)
        slots, cancels = [answer.slot for answer in group], tuple(a.cancel for a in group)
        try:
            self._passes.submit_group(rows, slots, greedy, cancels, draws, keeps)
        except MoegraphError as error:
            answers.failed(group, error)
            return
        self._pending.append(group)
        answers.tell()
        for answer in group:
            answers.guard(answer, partial(answer.choice.prepare, None))

    def _collect(self) -> list[Answer]:
        """Draw from the results of the oldest pass; return its requests that go on."""
        group = self._pending.popleft()
        try:
            output = self._passes.collect_group()
        except NotFinite as error:
            bad = [answer for answer in group if answer.slot in error.sequences]
            if len(bad) == len(group):
                self._answers.failed(group, error)
                return []
            for answer in bad:
                self._answers.end(answer, "error", error)
            output = error.output
        except MoegraphError as error:
            self._answers.failed(group, error)
            return []
        self._answers.n_failures = 0
        self._draw(group, output)
        return [answer for answer in group if _goes_on(answer)]

    def finish_passes(self) -> None:
        """Draw from the results of all passes in flight, and start none."""
        while self._pending:
            self._collect()
        work, self._to_save = self._to_save, []
        for save in work:
            save()

    def give_up(self) -> None:
        """Forget the passes in flight; nothing is drawn."""
        self._pending.clear()
        self._to_save.clear()
        with suppress(MoegraphError):  # of a device that is lost; whoever uses it next is told
            self._passes.give_up_groups()


def _goes_on(answer: Answer) -> bool:
    return not (answer.is_over or answer.is_drawn or answer.late or answer.generated.is_full)
