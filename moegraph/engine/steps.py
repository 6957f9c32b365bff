"""The steps of a generation after its prompt: each is a pass that draws the next token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..events import CancelToken
from ..kinds import Kind
from ..runner import Output
from .passes import Passes
from .rows import RowSampler
from .sequence import Sequence

SEQ = 0  # the sequence of a generation


@dataclass(slots=True)
class Drawn:
    """A token of the text, and the rows of logits computed for it, if they are kept."""

    token: int
    logits: npt.NDArray[np.float32] | None


class Steps:
    """Draws the tokens of one generation: `first`, then `submit` and `collect` again and again.

    Between `submit` and `collect` the device computes, and there is time for other things.

    greedy: the device's argmax is the next token. keep_logits: see `Drawn`.
    """

    def __init__(
        self,
        passes: Passes,
        sampler: RowSampler,
        sequence: Sequence,
        greedy: bool,
        keep_logits: bool,
        cancel: CancelToken,
    ) -> None:
        self._passes = passes
        self._sampler = sampler
        self._sequence = sequence
        self._greedy = greedy
        self._keep_logits = keep_logits
        self._cancel = cancel

    def draws(self) -> npt.NDArray[np.int32] | None:
        """Return what the next single row needs to list candidates; None for other results."""
        draws = None if self._greedy or self._keep_logits else self._sampler.draw()
        return None if draws is None else draws[None]

    def first(self, output: Output) -> list[Drawn]:
        """Draw the first token, from the results of the prompt."""
        token = self._pick(output, -1)
        self._take(token)
        return [Drawn(token, output.logits if self._keep_logits else None)]

    def submit(self) -> None:
        """Start the pass of the last token.

        Raises:
            Cancelled: the generation was cancelled.
            NativeError: the device failed.
        """
        self._decode()
        # the device computes: now there is time for the rest
        self._sampler.prepare()

    def collect(self) -> list[Drawn]:
        """Wait for the pass, and draw the next token.

        Raises:
            NotFinite: a result is not finite.
            NativeError: the device failed.
        """
        return self.first(self._passes.collect())

    def _decode(self) -> None:
        row = np.array([[self._sequence.tokens[-1]]], dtype=np.int32)
        self._passes.submit(
            row, SEQ, self._keep_logits, self._greedy, self._cancel, Kind.DECODE, self.draws()
        )

    def _pick(self, output: Output, row: int) -> int:
        """Return the token that the target draws after a row of results; -1: the last one."""
        if self._greedy and output.argmax is not None:
            return int(output.argmax[row])
        listed, logits = output.candidates, output.logits
        return self._sampler.sample(
            None if listed is None else listed[row],
            lambda: self._passes.logits(max(row, 0)) if logits is None else logits[row],
        )

    def _take(self, token: int) -> None:
        """Have the text go on with a token."""
        if not self._greedy:
            self._sampler.accept(token)
        self._sequence.append(token)
