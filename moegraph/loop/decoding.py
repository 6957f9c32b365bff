"""Decode passes: the next rows of several requests at once, drafted ones too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import proxy

import numpy as np
import numpy.typing as npt

from ..draft.drafter import DraftTree
from ..errors import MoegraphError, PoolFull
from ..ggml.choose import DRAW_ROWS
from ..graphs.head import no_races
from ..kinds import Kind
from ..passes.grouppasses import GroupPasses
from ..runner import Batch, NotFinite, Output
from .answer import Answer, Core
from .answers import Answers
from .drafting import Drafting
from .groups import Groups

_DECODE = Kind.DECODE  # members of an Enum are slow to look up
# Seconds that the loop waits for grammars if there is nothing else to compute.
_REST_S = 0.005

AnswerBatch = Sequence[Answer]
Trees = Sequence[DraftTree]


class Decoding:
    """Starts passes, and draws from their results when these are taken.

    groups: runs passes of several groups at once; None if the model is in one stage.
    """

    def __init__(self, core: Core, answers: Answers, drafting: Drafting | None) -> None:
        """drafting: None without drafters."""
        self._passes, self._prefixes = core.passes, core.prefixes
        self._answers = answers
        self._drafting = drafting
        # the pass whose results come next
        self._begun: tuple[AnswerBatch, Trees | None] | None = None
        self.groups: Groups | None = None
        if isinstance(core.passes, GroupPasses):
            mine = proxy(self)  # a circle would keep all memory when a loop is let go
            draws = partial(Decoding._wanted, mine, trees=None)
            self.groups = Groups(core.passes, answers, draws, partial(Decoding._draw, mine))

    def ready(self, batch: AnswerBatch) -> list[Answer]:
        """Return the requests that have a row for the next pass.

        The others have ended, or wait for their grammar; if all do, wait a moment for that.
        """
        found, late = list[Answer](), list[Answer]()
        for answer in batch:
            if answer.late:
                late.append(answer)
            elif not (answer.is_over or answer.generated.finish_reason or answer.generated.is_full):
                found.append(answer)
        if late and not found:
            self._answers.tell()
            late[0].choice.wait_for_grammar(_REST_S)
        for answer in late:
            self._answers.draw_late(answer)
            if not (answer.late or answer.is_over or answer.is_drawn or answer.generated.is_full):
                found.append(answer)
        return found

    def decode_groups(self, batch: AnswerBatch) -> bool:
        """Run the next row of some requests in groups, if that is faster than in one pass.

        Otherwise nothing is in flight afterwards.
        """
        groups = self.groups
        if groups is None:
            return False
        self.finish_pass()
        n_rows, n = len(batch), groups.choice.n_groups(len(batch))
        is_one_pass = len(self._passes.room.groups(answer.slot for answer in batch)) == 1
        if n == 1 or not is_one_pass or self._drafting or not groups.has_room(batch):
            self.finish_passes()
            return False
        groups.decode(batch, n)
        self._note(n_rows, n)
        return True

    def finish_passes(self) -> None:
        """Have no pass in flight, and draw from what was; errors as in `decode_groups`."""
        self.finish_pass()
        if self.groups and self.groups.is_busy:
            self.groups.finish_passes()
            self._answers.tally.begin_round()
        if self._drafting:
            self._drafting.settle()

    def give_up(self) -> None:
        """Have no pass in flight, whatever has happened; nothing is drawn."""
        if self._begun:
            self._passes.abandon(*(answer.slot for answer in self._begun[0]))
            self._begun = None
        if self.groups and self.groups.is_busy:
            self.groups.give_up()

    def _note(self, n_rows: int, n_groups: int) -> float | None:
        """Note that requests have got a token each; return the seconds that took, if known."""
        seconds = self._answers.tally.end_round(n_rows)
        if self.groups and seconds is not None:
            self.groups.choice.note(n_rows, n_groups, seconds)
        return seconds

    def start(self, batch: AnswerBatch) -> None:
        """Start the pass of the next row of some requests; `take` draws from its results.

        While it runs, what was drawn before is delivered.
        """
        if len(batch) > 1:  # several passes, if one would be too long
            by_slot = {answer.slot: answer for answer in batch}
            *before, last = self._passes.room.groups(by_slot)
            for slots in before:
                self._start([by_slot[slot] for slot in slots])
                self.finish_pass()
            batch = [by_slot[slot] for slot in last]
        self._start(batch)

    def _start(self, batch: AnswerBatch) -> None:
        """Start one pass, of drafted rows if there are some."""
        drafting = self._drafting
        try:
            trees = drafting.propose(batch) if drafting else None
            if trees and drafting and not self._verify(batch, trees):
                drafting.give_up()
                trees = None
            if not trees:
                self._decode(batch)
        except PoolFull:
            raise
        except MoegraphError as error:
            self._answers.failed(batch, error)
            return
        self._begun = batch, trees
        try:
            if drafting:
                drafting.launched()
        except MoegraphError as error:
            self.give_up()
            self._answers.failed(batch, error)

    def _decode(self, batch: AnswerBatch) -> None:
        """Start a pass of the last token of each request."""
        tokens, slots, is_greedy, draws = list[int](), list[int](), True, None
        for answer in batch:
            tokens.append(answer.generated.anchor)
            slots.append(answer.slot)
            is_greedy = is_greedy and answer.choice.greedy
        if not is_greedy:
            is_greedy, draws = self._wanted(batch, None)
        rows = np.array(tokens, dtype=np.int32)[:, None]
        started = Batch(rows, tuple(slots), _DECODE, False, is_greedy, draws=draws)
        self._passes.launch(started, partial(self._meanwhile, batch, None))

    def _meanwhile(self, batch: AnswerBatch, trees: Trees | None) -> None:
        """Do what the device need not wait for: deliver tokens, learn, and prepare to draw."""
        self._answers.tell()
        self._answers.tally.learn()
        for i, answer in enumerate(batch):
            if not answer.choice.greedy:
                tree = trees[i] if trees else None
                self._answers.guard(answer, partial(answer.choice.prepare, tree))

    def _wanted(
        self, batch: AnswerBatch, trees: Trees | None
    ) -> tuple[bool, npt.NDArray[np.int32] | None]:
        """Return whether a pass gives the argmax, and what it needs to list candidates.

        The logits of rows that need neither are read whole.
        """
        if not trees and len(batch) == 1 and not batch[0].choice.greedy:
            words = batch[0].choice.draw_words()
            return words is None, None if words is None else words[None]
        n_each = max([tree.n_rows for tree in trees]) if trees else 1
        n_rows = n_each * len(batch)
        if n_rows > DRAW_ROWS or all(answer.choice.greedy for answer in batch):
            for answer in batch:
                if not answer.choice.greedy:
                    answer.choice.expect_argmax()
            return True, None
        draws, is_listed = no_races(n_rows), False
        for i, answer in enumerate(batch):
            choice, row = answer.choice, i * n_each
            if trees:
                words = choice.tree_draw_words(trees[i])
            else:
                words = choice.draw_words(beside_others=True)
            if words is not None:
                draws[row : row + (trees[i].n_rows if trees else 1)] = words
                is_listed = True
        return not is_listed, draws if is_listed else None

    def finish_pass(self) -> None:
        """Wait for the pass in flight, if there is one, and draw from its results."""
        if self._begun is None:
            return
        (batch, trees), self._begun = self._begun, None
        try:
            output = self._collect(batch, trees)
            seconds, n_tokens = self._note(len(batch), 1), len(batch)
            if trees:
                n_tokens = self._take(batch, trees, output)
        except MoegraphError as error:
            self._answers.failed(batch, error)
            return
        self._answers.n_failures = 0
        if not trees:
            self._draw(batch, output)
        if self._drafting:
            if len(batch) > 1:
                n_rows = len(batch) * max((tree.n_rows for tree in trees or ()), default=1)
                self._drafting.shared(len(batch), n_tokens, seconds, n_rows)
            for answer in batch:
                if answer.generated.finish_reason:
                    self._drafting.settle()  # perhaps no pass follows

    def _collect(self, batch: AnswerBatch, trees: Trees | None) -> Output:
        """Return the results of the pass; requests whose results are not finite end.

        If a row was drafted, perhaps the text never comes to it: then only the draft is lost.
        """
        drafting = self._drafting
        if drafting:
            drafting.clock.back()
        try:
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
        if drafting:
            drafting.clock.arrive()
        return output

    def _draw(self, batch: AnswerBatch, output: Output) -> None:
        """Draw the next token of each request from its row."""
        answers, drafting = self._answers, self._drafting
        for row, answer in enumerate(batch):
            if answer.is_over:
                continue
            anchor, tokens = answer.generated.anchor, answer.generated.tokens
            n = len(tokens)
            is_late = answer.choice.constraint is not None and answers.is_late(answer, output, row)
            if not is_late:
                answers.draw(answer, output, row)
            if anchor in answer.request.keep_after:
                self._keep_state(answer, [anchor])
            elif drafting:
                drafting.taken.append((answer.slot, anchor))  # told while the device computes
            if drafting:
                drafting.drew(answer, [] if is_late else tokens[n:])

    def _keep_state(self, answer: Answer, tokens: Sequence[int]) -> None:
        """Note that a sequence has taken tokens, after which its state may be kept."""
        if self._drafting:
            self._drafting.took(answer.slot, tokens)
        if tokens[-1] not in answer.request.keep_after:
            return
        save = partial(self._prefixes.save, answer.slot)
        if self.groups and self.groups.is_busy:
            self.groups.when_idle(save)
        else:
            save()

    # trees

    def _verify(self, batch: AnswerBatch, trees: Trees) -> bool:
        """Start a pass of drafted rows; return whether there is memory for so many."""
        lengths = [tree.n_rows for tree in trees]
        slots, n = [answer.slot for answer in batch], max(lengths)
        if len(batch) > 1 and len(self._passes.room.groups(slots, n)) > 1:
            return False
        tokens = np.zeros((len(batch), n), dtype=np.int32)
        parents = np.full((len(batch), n), -1, dtype=np.int32)
        for i, (tree, length) in enumerate(zip(trees, lengths)):
            tokens[i, :length], parents[i, :length] = tree.tokens, tree.parents
        greedy, draws = self._wanted(batch, trees)
        rows = Batch.verify(tokens, slots, parents, lengths, greedy, draws)
        try:
            self._passes.launch(rows, partial(self._meanwhile, batch, trees))
        except PoolFull:
            return False
        return True

    def _take(self, batch: AnswerBatch, trees: Trees, output: Output) -> int:
        """Draw along the trees; the sequences take the rows that are what was drawn.

        Return how many tokens were drawn.
        """
        n, n_drawn = max([tree.n_rows for tree in trees]), 0
        done, paths = list[tuple[Answer, _Walk]](), dict[int, list[int]]()
        for i, answer in enumerate(batch):
            one = _Walk(self._answers, answer, trees[i], i * n)
            if answer.may_draft and self._drafting:
                self._answers.guard(answer, partial(one.draw, output, self._drafting))
            n_drawn += len(one.drawn)
            if one.path and not answer.is_over:
                done.append((answer, one))
                paths[answer.slot] = one.path
        self._passes.commit(paths)
        for answer, one in done:
            self._keep_state(answer, [one.tree.tokens[row] for row in one.path])
            if self._drafting:
                self._drafting.drew(answer, one.drawn)
            answer.n_drafted += one.tree.n_rows - 1
            answer.n_accepted += len(one.path) - 1
            self._answers.note_drawn(answer)
        return n_drawn


class _Walk:
    """The way of one text along its tree: the rows that are what was drawn, and what was drawn.

    first: the first row of the tree in the pass.
    """

    def __init__(self, answers: Answers, answer: Answer, tree: DraftTree, first: int) -> None:
        self._answers, self._answer = answers, answer
        self.tree, self.first = tree, first
        self.path: list[int] = []
        self.drawn: list[int] = []

    def draw(self, output: Output, drafting: Drafting) -> None:
        """Draw after the rows of the tree, as long as they are what was drawn."""
        answer, answers = self._answer, self._answers
        odds, forced = drafting.odds(answer), drafting.forced(answer)

        def next_token(row: int) -> int | None:
            depth, at = len(self.drawn), self.first + row
            if answers.is_late(answer, output, at, row):
                return None
            given = forced[depth] if forced and depth < len(forced) else None
            offered = odds[depth] if depth < len(odds) else None
            self.drawn.append(answers.pick(answer, output, at, row, offered, given))
            is_over = answer.is_drawn or (forced is not None and depth >= len(forced))
            return None if is_over else self.drawn[-1]

        self.path = self.tree.walk(next_token)
