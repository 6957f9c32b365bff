"""Draws the tokens of one sequence from the results of passes, as its sampler and grammar say."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache

import numpy as np
import numpy.typing as npt

from ..draft.drafter import DraftTree
from ..draft.race import Odds
from ..errors import InternalError
from ..ggml.choose import DRAW_ROWS
from ..passes.passes import Passes
from ..runner import Output
from ..sampling import BoolArray, SamplingParams
from .requests import Constraint
from .rows import RowSampler


class Drawing:
    """Chooses the next tokens of one sequence.

    For each pass: `words` before it, `prepare` while the device computes, `pick` and `take` when
    the results are there.

    greedy: the device's argmax is the next token. keep_logits: the caller gets the logits of all
    rows. constraint: a grammar.
    """

    def __init__(
        self,
        passes: Passes,
        prompt: npt.NDArray[np.int32],
        sampling: SamplingParams,
        n_vocab: int,
        keep_logits: bool = False,
        constraint: Constraint | None = None,
    ) -> None:
        self._passes = passes
        self.keep_logits = keep_logits
        self.greedy = not (sampling.needs_logits or keep_logits or constraint)
        self.sampler = RowSampler(sampling, n_vocab)
        self.sampler.accept_all(prompt.tolist())
        self.constraint = constraint
        self._n_vocab = n_vocab
        self._is_listed = False  # the pass was asked for candidates, and they may suffice
        # which tokens may follow each row of the pass; None: `pick` finds out
        self._allowed: Future[list[BoolArray | None]] | None = None
        self._taken: list[int] = []  # tokens that the grammar has not taken yet

    def words(self, beside_others: bool = False) -> npt.NDArray[np.int32] | None:
        """Return what the next single row needs to list candidates; None for other results.

        beside_others: the pass lists candidates, whether this row needs them or not.
        """
        is_greedy = self.greedy and not beside_others
        found = None if is_greedy or self.keep_logits else self.sampler.draw()
        self._begin(found is not None)
        return found

    def expect_argmax(self) -> None:
        """Note that the pass gives the argmax; a row of which more is needed is read whole."""
        self._begin(False)

    def _begin(self, is_listed: bool) -> None:
        if self._allowed and not self._allowed.done():
            wait([self._allowed])  # of a pass that failed
        self._is_listed, self._allowed = is_listed, None

    def words_of(
        self, tree: DraftTree, beside_others: bool = False
    ) -> npt.NDArray[np.int32] | None:
        """Return what the rows of a tree need, numpy [n_rows, DRAW_WORDS]; see `words`."""
        found, is_greedy = None, self.greedy and not beside_others
        if not (is_greedy or self.keep_logits) and tree.n_rows <= DRAW_ROWS:
            found = self.sampler.draw_each([tree.ahead(row) for row in range(tree.n_rows)])
        self._begin(found is not None)
        return found

    def cut(self, tree: DraftTree) -> DraftTree:
        """Return a tree without the rows to which the grammar does not lead."""
        constraint = self.constraint
        if constraint is None:
            return tree
        if constraint.is_slow:
            return tree.only(lambda row: row == 0)
        self._settle(constraint)

        def is_allowed(row: int) -> bool:
            ahead = tree.ahead(row)
            return constraint.n_accepted(ahead) == len(ahead)

        return tree.only(is_allowed)

    def prepare(self, tree: DraftTree | None = None) -> None:
        """Begin to find out, on a thread of its own, what may be drawn after the rows of the pass.

        tree: None for a single row.
        """
        if self.greedy:
            return
        self.sampler.prepare()
        if self.constraint:
            n_rows = tree.n_rows if tree else 1
            aheads = [tree.ahead(row) for row in range(n_rows)] if tree else [()]
            self._allowed = _threads().submit(self._find, self.constraint, aheads)

    def is_ready(self, within_s: float) -> bool:
        """Return whether `pick` need not wait for the grammar; wait a moment for a quick one."""
        if self._allowed is None or self._allowed.done():
            return True
        is_slow = self.constraint is not None and self.constraint.is_slow
        return not is_slow and not wait([self._allowed], within_s).not_done

    def rest(self, seconds: float) -> None:
        """Wait a while for the grammar."""
        if self._allowed:
            wait([self._allowed], seconds)

    def _find(
        self, constraint: Constraint, aheads: SequenceOf[SequenceOf[int]]
    ) -> list[BoolArray | None]:
        self._settle(constraint)
        return [self._allowed_after(constraint, ahead) for ahead in aheads]

    def _settle(self, constraint: Constraint) -> None:
        taken, self._taken = self._taken, []
        for token in taken:
            constraint.accept(token)

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
        """
        allowed = None
        if self.constraint:
            known = self._allowed.result() if self._allowed else self._find(self.constraint, [()])
            allowed = known[node if self._allowed else 0]
        listed, logits = output.candidates, output.logits
        if offered:
            whole = self._passes.runner.logits(max(row, 0)) if logits is None else logits[row]
            return self.sampler.judge(offered, whole, allowed)
        return self.sampler.sample(
            listed[row] if listed is not None and self._is_listed else None,
            lambda: self._passes.runner.logits(max(row, 0)) if logits is None else logits[row],
            allowed,
        )

    def take(self, token: int, is_last: bool) -> None:
        """Note that the text goes on with a token; is_last: and ends with it."""
        self.sampler.accept(token)
        if self.constraint and not is_last:
            self._taken.append(token)


@cache
def _threads() -> ThreadPoolExecutor:
    """Return threads for grammars: as many as sequences, so that none waits for a slow one."""
    return ThreadPoolExecutor(256, thread_name_prefix="grammar")
