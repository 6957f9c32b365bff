"""What an answer must follow, token by token: a grammar, perhaps only after its reasoning."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from functools import cache
from itertools import takewhile
from typing import Any

from ..errors import RequestError
from ..sampling import BoolArray
from .grammar import Compiled, mask_of

# Line ends between the reasoning and what follows the grammar.
_MAX_BLANK = 2
# Seconds of a CPU that a mask may take; most take less than a thousandth of that.
_MASK_S = 0.5
# After a slower one, a grammar drafts nothing, and takes its token in a way that lets other threads
# of Python go on.
_SLOW_S = 0.005


class _Phase(Enum):
    FREE = "before the text that the grammar comes after"
    BLANK = "behind it, where line ends may come first"
    GRAMMAR = "within the grammar"


class GrammarConstraint:
    """A grammar's state in one answer; a `Constraint` of requests.

    after: the text that the grammar comes after, such as ``</think>``; None: it is for the whole
    answer. blank: whether line ends may come between that text and the grammar's.
    warnings: as in `Compiled`.
    """

    def __init__(self, compiled: Compiled, after: str | None = None, blank: bool = True) -> None:
        self.warnings = compiled.warnings
        self._matcher = compiled.matcher.deep_copy()
        self._pieces, self._eog_ids = compiled.pieces, compiled.eog_ids
        self._blank_ids = compiled.blank_ids
        self._after = after.encode() if after else b""
        self._then = _Phase.BLANK if blank else _Phase.GRAMMAR
        self._phase = _Phase.FREE if after else _Phase.GRAMMAR
        self._tokens: list[int] = []
        self._phases: list[_Phase] = []  # before each token
        self._mask: BoolArray | None = None
        self.is_slow = False
        self.allowed()  # on the thread that prepares, so that the first token finds it

    def allowed(self) -> BoolArray | None:
        """Return which tokens may come next, bool numpy [n_vocab]; None: any.

        Raises:
            RequestError: the grammar became too complex.
        """
        if self._phase is _Phase.FREE:
            return None
        if self._mask is None:
            began = time.thread_time()
            self._mask = mask_of(self._matcher, len(self._pieces))
            self._check()
            took_s = time.thread_time() - began
            self.is_slow = took_s > _SLOW_S
            if took_s > _MASK_S:
                raise RequestError(
                    f"the grammar is too complex: finding out what may come after "
                    f"{len(self._tokens)} tokens took {took_s:.2f} s, at most {_MASK_S:g} s are "
                    "allowed; make it less ambiguous"
                )
            if self._phase is _Phase.BLANK:
                n_left = _MAX_BLANK - self._n_blank()
                self._mask[[i for i in self._blank_ids if len(self._pieces[i]) <= n_left]] = True
        return self._mask

    def accept(self, token: int) -> None:
        """Take the next token of the answer.

        Raises:
            RequestError: the grammar does not allow it.
        """
        self._phases.append(self._phase)
        self._tokens.append(token)
        self._mask = None
        if self._phase is _Phase.FREE:
            if self._after in self._tail():
                self._phase = self._then
        elif self._phase is not _Phase.BLANK or not self._is_blank(token):
            self._phase = _Phase.GRAMMAR
            if token not in self._eog_ids:
                if self.is_slow:
                    _executor().consume_token_par([(self._matcher, token)])
                else:
                    self._matcher.consume_token(token)
                self._check()

    def roll_back(self, n: int) -> None:
        """Forget the last n tokens."""
        n_matched = 0
        for _ in range(n):
            token, before = self._tokens.pop(), self._phases.pop()
            n_matched += self._phase is _Phase.GRAMMAR and self._was_matched(token, before)
            self._phase = before
        if n_matched:
            self._matcher.rollback(n_matched)
        self._mask = None

    def _was_matched(self, token: int, before: _Phase) -> bool:
        return before is not _Phase.FREE and token not in self._eog_ids

    def n_accepted(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may follow one another; none of them is taken."""
        n = 0
        if self._phase is _Phase.GRAMMAR:
            # without masks, as far as that tells
            plain = [*takewhile(lambda token: token not in self._eog_ids, tokens)]
            n = self._matcher.validate_tokens(plain)
            if n < len(plain) or n == len(tokens):
                return n
            n = 0
        for token in tokens:
            mask = self.allowed()
            if mask is not None and not mask[token]:
                break
            self.accept(token)
            n += 1
            if token in self._eog_ids:
                break
        self.roll_back(n)
        return n

    def _tail(self) -> bytes:
        """Return the end of the answer, as far as its last token may complete a text in it."""
        tail = self._pieces[self._tokens[-1]]
        n_wanted = len(tail) + len(self._after) - 1
        for token in reversed(self._tokens[:-1]):
            if len(tail) >= n_wanted:
                break
            tail = self._pieces[token] + tail
        return tail

    def _n_blank(self) -> int:
        n = 0
        for token, phase in zip(reversed(self._tokens), reversed(self._phases)):
            if phase is not _Phase.BLANK:
                break
            n += len(self._pieces[token])
        return n

    def _is_blank(self, token: int) -> bool:
        piece = self._pieces[token]
        n = self._n_blank()  # with this token, which is already one of ours
        return bool(piece) and not piece.strip(b"\n") and n <= _MAX_BLANK

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().partition("\n")[0]
            raise RequestError(f"the grammar fails: {reason}")


@cache
def _executor() -> Any:
    """Return threads of llguidance, which need no turn of Python's."""
    import llguidance

    return llguidance.LLExecutor(num_threads=2)
