"""What one pass computes: rows of tokens for some sequences, and what the pass is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..errors import InternalError, RequestError
from ..graphs.head import Results
from ..graphs.rows import PADDING, Tree, check_parents
from ..kinds import Kind

# Asked in the middle of a pass: whether it is cancelled, or whether it may pause.
Predicate = Callable[[], bool]
# Called at some moment of a pass, such as before its first graph.
Callback = Callable[[], object]


class Once:
    """Work that is done at the first call. is_due: whether that is yet to come."""

    def __init__(self, work: Callback) -> None:
        self._work, self.is_due = work, True

    def __call__(self) -> None:
        if self.is_due:
            self.is_due = False
            self._work()


# members of an Enum are slow to look up
_VERIFY = Kind.VERIFY
_LOGITS, _ARGMAX, _CANDIDATES = Results.LOGITS, Results.ARGMAX, Results.CANDIDATES


@lru_cache(maxsize=256)
def _tree_of(
    parents: bytes, shape: tuple[int, ...], n_seqs: int, n: int, lengths: tuple[int, ...]
) -> Tree:
    """Return the trees of a verify pass; the same ones come again and again.

    parents: I32, numpy shape `shape`, which broadcasts to [n_seqs, n].
    """
    given = np.frombuffer(parents, dtype=np.int32).reshape(shape)
    rows = np.array(np.broadcast_to(given, (n_seqs, n)))
    rows[np.arange(n) >= np.array(lengths)[:, None]] = PADDING
    return Tree(check_parents(rows), lengths)


@dataclass(slots=True)
class Batch:
    """One pass.

    tokens: I32, numpy shape [n_seqs, n_seq_tokens]; row i continues sequence slots[i].
    slots: distinct sequences in any order.
    kind: what the pass is for.
    all_rows: results for every row; otherwise for the last row of each sequence.
    greedy: the results are the device's argmax instead of logits.
    draws: the results are candidates instead of logits; numpy shape [n_out, DRAW_WORDS].
    tree: which row each row continues; only in a verify pass, see `verify`.
    """

    tokens: npt.NDArray[np.int32]
    slots: tuple[int, ...] = (0,)
    kind: Kind = Kind.DECODE
    all_rows: bool = False
    greedy: bool = False
    tree: Tree | None = None
    draws: npt.NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        """Check what would otherwise give wrong results."""
        n_seqs, n = len(self.slots), self.tokens.shape[0]
        if n_seqs != n:
            raise RequestError(f"token ids for {n} sequences, but {n_seqs} sequences are named")
        if n_seqs > 1 and len(set(self.slots)) < n_seqs:
            twice = next(slot for slot in self.slots if self.slots.count(slot) > 1)
            raise RequestError(f"sequence {twice} is named twice in one pass")
        if (self.tree is not None) != (self.kind is _VERIFY):
            has = "has a" if self.tree else "has no"
            raise InternalError(f"a {self.kind.value} pass {has} tree")

    @classmethod
    def verify(
        cls, tokens: npt.NDArray[np.int32], slots: Sequence[int],
        parents: npt.ArrayLike | None = None, lengths: Sequence[int] | None = None,
        greedy: bool = False, draws: npt.NDArray[np.int32] | None = None,
    ) -> Batch:  # fmt: skip
        """Return a pass over trees of drafted rows; it changes no sequence; all rows have results.

        tokens: I32, numpy shape [n_seqs, n_seq_tokens]. parents: same shape; an earlier row of the
        sequence, or -1 for a root, which continues what the sequence holds; None for chains.
        lengths: how many rows of each sequence are real, at least 1; the rest is padding, and what
        tokens and parents hold there does not matter. draws: for candidates of all rows, padding
        included.
        """
        n_seqs, n = tokens.shape
        given = tuple([n] * n_seqs if lengths is None else lengths)
        if len(given) != n_seqs or not all(1 <= length <= n for length in given):
            raise RequestError(f"lengths {list(given)} for {n_seqs} sequences of 1 to {n} rows")
        rows = np.arange(-1, n - 1) if parents is None else np.asarray(parents)
        tree = _tree_of(rows.astype(np.int32).tobytes(), rows.shape, n_seqs, n, given)
        if tree.is_ragged:
            tokens = np.where(tree.real, tokens, tokens[:, :1])  # some embedding that is finite
        return cls(tokens, tuple(slots), Kind.VERIFY, True, greedy, tree, draws)

    @property
    def results(self) -> Results:
        """What the pass returns for each row that has results."""
        if self.greedy:
            return _ARGMAX
        return _LOGITS if self.draws is None else _CANDIDATES

    def n_rows(self, seq: int) -> int:
        """Return how many rows of the seq-th sequence are real."""
        return self.tree.lengths[seq] if self.tree else int(self.tokens.shape[1])
