"""Draws the tokens of one sequence from the results of passes, as its sampler and grammar say."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from ..draft.rejection import Odds
from ..draft.tree import DraftTree
from ..errors import InternalError
from ..ggml.choose import DRAW_ROWS
from ..runner import Output
from ..sampling import BoolArray, SamplingParams
from .passes import Passes
from .requests import Constraint
from .rows import RowSampler
from .sequence import Sequence


class Drawing:
    """Chooses the next tokens of one sequence.

    For each pass: `words` before it, `prepare` while the device computes, `pick` and `take` when
    the results are there.

    greedy: the device's argmax is the next token. keep_logits: passes are to return the logits of
    all rows. sequence: takes the tokens.
    """

    def __init__(
        self,
        passes: Passes,
        sequence: Sequence,
        sampling: SamplingParams,
        n_vocab: int,
        keep_logits: bool = False,
        constraint: Constraint | None = None,
    ) -> None:
        self._passes = passes
        self.sequence = sequence
        self.keep_logits = keep_logits
        self.greedy = not (sampling.needs_logits or keep_logits or constraint)
        self.sampler = RowSampler(sampling, n_vocab)
        self.sampler.accept_all(sequence.prompt)
        self._constraint = constraint
        self._n_vocab = n_vocab
        self._is_listed = False  # the pass was asked for candidates, and they may suffice
        # which tokens may follow each row of the pass; None: to be found out
        self._allowed: list[BoolArray | None] | None = None

    def words(self, beside_others: bool = False) -> npt.NDArray[np.int32] | None:
        """Return what the next single row needs to list candidates; None for other results.

        beside_others: the pass lists candidates, whether this row needs them or not.
        """
        is_greedy = self.greedy and not beside_others
        found = None if is_greedy or self.keep_logits else self.sampler.draw()
        self._is_listed = found is not None
        self._allowed = None
        return found

    def expect_argmax(self) -> None:
        """Note that the pass gives the argmax; a row of which more is needed is read whole."""
        self._is_listed, self._allowed = False, None

    def words_of(
        self, tree: DraftTree, beside_others: bool = False
    ) -> npt.NDArray[np.int32] | None:
        """Return what the rows of a tree need, numpy [n_rows, DRAW_WORDS]; see `words`."""
        found, is_greedy = None, self.greedy and not beside_others
        if not (is_greedy or self.keep_logits) and tree.n_rows <= DRAW_ROWS:
            found = self.sampler.draw_each([tree.ahead(row) for row in range(tree.n_rows)])
        self._is_listed = found is not None
        self._allowed = None
        return found

    def cut(self, tree: DraftTree) -> DraftTree:
        """Return a tree without the rows to which the grammar does not lead."""
        constraint = self._constraint
        if constraint is None:
            return tree

        def is_allowed(row: int) -> bool:
            ahead = tree.ahead(row)
            return constraint.n_accepted(ahead) == len(ahead)

        return tree.only(is_allowed)

    def prepare(self, tree: DraftTree | None = None) -> None:
        """Find out what may be drawn after the rows of the pass, while the device computes.

        tree: None for a single row.
        """
        self.sampler.prepare()
        if self._constraint:
            n_rows = tree.n_rows if tree else 1
            aheads = [tree.ahead(row) for row in range(n_rows)] if tree else [()]
            self._allowed = [self._allowed_after(self._constraint, ahead) for ahead in aheads]

    def _allowed_after(self, constraint: Constraint, ahead: SequenceOf[int]) -> BoolArray | None:
        for token in ahead:
            constraint.accept(token)
        found = constraint.allowed()
        if ahead:
            constraint.roll_back(len(ahead))
        # native code reads it
        if found is not None and (found.shape != (self._n_vocab,) or found.dtype != bool):
            raise InternalError(f"a grammar's mask is {found.dtype} {found.shape}")
        return found

    def pick(self, output: Output, row: int, node: int = 0, offered: Odds | None = None) -> int:
        """Return the token that the target draws after a row of results.

        row: of the pass, -1 for the last one. node: which of the rows of this sequence it is.
        offered: a token drafted at random, to accept or to reject.

        Raises:
            RequestError: settings or grammar exclude every token.
        """
        if self.greedy and output.argmax is not None:
            return int(output.argmax[row])
        allowed = None
        if self._constraint:
            known = self._allowed
            allowed = known[node] if known else self._allowed_after(self._constraint, ())
        listed, logits = output.candidates, output.logits
        if offered:
            whole = self._passes.logits(max(row, 0)) if logits is None else logits[row]
            return self.sampler.judge(offered, whole, allowed)
        return self.sampler.sample(
            listed[row] if listed is not None and self._is_listed else None,
            lambda: self._passes.logits(max(row, 0)) if logits is None else logits[row],
            allowed,
        )

    def take(self, token: int) -> None:
        """Have the text go on with a token.

        Raises:
            RequestError: the grammar does not take it.
        """
        if not self.greedy:
            self.sampler.accept(token)
        self.sequence.append(token)
        if self._constraint and not self.sequence.finish_reason:
            self._constraint.accept(token)
