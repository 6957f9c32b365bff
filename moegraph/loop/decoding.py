"""Decode passes of a service: the next rows of several requests at once, drafted ones too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from ..draft.acceptance import walk
from ..draft.rejection import Odds
from ..draft.tree import DraftTree
from ..errors import MoegraphError, RequestError
from ..ggml.choose import DRAW_ROWS, DRAW_WORDS
from ..kinds import Kind
from ..passes.grouppasses import GroupPasses
from ..passes.passes import Passes
from ..passes.prefixes import Prefixes
from ..runner import NotFinite, Output
from ..runner.flights import FlightCounts
from .answer import Answer
from .answers import Answers
from .drafting import Drafting
from .groups import Groups

# Seconds that a service waits for grammars if there is nothing else to compute.
_REST_S = 0.005


class Decoding:
    """Runs passes and draws from their results, on the engine's thread.

    groups: runs passes of several groups at once; None if the model is in one stage.
    """

    def __init__(
        self, passes: Passes, prefixes: Prefixes, answers: Answers, drafting: Drafting
    ) -> None:
        self._passes, self._prefixes = passes, prefixes
        self._answers = answers
        self._drafting = drafting
        self.groups: Groups | None = None
        if isinstance(passes, GroupPasses):
            draws = partial(self._draws, trees=None)
            self.groups = Groups(passes, answers, draws, self._draw)

    @property
    def flight_counts(self) -> FlightCounts:
        """Return how well the stages were used by groups."""
        passes = self._passes
        return passes.flights.counts if isinstance(passes, GroupPasses) else FlightCounts()

    def decode_groups(self, batch: Sequence[Answer]) -> bool:
        """Run the next row of some requests in groups, if that is faster than in one pass.

        Otherwise nothing is in flight afterwards.

        Raises:
            MoegraphError: nothing more can be computed.
        """
        groups = self.groups
        if groups is None:
            return False
        n_rows, n = len(batch), groups.choice.n_groups(len(batch))
        is_one_pass = len(self._passes.room.groups(answer.slot for answer in batch)) == 1
        if n == 1 or not is_one_pass or self._drafting.is_on or not groups.has_room(batch):
            self.land()
            return False
        groups.decode(batch, n)
        self._note(n_rows, n)
        return True

    def ready(self, batch: Sequence[Answer]) -> list[Answer]:
        """Return the requests that have a row for the next pass.

        The others have ended, or wait for their grammar; if all do, wait a moment for that.
        """
        late = [answer for answer in batch if answer.late]
        if late and len(late) == len(batch):
            self._answers.tell()
            late[0].drawing.rest(_REST_S)
        for answer in batch:
            self._answers.draw_late(answer)
        return [a for a in batch if not (a.is_over or a.is_drawn or a.late)]

    def land(self) -> None:
        """Have no pass in flight, after `decode_groups`; errors as there."""
        if self.groups and self.groups.is_flying:
            self.groups.land()
            self._answers.tally.begin_round()

    def give_up(self) -> None:
        """Have no pass in flight, whatever has happened; nothing is drawn."""
        if self.groups and self.groups.is_flying:
            self.groups.give_up()

    def _note(self, n_rows: int, n_groups: int) -> float | None:
        """Note that requests have got a token each; return the seconds that took, if known."""
        seconds = self._answers.tally.end_round(n_rows)
        if self.groups and seconds is not None:
            self.groups.choice.note(n_rows, n_groups, seconds)
        return seconds

    def decode(self, batch: Sequence[Answer]) -> None:
        """Run the next row of some requests; deliver what was drawn before while it runs.

        Raises:
            MoegraphError: nothing more can be computed.
        """
        by_slot = {answer.slot: answer for answer in batch}
        for slots in self._passes.room.groups(by_slot):
            self._pass([by_slot[slot] for slot in slots])

    def _pass(self, batch: Sequence[Answer]) -> None:
        answers = self._answers
        try:
            with answers.cancelling(*batch):
                trees = self._launch(batch)
                answers.build_ahead()
                self._drafting.launched()
                output = self._collect(batch, trees)
                seconds, n_tokens = self._note(len(batch), 1), len(batch)
                if trees:
                    n_tokens = self._take(batch, trees, output)
                n_rows = len(batch) * max((tree.n_rows for tree in trees or ()), default=1)
                self._drafting.shared(len(batch), n_tokens, seconds, n_rows)
        except MoegraphError as error:
            answers.failed(batch, error)
            return
        answers.succeeded()
        if not trees:
            self._draw(batch, output)

    def _launch(self, batch: Sequence[Answer]) -> list[DraftTree] | None:
        """Start a pass; return the rows of each request if some were drafted."""
        trees = self._drafting.propose(batch)
        if trees:
            try:
                self._verify(batch, trees, partial(self._meanwhile, batch, trees))
                return trees
            except RequestError:  # there is no memory for so many rows
                self._drafting.give_up()
        self._submit(batch, partial(self._meanwhile, batch, None))
        return None

    def _meanwhile(self, batch: Sequence[Answer], trees: Sequence[DraftTree] | None) -> None:
        """Do what the device need not wait for: deliver tokens, and prepare to draw the next."""
        self._answers.tell()
        for i, answer in enumerate(batch):
            tree = trees[i] if trees else None
            self._answers.guard(answer, partial(answer.drawing.prepare, tree))

    # one row of each

    def _submit(self, batch: Sequence[Answer], meanwhile: Callable[[], None]) -> None:
        rows = np.array([[answer.sequence.tokens[-1]] for answer in batch], dtype=np.int32)
        slots = [answer.slot for answer in batch]
        cancels = tuple(answer.cancel for answer in batch)
        greedy, draws = self._draws(batch, None)
        kind = Kind.DECODE
        self._passes.submit(rows, slots, False, greedy, cancels, kind, draws, meanwhile)

    def _draws(
        self, batch: Sequence[Answer], trees: Sequence[DraftTree] | None
    ) -> tuple[bool, npt.NDArray[np.int32] | None]:
        """Return whether a pass gives the argmax, and what it needs to list candidates.

        Rows that need neither are read whole.
        """
        n_each = max(tree.n_rows for tree in trees) if trees else 1
        n_rows = n_each * len(batch)
        if all(answer.drawing.greedy for answer in batch) or n_rows > DRAW_ROWS:
            for answer in batch:
                answer.drawing.expect_argmax()
            return True, None
        draws = np.full((n_rows, DRAW_WORDS), -1, dtype=np.int32)
        draws[:, 0] = 0  # no race
        is_listed = False
        for i, answer in enumerate(batch):
            drawing, row = answer.drawing, i * n_each
            if trees:
                words = drawing.words_of(trees[i], beside_others=True)
            else:
                words = drawing.words(beside_others=True)
            if words is not None:
                draws[row : row + (trees[i].n_rows if trees else 1)] = words
                is_listed = True
        return not is_listed, draws if is_listed else None

    def _collect(self, batch: Sequence[Answer], trees: Sequence[DraftTree] | None) -> Output:
        """Return the results of the pass; requests whose results are not finite end.

        If a row was drafted, perhaps the text never comes to it: then only the draft is lost.
        """
        try:
            self._drafting.waits()
            output = self._passes.collect(locates=len(batch) == 1)
        except NotFinite as error:
            bad = [answer for answer in batch if answer.slot in error.sequences]
            if len(bad) == len(batch) and not trees:
                raise
            drafted = {answer.slot for answer, tree in zip(batch, trees or ()) if tree.n_rows > 1}
            for answer in bad:
                answer.may_draft = False
                if answer.slot not in drafted:
                    self._answers.end(answer, "error", error)
            output = error.output
        self._drafting.arrived()
        return output

    def _draw(self, batch: Sequence[Answer], output: Output) -> None:
        for row, answer in enumerate(batch):
            if answer.is_over:
                continue
            anchor, n = answer.sequence.tokens[-1], answer.sequence.n_generated
            if self._answers.is_late(answer, output, row):
                self._took(answer, [anchor])
                self._drafting.drew(answer, [])
                continue
            self._answers.draw(answer, output, row)
            self._took(answer, [anchor])
            self._drafting.drew(answer, answer.sequence.tokens[n:])

    def _took(self, answer: Answer, tokens: Sequence[int]) -> None:
        """Note that a sequence has taken tokens."""
        self._drafting.took(answer.slot, tokens)
        if tokens[-1] in answer.request.keep_after:
            save = partial(self._prefixes.save, answer.slot)
            if self.groups and self.groups.is_flying:
                self.groups.when_landed(save)
            else:
                save()

    # trees

    def _verify(
        self, batch: Sequence[Answer], trees: Sequence[DraftTree], meanwhile: Callable[[], None]
    ) -> None:
        n = max(tree.n_rows for tree in trees)
        tokens = np.zeros((len(batch), n), dtype=np.int32)
        parents = np.full((len(batch), n), -1, dtype=np.int32)
        for i, tree in enumerate(trees):
            tokens[i, : tree.n_rows], parents[i, : tree.n_rows] = tree.tokens, tree.parents
        greedy, draws = self._draws(batch, trees)
        self._passes.verify(
            tokens, [answer.slot for answer in batch], parents, [tree.n_rows for tree in trees],
            greedy, tuple(answer.cancel for answer in batch), draws, meanwhile,
        )  # fmt: skip

    def _take(self, batch: Sequence[Answer], trees: Sequence[DraftTree], output: Output) -> int:
        """Draw along the trees; the sequences take the rows that are what was drawn.

        Return how many tokens were drawn.
        """
        n = max(tree.n_rows for tree in trees)
        walks = {a: _Walk(self._answers, a, trees[i], i * n) for i, a in enumerate(batch)}
        for answer, one in walks.items():
            if answer.may_draft:
                odds = self._drafting.odds(answer)
                self._answers.guard(answer, partial(one.draw, output, odds))
        done = {answer: one for answer, one in walks.items() if one.path and not answer.is_over}
        self._passes.commit({answer.slot: one.path for answer, one in done.items()})
        for answer, one in done.items():
            tokens = [one.tree.tokens[row] for row in one.path]
            self._took(answer, tokens)
            self._drafting.drew(answer, one.drawn)
            answer.n_drafted += one.tree.n_rows - 1
            answer.n_accepted += len(one.path) - 1
            self._answers.keep(answer)
        return sum(len(one.drawn) for one in walks.values())


class _Walk:
    """The way of one text along its tree: the rows that are what was drawn, and what was drawn.

    first: the first row of the tree in the pass.
    """

    def __init__(self, answers: Answers, answer: Answer, tree: DraftTree, first: int) -> None:
        self._answers, self._answer = answers, answer
        self.tree, self.first = tree, first
        self.path: list[int] = []
        self.drawn: list[int] = []

    def draw(self, output: Output, odds: Sequence[Odds]) -> None:
        """Draw after the rows of the tree, as long as they are what was drawn."""

        def next_token(row: int) -> int | None:
            depth, at = len(self.drawn), self.first + row
            if self._answers.is_late(self._answer, output, at, row):
                return None
            offered = odds[depth] if depth < len(odds) else None
            self.drawn.append(self._answers.pick(self._answer, output, at, row, offered))
            return None if self._answer.is_drawn else self.drawn[-1]

        self.path = walk(self.tree, next_token)
