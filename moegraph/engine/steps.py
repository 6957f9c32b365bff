"""The steps of a generation after its prompt: each is a pass that draws the next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import Cancelled
from ..events import CancelToken
from ..kinds import Kind
from ..loop.drawing import Drawing
from ..passes.passes import Passes
from ..runner import Output

SEQ = 0  # the sequence of a generation


@dataclass(slots=True)
class Drawn:
    """A token of the text, and the rows of logits computed for it, if they are kept."""

    token: int
    logits: npt.NDArray[np.float32] | None


class Steps:
    """Draws the tokens of one generation: `first`, then `submit` and `collect` again and again.

    Between `submit` and `collect` the device computes, and there is time for other things.
    """

    def __init__(self, passes: Passes, drawing: Drawing, cancel: CancelToken) -> None:
        self._passes = passes
        self._drawing = drawing
        self._sequence = drawing.sequence
        self._cancel = cancel

    def draws(self) -> npt.NDArray[np.int32] | None:
        """Return what the next single row needs to list candidates; None for other results."""
        words = self._drawing.words()
        return None if words is None else words[None]

    def first(self, output: Output) -> list[Drawn]:
        """Draw the first token, from the results of the prompt."""
        token = self._drawing.pick(output, -1)
        self._drawing.take(token)
        return [Drawn(token, output.logits if self._drawing.keep_logits else None)]

    def submit(self) -> None:
        """Start the pass of the last token. It runs to its end, so that no pass is half done.

        Raises:
            Cancelled: the generation was cancelled; the sequence has all tokens but the last.
            NativeError: the device failed.
        """
        if self._cancel.is_set():
            raise Cancelled("cancelled")
        self._decode(self._drawing.prepare)

    def collect(self) -> list[Drawn]:
        """Wait for the pass, and draw the next token.

        Raises:
            NotFinite: a result is not finite.
            NativeError: the device failed.
        """
        return self.first(self._passes.collect())

    def _decode(self, meanwhile: Callable[[], object] = bool) -> None:
        """Start the pass; meanwhile: what there is time for while the device computes."""
        row, drawing = np.array([[self._sequence.tokens[-1]]], dtype=np.int32), self._drawing
        keep, greedy = drawing.keep_logits, drawing.greedy
        draws = self.draws()
        self._passes.submit(row, SEQ, keep, greedy, None, Kind.DECODE, draws, meanwhile)
