"""Steps that draw several tokens where a draft is right.

A pass computes a tree of rows: the anchor, which is the last token of the text, and drafted tokens
after it. The sampler draws a token after the anchor, and after each drafted token that is what was
drawn there. So each token is drawn from the target's logits, whatever the drafter proposes. These
logits differ from those of a pass of one row as much as a prompt's do: by rounding.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..draft.acceptance import walk
from ..draft.tree import DraftTree
from ..errors import Cancelled
from ..events import CancelToken
from ..loop.drawing import Drawing
from ..passes.passes import Passes
from ..passes.proposal import Ask, Proposal, step_of
from ..passes.speculation import Speculation
from ..passes.stepclock import StepClock, StepSeconds
from ..runner import NotFinite, Output
from .steps import SEQ, Drawn, Steps


class DraftedSteps(Steps):
    """Steps of a generation with drafts; a step without a draft is one of `Steps`.

    The device is idle from the results of a pass to the launch of the next one. So whether the next
    step rests from drafting is decided before (`Speculation.foresee`), if the step before it was a
    plain one, and then what the sequence took is noted later.
    """

    def __init__(
        self,
        passes: Passes,
        drawing: Drawing,
        cancel: CancelToken,
        speculation: Speculation,
        has_streams: bool,
    ) -> None:
        """has_streams: see `StepClock`. Others: as in `Steps`."""
        super().__init__(passes, drawing, cancel)
        self._speculation = speculation
        self._clock = StepClock(has_streams)
        self._proposal: Proposal | None = None  # before the pass in flight
        self._tree: DraftTree | None = None  # that this pass verifies; None: the anchor alone
        self._n_missing = 0  # until that pass
        self._rests = False  # the next step drafts nothing
        self._taken: list[int] = []  # tokens of which the drafters were not told
        # what there is to learn from the last step, while the device computes
        self._done: tuple[Proposal | None, list[Drawn], StepSeconds, int] | None = None

    def first(self, output: Output) -> list[Drawn]:
        """Draw the first token, from the results of the prompt."""
        drawn = super().first(output)
        self._clock.begin()
        return drawn

    def submit(self) -> None:
        """Draft, and start the pass of the last token and of what is drafted after it."""
        if self._cancel.is_set():
            self._end()
            raise Cancelled("cancelled")
        self._proposal = proposal = None if self._rests else self._propose()
        self._tree = proposal.tree if proposal and proposal.tree.n_rows > 1 else None
        self._n_missing = self._speculation.n_missing()
        self._clock.launch()
        if self._tree:
            self._verify(self._tree)
        else:
            self._decode(self._meanwhile)
        self._note_taken()
        self._rests = not proposal and self._speculation.foresee(SEQ, self._sequence.n_left - 1)
        self._clock.leave()

    def _propose(self) -> Proposal | None:
        """Draft; the sequence has all tokens but the last."""
        self._note_taken()
        sequence, race = self._sequence, self._drawing.sampler.race
        ask = Ask(SEQ, sequence.tokens[-1], sequence.n_left, sequence.n_room, race)
        proposal = self._speculation.propose(ask)
        if proposal and (tree := self._drawing.cut(proposal.tree)) is not proposal.tree:
            proposal = replace(proposal, tree=tree)
        return proposal

    def _note_taken(self) -> None:
        """Tell the drafters, sooner or later, what the sequence took."""
        taken, self._taken = self._taken, []
        if taken:
            self._speculation.committed(SEQ, taken)

    def _meanwhile(self) -> None:
        self._drawing.prepare(self._tree)
        self._learn()

    def _verify(self, tree: DraftTree) -> None:
        draws = self._drawing.words_of(tree)
        # without draws, the walk reads the logits of each row that it comes to
        argmax = draws is None and not self._drawing.keep_logits
        tokens, parents = np.array([tree.tokens], dtype=np.int32), np.array([tree.parents])
        self._passes.verify(tokens, SEQ, parents, None, argmax, None, draws, self._meanwhile)

    def collect(self) -> list[Drawn]:
        """Wait for the pass and draw; the sequence takes the rows that are what was drawn.

        Raises:
            NotFinite: a result is not finite that a pass without drafts would compute too.
            NativeError: the device failed.
        """
        self._clock.back()
        anchor, output = self._sequence.tokens[-1], self._results()
        self._clock.arrive()
        tree, speculation = self._tree, self._speculation
        if tree is None:
            drawn, self._taken = super().first(output), [anchor]
        else:
            path, drawn = self._walk(output, tree)
            self._passes.commit({SEQ: path})
            self._taken = [tree.tokens[row] for row in path]
        n_missing = speculation.n_missing() - self._n_missing
        self._done = self._proposal, drawn, self._clock.end(), n_missing
        if self._sequence.finish_reason:
            self._end()
        return drawn

    def _end(self) -> None:
        """Note what is left to note, because no step follows."""
        self._note_taken()
        self._learn()

    def _results(self) -> Output:
        try:
            return self._passes.collect()
        except NotFinite:
            if self._tree is None:
                raise
        # perhaps only after a token that was drafted in vain: the text may never come to it
        self._tree = None
        self._decode()
        return self._passes.collect()

    def _walk(self, output: Output, tree: DraftTree) -> tuple[list[int], list[Drawn]]:
        """Return the rows that are accepted, and the tokens that are drawn after them."""
        drawn: list[Drawn] = []
        accept, spine = self._speculation.accept, list[int]()
        if accept and self._proposal:
            spine = self._proposal.spine
        n_forced = accept(len(spine)) if accept else 0
        odds = self._proposal.odds if self._proposal else ()

        def draw(row: int) -> int | None:
            depth = len(drawn)
            offered = odds[depth] if depth < len(odds) else None
            token = (
                spine[depth] if depth < n_forced else self._drawing.pick(output, row, row, offered)
            )
            self._drawing.take(token)
            logits = output.require_logits()[row : row + 1] if self._drawing.keep_logits else None
            drawn.append(Drawn(token, logits))
            is_over = self._sequence.finish_reason or (accept and depth >= n_forced)
            return None if is_over else token

        return walk(tree, draw), drawn

    def _learn(self) -> None:
        if self._done:
            proposal, drawn, seconds, n_missing = self._done
            step = step_of(proposal, [one.token for one in drawn], seconds, n_missing)
            self._speculation.controller.observe(step)
            self._done = None
