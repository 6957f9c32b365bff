"""Decode passes of a service: the next row of several requests at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import MoegraphError
from ..ggml.choose import DRAW_ROWS, DRAW_WORDS
from ..kinds import Kind
from ..runner import NotFinite, Output
from .answer import Answer
from .answers import Answers
from .passes import Passes


class Decoding:
    """Runs passes and draws from their results, on the engine's thread."""

    def __init__(self, passes: Passes, answers: Answers) -> None:
        self._passes = passes
        self._answers = answers

    def decode(self, batch: Sequence[Answer]) -> None:
        """Run the next pass of some requests; deliver what was drawn before while it runs.

        Raises:
            MoegraphError: nothing more can be computed.
        """
        answers = self._answers
        slots = [answer.slot for answer in batch]
        rows = np.array([[answer.sequence.tokens[-1]] for answer in batch], dtype=np.int32)
        greedy, draws = self._draws(batch)
        cancels = tuple(answer.cancel for answer in batch)
        try:
            with answers.cancelling(*batch):
                self._passes.submit(rows, slots, False, greedy, cancels, Kind.DECODE, draws)
                answers.tell()
                for answer in batch:
                    answers.guard(answer, answer.drawing.prepare)
                output = self._collect(batch)
        except MoegraphError as error:
            answers.failed(batch, error)
            return
        answers.succeeded()
        answers.tally.end_round(len(batch))
        for row, answer in enumerate(batch):
            if not answer.is_over:
                answers.draw(answer, output, row)

    def _draws(self, batch: Sequence[Answer]) -> tuple[bool, npt.NDArray[np.int32] | None]:
        """Return whether a pass gives the argmax, and what it needs to list candidates.

        Rows that need neither are read whole.
        """
        if all(answer.drawing.greedy for answer in batch) or len(batch) > DRAW_ROWS:
            for answer in batch:
                answer.drawing.expect_argmax()
            return True, None
        draws = np.full((len(batch), DRAW_WORDS), -1, dtype=np.int32)
        draws[:, 0] = 0  # no race
        is_listed = False
        for row, answer in zip(draws, batch):
            words = answer.drawing.words(beside_others=True)
            if words is not None:
                row[:], is_listed = words, True
        return not is_listed, draws if is_listed else None

    def _collect(self, batch: Sequence[Answer]) -> Output:
        """Return the results of the pass; requests whose results are not finite end."""
        try:
            return self._passes.collect(locates=len(batch) == 1)
        except NotFinite as error:
            bad = [answer for answer in batch if answer.slot in error.sequences]
            if len(bad) == len(batch):
                raise
            for answer in bad:
                self._answers.end(answer, "error", error)
            return error.output
