"""Chooses tokens of a sequence from the results of passes, as its sampler and grammar say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from ..draft.drafter import DraftTree, Race
from ..draft.race import Odds, judge
from ..errors import InternalError
from ..ggml.choose import DRAW_IDS, DRAW_ROWS, DRAW_WORDS, LIKELY, Chooser
from ..passes.passes import Passes
from ..runner import Output
from ..sampling import BoolArray, FloatArray, Sampler, SamplingParams
from .requests import Constraint

# Words before the ids: 1 / temperature (F32), the key (64 bits), one that is not used.
_HEAD = 4
_NO_ID = -1


class RowSampler:
    """Chooses the next token of one sequence, row after row, with settings of its own.

    To choose from the logits of a row, a megabyte would have to be copied to the host and read
    several times, while the device waits. So the device lists the likeliest tokens, and the first
    ones of a race over all tokens (`moegraph_candidates`). Nearly always, these decide. Where they
    do not, the row's logits are read, and `Sampler.sample` gives the same token.

    For each row: `draw` before its pass, `prepare` while the device computes (or not at all),
    `sample` when the results are there, then `accept` with the token that the text goes on with.
    The rows of a draft are sampled in order, as long as the draft has the tokens that they give.

    n_whole: rows so far whose logits were read.
    """

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        self._sampler = Sampler(params, n_vocab)
        self.n_whole = 0
        params, n_bias = self._sampler.params, self._sampler.bias_ids.size
        self._chooser = Chooser(params)
        self._fits = n_bias <= DRAW_IDS
        self._words = np.full(DRAW_WORDS, _NO_ID, dtype=np.int32)
        # the ids: those with a bias, then a ring of the recent tokens
        self._n_recent = params.n_recent if params.has_penalties else 0
        self._n_bias = n_bias if self._fits else 0
        self._n_ring = min(self._n_recent, DRAW_IDS - self._n_bias)
        # without a race where the list of the likeliest has enough, whatever changes
        is_short = 0 < params.top_k <= LIKELY - self._n_bias - self._n_ring
        races = not (params.is_greedy or is_short)
        self._needs_row = params.typical_p < 1.0 and not is_short  # the entropy is of all tokens
        with np.errstate(over="ignore"):
            inverse = np.float32(1 / np.float64(params.temperature) if races else 0.0)
        self._words[:1].view(np.float32)[0] = inverse
        self._n_taken = 0  # tokens of the text, at most n_recent of the prompt
        if self._fits:
            self._words[_HEAD : _HEAD + n_bias] = self._sampler.bias_ids
        self._is_prepared = False
        # the key of the next draw, once it is known, and where `_words` has it
        self._key: int | None = None
        self._key_word = self._words[1:3].view(np.uint64)
        self._next_key: int | None = None  # of the draw after that

    def accept(self, token: int) -> None:
        """Record one token of the text."""
        self._sampler.accept(token)
        self._key, self._next_key = self._next_key, None
        if self._n_recent:
            self._put(self._words, self._n_taken, token)
            self._is_prepared = False
        self._n_taken += 1

    def accept_all(self, tokens: Sequence[int]) -> None:
        """Record the tokens of a prompt, oldest first."""
        self._sampler.accept_all(tokens)
        for token in tokens[-self._n_recent :] if self._n_recent else ():
            self._put(self._words, self._n_taken, token)
            self._n_taken += 1
        self._is_prepared, self._key, self._next_key = False, None, None

    def _put(self, words: npt.NDArray[np.int32], at: int, token: int) -> None:
        """Put the at-th token into the ring."""
        if self._n_ring:
            words[_HEAD + self._n_bias + at % self._n_ring] = token

    def draw(self, ahead: Sequence[int] = ()) -> npt.NDArray[np.int32] | None:
        """Return what the pass needs to know of a row, I32 [DRAW_WORDS].

        None: the settings need the row's logits. ahead: drafted tokens before the row. The memory
        of the array is used again by the next call.
        """
        if not self._suffices(len(ahead)):
            return None
        if not ahead:  # the device waits
            self._key_word[0] = self._key = self._key or self._sampler.key
            return self._words
        words = self._words.copy()
        self._describe(words, ahead)
        return words

    def _suffices(self, n_ahead: int) -> bool:
        """Return whether what the device lists of a row may suffice, after so many more tokens."""
        n = self._n_taken + n_ahead
        is_lost = self._n_ring < self._n_recent and n > self._n_ring
        return self._fits and not self._needs_row and not is_lost

    def _describe(self, words: npt.NDArray[np.int32], ahead: Sequence[int]) -> None:
        """Have words describe a row; a copy of our own if drafted tokens are before the row."""
        if self._n_ring:
            for i, token in enumerate(ahead):
                self._put(words, self._n_taken + i, token)
        key = self._sampler.key_at(self._sampler.position + len(ahead))
        words[1:3].view(np.uint64)[0] = key

    def draw_each(self, aheads: Sequence[Sequence[int]]) -> npt.NDArray[np.int32] | None:
        """Return what a pass needs to know of several rows, I32 numpy [n_rows, DRAW_WORDS].

        aheads: the drafted tokens before each row. None: the settings need the logits of some row.
        """
        if not self._suffices(max(map(len, aheads))):
            return None
        words = np.empty((len(aheads), DRAW_WORDS), dtype=np.int32)
        words[:] = self._words
        for row, ahead in zip(words, aheads):
            self._describe(row, ahead)
        return words

    @property
    def race(self) -> Race | None:
        """What is known of the next draws before their rows are computed; None if greedy."""
        params = self._sampler.params
        if params.is_greedy:
            return None
        position = self._sampler.position
        return Race(params, lambda n: self._sampler.key_at(position + n))

    def prepare(self) -> None:
        """Find out whose logits the next row changes, and what the draw after it needs."""
        self._next_key = self._sampler.key_at(self._sampler.position + 1)
        if self._is_prepared:
            return
        self._is_prepared = True
        n_bias, n_recent = self._n_bias, min(self._n_taken, self._n_ring)
        if n_bias + n_recent == 0:
            return
        wanted = self._words[_HEAD : _HEAD + n_bias + n_recent]
        ids, places = np.unique(wanted, return_index=True)
        params = self._sampler.params
        bias = np.zeros(ids.size, dtype=np.float32)
        bias[np.searchsorted(ids, wanted[:n_bias])] = self._sampler.bias
        counts = np.bincount(np.searchsorted(ids, wanted[n_bias:]), minlength=ids.size)
        is_recent = counts > 0
        repeat = np.where(is_recent, params.repeat_penalty, 1.0).astype(np.float32)
        subtracted = np.zeros(ids.size)
        less = counts * params.frequency_penalty + params.presence_penalty
        subtracted[is_recent] = less[is_recent]
        self._chooser.change(ids, places.astype(np.int32), bias, repeat, subtracted)

    def sample(
        self,
        candidates: npt.NDArray[np.int32] | None,
        logits: Callable[[], FloatArray],
        allowed: BoolArray | None = None,
    ) -> int:
        """Return the next token.

        candidates: what the device lists of the row; None without. logits: returns the logits of
        the row, F32 [n_vocab]. allowed: as in `Sampler.sample`.
        """
        if candidates is not None:
            if not self._is_prepared:
                self.prepare()
            token = self._chooser.choose(candidates, self._key or self._sampler.key, allowed)
            if token is not None:
                return token
        self.n_whole += 1
        return self._sampler.sample(logits(), allowed)

    def judge(self, odds: Odds, logits: FloatArray, allowed: BoolArray | None = None) -> int:
        """Return the next token, where one was drafted at random; see draft/race.py.

        logits: F32 [n_vocab]. allowed: as in `Sampler.sample`.
        """
        self.n_whole += 1
        if allowed is not None:
            logits = np.where(allowed, logits, np.float32(-np.inf))
        return judge(odds, *self._sampler.distribution(logits), self._sampler.key)


class TokenChoice:
    """Chooses the next tokens of one sequence.

    For each pass: `draw_words` before it, `prepare` while the device computes, `pick` and `accept`
    when the results are there.

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
        self._sampling, self._prompt, self._n_vocab = sampling, prompt, n_vocab
        if not self.greedy:
            self.sampler  # noqa: B018 - made by the caller's thread
        self.constraint = constraint
        self._is_listed = False  # the pass was asked for candidates, and they may suffice
        # which tokens may follow each row of the pass; None: `pick` finds out
        self._allowed: Future[list[BoolArray | None]] | None = None
        self._taken: list[int] = []  # tokens that the grammar has not taken yet

    @cached_property
    def sampler(self) -> RowSampler:
        """The sampler; a greedy text needs it only beside others."""
        found = RowSampler(self._sampling, self._n_vocab)
        found.accept_all(self._prompt.tolist())
        return found

    def draw_words(self, beside_others: bool = False) -> npt.NDArray[np.int32] | None:
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

    def tree_draw_words(self, tree: DraftTree) -> npt.NDArray[np.int32] | None:
        """Return what a tree's rows need beside others, numpy [n_rows, DRAW_WORDS]; or None."""
        found = None
        if not self.keep_logits and tree.n_rows <= DRAW_ROWS:
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

    def wait_for_grammar(self, seconds: float) -> None:
        """Wait a while for the grammar."""
        if self._allowed:
            wait([self._allowed], seconds)

    def _find(
        self, constraint: Constraint, aheads: Sequence[Sequence[int]]
    ) -> list[BoolArray | None]:
        self._settle(constraint)
        return [self._allowed_after(constraint, ahead) for ahead in aheads]

    def _settle(self, constraint: Constraint) -> None:
        taken, self._taken = self._taken, []
        for token in taken:
            constraint.accept(token)

    def _allowed_after(self, constraint: Constraint, ahead: Sequence[int]) -> BoolArray | None:
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

    def accept(self, token: int, is_last: bool) -> None:
        """Note that the text goes on with a token; is_last: and ends with it."""
        self.sampler.accept(token)
        if self.constraint and not is_last:
            self._taken.append(token)


@cache
def _threads() -> ThreadPoolExecutor:
    """Return threads for grammars: as many as sequences, so that none waits for a slow one."""
    return ThreadPoolExecutor(256, thread_name_prefix="grammar")
